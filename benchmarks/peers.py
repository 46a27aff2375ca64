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

from esmshard.batch import TokenBatch, pack, pack_variants
from esmshard.data.batching.packing import by_length
from esmshard.devices import packs_at_once, side_by_side
from esmshard.model import export, weights
from esmshard.model.contacts import predict_contacts
from esmshard.model.families.esm2 import ESM2, FAIR_ESM, FAMILY, EsmConfig
from esmshard.model.families.family_registry import SIZES
from esmshard.model.finetuner import FineTuner
from esmshard.parallel.layout import Layout
from esmshard.parallel.process_group import World
from esmshard.parallel.shard import shard
from esmshard.recipe.sections import AdaptSettings
from esmshard.tasks.variants import Pool, VariantHead
from esmshard.vocab import MASK, PAD, STANDARD, TOKENS

Tokens = npt.NDArray[np.uint8]
Variant = Callable[[], Any]
FILE_ORDER_BATCH = 8
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


def flops(config: EsmConfig, lengths: Sequence[int]) -> tuple[float, float]:
    """Return the forward FLOPs of the linear layers of the trunk, and of attention, with `<cls>` and `<eos>`."""
    tokens = np.array(lengths, dtype=np.float64) + 2
    gemm = config.n_layers * 24 * config.dim**2 * tokens.sum()
    return float(gemm), float(config.n_layers * 4 * config.dim * (tokens**2).sum())


def ours(name: str, device: torch.device, dtype: torch.dtype) -> ESM2:
    """Make a model of a published shape with random weights, in evaluation mode."""
    return random_models.trunk(name, device, dtype)


def fair_esm(name: str, device: torch.device = CPU) -> Any:
    """Make fair-esm's model with the same weights, fp32."""
    from esm.pretrained import load_model_and_alphabet_local

    with tempfile.TemporaryDirectory() as scratch, torch.serialization.safe_globals([argparse.Namespace]):
        file = Path(scratch) / "esm2_bench.pt"
        export.write_pickle(file, FAIR_ESM, SIZES[name], *_as_source(ours(name, device, torch.float32)))
        model, _ = load_model_and_alphabet_local(f"{scratch}/esm2_bench.pt")
    return model.to(device).eval()


def transformers(name: str, device: torch.device, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    """Make `EsmForMaskedLM` with the same weights, in evaluation mode."""
    from transformers import EsmConfig, EsmForMaskedLM

    settings = {key: value for key, value in FAMILY.write_config(SIZES[name]).items() if key != "model_type"}
    with warnings.catch_warnings(), torch.device(device):
        warnings.simplefilter("ignore")
        model = EsmForMaskedLM._from_config(EsmConfig(**settings), attn_implementation=attention, dtype=dtype)
    given = {FAMILY.key(key): value for key, value in ours(name, device, dtype).state_dict().items()}
    missing, unexpected = model.load_state_dict(given, strict=False)
    # The model computes rotary tables, has no learned positions, and does not use the pooler.
    left = [key for key in [*missing, *unexpected] if not re.search(r"inv_freq|position_|pooler", key)]
    if left:
        raise RuntimeError(f"transformers names these weights in another way: {', '.join(left[:5])}")
    return model.eval()


def faesm(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Make FAESM's model with the same weights. It needs `pip install faesm` and a transformers below 5."""
    from faesm.esm import FAEsmForMaskedLM

    with tempfile.TemporaryDirectory() as scratch:
        export.write_transformers(Path(scratch), SIZES[name], *_as_source(ours(name, device, torch.float32)))
        model = FAEsmForMaskedLM.from_pretrained(scratch, use_fa=find_spec("flash_attn") is not None)
    return model.to(device, dtype).eval()


def _as_source(model: ESM2) -> tuple[dict[str, torch.Size], export.Source]:
    state = {key: value.cpu() for key, value in model.state_dict().items()}
    return weights.stored_shapes(model.config), state.__getitem__


# Batches


def best_fit(tokens: Sequence[Tokens], most: int) -> list[list[int]]:
    """Return the members of packs of at most `most` tokens: best fit in the given order, for training cannot sort."""
    packs: list[list[int]] = []
    room: list[int] = []
    for n, one in enumerate(tokens):
        fits = [k for k, left in enumerate(room) if left >= len(one)]
        if fits:
            best = min(fits, key=lambda k: room[k])
            packs[best].append(n)
            room[best] -= len(one)
        else:
            packs.append([n])
            room.append(most - len(one))
    return packs


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
    return [list(range(n, min(n + FILE_ORDER_BATCH, len(tokens)))) for n in range(0, len(tokens), FILE_ORDER_BATCH)]


def padded(tokens: Sequence[Tokens], members: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return a batch as int64 [B, longest], with `<pad>` at the end."""
    block = np.full((len(members), max(len(tokens[n]) for n in members)), PAD, dtype=np.int64)
    for row, n in enumerate(members):
        block[row, : len(tokens[n])] = tokens[n]
    return torch.from_numpy(block).to(device)


# Embeddings: the mean over residues of the last layer, of every sequence


def embed_ours(model: ESM2, tokens: Sequence[Tokens], most: int, device: torch.device) -> Variant:
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
    """Call only the trunk of transformers, as its users do."""
    return model.esm(input_ids=block, attention_mask=(block != PAD).long()).last_hidden_state


def forward_faesm(model: Any, block: torch.Tensor) -> torch.Tensor:
    """Call FAESM by its only entry point, which computes logits, too."""
    return model(block, attention_mask=(block != PAD).long())["last_hidden_state"]


# One masked-language-model pass with an AdamW step a batch


def corrupt(tokens: Sequence[Tokens], seed: int = 1) -> tuple[list[Tokens], list[npt.NDArray[np.bool_]]]:
    """Replace 15% of the residues by `<mask>`."""
    rng = np.random.default_rng(seed)
    chosen = [(rng.random(len(one)) < 0.15) & (np.arange(len(one)) % (len(one) - 1) != 0) for one in tokens]
    return [np.where(mask, MASK, one).astype(np.uint8) for one, mask in zip(tokens, chosen, strict=True)], chosen


def train_ours(model: ESM2, tokens: Sequence[Tokens], most: int, device: torch.device, layout: Layout) -> Variant:
    """Train esmshard as the main command does on one device, with LM logits at the masked residues only."""
    model.contact_head.requires_grad_(False)
    shard(model, layout, World(0, 1, device, None))
    masked, chosen = corrupt(tokens)
    work: list[tuple[TokenBatch, torch.Tensor, torch.Tensor]] = []
    for group in best_fit(tokens, most):
        at_P = np.flatnonzero(np.concatenate([chosen[n] for n in group]))
        target_P = np.concatenate([tokens[n] for n in group])[at_P].astype(np.int64)
        batch = pack([masked[n] for n in group]).to(device)
        work.append((batch, torch.from_numpy(at_P).to(device), torch.from_numpy(target_P).to(device)))
    return _trainer(model, [partial(_loss_ours, model, *one) for one in work], device, autocast=False)


def _loss_ours(model: ESM2, batch: TokenBatch, at_P: torch.Tensor, target_P: torch.Tensor) -> torch.Tensor:
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


# Variants of one protein, all of one length


def train_variants_ours(
    model: ESM2, tokens: Sequence[Tokens], wild_type: Tokens, each: int, device: torch.device, pool: Pool
) -> Variant:
    """Train the trunk with the head for variants, with an AdamW step for `each` variants."""
    torch.manual_seed(0)
    head = VariantHead(model.config.dim, 0, np.ones(1, np.float32), pool, 0.0, zero_shot=False)
    torch.nn.init.ones_(head.out.weight)
    tuner = FineTuner(model, head).to(device)
    tuner.adapt(AdaptSettings(), seed=0)

    def loss(first: int) -> torch.Tensor:
        group = tokens[first : first + each]
        if pool == "mean":
            batch = pack(group).to(device)
        else:
            batch = pack_variants(group, wild_type, alone=pool == "wild_type").to(device)
        return F.mse_loss(torch.stack(tuner(batch)).float().squeeze(1), _targets(len(group), device), reduction="sum")

    return _trainer(tuner, [partial(loss, n) for n in range(0, len(tokens), each)], device, autocast=False)


def train_variants_transformers(model: Any, tokens: Sequence[Tokens], each: int, device: torch.device) -> Variant:
    """Train trunk, mean over residues, LayerNorm and a linear layer, in the same batches without padding."""
    dim = model.config.hidden_size
    trunk, norm, out = model.esm, torch.nn.LayerNorm(dim).to(device), torch.nn.Linear(dim, 1).to(device)
    torch.nn.init.ones_(out.weight)
    torch.nn.init.zeros_(out.bias)
    whole = torch.nn.ModuleList([trunk, norm, out])

    def loss(first: int) -> torch.Tensor:
        group = range(first, min(first + each, len(tokens)))
        block = padded(tokens, group, device)
        x_BLD = trunk(input_ids=block, attention_mask=torch.ones_like(block)).last_hidden_state
        told = out(norm(x_BLD[:, 1:-1]).mean(1))
        return F.mse_loss(told.squeeze(1), _targets(len(group), device), reduction="sum")

    return _trainer(whole, [partial(loss, n) for n in range(0, len(tokens), each)], device, autocast=False)


def _targets(count: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(-1, 1, count, device=device)


# Contact maps, one protein


def contacts_ours(model: ESM2, tokens: Tokens, device: torch.device) -> Variant:
    """Compute contacts from attention maps one by one."""
    batch = pack([tokens]).to(device)
    return lambda: _quiet(lambda: predict_contacts(model, batch)[0])


def contacts_fair_esm(model: Any, tokens: Tokens, device: torch.device) -> Variant:
    """Compute contacts from the stack of all attention maps."""
    block = torch.from_numpy(tokens.astype(np.int64))[None].to(device)
    return lambda: _quiet(lambda: model.predict_contacts(block)[0])


def _quiet(function: Variant) -> Any:
    with torch.no_grad():
        return function()
