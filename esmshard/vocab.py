"""The 33-token alphabet of ESM-1b, ESM-1v and ESM-2, its encoding and decoding, and other tracks. No torch.

The order is that of `esm.data.Alphabet.from_architecture("ESM-1b")` in fair-esm 2.0.0; `tests/test_vocab.py` compares
the two. A sequence is encoded as `<cls> residues <eos>`:

>>> encode("MKT").tolist()
[0, 20, 15, 11, 2]
>>> decode(encode("MKT"))
'MKT'
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

TOKENS: tuple[str, ...] = (
    *("<cls>", "<pad>", "<eos>", "<unk>"),
    *"LAGVSERTIDPKQNFYMHWCXBUZO.-",
    *("<null_1>", "<mask>"),
)
CLS, PAD, EOS, UNK, MASK = (TOKENS.index(t) for t in ("<cls>", "<pad>", "<eos>", "<unk>", "<mask>"))
VOCAB_SIZE = len(TOKENS)

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
_TABLE_BYTES = bytes(_TABLE)
# The letter of each token; zero for a token with more than one letter, and for a number without a token.
_LETTERS = bytes(ord(t) if len(t) == 1 else 0 for t in TOKENS).ljust(256, b"\0")


def encode_residues(sequence: str) -> bytes:
    """Encode letters only, one byte a residue, without `<cls>` and `<eos>`.

    The caller has applied the symbol rules (`esmshard.data.fasta.fasta_reader`); any other letter raises `ValueError`.

    >>> list(encode_residues("MKT"))
    [20, 15, 11]
    """
    tokens = sequence.encode("ascii", "replace").translate(_TABLE_BYTES)
    at = tokens.find(UNK)
    if at >= 0:
        raise ValueError(f"'{sequence[at]}' at position {at + 1} is not a residue; one of {RESIDUES} is expected")
    return tokens


def encode(sequence: str) -> npt.NDArray[np.uint8]:
    """Encode one sequence of L residues as uint8 tokens [L + 2]: `<cls> ... <eos>`."""
    return np.frombuffer(bytes([CLS]) + encode_residues(sequence) + bytes([EOS]), dtype=np.uint8)


def decode(tokens: npt.ArrayLike) -> str:
    """Decode tokens to letters. `<cls>`, `<eos>` and `<pad>` are left out, other special tokens are written in full."""
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.uint8:
        letters = tokens.tobytes().translate(_LETTERS)
        if b"\0" not in letters:
            return letters.decode("ascii")
    return "".join(TOKENS[t] for t in np.asarray(tokens).ravel().tolist() if t not in (CLS, EOS, PAD))


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
