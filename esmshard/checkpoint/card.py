"""The model card: `README.md` beside a model, as the Hugging Face hub shows it.

The card contains known facts, and names unknown ones. A model is never called an ESM-2 because of its shape, but only
if the recipe names released weights. Paths are shortened to their last part, since the card is shared.
"""

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from esmshard.files import is_hub_name, replace_json, replace_text, sync_directory
from esmshard.model import hub
from esmshard.model.config import SHIPPED
from esmshard.model.families.family_registry import (
    FAMILIES,
    RELEASED,
    family_of,
    n_parameters,
    recorded_config,
    released_name,
)
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
    is_authors_file = not (directory / "config.json").is_file()
    sections = {
        "Use": _use(directory, about, is_authors_file),
        "Data": _data(about),
        "Training": _training(about),
        "Metrics": _scores(about, evaluation),
        "Limits": _limits(about),
        "Licence": _licence(about["recipe"]),
        "Citation": _citation(about),
    }
    title = f"# {_text(_name(about['recipe']['out']))}"
    parts = [*(f"## {name}\n\n{text}" for name, text in sections.items())]
    text = "\n\n".join([_front_matter(about, evaluation, is_authors_file), title, _base(about), *parts])
    replace_text(directory / "README.md", f"{text}\n")
    if evaluation is not None and evaluation["split"] == "test":
        tested = {"records": evaluation["records"], "interval": evaluation["interval"]}
        tested["metrics"] = evaluation["metrics"].get(MAIN, {})
        replace_json(directory / "esmshard.json", {**about, "test": tested})
    sync_directory(directory)


def _released(recipe: Mapping[str, Any]) -> str | None:
    """Return the name of the released model that it was fine-tuned from; None for another base."""
    return released_name(recipe["model"]["name"]) if recipe["init"] == "pretrained" else None


def _repository(recipe: Mapping[str, Any]) -> str | None:
    """Return OWNER/NAME on the Hugging Face hub of the model that it was fine-tuned from; None for another base."""
    base, name = _released(recipe), recipe["model"]["name"]
    if base or recipe["init"] != "pretrained":
        return RELEASED[base].repository if base else None
    return name if is_hub_name(name) else None


def _front_matter(about: Mapping[str, Any], evaluation: Mapping[str, Any] | None, is_authors_file: bool) -> str:
    """Return the YAML that the hub reads."""
    recipe = about["recipe"]
    task, licence, base = recipe["task"]["name"], licence_of_base(recipe), _released(recipe)
    known: dict[str, Any] = {"tags": ["biology", "protein-language-model", "esmshard", f"{task}-prediction"]}
    if base:
        known["license"] = RELEASED[base].licence
    elif licence is not None and forbids_commercial_use(licence):  # so that what is made from this model knows it
        known |= {"license": "other", "license_name": licence}
    if repository := _repository(recipe):
        known |= {"base_model": repository, "base_model_relation": "finetune"}
    if not is_authors_file and _family(about).model_class:
        known["library_name"] = "transformers"
    if evaluation is not None and evaluation["split"] == "test":
        dataset = _name(evaluation["data"])
        known["model_name"] = _name(recipe["out"])
        known["eval_results"] = [
            EvalResult(
                task_type=f"{task}-prediction",
                dataset_type="protein",
                dataset_name=dataset,
                metric_type=column,
                metric_value=found["value"],
                metric_name=f"{column}, {_interval(found)}",
            )
            for column, found in evaluation["metrics"].get(MAIN, {}).items()
            if found["value"] is not None and not column.endswith("before scaling")
        ]
    return f"---\n{ModelCardData(**known).to_yaml()}\n---"


def _base(about: Mapping[str, Any]) -> str:
    recipe = about["recipe"]
    name, task, title = recipe["model"]["name"], recipe["task"], _family(about).title
    options = _text(", ".join(f"{key} {value}" for key, value in task.items() if key != "name"))
    kind = "A protein language model" if traits(task["name"]).trains_lm_head else "A protein language model with a head"
    lines = [f"{kind} for the task {_code(task['name'])} ({options})."]
    repository = _repository(recipe)
    link = f"[{repository}](https://huggingface.co/{repository})"
    unknown = f"whether they are those of a released {title} model is not known here."
    if base := _released(recipe):
        lines.append(f"It was fine-tuned from `{base}` ({link}).")
    elif repository:
        lines.append(f"It was fine-tuned from the weights of the repository {link} on the Hugging Face hub: {unknown}")
    elif recipe["init"] == "random":
        lines.append(
            f"**It is not {title}**: it was trained from random weights (seed {recipe['train']['seed']}) in the shape "
            f"of {_code(_name(name))}, and on nothing but the data below."
        )
    elif name in SHIPPED:
        lines.append(
            f"It was fine-tuned from `{name}`, a small model that comes with esmshard. **It is not ESM-2**, and "
            f"{SHIPPED[name]}."
        )
    else:
        lines.append(f"It was fine-tuned from the weights in {_code(_name(name))}, given as a file: {unknown}")
    if "config" in about:
        config = recorded_config(about["config"])
        lines.append(
            f"{config.n_layers} layers, width {config.dim}, {config.n_heads} heads, {n_parameters(config):,} "
            f"parameters without the head; weights in {_text(about['dtype'])}."
        )
    return " ".join(lines)


def _family(about: Mapping[str, Any]) -> Any:
    return family_of(recorded_config(about["config"])) if "config" in about else FAMILIES["esm2"]


def _citation(about: Mapping[str, Any]) -> str:
    base, family = _released(about["recipe"]), _family(about)
    name, paper = (base, RELEASED[base].paper) if base else (family.title, family.paper)
    return f"{name}:\n\n```bibtex\n{paper}\n```"


def _use(directory: Path, about: Mapping[str, Any], is_authors_file: bool) -> str:
    family = _family(about)
    if is_authors_file:
        word = next(iter(family.pickles))
        file = next(p.name for p in sorted(directory.glob("*.pt*")) if not p.stem.endswith("-contact-regression"))
        kind = family.pickles[word]
        code = kind.use.replace("FILE", json.dumps(file))
        return f"The language model, without the head, for {kind.code}:\n\n```python\n{code}\n```"
    if traits(about["recipe"]["task"]["name"]).reads_table:
        return (
            "```\nesmshard predict MODEL variants.csv -o ranked.csv    # or --all-singles\n```\n\nVariants of the wild "
            "type in `esmshard.json` only: substitutions, one or several."
        )
    commands = (
        "```\nesmshard predict MODEL proteins.fasta -o out.npz\nesmshard embed MODEL proteins.fasta -o out.h5\n```\n\n"
    )
    if family.model_class:
        return f"{commands}The language model alone, without the head, also loads in `{family.call}`."
    words = " or ".join(f"`--to {word}`" for word in family.pickles)
    if not words:
        return commands.strip()
    return f"{commands}`esmshard consolidate MODEL -o OUT` with {words} writes the model for its authors' code."


def _data(about: Mapping[str, Any]) -> str:
    given, rows = about["recipe"]["data"], []
    for split in ("train", "valid", "test"):
        facts = about.get("data", {}).get(split, {})
        numbers = [f"{facts[key]:,}" if key in facts else "not recorded" for key in ("records", "residues")]
        digest = _code(facts["tokens_sha256"]) if "tokens_sha256" in facts else "not recorded"
        named = given[split] if given.get("table") is None else given["table"]
        rows.append([split, _code(_name(named)), *numbers, digest])
    table = _table(["split", "given as", "records", "residues", "sha256 of the tokens"], rows)
    if given.get("table") is not None:
        fold = f", fold {given['fold']} of {given['folds']}" if given["folds"] else ""
        offset = about.get("facts", {}).get("offset", 0)
        moved = f" The positions of the table {offset:+d} are those of the wild type." if offset else ""
        return f"{table}\n\nVariants of one protein, divided by {_code(given['split'])}{_text(fold)}.{moved}"
    return (
        f"{table}\n\nHow much alike training and test proteins are is for whoever publishes this model to say "
        f"(`esmshard split` reports it). Training records of more than {given['max_length']:,} residues: "
        f"{_code(given['long'])}."
    )


def _training(about: Mapping[str, Any]) -> str:
    recipe, versions = about["recipe"], about.get("versions", {})
    optim, parallel, adapt = recipe["optim"], recipe["parallel"], recipe.get("adapt", {})
    software = f"esmshard {about['esmshard']}" + (f", torch {versions['torch']}" if "torch" in versions else "")
    rows = [["adaptation", _code(adapt["method"])]] if adapt.get("method") else []
    if kind := recipe["model"].get("quantize"):
        quantized = f"the layers' matrices to {kind} (bitsandbytes) in training; the weights here are not"
        rows.append(["quantised", _text(quantized)])
    if adapt.get("method") == "probe":
        rows.append(["head", "fitted by scikit-learn on what the frozen model says"])
    else:
        betas, split = " and ".join(f"{beta:g}" for beta in optim["betas"]), parallel["strategy"]
        split += "".join(f", {key} {parallel[key]}" for key in ("tensor", "context") if parallel.get(key, 1) != 1)
        rows += [
            ["steps", f"{about['step']:,} of {recipe['train']['steps'] or about['step']:,}{_extended(about)}"],
            ["tokens a step, at most", f"{recipe['batch']['global_tokens']:,}"],
            ["optimizer", f"AdamW, betas {betas}, weight decay {optim['weight_decay']:g}"],
            ["learning rate", f"{optim['lr']:g}, head {optim['head_lr']:g}"],
            ["schedule", f"{_text(optim['schedule'])}, {100 * optim['warmup']:g}% warm-up"],
            ["gradient norm, at most", f"{optim['clip']:g}"],
            ["seed", _text(recipe["train"]["seed"])],
            ["precision", f"{_text(parallel['precision'])}, weights and optimizer state in fp32"],
            ["processes", _text(f"{about.get('world_size', 'not recorded')}, {split}")],
        ]
    rows += [["software", _text(software)], ["sha256 of the weights", _code(about["weights_sha256"])]]
    return _table(["", ""], rows) + "\n\n`esmshard.json` holds the whole recipe."


def _extended(about: Mapping[str, Any]) -> str:
    """The learning rate of an extended run followed the earlier number of steps until the step of the extension."""
    return "".join(
        f"; planned as {change['steps_before']:,} until step {change['after']:,}"
        for change in about.get("extended", ())
    )


def _scores(about: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> str:
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
        del parts["contact_head"]
        lines.append("Its contact regression is the fine-tuned head.")
    if never := [part for name, part in parts.items() if name in about.get("unlearned", ())]:
        lines.append(f"Of no use, because they never learned: {' and '.join(never)}.")
    return "\n".join(f"- {line}" for line in lines)


def _licence(recipe: Mapping[str, Any]) -> str:
    stated = licence_of_base(recipe)
    if base := _released(recipe):
        released = RELEASED[base]
        licence = released.licence.upper()
        text = f"The weights of the base model are under the {licence} licence (Copyright {released.holder})."
    elif recipe["init"] == "random":
        text = "No licence is stated. It holds no weights of others."
    elif recipe["model"]["name"] in SHIPPED:
        text = "The weights of the base model are under the MIT licence (Copyright the esmshard authors)."
    else:
        text = "No licence is stated; that of the weights it was fine-tuned from holds on."
    if stated is not None and forbids_commercial_use(stated):
        text += f" The licence of the base model, {_code(stated)}, forbids commercial use, and this holds here too."
    return f"{text} The licence of the training data is for whoever publishes this model to state."


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
    try:
        text = (place / "README.md").read_text(encoding="utf-8") if place is not None else ""
    except (OSError, ValueError):
        return None
    front = re.match(r"\ufeff?---\r?\n(.*?)^---\s*$", text, re.DOTALL | re.MULTILINE)
    named = {
        key: match[1]
        for key in ("license", "license_name")
        if front and (match := re.search(rf"^{key}:\s*(?:-\s*|\[)?[\"']?([\w.+-]+)", front[1], re.MULTILINE))
    }
    return named.get("license_name") if named.get("license", "other").lower() == "other" else named["license"]


def forbids_commercial_use(licence: str) -> bool:
    """Return whether a licence forbids commercial use, by its name.

    >>> forbids_commercial_use("cc-by-nc-sa-4.0"), forbids_commercial_use("cambrian-non-commercial")
    (True, True)
    >>> forbids_commercial_use("cc-by-4.0"), forbids_commercial_use("bsd-3-clause-nclab")
    (False, False)
    """
    return re.search(r"(?<![a-z0-9])nc(?![a-z0-9])|non-?_?commercial", licence.lower()) is not None


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
