"""The same work in esmshard and in other libraries. Each variant is a function that does all the work once.

Sequences are token arrays that are made beforehand, so tokenizing is not timed. All variants have the same weights,
copied from esmshard.
"""

import argparse
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import random_models
import torch
import torch.nn.functional as F
from random_models import CONFIGS

from esmshard.batch import TokenBatch, pack
from esmshard.data.batching.packing import StepPlan, by_length
from esmshard.devices import packs_at_once, side_by_side
from esmshard.model import export, weights
from esmshard.model.config import ModelConfig
from esmshard.model.contacts import predict_contacts
from esmshard.model.families import esmc, t5
from esmshard.model.families.esm2 import FAIR_ESM, FAMILY
from esmshard.model.trunk import Trunk
from esmshard.parallel.layout import Layout
from esmshard.parallel.process_group import World
from esmshard.parallel.shard import shard
from esmshard.vocab import MASK, PAD, STANDARD, TOKENS

Tokens = npt.NDArray[np.uint8]
Variant = Callable[[], Any]
CPU = torch.device("cpu")


def sequences(lengths: Sequence[int], seed: int = 0) -> list[Tokens]:
    """Return random residues of these lengths, as tokens."""
    rng = np.random.default_rng(seed)
    residues = np.array([TOKENS.index(letter) for letter in STANDARD], dtype=np.uint8)
    return [np.concatenate([[0], rng.choice(residues, n), [2]]).astype(np.uint8) for n in lengths]


def protein_lengths(count: int, seed: int = 0) -> list[int]:
    """Draw lengths near those of UniRef50: lognormal, median 270 and mean 330, clipped to 20 to 1,022."""
    rng = np.random.default_rng(seed)
    sigma = np.sqrt(2 * np.log(330 / 270))
    return [int(n) for n in np.clip(rng.lognormal(np.log(270), sigma, count), 20, 1022)]


def flops(config: ModelConfig, lengths: Sequence[int]) -> tuple[float, float]:
    """Return the forward FLOPs of the linear layers of the trunk, and of attention, with `<cls>` and `<eos>`."""
    tokens = np.array(lengths, dtype=np.float64) + 2
    gemm = config.n_layers * 2 * sum(matrix.rows * matrix.columns for matrix in config.matrices) * tokens.sum()
    return float(gemm), float(config.n_layers * 4 * config.inner * (tokens**2).sum())


def ours(name: str, device: torch.device, dtype: torch.dtype) -> Trunk:
    """Make a model of a published shape with random weights, in evaluation mode."""
    return random_models.trunk(name, device, dtype)


def fair_esm(name: str, device: torch.device = CPU) -> Any:
    """Make fair-esm's model with the same weights, fp32."""
    from esm.pretrained import load_model_and_alphabet_local

    with tempfile.TemporaryDirectory() as scratch, torch.serialization.safe_globals([argparse.Namespace]):
        file = Path(scratch) / "esm2_bench.pt"
        export.write_pickle(file, FAIR_ESM, CONFIGS[name], *_as_source(ours(name, device, torch.float32)))
        model, _ = load_model_and_alphabet_local(f"{scratch}/esm2_bench.pt")
    return model.to(device).eval()


def transformers(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Make `EsmForMaskedLM`, or `EsmcForMaskedLM`, with SDPA and the same weights, in evaluation mode."""
    from transformers import EsmConfig, EsmForMaskedLM

    config, state = CONFIGS[name], ours(name, device, dtype).state_dict()
    if config.family == esmc.FAMILY.name:
        return _esmc_of_transformers(config, state).to(device, dtype).eval()
    if config.family == t5.FAMILY.name:
        return _t5_of_transformers(config, state).to(device, dtype).eval()
    settings = {key: value for key, value in FAMILY.write_config(config).items() if key != "model_type"}
    with warnings.catch_warnings(), torch.device(device):
        warnings.simplefilter("ignore")
        model = EsmForMaskedLM._from_config(EsmConfig(**settings), attn_implementation="sdpa", dtype=dtype)
    missing, unexpected = model.load_state_dict({FAMILY.key(key): value for key, value in state.items()}, strict=False)
    # The model computes rotary tables, has no learned positions, and does not use the pooler.
    left = [key for key in [*missing, *unexpected] if not re.search(r"inv_freq|position_|pooler", key)]
    if left:
        raise RuntimeError(f"transformers names these weights in another way: {', '.join(left[:5])}")
    return model.eval()


@torch.no_grad()
def _esmc_of_transformers(config: ModelConfig, state: dict[str, torch.Tensor]) -> Any:
    from transformers import EsmcConfig, EsmcForMaskedLM

    model = EsmcForMaskedLM(EsmcConfig(**esmc.FAMILY.write_config(config), attn_implementation="sdpa"))
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        for piece in esmc.FAMILY.pieces(key, config)[:1]:
            tensor.copy_(state[piece.name])
    return model


def _t5_of_transformers(config: ModelConfig, state: dict[str, torch.Tensor]) -> Any:
    from transformers import T5Config, T5EncoderModel

    model = T5EncoderModel(T5Config(**t5.FAMILY.write_config(config)))
    model.load_state_dict({t5.FAMILY.key(key): value for key, value in state.items()}, strict=False)
    model.rows = torch.tensor(config.rows_in_order)
    return model


def faesm(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Make FAESM's model with the same weights. It needs `pip install faesm` and a transformers below 5."""
    from faesm.esm import FAEsmForMaskedLM

    with tempfile.TemporaryDirectory() as scratch:
        export.write_transformers(Path(scratch), CONFIGS[name], *_as_source(ours(name, device, torch.float32)))
        model = FAEsmForMaskedLM.from_pretrained(scratch, use_fa=find_spec("flash_attn") is not None)
    return model.to(device, dtype).eval()


def _as_source(model: Trunk) -> tuple[dict[str, torch.Size], export.Source]:
    state = {key: value.cpu() for key, value in model.state_dict().items()}
    return weights.stored_shapes(model.config), state.__getitem__


# Batches


def by_length_padded(tokens: Sequence[Tokens], most: int) -> list[list[int]]:
    """Return batches sorted by length, as in fair-esm and most programs: size times longest is at most `most`."""
    groups: list[list[int]] = [[]]
    for n in sorted(range(len(tokens)), key=lambda n: len(tokens[n])):
        if groups[-1] and (len(groups[-1]) + 1) * len(tokens[n]) > most:
            groups.append([])
        groups[-1].append(n)
    return groups


def in_file_order(tokens: Sequence[Tokens]) -> list[list[int]]:
    """Return batches of eight in the order of the input, like a default DataLoader."""
    return [list(range(n, min(n + 8, len(tokens)))) for n in range(0, len(tokens), 8)]


def padded(tokens: Sequence[Tokens], members: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return a batch as int64 [B, longest], with `<pad>` at the end."""
    block = np.full((len(members), max(len(tokens[n]) for n in members)), PAD, dtype=np.int64)
    for row, n in enumerate(members):
        block[row, : len(tokens[n])] = tokens[n]
    return torch.from_numpy(block).to(device)


# Embeddings: the mean over residues of the last layer, of every sequence


def embed_ours(model: Trunk, tokens: Sequence[Tokens], most: int, device: torch.device) -> Variant:
    """Embed as `esmshard embed` does: packs by length, on the CPU one pack on each core."""
    groups = list(by_length([len(t) for t in tokens], most // packs_at_once(device)))
    batches = [pack([tokens[n] for n in group]).to(device) for group in groups]
    layer = model.config.n_layers

    def means(batch: TokenBatch) -> list[torch.Tensor]:
        x_TD = model(batch, layers=(layer,)).representations[layer]
        return [x_LD.float().mean(0) for x_LD in batch.residues(x_TD)]

    return lambda: _as_given(groups, chain.from_iterable(side_by_side(means, batches, device)))


def _as_given(groups: Iterable[Iterable[int]], rows: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all groups as one [N, D], in the order of the sequences."""
    by_number = dict(zip(chain.from_iterable(groups), rows, strict=True))
    return torch.stack([by_number[n] for n in range(len(by_number))]).cpu()


def embed_padded(
    forward: Callable[[torch.Tensor], torch.Tensor],
    tokens: Sequence[Tokens],
    groups: Sequence[Sequence[int]],
    device: torch.device,
) -> Variant:
    """Embed in padded batches."""
    batches = [(padded(tokens, group, device), [len(tokens[n]) for n in group]) for group in groups]

    @torch.no_grad()
    def run() -> torch.Tensor:
        out: list[torch.Tensor] = []
        for block, lengths in batches:
            x_BLD = forward(block)
            out += [x_BLD[k, 1 : length - 1].float().mean(0) for k, length in enumerate(lengths)]
        return _as_given(groups, out)

    return run


def forward_fair_esm(model: Any, block: torch.Tensor) -> torch.Tensor:
    """Call fair-esm as `scripts/extract.py` does, which computes logits, too."""
    layer = model.num_layers
    return model(block, repr_layers=[layer], return_contacts=False)["representations"][layer]


def forward_transformers(model: Any, block: torch.Tensor) -> torch.Tensor:
    """Call only the trunk of transformers, as its users do. T5 has no `<cls>`."""
    if model.config.model_type == "t5":
        x_BLD = model(input_ids=model.rows[block[:, 1:]], attention_mask=(block[:, 1:] != PAD).long()).last_hidden_state
        return F.pad(x_BLD, (0, 0, 1, 0))
    trunk = getattr(model, model.base_model_prefix)
    return trunk(input_ids=block, attention_mask=(block != PAD).long()).last_hidden_state


def forward_faesm(model: Any, block: torch.Tensor) -> torch.Tensor:
    """Call FAESM by its only entry point, which computes logits, too."""
    return model(block, attention_mask=(block != PAD).long())["last_hidden_state"]


# One masked-language-model pass with an AdamW step a batch


def corrupt(tokens: Sequence[Tokens], seed: int = 1) -> tuple[list[Tokens], list[npt.NDArray[np.bool_]]]:
    """Replace 15% of the residues by `<mask>`."""
    rng = np.random.default_rng(seed)
    chosen = [(rng.random(len(one)) < 0.15) & (np.arange(len(one)) % (len(one) - 1) != 0) for one in tokens]
    return [np.where(mask, MASK, one).astype(np.uint8) for one, mask in zip(tokens, chosen, strict=True)], chosen


def train_ours(model: Trunk, tokens: Sequence[Tokens], most: int, device: torch.device, layout: Layout) -> Variant:
    """Train esmshard as the main command does on one device, with LM logits at the masked residues only."""
    model.contact_head.requires_grad_(False)
    shard(model, layout, World(0, 1, device, None))
    masked, chosen = corrupt(tokens)
    work: list[tuple[TokenBatch, torch.Tensor, torch.Tensor]] = []
    plan = StepPlan(np.array([len(one) for one in tokens], np.int32), most, seed=0)
    for group in (plan.step(k)[1] for k in range(plan.steps_per_epoch)):
        at_P = np.flatnonzero(np.concatenate([chosen[n] for n in group]))
        target_P = np.concatenate([tokens[n] for n in group])[at_P].astype(np.int64)
        batch = pack([masked[n] for n in group]).to(device)
        work.append((batch, torch.from_numpy(at_P).to(device), torch.from_numpy(target_P).to(device)))
    return _trainer(model, [partial(_loss_ours, model, *one) for one in work], device, autocast=False)


def _loss_ours(model: Trunk, batch: TokenBatch, at_P: torch.Tensor, target_P: torch.Tensor) -> torch.Tensor:
    logits_PV = model(batch, layers=(), logits_at=at_P).logits_PV
    return F.cross_entropy(logits_PV.float(), target_P, reduction="sum")


def train_transformers(
    model: Any,
    tokens: Sequence[Tokens],
    groups: Sequence[Sequence[int]],
    device: torch.device,
    *,
    autocast: bool = False,
) -> Variant:
    """Train in padded batches with logits at every token, as the library computes them."""
    masked, chosen = corrupt(tokens)
    work = []
    for group in groups:
        labels = padded([np.where(c, t, 255) for c, t in zip(chosen, tokens, strict=True)], group, device)
        block = padded(masked, group, device)
        work.append((block, labels.masked_fill((labels == 255) | (block == PAD), -100)))
    return _trainer(model, [partial(_loss_transformers, model, *one) for one in work], device, autocast)


def _loss_transformers(model: Any, block: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=block, attention_mask=(block != PAD).long()).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")


def _trainer(model: torch.nn.Module, losses: Sequence[Variant], device: torch.device, autocast: bool) -> Variant:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0, fused=True)

    def run() -> list[float]:
        model.train()
        totals = []
        for loss in losses:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                value = loss()
            value.backward()
            optimizer.step()  # learning rate 0: all work is done, and every turn has the same weights
            totals.append(float(value.detach()))
        return totals

    return run


# Contact maps, one protein


def contacts_ours(model: Trunk, tokens: Tokens, device: torch.device) -> Variant:
    """Compute contacts from attention maps one by one."""
    batch = pack([tokens]).to(device)
    return torch.no_grad()(lambda: predict_contacts(model, batch)[0])


def contacts_fair_esm(model: Any, tokens: Tokens, device: torch.device) -> Variant:
    """Compute contacts from the stack of all attention maps."""
    block = torch.from_numpy(tokens.astype(np.int64))[None].to(device)
    return torch.no_grad()(lambda: model.predict_contacts(block)[0])
