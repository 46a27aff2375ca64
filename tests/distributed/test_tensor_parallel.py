"""Layers that several ranks compute together give what one plain process gives."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import equality
from conftest import RECIPE, write_subset
from ranks import run_ranks
from test_equality import compare

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing full": {"activation_checkpointing": "full"},
    "checkpointing selective": {"activation_checkpointing": "selective"},
    "offload": {"cpu_offload": True},
    "unsharded": {"accumulate": "unsharded"},
    "wrong": {"wrong": True},
}
MATRIX: dict[int, dict[str, list[str]]] = {
    2: {"full_shard": [*OPTIONS]},
    4: {"full_shard": ["plain", "checkpointing full", "wrong"], "no_shard": ["plain"]},
}
CASES = [(size, strategy, option) for size, row in MATRIX.items() for strategy, some in row.items() for option in some]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 training chains, one without coordinates; steps of about three records."""
    directory = tmp_path_factory.mktemp("tensor")
    write_subset(directory, "train", "train", range(24), unresolved=equality.UNLABELLED)
    write_subset(directory, "valid", "valid", range(5))
    text = RECIPE.replace("global_tokens: 400", "global_tokens: 150").replace("blocks: 1", "blocks: 0")
    path = directory / "tiny.yaml"
    path.write_text(text.format(tokens_per_rank=66, out=directory / "run"))
    return path


@pytest.fixture(scope="module")
def reference(recipe: Path) -> dict[str, Any]:
    return equality.plain(str(recipe))


@pytest.fixture(scope="module")
def on_ranks(recipe: Path) -> Callable[[int], list[dict[str, Any]]]:
    known: dict[int, list[dict[str, Any]]] = {}

    def run(size: int) -> list[dict[str, Any]]:
        if size not in known:
            wanted = {
                f"{s}, {o}": {"strategy": s, "tensor": 2} | OPTIONS[o] for s, some in MATRIX[size].items() for o in some
            }
            known[size] = run_ranks("equality:cases", size, recipe.parent, str(recipe), wanted)
        return known[size]

    return run


@pytest.mark.parametrize(("size", "strategy", "option"), [case for case in CASES if case[2] != "wrong"])
def test_gradients_and_losses(
    on_ranks: Callable[[int], list[dict[str, Any]]], reference: dict[str, Any], size: int, strategy: str, option: str
) -> None:
    compare([found[f"{strategy}, {option}"] for found in on_ranks(size)], reference, option)
