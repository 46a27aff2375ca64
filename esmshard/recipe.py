"""The typed recipe: load, override, validate, dump, schema. No torch.

A recipe is one YAML file. Unknown keys and wrong types are refused, all problems of a file at once, each with its line
and column. `resolve` finds the file by path or by the name of a shipped recipe; `load` reads it, applies `key=value`
overrides with the same checks, and makes every path absolute.

Paths: `sample:NAME` is data shipped with the package; other data and model paths are relative to the recipe file,
those given as an override and `out` to the working directory. `~` and `${VAR}` expand.
"""

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from esmshard.errors import InputError, UsageError
from esmshard.settings import Recipe

PATH_KEYS = (("model", "name"), ("data", "train"), ("data", "valid"), ("data", "test"))


def shipped(kind: Literal["recipes", "data"]) -> Path:
    """The directory of shipped recipes or samples: inside the installed package, or at the top of a clone."""
    installed = Path(__file__).parent / "_shipped" / kind
    return installed if installed.is_dir() else Path(__file__).parent.parent / kind


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
        found = {_key(e["loc"]): e for e in reversed(error.errors())}  # of a key with two problems, the first
        problems += [_sentence(tree, where, key, e) for key, e in reversed(found.items())]
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
    """JSON schema of a recipe, for editors."""
    return Recipe.model_json_schema()


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


def _key(loc: tuple[Any, ...]) -> tuple[str, ...]:
    """The key that the user wrote. A field of two types, or a list, reports each member by a name of its own."""
    keys = tuple(str(k) for k in loc)
    while len(keys) > 1 and not _is_key(keys):
        keys = keys[:-1]
    return keys


def _sentence(tree: CommentedMap, where: _Where, keys: tuple[str, ...], error: ErrorDetails) -> str:
    dotted = ".".join(keys)
    if error["type"] == "extra_forbidden":
        return f"{where.of(tree, keys)}: {dotted}: unknown key{_did_you_mean(keys[-1], _siblings(keys))}"
    if error["type"] == "missing" and len(keys) < len(error["loc"]):
        return f"{where.of(tree, keys, on_value=True)}: {dotted}: has too few values"
    if error["type"] == "missing":
        return f"{where.of(tree, keys[:-1])}: {dotted}: this key is required"
    if error["type"] == "value_error":  # one of ours, which says all
        return f"{where.of(tree, keys, on_value=True)}: {dotted}: {error['ctx']['error']}"
    message, value = error["msg"].removeprefix("Input should be "), error["input"]
    got = repr(value) if isinstance(value, str) else "nothing" if value is None else value
    return f"{where.of(tree, keys, on_value=True)}: {dotted}: must be {message}, not {got}"


def _section(keys: tuple[str, ...]) -> type[BaseModel] | None:
    model: type[BaseModel] = Recipe
    for key in keys:
        field = model.model_fields.get(key)
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return None
        model = annotation
    return model


def _siblings(keys: tuple[str, ...]) -> list[str]:
    section = _section(keys[:-1])
    return list(section.model_fields) if section else []


def _is_key(keys: tuple[str, ...]) -> bool:
    """Whether the last of these may stand in a recipe: known, or an unknown one inside a known section."""
    return _section(keys[:-1]) is not None


def sample(path: str) -> Path:
    """The file that a data path means; `sample:contact/train` is `contact/train.fasta` of the shipped data."""
    if not path.startswith("sample:"):
        return Path(path)
    name = path.removeprefix("sample:")
    file = shipped("data") / f"{name}.fasta"
    if not file.is_file() or ".." in Path(name).parts:
        root = shipped("data")
        known = sorted(str(p.relative_to(root).with_suffix("")) for p in root.glob("*/*.fasta"))
        raise InputError(f"{path}: no such sample; there are {', '.join('sample:' + k for k in known)}")
    return file
