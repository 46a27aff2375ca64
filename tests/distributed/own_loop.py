"""What the ranks of `test_own_loop` do: the parts of a training loop of one's own, in one start."""

import os
from pathlib import Path
from typing import Any

import torch
from ranks import patch
from torch import nn
from transformers import BertConfig, BertModel

import esmshard as es
from esmshard.checkpoint import manifest

HASHED: list[str] = []


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


def _refused(model: nn.Module, ranks: es.World, **options: Any) -> str:
    try:
        es.shard(model, es.Layout(world_size=ranks.size, **options), ranks)
    except es.UsageError as error:
        return str(error)
    return "taken"


def loop(directory: str) -> dict[str, Any]:
    """Join as srun's task, shard a model under each strategy, and look for a checkpoint."""
    rank, size, port = (os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    os.environ |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": size, "SLURM_STEP_NUM_TASKS": size}
    os.environ |= {"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": size, "SLURM_JOB_ID": port}
    hash_of = manifest.sha256
    patch.setattr(manifest, "sha256", lambda path: (HASHED.append(path.name), hash_of(path))[1])
    expected, held, worst = gradients(Bert()), {}, {}
    with es.world() as ranks:
        for strategy in ("full_shard", "shard_grad_op", "no_shard"):
            model = Bert()
            es.shard(model, es.Layout(strategy=strategy, world_size=ranks.size, activation_checkpointing="full"), ranks)
            found = gradients(model)
            worst[strategy] = max(float((found[n] / ranks.size - g).abs().max()) for n, g in expected.items())
            held[strategy] = sum(p.to_local().numel() for p in model.parameters())
        refused = _refused(Bert(), ranks, activation_checkpointing="selective"), _refused(nn.Linear(2, 2), ranks)
        written = es.write_checkpoint(Path(directory), 7, {"model.x": torch.ones(3)}, {}, keep=1)
        newest = es.newest_checkpoint(Path(directory), print)
        return {
            "size": ranks.size,
            "held": held,
            "all": sum(p.numel() for p in Bert().parameters()),
            "worst": worst,
            "refused": refused,
            "newest": newest == written,
            "hashed": len(HASHED),
        }
