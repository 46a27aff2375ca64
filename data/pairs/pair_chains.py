"""Pairs of shipped chains with labels that follow from both: `pair_chains.py OUT_DIR`.

Writes `train.fasta`, `valid.fasta`, `test.fasta`, with records `A:B`, and `labels.csv`. A pair of two chains of
`data/contact` with the fold `alpha` or `beta` (`data/contact/labels.csv`) is `same` or `different`. No pair was observed:
the chains are not known to bind or to interact.

The pairs of a split are of its own chains, so no sequence of a test pair is in a training pair. As many alpha as beta
chains are taken, and every chain is in two `same` and two `different` pairs, so that neither a chain nor the sum of what
two chains say by themselves tells the label. The same seed gives the same files, byte for byte.
"""

import csv
import random
import sys
from pathlib import Path

CONTACT = Path(__file__).parents[1] / "contact"
LONGEST = {"train": 110, "valid": 120, "test": 120}
"""The most residues of a chain, so that the files are small."""

Pair = tuple[str, str, str]


def matched(alpha: list[str], beta: list[str], draw: random.Random) -> list[Pair]:
    """Return two `same` and two `different` pairs of each chain, in random order: A, B and label."""
    count = min(len(alpha), len(beta))
    alpha, beta = draw.sample(alpha, count), draw.sample(beta, count)
    pairs = [(ring[k - 1], ring[k], "same") for ring in (alpha, beta) for k in range(count)]
    pairs += [(alpha[k], beta[k - shift], "different") for shift in (0, 1) for k in range(count)]
    pairs = [(one, other, label) if draw.random() < 0.5 else (other, one, label) for one, other, label in pairs]
    draw.shuffle(pairs)
    return pairs


def main(out: Path) -> None:
    """Write all files."""
    with open(CONTACT / "labels.csv", encoding="utf-8", newline="") as file:
        of = {row["id"]: row for row in csv.DictReader(file)}
    out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    rows = [("id", "fold", "helix_difference")]
    for split in ("train", "valid", "test"):
        words = (CONTACT / f"{split}.fasta").read_text(encoding="utf-8").split()
        chains = {name[1:]: residues for name, residues in zip(words[::2], words[1::2], strict=True)}
        alpha, beta = (
            [name for name, residues in chains.items() if len(residues) <= LONGEST[split] and of[name]["fold"] == fold]
            for fold in ("alpha", "beta")
        )
        records = []
        for one, other, label in matched(alpha, beta, draw):
            records.append(f">{one}-{other}\n{chains[one]}:{chains[other]}\n")
            difference = abs(float(of[one]["helix"]) - float(of[other]["helix"]))
            rows.append((f"{one}-{other}", label, f"{difference:.4f}"))
        (out / f"{split}.fasta").write_text("".join(records), encoding="utf-8")
    with open(out / "labels.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
