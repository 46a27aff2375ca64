"""Coordinates of a FASTA file's chains from ProMod3's structure database: `rebuild.py structure_db.dat X.fasta X.npz`;
labels of whole chains from such files: `rebuild.py labels.csv train.npz valid.npz test.npz`.

See README.md for the source. Needs numpy only. The database is little-endian: the number of chains as uint64 at byte
0x4d; per chain uint32 length + id, uint32 length + chain name, uint32 first row, uint16 residues, int16 first residue
number, three float32; then arrays, each a uint64 count followed by its rows: char sequence, uint16[4][3] N, CA, C and O
in 0.01 A, int16[2] phi and psi, uint16 solvent accessibility, uint16 residue depth, char DSSP state.
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
    """(first row, residues) of each chain by `ID_CHAIN`, and where the arrays begin."""
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
    """The arrays that are needed here, without a copy."""
    kinds = {"seq": "S1", "atoms": "<(4,3)u2", "angles": "<(2,)i2", "access": "<u2", "depth": "<u2", "dssp": "S1"}
    found = {}
    for name, kind in kinds.items():
        (count,) = struct.unpack_from("<Q", data, at)
        dtype = np.dtype(kind)
        found[name] = np.frombuffer(data, dtype, count, at + 8)
        at += 8 + count * dtype.itemsize
    return found


def cb_positions(atoms_L43: npt.NDArray[np.uint16], sequence: str) -> npt.NDArray[np.uint16]:
    """Cb [L, 3] in 0.1 A from N, CA and C by ideal geometry (Ca for glycine), shifted to be non-negative."""
    n, ca, c = (atoms_L43[:, k].astype(np.float64) / 100 for k in range(3))
    b, c = ca - n, c - ca
    cb = -0.58273431 * np.cross(b, c) + 0.56802827 * b - 0.54067466 * c + ca
    glycine = np.array([letter == "G" for letter in sequence])
    cb[glycine] = ca[glycine]
    return np.rint((cb - cb.min(0)) * 10).astype(np.uint16)


def main(database: Path, fasta: Path, out: Path) -> None:
    """Write the `.npz`; a chain that is missing or has another sequence ends the program."""
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
    """`id,helix,strand,fold` of all chains of some `.npz` files, sorted by id, as CSV.

    `helix` is the share of residues in the DSSP states H, G and I, `strand` that in E and B, with four digits. `fold`
    is `alpha` where a quarter of the residues or more is helix, but not strand; `beta` the other way round; `mixed`
    where both are; `irregular` where neither is.
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
