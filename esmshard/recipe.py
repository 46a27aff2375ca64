"""The typed recipe: load, override, validate, dump, schema. No torch.

A recipe is one YAML file. Unknown keys and wrong types are refused, all problems of a file at once, each with its line
and column. `resolve` finds the file by path or by the name of a shipped recipe; `load` reads it, applies `key=value`
overrides with the same checks, and makes every path absolute.

Paths: `sample:NAME` is data shipped with the package; other data and model paths are relative to the recipe file,
those given as an override and `out` to the working directory. `~` and `${VAR}` expand.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from esmshard.data_settings import Clash, listed
from esmshard.errors import InputError, UsageError
from esmshard.settings import Recipe
from esmshard.shipped import shipped
from esmshard.task_settings import TaskSettings

PATH_KEYS = (
    ("model", "name"),
    *(("data", key) for key in ("train", "valid", "test", "labels", "mask", "clusters", "table", "wild_type")),
)

SCHEMA_LINE = "# yaml-language-server: $schema="
"""How the first line of a recipe tells editors where its schema is."""

TASK_SECTIONS: dict[str, type[BaseModel]] = {
    get_args(section.model_fields["name"].annotation)[0]: section for section in get_args(get_args(TaskSettings)[0])
}
"""What may stand under `task`, by its `name`."""


def names() -> list[str]:
    """The shipped recipes, by name."""
    return sorted(p.stem for p in shipped("recipes").glob("*.yaml"))


def resolve(name: str) -> Path:
    """The file that `finetune NAME` means: a path, or the name of a shipped recipe."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if name in names():
        return shipped("recipes") / f"{name}.yaml"
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UsageError(f"{name}: no such recipe file")
    hint = _did_you_mean(name, names())
    raise UsageError(f"{name}: neither a file nor a shipped recipe ({', '.join(names())}){hint}")


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and check a recipe.

    Raises `UsageError` with one sentence for each problem, as `recipe.yaml:4:3: optim.lrr: unknown key; did you mean
    'lr'?`.
    """
    tree, where = _read(path), _Where(str(path))
    problems: list[str] = []
    for override in overrides:
        _override(tree, override, where, problems)
    _expand_all(tree, path.parent, where, problems)
    try:
        recipe = Recipe.model_validate(_plain(tree))
    except ValidationError as error:
        found = {_place(e).keys: e for e in reversed(error.errors())}  # of a key with two problems, the first
        problems += [_sentence(tree, where, e) for e in reversed(found.values())]
    if problems:
        raise UsageError(*problems)
    return recipe


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every key written out."""
    out = StringIO()
    yaml = YAML()
    yaml.width = 1000
    yaml.dump(recipe.model_dump(mode="json"), out)
    return out.getvalue()


def schema() -> dict[str, Any]:
    """JSON schema of a recipe, for editors. `recipes/schema.json` holds it."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}


def schema_text() -> str:
    """The schema as it is shipped and printed."""
    return json.dumps(schema(), indent=1) + "\n"


def description(name: str) -> str:
    """What a shipped recipe is for: its first line that is a comment for people."""
    lines = (shipped("recipes") / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("#") and not line.startswith(SCHEMA_LINE)), "")


def copy_of(path: Path) -> str:
    """The text of a recipe, its first line naming the installed schema wherever the copy lies."""
    first, newline, rest = path.read_text(encoding="utf-8").partition("\n")
    if first.startswith(SCHEMA_LINE):
        first = f"{SCHEMA_LINE}{shipped('recipes') / 'schema.json'}"
    return first + newline + rest


def differences(old: Recipe, new: Recipe) -> list[str]:
    """Dotted keys whose values differ, as `optim.lr (0.001, was 0.002)`."""
    a, b = dict(_leaves(old.model_dump(mode="json"))), dict(_leaves(new.model_dump(mode="json")))
    return [
        f"{key} ({b.get(key)}, was {a.get(key)})" for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)
    ]


class _Where:
    """Where a key was written: the recipe file, or an override."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.overrides: dict[tuple[str, ...], str] = {}

    def of(self, tree: CommentedMap, loc: tuple[str, ...], on_value: bool = False) -> str:
        for depth in range(len(loc), 0, -1):
            if loc[:depth] in self.overrides:
                return self.overrides[loc[:depth]]
        line, column = 0, 0
        node: Any = tree
        for key in loc:
            if not isinstance(node, CommentedMap) or key not in node:
                break
            if key in (node.lc.data or {}):  # what an override put there has no place in the file
                # A key with nothing after it has its value on the next line, as YAML sees it.
                of_value = on_value and key == loc[-1] and node[key] is not None
                line, column = node.lc.value(key) if of_value else node.lc.key(key)
            node = node[key]
        return f"{self.file}:{line + 1}:{column + 1}"


def _read(path: Path) -> CommentedMap:
    try:
        tree = YAML().load(path.read_text(encoding="utf-8"))
    except DuplicateKeyError as error:
        mark = error.problem_mark
        key = re.search(r'duplicate key "([^"]*)"', str(error.problem))
        raise UsageError(
            f"{path}:{mark.line + 1}:{mark.column + 1}: {key[1] if key else 'a key'}: given twice"
        ) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark
        raise UsageError(f"{path}:{mark.line + 1}:{mark.column + 1}: not YAML: {error.problem}") from None
    except (UnicodeDecodeError, ReaderError):
        raise UsageError(f"{path}: not a text file") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(tree, CommentedMap):
        raise UsageError(f"{path}:1:1: a recipe is a YAML mapping with the keys {', '.join(Recipe.model_fields)}")
    return tree


def _plain(node: Any) -> Any:
    """Commented YAML containers and scalars to plain ones: strict validation wants exact types."""
    if isinstance(node, dict):
        return {str(k): _plain(v) for k, v in node.items()}
    if isinstance(node, list):
        return [_plain(v) for v in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _override(tree: CommentedMap, text: str, where: _Where, problems: list[str]) -> None:
    dotted, equals, raw = text.partition("=")
    loc = tuple(dotted.strip().split("."))
    if not equals or not all(loc):
        problems.append(f"{text}: an override is KEY=VALUE, such as optim.lr=1e-4")
        return
    try:
        value = YAML().load(raw) if raw.strip() else ""
    except YAMLError:
        value = raw
    where.overrides[loc] = text
    node: Any = tree
    for key in loc[:-1]:
        node = node.setdefault(key, CommentedMap())
        if not isinstance(node, dict):
            problems.append(f"{text}: {key} has no keys of its own")
            return
    node[loc[-1]] = value


def _expand_all(tree: CommentedMap, base: Path, where: _Where, problems: list[str]) -> None:
    for loc in (*PATH_KEYS, ("out",)):
        node: Any = tree
        for key in loc[:-1]:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(loc[-1]), str):
            here = loc == ("out",) or loc in where.overrides  # typed in the shell, or made there
            _expand(node, loc, Path.cwd() if here else base, where.of(tree, loc, on_value=True), problems)


def _expand(node: dict[str, Any], loc: tuple[str, ...], base: Path, where: str, problems: list[str]) -> None:
    """Expand `${VAR}` and `~`, and make a path absolute. Names of samples and of model sizes stay as they are."""
    text = str(node[loc[-1]])
    for name in re.findall(r"\$\{(\w+)\}", text):
        if name not in os.environ:
            problems.append(f"{where}: {'.'.join(loc)}: the environment variable {name} is not set")
            return
        text = text.replace(f"${{{name}}}", os.environ[name])
    is_name = text.startswith("sample:") or (loc == ("model", "name") and re.fullmatch(r"[\w-]+", text))
    if not is_name or (loc == ("model", "name") and (base / text).exists()):
        text = os.path.abspath(base / Path(text).expanduser())  # noqa: PTH100  # links stay what they are
    node[loc[-1]] = text


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


_IN_YAML = {
    **dict.fromkeys(("model_type", "model_attributes_type"), "a mapping of keys to values"),
    "tuple_type": "a list such as [a, b]",
}
"""Kinds of pydantic's errors that speak of Python."""


@dataclass(frozen=True)
class _Place:
    """The key that an error is about, as the user wrote it."""

    keys: tuple[str, ...]
    section: type[BaseModel]
    """In which the last key stands."""
    within: bool
    """The error is about a part of the value: a member of a list, or one of several types."""


def _place(error: ErrorDetails) -> _Place:
    """Where an error is. pydantic's own location also names the task, the types of a field, and numbers in lists."""
    loc = list(error["loc"])
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return _Place((*map(str, loc), "name"), Recipe, within=False)
    if error["type"] == "value_error" and isinstance(error["ctx"]["error"], Clash):
        loc.append(error["ctx"]["error"].key)
    keys: list[str] = []
    section: type[BaseModel] = Recipe
    inner: Any = Recipe
    while loc and isinstance(inner, type) and issubclass(inner, BaseModel):
        section = inner
        keys.append(str(loc.pop(0)))
        field = section.model_fields.get(keys[-1])
        inner = field.annotation if field is not None else None
        if keys == ["task"] and loc:
            inner = TASK_SECTIONS[str(loc.pop(0))]
    return _Place(tuple(keys), section, within=bool(loc))


def _sentence(tree: CommentedMap, where: _Where, error: ErrorDetails) -> str:
    place, kind = _place(error), error["type"]
    keys, dotted = place.keys, ".".join(place.keys)
    if kind == "extra_forbidden":
        return f"{where.of(tree, keys)}: {dotted}: {_unknown(keys, place.section)}"
    if kind == "missing" and place.within:
        return f"{where.of(tree, keys, on_value=True)}: {dotted}: has too few values"
    if kind in ("missing", "union_tag_not_found"):
        return f"{where.of(tree, keys[:-1])}: {dotted}: this key is required"
    at = where.of(tree, keys, on_value=True)
    if kind == "value_error":  # one of ours, which says all
        ours = error["ctx"]["error"]
        return f"{at}: {dotted}: {ours.reason if isinstance(ours, Clash) else ours}"
    message, value = _IN_YAML.get(kind, error["msg"].removeprefix("Input should be ")), error["input"]
    hint = ""
    if kind == "union_tag_invalid":
        value = value["name"]
        *others, last = (f"'{name}'" for name in TASK_SECTIONS)
        message, hint = f"{', '.join(others)} or {last}", _did_you_mean(str(value), list(TASK_SECTIONS))
    got = repr(value) if isinstance(value, str) else "nothing" if value is None else value
    return f"{at}: {dotted}: must be {message}, not {got}{hint}"


def _unknown(keys: tuple[str, ...], section: type[BaseModel]) -> str:
    """What to say of a key that its section does not have; one of another task says so."""
    tasks = [name for name, other in TASK_SECTIONS.items() if keys[-1] in other.model_fields]
    ours = [name for name, known in TASK_SECTIONS.items() if known is section]
    if tasks and ours:
        return f"is for task {listed(tasks)}, and the recipe has {ours[0]}; remove it, or change task.name"
    return f"unknown key{_did_you_mean(keys[-1], list(section.model_fields))}"


def sample(path: str) -> Path:
    """The file that a data path means; `sample:contact/train` is `contact/train.fasta` of the shipped data, and a name
    with an ending, such as `sample:contact/labels.csv`, that very file.
    """
    if not path.startswith("sample:"):
        return Path(path)
    name = path.removeprefix("sample:")
    file = shipped("data") / (name if Path(name).suffix else f"{name}.fasta")
    if not file.is_file() or ".." in Path(name).parts:
        root = shipped("data")
        known = sorted(str(p.relative_to(root).with_suffix("")) for p in root.glob("*/*.fasta"))
        known += sorted(str(p.relative_to(root)) for p in root.glob("*/*.csv"))
        raise InputError(f"{path}: no such sample; there are {', '.join('sample:' + k for k in known)}")
    return file
