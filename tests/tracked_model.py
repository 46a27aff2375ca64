"""A model that reads structure letters, and sequences with letters."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from outputs import perturbed

from esmshard.batch import pack
from esmshard.model import export
from esmshard.model.config import ModelConfig
from esmshard.model.families.family_registry import SIZES
from esmshard.model.trunk import Trunk
from esmshard.vocab import STANDARD, encode

CONFIG = SIZES["saprot_nano"]
LETTERS = "pynwrqhgdlvtmfsaeikc"


def write_model(directory: Path, config: ModelConfig = CONFIG) -> tuple[str, Trunk]:
    """Write a model to a directory. Return the path and the model."""
    model = perturbed(config)  # The letters must change the outputs.
    state = model.state_dict()
    sizes = {name: state[name].shape for name, _ in model.named_parameters()}
    directory.mkdir()
    export.write_transformers(directory, config, sizes, state.__getitem__)
    return str(directory), model


def random_pairs(lengths: Mapping[str, int], seed: int = 0) -> dict[str, tuple[str, str]]:
    rng = np.random.default_rng(seed)
    return {
        name: ("".join(rng.choice(list(STANDARD), length)), "".join(rng.choice(list(LETTERS), length)))
        for name, length in lengths.items()
    }


def write_pairs(directory: Path, pairs: Mapping[str, tuple[str, str]]) -> tuple[Path, Path]:
    """Write two FASTA files, with the letters in upper case and in another order."""
    fasta, letters = directory / "x.fasta", directory / "3di.fasta"
    fasta.write_text("".join(f">{name}\n{sequence}\n" for name, (sequence, _) in pairs.items()))
    letters.write_text("".join(f">{name}\n{text.upper()}\n" for name, (_, text) in [*pairs.items()][::-1] if text))
    return fasta, letters


def track(letters: str) -> np.ndarray:
    """The entries of letters, with ends; `#` is unknown."""
    return np.array([20, *((LETTERS + "#").index(letter) for letter in letters), 20], np.uint8)


@torch.no_grad()
def last_layer(model: Trunk, sequence: str, letters: str) -> np.ndarray:
    """Representations of the residues of one protein, [L, D]; without letters if these are empty."""
    batch = pack([encode(sequence)], tracks=[{"3di": track(letters)}] if letters else None)
    return model(batch).representations[CONFIG.n_layers][1:-1].numpy()
