"""The parts of the library from which users build a training loop, on three ranks that only srun's variables name."""

from pathlib import Path

from ranks import run_ranks


def test_a_loop_of_ones_own_on_three_ranks_of_srun(tmp_path: Path) -> None:
    results = run_ranks("own_loop:loop", 3, tmp_path, str(tmp_path / "checkpoints"))
    assert [found["size"] for found in results] == [3, 3, 3], "each process was a world of its own"
    for found in results:
        assert max(found["worst"].values()) < 1e-6, "checkpointing and sharding change no gradient"
        assert found["held"]["no_shard"] == found["all"]
        assert found["held"]["full_shard"] < 0.4 * found["all"]
        assert found["held"]["shard_grad_op"] == found["held"]["full_shard"]
        assert "activation_checkpointing='full'" in found["refused"][0]
        assert "`layers`" in found["refused"][1]
        assert found["newest"]
    assert [found["hashed"] > 0 for found in results] == [True, False, False]
