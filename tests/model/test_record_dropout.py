"""Dropout masks depend on the record only."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from esmshard.batch import TokenBatch, pack, pack_variants
from esmshard.model.families.esm2 import EsmConfig
from esmshard.model.finetuner import RecordDropout, of_changes
from esmshard.tasks.residue import ResidueSettings, ResidueTask
from esmshard.tasks.sequence import SequenceSettings, SequenceTask
from esmshard.tasks.variants import VariantSettings, VariantTask
from esmshard.vocab import encode

DIM = 32
CONFIG = EsmConfig(n_layers=1, dim=DIM, n_heads=2)
SEQUENCES = ["MKTV", "GAVLIKE", "WY"]
WILD_TYPE, VARIANTS = "MKTVGAV", ["MRTVGAV", "MKTVGAW", "AKTIGAV"]


def left_out(draws: list[int], columns: int = 400, *, share: float = 0.3, layer: int = 0) -> np.ndarray:
    draw_R = torch.tensor(draws, dtype=torch.int32)
    found: np.ndarray = (RecordDropout(share, layer)(torch.ones(len(draws), columns), draw_R) == 0).numpy()
    return found


def test_the_mask_is_this_one_with_every_version() -> None:
    """The same hash with Python's integers. A resumed run needs the masks of its first start."""

    def hashed(h: int) -> int:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            h = (h ^ h >> shift) * factor % 2**32
        return h ^ h >> 16

    for draw, layer in ((0, 0), (5, 0), (-123456789, 1), (2**31 - 1, 1)):
        row = hashed((draw + layer * 0x165667B1) % 2**32)
        numbers = [hashed((row + column * 0x61C88647) % 2**32) for column in range(400)]
        signed = [n - 2**32 if n >= 2**31 else n for n in numbers]
        expected = [n < int(0.3 * 2**32) - 2**31 for n in signed]
        assert left_out([draw], layer=layer)[0].tolist() == expected


def test_the_share_is_left_out_and_the_mean_stays() -> None:
    share = 0.3
    draws = np.random.default_rng(0).integers(-(2**31), 2**31, 500).tolist()
    mask = left_out(draws, 400, share=share)
    deviation = (share * (1 - share)) ** 0.5
    assert abs(mask.mean() - share) < 4 * deviation / mask.size**0.5
    # The largest of 900 means of rows and columns lies within five standard errors.
    assert abs(mask.mean(1) - share).max() < 5 * deviation / 400**0.5
    assert abs(mask.mean(0) - share).max() < 5 * deviation / 500**0.5
    kept = RecordDropout(share)(torch.ones(500, 400), torch.tensor(draws, dtype=torch.int32))
    assert kept.max().item() == pytest.approx(1 / (1 - share))


def head_of(task: str) -> torch.nn.Module:
    if task == "sequence":
        facts = {"targets": ["y"], "mean": [0.0], "std": [1.0]}
        head = SequenceTask(SequenceSettings(name="sequence", dropout=0.5), facts).head(CONFIG)
    elif task == "residue":
        facts = {"targets": ["value"], "mean": [0.0], "std": [1.0]}
        head = ResidueTask(ResidueSettings(name="residue", kind="number", dropout=0.5, hidden=6), facts).head(CONFIG)
    else:
        facts = {"targets": ["y"], "lower_is_better": [], "scales": [], "protein": WILD_TYPE, "first": 0, "length": 7}
        facts |= {"breaks": [], "linker": 25}
        settings = VariantSettings(name="variant", pool=task, dropout=0.5, zero_shot=False)  # type: ignore[arg-type]
        head = VariantTask(settings, facts).head(CONFIG)
    torch.manual_seed(0)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head.train()


def batch_of(numbers: list[int], task: str) -> TokenBatch:
    if task in ("sequence", "residue"):
        batch = pack([encode(SEQUENCES[n]) for n in numbers])
    else:
        alone = task == "wild_type"
        batch = pack_variants([encode(VARIANTS[n]) for n in numbers], [encode(WILD_TYPE)] * len(numbers), alone=alone)
    return replace(batch, draw_N=torch.tensor([100 + n for n in numbers], dtype=torch.int32))


def seen(batch: TokenBatch) -> torch.Tensor:
    """Representations that depend on token and position only."""
    phase_TD = (batch.tokens_T * 31 + batch.position_T)[:, None] * torch.linspace(0.1, 3, DIM)
    return phase_TD.sin()


@pytest.mark.parametrize("task", ["sequence", "residue", "wild_type", "sites"])
def test_a_record_says_the_same_whatever_it_is_packed_with(task: str) -> None:
    head = head_of(task)
    together = head(seen(batch := batch_of([0, 1, 2], task)), batch)
    for numbers in ([2], [1, 0], [2, 1, 0]):
        batch = batch_of(numbers, task)
        for n, output in zip(numbers, head(seen(batch), batch), strict=True):
            assert torch.allclose(output, together[n], rtol=1e-5, atol=1e-5)
    other = replace(batch_of([0, 1, 2], task), draw_N=torch.tensor([7, 8, 9], dtype=torch.int32))
    assert not torch.allclose(head(seen(other), other)[0], together[0], rtol=1e-3)
    if task == "sites":
        draws = of_changes(batch_of([2], task))
        assert draws is not None
        assert len(set(draws.tolist())) == 2, "each change of a variant has its own mask"
