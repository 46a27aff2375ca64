"""A model that reads coordinates and structure tokens learns on two ranks as on one, under every kind of layout."""

from typing import Any

import numpy as np
import pytest
import with_tracks
from ranks import run_ranks

CASES: dict[str, dict[str, Any]] = {
    "full_shard": {"strategy": "full_shard"},
    "layers kept": {"strategy": "shard_grad_op"},
    "no_shard": {"strategy": "no_shard"},
    "checkpointing full": {"activation_checkpointing": "full"},
    "checkpointing selective": {"activation_checkpointing": "selective"},
    "offload": {"cpu_offload": True},
    "bf16": {"precision": "bf16"},
    "tensor": {"tensor": 2},
    "context": {"context": 2},
    "context, checkpointing full": {"context": 2, "activation_checkpointing": "full"},
    "tensor, checkpointing full": {"tensor": 2, "activation_checkpointing": "full"},
}


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return with_tracks.plain()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks("with_tracks:cases", 2, tmp_path_factory.mktemp("tracks"), CASES)


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_one_process(
    reference: dict[str, Any], results: list[dict[str, dict[str, Any]]], case: str
) -> None:
    """One rank has no protein with a structure, and still has gradients of the same parameters."""
    rough = case == "bf16"
    for found in results:
        mine = found[case]
        assert np.allclose(mine["losses"], reference["losses"], rtol=0, atol=5e-3 if rough else 1e-5)
        assert mine["coordinates"] == {"torch.float32"}, "coordinates are never rounded"
        if not rough:
            assert np.allclose(mine["norms"], reference["norms"], rtol=1e-3)


def test_what_reads_the_tracks_learns(reference: dict[str, Any]) -> None:
    assert reference["losses"][-1] < reference["losses"][0] - 0.1
    before = {name: p.detach().numpy() for name, p in with_tracks.built(None, with_tracks.Layout()).named_parameters()}
    moved = {name: float(np.abs(reference["weights"][name] - before[name]).max()) for name in before}
    learned = {name for name in moved if name.startswith(("trunk.geom_attn.", "trunk.other_tracks.structure_tokens"))}
    assert len(learned) == 6
    assert all(moved[name] > 1e-4 for name in learned)
    assert not any(moved[name] for name in moved if "other_" in name and name not in learned)
