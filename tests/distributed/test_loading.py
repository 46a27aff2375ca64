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
import work
from ranks import run_ranks

from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.export import write_transformers
from esmshard.model.families.esm2 import ESM2
from esmshard.model.families.family_registry import SIZES
from esmshard.parallel.layout import STRATEGIES, Layout
from esmshard.parallel.load import RowsOf, materialise
from esmshard.parallel.process_group import World, world
from esmshard.parallel.shard import local, shard


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nano model with random weights, as one safetensors file."""
    directory, config = tmp_path_factory.mktemp("stored"), SIZES["nano"]
    base = weights.fresh(config, 3)
    write_transformers(directory, config, weights.shapes(config), base.__getitem__)
    return directory


def trunk(ranks: World, rows_of: RowsOf, strategy: str) -> nn.Module:
    with torch.device("meta"):
        model = ESM2(SIZES["nano"])
    laid = Layout(strategy=strategy, world_size=ranks.size, group=2 if strategy == "hybrid_shard" else 0)
    shard(model, laid, ranks)
    materialise(model, rows_of, laid, ranks)
    return model


def read_from(path: str) -> dict[str, dict[str, Any]]:
    """By strategy: numbers that this rank read out of a model file, those that it keeps, and what the model became."""
    results, stored = {}, weights.read(path)
    with world() as ranks:
        for strategy in STRATEGIES:
            asked: list[int] = []

            def rows_of(name: str, rows: slice, asked: list[int] = asked) -> torch.Tensor:
                tensor = stored.rows(name, rows)
                asked.append(tensor.numel())
                return tensor

            model = trunk(ranks, rows_of, strategy)
            held = sum(local(t).numel() for n, t in model.state_dict().items() if n != "lm_head.weight")
            whole = {name: work.full(tensor) for name, tensor in model.state_dict().items()}
            results[strategy] = {"read": sum(asked), "largest": max(asked), "held": held, "whole": whole}
    return results


def test_ranks_read_their_own_rows_and_make_the_stored_model(stored: Path, tmp_path: Path) -> None:
    sizes = {name: shape for name, shape in weights.shapes(SIZES["nano"]).items() if name != "lm_head.weight"}
    firsts = sum(shape[1:].numel() for shape in sizes.values())  # a row of each tensor, for the comparison
    expected = weights.read(str(stored))
    for of_rank in run_ranks("test_loading:read_from", 4, tmp_path, str(stored)):
        for strategy in STRATEGIES:
            result = of_rank[strategy]
            assert result["read"] == result["held"] + firsts, strategy
            group = {"no_shard": 1, "hybrid_shard": 2}.get(strategy, 4)
            assert result["largest"] == 4 * 32 * 32 // group, "the rows of the largest matrix"
            assert result["whole"].keys() == sizes.keys() | {"lm_head.weight"}
            assert all(np.array_equal(tensor, expected[name].numpy()) for name, tensor in result["whole"].items())


class _NoWhole:
    """A safetensors file of which no tensor may be read whole."""

    def __init__(self, *rest: Any, **options: Any) -> None:
        self.file = safe_open(*rest, **options)

    def __enter__(self) -> "_NoWhole":
        self.file = self.file.__enter__()
        return self

    def __exit__(self, *rest: object) -> None:
        pass

    def get_slice(self, key: str) -> Any:
        return self.file.get_slice(key)


def test_of_a_file_only_the_rows_are_read(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, opened = weights.read(str(stored))["layers.1.fc1.weight"], weights.read(str(stored))
    monkeypatch.setattr("esmshard.model.weight_reader.safe_open", _NoWhole)
    assert torch.equal(opened.rows("layers.1.fc1.weight", slice(3, 50)), expected[3:50])
    assert torch.equal(opened.rows("lm_head.weight", slice(0, 1)), opened.rows("embed_tokens.weight", slice(0, 1)))


def failing(kind: str) -> str:
    """What each rank is told when something is wrong with the weights of the last one; and that all go on after it."""
    with world() as ranks:
        last, said = ranks.rank == ranks.size - 1, ""
        base = weights.fresh(SIZES["nano"], 7 if kind == "seed" and last else 3)

        def rows_of(name: str, rows: slice) -> torch.Tensor:
            if kind == "unreadable" and last and name == "layers.1.fc1.weight":
                raise InputError("model: cannot be read")
            return base.rows(name, rows)

        try:
            trunk(ranks, rows_of, "full_shard")
        except InputError as error:
            said = str(error)
        assert ranks.sum([1]) == [ranks.size], "the ranks are still together"
    return said


def test_a_rank_with_other_weights_or_none_is_every_ranks_error(tmp_path: Path) -> None:
    for said in run_ranks("test_loading:failing", 3, tmp_path, "seed"):
        assert said.startswith("ranks 0 and 2 start from different weights (first: embed_tokens.weight, ")
    assert run_ranks("test_loading:failing", 2, tmp_path, "unreadable") == ["rank 1: model: cannot be read"] * 2


def test_a_buffer_that_nothing_would_fill_is_refused() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.ones(4), persistent=False)
    with pytest.raises(AssertionError, match="table is a buffer"):
        materialise(model, lambda name, rows: torch.ones(4)[rows], Layout(), World(0, 1, torch.device("cpu"), None))


class TiedAcrossGroups(nn.Module):
    """The root's matrix is that of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 8)
        self.head.weight = self.layers[1].weight


def split_tie() -> list[str]:
    """Shard a model whose tied weight falls into two groups; the messages of whoever notices."""
    messages = []
    with world() as ranks:
        for device in ("cpu", "meta"):
            with torch.device(device):
                model = TiedAcrossGroups()
            with pytest.raises((ValueError, AssertionError)) as error:
                shard(model, Layout(world_size=ranks.size), ranks)
            messages.append(str(error.value))
    return messages


def test_a_tied_weight_in_two_groups_is_refused(tmp_path: Path) -> None:
    for messages in run_ranks("test_loading:split_tie", 2, tmp_path):
        assert all("share" in message for message in messages)
