"""The parts of the library from which users build a training loop, on three ranks that only srun's variables name."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from transformers import BertConfig, BertModel

import esmshard as es


class Bert(nn.Module):
    """A language model of another library, as a user wraps it for `shard`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=30, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64
        )
        self.bert = BertModel(config, add_pooling_layer=False).eval()  # without dropout

    @property
    def layers(self) -> nn.ModuleList:
        return self.bert.encoder.layer  # type: ignore[no-any-return]

    def forward(self, tokens_NL: torch.Tensor) -> torch.Tensor:
        return self.bert(tokens_NL, attention_mask=torch.ones_like(tokens_NL)).last_hidden_state  # type: ignore[no-any-return]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of the mean square of the outputs, which every rank computes for the same tokens."""
    model(torch.arange(24).view(2, 12)).square().mean().backward()
    whole = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in whole.items()}


def loop(directory: str) -> dict[str, Any]:
    """Join as srun's task, shard a model under each strategy, and look for a checkpoint."""
    rank, size, port = (os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    os.environ |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": size, "SLURM_STEP_NUM_TASKS": size}
    os.environ |= {"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": size, "SLURM_JOB_ID": port}
    expected, held = gradients(Bert()), {}
    with es.world() as ranks:
        assert ranks.size == int(size)
        for strategy in ("full_shard", "shard_grad_op", "no_shard"):
            model = Bert()
            es.shard(model, es.Layout(strategy=strategy, world_size=ranks.size, activation_checkpointing="full"), ranks)
            for name, gradient in gradients(model).items():
                assert float((gradient / ranks.size - expected[name]).abs().max()) < 1e-6, (strategy, name)
            held[strategy] = sum(p.to_local().numel() for p in model.parameters())
        for wrong, options, token in (
            (Bert(), {"activation_checkpointing": "selective"}, "activation_checkpointing='full'"),
            (nn.Linear(2, 2), {}, "`layers`"),
        ):
            with pytest.raises(es.UsageError, match=token):
                es.shard(wrong, es.Layout(world_size=ranks.size, **options), ranks)
        written = es.write_checkpoint(Path(directory), 7, {"model.x": torch.ones(3)}, {}, keep=1)
        assert es.newest_checkpoint(Path(directory), print) == written
    return held


@pytest.mark.slow
def test_a_loop_of_ones_own_on_three_ranks_of_srun(tmp_path: Path) -> None:
    every = sum(p.numel() for p in Bert().parameters())
    for held in run_ranks("test_own_loop:loop", 3, tmp_path, str(tmp_path / "checkpoints")):
        assert held["no_shard"] == every
        assert held["shard_grad_op"] == held["full_shard"] < 0.4 * every
