"""A model that reads coordinates and structure tokens learns on two ranks as on one, under every kind of layout."""

from pathlib import Path
from typing import Any

import numpy as np
import with_tracks
from ranks import run_ranks

CASES: dict[str, dict[str, Any]] = {
    "no_shard": {"strategy": "no_shard"},
    "checkpointing selective": {"activation_checkpointing": "selective"},
    "offload": {"cpu_offload": True},
    "bf16": {"precision": "bf16"},
    "tensor": {"tensor": 2},
    "context, checkpointing full": {"context": 2, "activation_checkpointing": "full"},
}


def test_steps_on_two_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    """One rank has no protein with a structure, and still has gradients of the same parameters."""
    reference = with_tracks.plain()
    for found in run_ranks("with_tracks:cases", 2, tmp_path, CASES):
        for case, mine in found.items():
            rough = case == "bf16"
            assert np.allclose(mine["losses"], reference["losses"], rtol=0, atol=5e-3 if rough else 1e-5), case
            assert mine["coordinates"] == {"torch.float32"}, "coordinates are never rounded"
            assert rough or np.allclose(mine["norms"], reference["norms"], rtol=1e-3), case

    # What reads the tracks learns.
    assert reference["losses"][-1] < reference["losses"][0] - 0.1
    before = {name: p.detach().numpy() for name, p in with_tracks.built(None, with_tracks.Layout()).named_parameters()}
    moved = {name: float(np.abs(reference["weights"][name] - before[name]).max()) for name in before}
    learned = {name for name in moved if name.startswith(("trunk.geom_attn.", "trunk.other_tracks.structure_tokens"))}
    assert len(learned) == 6
    assert all(moved[name] > 1e-4 for name in learned)
    assert not any(moved[name] for name in moved if "other_" in name and name not in learned)
