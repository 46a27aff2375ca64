"""Opens the training, validation or test set of a recipe. Headers (`SET=`) or a table column may name the sets."""

import hashlib
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.batching.loader import Examples, Labels
from esmshard.data.labels.label_sources import label_source, read_label_fasta, rules_of
from esmshard.data.labels.pairing import check_labelled, rows_of_records
from esmshard.data.splits import assignment
from esmshard.data.splits.assignment import LEFT_OUT, SETS, Numbers
from esmshard.data.splits.clusters import read_clusters
from esmshard.data.splits.variant_records import open_variants, sets_of_rows
from esmshard.data.structures import structure_folder
from esmshard.data.tracks import TrackFile, record_tracks, with_paths
from esmshard.errors import InputError, UsageError
from esmshard.io import remote
from esmshard.io.headers import attributes, id_of, split_of
from esmshard.io.sequences import is_sequence_table
from esmshard.io.store import TokenStore, cached
from esmshard.io.symbols import Edits, Rules
from esmshard.io.tables import Table, counted, shown
from esmshard.recipe.sections import DataSettings, JoinSettings, Recipe, listed
from esmshard.vocab import SEPARATOR, Chains, chain_spans

OpenLabels = Callable[[Path, TokenStore, DataSettings], Labels | None]


def open_split(recipe: Recipe, name: str, labels: OpenLabels | None, tracks: Sequence[TrackFile] = ()) -> Examples:
    """Open the training, validation or test set of a recipe. Only training records are cropped.

    In a cross-validation, the test set is a fold of the training file. If the recipe names this file for validation
    too, the next fold is the validation set. Without folds, `SET=` in the header may name the set of a record.

    `name` is `train`, `valid` or `test`. `labels` opens the labels of the records; None if only sequences are needed.
    `tracks` are the tracks of the recipe. Raises `UsageError` if a recipe key does not fit the files, and `InputError`
    if the set cannot be read, or has no record.
    """
    data, seed = recipe.data, recipe.train.seed
    files = (remote.data_file(file) for file in (data.train, data.valid, data.test) if file is not None)
    if data.complexes is not None and not any(map(structure_folder.holds_structures, files)):
        raise UsageError(f"data.complexes: {data.complexes} is for structure files, and there are none; remove the key")
    if recipe.task.reads_table:
        return open_variants(data, name, alone=recipe.task.wild_type_alone, tracks=tracks)
    valid_is_part = data.valid == data.train
    divided = data.folds is not None and (name != "valid" or valid_is_part)
    path = remote.data_file(getattr(data, "train" if divided else name))
    fasta, tokens, sources = _records(path, tracks, data)
    if name == "train" and data.sequence_column is not None and not is_sequence_table(path):
        raise UsageError(f"data.sequence_column: {path} is no table; remove the key, or name a table in data.train")
    split_labels = None if labels is None else labels(fasta, tokens, data)
    members_N, notices = members(data, name, path, fasta, tokens)
    digest = tokens.digest
    if members_N is not None:
        digest = hashlib.sha256(digest.encode() + np.packbits(members_N).tobytes()).hexdigest()
    if divided:
        assert isinstance(data.folds, int)
        assert data.fold is not None
        fold_N = fold_of(tokens, data.folds, data.clusters)
        test_N, valid_N = fold_N == data.fold, fold_N == (data.fold + 1) % data.folds
        members_N = {"test": test_N, "valid": valid_N, "train": ~(test_N | valid_N if valid_is_part else test_N)}[name]
    options: dict[str, Any] = {"members_N": members_N, "digest": digest, "apart": recipe.task.pairs}
    if name == "train":
        options |= {"long": data.long, "max_length": data.max_length, "seed": seed}
    examples = Examples(name, path, tokens, split_labels, **options)
    examples.notices += notices
    if sources:
        examples.add_tracks(record_tracks(sources, tokens))
    return examples


def open_tested(
    source: str,
    file: str | None,
    recipe: Recipe,
    labels: OpenLabels,
    tracks: Sequence[TrackFile] = (),
    complexes: str | None = None,
) -> Examples:
    """Open labelled records to test a model. `source` is a FASTA file, a table, a token store, structures, or a
    file of the package (`sample:NAME`).

    `file` is the label file; None if the labels are with the records. `recipe` is the recipe of the model. For `labels`
    and `tracks` see the function `open_split`, for `complexes` the recipe key `data.complexes`.
    """
    path = remote.data_file(source)
    structure_folder.require_structures(path, complexes)
    data = recipe.data.model_copy(update={"labels": file, "mask": None, "complexes": complexes})
    fasta, tokens, sources = _records(path, tracks, data)
    examples = Examples(Path(source).name, path, tokens, labels(fasta, tokens, data), apart=recipe.task.pairs)
    if marked(tokens):
        examples.notices.append(
            f"all records are scored, and {marks(path)} is ignored; `esmshard split {path} -o DIR "
            "--by given` writes the test set to DIR/test.fasta"
        )
    if sources:
        examples.add_tracks(record_tracks(sources, tokens))
    return examples


def _records(path: Path, tracks: Sequence[TrackFile], data: DataSettings) -> tuple[Path, TokenStore, list[TrackFile]]:
    """Return the sequence file of a data path, its records, and the tracks with their paths. The sequence file is
    `path` itself or, if `path` has structures, a FASTA file that is made from them.
    """
    sources = with_paths(path, tracks)
    fasta = structure_folder.cached_split(path, data.complexes) if structure_folder.holds_structures(path) else path
    rules = rules_of(path, data) if is_sequence_table(path) else Rules()
    linker = None if data.join.linker is None else data.join.over(Chains()).tokens
    tokens = cached(fasta, rules, linker)
    if fasta != path:
        tokens.notices = [*structure_folder.notices(fasta), *tokens.notices]
    return fasta, tokens, sources


def joined(recipe: Recipe, chains: Chains) -> Recipe:
    """Return the recipe with linker and gap of `chains` in `data.join`. Recipes for protein pairs are not changed."""
    if recipe.task.pairs:
        return recipe
    join = JoinSettings(linker=chains.linker, gap=chains.gap)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"join": join})})


def in_tokens(recipe: Recipe, train: Examples) -> Recipe:
    """Return the recipe with `batch.global_tokens` in place of `batch.sequences`. The value is `batch.sequences` times
    the number of tokens of the longest training example.
    """
    if recipe.batch.sequences is None:
        return recipe
    tokens = recipe.batch.sequences * int(train.tokens.max())
    batch = recipe.batch.model_copy(update={"sequences": None, "global_tokens": tokens})
    return recipe.model_copy(update={"batch": batch})


def sequence_names(store: TokenStore) -> list[str]:
    """Return a name for each record, a hash of its sorted chains. Records with the same chains get the same name."""
    names = []
    for n in range(len(store)):
        residues = store.residues(n)
        chains = sorted(residues[slice(*span)].tobytes() for span in chain_spans(residues))
        names.append(hashlib.blake2b(bytes([SEPARATOR]).join(chains), digest_size=16).hexdigest())
    return names


def fold_of(store: TokenStore, folds: int, clusters: str | None) -> npt.NDArray[np.int64]:
    """Return the fold of each record, int64 [N], independent of the random seed of the recipe.

    Records of a cluster in the file `clusters` get the same fold. If `clusters` is None, records with the same chains
    get the same fold.
    """
    if clusters is not None:
        groups = read_clusters(remote.data_file(clusters), [store.id(n) for n in range(len(store))]).names
    else:
        groups = sequence_names(store)
    return assignment.by_cluster(groups, [1] * folds)


_SEARCHED = 100
"""The number of records in which the function `marked` searches for `SET=`."""


def members(
    data: DataSettings, name: str, path: Path, fasta: Path, tokens: TokenStore
) -> tuple[npt.NDArray[np.bool_] | None, list[str]]:
    """Return which records belong to the set `name`, bool [N], or None for all records. Also return notices.

    If the recipe names a file for a single set, all records of the file belong to this set, and `SET=` is ignored.
    `path` is the file in the recipe. `fasta` is the file of the records `tokens`. Raises `InputError` if a record has
    no set, if this set has no record, or if the test set would be the training set. Raises `UsageError` if the file
    names the sets of records, and `data.folds` is set too.
    """
    splits = SETS if data.folds is None else SETS[:2]  # With folds, the test set is a fold of the training file.
    if name not in splits:
        return None, []
    if sum(getattr(data, other) == getattr(data, name) for other in splits) < 2:
        unused = (
            f"{marks(path)} is not used: all records are {name} records, since the recipe names the file only for "
            f"{name}; to divide a file, name it in data.train, data.valid and data.test"
        )
        return None, [unused] if marked(tokens) else []
    source = label_source(fasta, data) if data.labels is not None else None
    if isinstance(source, Table):
        in_source = source.only_column(("set", "split"), "rename one of them") is not None
    else:
        headers = [] if source is None else (record.header for record in read_label_fasta(source))
        in_source = any(_of_header(header, str(source), Edits()) != LEFT_OUT for header in headers)
    in_headers = any(_of_header(tokens.description(n), str(path), Edits()) != LEFT_OUT for n in range(len(tokens)))
    if not (in_source or in_headers):
        if data.folds is not None or data.train not in (data.valid, data.test):
            return None, []
        if data.test == data.train:
            divide = f"esmshard split {shlex.quote(str(path))} -o DIR"
            raise InputError(
                f"{path}: is the file of train and test, and nothing divides it, so every test record would be a "
                f"training record; `{divide}` writes three files, and with --folds 5 the files of five rounds"
            )
        undivided = (  # Model cards show this notice, so it names no directory.
            f"is also the file of data.train, and nothing divides it, so {name} has the records of train; "
            f"`esmshard split {path.name} -o DIR` divides it"
        )
        return None, [undivided] if name == "valid" else []
    places = [marks(path)] if in_headers else []
    if in_source:
        places.append(str(source.path if isinstance(source, Table) else source))
    where = listed(places)
    if data.folds is not None:
        raise UsageError(f"data.folds: divides {path}, and {where} divides it too; remove data.folds")
    edits = Edits()
    number_N = given_splits(tokens, fasta, source if in_source else None, edits, id_column=data.id_column)
    members_N = number_N == SETS.index(name)
    if not members_N.any():
        others = listed([f"{(number_N == k).sum():,} of {SETS[k]}" for k in np.unique(number_N)])
        raise InputError(
            f"{path}: {where} has no record of {name} ({others}); mark records as {name}, or change data.{name}"
        )
    notice = f"{where} divides it: {members_N.sum():,} of {counted(len(number_N), 'record')} are of {name}"
    return members_N, [notice, *edits.notices()]


def marked(tokens: TokenStore) -> bool:
    """Return whether the header of any of the first `_SEARCHED` records has `SET=`."""
    return any(b"SET=" in tokens.header(n).upper() for n in range(min(_SEARCHED, len(tokens))))


def marks(path: Path) -> str:
    """Return the words for a message that say where a file names the sets, such as `SET= in its headers`."""
    return "its column of sets" if is_sequence_table(path) else "SET= in its headers"


def given_splits(
    store: TokenStore,
    fasta: Path,
    source: Table | Path | None,
    edits: Edits,
    *,
    id_column: str | None = None,
    required: bool = True,
) -> Numbers:
    """Return the set of each record as an index in `SETS`, int64 [N]; LEFT_OUT for a record without a set.

    Sets are read from `SET=` in the headers of the records, and from `source`.

    Args:
        store: the records.
        fasta: the file of the records, for messages.
        source: a table with a column `set` or `split`, and perhaps a column `validation`; or the path of a FASTA file
            of labels with `SET=` and `VALIDATION=` in its headers. With None, only the headers of the records are read.
        edits: counts left-out records, and rows or records of `source` that belong to no record of `store`.
        id_column: the name of the id column; see the function `rows_of_records`.
        required: whether a record without a set is an error.

    Raises:
        InputError: no record has a set, a required set is missing, a cell or header does not name a set, or a record
            has two different sets.
    """
    headers = (_of_header(store.description(n), str(fasta), edits) for n in range(len(store)))
    number_N: Numbers = np.fromiter(headers, np.int64, len(store))
    marked_N, lacks = number_N != LEFT_OUT, "SET="
    if isinstance(source, Table):
        number_R = sets_of_rows(source, range(len(source)))
        row_N = rows_of_records(
            source,
            store,
            fasta,
            id_column=id_column,
            same=lambda a, b: bool(number_R[a] == number_R[b]),
            labelled_R=number_R != LEFT_OUT,
            what="split",
            required=required and not marked_N.any(),
            edits=Edits() if marked_N.any() else edits,
        )
        given_N = np.where(row_N < 0, LEFT_OUT, number_R[row_N])
        lacks = f"SET= here or set in {source.path}"
        if not marked_N.any():
            return given_N
    elif source is not None:
        given_N, lacks = _of_label_file(store, source, edits), f"SET= here or in {source}"
    else:
        given_N = number_N
    both_N = marked_N & (given_N != LEFT_OUT) & (given_N != number_N)
    if both_N.any():
        n = int(both_N.argmax())
        other = source.path if isinstance(source, Table) else source
        record = f"{fasta}: record {shown(store.id(n))} is of {SETS[number_N[n]]}"
        raise InputError(f"{record}, but {other} says {SETS[given_N[n]]}; correct one of the two")
    number_N = np.where(marked_N, number_N, given_N)
    check_labelled(store, fasta, number_N != LEFT_OUT, lacks, (), edits, required=required)
    return number_N


def _of_header(header: str, where: str, edits: Edits) -> int:
    if "SET=" not in header.upper():  # Most headers name no set, so this test saves time.
        return LEFT_OUT
    values = attributes(header, ("SET", "VALIDATION"), where, edits)
    if "SET" not in values:
        return LEFT_OUT
    record = f"{where}: record {shown(id_of(header))}"
    return SETS.index(split_of(values["SET"], values.get("VALIDATION", ""), record))


def _of_label_file(store: TokenStore, path: Path, edits: Edits) -> Numbers:
    """Return the set of each of N records from a FASTA file of labels, int64 [N]; LEFT_OUT for records without one."""
    number_N = np.full(len(store), LEFT_OUT, dtype=np.int64)
    line_N = np.zeros(len(store), dtype=np.int64)
    for record in read_label_fasta(path):
        where = f"{path}:{record.line}"
        number, n = _of_header(record.header, where, edits), store.find(record.id)
        if n is None:
            if number != LEFT_OUT:
                edits.add("a split of an unknown record was ignored", record.id)
            continue
        if line_N[n] and number_N[n] != number:
            raise InputError(f"{where}: {shown(record.id)} has another split than in line {line_N[n]}; keep one")
        line_N[n], number_N[n] = record.line, number
    return number_N
