"""Which base model an adapter belongs to: how it is written down, and how it is found and recognised again.

A checkpoint of `adapt.method` lora or head holds nothing of the frozen base, and a LoRA on another base is noise.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from esmshard.errors import InputError
from esmshard.files import remembered_sha256
from esmshard.model import weights
from esmshard.model.config import EsmConfig
from esmshard.model.weights import Weights
from esmshard.progress import say

LARGE = 10_000_000_000
"""Bytes from which on a notice says that hashing takes a while."""


def identity(found: Weights, name: str) -> dict[str, Any]:
    """What tells this base from any other, for a checkpoint's state.

    Fresh weights follow from architecture and seed. Of others each weight file counts, by bytes and sha256; each is
    streamed once.

    Args:
        found: the weights that the run starts from.
        name: by which `esmshard.model.weights.read` finds them, as in the recipe.
    """
    known: dict[str, Any] = {"name": name, "config": asdict(found.config), "seed": found.seed, "files": {}}
    if found.made:
        known["made"] = found.made
    total = sum(file.stat().st_size for file in found.files)
    if total > LARGE:
        say(f"{found.source}: taking the sha256 of {total / 1e9:.0f} GB, so that the checkpoints know their base model")
    for file in found.files:
        # An adapter on top of an adapter has two files of one name.
        key = file.name if file.name not in known["files"] else f"{len(known['files'])}/{file.name}"
        known["files"][key] = {"bytes": file.stat().st_size, "sha256": remembered_sha256(file)}
    return known


def check(
    now: Mapping[str, Any], before: Mapping[str, Any], where: str, mend: str = "give the model that it was trained on"
) -> None:
    """Raise `InputError` unless two identities are of one and the same base. Its name and place may be others.

    Args:
        now: of the weights at hand.
        before: of those that the checkpoint was trained on.
        where: the checkpoint, for the message.
        mend: what to do, for the message.
    """
    if now["config"] != before["config"] or now["seed"] != before["seed"]:
        what = "another architecture" if now["config"] != before["config"] else "other random weights"
    elif sorted(_hashes(now)) != sorted(_hashes(before)):
        changed = [name for name in now["files"] if now["files"][name] != before["files"].get(name)]
        what = f"other weights ({', '.join(changed) or 'a file less'})"
    elif now.get("made") != before.get("made"):
        what = "an adapter with other settings"
    else:
        return
    raise InputError(
        f"{where}: holds what was trained on top of {before['name']}, and {now['name']} is {what}; {mend}"
        f"{_first_hash(before)}"
    )


def reopen(before: Mapping[str, Any], where: str, model: str | None = None) -> Weights:
    """The base that a checkpoint was trained on, found again and compared.

    Args:
        before: its identity.
        where: the checkpoint, for messages.
        model: where it lies now; by default where it lay then.

    Raises:
        InputError: if it is not there, or is another.
    """
    if before["seed"] is not None:
        return weights.fresh(EsmConfig(**before["config"]), before["seed"])
    name = model or before["name"]
    try:
        found = weights.read(name)
    except InputError as error:
        raise InputError(
            f"{where}: holds only what was trained on top of {before['name']}, which cannot be read ({error}); put it "
            "back there, or say with --base where it lies now"
        ) from None
    check(identity(found, name), before, where)
    return found


def _hashes(known: Mapping[str, Any]) -> list[str]:
    return [str(entry["sha256"]) for entry in known["files"].values()]


def _first_hash(known: Mapping[str, Any]) -> str:
    return "".join(f" (sha256 of {name}: {entry['sha256']})" for name, entry in list(known["files"].items())[:1])
