"""Opens the splits of a recipe. No torch."""

import hashlib
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.batching.loader import Examples, Labels
from esmshard.data.labels.label_sources import label_source, read_label_fasta, rules_of
from esmshard.data.splits import assignment
from esmshard.data.splits.assignment import SETS
from esmshard.data.splits.clusters import read_clusters
from esmshard.data.splits.given_splits import given_splits, has_set
from esmshard.data.splits.variant_records import open_variants
from esmshard.data.structures import structure_folder
from esmshard.data.tracks import TrackFile, record_tracks, with_paths
from esmshard.errors import InputError, UsageError
from esmshard.io import remote
from esmshard.io.sequences import is_sequence_table
from esmshard.io.store import TokenStore, cached
from esmshard.io.symbols import Edits, Rules
from esmshard.io.tables import Table, counted
from esmshard.recipe.data_section import DataSettings, JoinSettings
from esmshard.recipe.section_base import listed
from esmshard.recipe.sections import Recipe
from esmshard.vocab import SEPARATOR, Chains, chain_spans

OpenLabels = Callable[[Path, TokenStore, DataSettings], Labels | None]


def open_split(recipe: Recipe, name: str, labels: OpenLabels | None, tracks: Sequence[TrackFile] = ()) -> Examples:
    """Open one split: tokens (ingested on first use) and labels. Only training records are cropped.

    Under cross-validation, the test set is one part of the training file. If the recipe names this file for validation,
    too, the next part is the validation set. Without folds, a file that the recipe names for several splits is divided
    as its headers or its table of labels say, if they do.

    Args:
        recipe: the recipe as loaded.
        name: train, valid or test.
        labels: opens the labels of a FASTA file and its records; None if only the sequences are needed.
        tracks: the tracks of the recipe (`esmshard.tasks.finetuned.tracks_of`).
    """
    data, seed = recipe.data, recipe.train.seed
    files = [remote.data_file(file) for file in (data.train, data.valid, data.test) if file is not None]
    if data.complexes is not None and not any(map(structure_folder.holds_structures, files)):
        raise UsageError(
            f"data.complexes: {data.complexes} is for structure files, and this recipe names none (in a FASTA file a "
            "colon stands between the chains of a record); remove data.complexes"
        )
    if recipe.task.reads_table:
        return open_variants(data, name, alone=recipe.task.wild_type_alone, tracks=tracks)
    valid_is_part = data.valid == data.train
    divided = data.folds is not None and (name != "valid" or valid_is_part)
    path = remote.data_file(getattr(data, "train" if divided else name))
    fasta, tokens, outer = _records(path, tracks, data)
    if name == "train" and data.sequence_column is not None and not is_sequence_table(path):
        raise UsageError(f"data.sequence_column: {path} is no table; remove it, or name a table in data.train")
    found = None if labels is None else labels(fasta, tokens, data)
    members_N, notices = members(data, name, path, fasta, tokens)
    digest = tokens.digest
    if members_N is not None:
        digest = hashlib.sha256(digest.encode() + np.packbits(members_N).tobytes()).hexdigest()
    if divided:
        assert data.folds is not None
        fold_N = fold_of(tokens, data.folds, data.clusters)
        test_N, valid_N = fold_N == data.fold, fold_N == (data.fold + 1) % data.folds
        members_N = {"test": test_N, "valid": valid_N, "train": ~(test_N | valid_N if valid_is_part else test_N)}[name]
    how: dict[str, Any] = {"members_N": members_N, "digest": digest, "apart": recipe.task.pairs}
    if name == "train":
        how |= {"long": data.long, "max_length": data.max_length, "seed": seed}
    examples = Examples(name, path, tokens, found, **how)
    examples.notices += notices
    if outer:
        examples.add_tracks(record_tracks(outer, tokens))
    return examples


def open_tested(
    source: str,
    file: str | None,
    recipe: Recipe,
    labels: OpenLabels,
    tracks: Sequence[TrackFile] = (),
    complexes: str | None = None,
) -> Examples:
    """Open labelled records for a test of a model. They are no split of the recipe.

    Args:
        source: a FASTA file, a token store, structures, or a sample.
        file: the file of the labels, if they are not in the records or beside them.
        recipe: the recipe of the model.
        labels: opens the labels of a FASTA file and its records.
        tracks: the tracks of the records.
        complexes: see `recipe.DataSettings.complexes`.
    """
    path = remote.data_file(source)
    structure_folder.require_structures(path, complexes)
    where = recipe.data.model_copy(update={"labels": file, "mask": None, "complexes": complexes})
    fasta, tokens, outer = _records(path, tracks, where)
    found = labels(fasta, tokens, where)
    examples = Examples(Path(source).name, path, tokens, found, apart=recipe.task.pairs)
    if marked(tokens):
        examples.notices.append(
            f"all its records are scored, whatever {marks(path)} says; `esmshard split {path} -o DIR "
            "--by given` writes those of the test set to DIR/test.fasta"
        )
    if outer:
        examples.add_tracks(record_tracks(outer, tokens))
    return examples


def _records(path: Path, tracks: Sequence[TrackFile], data: DataSettings) -> tuple[Path, TokenStore, list[TrackFile]]:
    """Return the FASTA file that a data path means, its records, and tracks with a path each (`with_paths`). For
    structures, the FASTA file is made from them.
    """
    outer = with_paths(path, tracks)
    fasta = structure_folder.cached_split(path, data.complexes) if structure_folder.holds_structures(path) else path
    rules = rules_of(path, data) if is_sequence_table(path) else Rules()
    linker = None if data.join.linker is None else data.join.over(Chains()).tokens
    tokens = cached(fasta, rules, linker)
    if fasta != path:  # Notices about the structures come before notices about their sequences.
        tokens.notices = [*structure_folder.notices(fasta), *tokens.notices]
    return fasta, tokens, outer


def joined(recipe: Recipe, chains: Chains) -> Recipe:
    """Return the recipe with `data.join` as the model joins chains. Stores of another linker are then refused.

    The chains of a pair are not joined.
    """
    if recipe.task.pairs:
        return recipe
    join = JoinSettings(linker=chains.linker, gap=chains.gap)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"join": join})})


def in_tokens(recipe: Recipe, train: Examples) -> Recipe:
    """Return the recipe with `batch.sequences` converted to tokens."""
    if recipe.batch.sequences is None:
        return recipe
    tokens = recipe.batch.sequences * int(train.tokens.max())
    batch = recipe.batch.model_copy(update={"sequences": None, "global_tokens": tokens})
    return recipe.model_copy(update={"batch": batch})


def fold_of(store: TokenStore, folds: int, clusters: str | None) -> npt.NDArray[np.int64]:
    """Return the fold of each record, int64 [N], the same for every seed of a recipe.

    Records of one cluster stay together. Without clusters, records of one sequence stay together, and of the same
    chains, in any order.
    """
    count = len(store)
    if clusters is not None:
        groups = read_clusters(remote.data_file(clusters), [store.id(n) for n in range(count)]).names
    else:
        groups = [hashlib.blake2b(_unordered(store.residues(n)), digest_size=16).hexdigest() for n in range(count)]
    return assignment.by_cluster(groups, folds=folds)


def _unordered(residues: npt.NDArray[np.uint8]) -> bytes:
    """Return bytes that are the same for the same chains in any order; for one chain, its tokens."""
    chains = [residues[slice(*span)].tobytes() for span in chain_spans(residues)]
    return bytes([SEPARATOR]).join(sorted(chains))


_LOOKED_AT = 100
"""Records of a file that are searched for SET= in their headers, if the recipe names the file for one split only."""


def members(
    data: DataSettings, name: str, path: Path, fasta: Path, tokens: TokenStore
) -> tuple[npt.NDArray[np.bool_] | None, list[str]]:
    """Return which records of a file belong to a split, bool [N], None for all; and notices about it.

    A file that the recipe names for one split only is that split, whatever its headers say. `path` is the file as the
    recipe names it, and `fasta` that of its records, which is another file if `path` is structures.

    Raises:
        InputError: some records have no split, or no record has this one, or the test set would be the training set.
        UsageError: `data.folds` divides the file too.
    """
    splits = SETS if data.folds is None else SETS[:2]  # With folds, the test set is a part of the training file.
    if name not in splits:
        return None, []
    if sum(getattr(data, other) == getattr(data, name) for other in splits) < 2:
        unused = (
            f"{marks(path)} is not used, as it is the file of {name} alone, and all its records are taken; "
            "name one file in data.train, data.valid and data.test to have it divided"
        )
        return None, [unused] if marked(tokens) else []
    source = label_source(fasta, data) if data.labels is not None else None
    if isinstance(source, Table):
        in_source = source.only_column(("set", "split"), "rename the one that is not") is not None
    else:
        in_source = source is not None and any(has_set(record.header, source) for record in read_label_fasta(source))
    in_headers = any(has_set(tokens.description(n), path) for n in range(len(tokens)))
    if not (in_source or in_headers):
        if data.folds is not None or data.train not in (data.valid, data.test):
            return None, []
        if data.test == data.train:
            divide = f"esmshard split {shlex.quote(str(path))} -o DIR"
            raise InputError(
                f"{path}: is the file of train and test, and nothing divides it (no SET= in headers, no column set), "
                f"so every test record would be a training record; `{divide}` writes three files, "
                "and --folds 5 tests on each fifth in turn"
            )
        undivided = (  # Without the directory, which is no one else's business: model cards repeat notices.
            f"is the file of data.train, too, and nothing divides it, so that {name} has the records of train; "
            f"`esmshard split {path.name} -o DIR` divides it"
        )
        return None, [undivided] if name == "valid" else []
    places = [marks(path)] if in_headers else []
    if in_source:
        places.append(str(source.path if isinstance(source, Table) else source))
    where = listed(places)
    if data.folds is not None:
        raise UsageError(
            f"data.folds: divides {path}, which {where} divides too; leave out folds, or give data.valid another file"
        )
    edits = Edits()
    number_N = given_splits(tokens, fasta, source if in_source else None, edits, id_column=data.id_column)
    members_N = number_N == SETS.index(name)
    if not members_N.any():
        others = listed([f"{(number_N == k).sum():,} of {SETS[k]}" for k in np.unique(number_N)])
        raise InputError(
            f"{path}: has no record of {name}, as {where} says ({others}); mark some, or give data.{name} another file"
        )
    notice = f"{where} divides it: {members_N.sum():,} of {counted(len(number_N), 'record')} are of {name}"
    return members_N, [notice, *edits.notices()]


def marked(tokens: TokenStore) -> bool:
    """Return whether one of the first records of a file of one split has `SET=` in its header."""
    return any(b"SET=" in tokens.header(n).upper() for n in range(min(_LOOKED_AT, len(tokens))))


def marks(path: Path) -> str:
    """Return what names the split of each record. The column of a table is SET= in the headers of its records."""
    return "its column of sets" if is_sequence_table(path) else "SET= in its headers"
