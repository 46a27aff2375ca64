"""Each rank reads its own rows of the weights; what goes wrong in silence is caught."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from ranks import run_ranks

from esmshard.model import weights
from esmshard.model.export import write_transformers
from esmshard.model.families.family_registry import SIZES, n_parameters
from esmshard.parallel.layout import Layout
from esmshard.parallel.load import materialise
from esmshard.parallel.process_group import World


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nano model with random weights, as one safetensors file."""
    directory, config = tmp_path_factory.mktemp("stored"), SIZES["nano"]
    base = weights.fresh(config, 3)
    write_transformers(directory, config, weights.shapes(config), base.__getitem__)
    return directory


def test_ranks_read_their_own_rows_and_make_the_stored_model(stored: Path, tmp_path: Path) -> None:
    sizes = {name: shape for name, shape in weights.shapes(SIZES["nano"]).items() if name != "lm_head.weight"}
    firsts = sum(shape[1:].numel() for shape in sizes.values())  # a row of each tensor, for the comparison
    expected = weights.read(str(stored))
    for found in run_ranks("loading:read_from", 4, tmp_path, str(stored)):
        assert len(found) == 4
        for strategy, result in found.items():
            assert result["read"] == result["held"] + firsts, strategy
            group = {"no_shard": 1, "hybrid_shard": 2}.get(strategy, 4)
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


def test_a_rank_with_other_weights_or_none_is_every_ranks_error(tmp_path: Path) -> None:
    for said in run_ranks("loading:failing", 3, tmp_path, "seed", str(tmp_path)):
        assert len(said) == 2
        for sentence in said:
            assert sentence.startswith("ranks 0 and 2 start from different weights (first: embed_tokens.weight, ")
    for said in run_ranks("loading:failing", 2, tmp_path, "unreadable", str(tmp_path / "model")):
        assert said == ["rank 1: model: cannot be read"] * 2


class Forgetful(nn.Module):
    """A block with a buffer that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.register_buffer("table", torch.ones(4), persistent=False)


def test_a_buffer_that_nothing_would_fill_is_refused() -> None:
    alone = World(0, 1, torch.device("cpu"), None)
    with pytest.raises(AssertionError, match="table is a buffer"):
        materialise(Forgetful(), lambda name, rows: torch.ones(4, 4)[rows], Layout(), alone)


def test_offloaded_weights_lie_on_the_host_and_buffers_are_filled(tmp_path: Path) -> None:
    for found in run_ranks("loading:offloaded", 2, tmp_path):
        assert found == {"devices": {"cpu"}, "buffers": 2, "right": True}


def test_a_tied_weight_in_two_groups_is_refused(tmp_path: Path) -> None:
    for device in ("cpu", "meta"):
        for message in run_ranks("work:split_tie", 2, tmp_path, device):
            assert "share" in message, device


def test_large_models_over_64_ranks(tmp_path: Path) -> None:
    """Without one number of them in memory."""
    large: list[tuple[str, dict[str, Any], int, slice, slice]] = [
        # 33 rows are one a rank for the first 33 of 64, five a rank in a group of 8; 20,480 rows are 320 and 2,560.
        ("esm2_t48_15B_UR50D", {"strategy": "full_shard"}, 0, slice(0, 1), slice(0, 320)),
        ("esm2_t48_15B_UR50D", {"strategy": "shard_grad_op"}, 63, slice(33, 33), slice(20160, 20480)),
        ("esm2_t48_15B_UR50D", {"strategy": "hybrid_shard"}, 62, slice(30, 33), slice(15360, 17920)),
        # 64 rows of the embedding are one a rank, 6,912 rows of a gate are 108.
        ("esmc_6b", {"strategy": "full_shard"}, 63, slice(63, 64), slice(6804, 6912)),
    ]
    for name, settings, rank, embedding, fc1 in large:
        (found,) = run_ranks("loading:as_one_of_many", 1, tmp_path, name, 64, settings, rank)
        share = n_parameters(SIZES[name]) / (8 if settings["strategy"] == "hybrid_shard" else 64)
        assert found["held"] == pytest.approx(share, rel=1e-3)
        groups = 49 if name.startswith("esm2") else 81
        assert (found["embedding"], found["fc1"], found["groups"]) == (embedding, fc1, groups)
