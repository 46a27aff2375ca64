"""The model card: `README.md` beside a model, as the Hugging Face hub shows it.

The card contains known facts, and names unknown ones. A model is never called an ESM-2 because of its shape, but only
if the recipe names released weights.
"""

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esmshard.files import is_hub_name, replace_json, replace_text, sync_directory
from esmshard.model import hub
from esmshard.model.config import SHIPPED
from esmshard.model.families.family import Family
from esmshard.model.families.family_registry import (
    FAMILIES,
    RELEASED,
    SIZES,
    authors_files,
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
    replace_text(directory / "README.md", text(directory, about, evaluation))
    if evaluation is not None and evaluation["split"] == "test":
        tested = {"records": evaluation["records"], "interval": evaluation["interval"]}
        tested["metrics"] = evaluation["metrics"].get(MAIN, {})
        replace_json(directory / "esmshard.json", {**about, "test": tested})
    sync_directory(directory)


def text(directory: Path, about: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> str:
    """Return the text of the card. Paths are shortened to their last part, since the card is shared."""
    recipe, authors_file = about["recipe"], not (directory / "config.json").is_file()
    parts = [
        _front_matter(recipe, "" if authors_file else _family(about).files.model_class, evaluation),
        f"# {_text(_name(recipe['out']))}\n\n{_base(about)}",
        _use(directory, about, authors_file),
        _data(about),
        _training(about),
        _scores(about, evaluation),
        _limits(about, authors_file),
        _licence(recipe),
        _citation(about),
        _made(about, authors_file),
    ]
    return "\n\n".join(parts) + "\n"


def _released(recipe: Mapping[str, Any]) -> str | None:
    """Return the name of the released model that it was fine-tuned from; None for another base."""
    return released_name(recipe["model"]["name"]) if recipe["init"] == "pretrained" else None


def _repository(recipe: Mapping[str, Any]) -> str | None:
    """Return OWNER/NAME on the Hugging Face hub of the model that it was fine-tuned from; None for another base."""
    base, name = _released(recipe), recipe["model"]["name"]
    if base or recipe["init"] != "pretrained":
        return RELEASED[base].repository if base else None
    return name if is_hub_name(name) else None


def _front_matter(recipe: Mapping[str, Any], model_class: str, evaluation: Mapping[str, Any] | None) -> str:
    """Return the YAML that the hub reads. JSON is a part of YAML. `model_class` reads the model in `transformers`."""
    found: dict[str, Any] = {}
    licence = licence_of_base(recipe)
    if base := _released(recipe):
        found["license"] = RELEASED[base].licence
    elif licence is not None and forbids_commercial_use(licence):  # so that what is made from this model knows it
        found |= {"license": "other", "license_name": licence}
    if repository := _repository(recipe):
        found |= {"base_model": repository, "base_model_relation": "finetune"}
    if model_class:
        found["library_name"] = "transformers"
    found["tags"] = ["biology", "protein-language-model", "esmshard", f"{recipe['task']['name']}-prediction"]
    if metrics := _metrics_for_hub(evaluation):
        task, data = {"type": f"{recipe['task']['name']}-prediction"}, _name((evaluation or {})["data"])
        result = {"task": task, "dataset": {"name": data, "type": "protein"}, "metrics": metrics}
        found["model-index"] = [{"name": _name(recipe["out"]), "results": [result]}]
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in found.items()), "---"])


def _metrics_for_hub(evaluation: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the test metrics of the model as the hub shows them, each with its interval in its name."""
    if evaluation is None or evaluation["split"] != "test":
        return []
    model = evaluation["metrics"].get(MAIN, {})
    return [
        {"type": column, "value": found["value"], "name": f"{column}, {_interval(found)}"}
        for column, found in model.items()
        if found["value"] is not None and not column.endswith("before scaling")
    ]


def _base(about: Mapping[str, Any]) -> str:
    recipe = about["recipe"]
    name, task = recipe["model"]["name"], recipe["task"]
    options = _text(", ".join(f"{key} {value}" for key, value in task.items() if key != "name"))
    kind = "A protein language model" if traits(task["name"]).trains_lm_head else "A protein language model with a head"
    lines = [f"{kind} for the task {_code(task['name'])} ({options})."]
    repository = _repository(recipe)
    link = f"[{repository}](https://huggingface.co/{repository})"
    if base := _released(recipe):
        lines.append(f"It was fine-tuned from `{base}` ({link}).")
    elif repository:
        lines.append(
            f"It was fine-tuned from the weights of the repository {link} on the Hugging Face hub: whether they are "
            f"those of a released {_family(about).title} model is not known here."
        )
    elif recipe["init"] == "random":
        lines.append(
            f"**It is not {_family(about).title}**: it was trained from random weights (seed "
            f"{recipe['train']['seed']}) in the shape of {_code(_name(name))}, and on nothing but the data below."
        )
    elif name in SHIPPED:
        lines.append(
            f"It was fine-tuned from `{name}`, a small model that comes with esmshard. **It is not ESM-2**, and "
            f"{SHIPPED[name]}."
        )
    else:
        lines.append(
            f"It was fine-tuned from the weights in {_code(_name(name))}, which were given as a file: whether they are "
            f"those of a released {_family(about).title} model is not known here."
        )
    if method := recipe.get("adapt", {}).get("method"):
        lines.append(f"Adaptation: {_code(method)}.")
    if "config" in about:
        config = recorded_config(about["config"])
        same = [size for size, shape in SIZES.items() if shape == config]
        shape = f", the shape of `{same[0]}`" if same else ""
        lines.append(
            f"{config.n_layers} layers, width {config.dim}, {config.n_heads} heads, {n_parameters(config):,} "
            f"parameters without the head{shape}; weights in {_text(about['dtype'])}."
        )
    return " ".join(lines)


def _family(about: Mapping[str, Any]) -> Family:
    return family_of(recorded_config(about["config"])) if "config" in about else FAMILIES["esm2"]


def _authors_word(about: Mapping[str, Any]) -> str:
    """Return the word for the authors' file in `consolidate --to`."""
    return next(iter(_family(about).pickles))


def _citation(about: Mapping[str, Any]) -> str:
    base, family = _released(about["recipe"]), _family(about)
    name, paper = (base, RELEASED[base].paper) if base else (family.title, family.paper)
    return f"## Citation\n\n{name}:\n\n```bibtex\n{paper}\n```"


def _use(directory: Path, about: Mapping[str, Any], authors_file: bool) -> str:
    recipe = about["recipe"]
    if authors_file:
        file = next(p.name for p in sorted(directory.glob("*.pt*")) if not p.stem.endswith("-contact-regression"))
        kind = authors_files(_family(about))[_authors_word(about)]
        code = kind.use.replace("FILE", json.dumps(file))
        return f"## Use\n\nThe language model, without the head, for {kind.code}:\n\n```python\n{code}\n```"
    if traits(recipe["task"]["name"]).reads_table:
        return (
            "## Use\n\n```\nesmshard predict MODEL variants.csv -o ranked.csv    # or --all-singles\n```\n\nVariants "
            "of the wild type in `esmshard.json` only: substitutions, one or several."
        )
    commands = (
        "## Use\n\n```\nesmshard predict MODEL proteins.fasta -o out.npz    # what the head says\n"
        "esmshard embed MODEL proteins.fasta -o out.h5\n```\n\n"
    )
    files = _family(about).files
    if not files.model_class:
        return (
            f"{commands}The names of its tensors are esmshard's own, and no other library reads them. "
            f"`esmshard consolidate MODEL -o OUT --to {_authors_word(about)}` writes the language model for its "
            "authors' code."
        )
    return (
        f"{commands}The language model alone, without the head, also loads in `{files.call}`, "
        "which names the tensors under `head.` as unused."
    )


def _data(about: Mapping[str, Any]) -> str:
    given = about["recipe"]["data"]
    rows = []
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
        numbering = f" The table counts residues in its own way: its positions {offset:+d} are the wild type's."
        return (
            f"## Data\n\n{table}\n\nVariants of one protein, divided by {_code(given['split'])}{_text(fold)}: only a "
            "division by positions tests what the model knows of positions without a measurement."
            f"{numbering if offset else ''}"
        )
    return (
        "## Data\n\n"
        + table
        + "\n\nThe splits are as they were given. How they were divided, and how much alike training and test proteins "
        "are, is for whoever publishes this model to say; `esmshard split` divides by clusters and tells what they "
        "share. "
        f"Training records of more than {given['max_length']:,} residues: {_code(given['long'])}."
    )


def _training(about: Mapping[str, Any]) -> str:
    recipe = about["recipe"]
    optim, parallel = recipe["optim"], recipe["parallel"]
    if recipe.get("adapt", {}).get("method") == "probe":
        fitted = "None: the head was fitted by scikit-learn on what the frozen model says."
        return f"## Training\n\n{fitted}{_quantized(about)} {_software(about)}"
    rows = [
        ["steps", f"{about['step']:,} of {recipe['train']['steps'] or about['step']:,}"],
        ["tokens a step, at most", f"{recipe['batch']['global_tokens']:,}"],
        ["optimizer", f"AdamW, betas {_pair(optim['betas'])}, weight decay {optim['weight_decay']:g}"],
        ["learning rate", f"{optim['lr']:g}, head {optim['head_lr']:g}"],
        ["schedule", f"{_text(optim['schedule'])}, {100 * optim['warmup']:g}% warm-up{_extended(about)}"],
        ["gradient norm, at most", f"{optim['clip']:g}"],
        ["seed", _text(recipe["train"]["seed"])],
        ["precision", f"{_text(parallel['precision'])}, weights and optimizer state in fp32"],
        ["processes", _text(f"{about.get('world_size', 'not recorded')}, {parallel['strategy']}{_together(parallel)}")],
        ["software", _software(about)],
    ]
    return "## Training\n\n" + _table(["", ""], rows) + (f"\n\n{said.strip()}" if (said := _quantized(about)) else "")


def _together(parallel: Mapping[str, Any]) -> str:
    """Return how many processes computed each layer together, if more than one did."""
    sizes = {key: parallel.get(key, 1) for key in ("tensor", "context")}
    return "".join(f", {key} {size}" for key, size in sizes.items() if size != 1)


def _quantized(about: Mapping[str, Any]) -> str:
    """Return a sentence if the model saw quantised weights, which are not those of the files, in training."""
    kind = about["recipe"]["model"].get("quantize")
    if kind is None:
        return ""
    library = " ".join(["bitsandbytes", *filter(None, [about.get("versions", {}).get("bitsandbytes")])])
    return (
        f" The matrices of the base model's layers were quantised to {_text(kind)} ({_text(library)}) in training. "
        "The weights here are made of the base model's own, which are not quantised."
    )


def _extended(about: Mapping[str, Any]) -> str:
    """Return the changes of the number of steps in the course of the run, for the row of the schedule."""
    return "".join(
        f"; of {change['steps_before']:,} steps until step {change['after']:,}, then of {change['steps']:,}"
        for change in about.get("extended", [])
    )


def _software(about: Mapping[str, Any]) -> str:
    torch = about.get("versions", {}).get("torch")
    return _text(f"esmshard {about['esmshard']}" + (f", torch {torch}" if torch else ""))


def _scores(about: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> str:
    if evaluation is None:
        return "## Metrics\n\nNot scored yet. `esmshard evaluate` scores a model beside its baselines."
    metrics: Mapping[str, Mapping[str, Any]] = evaluation["metrics"]
    columns = list(evaluation.get("columns") or next(iter(metrics.values())))
    rows = [[_text(name), *(_interval(row.get(column)) for column in columns)] for name, row in metrics.items()]
    lines = [
        f"Over the {evaluation['records']:,} records of {_code(_name(evaluation['data']))} "
        f"({_text(evaluation['split'])}), with {_text(evaluation['interval'])}."
    ]
    if missing := [_text(f"{count} without {name}") for name, count in evaluation["without_value"].items() if count]:
        lines.append(f"Records that a metric has no value for are left out of it: {', '.join(missing)}.")
    if few := [_text(f"{name} ({reason})") for name, reason in evaluation.get("without_interval", {}).items()]:
        lines.append(f"No interval, for too few records: {'; '.join(few)}.")
    if said := evaluation.get("verdict"):
        lines.append(_text(said))
    if evaluation["weights_sha256"] != about["weights_sha256"]:
        lines.append("Scored before the weights were written in this layout and precision.")
    return "## Metrics\n\n" + " ".join(lines) + "\n\n" + _table(["", *map(_text, columns)], rows)


def _interval(value: Mapping[str, float | None] | None) -> str:
    if value is None or value["value"] is None:
        return "no value"
    if value["low"] is None:
        return f"{value['value']:.3f}"
    return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _limits(about: Mapping[str, Any], authors_file: bool) -> str:
    recipe = about["recipe"]
    lines = [
        "The scores hold for proteins that are to the training data as the test set is; for others, such as families, "
        "lengths or organisms that the data do not have, nothing was measured.",
        "What it says is a prediction, and no ground for a medical decision.",
    ]
    parts = {"lm_head": "LM head", "contact_head": "contact regression (`predict_contacts`)"}
    if traits(recipe["task"]["name"]).trains_lm_head:
        del parts["lm_head"]
    if about.get("contact_regression") == "head":
        del parts["contact_head"]
        lines.append("Its contact regression is the fine-tuned head.")
    never = [parts.pop(name) for name in about.get("unlearned", ()) if name in parts]
    if never:
        left = "of no use" if authors_file else "left out"
        lines.append(f"Its {' and its '.join(never)} never learned and {'are' if never[1:] else 'is'} {left}.")
    if parts and recipe.get("adapt", {}).get("method") not in ("head", "probe"):
        lines.append(f"Its {' and its '.join(parts.values())} did not learn along with the layers below.")
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines)


def _licence(recipe: Mapping[str, Any]) -> str:
    if base := _released(recipe):
        released = RELEASED[base]
        licence = released.licence.upper()
        said = f"The weights of the base model are under the {licence} licence (Copyright {released.holder})."
    elif recipe["init"] == "random":
        said = "No licence is stated. It holds no weights of others."
    elif recipe["model"]["name"] in SHIPPED:
        said = "The weights of the base model are under the MIT licence (Copyright the esmshard authors)."
    elif repository := _repository(recipe):
        said = f"No licence is stated; that of the repository {repository} on the Hugging Face hub holds on."
    else:
        said = "No licence is stated; that of the weights it was fine-tuned from holds on."
    stated = licence_of_base(recipe)
    if stated is not None and forbids_commercial_use(stated):
        said += f" The licence of the base model, {_code(stated)}, forbids commercial use, and this holds here too."
    return f"## Licence\n\n{said} The licence of the training data is for whoever publishes this model to state."


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
        text = path.read_text(encoding="utf-8")
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


def _made(about: Mapping[str, Any], authors_file: bool) -> str:
    processes = f" --nproc {int(about['world_size'])}" if about.get("world_size", 1) > 1 else ""
    word = _authors_word(about) if authors_file else "hf" if _family(about).files.model_class else ""
    layout = f" --to {word}" if word else ""
    dtype = "".join(re.findall(r"\w", str(about["dtype"])))
    return (
        "## How it was made\n\n```\n"
        f"esmshard finetune recipe.yaml{processes}\n"
        f"esmshard consolidate RUN -o MODEL{layout} --dtype {dtype}\n"
        "```\n\n`recipe.yaml` is what `esmshard.json` holds under `recipe`. sha256 of the weights, as `esmshard.json` "
        f"has it: {_code(about['weights_sha256'])}."
    )


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


def _pair(betas: Sequence[float]) -> str:
    return " and ".join(f"{beta:g}" for beta in betas)


def _name(given: str) -> str:
    """Return the last part of a path. `sample:...` and names of models stay as they are."""
    return given if given.startswith("sample:") else os.path.basename(given.rstrip("/")) or given  # noqa: PTH119
