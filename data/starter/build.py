"""Make the training data of the starter model from three Debian packages and the sample in `data/contact`.

    apt-get download promod3-data mmseqs2-examples metastudent-data
    for deb in promod3-data_*.deb mmseqs2-examples_*.deb metastudent-data_*.deb; do dpkg -x "$deb" debian; done
    python data/starter/build.py "$(find debian -name structure_db.dat)" "$(find debian -path '*BPO/goasp.fasta.psq')" \
        $(find debian -name DB.fasta.gz -o -name QUERY.fasta.gz) --out starter-data

The script writes `sequences.fasta.gz` (masked-LM training), `chains.fasta` and `.npz` (contact training), and
`valid_chains.fasta` and `.npz` (validation; format: data/README.md). The training files have no sequence that is
similar to a chain of the sample's `valid` and `test`, or of `valid_chains`. The script needs numpy and the `mmseqs`
command (Debian: mmseqs2). The same input, seed and version of `mmseqs` give the same files.
"""

import argparse
import csv
import gzip
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).resolve().parents[1]))
import rebuild

SAMPLE = Path(__file__).resolve().parents[1] / "contact"
STANDARD = set("ACDEFGHIKLMNPQRSTVWY")
RESIDUES = STANDARD | set("XBUZO")
LONGEST_CHAIN = 400
# The E-value of a shorter sequence is above the limit even for an identical protein, so the filter would not see it.
SHORTEST = 40
PEPTIDE_BOND = 1.6
"""The maximum distance in angstroms from C to the next N. A longer distance is a break in the chain."""
AMINO_ACID_TYPES = 10
BLAST_CODES = bytes.maketrans(bytes(range(28)), b"-ABCDEFGHIKLMNPQRSTVWXYZU*OJ")
"""A translation of NCBIstdaa, the residue codes of a BLAST database, to letters."""
E_VALUE = 1.0
"""The maximum E-value of a similar sequence. The usual limit is 1e-3 for a search in the 199 chains of `valid` and
`test`. Our file is 400 times larger, and E-values grow with the file size, so 1.0 is above the equivalent limit.
"""


def usable(sequence: str, atoms_L43: npt.NDArray[np.uint16]) -> bool:
    """Return whether a chain has a suitable length, enough kinds of amino acids, and no break in its backbone.

    `sequence` has L residues. `atoms_L43` has the positions of N, CA, C and O of each residue in 0.01 A.
    """
    if not SHORTEST <= len(sequence) <= LONGEST_CHAIN:
        return False
    if len(set(sequence)) < AMINO_ACID_TYPES or not set(sequence) <= STANDARD:
        return False
    n_L3, c_L3 = atoms_L43[:, 0].astype(np.float64), atoms_L43[:, 2].astype(np.float64)
    return bool((np.linalg.norm(n_L3[1:] - c_L3[:-1], axis=-1) < 100 * PEPTIDE_BOND).all())


def usable_chains(database: Path) -> dict[str, str]:
    """Return the sequence of each usable chain of ProMod3's structure database, by `ID_CHAIN`."""
    data = database.read_bytes()
    index, at = rebuild.chains(data)
    rows: dict[str, npt.NDArray[Any]] = rebuild.arrays(data, at)
    found = {}
    for name, (row, size) in index.items():
        sequence = rows["seq"][row : row + size].tobytes().decode()
        if usable(sequence, rows["atoms"][row : row + size]):
            found[name] = sequence
    return found


def read_fasta(path: Path) -> list[tuple[str, str]]:
    """Return the id and the upper-case sequence of each record in a plain or gzip FASTA file."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    records = []
    for entry in ("\n" + text).split("\n>")[1:]:
        header, *lines = entry.split("\n")
        records.append((header.split()[0], "".join("".join(lines).split()).upper()))
    return records


def blast_sequences(path: Path) -> list[tuple[str, str]]:
    """Return a numbered name and the sequence of each record in the `.psq` file of a BLAST protein database."""
    sequences = path.read_bytes().strip(b"\0").split(b"\0")
    return [(f"{path.stem}_{n}", s.translate(BLAST_CODES).decode()) for n, s in enumerate(sequences)]


def write_fasta(path: Path, records: Iterable[tuple[str, str]]) -> None:
    """Write each sequence on one line. A gzip file gets no time stamp, so the same records give the same bytes."""
    text = "".join(f">{name}\n{sequence}\n" for name, sequence in records)
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())


def key(*words: object) -> bytes:
    """Return a sort key for a random order that depends only on the words, on every machine."""
    return hashlib.sha256(" ".join(map(str, words)).encode()).digest()


def one_per_cluster(pool: Iterable[tuple[str, str]], seed: int) -> list[str]:
    """Return a random chain of each cluster, with the clusters in random order.

    `pool` has pairs (cluster, chain) in any order. The choice in a cluster depends only on the cluster and the seed.
    """
    members: dict[str, list[str]] = {}
    for cluster, chain in pool:
        members.setdefault(cluster, []).append(chain)
    # If the key of the chosen chain also ordered the clusters, large clusters would come first.
    order = sorted(members, key=lambda cluster: key(seed, "cluster", cluster))
    return [min(members[cluster], key=lambda chain: key(seed, "chain", chain)) for cluster in order]


def column(table: str, at: int) -> set[int]:
    """Return the sequence numbers in column `at` of a table that `mmseqs` wrote."""
    return {int(line.split("\t")[at]) for line in table.splitlines()}


def mmseqs(*arguments: str | Path) -> None:
    """Run `mmseqs` on one core. If it fails, exit with the last 2,000 characters of its output."""
    command = ["mmseqs", *map(str, arguments), "--threads", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with code {done.returncode}:\n{done.stdout[-2000:]}")


def write_numbered(path: Path, sequences: list[str]) -> Path:
    """Write a FASTA file with numbers as ids, because `mmseqs` shortens ids such as `sp|P12345|X_HUMAN`."""
    write_fasta(path, ((str(k), sequence) for k, sequence in enumerate(sequences)))
    return path


def similar(sequences: list[str], others: list[str]) -> set[str]:
    """Return the sequences that are similar to one of `others`, for any alignment coverage."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        query = write_numbered(directory / "query.fasta", others)
        target = write_numbered(directory / "target.fasta", sequences)
        hits = directory / "hits.tsv"
        # By default a query gets at most 300 hits, and a large family would be removed only in part.
        limits = ("-s", "7.5", "-e", str(E_VALUE), "--max-seqs", str(len(sequences)), "--format-output", "query,target")
        mmseqs("easy-search", query, target, hits, directory / "work", *limits)
        found = {sequences[k] for k in column(hits.read_text(), 1)}
    return found | (set(sequences) & set(others))  # The search ignores sequences of low complexity.


def representatives(sequences: list[str], identity: float) -> set[str]:
    """Return one sequence of each cluster. `sequences` has no duplicates.

    `identity` is the minimum fraction of equal residues in a cluster, 0 to 1, over 80% of both sequences.
    `easy-linclust` takes minutes for half a million sequences, but finds fewer similar pairs than `easy-cluster`.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        fasta = write_numbered(directory / "all.fasta", sequences)
        limits = ("--min-seq-id", str(identity), "-c", "0.8")
        mmseqs("easy-linclust", fasta, directory / "out", directory / "work", *limits)
        return {sequences[k] for k in column((directory / "out_cluster.tsv").read_text(), 0)}


def write_chains(fasta: Path, names: list[str], chains: dict[str, str], database: Path) -> None:
    """Write the FASTA file of the chains in `names`, and the `.npz` file with their coordinates."""
    write_fasta(fasta, ((name, chains[name]) for name in sorted(names)))
    rebuild.main(database, fasta, fasta.with_suffix(".npz"))


def main() -> None:
    """Read, filter and write the sequences. Print the number of sequences after each filter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", type=Path, help="structure_db.dat of promod3-data")
    parser.add_argument("blast", type=Path, help="BPO/goasp.fasta.psq of metastudent-data")
    parser.add_argument("examples", type=Path, nargs="+", help="DB.fasta.gz and QUERY.fasta.gz of mmseqs2-examples")
    parser.add_argument("--out", type=Path, required=True, help="directory for the files; made where it is missing")
    parser.add_argument(
        "--seed", type=int, default=1, help="which chain of a cluster, and which are held out (%(default)s)"
    )
    parser.add_argument("--held-out", type=int, default=150, help="clusters for valid_chains (%(default)s)")
    parser.add_argument("--identity", type=float, default=0.5, help="of the sequence clusters (%(default)s)")
    parser.add_argument("--most", type=int, default=80_000, help="sequence clusters to draw (%(default)s)")
    given = parser.parse_args()
    if not shutil.which("mmseqs"):
        parser.error("the command 'mmseqs' is missing; install MMseqs2 (Debian: apt-get install mmseqs2)")
    for path in (given.database, given.blast, *given.examples):
        if not path.is_file():
            parser.error(f"{path}: no such file; see the top of this script for where to get it")
    given.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()

    def tell(what: str, sequences: Iterable[str]) -> None:
        lengths = [len(sequence) for sequence in sequences]
        print(f"{time.monotonic() - start:6.0f} s  {len(lengths):6} {what}, {sum(lengths)} residues", flush=True)

    sample = [record for split in ("valid", "test") for record in read_fasta(SAMPLE / f"{split}.fasta")]
    with (SAMPLE / "pool.tsv").open() as file:
        pool = [(cluster, chain) for cluster, chain in list(csv.reader(file, delimiter="\t"))[1:]]
    chains = usable_chains(given.database)
    tell("usable chains in the structure database", chains.values())
    pool = [(cluster, chain) for cluster, chain in pool if chain in chains]
    tell("of them in the pool", (chains[chain] for _, chain in pool))
    examples = [record for path in given.examples for record in read_fasta(path)]
    tell("sequences of mmseqs2-examples", (sequence for _, sequence in examples))

    records = [(chain, chains[chain]) for _, chain in sorted(pool)] + examples
    records = [(name, s) for name, s in records if len(s) >= SHORTEST and set(s) <= RESIDUES]
    tell(f"of pool and examples, {SHORTEST} residues or more, 20 amino acids and XBUZO", (s for _, s in records))
    # Each sequence occurs once from here on. The output file gets the name of its first record.
    names: dict[str, str] = {}
    for name, sequence in records:
        names.setdefault(sequence, name)
    tell("different sequences", names)

    dropped = similar(list(names), [sequence for _, sequence in sample])
    tell("similar to the sample's valid or test, removed", dropped)
    pool = [(cluster, chain) for cluster, chain in pool if chains[chain] not in dropped]
    chosen = one_per_cluster(pool, given.seed)
    tell("chains left in the pool", (chains[chain] for _, chain in pool))
    tell("chains, one of each cluster", (chains[chain] for chain in chosen))
    held_out = chosen[: given.held_out]
    near = similar([s for s in names if s not in dropped], [chains[chain] for chain in held_out])
    tell("similar to the chains held out, removed", near)
    dropped |= near

    write_chains(given.out / "valid_chains.fasta", held_out, chains, given.database)
    training = [chain for chain in chosen if chains[chain] not in dropped]
    write_chains(given.out / "chains.fasta", training, chains, given.database)
    for name, sequence in blast_sequences(given.blast):
        if len(sequence) >= SHORTEST and set(sequence) <= RESIDUES:
            names.setdefault(sequence, name)
    left = [sequence for sequence in names if sequence not in dropped]
    tell("sequences left, with those of metastudent-data", left)
    clusters = representatives(left, given.identity)
    tell(f"one of each cluster at {given.identity:.0%} identity", clusters)
    drawn = sorted(clusters, key=lambda sequence: key(given.seed, sequence))[: given.most]
    tell("drawn", drawn)
    dropped = similar(drawn, [sequence for _, sequence in sample] + [chains[chain] for chain in held_out])
    tell("similar to the sample's valid or test, or to the chains held out, removed", dropped)
    kept = [sequence for sequence in drawn if sequence not in dropped]
    tell("sequences: sequences.fasta.gz", kept)
    write_fasta(given.out / "sequences.fasta.gz", ((names[sequence], sequence) for sequence in kept))


if __name__ == "__main__":
    main()
