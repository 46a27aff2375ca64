"""Reads a YAML file, such as a recipe or a site profile, into typed settings. This module does not import torch.

Unknown keys and wrong types are refused. All problems of a file are reported at once, each with its line and column, or
with the override that caused the problem.
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
    """The content of a YAML file after overrides, the position of each key in the file, and problems found so far."""

    node: CommentedMap
    file: str
    overrides: dict[tuple[str, ...], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def override_of(self, keys: tuple[str, ...]) -> str | None:
        """Return the override that set this key, or else the innermost section around the key; or None."""
        sections = (keys[:depth] for depth in range(len(keys), 0, -1))
        return next((self.overrides[section] for section in sections if section in self.overrides), None)

    def where(self, keys: tuple[str, ...], on_value: bool = False) -> str:
        """Return the override that set a key, or else the position of the key in the file, such as `my.yaml:4:3`."""
        if (typed := self.override_of(keys)) is not None:
            return typed
        line, column = 0, 0
        node: Any = self.node
        for key in keys:
            if isinstance(node, CommentedSeq) and key.isdecimal() and int(key) < len(node) and on_value:
                line, column = node.lc.item(int(key))
            if not isinstance(node, CommentedMap) or key not in node:
                break
            if key in (node.lc.data or {}):  # a key from an override is not in the file
                # YAML puts an empty value on the next line.
                is_value = on_value and key == keys[-1] and node[key] is not None
                line, column = node.lc.value(key) if is_value else node.lc.key(key)
            node = node[key]
        return f"{self.file}:{line + 1}:{column + 1}"

    def override(self, text: str) -> None:
        """Apply an override, such as `optim.lr=1e-4`. If it cannot be applied, add a sentence to `problems`."""
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
        """Set a key of the tree to a value. Messages about this key begin with the text `where`."""
        self.overrides[keys] = where
        node: Any = self.node
        for key in keys[:-1]:
            node = node.setdefault(key, CommentedMap())
            if not isinstance(node, dict):
                self.problems.append(f"{where}: {key} has no keys of its own")
                return
        node[keys[-1]] = value

    def checked(self, root: type[M], named: Mapping[str, type[BaseModel]] | None = None) -> M:
        """Validate the content of the file, and return settings of class `root`. `named` maps values of a key `name` to
        the settings class that the value selects, such as the class of a task.

        Raises:
            UsageError: with a sentence for each problem: `my.yaml:4:3: optim.lrr: unknown key; did you mean 'lr'?`.
        """
        try:
            settings = root.model_validate(_plain(self.node))
        except ValidationError as error:
            messages: dict[str, list[str]] = {}
            for problem in error.errors():  # pydantic reports an error for each type that a key may have
                place, message = self._described(problem, root, named or {})
                messages.setdefault(place, []).append(message)
            self.problems += [f"{place}: {' or '.join(dict.fromkeys(texts))}" for place, texts in messages.items()]
        if self.problems:
            raise UsageError(*self.problems)
        return settings

    def _described(
        self, error: ErrorDetails, root: type[BaseModel], named: Mapping[str, type[BaseModel]]
    ) -> tuple[str, str]:
        """Return two texts for an error of pydantic: the position with the key, and the message."""
        loc, absent = list(error["loc"]), error["type"] in ("missing", "extra_forbidden")
        if (clash := error.get("ctx", {}).get("error")) is not None and isinstance(clash, Clash):
            loc.append(clash.key)
        keys: list[str] = []
        node: Any = self.node
        for part in loc:  # the location from pydantic also has names that are not in the file
            is_item = isinstance(node, list) and isinstance(part, int)
            has_default = isinstance(clash, Clash) and part not in named  # such a key or section is not in the file
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
    """Return the keys that the section at `loc`, the location of an error of pydantic, may have."""
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
    """Read a YAML file whose keys are the fields of `root`. `called` names the file in messages, such as `a recipe`.

    Raises:
        UsageError: the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        node = parse_yaml(path.read_text(encoding="utf-8"))
    except MarkedYAMLError as error:  # also for a key that is given twice
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
        YAMLError: the text is not YAML.
        ValueError: the text has an impossible value, such as a date in a 13th month.
    """
    try:
        return YAML().load(text)
    except (YAMLError, ValueError):
        raise
    except Exception as error:  # Tags such as !!omap on a value that does not fit may raise any exception.
        raise ValueError(f"a tag does not fit its value ({type(error).__name__}: {error})") from None


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown word, with the most similar known word; or an empty text."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _plain(node: Any) -> Any:
    """Convert YAML containers and scalars to plain Python types, since strict validation needs exact types."""
    if isinstance(node, dict):
        return {str(k): _plain(v) for k, v in node.items()}
    if isinstance(node, list):
        return [_plain(v) for v in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node
