"""The identity of a base model: what changes it, what does not, and what is said."""

import hashlib
import shutil
from pathlib import Path

import pytest
from model_files import SMALL, fair_esm, ours, write_fair_esm, write_transformers

from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.families.family_registry import SIZES


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_transformers(tmp_path / "base", ours(fair_esm(SMALL["ESM-2"]), SMALL["ESM-2"]), SMALL["ESM-2"])


def identity(path: Path) -> dict[str, object]:
    return weights.identity(weights.read(str(path)), str(path))


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
    weights.check(identity(moved), before, "step_1")
    other = ours(fair_esm(SMALL["ESM-2"], seed=1), SMALL["ESM-2"])
    changed = write_transformers(tmp_path / "changed", other, SMALL["ESM-2"])
    with pytest.raises(InputError, match=f"{changed} is another model .other files") as caught:
        weights.check(identity(changed), before, "step_1")
    assert before["files"]["model.safetensors"]["sha256"] in str(caught.value)  # type: ignore[index]


def test_fresh_weights_are_known_by_seed_and_architecture() -> None:
    nano = SIZES["nano"]
    before = weights.identity(weights.fresh(nano, 3), "nano")
    assert (before["seed"], before["files"]) == (3, {})
    with pytest.raises(InputError, match=r"nano is another model .other seed"):
        weights.check(weights.identity(weights.fresh(nano, 4), "nano"), before, "step_1")
    with pytest.raises(InputError, match=r"mini is another model .other config"):
        weights.check(weights.identity(weights.fresh(SIZES["mini"], 3), "mini"), before, "step_1")


def test_the_hash_of_a_model_stays_what_stores_of_embeddings_recorded() -> None:
    found = weights.fresh(SIZES["esm2_t6_8M_UR50D"], seed=3)
    assert weights.model_hash(found) == "2f33c7178e0f790534b1be203c7001fe775b50e6b67736dcc86f8ccb6cab5eee"
