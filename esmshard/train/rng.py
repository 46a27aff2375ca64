"""The random state of each process, as tensors of a checkpoint.

Order of records, crops, new weights and masks follow from seeds and never from here; what a module draws as it goes,
such as dropout, does.
"""

import hashlib
from collections.abc import Collection, Mapping

import torch


def begin(seed: int, rank: int, step: int) -> None:
    """Draw from the recipe's seed, differently on each rank, so that the same run draws the same again.

    After a step, for ranks that a checkpoint has no state of: it was written by fewer.
    """
    digest = hashlib.sha256(f"{seed}:{rank}:{step}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # of all devices


def tensors(rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """State of this process's generators, as `rng.RANK.DEVICE`; a name of its own for each rank."""
    found = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return found


def wanted(rank: int, device: torch.device, known: Collection[str]) -> dict[str, torch.Tensor]:
    """Tensors to load this rank's state into, as far as a checkpoint with these names has it."""
    return {name: tensor for name, tensor in tensors(rank, device).items() if name in known}


def restore(loaded: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Go on drawing where the process that saved these stopped."""
    for name, state in loaded.items():
        if name.startswith("rng.") and name.endswith(".cpu"):
            torch.set_rng_state(state)
        elif name.startswith("rng."):
            torch.cuda.set_rng_state(state, device)
