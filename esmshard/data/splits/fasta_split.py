"""Splits of the records of a FASTA file, and the files of their sets."""

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.fasta.sources import is_sequence_table
from esmshard.data.fasta.symbols import Edits, Rules
from esmshard.data.labels.coordinates import CoordinateLabels, npz_beside, read_arrays
from esmshard.data.labels.label_sources import table_or_fasta
from esmshard.data.splits import assignment, leakage
from esmshard.data.splits.assignment import Numbers, check_given
from esmshard.data.splits.clusters import align_clusters, read_clusters, run_mmseqs
from esmshard.data.splits.given_splits import given_splits
from esmshard.data.splits.split_method import Method
from esmshard.data.store.ingestion import cached
from esmshard.data.structures.structure_folder import cached_split, holds_structures, notices
from esmshard.data.tables import counted
from esmshard.errors import UsageError
from esmshard.vocab import decode


class FastaRecords:
    """N records of a FASTA file, a token store, or structures. Residues are read from the store when they are needed.

    Args:
        source: FASTA file, plain or compressed, token store, structure file, or directory of structure files.
        sets: table or label FASTA that names the set of each record, if the headers of `source` do not.
        rules: the columns of a table.

    Raises:
        InputError: a file cannot be read: `source`, `sets`, or the `.npz` of coordinates beside `source`.
            For structures, see `to_split`.
    """

    sizes = ("records", "residues", "clusters")
    """The names of the counts in `count`. Clusters are the last, if there are any."""

    def __init__(self, source: Path, sets: Path | None = None, rules: Rules = Rules()) -> None:  # noqa: B008  # frozen
        structures = holds_structures(source)
        if rules != Rules() and not is_sequence_table(source):
            raise UsageError(
                f"{source}: is no table, and --sequence-column and --id-column are for tables; leave them out"
            )
        self.source, self._fasta = source, cached_split(source) if structures else source
        self._store = cached(self._fasta, rules)
        self._sets = None if sets is None else table_or_fasta(sets)
        found = [*(notices(self._fasta) if structures else []), *self._store.notices]
        self.notices = [f"{source}: {notice}" for notice in found]
        self.ids = [self._store.id(n) for n in range(len(self._store))]
        self.facts: dict[str, str] = {"source": source.resolve().name}
        if sets is not None:
            self.facts["sets"] = str(sets)
        self._length_N = self._store.lengths.astype(np.int64)
        self._clusters: list[str] = []
        self._coordinates = self._read_coordinates()

    def divide(self, method: Method, directory: Path, say: Callable[[str], None]) -> Numbers:
        """Return the set or fold of each record, int64 [N]. Records of one sequence stay together, even if their
        clusters differ.

        Args:
            method: by cluster, by ratio, or as the headers or the file of sets say.
            directory: directory for files of MMseqs2, which runs if the method names no clusters.
            say: takes a message before records are clustered.

        Raises:
            InputError: the records cannot be divided by this method.
        """
        if method.by == "given":
            edits = Edits()
            number_N = given_splits(self._store, self.source, self._sets, edits, required=False)
            said_by = self.facts.get("sets", self.source)
            self.notices += [f"{said_by}: {notice}" for notice in edits.notices()]
            check_given(number_N, Path(said_by))
            return number_N
        count = len(self._store)
        same = [hashlib.blake2b(self._store.residues(n).tobytes(), digest_size=16).hexdigest() for n in range(count)]
        if method.by == "ratio":
            return assignment.by_cluster(same, method.ratios, method.seed, method.folds)
        if method.clusters:
            found = [read_clusters(path, self.ids) for path in method.clusters]
        elif shutil.which("mmseqs") is None:
            say(f"clustering {counted(count, 'record')} by pairwise alignment, as MMseqs2 is not installed")
            found = [align_clusters(leakage.ComparedRecords(count, self._store.residues, self._store.id))]
        else:
            say(f"clustering {counted(count, 'record')} with MMseqs2")
            found = [run_mmseqs((decode(self._store.residues(n)) for n in range(count)), self.ids, directory)]
        self.notices += [notice for clusters in found for notice in clusters.notices]
        self.facts["clusters"] = ", ".join(clusters.source for clusters in found)
        self._clusters = assignment.components(*(clusters.names for clusters in found), same)
        return assignment.by_cluster(self._clusters, method.ratios, method.seed, method.folds)

    def columns(self) -> dict[str, Sequence[object]]:
        """Return the columns of `splits.tsv` beside the set, N cells each."""
        return {"id": self.ids, "cluster": self._clusters} if self._clusters else {"id": self.ids}

    def count(self, number_M: Numbers) -> list[int]:
        """Return the sizes of a set."""
        sizes = [len(number_M), int(self._length_N[number_M].sum())]
        return [*sizes, len({self._clusters[n] for n in number_M.tolist()})] if self._clusters else sizes

    def write(self, stem: Path, number_M: Numbers) -> None:
        """Write `STEM.fasta`, and `STEM.npz` where there are coordinates."""
        with open(stem.with_name(f"{stem.name}.fasta"), "w", encoding="utf-8") as file:
            for n in number_M.tolist():
                file.write(f">{self._store.description(n)}\n{decode(self._store.residues(n))}\n")
        if self._coordinates is not None:
            cut = _cut(self._coordinates, [self.ids[n] for n in number_M.tolist()])
            np.savez_compressed(stem.with_name(f"{stem.name}.npz"), **cut)  # type: ignore[arg-type]

    def check(self, sets: Mapping[str, Numbers], most: int) -> leakage.Leakage:
        """Compare the sets with the training set; see `leakage.check`."""
        records = leakage.ComparedRecords(len(self._store), self._store.residues, self._store.id)
        others = {name: records.part(number_M) for name, number_M in sets.items() if name != "train"}
        return leakage.check(records.part(sets["train"]), others, most)

    def _read_coordinates(self) -> dict[str, npt.NDArray[Any]] | None:
        """Read the arrays of the file beside the FASTA file, after a check that they fit the FASTA file."""
        path = npz_beside(self._fasta)
        if self._fasta.is_dir() or not path.is_file():
            return None
        CoordinateLabels(self._fasta, self._store)  # The constructor raises an error if they do not fit.
        arrays = read_arrays(path)
        chains, residues = len(arrays["names"]), int(arrays["offsets"][-1])
        odd = [n for n, a in arrays.items() if n != "offsets" and (a.ndim == 0 or len(a) not in (chains, residues))]
        if odd:
            self.notices.append(f"{path}: left out {', '.join(odd)}, which has no row for each chain or residue")
        if chains > len(self._store):
            more = counted(chains - len(self._store), "chain")
            self.notices.append(f"{path}: left out {more} that {self.source.name} does not have")
        return {name: array for name, array in arrays.items() if name not in odd}


def _cut(arrays: Mapping[str, npt.NDArray[Any]], ids: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Return the same arrays for some of the chains."""
    offsets, row = arrays["offsets"].tolist(), {str(name): k for k, name in enumerate(arrays["names"])}
    rows = [row[record_id] for record_id in ids]
    ends = np.cumsum([0, *(offsets[k + 1] - offsets[k] for k in rows)])
    cut = {"offsets": ends.astype(arrays["offsets"].dtype)}
    for name, array in arrays.items():
        if name != "offsets" and len(array) == len(row):
            cut[name] = array[rows]
        elif name != "offsets":
            cut[name] = np.concatenate([array[offsets[k] : offsets[k + 1]] for k in rows])
    return cut
