"""The licence of a base model, as its authors or the card beside its weights state it, and whether it forbids
commercial use.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esmshard.files import is_hub_name, read_text
from esmshard.model import hub
from esmshard.model.families.family_registry import RELEASED, released_name

MOST_BYTES = 2**20
"""The largest card that is read, in bytes."""


def licence_of_base(recipe: Mapping[str, Any]) -> str | None:
    """Return the name of the licence of the weights that a run started from, such as `cc-by-nc-4.0`; None if it is not
    known.

    That of a released model is known. Other repositories and directories may have a card with `license:` in its first
    lines, as the Hugging Face hub reads it. With the licence `other`, the card has the name as `license_name`.
    """
    name = recipe["model"]["name"]
    if recipe["init"] != "pretrained":
        return None
    if known := released_name(name):
        return RELEASED[known].licence
    place: Path | None = Path(name).expanduser()
    if place is not None and not place.exists():
        place = hub.find(name) if is_hub_name(name) else None
    return None if place is None else _of_card(place / "README.md")


def _of_card(path: Path) -> str | None:
    try:
        text = read_text(path, MOST_BYTES)
    except (OSError, ValueError):
        return None
    front = re.match(r"\ufeff?---\r?\n(.*?)^---\s*$", text, re.DOTALL | re.MULTILINE)
    named = {
        key: match[1]
        for key in ("license", "license_name")
        if front and (match := re.search(rf"^{key}:\s*(?:-\s*|\[)?[\"']?([\w.+-]+)", front[1], re.MULTILINE))
    }
    if named.get("license", "other").lower() == "other":
        return named.get("license_name")
    return named["license"]


def forbids_commercial_use(licence: str) -> bool:
    """Return whether a licence forbids commercial use, by its name.

    >>> forbids_commercial_use("cc-by-nc-sa-4.0"), forbids_commercial_use("cambrian-non-commercial")
    (True, True)
    >>> forbids_commercial_use("cc-by-4.0"), forbids_commercial_use("bsd-3-clause-nclab")
    (False, False)
    """
    return re.search(r"(?<![a-z0-9])nc(?![a-z0-9])|non-?_?commercial", licence.lower()) is not None
