"""The identity of a model's weights: how it is recorded, and how the base of an adapter is found and compared again.

A checkpoint of `adapt.method` lora or head does not hold the frozen base, and a LoRA on another base is useless.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from esmshard.errors import InputError
from esmshard.files import remembered_sha256, size_text
from esmshard.model.families import family_registry
from esmshard.model.weights import open_weights
from esmshard.model.weights.open_weights import Weights
from esmshard.progress import say

LARGE = 10_000_000_000
"""Total size from which a notice says that hashing takes a while, in bytes."""


def identity(found: Weights, name: str) -> dict[str, Any]:
    """Return the identity of a model, as a checkpoint records that of its base.

    Fresh weights follow from architecture and seed. For other weights, each weight file is identified by size and
    sha256; each file is read once.

    Args:
        found: the weights.
        name: name by which `esmshard.model.weights.open_weights.read` finds them, as in the recipe.
    """
    known: dict[str, Any] = {"name": name, "config": found.config.recorded(), "seed": found.seed, "files": {}}
    if found.made:
        known["made"] = found.made
    total = sum(file.stat().st_size for file in found.files)
    if total > LARGE:
        say(f"{found.source}: taking the sha256 of {size_text(total)}, which identifies the model")
    for file in found.files:
        # An adapter on top of an adapter has two files of one name.
        key = file.name if file.name not in known["files"] else f"{len(known['files'])}/{file.name}"
        known["files"][key] = {"bytes": file.stat().st_size, "sha256": remembered_sha256(file)}
    return known


def model_hash(found: Weights) -> str:
    """Return one sha256, in hexadecimal digits, of architecture and weights, whatever their files are called."""
    known = identity(found, "")
    same = {key: known[key] for key in ("seed", "made") if key in known} | {"files": sorted(_hashes(known))}
    # The hash of an architecture is that of older records, which name no family.
    same["config"] = _without_default(known["config"])
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()


def check(
    now: Mapping[str, Any], before: Mapping[str, Any], where: str, fix: str = "give the model that it was trained on"
) -> None:
    """Check that two identities are of the same base model. Its name and place may differ.

    Args:
        now: identity of the weights at hand.
        before: identity of the weights that the checkpoint was trained on.
        where: the checkpoint, for the message.
        fix: what to do, for the message.

    Raises:
        InputError: the two are different models.
    """
    other_config = _without_default(now["config"]) != _without_default(before["config"])
    if other_config or now["seed"] != before["seed"]:
        what = "another architecture" if other_config else "other random weights"
    elif sorted(_hashes(now)) != sorted(_hashes(before)):
        changed = [name for name in now["files"] if now["files"][name] != before["files"].get(name)]
        what = f"other weights ({', '.join(changed) or 'a file less'})"
    elif now.get("made") != before.get("made"):
        what = "an adapter with other settings"
    else:
        return
    raise InputError(
        f"{where}: holds what was trained on top of {before['name']}, and {now['name']} is {what}; {fix}"
        f"{_first_hash(before)}"
    )


def reopen(before: Mapping[str, Any], where: str, model: str | None = None) -> Weights:
    """Open the base that a checkpoint was trained on, and compare it with the recorded identity.

    Args:
        before: identity of the base.
        where: the checkpoint, for messages.
        model: where the base lies now; by default where it was at training.

    Raises:
        InputError: the base is missing, or is another model.
    """
    if before["seed"] is not None:
        return open_weights.fresh(family_registry.recorded_config(before["config"]), before["seed"])
    name = model or before["name"]
    try:
        found = open_weights.read(name)
    except InputError as error:
        raise InputError(
            f"{where}: holds only what was trained on top of {before['name']}, which cannot be read ({error}); put it "
            "back there, or say with --base where it lies now"
        ) from None
    check(identity(found, name), before, where)
    return found


def _without_default(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the window and how chains are joined, which are no part of the weights."""
    return {key: value for key, value in config.items() if key not in ("window", "chains")}


def _hashes(known: Mapping[str, Any]) -> list[str]:
    return [str(entry["sha256"]) for entry in known["files"].values()]


def _first_hash(known: Mapping[str, Any]) -> str:
    return "".join(f" (sha256 of {name}: {entry['sha256']})" for name, entry in list(known["files"].items())[:1])
