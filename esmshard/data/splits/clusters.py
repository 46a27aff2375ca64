"""Clusters of similar sequences: read from a table of MMseqs2, or computed by MMseqs2, or by pairwise alignment of
candidates if MMseqs2 is not installed.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from esmshard.data.splits.assignment import components
from esmshard.data.splits.leakage import ComparedRecords, word_pairs
from esmshard.errors import InputError
from esmshard.io.tables import first_three, read_text
from esmshard.progress import Progress
from esmshard.vocab import STANDARD, decode

OPTIONS = ("--min-seq-id", "0.3", "-c", "0.8", "--cov-mode", "0", "-s", "7.5")
"""Options of MMseqs2: 30% identity over 80% of both sequences, at the highest sensitivity of the search."""

IDENTITY, COVERAGE = 0.3, 0.8
"""What two sequences of one cluster have: identical residues of all columns of their alignment, and the share of each
sequence that is aligned. MMseqs2 has the same limits in `OPTIONS`.
"""
MOST_ALIGNED = 100_000
"""Most pairs that are aligned: some minutes on one core."""

_INSTALL = "install it (apt-get install mmseqs2, or conda install -c bioconda mmseqs2), or pass --clusters FILE.tsv"


@dataclass(frozen=True)
class Clusters:
    """The cluster of each of N records."""

    names: list[str]
    """For each record, the id of the representative of its cluster; for joined clusters, the
    alphabetically first id.
    """
    source: str
    """Source of the clusters: the file, or the program with its version and options."""
    notices: list[str]
    """Sentences about clusters that were joined or ignored."""


def read_clusters(path: Path, ids: Sequence[str]) -> Clusters:
    """Read a file of `representative<TAB>member` lines, such as MMseqs2's `_cluster.tsv`, plain or compressed.

    Clusters that share a record are joined. MMseqs2 shortens `sp|P69905|HBA_HUMAN` to `P69905`, so a record whose id is
    missing is searched under its accession too.

    Args:
        path: the file.
        ids: ids of the N records.

    Raises:
        InputError: a line cannot be read, or records are in no cluster; the message names them.
    """
    representatives: list[str] = []
    members: list[str] = []
    for number, line in enumerate(read_text(path, "the _cluster.tsv of MMseqs2").split("\n"), 1):
        cells = [cell.strip() for cell in line.split("\t")]
        if cells == [""]:
            continue
        if len(cells) != 2 or not all(cells):
            raise InputError(f"{path}:{number}: is not 'representative<TAB>member'; give the _cluster.tsv of MMseqs2")
        representatives.append(cells[0])
        members.append(cells[1])
    names, absent, used = [], [], set()
    cluster = dict(zip(members, components(representatives, members), strict=True)) if members else {}
    for record_id in ids:
        name = record_id
        if name not in cluster and record_id.startswith(("sp|", "tr|")):
            name = record_id.split("|")[1]
        if name in cluster:
            names.append(cluster[name])
            used.add(name)
        else:
            absent.append(record_id)
    if absent:
        raise InputError(
            f"{path}: {len(absent):,} of {len(ids):,} records are in no cluster ({first_three(absent, str)}); cluster "
            "the very file that is split"
        )
    notices = []
    first: dict[str, str] = {}
    several = {m for m, r in zip(members, representatives, strict=True) if first.setdefault(m, r) != r}
    if several:
        named = first_three(sorted(several), str)
        notices.append(f"{path}: {len(several):,} in several clusters ({named}), which were joined")
    surplus = [member for member in cluster if member not in used]
    if surplus:
        notices.append(f"{path}: {len(surplus):,} that are no records were passed over ({first_three(surplus, str)})")
    return Clusters(names, str(path), notices)


def align_clusters(records: ComparedRecords) -> Clusters:
    """Cluster sequences without MMseqs2, by single linkage of pairs with IDENTITY and COVERAGE.

    Pairs with a 5-mer in common are aligned (Smith-Waterman of Biopython, BLOSUM62, gaps 12 and 1). If 300 residues
    agree in a share p, 300 * p**5 common 5-mers are expected: 9 at 50% identity, 3 at 40%, and fewer than 1 at 30%. So
    most pairs below about 40% identity are not seen.

    Raises:
        InputError: there are more candidates than MOST_ALIGNED.
    """
    import Bio
    from Bio.Align import PairwiseAligner  # slow to import
    from scipy.cluster.hierarchy import DisjointSet

    aligner = PairwiseAligner(scoring="blastp")  # type: ignore[no-untyped-call]
    aligner.mode = "local"
    length_N = [len(records.residues(n)) for n in range(records.count)]
    pairs = []
    for one, other in word_pairs(records):
        if min(length_N[one], length_N[other]) >= COVERAGE * max(length_N[one], length_N[other]):
            pairs.append((one, other))
        if len(pairs) > MOST_ALIGNED:
            raise InputError(f"clusters of more than {MOST_ALIGNED:,} similar pairs need MMseqs2; {_INSTALL}")
    joined = DisjointSet(range(records.count))

    def text(n: int) -> str:
        return re.sub(f"[^{STANDARD}]", "X", decode(records.residues(n)))

    with Progress("align", len(pairs)) as progress:
        for done, (one, other) in enumerate(pairs, 1):
            progress.update(done, "")
            if joined.connected(one, other):
                continue
            found = aligner.align(text(one), text(other))  # type: ignore[no-untyped-call]
            if not len(found):
                continue
            spans = np.abs(np.diff(found[0].coordinates[:, [0, -1]]))[:, 0]
            covered = min(spans[0] / length_N[one], spans[1] / length_N[other])
            if covered >= COVERAGE and found[0].counts().identities >= IDENTITY * found[0].length:
                joined.merge(one, other)
    limits = f"{IDENTITY:.0%} identity over {COVERAGE:.0%} of both sequences"
    return Clusters(
        [records.id(joined[n]) for n in range(records.count)],
        f"alignment of pairs with a common 5-mer (Biopython {Bio.__version__}, BLOSUM62), {limits}",
        [
            f"clusters are made without MMseqs2, which is not installed: {limits}, among pairs with a common 5-mer. "
            "Most relatives below about 40% identity are not seen and may be in different sets; install MMseqs2 to "
            "keep them together"
        ],
    )


def run_mmseqs(sequences: Iterable[str], ids: Sequence[str], directory: Path) -> Clusters:
    """Cluster sequences with MMseqs2 at 30% identity (`OPTIONS`).

    Args:
        sequences: sequences of the N records.
        ids: ids of the same records.
        directory: directory for temporary files, about ten times the size of the sequences.

    Raises:
        InputError: MMseqs2 fails; the message has the last line that MMseqs2 wrote.
    """
    program = shutil.which("mmseqs") or "mmseqs"
    with tempfile.TemporaryDirectory(prefix=".tmp-mmseqs-", dir=directory) as name:
        work = Path(name)
        numbers = []
        with open(work / "in.fasta", "w", encoding="ascii") as file:
            for number, sequence in enumerate(sequences):
                file.write(f">{number}\n{sequence}\n")  # Numbers are used as ids, since MMseqs2 shortens some ids.
                numbers.append(str(number))
        version = _run(program, "version").strip()
        _run(program, "easy-cluster", *(str(work / part) for part in ("in.fasta", "out", "tmp")), *OPTIONS, "-v", "1")
        found = read_clusters(work / "out_cluster.tsv", numbers)
    names = [ids[int(number)] for number in found.names]
    return Clusters(names, f"MMseqs2 {version}, easy-cluster {' '.join(OPTIONS)}", [])


def _run(program: str, *arguments: str) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, errors="replace", check=False)  # noqa: S603
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise InputError(f"mmseqs {arguments[0]} failed with code {done.returncode} ({lines[-1].strip()}); {_INSTALL}")
    return done.stdout
