"""The splits of a recipe, opened. No torch."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard import recipe as recipes
from esmshard.data import splits, structure_splits
from esmshard.data.clusters import read_clusters
from esmshard.data.ingest import cached
from esmshard.data.loader import Examples, Labels
from esmshard.data.store import TokenStore
from esmshard.data.variant_records import open_variants
from esmshard.data_settings import DataSettings
from esmshard.settings import Recipe
from esmshard.task_settings import VariantSettings
from esmshard.train.set_members import marked_otherwise, members

OpenLabels = Callable[[Path, TokenStore, DataSettings], Labels | None]


def open_split(recipe: Recipe, name: str, labels: OpenLabels | None) -> Examples:
    """One split: tokens (ingested on first use) and labels. Only training records are cut.

    Under cross-validation the test set is the part of the training file that is left out of it. A file that the recipe
    names for several splits is divided as its headers or its table of labels say, where they do.

    Args:
        recipe: as loaded.
        name: train, valid or test.
        labels: opens those of a FASTA file and its records; None where only the sequences are wanted.
    """
    data, seed = recipe.data, recipe.train.seed
    if isinstance(recipe.task, VariantSettings):
        return open_variants(data, name, alone=recipe.task.pool == "wild_type")
    divided = data.folds is not None and name != "valid"
    path = recipes.sample(getattr(data, "train" if divided else name))
    fasta, tokens = _records(path)
    found = None if labels is None else labels(fasta, tokens, data)
    members_N, told = members(data, name, path, fasta, tokens)
    digest = tokens.digest
    if members_N is not None:
        digest = hashlib.sha256(digest.encode() + np.packbits(members_N).tobytes()).hexdigest()
    if divided:
        assert data.folds is not None
        members_N = (fold_of(tokens, data.folds, data.clusters) == data.fold) == (name == "test")
    how: dict[str, Any] = {"members_N": members_N, "digest": digest}
    if name == "train":
        how |= {"long": data.long, "max_length": data.max_length, "seed": seed}
    examples = Examples(name, path, tokens, found, **how)
    examples.notices += told
    return examples


def open_tested(source: str, file: str | None, recipe: Recipe, labels: OpenLabels) -> Examples:
    """Labelled records that a model is to be tested on, and that no recipe names.

    Args:
        source: a FASTA file, a token store, structures, or a sample.
        file: with the labels, if they are not in the records or beside them.
        recipe: of the model.
        labels: opens those of a FASTA file and its records.
    """
    path = recipes.sample(source)
    fasta, tokens = _records(path)
    where = recipe.data.model_copy(update={"labels": file, "mask": None})
    examples = Examples(Path(source).name, path, tokens, labels(fasta, tokens, where))
    if others := marked_otherwise("test", path, tokens):
        examples.notices.append(
            f"all its records are scored, whatever SET= in its headers says ({others}); `esmshard split {path} -o DIR "
            "--by given` writes those of the test set to DIR/test.fasta"
        )
    return examples


def _records(path: Path) -> tuple[Path, TokenStore]:
    """The FASTA file that a data path means, which may be structures, and its records."""
    fasta = structure_splits.cached_split(path) if structure_splits.holds_structures(path) else path
    tokens = cached(fasta)
    if fasta != path:  # what was changed in the structures is told with what was changed in the sequences
        tokens.notices = [*structure_splits.notices(fasta), *tokens.notices]
    return fasta, tokens


def in_tokens(recipe: Recipe, train: Examples) -> Recipe:
    """The recipe with `batch.sequences` as tokens."""
    if recipe.batch.sequences is None:
        return recipe
    tokens = recipe.batch.sequences * int(train.tokens.max())
    batch = recipe.batch.model_copy(update={"sequences": None, "global_tokens": tokens})
    return recipe.model_copy(update={"batch": batch})


def fold_of(store: TokenStore, folds: int, clusters: str | None) -> npt.NDArray[np.int64]:
    """Fold of each record, int64 [N], the same for every seed of a recipe.

    Records of one cluster stay together; without clusters, records of one sequence do.
    """
    count = len(store)
    if clusters is not None:
        groups = read_clusters(Path(clusters), [store.id(n) for n in range(count)]).names
    else:
        groups = [hashlib.blake2b(store.residues(n).tobytes(), digest_size=16).hexdigest() for n in range(count)]
    return splits.by_cluster(groups, folds=folds)
