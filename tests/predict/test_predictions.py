"""Predictions of a consolidated model against the module called directly, and what is refused."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_files import TINY, fair_esm, ours, perturb, tokenise, write_fair_esm, write_transformers

from esmshard.checkpoint.consolidate import FORMAT, VERSION
from esmshard.errors import InputError, UsageError
from esmshard.model.finetuner import FineTuner
from esmshard.predict.predictions import predict
from esmshard.tasks.contact import ContactSettings, ContactTask
from esmshard.tasks.finetuned import load_finetuned
from esmshard.vocab import STANDARD

SETTINGS = ContactSettings(name="contact", channels=8, blocks=2)
LENGTHS = {"zeta": 31, "sp|P1|N": 90, "a/b": 7, "a_b": 2, "lower": 64}


@pytest.fixture(scope="module")
def original() -> FineTuner:
    torch.manual_seed(0)
    head = ContactTask(SETTINGS, {}).head(TINY)
    perturb(head, deviation=0.3)
    torch.nn.init.normal_(head.out.weight, std=0.3)  # a new one is tiny, and all logits nearly equal
    return FineTuner(ours(fair_esm(TINY), TINY), head).eval()


def write_consolidated(directory: Path, model: FineTuner, **changes: Any) -> Path:
    """What `consolidate` leaves: the trunk under `transformers`' names, the head under `head.`, and esmshard.json."""
    write_transformers(directory, model.trunk, TINY, model.head.state_dict())
    about = {
        "format": FORMAT,
        "version": VERSION,
        "step": 7,
        "recipe": {"task": SETTINGS.model_dump()},
        "facts": {},
    }
    (directory / "esmshard.json").write_text(json.dumps(about | changes))
    return directory


@pytest.fixture
def consolidated(tmp_path: Path, original: FineTuner) -> Path:
    return write_consolidated(tmp_path / "model", original)


@pytest.fixture
def sequences() -> dict[str, str]:
    rng = np.random.default_rng(6)
    return {i: "".join(rng.choice(list(STANDARD), n)) for i, n in LENGTHS.items()}


@pytest.fixture
def fasta(tmp_path: Path, sequences: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The input; scratch files go to a known place."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "out").mkdir()
    path = tmp_path / "input.fasta"
    path.write_text("".join(f">{i} words\n{s.lower() if i == 'lower' else s}\n" for i, s in sequences.items()))
    return path


def left(fasta: Path) -> list[str]:
    """Files where results and temporary files go."""
    return [p.name for place in ("out", "scratch") for p in (fasta.parent / place).iterdir()]


def test_the_model_is_opened_as_it_was(consolidated: Path, original: FineTuner) -> None:
    found = load_finetuned(str(consolidated))
    assert not found.model.training
    assert found.about["step"] == 7
    state = found.model.state_dict()
    assert state.keys() == original.state_dict().keys()
    for name, tensor in original.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_npz_holds_the_probabilities_of_the_module(
    consolidated: Path, original: FineTuner, fasta: Path, sequences: dict[str, str]
) -> None:
    out = fasta.parent / "out" / "x.npz"
    assert predict(str(consolidated), fasta, out) == (len(LENGTHS), ())
    assert sorted(left(fasta)) == ["x.npz", "x.npz.json"]
    with np.load(out, allow_pickle=False) as file:
        assert list(file) == list(LENGTHS)
        for record_id, length in LENGTHS.items():
            p_LL = file[record_id]
            assert (p_LL.dtype, p_LL.shape) == (np.float32, (length, length))
            assert np.array_equal(p_LL, p_LL.T)
            assert p_LL.min() >= 0
            assert p_LL.max() <= 1
            with torch.no_grad():
                expected_LL = original(tokenise([sequences[record_id]])[1])[0].sigmoid().numpy()
            assert np.abs(p_LL - expected_LL).max() <= 1e-6
        assert file["sp|P1|N"].std() > 0.01


def test_a_protein_of_one_residue_is_predicted(consolidated: Path, fasta: Path) -> None:
    fasta.write_text(">one\nM\n>two\nMKTAYIAK\n")
    assert predict(str(consolidated), fasta, fasta.parent / "out" / "x.npz").records == 2
    with np.load(fasta.parent / "out" / "x.npz") as file:
        assert file["one"].shape == (1, 1)


def test_an_existing_file_is_replaced_only_when_asked_to(consolidated: Path, fasta: Path) -> None:
    out = fasta.parent / "out" / "x.npz"
    out.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        predict(str(consolidated), fasta, out)
    assert out.read_text() == "mine"
    predict(str(consolidated), fasta, out, overwrite=True)
    assert len(np.load(out)) == len(LENGTHS)


def test_another_ending_is_refused(consolidated: Path, fasta: Path) -> None:
    with pytest.raises(UsageError, match="ending"):
        predict(str(consolidated), fasta, fasta.parent / "out" / "x.npy")
    assert left(fasta) == []


@pytest.mark.parametrize("text", ["", ">a\nMKT\n>b\nM*K\n"])
def test_a_bad_fasta_leaves_nothing_behind(consolidated: Path, fasta: Path, text: str) -> None:
    fasta.write_text(text)
    with pytest.raises(InputError, match=r"input\.fasta"):
        predict(str(consolidated), fasta, fasta.parent / "out" / "x.npz")
    assert left(fasta) == []


@pytest.mark.parametrize("form", ["transformers", "fair-esm"])
def test_a_model_without_a_head_is_refused(form: str, tmp_path: Path, fasta: Path) -> None:
    if form == "fair-esm":
        model = write_fair_esm(tmp_path / "esm2_tiny.pt", fair_esm(TINY))
    else:
        model = write_transformers(tmp_path / "model", fair_esm(TINY), TINY)
    with pytest.raises(InputError, match="has no fine-tuned head") as caught:
        predict(str(model), fasta, fasta.parent / "out" / "x.npz")
    assert str(caught.value).startswith(f"{model}: ")
    assert left(fasta) == []


def test_a_model_that_is_not_there_is_refused(fasta: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        predict("nowhere", fasta, fasta.parent / "out" / "x.npz")
    assert left(fasta) == []


@pytest.mark.parametrize(
    ("recipe", "fix"),
    [
        ({"task": SETTINGS.model_dump() | {"blocks": 3}}, "consolidate the run again"),  # a head of other tensors
        ({"task": SETTINGS.model_dump() | {"channels": 16}}, "consolidate the run again"),  # tensors of other shapes
        ({"task": {"name": "folding"}}, "no installed package registers the task folding; install the one that"),
    ],
)
def test_a_head_that_does_not_fit_its_recipe_is_refused(
    recipe: dict, fix: str, original: FineTuner, fasta: Path, tmp_path: Path
) -> None:
    model = write_consolidated(tmp_path / "model", original, recipe=recipe)
    with pytest.raises(InputError, match=fix) as caught:
        predict(str(model), fasta, fasta.parent / "out" / "x.npz")
    assert "\n" not in str(caught.value)
    assert left(fasta) == []
