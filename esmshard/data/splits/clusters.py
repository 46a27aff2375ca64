"""Clusters of similar sequences: from a file of MMseqs2, from the program MMseqs2, or from pairwise alignments."""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from esmshard.data.splits import assignment
from esmshard.data.splits.leakage import ComparedRecords, word_pairs
from esmshard.errors import InputError
from esmshard.io.tables import first_three, read_text
from esmshard.progress import Progress
from esmshard.vocab import STANDARD, decode

OPTIONS = ("--min-seq-id", "0.3", "-c", "0.8", "--cov-mode", "0", "-s", "7.5")
"""The options of MMseqs2: at least 30% identity over 80% of both sequences, and a sensitive search (`-s 7.5`)."""
IDENTITY, COVERAGE = 0.3, 0.8
"""Two sequences are in one cluster if at least the share IDENTITY of the aligned positions is identical, and at least
the share COVERAGE of both sequences is aligned.
"""
MOST_ALIGNED = 100_000
"""The maximum number of pairs of sequences to align (some minutes on one core)."""

_INSTALL = (
    "install it (apt-get install mmseqs2, or conda install -c bioconda mmseqs2), or pass --clusters FILE.tsv, in a "
    "recipe data.clusters"
)


class Clusters(NamedTuple):
    """A clustering of N records."""

    names: list[str]
    """The id of each record's cluster representative. A joined cluster has the alphabetically first of these ids."""
    source: str
    """The path of the cluster file; or the program that made the clusters, with version and options."""
    notices: list[str]
    """Sentences about ignored members of clusters, or about relatives that may be in different clusters."""


def read_clusters(path: Path, ids: Sequence[str]) -> Clusters:
    """Read the clusters of N records from a file with lines `representative<TAB>member`, as MMseqs2 writes.

    Clusters with a common record are joined. The file may name the record `sp|P69905|HBA_HUMAN` by the accession
    `P69905`, since MMseqs2 shortens UniProt ids. Raises `InputError` if a line has another form, or a record is in no
    cluster.
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
    cluster = dict(zip(members, assignment.components(representatives, members), strict=True)) if members else {}
    for record_id in ids:
        accession = record_id.split("|")[1] if record_id.startswith(("sp|", "tr|")) else record_id
        name = record_id if record_id in cluster else accession
        used.add(name)
        if name in cluster:
            names.append(cluster[name])
        else:
            absent.append(record_id)
    if absent:
        count = f"{len(absent):,} of {len(ids):,} records"
        raise InputError(f"{path}: {count} are in no cluster ({first_three(absent, str)}); cluster all records again")
    notices = []
    surplus = [member for member in cluster if member not in used]
    if surplus:
        notices.append(f"{path}: ignored {len(surplus):,} members that are no records ({first_three(surplus, str)})")
    return Clusters(names, str(path), notices)


def align_clusters(records: ComparedRecords) -> Clusters:
    """Cluster sequences without MMseqs2. The sequences of a pair that reaches IDENTITY and COVERAGE share a cluster.

    Only pairs with a common 5-mer are aligned (Smith-Waterman of Biopython, BLOSUM62, gap costs 12 and 1). At identity
    p, two proteins of 300 residues have about 300 * p**5 common 5-mers: 9 at 50%, 3 at 40%, and fewer than 1 at 30%. So
    most pairs below about 40% identity are missed. Raises `InputError` for more than MOST_ALIGNED pairs.
    """
    import Bio
    from Bio.Align import PairwiseAligner  # slow to import
    from scipy.cluster.hierarchy import DisjointSet

    aligner = PairwiseAligner(scoring="blastp")  # type: ignore[no-untyped-call]
    aligner.mode = "local"
    length_N = [len(records.residues(n)) for n in range(records.count)]
    pairs = []
    for a, b in word_pairs(records):
        if min(length_N[a], length_N[b]) >= COVERAGE * max(length_N[a], length_N[b]):
            pairs.append((a, b))
        if len(pairs) > MOST_ALIGNED:
            raise InputError(f"clusters of more than {MOST_ALIGNED:,} similar pairs need MMseqs2; {_INSTALL}")
    joined = DisjointSet(range(records.count))

    def text(n: int) -> str:
        return re.sub(f"[^{STANDARD}]", "X", decode(records.residues(n)))

    with Progress("align", len(pairs)) as progress:
        for done, (a, b) in enumerate(pairs, 1):
            progress.update(done, "")
            if joined.connected(a, b):
                continue
            alignments = aligner.align(text(a), text(b))  # type: ignore[no-untyped-call]
            if not len(alignments):
                continue
            best = alignments[0]
            spans = np.abs(np.diff(best.coordinates[:, [0, -1]]))[:, 0]
            covered = min(spans[0] / length_N[a], spans[1] / length_N[b])
            if covered >= COVERAGE and best.counts().identities >= IDENTITY * best.length:
                joined.merge(a, b)
    limits = f"{IDENTITY:.0%} identity over {COVERAGE:.0%} of both sequences"
    return Clusters(
        [records.id(joined[n]) for n in range(records.count)],
        f"alignment of pairs with a common 5-mer (Biopython {Bio.__version__}, BLOSUM62), {limits}",
        [
            f"clusters are made without MMseqs2, which is not installed: {limits}, among pairs with a common 5-mer. "
            "Most relatives below about 40% identity are missed and may be in different sets; MMseqs2 finds them"
        ],
    )


def run_mmseqs(sequences: Iterable[str], ids: Sequence[str], directory: Path) -> Clusters:
    """Cluster the sequences of N records with MMseqs2. Temporary files in `directory` are about ten times as large as
    the sequences. If MMseqs2 fails, `InputError` has the last line of its output.
    """
    program = shutil.which("mmseqs") or "mmseqs"
    with tempfile.TemporaryDirectory(prefix=".tmp-mmseqs-", dir=directory) as name:
        work = Path(name)
        with open(work / "in.fasta", "w", encoding="ascii") as file:
            for number, sequence in enumerate(sequences):
                file.write(f">{number}\n{sequence}\n")  # MMseqs2 shortens some ids, but not numbers.
        version = _run(program, "version").strip()
        _run(program, "easy-cluster", *(str(work / part) for part in ("in.fasta", "out", "tmp")), *OPTIONS, "-v", "1")
        clusters = read_clusters(work / "out_cluster.tsv", [str(number) for number in range(len(ids))])
    names = [ids[int(number)] for number in clusters.names]
    return Clusters(names, f"MMseqs2 {version}, easy-cluster {' '.join(OPTIONS)}", [])


def _run(program: str, *arguments: str) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, errors="replace", check=False)  # noqa: S603
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise InputError(f"mmseqs {arguments[0]} failed with code {done.returncode} ({lines[-1].strip()}); {_INSTALL}")
    return done.stdout
