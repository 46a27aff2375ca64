"""Packs, windows, and computation without enough memory."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from embed_runs import limit_memory
from model_files import TINY, fair_esm, ours

from esmshard.embed import compute
from esmshard.embed.compute import Computed, Embedder, Failed
from esmshard.embed.spec import Long, choose
from esmshard.io.array_formats import Output
from esmshard.model.attention import attention_map
from esmshard.model.families.esm2 import ESM2
from esmshard.vocab import STANDARD, encode

Tokens = npt.NDArray[np.uint8]
POOLS = ["mean", "max", "cls", "residue", "logits", "contacts", "attentions"]


@pytest.fixture(scope="module")
def esm() -> ESM2:
    return ours(fair_esm(TINY), TINY)


def sequences(*lengths: int) -> list[Tokens]:
    rng = np.random.default_rng(3)
    return [encode("".join(rng.choice(list(STANDARD), n))) for n in lengths]


def outputs(*pools: str) -> tuple[Output, ...]:
    return choose(pools, None, TINY, "tiny")


def found(embedder: Embedder, given: list[Tokens]) -> list[Any]:
    return list(embedder.compute(given))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_sequence_does_not_see_what_it_is_computed_with(esm: ESM2, threads: None) -> None:
    given = sequences(31, 1, 120, 7, 300, 45, 260, 99, 100, 101)
    for long in (Long(), Long("window", 100, 30), Long("truncate", 90)):
        wanted = [found(Embedder(esm, outputs(*POOLS), long=long), [sequence])[0] for sequence in given]
        for tokens in (150, 4096):
            packed = found(Embedder(esm, outputs(*POOLS), long=long, tokens=tokens), given)
            for one, alone in zip(packed, wanted, strict=True):
                for name, values in one.values.items():
                    assert torch.allclose(values, alone.values[name], rtol=0, atol=1e-5, equal_nan=True), (name, tokens)


def by_hand(esm: ESM2, tokens: Tokens, starts: list[int], window: int, overlap: int) -> Iterator[tuple[int, Any, Any]]:
    """Yield start, outputs and weights of each window; weights are computed residue by residue."""
    length = len(tokens) - 2
    for start in starts:
        piece = np.concatenate((tokens[:1], tokens[1 + start : 1 + start + window], tokens[-1:]))
        alone = found(Embedder(esm, outputs("residue", "cls", "contacts", "attentions")), [piece])[0].values
        weights = []
        for place in range(window):
            left = place + 1 if start > 0 else overlap + 1
            right = window - place if start + window < length else overlap + 1
            weights.append(min(left, right, overlap + 1) / (overlap + 1))
        yield start, alone, np.array(weights)


def test_windows_are_cross_faded(esm: ESM2) -> None:
    (tokens,) = sequences(230)
    long = Long("window", 100, 20)
    assert long.starts(230) == [0, 65, 130]
    assert long.starts(100) == [0]
    assert long.starts(101) == [0, 1]
    asked = outputs("residue", "mean", "cls", "contacts", "attentions")
    values = found(Embedder(esm, asked, long=long), [tokens])[0].values
    x_LD, weight_L = np.zeros((230, TINY.dim)), np.zeros(230)
    p_LL, weight_LL, cls = np.zeros((230, 230)), np.zeros((230, 230)), []
    a_HLL = np.zeros((TINY.n_heads, 230, 230))
    for start, alone, weight_W in by_hand(esm, tokens, [0, 65, 130], 100, 20):
        rows = slice(start, start + 100)
        x_LD[rows] += alone["residue_2"].numpy() * weight_W[:, None]
        weight_L[rows] += weight_W
        p_LL[rows, rows] += alone["contacts"].numpy() * np.outer(weight_W, weight_W)
        a_HLL[:, rows, rows] += alone["attentions_2"].numpy() * np.outer(weight_W, weight_W)
        weight_LL[rows, rows] += np.outer(weight_W, weight_W)
        cls.append(alone["cls_2"].numpy())
    x_LD /= weight_L[:, None]
    assert np.abs(values["residue_2"].numpy() - x_LD).max() <= 1e-5
    assert np.abs(values["mean_2"].numpy() - x_LD.mean(0)).max() <= 1e-5
    assert np.abs(values["cls_2"].numpy() - np.mean(cls, 0)).max() <= 1e-5
    seen = weight_LL > 0
    assert np.abs(values["contacts"].numpy()[seen] - (p_LL[seen] / weight_LL[seen])).max() <= 1e-5
    assert not seen.all()
    assert np.isnan(values["contacts"].numpy()[~seen]).all()
    maps_HLL = values["attentions_2"].numpy()
    assert np.abs(maps_HLL[:, seen] - a_HLL[:, seen] / weight_LL[seen]).max() <= 1e-6
    assert np.isnan(maps_HLL[:, ~seen]).all()


def test_without_memory_packs_are_halved(esm: ESM2, monkeypatch: pytest.MonkeyPatch) -> None:
    given = sequences(31, 1, 120, 7, 45, 60, 99)
    wanted = found(Embedder(esm, outputs("residue")), given)
    errors: list[Callable[[], Exception]] = [
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError,
        lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: ..."),
        lambda: RuntimeError("CUDA error: out of memory"),
    ]
    for error in errors:
        with monkeypatch.context() as patch:
            passes = limit_memory(esm, 150, patch, error)
            halved = found(Embedder(esm, outputs("residue")), given)
        for one, alone in zip(halved, wanted, strict=True):
            assert torch.allclose(one.values["residue_2"], alone.values["residue_2"], rtol=0, atol=1e-5)
            assert one.windowed == 0
        assert sum(passes) == sum(map(len, given))
        assert len(passes) > 2
    limit_memory(esm, 0, monkeypatch, lambda: RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        found(Embedder(esm, outputs("mean")), sequences(10))


def test_then_a_sequence_is_cut_into_windows_and_then_it_has_failed(esm: ESM2, monkeypatch: pytest.MonkeyPatch) -> None:
    given = sequences(40, 1000, 30)
    passes = limit_memory(esm, 300, monkeypatch)
    short, long, last = found(Embedder(esm, outputs("residue", "mean")), given)
    assert (short.windowed, long.windowed, last.windowed) == (0, 250, 0)
    assert long.values["residue_2"].shape == (1000, TINY.dim)
    assert max(passes) <= 300
    monkeypatch.undo()
    exact = found(Embedder(esm, outputs("residue"), long=Long("window", 250, 62)), given)[1]
    assert torch.allclose(long.values["residue_2"], exact.values["residue_2"], rtol=0, atol=1e-5)
    limit_memory(esm, 100, monkeypatch)
    short, long, last = found(Embedder(esm, outputs("residue")), given)
    assert isinstance(long, Failed)
    assert "1,000 residues" in long.reason
    assert isinstance(short, Computed)
    assert isinstance(last, Computed)


def test_numbers_beyond_the_range_of_fp16_are_a_failure(esm: ESM2, monkeypatch: pytest.MonkeyPatch) -> None:
    given = sequences(10)
    bias = esm.emb_layer_norm_after.bias
    monkeypatch.setattr(bias, "data", bias.data + 1e5)
    assert isinstance(found(Embedder(esm, outputs("mean")), given)[0], Computed)
    assert isinstance(found(Embedder(esm, outputs("mean"), dtype="bf16"), given)[0], Computed)
    (one,) = found(Embedder(esm, outputs("mean"), dtype="fp16"), given)
    assert isinstance(one, Failed)
    assert "beyond the range of float16" in one.reason
    monkeypatch.setattr(bias, "data", bias.data * float("nan"))
    (one,) = found(Embedder(esm, outputs("mean")), given)
    assert isinstance(one, Failed)
    assert "not finite" in one.reason


def test_layers_that_nobody_asked_for_are_not_computed(esm: ESM2, monkeypatch: pytest.MonkeyPatch) -> None:
    given = sequences(30)
    wanted = found(Embedder(esm, choose(["mean"], [1, 2], TINY, "")), given)[0].values["mean_1"]

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the last layer was computed")

    monkeypatch.setattr(esm.layers[1], "forward", never)
    assert torch.equal(found(Embedder(esm, choose(["mean"], [1], TINY, "")), given)[0].values["mean_1"], wanted)
    (one,) = found(Embedder(esm, choose(["mean", "attentions"], [1], TINY, "")), given)
    assert torch.equal(one.values["mean_1"], wanted)
    assert one.values["attentions_1"].shape == (TINY.n_heads, 30, 30)
    with pytest.raises(AssertionError, match="the last layer was computed"):
        found(Embedder(esm, choose(["attentions", "contacts"], [1], TINY, "")), given)


def test_attention_maps_are_computed_some_heads_at_a_time(esm: ESM2, monkeypatch: pytest.MonkeyPatch) -> None:
    given = sequences(30, 7)
    every = [one.values["attentions_2"] for one in found(Embedder(esm, outputs("attentions")), given)]
    assert [maps.shape for maps in every] == [(TINY.n_heads, 30, 30), (TINY.n_heads, 7, 7)]
    assert float((every[0][0] - every[0][1]).abs().max()) > 1e-3, "heads that are alike would compare nothing"
    computed: list[tuple[int, ...]] = []

    def counted(q_THK: torch.Tensor, k_THK: torch.Tensor) -> torch.Tensor:
        computed.append(tuple(q_THK.shape[:2]))
        return attention_map(q_THK, k_THK)

    monkeypatch.setattr(compute, "attention_map", counted)
    monkeypatch.setattr(compute, "MAP_NUMBERS", 2 * 32 * 32)
    heads = [3, 0, 2]
    asked = choose(["attentions"], None, TINY, "", heads)
    for maps, some in zip(every, found(Embedder(esm, asked), given), strict=True):
        assert torch.equal(some.values["attentions_2"], maps[heads])
    assert sorted(computed) == [(9, 3), (32, 1), (32, 2)]


def test_packs_hold_each_sequence_once_and_a_limited_number_of_tokens_and_maps(
    esm: ESM2, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [31, 1, 120, 7, 300, 45, 260, 99]
    packs = Embedder(esm, outputs("mean"), tokens=150).packs(lengths)
    assert sorted(n for pack in packs for n in pack) == list(range(8))
    assert all(len(pack) == 1 or sum(lengths[n] + 2 for n in pack) <= 150 for pack in packs)
    assert max(map(len, packs)) > 1
    assert packs[-1] == [4], "the longest is last"
    lengths = [31, 60, 10, 40, 40]
    pairs = choose(["attentions"], [1, 2], TINY, "", [0, 3])  # four maps
    monkeypatch.setattr(compute, "PACK_MAPS", 4 * 2 * 40**2)
    packs = Embedder(esm, pairs, tokens=2000).packs(lengths)
    assert sorted(n for pack in packs for n in pack) == list(range(5))
    assert packs[-1] == [1]
    assert all(len(pack) == 1 or sum(4 * lengths[n] ** 2 for n in pack) <= 4 * 2 * 40**2 for pack in packs)
    assert len(packs) == 3
    assert len(Embedder(esm, outputs("mean"), tokens=2000).packs(lengths)) == 1
