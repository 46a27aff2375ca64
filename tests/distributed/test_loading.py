"""Each rank reads its own rows of the weights; what goes wrong in silence is caught."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parent))
import loading
from ranks import run_ranks

from esmshard.model import weights
from esmshard.model.export import write_transformers
from esmshard.model.families.family_registry import SIZES, n_parameters


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nano model with random weights, as one safetensors file."""
    directory, config = tmp_path_factory.mktemp("stored"), SIZES["nano"]
    base = weights.fresh(config, 3)
    write_transformers(directory, config, weights.shapes(config), base.__getitem__)
    return directory


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_their_own_rows_and_make_the_stored_model(stored: Path, tmp_path: Path, size: int) -> None:
    sizes = {name: shape for name, shape in weights.shapes(SIZES["nano"]).items() if name != "lm_head.weight"}
    firsts = sum(shape[1:].numel() for shape in sizes.values())  # a row of each tensor, for the comparison
    expected = weights.read(str(stored))
    for found in run_ranks("loading:read_from", size, tmp_path, str(stored)):
        assert len(found) == (4 if size == 4 else 3)
        for strategy, result in found.items():
            assert result["read"] == result["held"] + firsts, strategy
            group = {"no_shard": 1, "hybrid_shard": 2}.get(strategy, size)
            assert result["largest"] == 4 * 32 * 32 // group, "the rows of the largest matrix"
            assert result["whole"].keys() == sizes.keys() | {"lm_head.weight"}
            assert all(np.array_equal(tensor, expected[name].numpy()) for name, tensor in result["whole"].items())


def test_of_a_file_only_the_rows_are_read(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights.read(str(stored))["layers.1.fc1.weight"]

    class NoWhole:
        def __init__(self, *rest: object, **options: object) -> None:
            self.file = safe_open(*rest, **options).__enter__()

        def __enter__(self) -> "NoWhole":
            return self

        def __exit__(self, *rest: object) -> None:
            pass

        def get_slice(self, key: str) -> object:
            return self.file.get_slice(key)

        def get_tensor(self, key: str) -> object:
            raise AssertionError(f"all of {key} is read")

    found = weights.read(str(stored))
    monkeypatch.setattr("esmshard.model.weight_reader.safe_open", NoWhole)
    assert torch.equal(found.rows("layers.1.fc1.weight", slice(3, 50)), whole[3:50])
    assert torch.equal(found.rows("lm_head.weight", slice(0, 1)), found.rows("embed_tokens.weight", slice(0, 1)))


def test_a_rank_that_starts_from_other_weights_is_named_on_all(tmp_path: Path) -> None:
    for said in run_ranks("loading:failing", 3, tmp_path, "seed", str(tmp_path)):
        assert len(said) == 2
        for sentence in said:
            assert sentence.startswith("ranks 0 and 2 start from different weights (first: embed_tokens.weight, ")
            assert sentence.endswith(
                "give every machine the same model files and the same versions of esmshard and torch"
            )


def test_a_rank_that_cannot_read_is_every_ranks_error(tmp_path: Path) -> None:
    for said in run_ranks("loading:failing", 2, tmp_path, "unreadable", str(tmp_path / "model")):
        assert said == ["rank 1: model: cannot be read"] * 2


def test_an_optimizer_made_too_early_is_refused(tmp_path: Path) -> None:
    for early, right in run_ranks("loading:too_early", 2, tmp_path):
        assert "tensors of the optimizer are no parameters of the model" in early
        assert right == "nothing"


def test_a_buffer_that_nothing_would_fill_is_refused() -> None:
    assert loading.forgetful() == "table is a buffer that no checkpoint holds; register it with persistent=True"


@pytest.mark.parametrize("size", [1, 2])
def test_offloaded_weights_lie_on_the_host_and_buffers_are_filled(tmp_path: Path, size: int) -> None:
    for found in run_ranks("loading:offloaded", size, tmp_path):
        assert found == {"devices": {"cpu"}, "buffers": 2, "right": True}


def test_a_tied_weight_in_two_groups_is_refused(tmp_path: Path) -> None:
    for device in ("cpu", "meta"):
        for message in run_ranks("work:split_tie", 2, tmp_path, device):
            assert "shared" in message, device


@pytest.mark.parametrize(
    ("settings", "rank", "embedding", "fc1"),
    [
        # 33 rows are one a rank for the first 33 of 64, five a rank in a group of 8; 20,480 rows are 320 and 2,560.
        ({"strategy": "full_shard"}, 0, slice(0, 1), slice(0, 320)),
        ({"strategy": "shard_grad_op"}, 63, slice(33, 33), slice(20160, 20480)),
        ({"strategy": "hybrid_shard"}, 62, slice(30, 33), slice(15360, 17920)),
    ],
)
def test_the_15b_model_over_64_ranks(
    tmp_path: Path, settings: dict[str, object], rank: int, embedding: slice, fc1: slice
) -> None:
    """Without one number of it in memory."""
    found = run_ranks("loading:as_one_of_many", 1, tmp_path, "esm2_t48_15B_UR50D", 64, settings, rank)[0]
    share = n_parameters(SIZES["esm2_t48_15B_UR50D"]) / (8 if settings["strategy"] == "hybrid_shard" else 64)
    assert found["held"] == pytest.approx(share, rel=1e-3)
    assert (found["embedding"], found["fc1"], found["groups"]) == (embedding, fc1, 49)


def test_esmc_6b_over_64_ranks(tmp_path: Path) -> None:
    """Without one number of it in memory. 64 rows of the embedding are one a rank, 6,912 rows of a gate are 108."""
    settings: dict[str, object] = {"strategy": "full_shard"}
    found = run_ranks("loading:as_one_of_many", 1, tmp_path, "esmc_6b", 64, settings, 63)[0]
    assert found["held"] == pytest.approx(n_parameters(SIZES["esmc_6b"]) / 64, rel=1e-3)
    assert (found["embedding"], found["fc1"], found["groups"]) == (slice(63, 64), slice(6804, 6912), 81)
