"""Trunk and task head as one module: made from a recipe, or opened from a consolidated directory."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.config import SIZES
from esmshard.model.esm2 import ESM2
from esmshard.model.files import Reader
from esmshard.model.lora import add_lora
from esmshard.model.weights import Weights
from esmshard.settings import AdaptSettings, Recipe, TaskSettings
from esmshard.tasks import TASKS
from esmshard.tasks.protocol import Task


class FineTuner(nn.Module):
    """Trunk and task head as one module, so that one FSDP root holds both. `forward` gives one tensor a record."""

    def __init__(self, trunk: ESM2, head: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head
        self._drawn: Mapping[str, Reader] = {}

    @property
    def layers(self) -> nn.ModuleList:
        """What `esmshard.parallel` shards."""
        return self.trunk.layers

    def forward(self, batch: TokenBatch) -> list[torch.Tensor]:
        """N outputs, fp32, whatever the precision of the arithmetic."""
        x_TD = self.trunk(batch).representations[self.trunk.config.n_layers]
        return [output.float() for output in self.head(x_TD, batch)]

    def adapt(self, settings: AdaptSettings, seed: int) -> None:
        """Say what learns: the head, and of the trunk what the recipe's `adapt` section asks for.

        What no output depends on never does: LM head (all but the tied embedding) and contact regression.

        Args:
            settings: of the recipe.
            seed: of new LoRA matrices.
        """
        trunk = self.trunk.requires_grad_(settings.method == "full")
        if settings.method == "lora":
            added = add_lora(trunk.layers, *settings.lora)
            self._drawn = weights.drawn(trunk.config, added, seed)
            for name, parameter in trunk.named_parameters():
                parameter.requires_grad_(name in added or (settings.bias == "all" and name.endswith("bias")))
        trunk.contact_head.requires_grad_(False)
        for name, parameter in trunk.lm_head.named_parameters():
            if name != "weight":
                parameter.requires_grad_(False)

    def rows_of(self, found: Weights, head: nn.Module) -> Callable[[str, slice], torch.Tensor]:
        """Reads rows of this module's tensors by name: the trunk's out of `found`, the head's out of `head`; a LoRA's
        are drawn.
        """
        state = head.state_dict()

        def read(name: str, rows: slice) -> torch.Tensor:
            part, _, own = name.partition(".")
            if part == "trunk":
                return self._drawn[own](rows) if own in self._drawn else found.rows(own, rows)
            mine: torch.Tensor = state[own][rows]
            return mine

        return read


@dataclass(frozen=True)
class FineTuned:
    """A consolidated model with its task head."""

    model: FineTuner
    task: Task
    about: Mapping[str, Any]
    """`esmshard.json`."""


def load_finetuned(model: str, device: torch.device | None = None) -> FineTuned:
    """A model directory that `consolidate` wrote, head included, in evaluation mode.

    Raises `InputError` for a model without a fine-tuned head.
    """
    path = Path(model) / "esmshard.json"
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        settings = TaskSettings(**about["recipe"]["task"])
    except (FileNotFoundError, NotADirectoryError):
        weights.read(model)  # says so if it is no model at all
        raise InputError(
            f"{model}: has no fine-tuned head (no esmshard.json); fine-tune it first, then consolidate"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: damaged ({reason}); consolidate the run again") from None
    found = weights.read(model)
    task = TASKS[settings.name](settings)
    head = task.head(found.config)
    tensors = {name: read() for name, read in found.head.items()}
    if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in head.state_dict().items()}:
        raise InputError(f"{model}: its head does not fit the task in esmshard.json; consolidate the run again")
    head.load_state_dict(tensors)
    return FineTuned(_assemble(found, head, device or weights.default_device()), task, about)


def load_untrained(recipe: Recipe, device: torch.device | None = None) -> FineTuner:
    """The model as it was before the first step of a run: its base weights under a new head of the same seed."""
    found = initial_weights(recipe)
    return _assemble(
        found, new_head(recipe, TASKS[recipe.task.name](recipe.task), found), device or weights.default_device()
    )


def initial_weights(recipe: Recipe) -> Weights:
    """The weights that a recipe starts from. `InputError` if `init` does not go with `model.name`."""
    name = recipe.model.name
    if recipe.init == "random":
        if name in SIZES:
            return weights.fresh(SIZES[name], recipe.train.seed)
        return weights.fresh(weights.read(name).config, recipe.train.seed)
    return weights.read(name)


def new_head(recipe: Recipe, task: Task, found: Weights) -> nn.Module:
    """A new head, drawn from the recipe's seed whatever happened to the random state before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        return task.head(found.config)


def _assemble(found: Weights, head: nn.Module, device: torch.device) -> FineTuner:
    return FineTuner(weights.build(found, device), head.to(device)).eval()
