"""ESM-2, ESM-1b and ESM-1v, with the files of fair-esm, whose names of tensors are ours."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from esmshard.errors import InputError
from esmshard.model import weight_reader
from esmshard.model.families.esm_base import TIED, EsmFamily, EsmShape, EsmTrunk
from esmshard.model.families.family import AuthorsFile, Corruption, Opened, Released
from esmshard.vocab import MASK, TOKENS, VOCAB_SIZE


@dataclass(frozen=True, kw_only=True)
class EsmConfig(EsmShape):
    """The architecture of an ESM-2, or of an ESM-1b or ESM-1v with `max_positions`."""

    family: ClassVar[str] = "esm2"
    vocabulary: ClassVar[tuple[str, ...]] = TOKENS


class ESM2(EsmTrunk):
    """The ESM-2 trunk with its two own heads."""

    config: EsmConfig


SIZES: dict[str, EsmConfig] = {
    # These are for tests and for training from scratch on a laptop; nothing is released under these names.
    "nano": EsmConfig(n_layers=2, dim=32, n_heads=4),
    "mini": EsmConfig(n_layers=6, dim=128, n_heads=8),
    # data/starter and data/demo have their trained weights (`esmshard.model.config.SHIPPED`).
    "starter": EsmConfig(n_layers=6, dim=192, n_heads=12),
    "demo": EsmConfig(n_layers=6, dim=192, n_heads=6),
    # Lin et al. 2023 (doi:10.1126/science.ade2574), as released in fair-esm.
    "esm2_t6_8M_UR50D": EsmConfig(n_layers=6, dim=320, n_heads=20),
    "esm2_t12_35M_UR50D": EsmConfig(n_layers=12, dim=480, n_heads=20),
    "esm2_t30_150M_UR50D": EsmConfig(n_layers=30, dim=640, n_heads=20),
    "esm2_t33_650M_UR50D": EsmConfig(n_layers=33, dim=1280, n_heads=20),
    "esm2_t36_3B_UR50D": EsmConfig(n_layers=36, dim=2560, n_heads=40),
    "esm2_t48_15B_UR50D": EsmConfig(n_layers=48, dim=5120, n_heads=40),
    # Rives et al. 2021 (doi:10.1073/pnas.2016239118) and Meier et al. 2021 (five models, for variant effects).
    "esm1b_t33_650M_UR50S": EsmConfig(
        n_layers=33, dim=1280, n_heads=20, max_positions=1024, emb_layer_norm_before=True
    ),
    **{
        f"esm1v_t33_650M_UR90S_{n}": EsmConfig(n_layers=33, dim=1280, n_heads=20, max_positions=1024)
        for n in range(1, 6)
    },
}

_LIN = "Lin et al. 2023, Science 379:1123, doi:10.1126/science.ade2574"
_RIVES = "Rives et al. 2021, PNAS 118:e2016239118, doi:10.1073/pnas.2016239118"
_MEIER = "Meier et al. 2021, NeurIPS 34, doi:10.1101/2021.07.09.450648"
_PAPERS = {"esm2": _LIN, "esm1b": _RIVES, "esm1v": _MEIER}


class FairEsmFile(AuthorsFile):
    """The `.pt` file of fair-esm, with the contact regression in a file beside it."""

    use = """\
import argparse

import esm
import torch

torch.serialization.add_safe_globals([argparse.Namespace])  # the settings in the file, which torch.load refuses else
model, alphabet = esm.pretrained.load_model_and_alphabet_local(FILE)"""
    code = "[fair-esm](https://github.com/facebookresearch/esm)"

    def path(self, directory: Path, stem: str, config: EsmConfig) -> Path:
        """Return the path of the `.pt` of a model.

        Its name is `stem`, after the name of the architecture if `stem` does not begin with one, since fair-esm takes
        the architecture from the file's name.
        """
        family = "esm2" if config.rotary else "esm1b" if config.emb_layer_norm_before else "esm1v"
        whole = stem if stem.startswith("esm2" if config.rotary else ("esm1b", "esm1v")) else f"{family}_{stem}"
        return directory / f"{whole}.pt"

    def write(self, file: Path, config: EsmConfig, tensors: dict[str, torch.Tensor]) -> list[Path]:
        """Write `NAME.pt` and `NAME-contact-regression.pt` for `esm.pretrained.load_model_and_alphabet_local`."""
        tensors[TIED] = tensors["embed_tokens.weight"]
        contacts = {name: tensors.pop(name) for name in list(tensors) if name.startswith("contact_head.")}
        torch.save(fair_esm_settings(config) | {"model": tensors}, file)
        regression = file.with_name(f"{file.stem}-contact-regression.pt")
        torch.save({"model": contacts}, regression)
        return [file, regression]


FAIR_ESM = FairEsmFile()


class Esm2Family(EsmFamily):
    """ESM-2, ESM-1b and ESM-1v."""

    title = "ESM-2"
    config = EsmConfig
    trunk = ESM2
    sizes = SIZES
    released: ClassVar[Mapping[str, Released]] = {
        name: Released(f"facebook/{name}", "mit", "Meta Platforms, Inc. and affiliates", _PAPERS[name.split("_")[0]])
        for name in SIZES
        if re.match(r"esm\d", name)
    }
    paper = _LIN
    window = 1022
    corruption = Corruption(random=0.1, unchanged=0.1, letters=20)
    vocab_size = VOCAB_SIZE
    pickles: ClassVar[Mapping[str, AuthorsFile]] = {"fair-esm": FAIR_ESM}
    reads_pickles = True

    def read_pickle(self, data: Mapping[str, Any], path: Path) -> Opened | None:
        """Read a model that fair-esm published.

        Raises:
            InputError: the file of the contact regression beside it cannot be read.
        """
        state = data.get("model")
        if not isinstance(state, dict):
            return None
        config = config_of_fair_esm(data)
        regression = path.with_name(f"{path.stem}-contact-regression.pt")
        if regression.is_file():
            contacts = weight_reader.read_pickle(regression).get("model")
            if not isinstance(contacts, dict):
                raise InputError(
                    f"{regression}: not a contact regression of fair-esm (it has no 'model'); download it again"
                )
            state = state | contacts
        # Released files keep the prefixes of the fairseq trainer.
        tensors = weight_reader.tensors(
            {re.sub(r"^(encoder\.sentence_encoder\.|encoder\.)", "", str(key)): value for key, value in state.items()}
        )
        # fair-esm does this on loading: these files hold noise in the row of <mask>, and the LM head shares the table.
        for name in () if config.rotary else tensors.keys() & {"embed_tokens.weight", TIED}:
            tensors[name] = tensors[name].then(_without_mask_row)
        return Opened(config, tensors, tuple(file for file in (path, regression) if file.is_file()))


FAMILY = Esm2Family()


def config_of_fair_esm(data: Mapping[str, Any]) -> EsmConfig:
    """Return the architecture of the model in a fair-esm `.pt`.

    Raises:
        ValueError: it is not an architecture that is supported here; the message says why.
    """
    cfg = data.get("cfg")
    settings = data["args"] if "args" in data else cfg.get("model") if isinstance(cfg, dict) else None
    if isinstance(settings, argparse.Namespace):
        settings = vars(settings)
    if not isinstance(settings, dict):
        raise ValueError("it has neither cfg.model nor args with the sizes of a model")
    args = {key.removeprefix("encoder_"): value for key, value in settings.items()}
    if "args" in data:  # These are names of the fairseq trainer: encoder_layers, encoder_embed_dim, ...
        if args.get("arch") != "roberta_large":
            raise ValueError(f"its architecture is {args.get('arch')!r}; only ESM-2, ESM-1b and ESM-1v can be read")
        before = any("emb_layer_norm_before" in str(key) for key in data.get("model", ()))
    else:
        args["max_positions"], before = None, False
    try:
        config = EsmConfig(
            n_layers=args["layers"],
            dim=args["embed_dim"],
            n_heads=args["attention_heads"],
            token_dropout=bool(args.get("token_dropout", False)),
            max_positions=args["max_positions"],
            emb_layer_norm_before=before,
        )
    except KeyError as error:
        raise ValueError(f"it does not say its {error}") from None
    if args.get("ffn_embed_dim", 4 * config.dim) != 4 * config.dim:
        raise ValueError(f"its feed-forward width is {args['ffn_embed_dim']}, not {4 * config.dim}")
    return config


def fair_esm_settings(config: EsmConfig) -> dict[str, Any]:
    """Return the entries beside the weights in a fair-esm `.pt`."""
    sizes = argparse.Namespace(
        encoder_layers=config.n_layers,
        encoder_embed_dim=config.dim,
        encoder_attention_heads=config.n_heads,
        token_dropout=config.token_dropout,
    )
    if config.rotary:
        return {"cfg": {"model": sizes}}
    sizes.arch = "roberta_large"
    sizes.encoder_ffn_embed_dim = 4 * config.dim
    sizes.max_positions = config.max_positions
    return {"args": sizes}


def _without_mask_row(table: torch.Tensor, rows: slice) -> torch.Tensor:
    return table.masked_fill((torch.arange(VOCAB_SIZE)[rows] == MASK)[:, None], 0.0)
