"""Embeddings as a scikit-learn transformer: lists of sequences in, a matrix out."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin

from esmshard.errors import UsageError
from esmshard.files import state
from esmshard.infer.outputs import Output, choose
from esmshard.model import weights


class SequenceEmbedder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Protein sequences to embeddings, for pipelines and searches of scikit-learn.

    Nothing is learned from data, so `transform` needs no `fit`. The weights are read once a process and are no part
    of a pickle or a clone, which are a few bytes; a worker of `n_jobs=2` reads them itself.

    >>> SequenceEmbedder(layer=3).transform(["MKTAYIAK", "GSHM"]).shape
    (2, 192)

    Args:
        model: see `esmshard.load`.
        pool: `mean`, `max` or `cls`.
        layer: 0 (embedding) to the number of layers; the last by default.
        tokens: computed at once; a longer sequence goes alone.
    """

    def __init__(
        self, model: str = "starter", pool: str = "mean", layer: int | None = None, tokens: int | None = 4096
    ) -> None:
        self.model = model
        self.pool = pool
        self.layer = layer
        self.tokens = tokens

    def fit(self, X: Sequence[str], y: object = None) -> "SequenceEmbedder":
        """Check the parameters and the sequences. Learns nothing."""
        from esmshard.infer import given

        self._output()
        given.sequences(given.as_list(X, "sequences"))
        return self

    def transform(self, X: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embeddings, float32 [N, D], of N sequences: a list, a 1-d array or a Series of strings.

        Raises:
            InputError: a `ValueError`, naming the sequence and the position of what is no residue.
        """
        from esmshard.infer import given

        wanted, sequences = self._output(), given.as_list(X, "sequences")
        found: npt.NDArray[np.float32] = _loaded(str(self.model), _version(str(self.model))).embed(
            sequences, wanted.pool, wanted.layer, tokens=self.tokens
        )
        return found

    def get_feature_names_out(self, input_features: object = None) -> npt.NDArray[np.object_]:
        """`mean_6_0`, `mean_6_1` and so on: pool, layer, column. For `set_output`."""
        name = self._output().name
        dim = weights.read(str(self.model)).config.dim
        return np.array([f"{name}_{column}" for column in range(dim)], dtype=object)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = tags.input_tags.one_d_array = True
        tags.input_tags.two_d_array = False
        tags.requires_fit = False
        tags.transformer_tags.preserves_dtype = []
        return tags

    def _output(self) -> Output:
        """What the parameters ask for; no weights are read. `UsageError` for what there is not."""
        if self.tokens is not None and (not isinstance(self.tokens, int) or self.tokens < 1):
            raise UsageError(f"tokens is {self.tokens!r}; a number from 1 on is expected, or None")
        layers = None if self.layer is None else [self.layer]
        found = choose([self.pool], layers, weights.read(str(self.model)).config.n_layers, str(self.model))[0]
        if not found.pooled:
            raise UsageError(f"pool is {self.pool!r}; a matrix has one row a sequence: mean, max or cls is expected")
        return found


Version = tuple[str | tuple[str, int, int, int, int], ...]


def _version(model: str) -> Version:
    """What tells whether a model is still the one that was read: another fine-tuning may have written the same path."""
    found = weights.read(model)
    return (found.made, *((str(file), *state(Path(file))) for file in found.files))


@lru_cache(maxsize=2)
def _loaded(model: str, version: Version) -> Any:
    from esmshard.infer.loaded import load

    return load(model)
