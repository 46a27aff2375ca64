"""Coordinates and structure tokens in ESM3 give the numbers and gradients of the authors' code (see `test_esm3.py`)."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from outputs import everything
from safetensors.torch import load_file
from test_esm3 import GOLDEN, compare_with, model_of, published, structured
from torch.distributed._tools.mem_tracker import MemTracker

from esmshard.batch import TokenBatch, pack
from esmshard.model.families import esm3
from esmshard.model.families.esm3 import GeometricAttention
from esmshard.model.families.family_registry import SIZES, build
from esmshard.model.finetuner import FineTuner, LanguageModelHead
from esmshard.model.trunk import Trunk
from esmshard.parallel.layout import Layout
from esmshard.planner import layer_bytes, numbers_of
from esmshard.recipe.sections import AdaptSettings
from esmshard.vocab import encode

MIB = 2**20


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("esm3"))


@pytest.fixture
def model(repository: Path) -> Trunk:
    return model_of(repository)


def walk(counts: list[int], seed: int = 0) -> torch.Tensor:
    """Coordinates [T, 3, 3] of chains, unknown at both ends of each chain."""
    generator = torch.Generator().manual_seed(seed)
    chains = []
    for count in counts:
        alpha = torch.randn(count, 1, 3, generator=generator).cumsum(0) * 2.2
        chain = alpha + 1.4 * torch.randn(count, 3, 3, generator=generator)
        chain[[0, -1]] = torch.nan
        chains.append(chain)
    return torch.cat(chains)


def of_chains(texts: list[str], **tracks: torch.Tensor) -> TokenBatch:
    return replace(pack([encode(text) for text in texts]), tracks=tracks)


def test_every_layer_the_logits_and_gradients_are_those_of_the_authors(model: Trunk) -> None:
    golden, batch = load_file(GOLDEN), structured()
    compare_with(golden, model, tracks=True)
    for left_out in batch.tracks:
        tracks = {name: values for name, values in batch.tracks.items() if name != left_out}
        logits = everything(model, replace(batch, tracks=tracks))[-1]
        assert (logits - golden["structures.logits"]).abs().max() > 0.1, left_out


def test_parts_of_heads_and_queries_give_the_same(model: Trunk, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[torch.Tensor]:
        model.zero_grad()
        batch = structured()
        logits = model(batch, logits_at=torch.arange(batch.bounds[-1])).logits_PV
        logits.square().mean().backward()
        return [logits.detach(), *(p.grad for p in model.geom_attn.parameters())]  # type: ignore[union-attr,misc]

    whole = found()
    for most in (40, 300):
        monkeypatch.setattr(esm3, "AT_ONCE", most)
        assert all((a - b).abs().max() < 1e-5 * b.abs().max() for a, b in zip(found(), whole, strict=True))


@pytest.mark.parametrize(
    ("counts", "heads", "dim", "most"),
    [([768], 16, 256, 70), pytest.param([1024], 256, 1536, 100, marks=pytest.mark.slow, id="as released")],
)
def test_a_long_protein_takes_little_memory(counts: list[int], heads: int, dim: int, most: int) -> None:
    """Geometric attention only. All 256 heads of the released model at once would need 1 GiB for each matrix."""
    module = GeometricAttention(dim, heads)
    x_TD, coordinates_T33 = torch.randn(sum(counts), dim, requires_grad=True), walk(counts)
    # This allocates the memory of the gradients.
    module(x_TD[:9], coordinates_T33[:9], [9]).sum().backward()
    tracker = MemTracker()
    with tracker:
        tracker.track_external(module, x_TD, coordinates_T33)
        before = tracker.get_tracker_snapshot()[x_TD.device]["Total"]
        module(x_TD, coordinates_T33, counts).square().sum().backward()
    peak = tracker.get_tracker_snapshot("peak")[x_TD.device]["Total"] - before
    assert most / 4 < peak / MIB < most


def test_what_is_kept_is_what_the_planner_adds() -> None:
    config = SIZES["esm3_mini"]
    model = build(config)
    texts = ["ACDEFGHIKLMNPQRSTVWY" * n for n in (5, 12, 3)]
    batch = of_chains(texts, coordinates=walk([len(text) + 2 for text in texts]))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(batch)
    assert output.representations
    counted = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    numbers = numbers_of(model, config, tracks=["coordinates"])
    layers = config.n_layers * layer_bytes(numbers, Layout(), "cpu").kept
    predicted = (layers + 4 * (2 * config.dim + numbers.track_kept)) * len(batch.tokens_T)
    assert 0.97 < predicted / counted < 1.03
    assert predicted - 4 * numbers.track_kept * len(batch.tokens_T) < 0.98 * counted, "it is too small to be seen"


def test_what_learns_with_a_track_is_what_the_planner_counts() -> None:
    """The additional parameters of the first block are outside of the blocks, so all blocks are equal."""
    config = SIZES["esm3_nano"]
    for method, tracks in (
        ("full", ()),
        ("full", ("coordinates",)),
        ("full", ("structure_tokens",)),
        ("lora", ("coordinates", "structure_tokens")),
        ("head", ("coordinates", "structure_tokens")),
    ):
        with torch.device("meta"):
            tuner = FineTuner(build(config), LanguageModelHead())
            tuner.adapt(AdaptSettings.model_validate({"method": method}), 0, tracks)
        assert numbers_of(tuner, config).parameters == sum(parameter.numel() for parameter in tuner.parameters())
        learns = {name for name, parameter in tuner.trunk.named_parameters() if parameter.requires_grad}
        assert learns
        full = method == "full"
        assert any(name.startswith("geom_attn.") for name in learns) == (full and "coordinates" in tracks)
        tables = {"other_tracks.structure_tokens_embed.weight"} if full and "structure_tokens" in tracks else set()
        assert {name for name in learns if name.startswith(("other_", "contact_head."))} == tables
    tuner = FineTuner(build(config), LanguageModelHead())
    tuner.adapt(AdaptSettings(freeze=("tracks",)), 0, ("coordinates", "structure_tokens"))
    of_tracks = {n: p for n, p in tuner.trunk.named_parameters() if n.startswith(("geom_attn.", "other_tracks."))}
    assert not any(parameter.requires_grad for parameter in of_tracks.values())
    batch = of_chains(["MKTAYIAK"], coordinates=walk([10]))
    tuner.trunk(batch).representations[config.n_layers].square().sum().backward()  # frozen vectors need no gradient
    assert tuner.trunk.embed_tokens.weight.grad is not None
    assert all(parameter.grad is None for parameter in of_tracks.values())


def test_half_precision_computes_with_exact_coordinates() -> None:
    """In bf16, numbers around 200 have a precision of 1."""
    torch.manual_seed(0)
    module, x_TD, coordinates_T33 = GeometricAttention(64, 16), torch.randn(60, 64), walk([60]) + 200
    with torch.no_grad():
        exact = module(x_TD, coordinates_T33, [60])
        with torch.autocast("cpu", torch.bfloat16):
            cast = module(x_TD, coordinates_T33, [60])
        module.to(torch.bfloat16)
        halved = module(x_TD.bfloat16(), coordinates_T33, [60])
        rounded = module(x_TD.bfloat16(), coordinates_T33.bfloat16(), [60])
    assert cast.dtype == halved.dtype == torch.bfloat16
    assert exact.abs().max() > 0.2
    assert (cast - exact).abs().max() < 0.02
    assert (halved - exact).abs().max() < 0.02
    assert (rounded - exact).abs().max() > 0.05


def test_blocks_are_compiled_once_for_all_packs(model: Trunk, repository: Path) -> None:
    torch._dynamo.reset()
    plain = model_of(repository)
    model.compile_layers(backend="eager")
    for n, text in enumerate(["MKTAYIAK", "MK", "ACDEFGHIKLMNPQRSTVWY" * 3]):
        batch = of_chains([text, text[:2]], coordinates=walk([len(text) + 2, 4]))
        with torch._dynamo.config.patch(error_on_recompile=n > 1):
            for a, b in zip(everything(model, batch), everything(plain, batch), strict=True):
                assert (a - b).abs().max() < 1e-5
    torch._dynamo.reset()
