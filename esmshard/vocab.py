"""The 33-token alphabet of ESM-1b, ESM-1v and ESM-2, its encoding and decoding, and other tracks. No torch.

The order is that of `esm.data.Alphabet.from_architecture("ESM-1b")` in fair-esm 2.0.0; `tests/test_vocab.py` compares
the two. A sequence is encoded as `<cls> residues <eos>`:

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
"""Residues of the linker by default: the 25 glycines of ESMFold (Lin et al. 2023, doi:10.1126/science.ade2574)."""
LONGEST_LINKER, WIDEST_GAP = 1_000, 100_000
BETWEEN = ":"
"""The symbol between the chains of a record, as in ColabFold and ESMFold."""
FORM = "linker:25, gap:512, linker:25,gap:512 or linker:break"

Linker = int | Literal["break"]


@dataclass(frozen=True)
class Chains:
    """How two neighbouring chains of a record are joined.

    >>> Chains(25, 512).text
    'linker:25,gap:512'
    """

    linker: Linker = LINKER
    """Number of glycines between two chains, or `break` for the one token of a chain break that some models have."""
    gap: int = 0
    """Number that is added to the positions of a chain for every chain before it, besides the linker."""

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
        ValueError: it is no such value; the message says what is expected.
    """
    read: dict[str, Linker] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition(":"))
        most = {"linker": LONGEST_LINKER, "gap": WIDEST_GAP}.get(key)
        breaks = key == "linker" and value == "break"
        if most is None or key in read or not (breaks or re.fullmatch("[0-9]{1,6}", value)):
            raise ValueError(f"one of {FORM} is expected")
        if not breaks and not (key == "linker") <= int(value) <= most:
            raise ValueError(f"{key} is {int(key == 'linker')} to {most:,}, not {value}")
        read[key] = "break" if breaks else int(value)
    return Chains(**read)  # type: ignore[arg-type]


def join_option(text: str | None) -> Chains | None:
    """Read `--join` of a command, or `join` of a function. None if it is not given. `UsageError` if it is no such
    value.
    """
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
"""The token between the chains of one record, which no released ESM-2 was trained on. It stands in token stores and in
batches, as often as the linker has residues; `esmshard.model.trunk` gives models what they read in its place. In ESM-C
and ESM3 its number is that of `|`, their chain break.
"""

STANDARD = "ACDEFGHIKLMNPQRSTVWY"
"""The 20 standard amino acids. Residues are drawn at random from these only."""
RARE = "XBUZO"
"""The letters of unknown residue, Asx, selenocysteine, Glx and pyrrolysine. ESM-2 was trained on them, so they are
kept.
"""
GAPS = "-."
RESIDUES = STANDARD + RARE
"""All letters that a single sequence may have after it was read."""

ALPHABET_HASH = hashlib.sha256("\n".join(TOKENS).encode()).hexdigest()[:16]
"""The identifier of the token numbering, for files with tokens."""

# bytes.translate converts the whole sequence in one C loop. A dictionary look-up for each letter is hundreds of times
# slower.
_TABLE = bytearray([UNK]) * 256
for _letter in RESIDUES + GAPS:
    _TABLE[ord(_letter)] = TOKENS.index(_letter)
_TABLE[ord(BETWEEN)] = SEPARATOR
_TABLE_BYTES = bytes(_TABLE)
# The letter of each token; zero for a token with more than one letter, and for a number without a token.
_BETWEEN = bytes([SEPARATOR])
_LETTERS = bytes(ord(t) if len(t) == 1 else 0 for t in TOKENS).ljust(256, b"\0")


def encode_residues(sequence: str, linker: int = LINKER) -> bytes:
    """Encode letters only, one byte a residue, without `<cls>` and `<eos>`. Each `:` between two chains becomes as many
    `SEPARATOR` tokens as the linker has residues.

    The caller has applied the symbol rules (`esmshard.io.sequences`); any other letter raises `ValueError`.

    >>> list(encode_residues("MKT"))
    [20, 15, 11]
    >>> list(encode_residues("MK:T", linker=2))
    [20, 15, 31, 31, 11]
    """
    tokens = sequence.encode("ascii", "replace").translate(_TABLE_BYTES)
    at = tokens.find(UNK)
    if at >= 0:
        raise ValueError(f"'{sequence[at]}' at position {at + 1} is not a residue; one of {RESIDUES} is expected")
    return tokens.replace(_BETWEEN, _BETWEEN * linker)


def encode(sequence: str, linker: int = LINKER) -> npt.NDArray[np.uint8]:
    """Encode one sequence of L residues as uint8 tokens [L + 2]: `<cls> ... <eos>`."""
    return np.frombuffer(bytes([CLS]) + encode_residues(sequence, linker) + bytes([EOS]), dtype=np.uint8)


def decode(tokens: npt.ArrayLike) -> str:
    """Decode tokens to letters. `<cls>`, `<eos>` and `<pad>` are left out, other special tokens are written in full,
    and the `SEPARATOR` tokens between two chains are one `:`.

    >>> decode(encode("MK:T"))
    'MK:T'
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.uint8:
        letters = tokens.tobytes().translate(_LETTERS)
        if b"\0" not in letters:
            return letters.decode("ascii")
    symbols, before = [], 0
    for t in np.asarray(tokens).ravel().tolist():
        if t not in (CLS, EOS, PAD) and not t == before == SEPARATOR:
            symbols.append(BETWEEN if t == SEPARATOR else TOKENS[t])
        before = t
    return "".join(symbols)


def is_residue(tokens: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which tokens of a sequence are residues of its chains: all but `<cls>`, `<eos>`, and those between chains.

    >>> is_residue(encode("MK:T", linker=2)).tolist()
    [False, True, True, False, False, True, False]
    """
    kept: npt.NDArray[np.bool_] = (tokens != SEPARATOR) & (tokens != CLS) & (tokens != EOS)
    return kept


def chain_spans(tokens: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Return where each chain of one sequence begins and ends (exclusive) in its tokens, with or without `<cls>` and
    `<eos>`.

    >>> chain_spans(encode("MK:T", linker=2))
    [(1, 3), (5, 6)]
    >>> chain_spans(encode("MK:T", linker=2)[1:-1])
    [(0, 2), (4, 5)]
    """
    steps = np.flatnonzero(np.diff(is_residue(tokens).astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(steps[::2], steps[1::2], strict=True))


@dataclass(frozen=True)
class Track:
    """Something that the models of a family read of each residue besides its amino acid.

    In a pack it is a tensor with one entry for each token (`esmshard.batch.TokenBatch.tracks`). `<cls>`, `<eos>`, and
    residues of which nothing is known, have the entry `unknown`.
    """

    name: str
    """The word for it in `data.tracks`, after `--track`, and in `TokenBatch.tracks`."""
    title: str
    """What it is, in the plural, for messages."""
    kind: Literal["letters", "coordinates", "codes"]
    """`letters`: for each residue one of `letters`, as its place among them, uint8 [T]. `coordinates`: N, CA and C in
    Ångström, float32 [T, 3, 3]. `codes`: for each residue a whole number below `n_codes`, int64 [T]."""
    unknown: float
    """The entry for what is not known: NaN for coordinates, a number for the others."""
    letters: str = ""
    """The letters, in the order of their numbers; only of the kind `letters`."""
    n_codes: int = 0
    """Number of codes; only of the kind `codes`."""
