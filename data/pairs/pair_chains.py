"""Make artificial pairs of shipped chains with labels: `pair_chains.py OUT_DIR`.

The script writes `train.fasta`, `valid.fasta` and `test.fasta` with records `A:B`, and `labels.csv`. The labels compare
the secondary structures of the two chains in `data/contact/labels.csv`. The chains are not known to interact. Both
chains of a pair are in the same split, so no sequence of a test pair is in a training pair. Every chain is in four
pairs. The same seed gives the same bytes.
"""

import csv
import random
import sys
from pathlib import Path

CONTACT = Path(__file__).parents[1] / "contact"
LONGEST = {"train": 86, "valid": 110, "test": 110}
"""The maximum chain length in residues. It keeps the files small."""


def main(out: Path) -> None:
    """Write all files."""
    with open(CONTACT / "labels.csv", encoding="utf-8", newline="") as file:
        of = {row["id"]: row for row in csv.DictReader(file)}
    out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    rows = [("id", "helix_difference", "fold")]
    for split, longest in LONGEST.items():
        words = (CONTACT / f"{split}.fasta").read_text(encoding="utf-8").split()
        residues = {name[1:]: letters for name, letters in zip(words[::2], words[1::2], strict=True)}
        ring = [name for name, letters in residues.items() if len(letters) <= longest]
        draw.shuffle(ring)
        records = []
        for one, other in [(ring[k - far], ring[k]) for far in (1, 2) for k in range(len(ring))]:
            records.append(f">{one}-{other}\n{residues[one]}:{residues[other]}\n")
            difference = abs(float(of[one]["helix"]) - float(of[other]["helix"]))
            fold = "same" if of[one]["fold"] == of[other]["fold"] else "different"
            rows.append((f"{one}-{other}", f"{difference:.4f}", fold))
        (out / f"{split}.fasta").write_text("".join(records), encoding="utf-8")
    with open(out / "labels.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
