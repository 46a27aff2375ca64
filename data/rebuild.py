"""Make the files of the sample data from ProMod3's structure database (see README.md).

    python data/rebuild.py structure_db.dat X.fasta X.npz                     coordinates of the chains in X.fasta
    python data/rebuild.py labels.csv train.npz valid.npz test.npz            labels of all chains in these files

The script needs only numpy. The database is little-endian. At byte 0x4d it has the number of chains (uint64), and then
for each chain: id and chain name (each a uint32 length and the text), first row (uint32), number of residues (uint16),
first residue number (int16), and three float32. Arrays follow, each with a row count (uint64) and the rows: sequence
(char), N, CA, C and O in 0.01 A (uint16[4][3]), phi and psi (int16[2]), solvent accessibility (uint16), residue depth
(uint16), and DSSP state (char).
"""

import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HEADER = 0x4D


def chains(data: bytes) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the first row and the number of residues of each chain by `ID_CHAIN`, and the byte of the first array."""
    (count,) = struct.unpack_from("<Q", data, HEADER)
    at, found = HEADER + 8, {}
    for _ in range(count):
        words = []
        for _ in range(2):
            (length,) = struct.unpack_from("<I", data, at)
            words.append(data[at + 4 : at + 4 + length].decode())
            at += 4 + length
        row, size, _first = struct.unpack_from("<IHh", data, at)
        at += 8 + 12
        found["_".join(words)] = (row, size)
    return found, at


def arrays(data: bytes, at: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of the database by name, without a copy. `at` is the byte of the first array."""
    kinds = {"seq": "S1", "atoms": "<(4,3)u2", "angles": "<(2,)i2", "access": "<u2", "depth": "<u2", "dssp": "S1"}
    found = {}
    for name, kind in kinds.items():
        (count,) = struct.unpack_from("<Q", data, at)
        dtype = np.dtype(kind)
        found[name] = np.frombuffer(data, dtype, count, at + 8)
        at += 8 + count * dtype.itemsize
    return found


def cb_positions(atoms_L43: npt.NDArray[np.uint16], sequence: str) -> npt.NDArray[np.uint16]:
    """Return Cb positions [L, 3] in 0.1 A, computed from N, CA and C in 0.01 A by ideal geometry (CA for glycine).

    All positions are shifted, so that no coordinate is negative.
    """
    n, ca, c = (atoms_L43[:, k].astype(np.float64) / 100 for k in range(3))
    b, c = ca - n, c - ca
    cb = -0.58273431 * np.cross(b, c) + 0.56802827 * b - 0.54067466 * c + ca
    glycine = np.array([letter == "G" for letter in sequence])
    cb[glycine] = ca[glycine]
    return np.rint((cb - cb.min(0)) * 10).astype(np.uint16)


def main(database: Path, fasta: Path, out: Path) -> None:
    """Write the `.npz` file. Exit if a chain is missing in the database or has another sequence there."""
    data = database.read_bytes()
    index, at = chains(data)
    rows = arrays(data, at)
    names, seqs, dssp8, cb = [], [], [], []
    for entry in fasta.read_text().split(">")[1:]:
        name, *lines = entry.split("\n")
        sequence = "".join(lines)
        if name not in index:
            sys.exit(f"{database}: has no chain {name}")
        row, size = index[name]
        chain = slice(row, row + size)
        if rows["seq"][chain].tobytes().decode() != sequence:
            sys.exit(f"{database}: chain {name} has another sequence than in {fasta}")
        names.append(name)
        seqs.append(sequence)
        dssp8.append(rows["dssp"][chain].tobytes().decode())
        cb.append(cb_positions(rows["atoms"][chain], sequence))
    offsets = np.concatenate([[0], np.cumsum([len(s) for s in seqs])]).astype(np.int32)
    np.savez_compressed(out, names=names, seqs=seqs, dssp8=dssp8, offsets=offsets, cb_dA=np.concatenate(cb))
    print(f"{out}: {len(names)} chains, {offsets[-1]} residues")


def label_table(files: Sequence[Path]) -> str:
    """Return a CSV table `id,helix,strand,fold` of all chains in `.npz` files, sorted by id.

    `helix` is the fraction of residues in the DSSP states H, G and I, and `strand` the fraction in E and B. `fold` is
    `alpha` if only `helix` is at least 0.25, `beta` if only `strand` is at least 0.25, `mixed` if both are, and
    `irregular` if neither is.
    """
    lines = []
    for file in files:
        with np.load(file) as arrays:
            for name, states in zip(arrays["names"], arrays["dssp8"], strict=True):
                helix, strand = (sum(map(states.count, kinds)) / len(states) for kinds in ("HGI", "EB"))
                fold = {(1, 0): "alpha", (0, 1): "beta", (1, 1): "mixed", (0, 0): "irregular"}
                lines.append(f"{name},{helix:.4f},{strand:.4f},{fold[helix >= 0.25, strand >= 0.25]}")
    return "\n".join(["id,helix,strand,fold", *sorted(lines)]) + "\n"


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    given = [Path(argument) for argument in sys.argv[1:]]
    if given[0].suffix == ".csv":
        given[0].write_text(label_table(given[1:]))
    else:
        main(*given)
