"""AdamW with its parameter groups and learning rates. The names of optimizer state do not depend on the sharding."""

import math
from typing import Literal

import torch
from torch import nn

from esmshard.parallel.shard import reshard, trainable
from esmshard.recipe.sections import OptimSettings


def adamw(model: nn.Module, settings: OptimSettings) -> torch.optim.AdamW:
    """Create AdamW for the trainable parameters of a model. Call this after `materialise`.

    The trunk (with its LoRA) and the task head have different learning rates. Biases, norms and embeddings have no
    weight decay. The key `peak` of a parameter group is its maximum learning rate.
    """
    plain = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.InstanceNorm2d | nn.Embedding)
        for p in module.parameters(recurse=False)
    }
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in trainable(model).items():
        decays = id(parameter) not in plain and not name.endswith("bias")
        groups.setdefault((name.startswith("head."), decays), []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "lr": 0.0,
                "peak": settings.head_lr if is_head else settings.lr,
                "weight_decay": settings.weight_decay if decays else 0.0,
            }
            for (is_head, decays), parameters in groups.items()
        ],
        betas=settings.betas,
        eps=1e-8,
        fused=True,  # one kernel; a loop over DTensors takes longer than the layers of a small model
    )


def schedule(step: int, steps: int, warmup: float, kind: Literal["cosine", "linear", "constant"]) -> float:
    """Return the share of the peak learning rate at a step, counted from 0.

    It rises linearly to 1 in the first `steps` * `warmup` steps. Then it decays, or stays 1 if `kind` is `constant`.
    The decay would reach 0 one step after the last step, so the last step still changes the weights.

    >>> [round(schedule(s, 10, 0.2, "linear"), 2) for s in range(10)]
    [0.5, 1.0, 1.0, 0.88, 0.75, 0.62, 0.5, 0.38, 0.25, 0.12]
    """
    rising = math.ceil(steps * warmup)
    if step < rising:
        return (step + 1) / rising
    if kind == "constant":
        return 1.0
    share = (step - rising) / (steps - rising)
    return 1 - share if kind == "linear" else (1 + math.cos(math.pi * share)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Set the learning rate of each parameter group to `share` times its maximum (`peak`)."""
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak"]


def model_tensors(model: nn.Module, *, trained_only: bool = False) -> dict[str, torch.Tensor]:
    """Return a model's parameters and buffers by names such as `model.NAME`. For `trained_only` see `state_tensors`."""
    reshard(model)
    tensors = {f"model.{name}": p.data for name, p in model.named_parameters() if p.requires_grad or not trained_only}
    buffers = {f"model.{name}": b for name, b in model.named_buffers() if name.startswith("head.") or not trained_only}
    return tensors | buffers


def state_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, trained_only: bool = False
) -> dict[str, torch.Tensor]:
    """Return weights and optimizer state, without a copy, by names such as `model.NAME` and `optim.NAME.exp_avg`.

    Missing optimizer state is created as zeros, so that a checkpoint can be loaded into it. A tied weight, which two
    modules share, has one entry. With `trained_only`, leave out what the base model has: frozen parameters, and buffers
    whose names do not begin with `head.`.
    """
    tensors = model_tensors(model, trained_only=trained_only)
    weights = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            name = weights[id(parameter)]
            tensors |= {f"optim.{name}.{key}": value for key, value in state.items()}
    return tensors
