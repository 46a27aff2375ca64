"""The model card: `README.md` beside a model, as the Hugging Face hub shows it.

The card contains known facts, and names unknown ones. A model is never called an ESM-2 because of its shape, but only
if the recipe names released weights. Paths are shortened to their last part, since the card is shared.
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

from esmshard.io.paths import is_hub_name, replace_json, replace_text, sync_directory
from esmshard.model import hub
from esmshard.model.config import SHIPPED
from esmshard.model.families.family import Family
from esmshard.model.families.family_registry import FAMILIES, RELEASED, family_of, recorded_config, released_name
from esmshard.tasks.base import MAIN
from esmshard.tasks.registry import traits


def write(directory: Path, about: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> None:
    """Write `README.md` to a model directory, and the metrics of the test set to its `esmshard.json`. An existing file
    is replaced in one operation.

    Args:
        directory: the directory of the model.
        about: the content of its `esmshard.json`.
        evaluation: the content of its `evaluation.json`; without it the card says that the model has not been scored.
    """
    recipe = about["recipe"]
    family = family_of(recorded_config(about["config"])) if "config" in about else FAMILIES["esm2"]
    base = released_name(recipe["model"]["name"]) if recipe["init"] == "pretrained" else None
    named, paper = (base, RELEASED[base].paper) if base else (family.title, family.paper)
    repository, origin, terms = _origin(recipe, family, base)
    front: dict[str, Any] = {
        "tags": ["biology", "protein-language-model", "esmshard", f"{recipe['task']['name']}-prediction"]
    }
    if base:
        front["license"] = RELEASED[base].licence
    elif licence := _licence_of(recipe):  # the card names it, so that what is made from this model knows it, too
        front |= licence
        stated = licence.get("license_name") or licence["license"]  # one, or a list of several
        terms += f" Its card names the licence {_code(', '.join(stated) if isinstance(stated, list) else stated)}."
    if repository:
        front |= {"base_model": repository, "base_model_relation": "finetune"}
    if (directory / "config.json").is_file() and family.model_class:
        front["library_name"] = "transformers"
    sections = {
        "Use": _use(directory, recipe, family),
        "Data": _data(about),
        "Training": _training(about),
        "Metrics": _metrics(about, evaluation),
        "Limits": _limits(about),
        "Licence": f"{terms} The licence of the training data is for whoever publishes this model to state.",
        "Citation": f"{named}: {paper}",
    }
    task = recipe["task"]
    kind = "A protein language model" if traits(task["name"]).trains_lm_head else "A protein language model with a head"
    options = _text(", ".join(f"{key} {value}" for key, value in task.items() if key != "name"))
    what = f"{kind} for the task {_code(task['name'])} ({options}). {origin}"
    parts = [f"---\n{ModelCardData(**front).to_yaml()}\n---", f"# {_text(_name(recipe['out']))}"]
    parts += [what, *(f"## {name}\n\n{text}" for name, text in sections.items())]
    replace_text(directory / "README.md", "\n\n".join(parts) + "\n")
    if evaluation is not None and evaluation["split"] == "test":
        of_test = {"records": evaluation["records"], "interval": evaluation["interval"]}
        replace_json(
            directory / "esmshard.json", {**about, "test": of_test | {"metrics": evaluation["metrics"].get(MAIN, {})}}
        )
    sync_directory(directory)


def _origin(recipe: Mapping[str, Any], family: Family, base: str | None) -> tuple[str | None, str, str]:
    """Return OWNER/NAME on the hub of the model that it was fine-tuned from, if it has one, a sentence about the origin
    of the weights, and one about their licence.
    """
    name = recipe["model"]["name"]
    unknown = f"whether they are those of a released {family.title} model is not known here."
    holds_on = "No licence is stated; that of the weights it was fine-tuned from holds on."
    if recipe["init"] == "random":
        origin = (
            f"**It is not {family.title}**: it was trained from random weights (seed {recipe['train']['seed']}) in the "
            f"shape of {_code(_name(name))}, and on nothing but the data below."
        )
        return None, origin, "No licence is stated. It holds no weights of others."
    if base:
        released = RELEASED[base]
        origin = f"It was fine-tuned from `{base}` ({_link(released.repository)})."
        licence = f"{released.licence.upper()} licence (Copyright {released.holder})"
        return released.repository, origin, f"The weights of the base model are under the {licence}."
    if name in SHIPPED:
        small = f"a small model that comes with esmshard. **It is not ESM-2**, and {SHIPPED[name]}."
        licence = "MIT licence (Copyright the esmshard authors)"
        return (
            None,
            f"It was fine-tuned from `{name}`, {small}",
            f"The weights of the base model are under the {licence}.",
        )
    if is_hub_name(name):
        place = f"of the repository {_link(name)} on the Hugging Face hub"
        return name, f"It was fine-tuned from the weights {place}: {unknown}", holds_on
    place = f"in {_code(_name(name))}, given as a file"
    return None, f"It was fine-tuned from the weights {place}: {unknown}", holds_on


def _link(repository: str) -> str:
    return f"[{repository}](https://huggingface.co/{repository})"


def _use(directory: Path, recipe: Mapping[str, Any], family: Family) -> str:
    if not (directory / "config.json").is_file():
        (kind,) = family.pickles.values()
        file = next(p.name for p in sorted(directory.glob("*.pt*")) if not p.stem.endswith("-contact-regression"))
        code = kind.use.replace("FILE", json.dumps(file))
        return f"The language model, without the head, for {kind.code}:\n\n```python\n{code}\n```"
    if traits(recipe["task"]["name"]).reads_table:
        return (
            "```\nesmshard predict MODEL variants.csv -o ranked.csv    # or --all-singles\n```\n\nVariants of the wild "
            "type in `esmshard.json` only: substitutions, one or several."
        )
    text = "```\nesmshard predict MODEL proteins.fasta -o out.npz\nesmshard embed MODEL proteins.fasta -o out.h5\n```"
    if family.model_class:
        options = "(DIRECTORY, trust_remote_code=True)" if family.remote_code else ""
        call = f"transformers.{family.model_class}.from_pretrained{options}"
        text += f"\n\nThe language model alone, without the head, also loads in `{call}`."
    return text


def _data(about: Mapping[str, Any]) -> str:
    given, rows = about["recipe"]["data"], []
    for split in ("train", "valid", "test"):
        facts = about.get("data", {}).get(split, {})
        numbers = [f"{facts[key]:,}" if key in facts else "not recorded" for key in ("records", "residues")]
        rows.append([split, _code(_name(given["table"] or given[split])), *numbers])
    table = _table(["split", "given as", "records", "residues"], rows)
    if given["table"] is None:
        return f"{table}\n\nTraining records of more than {given['max_length']:,} residues: {_code(given['long'])}."
    fold = f", fold {given['fold']} of {given['folds']}" if given["folds"] else ""
    offset = about.get("facts", {}).get("offset", 0)
    moved = f" The positions of the table {offset:+d} are those of the wild type." if offset else ""
    return f"{table}\n\nVariants of one protein, divided by {_code(given['split'])}{_text(fold)}.{moved}"


def _training(about: Mapping[str, Any]) -> str:
    recipe = about["recipe"]
    optim, method = recipe["optim"], recipe.get("adapt", {}).get("method")
    rows = [["adaptation", _code(method)]] if method else []
    if kind := recipe["model"].get("quantize"):
        quantized = f"the layers' matrices to {kind} (bitsandbytes) in training; the weights here are not"
        rows.append(["quantised", _text(quantized)])
    if method == "probe":
        rows.append(["head", "fitted by scikit-learn on what the frozen model says"])
    else:
        # The learning rate of an extended run followed the earlier number of steps until the step of the extension.
        starts = pairwise(about.get("history", ()))
        changes = [(a["steps"], b["after"]) for a, b in starts if a["steps"] != b["steps"]]
        extended = [f"; planned as {steps:,} until step {after:,}" for steps, after in changes]
        rows += [
            ["steps", f"{about['step']:,} of {recipe['train']['steps'] or about['step']:,}{''.join(extended)}"],
            ["tokens a step, at most", f"{recipe['batch']['global_tokens']:,}"],
            ["learning rate", f"AdamW, {_text(optim['schedule'])}, {optim['lr']:g}, head {optim['head_lr']:g}"],
            ["precision", f"{_text(recipe['parallel']['precision'])}, weights and optimizer state in fp32"],
        ]
    return _table(["", ""], rows) + f"\n\n`esmshard.json` holds the whole recipe, of esmshard {about['esmshard']}."


def _metrics(about: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> str:
    if evaluation is None:
        return "Not scored yet. `esmshard evaluate` scores a model beside its baselines."
    metrics: Mapping[str, Mapping[str, Any]] = evaluation["metrics"]
    columns = list(evaluation.get("columns") or next(iter(metrics.values())))
    rows = [[_text(name), *(_interval(row.get(column)) for column in columns)] for name, row in metrics.items()]
    lines = [
        f"Over the {evaluation['records']:,} records of {_code(_name(evaluation['data']))} "
        f"({_text(evaluation['split'])}), with {_text(evaluation['interval'])}."
    ]
    if missing := [_text(f"{count} without {name}") for name, count in evaluation["without_value"].items() if count]:
        lines.append(f"Records that a metric has no value for are left out of it: {', '.join(missing)}.")
    if verdict := evaluation.get("verdict"):
        lines.append(_text(verdict))
    if evaluation["weights_sha256"] != about["weights_sha256"]:
        lines.append("Scored before the weights were written in this layout and precision.")
    return " ".join(lines) + "\n\n" + _table(["", *map(_text, columns)], rows)


def _interval(value: Mapping[str, float | None] | None) -> str:
    if value is None or value["value"] is None:
        return "no value"
    if value["low"] is None:
        return f"{value['value']:.3f}"
    return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _limits(about: Mapping[str, Any]) -> str:
    lines = [
        "The scores hold for proteins that are to the training data as the test set is; for others, such as families, "
        "lengths or organisms that the data do not have, nothing was measured.",
        "What it says is a prediction, and no ground for a medical decision.",
    ]
    parts = {"lm_head": "LM head", "contact_head": "contact regression (`predict_contacts`)"}
    if about.get("contact_regression") == "head":
        lines.append("Its contact regression is the fine-tuned head.")
    if never := [part for name, part in parts.items() if name in about.get("unlearned", ())]:
        lines.append(f"Of no use, because they never learned: {' and '.join(never)}.")
    return "\n".join(f"- {line}" for line in lines)


def _licence_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries on the licence of the weights that a run started from, of their card in a directory or in the
    hub's cache; empty if it is not known.
    """
    name = recipe["model"]["name"]
    place = Path(name).expanduser()
    if not place.exists() and is_hub_name(name):
        place = hub.find(name) or place
    if recipe["init"] != "pretrained" or not (place / "README.md").is_file():
        return {}
    try:
        data = ModelCard.load(place / "README.md", ignore_metadata_errors=True).data.to_dict()
    except Exception:  # The card of somebody else may be no YAML.
        return {}
    return {key: data[key] for key in ("license", "license_name") if data.get("license") and data.get(key)}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. Cells are results of `_text` or `_code`, or our own words."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in line) + " |" for line in lines)


def _text(value: object) -> str:
    r"""Escape HTML and Markdown in a text of a user or a file.

    >>> print(_text("my <b>run</b> [1] *two_words*"))
    my &lt;b&gt;run&lt;/b&gt; \[1\] \*two_words\*
    """
    plain = html.escape(" ".join(str(value).split()), quote=False)
    return re.sub(r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", plain)


def _code(value: object) -> str:
    """Put a text between backticks, or escape it if it holds HTML, which some readers of Markdown show even there."""
    shown = " ".join(str(value).replace("`", "'").split())
    return _text(shown) if re.search("[<>&]", shown) else f"`{shown}`"


def _name(given: str) -> str:
    """Return the last part of a path. `sample:...` and names of models stay as they are."""
    return given if given.startswith("sample:") else os.path.basename(given.rstrip("/")) or given  # noqa: PTH119
