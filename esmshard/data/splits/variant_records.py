"""Opens the training, validation or test set of a recipe with a table of variants."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from esmshard.data.batching.loader import Examples
from esmshard.data.mutations import Mutation, WildType, WildTypes, name_of
from esmshard.data.plates import read_plates
from esmshard.data.splits import assignment
from esmshard.data.splits.assignment import LEFT_OUT, RATIOS, SETS, Numbers
from esmshard.data.splits.clusters import COVERAGE, IDENTITY, align_clusters, read_clusters
from esmshard.data.splits.leakage import ComparedRecords
from esmshard.data.structures.chains import Chain, read_chains
from esmshard.data.tracks import TrackFile, protein_tracks, with_paths
from esmshard.data.variants import Variants, is_library
from esmshard.errors import InputError, UsageError
from esmshard.io import remote
from esmshard.io.headers import split_of
from esmshard.io.paths import sha256
from esmshard.io.symbols import JOINED
from esmshard.io.tables import MISSING, NUMBER, Table, counted, first_three, listed, shown
from esmshard.recipe.sections import DataSettings
from esmshard.vocab import LINKER, Chains, encode_residues

FOLDS = 5
"""The default number of folds for a table of variants."""
FLOOR = 0.9
"""If at least this share of the values of a target lies in the worst tenth of their range, a notice says so."""
OUT_OF_FOLD = "variants.csv"
"""The file that a cross-validation writes, with a row for each row of the table of variants."""
SAME = 0.9  # the share of equal residues that a structure of the wild type must have
LEFT_OUT_WHY = "left out because"
"""The last column of OUT_OF_FOLD: the reason why a row was left out."""


class VariantRecords:
    """N variants of one or several proteins as a store of records. Sequences are made when they are read.

    Args:
        path: the path of the table, for messages.
        wild_types: for each protein, the part that the model reads.
        mutations: the mutations of each variant. Positions are those of the whole protein.
        proteins: the protein of each variant, a key of `wild_types`; None if there is only one protein.
        linker: the number of tokens between two chains.
    """

    def __init__(
        self,
        path: Path,
        wild_types: WildTypes,
        mutations: list[tuple[Mutation, ...]],
        proteins: list[str] | None = None,
        linker: int = LINKER,
    ) -> None:
        self.path, self.wild_types, self.mutations, self.linker = path, wild_types, mutations, linker
        self.proteins = [next(iter(wild_types))] * len(mutations) if proteins is None else proteins
        self.notices: list[str] = []
        tokens_of = {name: len(encode_residues(each.mutated(()), linker)) for name, each in wild_types.items()}
        more = (sum(len(mutation.mutant) - 1 for mutation in variant) for variant in mutations)
        lengths = [tokens_of[name] + change for name, change in zip(self.proteins, more, strict=True)]
        self.lengths: npt.NDArray[np.int32] = np.array(lengths, dtype=np.int32)
        """The number of residues of each variant, with linkers, int32 [N]."""
        self.of_wild_types: npt.NDArray[np.int32] = np.array([tokens_of[name] for name in self.proteins], np.int32)
        """The number of residues of each variant's wild type, with linkers, int32 [N]."""

    def __len__(self) -> int:
        return len(self.mutations)

    @property
    def manifest(self) -> dict[str, Any]:
        """A dict with the total number of residues (`residues`) and, if there are several chains, the linker."""
        facts: dict[str, Any] = {"residues": int(self.lengths.sum(dtype=np.int64))}
        if any(wild_type.breaks for wild_type in self.wild_types.values()):
            facts |= {"edits": {JOINED: len(self)}, "rules": {"linker": self.linker}}
        return facts

    @property
    def digest(self) -> str:
        """A hash of the wild types, the variants and their order."""
        parts = [f"{name}\n{each.mutated(())}\n{each.first}\n" for name, each in self.wild_types.items()]
        text = "".join(parts) + "\n".join(map(name_of, self.mutations, self.proteins))
        return hashlib.sha256(text.encode()).hexdigest()

    def id(self, n: int) -> str:
        """Return the name of variant n, such as `A24G:V30L` or `WT`; see `name_of`."""
        return name_of(self.mutations[n], self.proteins[n])

    def residues(self, n: int) -> npt.NDArray[np.uint8]:
        """Return the residues of variant n as tokens, uint8 [L]."""
        text = self.wild_types[self.proteins[n]].mutated(self.mutations[n])
        return np.frombuffer(encode_residues(text, self.linker), dtype=np.uint8)


def site_blocks(variants: Sequence[tuple[Mutation, ...]]) -> Numbers:
    """Return a number for each variant, int64 [N]: equal for variants that change the same sites, -1 for the wild type.

    >>> a, b = Mutation(0, "M", "A"), Mutation(4, "K", "C")
    >>> site_blocks([(a,), (a, b), (), (b, a), (b,)])
    array([ 0,  1, -1,  1,  2])
    """
    sites_N = [tuple(sorted({mutation.position for mutation in mutations})) for mutations in variants]
    numbers = {sites: n for n, sites in enumerate(sorted({*sites_N} - {()}))}
    return np.array([numbers.get(sites, -1) for sites in sites_N], dtype=np.int64)


class VariantLabels:
    """The measured values of N variants, float32 [N, T], and their blocks, int64 [N]: those of `site_blocks`, or the
    protein in a table of several proteins.
    """

    per_residue: ClassVar[bool] = False
    labelled_N: None = None

    def __init__(self, variants: Variants, records: VariantRecords, data: DataSettings) -> None:
        self.names, self.offset, self.records = variants.target_names, variants.offset, records
        self.several = data.protein is not None
        self.wild_types = variants.wild_types
        """The whole wild types. Those of `records` are the parts that the model reads."""
        self.transform, self.lower_is_better = data.transform or "none", tuple(data.lower_is_better or ())
        self.target_NT = variants.target_NT.astype(np.float32)
        self.block_N = site_blocks(variants.mutations)
        if self.several:
            self.block_N = np.unique(variants.proteins, return_inverse=True)[1].astype(np.int64)
        self.place_L3: npt.NDArray[np.float32] | None = None
        """The place of each residue that the model reads, in Angstrom, float32 [L, 3]; None without a structure."""

    def __getitem__(self, n: int) -> dict[str, npt.NDArray[Any]]:
        return {"target": self.target_NT[n]}


def open_variants(data: DataSettings, name: str, *, alone: bool, tracks: Sequence[TrackFile] = ()) -> Examples:
    """Open the set `name` (`train`, `valid` or `test`) of a recipe with a table of variants. The tracks are those
    of the wild type. Only the training set has notices about the table.

    If `alone` is true, the model reads only the wild type, and each variant counts as 3 tokens. Raises `InputError` if
    the table and the wild type do not fit each other, or if the set has no variant.
    """
    assert data.wild_type is not None
    fasta = remote.data_file(data.wild_type)
    files = with_paths(fasta, tracks)
    variants = table_of(data)
    set_N, notices = divide(data)
    if data.split not in ("mutations", "given"):
        folds = count_folds(data)
        if (fold := data.fold or 0) >= folds:
            raise UsageError(f"data.fold: is {fold}, but {data.folds} has {folds} folds; set it from 0 to {folds - 1}")
        set_N = assignment.sets_of_fold(set_N, fold, folds)
    members_N = set_N == SETS.index(name)
    if name == "train" and data.train_share is not None and data.train_share < 1:
        members_N = _share(members_N, variants.names(), data.train_share)
    parts = variants.wild_types if data.protein is not None else {"": _model_part(variants, data)}
    linker = data.join.over(Chains()).tokens
    records = VariantRecords(variants.table.path, parts, variants.mutations, variants.proteins, linker)
    labels, of_structure = VariantLabels(variants, records, data), list[str]()
    if data.structure is not None:
        place_L3, sentence = wild_type_places(remote.data_file(data.structure), variants.wild_type)
        labels.place_L3 = place_L3[parts[""].first :][: len(parts[""].residues)]
        of_structure.append(sentence)
    if not members_N.any():
        raise InputError(f"{records.path}: {name} has no variant; change data.split, or lower data.folds")
    examples = Examples(name, records.path, records, labels, members_N=members_N)
    wild_type_E = records.of_wild_types[members_N] + np.int32(2)
    if data.protein is not None:  # each example of a micro-batch may have another wild type
        examples.tokens = wild_type_E if alone else examples.tokens + wild_type_E
    else:
        examples.beside = int(wild_type_E[0])
        examples.tokens = np.full_like(wild_type_E, 3) if alone else examples.tokens
    if files:
        part = parts[""]
        examples.add_tracks(protein_tracks(files, fasta, slice(part.first, part.first + len(part.residues))))
    examples.notices = [*variants.notices, *notices, *of_structure, *examples.notices] if name == "train" else []
    return examples


def wild_type_places(path: Path, protein: str) -> tuple[npt.NDArray[np.float32], str]:
    """Return the Cb coordinates of each residue of a protein from a structure, float32 [L, 3], and a sentence about it.

    Residues that the structure lacks have NaN. The chain and its shift are those with the most equal residues. Raises
    `InputError` if fewer than SAME of the residues that lie on each other are equal, or fewer than half of the chain or
    of the protein lie on each other.
    """
    best: tuple[int, int, int, Chain] | None = None
    letters_L = np.frombuffer(protein.encode(), np.uint8)
    for chain in read_chains(path):
        letters_C = np.frombuffer(chain.sequence.encode(), np.uint8)
        for shift in range(1 - len(letters_C), len(letters_L)):  # residue 0 of the chain is residue `shift`
            start, end = max(0, shift), min(len(letters_L), shift + len(letters_C))
            same = int((letters_L[start:end] == letters_C[start - shift : end - shift]).sum())
            if best is None or same > best[0]:
                best = same, shift, end - start, chain
    if best is None or best[0] < SAME * best[2] or 2 * best[2] < min(len(protein), len(best[3].sequence)):
        nearest = (
            "it has no protein chain" if best is None else f"{best[3].id} shares at most {best[0]} residues with it"
        )
        raise InputError(
            f"{path}: no chain has the sequence of the wild type, {len(protein)} residues; {nearest}; give the "
            "structure of the wild type, or remove data.structure"
        )
    same, shift, overlap, chain = best
    place_L3 = np.full((len(protein), 3), np.nan, np.float32)
    place_L3[max(0, shift) : max(0, shift) + overlap] = chain.cb_L3[max(0, -shift) : max(0, -shift) + overlap]
    count = int(np.isfinite(place_L3).all(1).sum())
    sentence = f"{path}: chain {chain.id} gives places to {count:,} of {len(protein):,} residues of the wild type"
    return place_L3, sentence + (f"; {counted(overlap - same, 'residue')} differ" if overlap > same else "")


@functools.lru_cache(maxsize=2)
def _read(data: DataSettings, _content: tuple[str, ...]) -> Variants:
    assert data.wild_type is not None
    variants = read_plates(
        [remote.data_file(name) for name in data.tables],
        wild_type=remote.data_file(data.wild_type),
        protein=data.protein,
        indels=data.indels == "keep",
        align=data.align or "shift",
        log=data.transform == "log",
        mutant=data.mutant,
        targets=data.target or (),
        offset="auto" if data.offset is None else data.offset,
        unusable=data.unusable or "drop",
        replicates=data.replicates or "mean",
    )
    for name in data.lower_is_better or ():
        if name not in variants.target_names:
            raise UsageError(
                f"data.lower_is_better: {name} is no target; choose from {', '.join(variants.target_names)}"
            )
    if data.transform == "log" and (low_N := (variants.target_NT <= 0).any(1)).any():
        rows = [variants.rows[n][0] for n in np.flatnonzero(low_N)]
        raise InputError(
            f"{variants.table.path}: {counted(len(rows), 'variant')} with a value of 0 or less, which has no logarithm "
            f"({first_three(rows, variants.table.at)}); remove them, or set data.transform to rank or none"
        )
    return variants


def table_of(data: DataSettings) -> Variants:
    """Read the variants of a recipe's table. They stay in memory until the table or the wild type's file changes."""
    key = data.model_copy(update={"folds": None, "fold": None, "train_share": None, "split": None, "tracks": None})
    paths = [remote.data_file(name) for name in (*data.tables, data.wild_type) if name is not None]
    return _read(key, tuple(sha256(path) if path.is_file() else "" for path in paths))


def divide(data: DataSettings) -> tuple[Numbers, list[str]]:
    """Return the fold of each variant (its set if `data.split` is `mutations` or `given`), int64 [N], and notices. If
    `data.folds` is a column of the table, this column has the folds. The result does not depend on the random seed.
    """
    update = {"folds": data.folds or FOLDS, "fold": None, "train_share": None, "tracks": None}
    return _divide(table_of(data), data.model_copy(update=update))


@functools.lru_cache(maxsize=2)  # by identity; `divide` is called for each set of each fold
def _divide(variants: Variants, data: DataSettings) -> tuple[Numbers, list[str]]:
    path, names, given = variants.table.path, variants.names(), data.split == "given"
    column = data.folds if isinstance(data.folds, str) else None
    if given:
        number_N = given_sets(variants)
    elif column is not None:
        number_N = given_folds(variants, column)
    elif data.split == "protein":
        cluster_of = _similar_proteins(variants, data.clusters)
        number_N = assignment.by_cluster([cluster_of[name] for name in variants.proteins], [1] * count_folds(data))
    else:
        by = "ratio" if data.split == "random" else data.split or "position"
        shares = RATIOS if by == "mutations" else [1] * count_folds(data)
        number_N = assignment.of_variants(by, names, variants.positions(), shares, train_max=data.train_max or 1)
    notices = _floor_notices(variants, data)
    if data.split == "protein":
        count = counted(len(set(cluster_of.values())), "cluster")
        how = data.clusters or f"{IDENTITY:.0%} identity over {COVERAGE:.0%} of both sequences, by alignment"
        notices.append(f"{path}: {counted(len(cluster_of), 'protein')} in {count} ({how}); a cluster is in one fold")
    mixes_sites = column is not None or data.split == "random"
    if data.protein is None and is_library(variants.mutations) and not (mixes_sites and data.transform == "rank"):
        keys = ["data.split=random"] * (not mixes_sites) + ["data.transform=rank"] * (data.transform != "rank")
        notices.append(
            f"{path}: is a combinatorial library, {counted(len(variants), 'variant')} of "
            f"{len(frozenset().union(*variants.positions()))} sites; {' '.join(keys)} suits it, "
            "with task.pool=sites, or with task.context=variant for task.head=likelihood"
        )
    return number_N, notices + left_out(path, names, number_N, lacking(data))


def _similar_proteins(variants: Variants, file: str | None) -> dict[str, str]:
    """Return the cluster of each protein: the cluster in a file of MMseqs2, or that of `align_clusters`."""
    proteins = list(variants.wild_types)
    if file is not None:
        names = read_clusters(remote.data_file(file), proteins).names
    else:
        residues = [np.frombuffer(encode_residues(each.residues), np.uint8) for each in variants.wild_types.values()]
        names = align_clusters(ComparedRecords(len(proteins), residues.__getitem__, proteins.__getitem__)).names
    return dict(zip(proteins, names, strict=True))


def table_facts(data: DataSettings) -> dict[str, Any]:
    """Return how the table of a recipe was read and divided, for `summary.json` and for `table_text`."""
    variants = table_of(data)
    number_N, notices = divide(data)
    none, single, several = (sum(min(len(each), 2) == k for each in variants.mutations) for k in range(3))
    places = zip(variants.proteins, variants.positions(), strict=True)
    groups = variants.left_out_groups.items()
    return {
        "path": str(variants.table.path),
        "rows": len(variants.table),
        "rows_left_out": len(variants.left_out),
        "left_out": [
            f"{counted(len(rows), 'row')} {why} ({first_three(rows, variants.table.at)})" for why, rows in groups
        ],
        "readings": variants.readings,
        "proteins": data.protein,
        "wild_types": [
            {"name": each.name, "residues": len(each.residues), "chains": len(each.breaks) + 1}
            for each in variants.wild_types.values()
        ],
        "variants": len(variants),
        "changes": {"none": none, "one": single, "several": several},
        "positions": len({(protein, place) for protein, changed in places for place in changed}),
        "variants_averaged": sum(len(rows) > 1 for rows in variants.rows),
        "values": {
            name: {"lowest": np.nanmin(y_N), "highest": np.nanmax(y_N), "variants": int((~np.isnan(y_N)).sum())}
            for name, y_N in zip(variants.target_names, variants.target_NT.T, strict=True)
        },
        "offset": variants.offset,
        "offset_given": data.offset not in (None, "auto"),
        "alignment": variants.alignment,
        "split": f"column {shown(data.folds)}" if isinstance(data.folds, str) else data.split,
        "variants_of_each": np.bincount(number_N[number_N != LEFT_OUT]).tolist(),
        "variants_in_no_set": int((number_N == LEFT_OUT).sum()),
        "notices": [*variants.notices, *notices],
    }


def table_text(facts: Mapping[str, Any]) -> list[str]:
    """Return lines for the user about the result of `table_facts`. The content of each line begins at column 11."""
    lines = [f"table     {facts['path']}: {counted(facts['rows'], 'row')}, {facts['rows_left_out']:,} left out"]
    lines += [f"left out  {sentence}" for sentence in facts["left_out"]]
    how = "given in data.offset" if facts["offset_given"] else "found by comparison with the wild type"
    for reading in facts["readings"]:
        where = f"{reading['file']}: " if len(facts["readings"]) > 1 else ""
        columns = f"{reading['kind']} in {shown(reading['column'])}, values in {', '.join(map(shown, facts['values']))}"
        number = f"{reading['offset']:+d} ({how})" if reading["offset"] else "nothing"
        lines += [f"columns   {where}{columns}", f"numbering {where}{number} is added to the positions"]
    (name, length, chains), column = facts["wild_types"][0].values(), facts["proteins"]
    protein = f"wild type {f'{name}, ' if name else ''}{counted(length, 'residue')}, {counted(chains, 'chain')}"
    lines.append(f"proteins  {len(facts['wild_types']):,}, named in {shown(column)}" if column else protein)
    kinds = "{none:,} without a change, {one:,} with one, {several:,} with several".format(**facts["changes"])
    averaged = f"{facts['variants_averaged']:,} averaged over several rows"
    lines.append(f"variants  {facts['variants']:,}: {kinds}; {facts['positions']:,} changed positions; {averaged}")
    for name, part in facts["values"].items():
        interval = "{lowest:.4g} to {highest:.4g}, of {variants:,} variants".format(**part)
        lines.append(f"values    {shown(name)}: {interval}")
    for part in facts["alignment"]:
        how = f"multiplied by {part['factor']:.4g}" if "factor" in part else f"shifted by {part['shift']:+.4g}"
        lines.append(f"aligned   {part['table']}: {shown(part['target'])} {how}, shared variants: {part['shared']:,}")
    kind = "sets" if facts["split"] in ("mutations", "given") else "folds"
    how = "as given" if facts["split"] == "given" else f"by {facts['split']}"
    sizes = ", ".join(f"{size:,}" for size in facts["variants_of_each"])
    return [*lines, f"{kind:10}{how}: {sizes} variants; {facts['variants_in_no_set']:,} left out"]


def lacking(data: DataSettings) -> str | None:
    """Return what a variant in no set lacks if the table divides its variants: a set, or a value in a column."""
    column = data.folds if isinstance(data.folds, str) else None
    return "set" if data.split == "given" else None if column is None else f"value in {shown(column)}"


def count_folds(data: DataSettings) -> int:
    """Return the number of folds of a table: FOLDS, `data.folds`, or the number of values in the column of folds."""
    if isinstance(data.folds, str):
        return int(given_folds(table_of(data), data.folds).max()) + 1
    return data.folds or FOLDS


def shares_positions(data: DataSettings) -> bool:
    """Return whether variants of different folds change the same position, so that test positions are in training."""
    fold_of: dict[tuple[str, int], int] = {}
    fold_N, variants = divide(data)[0].tolist(), table_of(data)
    each = zip(fold_N, variants.proteins, variants.positions(), strict=True)
    pairs = (((protein, place), fold) for fold, protein, places in each if fold >= 0 for place in places)
    return any(fold_of.setdefault(place, fold) != fold for place, fold in pairs)


def sets_of_rows(table: Table, rows: Sequence[int]) -> Numbers:
    """Return for each row the index in SETS of the set in the column `set` or `split`, int64 [N]; LEFT_OUT for an empty
    cell. FLIP's column `validation` may say which rows of the set `train` are validation rows. Raises `InputError` if
    the table has neither or both columns, a cell is not valid, or `validation` contradicts the set.
    """
    column = table.only_column(("set", "split"), "rename one of them")
    if column is None:
        raise InputError(f"{table.path}: has no column 'set' or 'split'; {listed(table.columns)}")
    validation = table.only_column(("validation",), "rename one of them")
    sets, truths = table.columns[column], table.columns[validation] if validation else [""] * len(table)
    numbers = [
        SETS.index(split_of(sets[row], truths[row], table.where(row))) if sets[row] else LEFT_OUT for row in rows
    ]
    return np.array(numbers, dtype=np.int64)


def given_sets(variants: Variants) -> Numbers:
    """Return the set of each variant in the table, int64 [N]; LEFT_OUT for a variant without a set."""
    rows = [row for rows in variants.rows for row in rows]
    set_of = dict(zip(rows, sets_of_rows(variants.table, rows).tolist(), strict=True))
    assignment.check_given(np.array([set_of[rows[0]] for rows in variants.rows]), variants.table.path)
    return _of_first_rows(variants, set_of, "set")


def given_folds(variants: Variants, column: str) -> Numbers:
    """Return the fold of each variant in a column of the table, int64 [N]; LEFT_OUT for a variant without a value. The
    sorted values of the column are the folds 0, 1, 2 and so on.
    """
    table, rows = variants.table, [row for rows in variants.rows for row in rows]
    cells = table.column(column, "name a column of folds in data.folds, or set data.folds=null")
    values = {cells[row] for row in rows if cells[row].lower() not in MISSING}
    if len(values) < 3:
        raise InputError(
            f"{table.path}: column {shown(column)} has {counted(len(values), 'fold')}, and a cross-validation needs 3, "
            "to train, validate and test; name another column in data.folds"
        )
    ordered = sorted(values, key=lambda value: (float(value) if NUMBER.fullmatch(value) else np.inf, value))
    fold_of = {value: fold for fold, value in enumerate(ordered)}
    return _of_first_rows(variants, {row: fold_of.get(cells[row], LEFT_OUT) for row in rows}, "fold")


def _of_first_rows(variants: Variants, number_of: Mapping[int, int], what: str) -> Numbers:
    """Return the number of each variant's first row. Raises `InputError` if another row has another number."""
    table = variants.table
    if wrong := [row for rows in variants.rows for row in rows if number_of[row] != number_of[rows[0]]]:
        rows_named = f"{counted(len(wrong), 'row')} ({first_three(wrong, table.at)})"
        raise InputError(
            f"{table.path}: a variant has another {what} in {rows_named} than in its first row; keep one {what}"
        )
    return np.array([number_of[rows[0]] for rows in variants.rows], dtype=np.int64)


def left_out(path: Path, names: Sequence[str], number_N: Numbers, lacks: str | None) -> list[str]:
    """Return a notice about variants in no set, if there are any. `lacks` is the result of `lacking`."""
    left = [names[n] for n in np.flatnonzero(number_N == LEFT_OUT).tolist()]
    if not left:
        return []
    why = f"without a {lacks}" if lacks else "that change positions of several sets"
    fix = "; a split by mutations, or at random, uses them all" if not lacks and len(left) > len(names) / 2 else ""
    return [f"{path}: left out {counted(len(left), 'variant')} {why} ({first_three(left, str)}){fix}"]


def _floor_notices(variants: Variants, data: DataSettings) -> list[str]:
    """Return a notice for each target with at least the share FLOOR of its values in the worst tenth of their range."""
    notices = []
    target_NT = np.log(variants.target_NT) if data.transform == "log" else variants.target_NT
    for name, y_N in zip(variants.target_names, target_NT.T, strict=True):
        better_N = y_N[~np.isnan(y_N)] * (-1 if name in (data.lower_is_better or ()) else 1)
        worst, best = better_N.min(initial=np.inf), better_N.max(initial=-np.inf)
        share = float((better_N <= worst + 0.1 * (best - worst)).mean()) if best > worst else 0.0
        if share >= FLOOR:
            notices.append(
                f"{variants.table.path}: {share:.0%} of the values of {name!r} lie in the worst tenth of their range, "
                "so a correlation over all variants says little about the best variants; look at the recall of the "
                "best 1% and at the mean of the chosen variants"
            )
    return notices


def _model_part(variants: Variants, data: DataSettings) -> WildType:
    """Return the part of the only wild type that the model reads.

    If `data.long` is `window`, a longer wild type is cut to `data.max_length` residues around all mutated residues. All
    variants have the same part, so a single forward pass of the wild type is enough. Raises `InputError` if the mutated
    residues do not fit into `data.max_length` residues.
    """
    protein, max_length = variants.wild_type, data.max_length
    if data.long != "window" or len(protein) <= max_length:
        return variants.wild_types[""]
    if variants.wild_types[""].breaks:
        raise InputError(f"{data.wild_type}: has several chains, and a window has one chain; set data.long to full")
    mutated = sorted(set().union(*variants.positions())) or [0]
    low, high = mutated[0], mutated[-1]
    if high - low >= max_length:
        raise InputError(
            f"{variants.table.path}: the mutated residues {low + 1} to {high + 1} do not fit into a window of "
            f"data.max_length, {max_length}; raise data.max_length, or set data.long to full"
        )
    first = min(max((low + high + 1 - max_length) // 2, 0), len(protein) - max_length)
    return WildType(protein[first : first + max_length], first=first)


def _share(members_N: npt.NDArray[np.bool_], names: list[str], share: float) -> npt.NDArray[np.bool_]:
    """Choose a random share of the variants with a true `members_N`, by a hash of their names. The choice for a larger
    share has all variants of the choice for a smaller share.
    """
    members = np.flatnonzero(members_N)
    drawn = sorted(members, key=lambda n: hashlib.sha256(names[n].encode()).digest())
    taken_N = np.zeros_like(members_N)
    taken_N[drawn[: max(1, round(share * len(drawn)))]] = True
    return taken_N
