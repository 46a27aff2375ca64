"""The `.pt` files of fair-esm, with the contact regression in a file beside them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from esmshard.errors import InputError
from esmshard.model import weight_reader
from esmshard.model.families.esm2.esm2_config import EsmConfig
from esmshard.model.families.esm2.esm2_layouts import config_of_fair_esm, fair_esm_settings, from_fair_esm
from esmshard.model.families.esm_layouts import TIED
from esmshard.model.families.family import AuthorsFile
from esmshard.model.weight_reader import WeightReader
from esmshard.vocab import MASK, VOCAB_SIZE


def read(data: Mapping[str, Any], path: Path) -> tuple[EsmConfig, dict[str, WeightReader], tuple[Path, ...]] | None:
    """Return the architecture, the tensors and the files of a model that fair-esm published; None for other content."""
    state = data.get("model")
    if not isinstance(state, dict):
        return None
    config = config_of_fair_esm(data)
    regression = path.with_name(f"{path.stem}-contact-regression.pt")
    if regression.is_file():
        extra = weight_reader.read_pickle(regression).get("model")
        if not isinstance(extra, dict):
            raise InputError(
                f"{regression}: not a contact regression of fair-esm (it has no 'model'); download it again"
            )
        state = state | extra
    found = weight_reader.tensors({from_fair_esm(str(key)): value for key, value in state.items()})
    # fair-esm does this on loading: these files hold noise in the row of <mask>, and the LM head shares the table.
    for name in () if config.rotary else found.keys() & {"embed_tokens.weight", TIED}:
        found[name] = found[name].then(_without_mask_row)
    return config, found, tuple(file for file in (path, regression) if file.is_file())


def _without_mask_row(table: torch.Tensor, rows: slice) -> torch.Tensor:
    return table.masked_fill((torch.arange(VOCAB_SIZE)[rows] == MASK)[:, None], 0.0)


def _path(directory: Path, stem: str, config: EsmConfig) -> Path:
    """Return the path of the `.pt` of a model.

    Its name is `stem`, after the name of the architecture if `stem` does not begin with one, since fair-esm takes the
    architecture from the file's name.
    """
    family = "esm2" if config.rotary else "esm1b" if config.emb_layer_norm_before else "esm1v"
    whole = stem if stem.startswith("esm2" if config.rotary else ("esm1b", "esm1v")) else f"{family}_{stem}"
    return directory / f"{whole}.pt"


def _write(file: Path, config: EsmConfig, tensors: dict[str, torch.Tensor]) -> list[Path]:
    """Write `NAME.pt` and `NAME-contact-regression.pt` for `esm.pretrained.load_model_and_alphabet_local`."""
    tensors[TIED] = tensors["embed_tokens.weight"]
    regression = {name: tensors.pop(name) for name in list(tensors) if name.startswith("contact_head.")}
    torch.save(fair_esm_settings(config) | {"model": tensors}, file)
    beside = file.with_name(f"{file.stem}-contact-regression.pt")
    torch.save({"model": regression}, beside)
    return [file, beside]


FAIR_ESM = AuthorsFile(
    path=_path,
    write=_write,
    use="""\
import argparse

import esm
import torch

torch.serialization.add_safe_globals([argparse.Namespace])  # the settings in the file, which torch.load refuses else
model, alphabet = esm.pretrained.load_model_and_alphabet_local(FILE)""",
    code="[fair-esm](https://github.com/facebookresearch/esm)",
)
