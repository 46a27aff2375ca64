"""The sequence track of ESM3 gives the numbers and gradients of the authors' code, and their file is read and written.

`esm3_golden.py` made `tests/golden/esm3.safetensors` with the authors' code.
"""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from esm3_golden import STRUCTURED, TARGETS, TOKENS, structures
from esm3_golden import weights as golden_weights
from outputs import everything
from safetensors import safe_open
from safetensors.torch import load_file

from esmshard.batch import TokenBatch, pack
from esmshard.checkpoint.consolidate import consolidate
from esmshard.errors import InputError, UsageError
from esmshard.model import hub, weights
from esmshard.model.families.esm3 import ESM3, FAMILY
from esmshard.model.families.family_registry import SIZES
from esmshard.model.trunk import Trunk

GOLDEN = Path(__file__).parents[1] / "golden" / "esm3.safetensors"
TOLERANCE = 1e-5
NANO = SIZES["esm3_nano"]
FILE = "data/weights/esm3_sm_open_v1.pth"


def authors_state(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    with safe_open(GOLDEN, framework="pt") as file:
        shapes = json.loads(file.metadata()["shapes"])
    return {name: tensor.to(dtype) for name, tensor in golden_weights(shapes).items()}


def published(directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A copy of the repository: an empty configuration, the model, and another model that decodes structures."""
    (directory / "data" / "weights").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    torch.save(authors_state(dtype), directory / FILE)
    torch.save({"decoder.weight": torch.ones(2)}, directory / "data" / "weights" / "esm3_structure_decoder_v0.pth")
    return directory


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("esm3"))


def model_of(source: Path) -> Trunk:
    found = weights.read(str(source))
    assert (found.config, found.absent) == (NANO, ("contact_head",))
    return weights.build(found, torch.device("cpu")).eval()


def structured() -> TokenBatch:
    """The proteins with coordinates and structure tokens."""
    return pack([np.array(tokens, dtype=np.uint8) for tokens in STRUCTURED], tracks=structures())


def compare_with(golden: Mapping[str, torch.Tensor], model: Trunk, tracks: bool = False) -> None:
    """Compare all outputs, and all gradients relative to a tensor's largest number. With `tracks`, compare the proteins
    that have coordinates and structure tokens.
    """
    batch, targets = pack([np.array(tokens, dtype=np.uint8) for tokens in TOKENS]), TARGETS
    if tracks:
        batch, targets = structured(), STRUCTURED
        start = "structures."
        golden = {name.removeprefix(start): tensor for name, tensor in golden.items() if name.startswith(start)}
    names = [*(f"layer.{n}" for n in range(NANO.n_layers + 1)), "logits"]
    for name, mine in zip(names, everything(model, batch), strict=True):
        assert golden[name].abs().max() > 0.5
        assert (mine - golden[name]).abs().max() < TOLERANCE, name
    logits = model(batch, logits_at=torch.arange(batch.bounds[-1])).logits_PV
    assert logits is not None
    F.cross_entropy(logits, torch.tensor([*chain(*targets)]), reduction="sum").backward()
    mine_by_name = {name: parameter.grad for name, parameter in model.named_parameters()}
    learned = set()
    for stored, theirs in golden.items():
        if stored.startswith("gradient."):
            key = stored.removeprefix("gradient.")
            names = [piece.name for piece in FAMILY.pieces(key, NANO)]
            flat = torch.cat([mine_by_name[name] for name in names]).flatten()
            assert theirs.abs().max() > 1e-3, key
            assert (flat[golden[f"places.{key}"].long()] - theirs).abs().max() < TOLERANCE * theirs.abs().max(), key
            learned |= set(names)
    with_tracks = tuple(start for starts in ESM3.learns_with.values() for start in starts) if tracks else ()
    learns = {name for name in mine_by_name if not name.startswith(ESM3.never_learns) or name.startswith(with_tracks)}
    assert learns <= learned, "every trained parameter is compared"


def test_every_layer_the_logits_and_gradients_are_those_of_the_authors(repository: Path) -> None:
    compare_with(load_file(GOLDEN), model_of(repository))


def test_the_file_of_the_authors_is_written_as_it_was(tmp_path: Path) -> None:
    source = published(tmp_path / "source", torch.bfloat16)
    out = consolidate(source, tmp_path / "written", to="esm3-pth", dtype="bf16")
    assert sorted(path.name for path in out.iterdir()) == ["esmshard.json", "written.pth"]
    written = torch.load(out / "written.pth", weights_only=True)
    expected = authors_state(torch.bfloat16)
    assert written.keys() == expected.keys()
    assert all(written[name].dtype == torch.bfloat16 and torch.equal(written[name], x) for name, x in expected.items())


def test_a_directory_of_our_own_holds_the_same_model(repository: Path, tmp_path: Path) -> None:
    out = consolidate(repository / FILE, tmp_path / "own")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "esmshard.json", "model.safetensors"]
    again, given = weights.read(str(out)), weights.read(str(repository))
    assert again.config == NANO
    for name in weights.stored_shapes(NANO):
        if not name.startswith("contact_head."):
            assert torch.equal(again[name], given[name]), name
    for to in ("hf", "fair-esm"):
        with pytest.raises(UsageError, match=f"--to {to}"):
            consolidate(out, tmp_path / "hf", to=to)
    assert not (tmp_path / "hf").exists()


def test_what_cannot_be_read_is_refused_with_the_fix(tmp_path: Path) -> None:
    source = published(tmp_path / "source")
    second = source / "data" / "weights" / "second.pth"
    torch.save(authors_state(), second)
    with pytest.raises(InputError, match=r"no language model, or several"):
        weights.read(str(source))
    assert weights.read(str(second)).config == NANO
    for path in (second, source / FILE):
        path.unlink()
    state = authors_state()
    del state["transformer.blocks.0.geom_attn.distance_scale_per_head"]
    torch.save(state, second)
    with pytest.raises(InputError, match=r"transformer\.blocks\.0\.geom_attn\.distance_scale_per_head"):
        weights.read(str(source))
    torch.save(authors_state() | {"strange.weight": torch.ones(2)}, second)
    with pytest.raises(InputError, match=r"strange\.weight do not belong"):
        weights.read(str(source))
    (source / "config.json").write_text('{"model_type": "esm3", "n_layers": 2, "dim": 128, "n_heads": 2}')
    with pytest.raises(InputError, match="'v_heads' is missing"):
        weights.read(str(source))
    # The files of https://huggingface.co/biohub/esm3-sm-open-v1/tree/main.
    parts = ("structure_encoder", "structure_decoder", "function_decoder")
    others = [f"data/weights/esm3_{part}_v0.pth" for part in parts]
    assert hub.authors_weights(["config.json", *others, FILE]) == FILE
