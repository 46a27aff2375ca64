"""The splits of a recipe, opened. No torch."""

from collections.abc import Callable
from pathlib import Path

from esmshard import recipe as recipes
from esmshard.data import structure_splits
from esmshard.data.ingest import cached
from esmshard.data.loader import Examples, Labels
from esmshard.data.store import TokenStore
from esmshard.settings import Recipe


def open_split(recipe: Recipe, name: str, labels: Callable[[Path, TokenStore], Labels] | None) -> Examples:
    """One split: tokens (ingested on first use) and labels. Only training records are cut.

    Args:
        recipe: as loaded.
        name: train, valid or test.
        labels: opens those of a FASTA file and its records; None where only the sequences are wanted.
    """
    path = recipes.sample(getattr(recipe.data, name))
    fasta = structure_splits.cached_split(path) if structure_splits.holds_structures(path) else path
    tokens = cached(fasta)
    if fasta != path:  # what was changed in the structures is told with what was changed in the sequences
        tokens.notices = [*structure_splits.notices(fasta), *tokens.notices]
    found = None if labels is None else labels(fasta, tokens)
    if name != "train":
        return Examples(name, path, tokens, found)
    data, seed = recipe.data, recipe.train.seed
    return Examples(name, path, tokens, found, long=data.long, max_length=data.max_length, seed=seed)
