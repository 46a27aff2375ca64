"""`SequenceEmbedder` in pipelines and searches."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from model_files import TINY, fair_esm, write_transformers
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

import esmshard
from esmshard import SequenceEmbedder
from esmshard.api.model import _loaded, _version
from esmshard.errors import UsageError
from esmshard.vocab import STANDARD

SEQUENCES = ["".join(np.random.default_rng(n).choice(list(STANDARD), 5 + n)) for n in range(30)]
SHARE_K = np.array([sequence.count("K") + sequence.count("R") for sequence in SEQUENCES]) / np.arange(5, 35)


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
    columns = ColumnTransformer([("esm", embedder, "x")]).set_output(transform="pandas").fit_transform(table)
    assert np.array_equal(columns, found)
    assert columns.columns[[0, -1]].tolist() == ["esm__max_0_0", "esm__max_0_191"]
    assert embedder.get_params().items() <= vars(embedder).items()
    assert len(pickle.dumps(embedder)) < 1000, "weights are no part of it"
    for copy in (pickle.loads(pickle.dumps(embedder)), clone(embedder)):
        assert np.array_equal(copy.transform(SEQUENCES), found)


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
