"""Embeddings as a scikit-learn transformer: from lists of sequences to a matrix."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin

from esmshard.embed.spec import choose
from esmshard.errors import UsageError
from esmshard.io.array_formats import Output
from esmshard.io.paths import state
from esmshard.model import weights


class SequenceEmbedder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A transformer from protein sequences to embeddings, for pipelines and searches of scikit-learn.

    Nothing is learned from data, so `transform` needs no `fit`. The weights are read once in each process. They are not
    part of a pickle or a clone, which have a few bytes; a worker of `n_jobs=2` reads them itself.

    >>> SequenceEmbedder(layer=3).transform(["MKTAYIAK", "GSHM"]).shape
    (2, 192)

    Args:
        model: see `esmshard.load`.
        pool: `mean`, `max` or `cls`.
        layer: 0 (embedding) to the number of layers; the last by default.
        tokens: tokens computed at once. A longer sequence is computed alone.
        device: see `esmshard.load`.
    """

    def __init__(
        self,
        model: str = "starter",
        pool: str = "mean",
        layer: int | None = None,
        tokens: int | None = 4096,
        device: str | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.layer = layer
        self.tokens = tokens
        self.device = device

    def fit(self, X: Any, y: object = None) -> "SequenceEmbedder":
        """Check the parameters and the sequences. Nothing is learned."""
        from esmshard.api import sequence_inputs

        self._output()
        sequence_inputs.sequences(sequence_inputs.as_list(X, "sequences"))
        return self

    def transform(self, X: Any) -> npt.NDArray[np.float32]:
        """Compute embeddings, float32 [N, D], of N sequences: a list, a 1-d array or a Series of strings.

        Raises:
            InputError: a `ValueError` with the sequence and the position of a character that is no residue.
        """
        from esmshard.api import sequence_inputs

        wanted, sequences = self._output(), sequence_inputs.as_list(X, "sequences")
        model = _loaded(str(self.model), _version(str(self.model)), self.device)
        found: npt.NDArray[np.float32] = model.embed(sequences, wanted.pool, wanted.layer, tokens=self.tokens)
        return found

    def get_feature_names_out(self, input_features: object = None) -> npt.NDArray[np.object_]:
        """Return `mean_6_0`, `mean_6_1` and so on: pool, layer, column. For `set_output`."""
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
        """Return the output that the parameters define, without reading weights. `UsageError` for an impossible one."""
        if self.tokens is not None and (not isinstance(self.tokens, int) or self.tokens < 1):
            raise UsageError(f"tokens is {self.tokens!r}; a number from 1 on is expected, or None")
        layers = None if self.layer is None else [self.layer]
        found = choose([self.pool], layers, weights.read(str(self.model)).config, str(self.model))[0]
        if not found.pooled:
            raise UsageError(f"pool is {self.pool!r}; a matrix has one row a sequence: mean, max or cls is expected")
        return found


Version = tuple[str | tuple[str, int, int, int, int], ...]


def _version(model: str) -> Version:
    """Return facts that change when a model's files change, since another fine-tuning may write to the same path."""
    found = weights.read(model)
    return (found.made, *((str(file), *state(Path(file))) for file in found.files))


@lru_cache(maxsize=2)
def _loaded(model: str, version: Version, device: str | None) -> Any:
    from esmshard.api.model import load

    return load(model, device)
