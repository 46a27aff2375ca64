"""Opens the splits of a recipe. No torch."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard import remote
from esmshard.data.batching.loader import Examples, Labels
from esmshard.data.fasta.sources import is_sequence_table
from esmshard.data.fasta.symbols import Rules
from esmshard.data.labels.label_sources import rules_of
from esmshard.data.splits import assignment
from esmshard.data.splits.clusters import read_clusters
from esmshard.data.splits.set_members import marked_otherwise, marks, members
from esmshard.data.splits.variant_records import open_variants
from esmshard.data.store.ingestion import cached
from esmshard.data.store.token_store import TokenStore
from esmshard.data.structures import structure_folder
from esmshard.data.tracks.track_files import TrackFile, record_tracks, with_paths
from esmshard.errors import UsageError
from esmshard.joined_chains import Chains
from esmshard.recipe.data_section import DataSettings, JoinSettings
from esmshard.recipe.sections import Recipe
from esmshard.vocab import SEPARATOR, chain_spans

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
    if data.complexes is not None and not any(map(_holds_structures, (data.train, data.valid, data.test))):
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
    if others := marked_otherwise("test", path, tokens):
        examples.notices.append(
            f"all its records are scored, whatever {marks(path)} says ({others}); `esmshard split {path} -o DIR "
            "--by given` writes those of the test set to DIR/test.fasta"
        )
    if outer:
        examples.add_tracks(record_tracks(outer, tokens))
    return examples


def _holds_structures(path: str | None) -> bool:
    return path is not None and structure_folder.holds_structures(remote.data_file(path))


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
