"""Functions that read a YAML file, such as a recipe or a site profile, into typed settings, without torch.

All problems of a file, such as unknown keys and wrong types, are reported together. Each problem has its line and
column, or the override that caused it.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from esmshard.errors import UsageError
from esmshard.recipe.sections import Clash

M = TypeVar("M", bound=BaseModel)


@dataclass
class Tree:
    """The content of a YAML file after overrides, with the position of each key, and the problems of the file."""

    node: CommentedMap
    file: str
    overrides: dict[tuple[str, ...], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def override_of(self, keys: tuple[str, ...]) -> str | None:
        """Return the override that set the key, or a section that contains the key; None if no override did."""
        sections = (keys[:depth] for depth in range(len(keys), 0, -1))
        return next((self.overrides[section] for section in sections if section in self.overrides), None)

    def where(self, keys: tuple[str, ...], on_value: bool = False) -> str:
        """Return the override that set a key. Without an override, return a position such as `my.yaml:4:3` (line and
        column): the position of the value if `on_value`, else of the key.
        """
        if (typed := self.override_of(keys)) is not None:
            return typed
        line, column = 0, 0
        node: Any = self.node
        for key in keys:
            if isinstance(node, CommentedSeq) and key.isdecimal() and int(key) < len(node) and on_value:
                line, column = node.lc.item(int(key))
            if not isinstance(node, CommentedMap) or key not in node:
                break
            if key in (node.lc.data or {}):  # a key of an override is not in the file
                # The position of an empty value is in the next line, so take the position of the key.
                is_value = on_value and key == keys[-1] and node[key] is not None
                line, column = node.lc.value(key) if is_value else node.lc.key(key)
            node = node[key]
        return f"{self.file}:{line + 1}:{column + 1}"

    def override(self, text: str) -> None:
        """Apply an override such as `optim.lr=1e-4`. Add a sentence to `problems` if the override is wrong."""
        dotted, equals, raw = text.partition("=")
        keys = tuple(dotted.strip().split("."))
        if not equals or not all(keys):
            self.problems.append(f"{text}: an override is KEY=VALUE, such as optim.lr=1e-4")
            return
        try:
            value = parse_yaml(raw) if raw.strip() else ""
        except YAMLError:
            value = raw
        except ValueError as error:
            self.problems.append(f"{dotted.strip()}: {error}")
            return
        self.put(keys, value, text)

    def put(self, keys: tuple[str, ...], value: Any, where: str) -> None:
        """Set a key to a value. Messages about this key begin with the text `where`."""
        self.overrides[keys] = where
        node: Any = self.node
        for key in keys[:-1]:
            node = node.setdefault(key, CommentedMap())
            if not isinstance(node, dict):
                self.problems.append(f"{where}: {key} is no section; remove the keys after {key}")
                return
        node[keys[-1]] = value

    def checked(self, root: type[M], named: Mapping[str, type[BaseModel]] | None = None) -> M:
        """Check the content of the file, and return settings of class `root`. `named` has the settings class for each
        value of a key `name`, such as the class of each task.

        Raises:
            UsageError: with a sentence for each problem: `my.yaml:4:3: optim.lrr: unknown key; did you mean 'lr'?`.
        """
        try:
            settings = root.model_validate(_plain(self.node))
        except ValidationError as error:
            messages: dict[str, list[str]] = {}
            for problem in error.errors():  # pydantic reports several errors if a key may have several types
                place, message = self._described(problem, root, named or {})
                messages.setdefault(place, []).append(message)
            self.problems += [f"{place}: {' or '.join(dict.fromkeys(texts))}" for place, texts in messages.items()]
        if self.problems:
            raise UsageError(*self.problems)
        return settings

    def _described(
        self, error: ErrorDetails, root: type[BaseModel], named: Mapping[str, type[BaseModel]]
    ) -> tuple[str, str]:
        """For an error of pydantic, return its place, such as `my.yaml:4:3: optim.lr`, and the message for the user."""
        loc, absent = list(error["loc"]), error["type"] in ("missing", "extra_forbidden")
        if (clash := error.get("ctx", {}).get("error")) is not None and isinstance(clash, Clash):
            loc.append(clash.key)
        keys: list[str] = []
        node: Any = self.node
        for part in loc:  # pydantic also puts names that are not in the file into a location
            is_item = isinstance(node, list) and isinstance(part, int)
            has_default = isinstance(clash, Clash) and part not in named  # such a key need not be in the file
            if isinstance(node, dict) and part in node:
                node = node[part]
                keys.append(str(part))
            elif is_item or has_default:
                keys.append(str(part))
        if absent and keys[-1:] != [str(loc[-1])]:
            keys.append(str(loc[-1]))
        where = self.where(tuple(keys[:-1]) if error["type"] == "missing" else tuple(keys), on_value=not absent)
        message = error["msg"] if clash is None else clash.reason if isinstance(clash, Clash) else str(clash)
        if error["type"] == "extra_forbidden":
            message = f"unknown key{did_you_mean(str(loc[-1]), _keys_of(root, loc[:-1], named))}"
        return f"{where}: {'.'.join(keys)}", message


def _keys_of(root: type[BaseModel], loc: Sequence[int | str], named: Mapping[str, type[BaseModel]]) -> list[str]:
    """Return the keys that are allowed in the section at `loc`, the location of an error of pydantic."""
    kind: Any = root
    for part in loc:
        if get_origin(kind) is dict:  # the user chooses these keys
            kind = get_args(kind)[1]
        elif part in getattr(kind, "model_fields", ()):
            kind = kind.model_fields[part].annotation
        else:
            kind = named.get(str(part), kind)
    return list(getattr(kind, "model_fields", ()))


def read(path: Path, called: str, root: type[BaseModel]) -> Tree:
    """Read a YAML file whose keys are the fields of `root`. Messages call the file `called`, such as `a recipe`.

    Raises:
        UsageError: if the file cannot be read, or is not a YAML mapping.
    """
    try:
        node = parse_yaml(path.read_text(encoding="utf-8"))
    except MarkedYAMLError as error:  # also if a key occurs twice
        mark = error.problem_mark
        raise UsageError(f"{path}:{mark.line + 1}:{mark.column + 1}: not YAML: {error.problem}") from None
    except (OSError, ValueError, YAMLError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    if node is None:  # a file with comments only
        node = CommentedMap()
    if not isinstance(node, CommentedMap):
        raise UsageError(f"{path}:1:1: {called} is a YAML mapping with the keys {', '.join(root.model_fields)}")
    return Tree(node, str(path))


def parse_yaml(text: str) -> Any:
    """Parse a YAML text with the library `ruamel.yaml`, which keeps comments and positions.

    Raises:
        YAMLError: if the text is not YAML.
        ValueError: if a value is impossible, such as a date in a 13th month.
    """
    try:
        return YAML().load(text)
    except (YAMLError, ValueError):
        raise
    except Exception as error:  # Tags such as !!omap with a wrong value may raise any exception.
        raise ValueError(f"a YAML tag does not fit its value ({type(error).__name__}: {error})") from None


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return a text such as `; did you mean 'lr'?` with the most similar word in `known`; empty if none is similar."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _plain(node: Any) -> Any:
    """Convert YAML containers and scalars to plain Python types, because strict validation needs exact types."""
    if isinstance(node, dict):
        return {str(k): _plain(v) for k, v in node.items()}
    if isinstance(node, list):
        return [_plain(v) for v in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node
