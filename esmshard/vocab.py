"""The 33-token alphabet of ESM-1b, ESM-1v and ESM-2, its encoding and decoding, and the class `Track`. No torch.

The tokens have the order of `esm.data.Alphabet.from_architecture("ESM-1b")` in fair-esm 2.0.0; `tests/test_vocab.py`
compares the two. A sequence is encoded as `<cls> residues <eos>`:

>>> encode("MKT").tolist()
[0, 20, 15, 11, 2]
>>> decode(encode("MKT"))
'MKT'
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from esmshard.errors import UsageError

LINKER = 25
"""Default length of the linker: the 25 glycines of ESMFold (Lin et al. 2023, doi:10.1126/science.ade2574)."""
LONGEST_LINKER, WIDEST_GAP = 1_000, 100_000
BETWEEN = ":"
"""The symbol between the chains of a record, as in ColabFold and ESMFold."""

Linker = int | Literal["break"]


@dataclass(frozen=True)
class Chains:
    """How two neighbouring chains of a record are joined.

    >>> Chains(25, 512).text
    'linker:25,gap:512'
    """

    linker: Linker = LINKER
    """Number of glycines between two chains, or `break` for the token of a chain break that some models have."""
    gap: int = 0
    """Number that is added to all positions after each linker."""

    @property
    def tokens(self) -> int:
        """Number of tokens between two chains."""
        return 1 if self.linker == "break" else self.linker

    @property
    def text(self) -> str:
        """The value of `--join`."""
        return f"linker:{self.linker}" + (f",gap:{self.gap}" if self.gap else "")

    def __str__(self) -> str:
        linker = "a chain break" if self.linker == "break" else f"a linker of {self.linker} G"
        return linker + (f" and a gap of {self.gap:,} positions" if self.gap else "")


def read_chains(text: str) -> Chains:
    """Read the value of `--join`.

    >>> read_chains("gap:512")
    Chains(linker=25, gap=512)

    Raises:
        ValueError: the text cannot be read; the message says what is expected.
    """
    values: dict[str, Linker] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition(":"))
        limit = {"linker": LONGEST_LINKER, "gap": WIDEST_GAP}.get(key)
        is_break = key == "linker" and value == "break"
        if limit is None or key in values or not (is_break or re.fullmatch("[0-9]{1,6}", value)):
            raise ValueError("one of linker:25, gap:512, linker:25,gap:512 or linker:break is expected")
        if not is_break and not (key == "linker") <= int(value) <= limit:
            raise ValueError(f"{key} is {int(key == 'linker')} to {limit:,}, not {value}")
        values[key] = "break" if is_break else int(value)
    return Chains(**values)  # type: ignore[arg-type]


def join_option(text: str | None) -> Chains | None:
    """Read `--join` of a command, or `join` of a function. None stays None. Raises `UsageError` for other texts."""
    try:
        return None if text is None else read_chains(text)
    except ValueError as error:
        raise UsageError(f"--join {text}: {error}") from None


TOKENS: tuple[str, ...] = (
    *("<cls>", "<pad>", "<eos>", "<unk>"),
    *"LAGVSERTIDPKQNFYMHWCXBUZO.-",
    *("<null_1>", "<mask>"),
)
CLS, PAD, EOS, UNK, MASK = (TOKENS.index(t) for t in ("<cls>", "<pad>", "<eos>", "<unk>", "<mask>"))
VOCAB_SIZE = len(TOKENS)
SEPARATOR = TOKENS.index("<null_1>")
"""The token between the chains of one record. Token stores and batches hold this token as often as the linker has
residues. `esmshard.model.trunk` replaces the token by what a model reads, since no released ESM-2 was trained on it.
ESM-C and ESM3 have their chain break `|` at the same number.
"""

STANDARD = "ACDEFGHIKLMNPQRSTVWY"
"""The 20 standard amino acids. Residues are drawn at random from these only."""
RARE = "XBUZO"
"""The letters of unknown residue, Asx, selenocysteine, Glx and pyrrolysine. ESM-2 was trained on these letters."""
GAPS = "-."
RESIDUES = STANDARD + RARE
"""All letters that a sequence may have after the symbol rules were applied."""

ALPHABET_HASH = hashlib.sha256("\n".join(TOKENS).encode()).hexdigest()[:16]
"""The identifier of the token numbering, for files with tokens."""

# bytes.translate converts the whole sequence in one C loop. A dictionary look-up for each letter is hundreds of times
# slower.
_TOKEN_OF = {ord(letter): TOKENS.index(letter) for letter in RESIDUES + GAPS} | {ord(BETWEEN): SEPARATOR}
_TABLE = bytes(_TOKEN_OF.get(byte, UNK) for byte in range(256))
_BETWEEN = bytes([SEPARATOR])
# The letter of each token; zero for a token with more than one letter, and for a number without a token.
_LETTERS = bytes(ord(t) if len(t) == 1 else 0 for t in TOKENS).ljust(256, b"\0")


def encode_residues(sequence: str, linker: int = LINKER) -> bytes:
    """Encode letters without `<cls>` and `<eos>`, one byte for each residue. Each `:` between two chains becomes as
    many `SEPARATOR` tokens as the linker has residues.

    The caller has applied the symbol rules (`esmshard.io.sequences`); another letter raises `ValueError`.

    >>> list(encode_residues("MKT"))
    [20, 15, 11]
    >>> list(encode_residues("MK:T", linker=2))
    [20, 15, 31, 31, 11]
    """
    tokens = sequence.encode("ascii", "replace").translate(_TABLE)
    if (at := tokens.find(UNK)) >= 0:
        raise ValueError(f"'{sequence[at]}' at position {at + 1} is not a residue; one of {RESIDUES} is expected")
    return tokens.replace(_BETWEEN, _BETWEEN * linker)


def encode(sequence: str, linker: int = LINKER) -> npt.NDArray[np.uint8]:
    """Encode one sequence of L residues as uint8 tokens [L + 2]: `<cls> ... <eos>`."""
    return np.frombuffer(bytes([CLS]) + encode_residues(sequence, linker) + bytes([EOS]), dtype=np.uint8)


def decode(tokens: npt.ArrayLike) -> str:
    """Decode tokens to letters. `<cls>`, `<eos>` and `<pad>` are left out. Other special tokens are written in full.
    The `SEPARATOR` tokens between two chains become one `:`.

    >>> decode(encode("MK:T"))
    'MK:T'
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.uint8:
        letters = tokens.tobytes().translate(_LETTERS)
        if b"\0" not in letters:
            return letters.decode("ascii")
    symbols, previous = [], 0
    for token in np.asarray(tokens).ravel().tolist():
        if token not in (CLS, EOS, PAD) and not token == previous == SEPARATOR:
            symbols.append(BETWEEN if token == SEPARATOR else TOKENS[token])
        previous = token
    return "".join(symbols)


def is_residue(tokens: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which tokens of a sequence are residues: all tokens but `<cls>`, `<eos>` and `SEPARATOR`.

    >>> is_residue(encode("MK:T", linker=2)).tolist()
    [False, True, True, False, False, True, False]
    """
    return (tokens != SEPARATOR) & (tokens != CLS) & (tokens != EOS)  # type: ignore[no-any-return]


def chain_spans(tokens: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Return where each chain of one sequence begins and ends (exclusive). The tokens may lack `<cls>` and `<eos>`.

    >>> chain_spans(encode("MK:T", linker=2))
    [(1, 3), (5, 6)]
    >>> chain_spans(encode("MK:T", linker=2)[1:-1])
    [(0, 2), (4, 5)]
    """
    bounds = np.flatnonzero(np.diff(is_residue(tokens).astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(bounds[::2], bounds[1::2], strict=True))


@dataclass(frozen=True)
class Track:
    """A property of residues that the models of a family read in addition to the amino acids.

    In a pack, a track is a tensor with one entry for each token (`esmshard.batch.TokenBatch.tracks`). `<cls>`, `<eos>`
    and residues without a known value have the entry `unknown`.
    """

    name: str
    """The word in `data.tracks`, after `--track`, and in `TokenBatch.tracks`."""
    title: str
    """The words for messages, in the plural."""
    kind: Literal["letters", "coordinates", "codes"]
    """`letters`: the index in `letters` of a residue's letter, uint8 [T]. `coordinates`: N, CA and C in Ångström,
    float32 [T, 3, 3]. `codes`: a whole number below `n_codes` for each residue, int64 [T]."""
    unknown: float
    """The entry for an unknown value: NaN for coordinates, a number for other tracks."""
    letters: str = ""
    """The letters of the kind `letters`, in the order of their numbers."""
    n_codes: int = 0
    """Number of codes of the kind `codes`."""
