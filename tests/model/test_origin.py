"""Files, seed and architecture decide the identity of a base model; names and places do not."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from model_files import TINY, fair_esm, write_fair_esm, write_transformers

from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.families.family_registry import SIZES


def test_files_are_known_by_size_and_hash_and_not_by_their_place(tmp_path: Path) -> None:
    def identity(path: Path) -> dict[str, Any]:
        return weights.identity(weights.read(str(path)), str(path))

    base, changed = (write_transformers(tmp_path / str(k), fair_esm(TINY, seed=k), TINY) for k in (0, 1))
    content, before = (base / "model.safetensors").read_bytes(), identity(base)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert (before["name"], before["seed"], before["files"]) == (str(base), None, {"model.safetensors": entry})
    weights.check(identity(shutil.copytree(base, tmp_path / "moved")), before, "step_1")
    with pytest.raises(InputError, match=f"{changed} is another model .other files.*{entry['sha256']}"):
        weights.check(identity(changed), before, "step_1")
    file = write_fair_esm(tmp_path / "esm2_x.pt", fair_esm(TINY))
    assert identity(file)["files"].keys() == {"esm2_x.pt", "esm2_x-contact-regression.pt"}


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
