"""Encodes and decodes sequences with the 33 tokens of ESM-1b, ESM-1v and ESM-2.

The tokens have the same order as in fair-esm 2.0.0 (`esm.data.Alphabet.from_architecture("ESM-1b")`). This module does
not import torch. A sequence is encoded as `<cls> residues <eos>`:

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
"""The default number of glycines between two chains, as in ESMFold (Lin et al. 2023, doi:10.1126/science.ade2574)."""
LONGEST_LINKER, WIDEST_GAP = 1_000, 100_000
BETWEEN = ":"
"""The symbol between two chains in the text of a sequence, as in ColabFold and ESMFold."""

Linker = int | Literal["break"]


@dataclass(frozen=True)
class Chains:
    """Settings for joining the chains of a protein complex into one sequence.

    >>> Chains(25, 512).text
    'linker:25,gap:512'
    """

    linker: Linker = LINKER
    """Number of glycines between two chains, or `break` for the chain-break token of ESM-C and ESM3."""
    gap: int = 0
    """A number that each linker adds to the positions of all later tokens in the sequence."""

    @property
    def tokens(self) -> int:
        """The number of tokens between two chains."""
        return 1 if self.linker == "break" else self.linker

    @property
    def text(self) -> str:
        """The settings as a value of the option `--join`, such as `linker:25,gap:512`."""
        return f"linker:{self.linker}" + (f",gap:{self.gap}" if self.gap else "")

    def __str__(self) -> str:
        linker = "a chain break" if self.linker == "break" else f"a linker of {self.linker} G"
        return linker + (f" and a gap of {self.gap:,} positions" if self.gap else "")


def read_chains(text: str) -> Chains:
    """Parse a value of the option `--join`. Raises `ValueError` for an invalid value.

    >>> read_chains("gap:512")
    Chains(linker=25, gap=512)
    """
    values: dict[str, Linker] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition(":"))
        limit = {"linker": LONGEST_LINKER, "gap": WIDEST_GAP}.get(key)
        is_break = key == "linker" and value == "break"
        if limit is None or key in values or not (is_break or re.fullmatch("[0-9]{1,6}", value)):
            raise ValueError("give a value such as `linker:25`, `gap:512`, `linker:25,gap:512` or `linker:break`")
        if not is_break and not (key == "linker") <= int(value) <= limit:
            raise ValueError(f"{key} must be {int(key == 'linker')} to {limit:,}, not {value}")
        values[key] = "break" if is_break else int(value)
    return Chains(**values)  # type: ignore[arg-type]


def join_option(text: str | None) -> Chains | None:
    """Parse the option `--join`, or return None if `text` is None. Raises `UsageError` for an invalid text."""
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
"""The token between two chains of a protein complex, once for each residue of the linker. `esmshard.model.trunk`
replaces this token by glycine, because no released ESM-2 was trained on it. With `linker:break`, ESM-C and ESM3 read it
as their chain-break token."""

STANDARD = "ACDEFGHIKLMNPQRSTVWY"
"""The letters of the 20 standard amino acids."""
RARE = "XBUZO"
"""X (unknown residue), B (Asx), U (selenocysteine), Z (Glx) and O (pyrrolysine). ESM-2 was trained on these letters."""
GAPS = "-."
RESIDUES = STANDARD + RARE
"""All letters that a sequence can have after `esmshard.io.sequences` has read it."""

ALPHABET_HASH = hashlib.sha256("\n".join(TOKENS).encode()).hexdigest()[:16]
"""A hash of all tokens in order. Files that contain tokens store this hash."""

# `bytes.translate` is hundreds of times faster than a dictionary look-up for each letter.
_TOKEN_OF = {ord(letter): TOKENS.index(letter) for letter in RESIDUES + GAPS} | {ord(BETWEEN): SEPARATOR}
_TABLE = bytes(_TOKEN_OF.get(byte, UNK) for byte in range(256))
_BETWEEN = bytes([SEPARATOR])
# The letter of each token, as a byte; a zero byte for tokens such as <cls>, and for numbers that are no token.
_LETTERS = bytes(ord(t) if len(t) == 1 else 0 for t in TOKENS).ljust(256, b"\0")


def encode_residues(sequence: str, linker: int = LINKER) -> bytes:
    """Encode a sequence as tokens of one byte each, without `<cls>` and `<eos>`. Each `:` between two chains becomes
    `linker` tokens `SEPARATOR`. Raises `ValueError` for a letter that is not in `RESIDUES` or `GAPS`.

    >>> list(encode_residues("MKT"))
    [20, 15, 11]
    >>> list(encode_residues("MK:T", linker=2))
    [20, 15, 31, 31, 11]
    """
    tokens = sequence.encode("ascii", "replace").translate(_TABLE)
    if (at := tokens.find(UNK)) >= 0:
        raise ValueError(f"'{sequence[at]}' at position {at + 1} is not a residue; use the letters {RESIDUES}")
    return tokens.replace(_BETWEEN, _BETWEEN * linker)


def encode(sequence: str, linker: int = LINKER) -> npt.NDArray[np.uint8]:
    """Encode one sequence as tokens `<cls> ... <eos>`, uint8 [L + 2]. `encode_residues` explains `linker`."""
    return np.frombuffer(bytes([CLS]) + encode_residues(sequence, linker) + bytes([EOS]), dtype=np.uint8)


def decode(tokens: npt.ArrayLike) -> str:
    """Convert tokens to a sequence, without `<cls>`, `<eos>` and `<pad>`. Other special tokens keep their names, such
    as `<mask>`. The `SEPARATOR` tokens between two chains become one `:`.

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
    """Return False for the tokens `<cls>`, `<eos>` and `SEPARATOR`, and True for all other tokens, such as residues.

    >>> is_residue(encode("MK:T", linker=2)).tolist()
    [False, True, True, False, False, True, False]
    """
    return (tokens != SEPARATOR) & (tokens != CLS) & (tokens != EOS)  # type: ignore[no-any-return]


def chain_spans(tokens: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Return the token range `(start, end)` of each chain in one sequence. The end is exclusive. The tokens `<cls>` and
    `<eos>` may be absent.

    >>> chain_spans(encode("MK:T", linker=2))
    [(1, 3), (5, 6)]
    >>> chain_spans(encode("MK:T", linker=2)[1:-1])
    [(0, 2), (4, 5)]
    """
    bounds = np.flatnonzero(np.diff(is_residue(tokens).astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(bounds[::2], bounds[1::2], strict=True))


@dataclass(frozen=True)
class Track:
    """A residue property that a model can read in addition to the amino acids, such as structure letters in SaProt.

    A track has one entry for each token. The entry for `<cls>`, `<eos>` and residues without a value is `unknown`.
    """

    name: str
    """The name of the track in the recipe key `data.tracks`, in the option `--track`, and in `TokenBatch.tracks`."""
    title: str
    """The plural noun for this track in messages, such as `structure tokens`."""
    kind: Literal["letters", "coordinates", "codes"]
    """The type of an entry. `letters`: an index in the string `letters`, uint8 [T]. `coordinates`: positions of N, CA
    and C in Ångström, float32 [T, 3, 3]. `codes`: a whole number below `n_codes`, int64 [T]."""
    unknown: float
    """The entry of a residue whose value is unknown. For coordinates, the entry is NaN."""
    letters: str = ""
    """The possible letters of a track of kind `letters`."""
    n_codes: int = 0
    """The number of possible codes in a track of kind `codes`."""
    replaces_residues: bool = False
    """Whether the model reads this track in place of the amino acids."""
