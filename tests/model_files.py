"""Random models of fair-esm (ESM-2, ESM-1b, ESM-1v), and the same weights in our model and in files of each format.

LayerNorms and biases are moved off 1 and 0, or swapping two of them would go unnoticed, and `inv_freq` is rounded
as in released files. Attention is sharpened and the contact regression enlarged: contacts differ from pair to pair.
The embedding is made small: with deviation 1 logits reach 50, and fair-esm itself is 4e-5 off its own double precision.
The row of <mask> is zero in ESM-1b and ESM-1v, as fair-esm makes it on loading; in the file it is noise.
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
from esmshard.model import weight_reader, weights
from esmshard.model.families.esm2 import ESM2, FAMILY, TIED, EsmConfig
from esmshard.model.weights import Weights
from esmshard.vocab import MASK

TINY = EsmConfig(n_layers=2, dim=32, n_heads=4)
SMALL = {
    "ESM-2": EsmConfig(n_layers=3, dim=64, n_heads=4),
    "ESM-1b": EsmConfig(n_layers=3, dim=64, n_heads=4, max_positions=1024, emb_layer_norm_before=True),
    "ESM-1v": EsmConfig(n_layers=3, dim=64, n_heads=4, max_positions=1024),
}
"""One of each family."""
RELEASED_PREFIXES = ("encoder.sentence_encoder.", "encoder.")
"""Of the trunk and of the LM head."""
ALPHABET = Alphabet.from_architecture("ESM-1b")


def perturb(model: nn.Module, seed: int = 0, deviation: float = 0.03) -> None:
    """Add a little noise to every parameter that starts at a constant."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or (parameter == 0).all():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=deviation)


def esm1_settings(config: EsmConfig) -> argparse.Namespace:
    """What fair-esm builds an ESM-1b or ESM-1v from."""
    return argparse.Namespace(
        arch="roberta_large",
        layers=config.n_layers,
        embed_dim=config.dim,
        ffn_embed_dim=4 * config.dim,
        attention_heads=config.n_heads,
        max_positions=config.max_positions,
        token_dropout=config.token_dropout,
        emb_layer_norm_before=config.emb_layer_norm_before,
    )


def fair_esm(config: EsmConfig, seed: int = 0) -> FairEsm:
    """fair-esm's own model, perturbed, in evaluation mode (a `ProteinBertModel` where positions are learned)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.rotary:
            model = FairEsm(config.n_layers, config.dim, config.n_heads, token_dropout=config.token_dropout)
        else:
            model = ProteinBertModel(esm1_settings(config), ALPHABET)
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
    """Our model with the weights of fair-esm's: every name of one is a name of the other."""
    state = reference.state_dict()
    assert state.keys() == weights.shapes(config).keys()
    found = Weights(config, "fair-esm", weight_reader.tensors({name: t for name, t in state.items() if name != TIED}))
    return weights.build(found, torch.device("cpu")).eval()  # type: ignore[return-value]


def tokenise(sequences: list[str]) -> tuple[torch.Tensor, TokenBatch]:
    """fair-esm's right-padded block [N, longest], and the same tokens packed."""
    _, _, block = ALPHABET.get_batch_converter()([(str(k), s) for k, s in enumerate(sequences)])
    return block, pack([row[row != ALPHABET.padding_idx].numpy().astype("uint8") for row in block])


def write_fair_esm(path: Path, model: FairEsm, prefixes: tuple[str, str] = RELEASED_PREFIXES) -> Path:
    """`NAME.pt` and its contact regression as released: the trunk under one prefix, the LM head under another."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    regression = {name: state.pop(name) for name in list(state) if name.startswith("contact_head.")}
    named = {prefixes[name.startswith("lm_head.")] + name: tensor for name, tensor in state.items()}
    named[prefixes[1] + TIED] = named[prefixes[0] + "embed_tokens.weight"]  # one tensor under two names
    if isinstance(model, FairEsm):
        sizes = argparse.Namespace(
            encoder_layers=model.num_layers,
            encoder_embed_dim=model.embed_dim,
            encoder_attention_heads=model.attention_heads,
            token_dropout=model.token_dropout,
        )
        settings: dict[str, Any] = {"cfg": {"model": sizes}}
    else:
        named[prefixes[0] + "embed_tokens.weight"][MASK] = 7.0
        args = vars(model.args).items()
        trainer = {
            f"encoder_{k}" if k in ("layers", "embed_dim", "ffn_embed_dim", "attention_heads") else k: v
            for k, v in args
        }
        del trainer["emb_layer_norm_before"]
        settings = {"args": argparse.Namespace(**trainer)}
    torch.save(settings | {"model": named}, path)
    torch.save({"model": regression}, path.with_name(f"{path.stem}-contact-regression.pt"))
    return path


def write_transformers(
    directory: Path, model: nn.Module, config: EsmConfig, head: Mapping[str, torch.Tensor] | None = None
) -> Path:
    """A directory in the layout of `transformers` 4, which is also ours; `model` has fair-esm's names."""
    directory.mkdir()
    state = {FAMILY.key(name): t.contiguous() for name, t in model.state_dict().items() if name != TIED}
    state |= {f"head.{name}": tensor for name, tensor in (head or {}).items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(FAMILY.write_config(config)))
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    """Change settings of a directory; `...` takes one out."""
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
