"""The model card: the file `README.md` in a model directory, which the Hugging Face hub shows.

The template is `card.md.jinja`. The card says which facts are unknown. If the recipe names ESM-2 weights, the card says
that the model comes from ESM-2. Users share the card, so it shows only the last part of each path.
"""

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, StrictUndefined

from esmshard.io.paths import is_hub_name, replace_json, replace_text, sync_directory
from esmshard.model import hub
from esmshard.model.config import SHIPPED
from esmshard.model.families.family_registry import FAMILIES, RELEASED, family_of, recorded_config, released_name
from esmshard.tasks.base import MAIN
from esmshard.tasks.registry import traits

PARTS = {"lm_head": "LM head", "contact_head": "contact regression (`predict_contacts`)"}


def write(directory: Path, about: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> None:
    """Write the card `README.md` to a model directory. Also add the metrics on a test split to `esmshard.json`.

    `about` is the content of this `esmshard.json`. `evaluation` is that of `evaluation.json`, or None if the model
    was not evaluated.
    """
    recipe, in_transformers = about["recipe"], (directory / "config.json").is_file()
    model, task = recipe["model"]["name"], recipe["task"]
    family = family_of(recorded_config(about["config"])) if "config" in about else FAMILIES["esm2"]
    base = released_name(model) if recipe["init"] == "pretrained" else None
    repository = RELEASED[base].repository if base else model
    if recipe["init"] == "random" or model in SHIPPED or not is_hub_name(repository):
        repository = None
    front: dict[str, Any] = {
        "tags": ["biology", "protein-language-model", "esmshard", f"{task['name']}-prediction"],
        # The licence of the base model. The card of a later fine-tuned model reads it here.
        **({"license": RELEASED[base].licence} if base else _licence_of(recipe)),
    }
    if repository:
        front |= {"base_model": repository, "base_model_relation": "finetune"}
    if in_transformers and family.model_class:
        front["library_name"] = "transformers"
    stated = front.get("license_name") or front.get("license")  # the name of one licence, or a list of names
    starts = pairwise(about.get("history", ()))
    values: dict[str, Any] = {
        "front": ModelCardData(**front).to_yaml(),
        "released": RELEASED.get(base or ""),
        "shipped": SHIPPED,
        "traits": traits(task["name"]),
        "options": ", ".join(f"{key} {value}" for key, value in task.items() if key != "name"),
        "stated": ", ".join(stated) if isinstance(stated, list) else stated,
        "code_of_authors": None,
        "offset": about.get("facts", {}).get("offset", 0),
        "method": recipe.get("adapt", {}).get("method"),
        # The learning rates followed the earlier schedule until the number of steps was changed.
        "extended": [(a["steps"], b["after"]) for a, b in starts if a["steps"] != b["steps"]],
        "unlearned": [
            part
            for name, part in PARTS.items()
            if name in about.get("unlearned", ()) and not family.config.only_represents
        ],
    }
    if not in_transformers:
        (kind,) = family.pickles.values()
        file = next(p.name for p in sorted(directory.glob("*.pt*")) if not p.stem.endswith("-contact-regression"))
        values |= {"code_of_authors": kind.code, "use": kind.use.replace("FILE", json.dumps(file))}
    if evaluation is not None:
        missing = evaluation["without_value"].items()
        values["without_value"] = [_text(f"{count} without {name}") for name, count in missing if count]
        values["columns"] = evaluation.get("columns") or list(next(iter(evaluation["metrics"].values())))
    # The card is Markdown, so these filters escape its values.
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)  # noqa: S701
    environment.filters |= {"text": _text, "code": _code, "name": _name, "interval": _interval}
    environment.filters["cell"] = lambda cell: re.sub(r"(?<!\\)\|", r"\\|", cell)  # `_text` may have escaped `|`
    environment.filters["count"] = lambda number: "not recorded" if number is None else f"{number:,}"
    template = environment.from_string(Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8"))
    names = {"recipe": recipe, "about": about, "evaluation": evaluation, "family": family, "base": base}
    replace_text(directory / "README.md", template.render(**names, repository=repository, **values) + "\n")
    if evaluation is not None and evaluation["split"] == "test":
        test_facts = {"records": evaluation["records"], "interval": evaluation["interval"]}
        replace_json(
            directory / "esmshard.json",
            {**about, "test": test_facts | {"metrics": evaluation["metrics"].get(MAIN, {})}},
        )
    sync_directory(directory)


def _interval(value: Mapping[str, float | None] | None) -> str:
    if value is None or value["value"] is None:
        return "no value"
    return f"{value['value']:.3f}" + ("" if value["low"] is None else f" [{value['low']:.3f}, {value['high']:.3f}]")


def _licence_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries `license` and `license_name` from the `README.md` of the model that training started from.

    Returns an empty dictionary for random starting weights, or if the file is missing, damaged or names no licence.
    """
    name = recipe["model"]["name"]
    place = Path(name).expanduser()
    if not place.exists() and is_hub_name(name):
        place = hub.find(name) or place
    if recipe["init"] != "pretrained" or not (place / "README.md").is_file():
        return {}
    try:
        data = ModelCard.load(place / "README.md", ignore_metadata_errors=True).data.to_dict()
    except Exception:  # another program may have written a card without valid YAML
        return {}
    return {key: data[key] for key in ("license", "license_name") if data.get("license") and data.get(key)}


def _text(value: object) -> str:
    r"""Escape HTML and Markdown in `value`, a text from a user or a file, and join its lines with spaces.

    >>> print(_text("my <b>run</b> [1] *two_words*"))
    my &lt;b&gt;run&lt;/b&gt; \[1\] \*two_words\*
    """
    plain = html.escape(" ".join(str(value).split()), quote=False)
    return re.sub(r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", plain)


def _code(value: object) -> str:
    """Format a text as Markdown code. A text with `<`, `>` or `&` may be HTML, so `_text` escapes it instead."""
    shown = " ".join(str(value).replace("`", "'").split())
    return _text(shown) if re.search("[<>&]", shown) else f"`{shown}`"


def _name(path: str | Sequence[str]) -> str:
    """Return the last part of `path`, or of each path in a list. A text without `/`, or one that begins with `sample:`,
    stays unchanged.
    """
    if not isinstance(path, str):
        return ", ".join(map(_name, path))
    return path if path.startswith("sample:") else os.path.basename(path.rstrip("/")) or path  # noqa: PTH119
