"""Random models of fair-esm (ESM-2, ESM-1b, ESM-1v), and the same weights in our model and in files of each format.

LayerNorms and biases differ from 1 and 0, because equal values would hide swapped names. `inv_freq` is rounded as in
released files. Sharp attention and a large contact regression make contacts differ from pair to pair. The embedding is
small, because fair-esm has errors of 4e-5 for logits around 50. In files of ESM-1b and ESM-1v, the row of <mask> is
noise, which fair-esm sets to zero.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from esm.data import Alphabet
from esm.model.esm1 import ProteinBertModel
from esm.model.esm2 import ESM2 as FairEsm
from safetensors.torch import load, save_file
from torch import nn

from esmshard.batch import TokenBatch, pack
from esmshard.model import export, weight_reader, weights
from esmshard.model.config import ModelConfig
from esmshard.model.families.esm2 import ESM2, FAMILY, TIED, EsmConfig
from esmshard.model.families.family import Family
from esmshard.model.weights import Weights
from esmshard.vocab import MASK

TINY = EsmConfig(n_layers=2, dim=32, n_heads=4)
SMALL = {
    "ESM-2": EsmConfig(n_layers=3, dim=64, n_heads=4),
    "ESM-1b": EsmConfig(n_layers=3, dim=64, n_heads=4, max_positions=1024, emb_layer_norm_before=True),
    "ESM-1v": EsmConfig(n_layers=3, dim=64, n_heads=4, max_positions=1024),
}
RELEASED_PREFIXES = ("encoder.sentence_encoder.", "encoder.")
"""The prefixes of the trunk and of the LM head in released files."""
ALPHABET = Alphabet.from_architecture("ESM-1b")


def perturb(model: nn.Module, seed: int = 0, deviation: float = 0.03) -> None:
    """Add a little noise to every parameter that starts at a constant."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or (parameter == 0).all():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=deviation)


def randomise(model: nn.Module, scale: float) -> None:
    """Add noise to vectors, and replace matrices by random matrices."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
            else:
                parameter.copy_(scale * torch.randn(parameter.shape) / parameter.shape[1] ** 0.5)


def same_gradients(mine: nn.Module, theirs: nn.Module, family: Family, least: float = 0.0) -> int:
    """Compare all gradients except for the contact regression, and return their number. `least` is the size of a
    gradient that is not only rounding."""
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    parameters = {name: p for name, p in mine.named_parameters() if not name.startswith("contact_head.")}
    for name, parameter in parameters.items():
        other = expected[str(family.key(name))]
        assert (parameter.grad - other).abs().max() < 1e-5 * max(float(other.abs().max()), least), name
    return len(parameters)


def fair_esm(config: EsmConfig, seed: int = 0) -> FairEsm:
    """fair-esm's model, perturbed, in evaluation mode (a `ProteinBertModel` for learned positions)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.rotary:
            model = FairEsm(config.n_layers, config.dim, config.n_heads, token_dropout=config.token_dropout)
        else:
            sizes = {"layers": config.n_layers, "embed_dim": config.dim, "attention_heads": config.n_heads}
            options = {
                name: getattr(config, name) for name in ("max_positions", "token_dropout", "emb_layer_norm_before")
            }
            settings = argparse.Namespace(arch="roberta_large", ffn_embed_dim=4 * config.dim, **sizes, **options)
            model = ProteinBertModel(settings, ALPHABET)
        nn.init.normal_(model.contact_head.regression.weight)
    perturb(model, seed)
    with torch.no_grad():
        model.embed_tokens.weight *= 0.1
        for layer in model.layers:
            layer.self_attn.q_proj.weight *= 3
            if config.rotary:
                layer.self_attn.rot_emb.inv_freq.copy_(layer.self_attn.rot_emb.inv_freq.half().float())
        if not config.rotary:
            model.embed_positions.weight *= 0.1
            model.embed_tokens.weight[MASK] = 0
    return model.eval()


def ours(reference: FairEsm, config: EsmConfig) -> ESM2:
    """Our model with the weights of fair-esm's model. All tensor names are equal."""
    state = reference.state_dict()
    assert state.keys() == weights.shapes(config).keys()
    found = Weights(config, "fair-esm", weight_reader.tensors({name: t for name, t in state.items() if name != TIED}))
    return weights.build(found, torch.device("cpu")).eval()  # type: ignore[return-value]


def tokenise(sequences: list[str]) -> tuple[torch.Tensor, TokenBatch]:
    """fair-esm's right-padded block [N, longest], and the same tokens packed."""
    _, _, block = ALPHABET.get_batch_converter()([(str(k), s) for k, s in enumerate(sequences)])
    return block, pack([row[row != ALPHABET.padding_idx].numpy().astype("uint8") for row in block])


def write_fair_esm(path: Path, model: FairEsm, prefixes: tuple[str, str] = RELEASED_PREFIXES) -> Path:
    """Write `NAME.pt` and its contact regression, with prefixes for the trunk and for the LM head."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    regression = {name: state.pop(name) for name in list(state) if name.startswith("contact_head.")}
    named = {prefixes[name.startswith("lm_head.")] + name: tensor for name, tensor in state.items()}
    named[prefixes[1] + TIED] = named[prefixes[0] + "embed_tokens.weight"]  # one tensor under two names
    sizes = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")
    if isinstance(model, FairEsm):
        values = (model.num_layers, model.embed_dim, 4 * model.embed_dim, model.attention_heads)
        args = argparse.Namespace(**{f"encoder_{name}": value for name, value in zip(sizes, values, strict=True)})
        args.token_dropout = model.token_dropout
        del args.encoder_ffn_embed_dim
        settings: dict[str, Any] = {"cfg": {"model": args}}
    else:
        named[prefixes[0] + "embed_tokens.weight"][MASK] = 7.0
        trainer = {f"encoder_{k}" if k in sizes else k: v for k, v in vars(model.args).items()}
        del trainer["emb_layer_norm_before"]
        settings = {"args": argparse.Namespace(**trainer)}
    torch.save(settings | {"model": named}, path)
    torch.save({"model": regression}, path.with_name(f"{path.stem}-contact-regression.pt"))
    return path


def write_transformers(
    directory: Path, model: nn.Module, config: EsmConfig, head: Mapping[str, torch.Tensor] | None = None
) -> Path:
    """Write a directory in the layout of `transformers` 4, which is also ours. `model` has fair-esm's names."""
    directory.mkdir()
    state = {FAMILY.key(name): t.contiguous() for name, t in model.state_dict().items() if name != TIED}
    state |= {f"head.{name}": tensor for name, tensor in (head or {}).items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(FAMILY.write_config(config)))
    return directory


def write_fresh(directory: Path, config: ModelConfig) -> Path:
    """A directory with a new random model of any family."""
    directory.mkdir()
    source = weights.fresh(config, 0).__getitem__
    export.write_transformers(directory, config, weights.stored_shapes(config), source)
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    """Change settings in `config.json`; the value `...` removes a setting."""
    path = directory / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not ...}))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load((directory / "model.safetensors").read_bytes())
    edit(state)
    save_file(state, directory / "model.safetensors")


def edit_pt(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    with torch.serialization.safe_globals([argparse.Namespace]):
        data = torch.load(file)
    edit(data)
    torch.save(data, file)
