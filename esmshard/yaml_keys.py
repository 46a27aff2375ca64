"""A YAML file of keys, read into typed settings. No torch.

Recipes and site profiles are such files. Unknown keys and wrong types are refused, all problems of a file at once, each
with its line and column, or with the override that it came from.
"""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from esmshard.data_settings import Clash, listed
from esmshard.errors import UsageError

M = TypeVar("M", bound=BaseModel)

Sections = Mapping[str, type[BaseModel]]
"""The sections that one key may have, by their `name`."""


@dataclass
class Tree:
    """What a file says, and overrides of it, with the place of each key. `problems` are those found so far."""

    node: CommentedMap
    file: str
    called: str
    """What the file is, as `a recipe`."""
    overrides: dict[tuple[str, ...], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def where(self, keys: tuple[str, ...], on_value: bool = False) -> str:
        """Where a key was written, as `my.yaml:4:3`, or the override that set it."""
        for depth in range(len(keys), 0, -1):
            if keys[:depth] in self.overrides:
                return self.overrides[keys[:depth]]
        line, column = 0, 0
        node: Any = self.node
        for key in keys:
            if not isinstance(node, CommentedMap) or key not in node:
                break
            if key in (node.lc.data or {}):  # what an override put there has no place in the file
                # A key with nothing after it has its value on the next line, as YAML sees it.
                of_value = on_value and key == keys[-1] and node[key] is not None
                line, column = node.lc.value(key) if of_value else node.lc.key(key)
            node = node[key]
        return f"{self.file}:{line + 1}:{column + 1}"

    def override(self, text: str) -> None:
        """Set what `optim.lr=1e-4` says."""
        dotted, equals, raw = text.partition("=")
        keys = tuple(dotted.strip().split("."))
        if not equals or not all(keys):
            self.problems.append(f"{text}: an override is KEY=VALUE, such as optim.lr=1e-4")
            return
        try:
            value = YAML().load(raw) if raw.strip() else ""
        except YAMLError:
            value = raw
        self.overrides[keys] = text
        node: Any = self.node
        for key in keys[:-1]:
            node = node.setdefault(key, CommentedMap())
            if not isinstance(node, dict):
                self.problems.append(f"{text}: {key} has no keys of its own")
                return
        node[keys[-1]] = value

    def texts(self, *keys: str) -> "list[tuple[Any, Any]]":
        """Where the strings at a key are kept: a mapping and its key, or a list and the numbers of its members."""
        node: Any = self.node
        for key in keys[:-1]:
            node = node.get(key) if isinstance(node, dict) else None
        value = node.get(keys[-1]) if isinstance(node, dict) else None
        if isinstance(value, str):
            return [(node, keys[-1])]
        if isinstance(value, dict):
            return [(value, key) for key, one in value.items() if isinstance(one, str)]
        return [(value, n) for n, one in enumerate(value) if isinstance(one, str)] if isinstance(value, list) else []

    def variables(self, text: str, keys: tuple[str, ...], keep: str = "") -> str | None:
        """A value with `${VAR}` expanded; None, and a problem, if one is not set. Those that `keep` matches stay."""
        for name in re.findall(r"\$\{(\w+)\}", text):
            if keep and re.fullmatch(keep, name):
                continue
            if name not in os.environ:
                at = self.where(keys, on_value=True)
                self.problems.append(f"{at}: {'.'.join(keys)}: the environment variable {name} is not set")
                return None
            text = text.replace(f"${{{name}}}", os.environ[name])
        return text

    def checked(self, root: type[M], named: "Mapping[str, Sections] | None" = None) -> M:
        """The settings. `named` has, for keys whose section depends on its `name`, all the sections there are.

        Raises:
            UsageError: with one sentence for each problem, as `my.yaml:4:3: optim.lrr: unknown key; did you mean
                'lr'?`.
        """
        kind = _Kind(root, named or {})
        try:
            made = root.model_validate(_plain(self.node))
        except ValidationError as error:
            found = {kind.place(e).keys: e for e in reversed(error.errors())}  # of a key with two problems, the first
            self.problems += [kind.sentence(self, e) for e in reversed(found.values())]
        if self.problems:
            raise UsageError(*self.problems)
        return made


def read(path: Path, called: str, root: type[BaseModel], *, may_be_empty: bool = False) -> Tree:
    """Read a file.

    Args:
        path: of the file.
        called: what it is, as `a recipe`.
        root: the settings that it is to become.
        may_be_empty: a file of comments alone says nothing, which is as well.

    Raises:
        UsageError: it cannot be read, is not YAML, or no mapping.
    """
    try:
        node = YAML().load(path.read_text(encoding="utf-8"))
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
    if node is None and may_be_empty:
        node = CommentedMap()
    if not isinstance(node, CommentedMap):
        raise UsageError(f"{path}:1:1: {called} is a YAML mapping with the keys {', '.join(root.model_fields)}")
    return Tree(node, str(path), called)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """The end of a sentence about a word that is not known; nothing if none is like it."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


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


_IN_YAML = {
    **dict.fromkeys(("model_type", "model_attributes_type"), "a mapping of keys to values"),
    "dict_type": "a mapping of keys to values",
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


@dataclass(frozen=True)
class _Kind:
    """Puts pydantic's errors about one kind of file into words."""

    root: type[BaseModel]
    named: Mapping[str, Sections]

    def place(self, error: ErrorDetails) -> _Place:
        """Where an error is. pydantic's own location also names the section's name, types, and numbers in lists."""
        loc = list(error["loc"])
        if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
            return _Place((*map(str, loc), "name"), self.root, within=False)
        if error["type"] == "value_error" and isinstance(error["ctx"]["error"], Clash):
            loc.append(error["ctx"]["error"].key)
        keys: list[str] = []
        section: type[BaseModel] = self.root
        inner: Any = self.root
        while loc and isinstance(inner, type) and issubclass(inner, BaseModel):
            section = inner
            keys.append(str(loc.pop(0)))
            known = section.model_fields.get(keys[-1])
            inner = known.annotation if known is not None else None
            if keys[-1] in self.named and len(keys) == 1 and loc:
                inner = self.named[keys[0]][str(loc.pop(0))]
        if loc and get_origin(inner) is dict:  # its keys are the user's own
            keys.append(str(loc.pop(0)))
        return _Place(tuple(keys), section, within=bool(loc))

    def sentence(self, tree: Tree, error: ErrorDetails) -> str:
        place, kind = self.place(error), error["type"]
        keys, dotted = place.keys, ".".join(place.keys)
        if kind == "extra_forbidden":
            return f"{tree.where(keys)}: {dotted}: {self._unknown(tree.called, keys, place.section)}"
        if kind == "missing" and place.within:
            return f"{tree.where(keys, on_value=True)}: {dotted}: has too few values"
        if kind in ("missing", "union_tag_not_found"):
            return f"{tree.where(keys[:-1])}: {dotted}: this key is required"
        at = tree.where(keys, on_value=True)
        if kind == "value_error":  # one of ours, which says all
            ours = error["ctx"]["error"]
            return f"{at}: {dotted}: {ours.reason if isinstance(ours, Clash) else ours}"
        message, value = _IN_YAML.get(kind, error["msg"].removeprefix("Input should be ")), error["input"]
        hint = ""
        if kind == "union_tag_invalid":
            value = value["name"]
            sections = self.named[keys[0]]
            *others, last = (f"'{name}'" for name in sections)
            message, hint = f"{', '.join(others)} or {last}", did_you_mean(str(value), list(sections))
        got = repr(value) if isinstance(value, str) else "nothing" if value is None else value
        return f"{at}: {dotted}: must be {message}, not {got}{hint}"

    def _unknown(self, called: str, keys: tuple[str, ...], section: type[BaseModel]) -> str:
        """What to say of a key that its section does not have; one of another section of that name says so."""
        for key, sections in self.named.items():
            has = [name for name, other in sections.items() if keys[-1] in other.model_fields]
            ours = [name for name, known in sections.items() if known is section]
            if has and ours:
                owner = called.removeprefix("a ")
                return f"is for {key} {listed(has)}, and the {owner} has {ours[0]}; remove it, or change {key}.name"
        return f"unknown key{did_you_mean(keys[-1], list(section.model_fields))}"
