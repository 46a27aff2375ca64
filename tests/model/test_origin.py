"""The identity of a base model: what changes it, what does not, and what is said."""

import hashlib
import shutil
from pathlib import Path

import pytest
from model_files import SMALL, fair_esm, ours, write_fair_esm, write_transformers

from esmshard.errors import InputError
from esmshard.model.families.family_registry import SIZES
from esmshard.model.weights import open_weights, origin


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_transformers(tmp_path / "base", ours(fair_esm(SMALL["ESM-2"]), SMALL["ESM-2"]), SMALL["ESM-2"])


def identity(path: Path) -> dict[str, object]:
    return origin.identity(open_weights.read(str(path)), str(path))


def test_files_are_known_by_size_and_hash(base: Path) -> None:
    content = (base / "model.safetensors").read_bytes()
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    found = identity(base)
    assert found["files"] == {"model.safetensors": entry}
    assert (found["name"], found["seed"]) == (str(base), None)
    assert found["config"]["dim"] == 64  # type: ignore[index]


def test_of_fair_esm_the_regression_counts_too(tmp_path: Path) -> None:
    file = write_fair_esm(tmp_path / "esm2_x.pt", fair_esm(SMALL["ESM-2"]))
    assert identity(file)["files"].keys() == {"esm2_x.pt", "esm2_x-contact-regression.pt"}  # type: ignore[attr-defined]


def test_a_model_that_moved_is_the_same_and_one_byte_more_is_not(base: Path, tmp_path: Path) -> None:
    before = identity(base)
    moved = shutil.copytree(base, tmp_path / "moved")
    origin.check(identity(moved), before, "step_1")
    assert origin.reopen(before, "step_1", str(moved)).source == str(moved)
    other = ours(fair_esm(SMALL["ESM-2"], seed=1), SMALL["ESM-2"])
    changed = write_transformers(tmp_path / "changed", other, SMALL["ESM-2"])
    for call in (
        lambda: origin.check(identity(changed), before, "step_1"),
        lambda: origin.reopen(before, "step_1", str(changed)),
    ):
        with pytest.raises(InputError) as caught:
            call()
        sha = before["files"]["model.safetensors"]["sha256"]  # type: ignore[index]
        assert str(caught.value) == (
            f"step_1: holds what was trained on top of {base}, and {changed} is other weights (model.safetensors); "
            f"give the model that it was trained on (sha256 of model.safetensors: {sha})"
        )


def test_files_may_have_other_names(base: Path, tmp_path: Path) -> None:
    """A `.safetensors` file beside its config.json is a model under any name."""
    moved = shutil.copytree(base, tmp_path / "moved")
    (moved / "model.safetensors").rename(moved / "mine.safetensors")
    origin.check(identity(moved / "mine.safetensors"), identity(base), "step_1")


def test_a_missing_base_is_one_sentence(base: Path) -> None:
    before = identity(base)
    shutil.rmtree(base)
    with pytest.raises(InputError) as caught:
        origin.reopen(before, "step_1")
    assert str(caught.value).startswith(f"step_1: holds only what was trained on top of {base}, which cannot be read (")
    assert str(caught.value).endswith("; put it back there, or say with --base where it lies now")


def test_fresh_weights_are_known_by_seed_and_architecture() -> None:
    nano = SIZES["nano"]
    before = origin.identity(open_weights.fresh(nano, 3), "nano")
    assert (before["seed"], before["files"]) == (3, {})
    again = origin.reopen(before, "step_1")
    name = "layers.0.fc1.weight"
    assert (again[name] == open_weights.fresh(nano, 3)[name]).all()
    with pytest.raises(InputError, match=r"nano is other random weights; give the model that it was trained on$"):
        origin.check(origin.identity(open_weights.fresh(nano, 4), "nano"), before, "step_1")
    with pytest.raises(InputError, match="mini is another architecture"):
        origin.check(origin.identity(open_weights.fresh(SIZES["mini"], 3), "mini"), before, "step_1")


def test_the_hash_of_a_model_stays_what_stores_of_embeddings_recorded() -> None:
    found = open_weights.fresh(SIZES["esm2_t6_8M_UR50D"], seed=3)
    assert origin.model_hash(found) == "2f33c7178e0f790534b1be203c7001fe775b50e6b67736dcc86f8ccb6cab5eee"


def test_large_files_are_announced(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    identity(base)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(origin, "LARGE", 10)
    identity(base)
    assert f"{base}: taking the sha256 of 0." in capsys.readouterr().err
