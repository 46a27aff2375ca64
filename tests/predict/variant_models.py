"""Runs of variants with small random models, as `esmshard finetune` leaves them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from model_files import TINY, fair_esm, ours, write_transformers
from torch import nn

from esmshard.checkpoint.consolidate import FORMAT, VERSION
from esmshard.data.batching.loader import SEEN
from esmshard.tasks.variants import VariantSettings, VariantTask

WT = "MKTAYIAKQRQISFVKSHFSRQLE"
NAMES = [f"{WT[n]}{n + 1}{letter}" for n in range(12) for letter in "CW"]


def write_model(directory: Path, seed: int, facts: dict[str, Any], pool: str = "wild_type") -> Path:
    """A consolidated model with a random head, as `consolidate` leaves it."""
    settings = VariantSettings(name="variant", pool=pool, hidden=4, zero_shot=False)  # type: ignore[arg-type]
    torch.manual_seed(seed)
    head = VariantTask(settings, facts).head(TINY)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.5)
    directory.parent.mkdir(parents=True, exist_ok=True)
    write_transformers(directory, ours(fair_esm(TINY), TINY), TINY, head.state_dict())
    about = {"format": FORMAT, "version": VERSION, "step": 2, "recipe": {"task": settings.model_dump()}}
    (directory / "esmshard.json").write_text(json.dumps({**about, "facts": facts}))
    return directory


def facts(
    *targets: str, lower: Sequence[str] = (), first: int = 0, length: int = 24, protein: str = WT, offset: int = 0
) -> Any:
    unit = {"kind": "none", "mean": 10.0, "deviation": 2.0, "values": [], "scores": []}
    return {
        "targets": list(targets or ("y",)),
        "lower_is_better": list(lower),
        "scales": [unit] * len(targets or ("y",)),
        "protein": protein,
        "first": first,
        "length": length,
        "offset": offset,
    }


def write_run(directory: Path, count: int, known: dict[str, Any], seen: Sequence[str] | None = ()) -> Path:
    """A cross-validation of that many models, trained on the variants `seen`; None leaves that unrecorded."""
    names = [f"seed-0-fold-{n}" for n in range(count)]
    for n, name in enumerate(names):
        model = write_model(directory / name / "model", n, known)
        if seen is not None:
            (model / SEEN).write_text("".join(f"{variant}\n" for variant in seen))
    (directory / "summary.json").write_text(json.dumps({"task": "variant", "runs": names}))
    return directory
