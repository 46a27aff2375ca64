"""Files of tensors alone: `FILE@SIZE`, the sizes that fit, and what is refused."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import esmc_files
import pytest
import torch
from esm.model.esm2 import ESM2 as FairEsm
from model_files import TINY, fair_esm, write_fair_esm
from safetensors.torch import save_file

from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.families.esm2 import FAMILY, TIED
from esmshard.model.families.family_registry import SIZES

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def reference() -> FairEsm:
    """Of the size `nano`."""
    assert SIZES["nano"] == TINY
    return fair_esm(TINY)


@pytest.fixture
def state(reference: FairEsm) -> State:
    return {name: tensor.clone() for name, tensor in reference.state_dict().items()}


def renamed(state: State) -> State:
    """The names of `EsmForMaskedLM`, the matrix of the LM head included, as `state_dict` returns them."""
    return {FAMILY.key(name): tensor for name, tensor in state.items()}


def prefixed(state: State, prefix: str) -> State:
    return {prefix + key: tensor for key, tensor in state.items()}


def saved(content: Any, path: Path) -> Path:
    torch.save(content, path)
    return path


def refusal(model: str, begins: Path) -> str:
    with pytest.raises(InputError) as caught:
        weights.read(model)
    message = str(caught.value)
    assert message.startswith(str(begins))
    assert "\n" not in message
    return message


FORMS: dict[str, Callable[[State], Mapping[str, Any]]] = {
    "fair-esm": lambda state: state,
    "transformers": renamed,
    "DataParallel": lambda state: prefixed(renamed(state), "module."),
    "Lightning": lambda state: {"epoch": 3, "state_dict": prefixed(state, "model.")},
    "Lightning, DataParallel, compiled": lambda state: {
        "state_dict": prefixed(renamed(state), "model.module._orig_mod.")
    },
    "a training program": lambda state: {"model": renamed(state), "optimizer": {"lr": 1.0}, "step": 5},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_state_dict_is_read_as_its_size(form: str, state: State, reference: FairEsm, tmp_path: Path) -> None:
    name = "w.pt"
    file = saved(FORMS[form](state), tmp_path / name)
    found = weights.read(f"{file}@nano")
    assert (found.config, found.absent, found.files) == (TINY, (), (file,))
    for key, tensor in reference.state_dict().items():
        assert torch.equal(found[key], tensor), key
    assert "give it as FILE@SIZE" in refusal(str(file), file)


def test_a_safetensors_file_without_its_configuration(state: State, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in renamed(state).items() if key != FAMILY.key(TIED)}, file)
    assert torch.equal(weights.read(f"{file}@nano")["layers.1.fc2.bias"], state["layers.1.fc2.bias"])


def test_a_local_path_with_an_at_sign_comes_first(reference: FairEsm, tmp_path: Path, state: State) -> None:
    saved(state, tmp_path / "w.pt")
    file = write_fair_esm(tmp_path / "w.pt@nano.pt", reference)
    assert weights.read(str(file)).source == str(file)


def test_an_esm_c_is_not_read_as_an_esm2(tmp_path: Path) -> None:
    file = saved(esmc_files.layout_c(esmc_files.random_esmc()), tmp_path / "w.pth")
    assert weights.read(str(file)).config.family == "esmc"
    assert "do not belong to a model of 6" in refusal(f"{file}@mini", file)


def test_a_file_that_says_its_size_needs_no_name(reference: FairEsm, tmp_path: Path) -> None:
    file = write_fair_esm(tmp_path / "esm2_tiny.pt", reference)
    assert "leave @nano out" in refusal(f"{file}@nano", file)
