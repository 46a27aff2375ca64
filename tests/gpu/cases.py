"""A recipe over small files for each kind of each task, with a model that has all heads which they need."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from conftest import write_subset
from shared import random_weights, size, texts, write_model

from esmshard.model.families.esm2 import EsmConfig
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe

LENGTHS = size([40, 25, 60, 33, 50, 21, 45, 38] * 3, [12, 25, 18, 14, 21, 16] * 2)
LONGEST = max(LENGTHS)


def _fasta(path: Path, lengths: list[int], seed: int, target: Callable[[int, str], str] | None = None) -> str:
    lines = []
    for n, text in enumerate(texts(lengths, seed)):
        lines.append(f">{path.stem}{n}{'' if target is None else f' TARGET={target(n, text)}'}\n{text}\n")
    path.write_text("".join(lines))
    return path.name


def _splits(directory: Path, target: Callable[[int, str], str] | None = None) -> dict[str, Any]:
    valid = _fasta(directory / "valid.fasta", LENGTHS[:5], 2, target)
    return {"train": _fasta(directory / "train.fasta", LENGTHS, 1, target), "valid": valid, "test": valid}


def _contact(directory: Path) -> dict[str, Any]:
    write_subset(directory, "train", "train", range(size(16, 8)), unresolved=5)
    write_subset(directory, "valid", "valid", range(3))
    files = {"train": "train.fasta", "valid": "valid.fasta", "test": "valid.fasta"}
    return {**files, "long": "crop", "max_length": LONGEST}


def _numbers_of_residues(n: int, text: str) -> str:
    return ";".join("nan" if k % 5 == 3 else f"{ord(letter) % 11 + 0.1 * n:.2f}" for k, letter in enumerate(text))


def _variants(directory: Path) -> dict[str, Any]:
    (wild,) = texts([size(50, 20)], 7)
    (directory / "wild_type.fasta").write_text(f">wild\n{wild}\n")
    rng = np.random.default_rng(0)
    rows = ["mutant,score"]
    for place in range(len(wild)):
        for letter in "ACDW":
            if letter != wild[place]:
                rows.append(f"{wild[place]}{place + 1}{letter},{rng.normal():.3f}")
    (directory / "table.csv").write_text("\n".join(rows) + "\n")
    return {"table": "table.csv", "wild_type": "wild_type.fasta", "folds": 5, "fold": 0}


def _whole(kind: Callable[[int], str]) -> Callable[[Path], dict[str, Any]]:
    return lambda directory: _splits(directory, lambda n, text: kind(n)) | {"long": "full"}


def _pairs(directory: Path) -> dict[str, Any]:
    """Halves of sequences, as two chains."""
    data = _whole(lambda n: f"{n % 5 - 0.2 * n:.2f}")(directory)
    for path in {directory / data[name] for name in ("train", "valid", "test")}:
        headers, chains = path.read_text().splitlines()[::2], path.read_text().splitlines()[1::2]
        halves = [f"{one[: len(one) // 2]}:{one[len(one) // 2 :]}" for one in chains]
        path.write_text("".join(f"{header}\n{pair}\n" for header, pair in zip(headers, halves, strict=True)))
    return data


_NO_DROPOUT = {"dropout": 0.0}
CASES: dict[str, tuple[dict[str, Any], Callable[[Path], dict[str, Any]]]] = {
    **{
        f"contact-{head}": ({"head": head, **({"channels": 8, "blocks": 2} if head != "attention" else {})}, _contact)
        for head in ("attention", "pairwise", "both")
    },
    "mlm": ({}, _splits),
    "residue-class": (
        {"hidden": 8, **_NO_DROPOUT, "balance": 0.5},
        lambda d: _splits(d, lambda n, text: "".join("HEC"[ord(c) % 3] for c in text)),
    ),
    "residue-number": ({"kind": "number", **_NO_DROPOUT}, lambda d: _splits(d, _numbers_of_residues)),
    "sequence-number": ({**_NO_DROPOUT}, _whole(lambda n: f"{n % 7 - 0.3 * n:.2f}")),
    "sequence-class": ({"kind": "class", **_NO_DROPOUT, "balance": 0.5}, _whole(lambda n: "abc"[n % 3])),
    "sequence-multilabel": ({"kind": "multilabel", **_NO_DROPOUT}, _whole(lambda n: ("a", "b", "a;b")[n % 3])),
    "pair-number": ({**_NO_DROPOUT}, _pairs),
    **{
        f"variant-{pool}": ({"pool": pool, **_NO_DROPOUT, "loss": "ranking" if pool == "sites" else "mse"}, _variants)
        for pool in ("wild_type", "sites", "difference", "mean")
    },
}
"""By the name of the task and what kind of it: the task section but for its name, and what writes the files. Without
dropout, so that what is compared is all of the head."""


def model_name() -> str:
    """The starter; in a rehearsal a random model that is smaller still."""
    if name := size("starter", ""):
        return name
    path = Path(os.environ["ESMSHARD_CACHE"]) / "rehearsed-model"
    if not path.exists():
        write_model(path, random_weights(EsmConfig(n_layers=2, dim=32, n_heads=4)))
    return str(path)


def written(directory: Path, case: str, **sections: Any) -> Path:
    """The recipe of a case with changed sections, and its files beside it, in a directory that exists."""
    task, write = CASES[case]
    name = case.split("-", maxsplit=1)[0]
    recipe: dict[str, Any] = {
        "task": {"name": name, **task},
        "model": {"name": model_name()},
        "data": write(directory),
        "batch": {"global_tokens": size(600, 120), "tokens_per_rank": size(300, 80)},
        "optim": {"lr": 1e-4, "head_lr": 1e-3},
        "train": {"steps": 4, "seed": 3, "eval_every": 100},
        "parallel": {"precision": "fp32"},
        "out": str(directory / "run"),
    }
    for section, changes in sections.items():
        recipe[section] = changes if not isinstance(changes, dict) else recipe.get(section, {}) | changes
    path = directory / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    return path


def loaded(directory: Path, case: str, **sections: Any) -> Recipe:
    return recipe_file.load(written(directory, case, **sections))
