"""The 33-token alphabet of ESM-1b, ESM-1v and ESM-2: encode and decode. No torch.

The order is that of `esm.data.Alphabet.from_architecture("ESM-1b")` in fair-esm 2.0.0; `tests/test_vocab.py` compares
the two. A sequence is encoded as `<cls> residues <eos>`:

>>> encode("MKT").tolist()
[0, 20, 15, 11, 2]
>>> decode(encode("MKT"))
'MKT'
"""

import hashlib

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
"""The 20 standard amino acids: the only residues that are ever drawn at random."""
RARE = "XBUZO"
"""Unknown, Asx, selenocysteine, Glx, pyrrolysine: ESM-2 saw them in training, so they are kept."""
GAPS = "-."
RESIDUES = STANDARD + RARE
"""Every letter that a single sequence may hold once it has been read."""

ALPHABET_HASH = hashlib.sha256("\n".join(TOKENS).encode()).hexdigest()[:16]
"""Names the token numbering in files that hold tokens."""

# bytes.translate does the whole sequence in one C loop: hundreds of times the speed of a dictionary look-up a letter.
_TABLE = bytearray([UNK]) * 256
for _letter in RESIDUES + GAPS:
    _TABLE[ord(_letter)] = TOKENS.index(_letter)
_TABLE_BYTES = bytes(_TABLE)
# And back; zero for whatever is spelled with more than one letter or none.
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
    """Tokens back to letters. `<cls>`, `<eos>` and `<pad>` are dropped, other special tokens are spelled out."""
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.uint8:
        letters = tokens.tobytes().translate(_LETTERS)
        if b"\0" not in letters:
            return letters.decode("ascii")
    return "".join(TOKENS[t] for t in np.asarray(tokens).ravel().tolist() if t not in (CLS, EOS, PAD))
