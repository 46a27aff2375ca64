"""Make the training data of the demo model from three Debian packages.

    apt-get download promod3-data mmseqs2-examples metastudent-data
    for deb in promod3-data_*.deb mmseqs2-examples_*.deb metastudent-data_*.deb; do dpkg -x "$deb" debian; done
    python data/demo/build.py "$(find debian -name structure_db.dat)" "$(find debian -path '*BPO/goasp.fasta.psq')" \
        $(find debian -name DB.fasta.gz -o -name QUERY.fasta.gz) --out demo-data

The script writes `sequences.fasta.gz`, without sequences that are similar to the sample's `train`, `valid` or `test`.
So none of the three splits is closer to the training data than the others. The script needs numpy and the `mmseqs`
command (Debian: mmseqs2). The same input, seed and version of `mmseqs` give the same file.
"""

import argparse
import csv
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from starter import build as starter


def main() -> None:
    """Read, filter and write the sequences. Print the number of sequences after each filter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", type=Path, help="structure_db.dat of promod3-data")
    parser.add_argument("blast", type=Path, help="BPO/goasp.fasta.psq of metastudent-data")
    parser.add_argument("examples", type=Path, nargs="+", help="DB.fasta.gz and QUERY.fasta.gz of mmseqs2-examples")
    parser.add_argument("--out", type=Path, required=True, help="directory for the file; made where it is missing")
    parser.add_argument("--seed", type=int, default=1, help="which clusters are drawn (%(default)s)")
    parser.add_argument("--most", type=int, default=60_000, help="clusters to draw (%(default)s)")
    parser.add_argument("--identity", type=float, default=0.5, help="of the clusters (%(default)s)")
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

    chains = starter.usable_chains(given.database)
    with (starter.SAMPLE / "pool.tsv").open() as file:
        pool = sorted(chain for _, chain in list(csv.reader(file, delimiter="\t"))[1:] if chain in chains)
    records = [(chain, chains[chain]) for chain in pool]
    tell("chains of the pool", (s for _, s in records))
    for path in given.examples:
        records += starter.read_fasta(path)
    tell("and sequences of mmseqs2-examples", (s for _, s in records))
    records += starter.blast_sequences(given.blast)
    tell("and sequences of metastudent-data", (s for _, s in records))
    names: dict[str, str] = {}
    for name, sequence in records:
        if len(sequence) >= starter.SHORTEST and set(sequence) <= starter.RESIDUES:
            names.setdefault(sequence, name)
    tell(f"different ones of {starter.SHORTEST} residues or more, 20 amino acids and XBUZO", names)
    kept = starter.representatives(list(names), given.identity)
    tell(f"one of each cluster at {given.identity:.0%} identity", kept)
    drawn = sorted(kept, key=lambda sequence: starter.key(given.seed, sequence))[: given.most]
    tell("drawn", drawn)
    sample = [
        s for split in ("train", "valid", "test") for _, s in starter.read_fasta(starter.SAMPLE / f"{split}.fasta")
    ]
    dropped = starter.similar(drawn, sample)
    tell("similar to the sample, removed", dropped)
    left = [sequence for sequence in drawn if sequence not in dropped]
    tell("sequences left: sequences.fasta.gz", left)
    starter.write_fasta(given.out / "sequences.fasta.gz", ((names[s], s) for s in left))


if __name__ == "__main__":
    main()
