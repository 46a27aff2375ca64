"""Trunk and task head as one module: made from a recipe, or opened from a consolidated directory."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from esmshard.batch import TokenBatch, pack
from esmshard.data.batching.loader import Example
from esmshard.data.tracks.track_files import TrackFile, track_files
from esmshard.devices import DeviceName, chosen_device
from esmshard.errors import InputError, UsageError, reading
from esmshard.files import found_place, read_json
from esmshard.model import weights
from esmshard.model.config import Quantization
from esmshard.model.convolutions import exact_convolutions
from esmshard.model.families.family_registry import SIZES, family_of
from esmshard.model.lora import add_lora
from esmshard.model.quantized import packed_of, quantize
from esmshard.model.trunk import Trunk
from esmshard.model.weight_reader import WeightReader
from esmshard.model.weights import Weights
from esmshard.recipe.section_base import listed
from esmshard.recipe.sections import AdaptSettings, Recipe
from esmshard.tasks.base import Inputs, Task, attention_reader, batch_of, head_outputs
from esmshard.tasks.registry import UnknownTask, new_task, settings_of


class LanguageModelHead(nn.Module):
    """A module in the place of a head, for tasks that use the language model's own head. It has no parameters."""


class FineTuner(nn.Module):
    """Trunk and task head as one module, so that one FSDP root holds both. `forward` returns one tensor a record.

    The head's output; with the language model's own head, the logits at `TokenBatch.logits_at_P`.
    """

    def __init__(self, trunk: Trunk, head: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head
        self._drawn: Mapping[str, WeightReader] = {}
        self.remembered: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
        """Outputs of a frozen model that a task keeps, by a name and a key of the task, so that they are not computed
        twice. Those that ranks have computed for `Task.baselines` are joined here.
        """

    @property
    def layers(self) -> nn.ModuleList:
        """The layers that `esmshard.parallel` shards."""
        return self.trunk.layers

    def forward(self, batch: TokenBatch, instead: Callable[[], Any] | None = None) -> Any:
        """Return N outputs in fp32, whatever the precision of the arithmetic.

        `instead` is called in place of the model, with the parameters that the model computes with: where ranks share
        a model, these exist only during this call (`esmshard.parallel.shared_calls`).
        """
        if instead is not None:
            return instead()
        attention = attention_reader(self.head, batch)
        on_attention = None if attention is None else attention.add
        layers, logits_PV = self.trunk(batch, logits_at=batch.logits_at_P, on_attention=on_attention)
        if self.asks_logits and logits_PV is not None:
            return list(logits_PV.float().split(batch.logit_counts))
        return head_outputs(self.head, layers[self.trunk.config.n_layers], batch, attention, logits_PV)

    @torch.no_grad()
    def outputs(self, inputs: Sequence[Inputs]) -> list[npt.NDArray[np.float32]]:
        """Return the outputs of the head for some examples, computed on the device of the weights."""
        dtype = self.trunk.embed_tokens.weight.dtype
        # A head keeps fp32 weights; where those of the trunk are shorter, autocast brings the two together.
        mixed = nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype)
        with mixed, exact_convolutions(self.device):
            return [output.cpu().numpy() for output in self(batch_of(inputs).to(self.device))]

    @torch.no_grad()
    def representations(self, examples: Sequence[Example]) -> list[npt.NDArray[np.float32]]:
        """Return the last-layer representations [L, D] of the residues of some examples."""
        batch = pack([e.tokens for e in examples], tracks=[e.tracks for e in examples]).to(self.device)
        x_TD = self.trunk(batch).representations[self.trunk.config.n_layers].float()
        return [x_LD.cpu().numpy() for x_LD in batch.residues(x_TD)]

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.trunk.device

    @property
    def asks_logits(self) -> bool:
        """Whether the task's head is the language model's own."""
        return isinstance(self.head, LanguageModelHead)

    def adapt(
        self,
        settings: AdaptSettings,
        seed: int,
        tracks: Collection[str] = (),
        quantization: Quantization | None = None,
    ) -> None:
        """Choose the parameters that learn: the head, and the parts of the trunk that the recipe's `adapt` section
        names.

        What no output depends on never does: `Trunk.never_learns`, but for what learns with one of the tracks, and the
        LM head (all but the tied embedding) of tasks that ask for no logits.

        Args:
            settings: of the recipe.
            seed: of new LoRA matrices.
            tracks: names of the tracks that all batches have besides the sequence.
            quantization: how the matrices of the layers are stored, which then do not learn.
        """
        if quantization is not None:
            quantize(self.trunk.layers, self.trunk.config.matrices, quantization)
        trunk = self.trunk.requires_grad_(settings.method == "full")
        if settings.method == "lora":
            added = add_lora(trunk.layers, trunk.config.matrices, *settings.lora)
            self._drawn = weights.drawn(trunk.config, added, seed)
            for name, parameter in trunk.named_parameters():
                parameter.requires_grad_(name in added or (settings.bias == "all" and name.endswith("bias")))
        with_tracks = tuple(start for track in tracks for start in trunk.learns_with.get(track, ()))
        for name, parameter in trunk.named_parameters():  # Tied ones come once, under their first name.
            if name.startswith("lm_head."):
                parameter.requires_grad_(self.asks_logits and settings.method in ("full", "head"))
            elif name.startswith(trunk.never_learns) and not name.startswith(with_tracks):
                parameter.requires_grad_(False)
        for part in settings.freeze:
            _freeze(trunk, part)

    def rows_of(self, found: Weights, head: nn.Module) -> Callable[[str, slice], torch.Tensor]:
        """Return a function that reads rows of this module's tensors by name: the trunk's from `found`, the head's from
        `head`; those of a LoRA are drawn, and those of a packed matrix are computed from the whole matrix.
        """
        state = head.state_dict()

        @lru_cache(maxsize=1)  # Its values and its scales are asked for in turn.
        def packed(linear: str) -> dict[str, torch.Tensor]:
            matrix = packed_of(self.trunk.get_submodule(linear))
            assert matrix is not None
            return matrix.pack(found[f"{linear}.weight"])

        def read(name: str, rows: slice) -> torch.Tensor:
            part, _, own = name.partition(".")
            if part == "trunk" and ".packed." in own:
                linear, _, buffer = own.rpartition(".packed.")
                return packed(linear)[buffer][rows]
            if part == "trunk":
                return self._drawn[own](rows) if own in self._drawn else found.rows(own, rows)
            mine: torch.Tensor = state[own][rows]
            return mine

        return read


def _freeze(trunk: Trunk, part: str) -> None:
    """Freeze the parameters that one entry of `adapt.freeze` names. `UsageError` if the model has no such part."""
    if part == "embedding":
        frozen = [p for n, p in trunk.named_parameters() if n.startswith("embed_")]
    elif part == "biases":
        frozen = [p for n, p in trunk.named_parameters() if n.endswith("bias")]
    elif part == "norms":
        frozen = [p for m in trunk.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm) for p in m.parameters()]
    elif part == "tracks":
        starts = tuple(start for starts in trunk.learns_with.values() for start in starts)
        if not starts:
            raise UsageError("adapt.freeze: tracks: the model has no part of its own for a track; leave it out")
        frozen = [p for n, p in trunk.named_parameters() if n.startswith(starts)]
    else:
        first, _, last = part.removeprefix("layers.").partition("-")
        layers = slice(int(first), int(last or first) + 1)
        if layers.stop > len(trunk.layers):
            raise UsageError(f"adapt.freeze: {part}: the model has layers.0 to layers.{len(trunk.layers) - 1}")
        frozen = [p for layer in trunk.layers[layers] for p in layer.parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)


@dataclass(frozen=True)
class FineTuned:
    """A consolidated model with its task head."""

    model: FineTuner
    task: Task
    about: Mapping[str, Any]
    """`esmshard.json`."""


def load_finetuned(model: str, device: DeviceName = None) -> FineTuned:
    """Open a model directory that `consolidate` wrote, head included, in evaluation mode.

    Raises `InputError` for a model without a fine-tuned head, and `UsageError` for a device that is not there.
    """
    computing, path = chosen_device(device), weights.directory(model) / "esmshard.json"
    try:
        about: dict[str, Any] = read_json(path)
        if "recipe" not in about:
            raise FileNotFoundError  # a converted model
        settings = settings_of(about["recipe"]["task"])
        facts = about.get("facts", {})
        if base := about["recipe"].get("model"):
            base["name"] = found_place(base["name"], path.parent)
    except UnknownTask as error:
        raise InputError(f"{model}: {error}") from None
    except (FileNotFoundError, NotADirectoryError):
        weights.read(model)  # says so if it is no model at all
        raise InputError(
            f"{model}: has no fine-tuned head (no esmshard.json); fine-tune it first, then consolidate"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: damaged ({reason}); consolidate the run again") from None
    found = weights.read(model)
    with reading(f"{path}", "consolidate the run again"):
        task = new_task(settings, facts)
        head = task.head(found.config)
    tensors = {name: read() for name, read in found.head.items()}
    if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in head.state_dict().items()}:
        raise InputError(f"{model}: its head does not fit the task in esmshard.json; consolidate the run again")
    head.load_state_dict(tensors)
    weights.report_altered(found.files)
    return FineTuned(_assemble(found, head, computing), task, about)


def load_base(recipe: Recipe, task: Task, device: DeviceName = None) -> FineTuner:
    """Open the model as it was before the first step of a run: its base weights under a new head of the same seed."""
    found = initial_weights(recipe)
    return _assemble(found, new_head(recipe, task, found)[0], chosen_device(device))


def initial_weights(recipe: Recipe) -> Weights:
    """Open the weights that a recipe starts from, which read several chains as the recipe says.

    Raises:
        InputError: `init` does not go with `model.name`.
        UsageError: the model cannot read several chains so.
    """
    name = recipe.model.name
    if recipe.init == "random":
        config = SIZES[name] if name in SIZES else weights.read(name).config
        found = weights.fresh(config, recipe.train.seed)
    else:
        found = weights.read(name)
    return weights.joining(found, recipe.data.join.over(found.config.chains), f"data.join: {recipe.model.name}")


def tracks_of(recipe: Recipe) -> list[TrackFile]:
    """Return the tracks that a recipe names. `UsageError` if its model does not take one of them.

    The model is looked at only if there are any.
    """
    if not recipe.data.tracks:
        return []
    takes = family_of(initial_weights(recipe).config).tracks
    return track_files(recipe.data.tracks, takes, recipe.model.name, "data.tracks.")


def without_tracks(model: str, given: Collection[str]) -> list[str]:
    """Return a sentence if a model was fine-tuned with tracks that it is not given now.

    Args:
        model: a model, fine-tuned or not.
        given: the names of the tracks that it gets.
    """
    try:
        recipe = read_json(weights.place(model) / "esmshard.json")["recipe"]
        missing = [name for name in recipe["data"].get("tracks") or {} if name not in given]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # It is no fine-tuned model, or whoever opens it says what is wrong with it.
    if not missing:
        return []
    options = " ".join(f"--track {name}=PATH" for name in missing)
    plural = "s" if len(missing) > 1 else ""
    return [
        f"{model}: was fine-tuned with the track{plural} {listed(missing)}, which it is not given, so that its test "
        f"does not say how good it is here; pass {options}"
    ]


def new_head(recipe: Recipe, task: Task, found: Weights) -> tuple[nn.Module, str | None]:
    """Make a new head, drawn from the recipe's seed whatever the random state is. Also return a sentence about its
    start values, if the model has some.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        head = task.head(found.config)
    return head, start_values(task, head, found)


def start_values(task: Task, head: nn.Module, found: Weights) -> str | None:
    """Give a new head the values of the head in `found`, if the two mean the same, else those that the language model
    has for it. Return a sentence about them, or about a head that is left out.
    """
    if not found.head or not head.state_dict():
        return task.start(head, found)
    of_task, facts = weights.task_of(found.files) or (task.settings.name, task.facts)
    name, shapes = task.settings.name, {name: tensor.shape for name, tensor in head.state_dict().items()}
    if not task.means_the_same(of_task, facts):
        other = f"of task {of_task}" if of_task != name else "for other classes or targets"
    elif {name: reader.shape for name, reader in found.head.items()} != shapes:
        other = "of another kind or size"
    else:
        head.load_state_dict({name: reader() for name, reader in found.head.items()})
        scaled = any(facts.get(key) != task.facts.get(key) for key in ("mean", "std"))
        more = "; its training labels had another mean or deviation, so its first outputs are shifted or scaled"
        return f"the head goes on from the {name} head of {found.source}{more if scaled else ''}"
    started = task.start(head, found)
    return f"{found.source}: its head is {other} and is left out; {started or 'the head is new'}"


def _assemble(found: Weights, head: nn.Module, device: torch.device) -> FineTuner:
    return FineTuner(weights.build(found, device), head.to(device)).eval()
