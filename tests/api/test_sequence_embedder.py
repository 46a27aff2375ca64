"""`SequenceEmbedder` in pipelines and searches, and under scikit-learn's own checks of estimators.

These feed matrices of numbers. Each row of numbers is spelled as a sequence, and all checks must pass.
"""

import pickle
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from model_files import TINY, fair_esm, write_transformers
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import validate_data

import esmshard
from esmshard import SequenceEmbedder
from esmshard.api.model import _loaded, _version
from esmshard.errors import UsageError
from esmshard.vocab import STANDARD

SEQUENCES = ["".join(np.random.default_rng(n).choice(list(STANDARD), 5 + n)) for n in range(30)]
SHARE_K = np.array([sequence.count("K") + sequence.count("R") for sequence in SEQUENCES]) / np.arange(5, 35)


# In pipelines


def test_rows_are_those_of_the_model_for_every_form_of_input() -> None:
    model = esmshard.load("starter")
    for pool, layer in (("mean", None), ("cls", 3), ("max", 0)):
        found = SequenceEmbedder(pool=pool, layer=layer).fit_transform(SEQUENCES)
        assert (found.dtype, found.shape) == (np.float32, (30, 192))
        alone = np.stack([model.embed(sequence, pool, layer) for sequence in SEQUENCES])
        assert np.abs(found - alone).max() <= 1e-5 * np.abs(alone).max()
        assert found.std(0).min() > 0
    embedder = SequenceEmbedder(pool="max", layer=0)
    for given in (np.array(SEQUENCES), np.array(SEQUENCES, object), pd.Series(SEQUENCES, index=range(5, 35))):
        assert np.array_equal(embedder.transform(given), found)
    table = pd.DataFrame({"id": ["a", "b"] * 15, "y": SHARE_K, "x": SEQUENCES})
    assert np.array_equal(ColumnTransformer([("esm", embedder, "x")]).fit_transform(table), found)
    assert len(pickle.dumps(embedder)) < 1000, "weights are no part of it"
    for copy in (pickle.loads(pickle.dumps(embedder)), clone(embedder)):
        assert np.array_equal(copy.transform(SEQUENCES), found)
    assert set(vars(embedder)) == {"model", "pool", "layer", "tokens", "device"}


def test_it_learns_in_a_pipeline_and_a_search() -> None:
    """The share of positive residues is linear in the mean of the embedding layer."""
    search = GridSearchCV(
        make_pipeline(SequenceEmbedder(), Ridge(1e-4)), {"sequenceembedder__layer": [0, 6]}, cv=3, scoring="r2"
    )
    search.fit(SEQUENCES, SHARE_K)
    assert search.best_params_ == {"sequenceembedder__layer": 0}
    assert search.best_score_ > 0.5
    mean = search.predict(SEQUENCES) - SHARE_K
    assert np.abs(mean).max() < 0.02


def test_a_model_is_read_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_transformers(path, fair_esm(TINY, 0), TINY)
    embedder = SequenceEmbedder(str(path))
    first = embedder.transform(SEQUENCES)
    opened = _loaded(str(path), _version(str(path)), None)
    assert np.array_equal(clone(embedder).transform(SEQUENCES), first)
    assert _loaded(str(path), _version(str(path)), None) is opened
    shutil.rmtree(path)
    write_transformers(path, fair_esm(TINY, 1), TINY)
    assert np.abs(embedder.transform(SEQUENCES) - first).max() > 0.01


def test_bad_parameters_are_seen_when_it_is_fitted() -> None:
    for pool in ("residue", "median"):
        with pytest.raises(UsageError, match="mean, max"):
            SequenceEmbedder(pool=pool).fit(["MKT"])


# scikit-learn's checks

SKIPPED = {"check_array_api_input"}
"""By scikit-learn itself: it needs SCIPY_ARRAY_API in the environment, and is for inputs on a GPU."""


class OfMatrices(SequenceEmbedder):
    """Spells each row of numbers as a sequence: scikit-learn checks the matrix, and everything else is the embedder."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = True  # then scikit-learn leaves no check out
        tags.input_tags.one_d_array = tags.input_tags.string = False
        return tags

    def fit(self, X: Any, y: object = None) -> "OfMatrices":
        super().fit(self._spelled(X, reset=True), y)
        return self

    def transform(self, X: Any) -> Any:
        return super().transform(self._spelled(X, reset=False))

    def _spelled(self, X: Any, reset: bool) -> list[str]:
        numbers = validate_data(self, X, reset=reset, dtype=np.float64)
        return ["".join(STANDARD[n] for n in row) for row in np.floor(np.abs(numbers) * 7).astype(np.int64) % 20]


TO_1E_7 = {"check_methods_subset_invariance"} if torch.backends.cpu.get_cpu_capability() == "AVX512" else set[str]()
"""What asks for equal rows to 1e-7. With AVX-512, matrix products of other sizes are rounded otherwise, by 1e-6."""


@pytest.mark.filterwarnings("ignore")
def test_all_checks_pass_where_numbers_are_spelled() -> None:
    found = Counter[str]()
    for result in check_estimator(OfMatrices(layer=2), on_fail=None, on_skip=None):
        found[result["status"]] += 1
        assert result["status"] != "failed" or result["check_name"] in TO_1E_7, result
        assert result["status"] != "skipped" or result["check_name"] in SKIPPED, result
    assert found["passed"] >= 40
