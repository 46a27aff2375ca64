"""Weights from fair-esm `.pt` files, `transformers` directories, released names or random draws, and models made of
them.

All functions use `Weights`: tensors by fair-esm name, read one at a time, so that no second copy of the model is
needed. Every key of a file must be known.
"""

import hashlib
import math
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

import torch

from esmshard.errors import InputError
from esmshard.model.attention import inverse_frequencies
from esmshard.model.config import SIZES, STARTER, EsmConfig
from esmshard.model.trunk import ESM2
from esmshard.model.weights import hub, key_maps, recorded, weight_reader
from esmshard.model.weights.key_maps import TIED
from esmshard.model.weights.weight_reader import ALL, WeightReader
from esmshard.shipped import shipped
from esmshard.vocab import MASK, PAD, VOCAB_SIZE


@dataclass(frozen=True)
class Weights:
    """Tensors of one model by fair-esm name. Each tensor is read from disk when it is used."""

    config: EsmConfig
    source: str
    """Source of the weights, for messages."""
    read: Mapping[str, WeightReader]
    head: Mapping[str, WeightReader] = field(default_factory=dict)
    """Tensors of a fine-tuned task head, without the prefix `head.`."""
    absent: tuple[str, ...] = ()
    """Parts that the file does not have and that were drawn at random: `lm_head`, `contact_head`."""
    left_out: tuple[str, ...] = ()
    """Heads of another task in the file, which nothing here reads, such as `classifier` of `transformers`."""
    files: tuple[Path, ...] = ()
    """The weight files, for `esmshard.model.weights.origin`; none for fresh weights."""
    seed: int | None = None
    """Seed of fresh weights; None for weights from files."""
    made: str = ""
    """For an adapter, a digest of the inputs of its values other than files: scales, and the seed of a random base."""

    @property
    def unlearned(self) -> tuple[str, ...]:
        """Parts that no training has changed: parts drawn at random or, for fresh weights, parts that most tasks do not
        train.
        """
        return self.absent if self.seed is None else ("lm_head", "contact_head")

    @property
    def notices(self) -> list[str]:
        """Sentences that the user should read about this file."""
        found = [f"{self.source}: has no {part}; what it says is random" for part in self.absent]
        return found + [f"{self.source}: its {part} is of another task and left out" for part in self.left_out]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.rows(name, ALL)

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """Read some rows of a tensor. From a safetensors file only these rows are read."""
        return self.read["embed_tokens.weight" if name == TIED else name](rows)


def shapes(config: EsmConfig) -> dict[str, torch.Size]:
    """Return the shape of every tensor of a model by name, buffers included. No memory is used."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in ESM2(config).state_dict().items()}


def fresh(config: EsmConfig, seed: int) -> Weights:
    """Make new random weights. Each tensor depends on the seed and its name only, so that every rank can draw its own
    part.

    Linear layers are Xavier-uniform (q, k and v with gain 1/sqrt 2, as in fair-esm's attention). The embedding, whose
    matrix is the LM head's too, is normal with deviation 0.02, so that first logits are small, and so are learned
    positions. Biases are 0 and LayerNorm weights 1.
    """
    return Weights(config, f"fresh weights, seed {seed}", drawn(config, shapes(config), seed), seed=seed)


def drawn(config: EsmConfig, wanted: Mapping[str, torch.Size], seed: int) -> dict[str, WeightReader]:
    """Return readers of random values, as in `fresh`. In a LoRA, A is Kaiming-uniform as in PEFT and B is 0."""

    # Rows are taken from the whole tensor, which is drawn once for successive calls.
    @lru_cache(maxsize=1)
    def draw(name: str, shape: torch.Size) -> torch.Tensor:
        if name.endswith("inv_freq"):
            return inverse_frequencies(config.head_dim)
        if re.search(r"layer_norm(_before|_after)?\.weight$", name):
            return torch.ones(shape)
        if name.endswith(("bias", "lora_B.weight")):
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if name.startswith("embed_"):
            table = 0.02 * torch.randn(shape, generator=generator)
            table[PAD] = 0.0
            return table
        gain = 1 / math.sqrt(2) if re.search(r"\.[qkv]_proj\.", name) else 1.0
        bound = gain * math.sqrt(6 / (shape[0] + shape[1]))
        if name.endswith("lora_A.weight"):
            bound = 1 / math.sqrt(shape[1])  # kaiming_uniform_(a=sqrt(5))
        return torch.rand(shape, generator=generator) * 2 * bound - bound

    def rows(name: str, rows: slice) -> torch.Tensor:
        return draw(name, wanted[name])[rows]

    return {name: WeightReader(shape, partial(rows, name)) for name, shape in wanted.items()}


def place(model: str | Path) -> Path:
    """Return the file or directory that a model's name means: the starter's, the model of a run,
    else the path itself.
    """
    path = Path(model).expanduser()
    if str(model) == STARTER and not path.exists():
        return shipped("data") / STARTER / "model"
    of_run = path / "model"
    return of_run if not (path / "config.json").exists() and (of_run / "config.json").is_file() else path


def _how_to_make(path: Path) -> str | None:
    """Advise what to do with a fine-tuning directory that holds no model; None for other directories."""
    source, out = path, path / "model"
    if re.fullmatch(r"step_\d+", path.name):
        what, out = "a checkpoint, whose weights lie in shards", path.parent.parent / f"model_{path.name}"
    elif path.name == "checkpoints":
        what, source, out = "a directory of checkpoints", path.parent, path.parent / "model"
    elif (path / "checkpoints").is_dir():
        what = "a run whose model has not been written"
    elif (path / "summary.json").is_file() and (parts := sorted(path.glob("*/model"))):
        return f"{path}: holds several runs; give the model of one of them, as {parts[0]}"
    else:
        return None
    command = shlex.join(["esmshard", "consolidate", str(source), "-o", str(out)])
    return f"{path}: is {what}; make a model of it with `{command}`, and give {out}"


def read(model: str) -> Weights:
    """Open the weights of a model.

    Args:
        model: a fair-esm `.pt`; a directory in `transformers`' layout (ours are such directories); a run that has one;
            the `.safetensors` in one; an adapter's directory, ours or PEFT's
            (`esmshard.model.weights.adapted_weights`); a released name such as `esm2_t33_650M_UR50D`, which is searched
            in the local caches and else downloaded (`esmshard.model.weights.hub`); or `starter`, which comes with the
            package.

    Raises:
        InputError: the model cannot be read; the message names the file and what is wrong.
    """
    path = place(model)
    if path.is_dir():
        from esmshard.model.weights import adapted_weights  # adapted_weights imports this module to read the base.

        if adapted_weights.is_adapter(path):
            return adapted_weights.read(path)
        if not (path / "config.json").exists() and (said := _how_to_make(path)):
            raise InputError(said)
        return _read_directory(path)
    if path.is_file() and path.suffix == ".pt":
        return _read_fair_esm(path)
    if path.is_file() and path.suffix == ".safetensors":
        return _read_directory(path.parent, path)
    if path.is_file():
        raise InputError(
            f"{path}: not a model; expected a fair-esm .pt file, a .safetensors file with its config.json beside it, "
            "or a directory in transformers' layout"
        )
    if model in hub.RELEASED:
        found = read(str(hub.fetch(model)))
        if found.config != SIZES[model]:
            raise InputError(f"{found.source}: not {model}, whose shape is another; download it again")
        return found
    if model in SIZES:
        raise InputError(f"{model}: a size without trained weights; give a trained model's path, or init: random")
    raise InputError(f"{model}: no such file or directory, and not a model size ({', '.join(SIZES)})")


def materialise(model: ESM2, weights: Weights, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Fill a model that was built on the meta device with weights, on one device. Every tensor must
    be in the weights.
    """
    model.to(dtype).to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(weights[name])


def default_device() -> torch.device:
    """Return the first GPU (CUDA, else Apple's), else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def load_model(model: str, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> ESM2:
    """Load an ESM-2, ESM-1b or ESM-1v on one device, in evaluation mode.

    Args:
        model: see `read`.
        device: by default the first GPU, else the CPU.
        dtype: type of weights and arithmetic. Rotary angles and contact maps are always fp32.

    Warns if the file has no LM head or no contact regression, so that logits or contacts are random, and if a file is
    not the one that the `esmshard.json` beside it records.
    """
    found = read(model)
    for notice in found.notices:
        warnings.warn(notice, stacklevel=2)
    altered: list[str] = []
    with recorded.compared(found.files, altered.append):
        esm = build(found, device or default_device(), dtype).eval()
    for notice in altered:
        warnings.warn(notice, stacklevel=2)
    return esm


def build(found: Weights, device: torch.device, dtype: torch.dtype = torch.float32) -> ESM2:
    """Build a model with these weights on one device. No warning is given about parts that the file does not have."""
    with torch.device("meta"):
        trunk = ESM2(found.config)
    materialise(trunk, found, device, dtype)
    return trunk


def _read_directory(path: Path, single: Path | None = None) -> Weights:
    raw = weight_reader.read_json(path / "config.json")
    try:
        config = key_maps.config_of_transformers(raw)
    except ValueError as error:
        raise InputError(f"{path / 'config.json'}: not a model that can be read: {error}") from None
    found: dict[str, WeightReader] = {}
    weight_files = [single] if single is not None else _weight_files(path)
    for file in weight_files:
        read_file = weight_reader.read_safetensors if file.suffix == ".safetensors" else weight_reader.read_state_dict
        found.update(read_file(file))

    head = {k.removeprefix("head."): r for k, r in found.items() if k.startswith("head.")}
    left_out = tuple(sorted({k.split(".")[0] for k in found if k.startswith("classifier.")}))
    trunk = {
        name: reader
        for key, reader in found.items()
        if not key.startswith(("head.", "classifier."))
        for name in key_maps.from_transformers(key, config)
    }
    complete = _complete(config, str(single or path), trunk, head)
    return replace(complete, left_out=left_out, files=tuple(weight_files))


def _weight_files(path: Path) -> list[Path]:
    """Find the files of one model, safetensors before pickles. The 3B and 15B models were released
    as several pickles.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{name}.index.json"
        if index.is_file():
            try:
                return sorted({path / Path(str(f)).name for f in weight_reader.read_json(index)["weight_map"].values()})
            except (KeyError, TypeError, AttributeError):
                raise InputError(f"{index}: has no weight_map; copy or download the model again") from None
        if (path / name).is_file():
            return [path / name]
    raise InputError(f"{path}: holds no model.safetensors and no pytorch_model.bin; it is not a complete model")


def _read_fair_esm(path: Path) -> Weights:
    data = weight_reader.read_pickle(path)
    state = data.get("model")
    if not isinstance(state, dict):
        raise InputError(f"{path}: not a model file of fair-esm (its 'model' holds no weights)")
    try:
        config = key_maps.config_of_fair_esm(data)
    except ValueError as error:
        raise InputError(f"{path}: not a model that can be read: {error}") from None
    regression = path.with_name(f"{path.stem}-contact-regression.pt")
    if regression.is_file():
        extra = weight_reader.read_pickle(regression).get("model")
        if not isinstance(extra, dict):
            raise InputError(
                f"{regression}: not a contact regression of fair-esm (it has no 'model'); download it again"
            )
        state = state | extra
    found = weight_reader.tensors({key_maps.from_fair_esm(str(k)): v for k, v in state.items()})
    if not config.rotary and "embed_tokens.weight" in found:
        # fair-esm does this on loading: these files hold noise in the row of <mask>, and the LM head shares the table.
        found["embed_tokens.weight"] = found["embed_tokens.weight"].then(_without_mask_row)
    return replace(_complete(config, str(path), found, {}), files=tuple(f for f in (path, regression) if f.is_file()))


def _without_mask_row(table: torch.Tensor, rows: slice) -> torch.Tensor:
    return table.masked_fill((torch.arange(VOCAB_SIZE)[rows] == MASK)[:, None], 0.0)


def _complete(config: EsmConfig, source: str, found: dict[str, WeightReader], head: dict[str, WeightReader]) -> Weights:
    """Check every key. An LM head or contact regression may be missing; it is listed and drawn at random."""
    _compare_sizes(config, source, found)  # This comes before a model of the claimed size is built on the meta device.
    wanted = shapes(config)
    found.pop(TIED, None)
    unexpected = sorted(found.keys() - wanted.keys())
    if unexpected:
        raise InputError(f"{source}: {some(unexpected)} do not belong to a model of {config.n_layers} such layers")
    missing = sorted(wanted.keys() - found.keys() - {TIED})
    buffers = {name for name in missing if name.endswith("inv_freq")}
    parts = [p for p in ("lm_head", "contact_head") if any(n.startswith(p + ".") for n in missing)]
    lost = [n for n in missing if n not in buffers and not n.startswith(tuple(p + "." for p in parts))]
    partial_parts = [p for p in parts if any(n.startswith(p + ".") for n in found)]
    if lost or partial_parts:
        raise InputError(f"{source}: {some(lost or missing)} are missing; the file is not a complete model")
    added = drawn(config, {n: wanted[n] for n in missing}, seed=0)

    for name, reader in found.items():
        if reader.shape != wanted[name]:
            raise InputError(f"{source}: {name} is {list(reader.shape)}, {list(wanted[name])} was expected")

    tensors = {name: reader.finite(f"{source}: {name}") for name, reader in found.items()} | added
    head = {name: reader.finite(f"{source}: head.{name}") for name, reader in head.items()}
    return Weights(config, source, tensors, head, tuple(parts))


_LAYER = re.compile(r"layers\.(\d{1,9})\.")


def _compare_sizes(config: EsmConfig, source: str, found: Mapping[str, WeightReader]) -> None:
    """Check that the sizes in a configuration are not larger than those of the tensors beside it."""
    layers = 1 + max((int(match[1]) for name in found if (match := _LAYER.match(name))), default=-1)
    if layers < config.n_layers:
        raise InputError(
            f"{source}: its configuration says {config.n_layers:,} layers and its weights have {layers:,}, so "
            f"layers.{layers}.* are missing; the file is not a complete model, or the configuration is another model's"
        )
    table = found.get("embed_tokens.weight")
    if table is not None and table.shape != (VOCAB_SIZE, config.dim):
        raise InputError(
            f"{source}: embed_tokens.weight is {list(table.shape)}, {[VOCAB_SIZE, config.dim]} was expected"
        )


def some(names: Sequence[str], most: int = 3) -> str:
    """Name the first few tensors, and count the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more tensor{'s' if more > 1 else ''}" if more > 0 else "")
