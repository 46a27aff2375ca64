import pytest
import torch

from esmshard.parallel import plan


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (10_000_000, 4096),  # plenty: the whole share of the step
        (2_000_000, 1190),  # (0.6 x 2,000,000 - 10,000) / 1,000
        (100_000, 300),  # too little for anything: the longest record, which must go through somehow
    ],
)
def test_tokens_that_fit(free: int, expected: int) -> None:
    assert plan.tokens_that_fit(free, state=10_000, bytes_per_token=1_000, longest=300, share=4096) == expected


def test_estimates_move_the_right_way() -> None:
    whole = plan.activation_bytes_per_token(33, 1280, checkpointing=False, half=False)
    assert whole == 33 * 21 * 1280 * 4
    assert plan.activation_bytes_per_token(33, 1280, checkpointing=False, half=True) == whole // 2
    assert plan.activation_bytes_per_token(33, 1280, checkpointing=True, half=False) < whole / 10
    assert plan.state_bytes(1000, 4) == 4000
    free = plan.free_bytes(torch.device("cpu"), 1)
    assert free > 2**20
    assert plan.free_bytes(torch.device("cpu"), 4) < free


def test_the_free_memory_of_an_apple_gpu_is_what_metal_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 300)
    assert plan.free_bytes(torch.device("mps"), 1) == 700


def test_trunk_activations_are_about_what_is_estimated() -> None:
    """Bytes that autograd keeps for the backward pass, counted through its own hooks."""
    from esmshard.batch import pack
    from esmshard.model.config import SIZES
    from esmshard.model.esm2 import ESM2
    from esmshard.vocab import encode

    config = SIZES["mini"]
    model, batch = ESM2(config), pack([encode("ACDEFGHIKLMNPQRSTVWY" * 20)])
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = model(batch)
    estimate = plan.activation_bytes_per_token(config.n_layers, config.dim, checkpointing=False, half=False)
    assert output.representations
    assert 0.7 < sum(kept.values()) / (estimate * len(batch.tokens_T)) < 1.2
