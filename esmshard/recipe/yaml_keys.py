"""Reads a YAML file of keys into typed settings. No torch.

Recipes and site profiles are such files. Unknown keys and wrong types are refused. All problems of a file are reported
at once, each with its line and column, or with the override that caused it.
"""

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from esmshard.errors import UsageError
from esmshard.files import read_text
from esmshard.recipe.section_base import Clash, listed

M = TypeVar("M", bound=BaseModel)

MAX_YAML_BYTES = 2**20
"""The largest file that is read. The shipped files have at most 10 kB."""

Sections = Mapping[str, type[BaseModel]]
"""The sections that one key may have, by their `name`."""


@dataclass
class Tree:
    """The content of a file with overrides, the place of each key, and in `problems` the problems found so far."""

    node: CommentedMap
    file: str
    called: str
    """The kind of file in messages, such as `a recipe`."""
    overrides: dict[tuple[str, ...], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    written: dict[tuple[str, ...], str] = field(default_factory=dict)
    """The paths with `${VAR}` as they were before the variables were expanded."""

    def where(self, keys: tuple[str, ...], on_value: bool = False) -> str:
        """Return where a key was written, as `my.yaml:4:3`, or the override that set the key."""
        for depth in range(len(keys), 0, -1):
            if keys[:depth] in self.overrides:
                return self.overrides[keys[:depth]]
        line, column = 0, 0
        node: Any = self.node
        for key in keys:
            if not isinstance(node, CommentedMap) or key not in node:
                break
            if key in (node.lc.data or {}):  # A key from an override has no place in the file.
                # For a key with nothing after it, YAML puts the value on the next line.
                of_value = on_value and key == keys[-1] and node[key] is not None
                line, column = node.lc.value(key) if of_value else node.lc.key(key)
            node = node[key]
        return f"{self.file}:{line + 1}:{column + 1}"

    def override(self, text: str) -> None:
        """Apply an override such as `optim.lr=1e-4`."""
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
        """Set a key to a value. Messages about it begin with `where`."""
        self.overrides[keys] = where
        node: Any = self.node
        for key in keys[:-1]:
            node = node.setdefault(key, CommentedMap())
            if not isinstance(node, dict):
                self.problems.append(f"{where}: {key} has no keys of its own")
                return
        node[keys[-1]] = value

    def texts(self, *keys: str) -> "list[tuple[Any, Any]]":
        """Return where the strings at a key are kept: a mapping and its key, or a list and the
        numbers of its members.
        """
        node: Any = self.node
        for key in keys[:-1]:
            node = node.get(key) if isinstance(node, dict) else None
        value = node.get(keys[-1]) if isinstance(node, dict) else None
        if isinstance(value, str):
            return [(node, keys[-1])]
        if isinstance(value, dict):
            return [(value, key) for key, one in value.items() if isinstance(one, str)]
        return [(value, n) for n, one in enumerate(value) if isinstance(one, str)] if isinstance(value, list) else []

    def variables(
        self, text: str, keys: tuple[str, ...], keep: str = "", allowed: Callable[[str], bool] | None = None
    ) -> str | None:
        """Expand `${VAR}` in a value, except names that `keep` matches. If a variable is not set, or not `allowed`, add
        a problem and return None.
        """
        for name in re.findall(r"\$\{(\w+)\}", text):
            if keep and re.fullmatch(keep, name):
                continue
            at = f"{self.where(keys, on_value=True)}: {'.'.join(keys)}:"
            if allowed is not None and not allowed(name):
                self.problems.append(
                    f"{at} {self.called} does not read the environment variable {name} by itself, since it may hold a "
                    f"secret; pass --env {name} to allow it"
                )
                return None
            if name not in os.environ:
                self.problems.append(f"{at} the environment variable {name} is not set")
                return None
            text = text.replace(f"${{{name}}}", os.environ[name])
        return text

    def checked(self, root: type[M], named: "Mapping[str, Sections] | None" = None) -> M:
        """Validate the settings. For keys whose section depends on its `name`, `named` has all their sections.

        Raises:
            UsageError: with one sentence for each problem, as `my.yaml:4:3: optim.lrr: unknown key; did you mean
                'lr'?`.
        """
        kind = _Kind(root, named or {})
        try:
            made = root.model_validate(_plain(self.node))
        except ValidationError as error:
            # If a key has two problems, the first one is kept
            found = {kind.place(e).keys: e for e in reversed(error.errors())}
            self.problems += [kind.sentence(self, e) for e in reversed(found.values())]
        if self.problems:
            raise UsageError(*self.problems)
        return made


def read(path: Path, called: str, root: type[BaseModel], *, may_be_empty: bool = False) -> Tree:
    """Read a file.

    Args:
        path: path of the file.
        called: the kind of file in messages, such as `a recipe`.
        root: the settings that the file is for.
        may_be_empty: whether a file of comments alone is allowed.

    Raises:
        UsageError: the file cannot be read, is not YAML, or is no mapping.
    """
    try:
        node = parse_yaml(read_text(path, MAX_YAML_BYTES))
    except DuplicateKeyError as error:
        mark = error.problem_mark
        key = re.search(r'duplicate key "([^"]*)"', str(error.problem))
        raise UsageError(
            f"{path}:{mark.line + 1}:{mark.column + 1}: {key[1] if key else 'a key'}: given twice"
        ) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark
        raise UsageError(
            f"{path}:{mark.line + 1}:{mark.column + 1}: not YAML: {error.problem}; correct this line or the one before"
        ) from None
    except (UnicodeDecodeError, ReaderError):
        raise UsageError(f"{path}: not a text file") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: cannot be read as YAML: {error}") from None
    if node is None and may_be_empty:
        node = CommentedMap()
    if not isinstance(node, CommentedMap):
        raise UsageError(f"{path}:1:1: {called} is a YAML mapping with the keys {', '.join(root.model_fields)}")
    return Tree(node, str(path), called)


def parse_yaml(text: str) -> Any:
    """Parse a text of YAML, and return it as `ruamel.yaml` does. YAML is parsed nowhere else.

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
    """Return the end of a sentence about an unknown word; empty if no known word is similar."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _plain(node: Any) -> Any:
    """Convert YAML containers and scalars with comments to plain ones, since strict validation needs exact types."""
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
"""Plain words for pydantic's errors that use terms of Python."""


@dataclass(frozen=True)
class _Place:
    """The key that an error is about, as the user wrote it."""

    keys: tuple[str, ...]
    section: type[BaseModel]
    """Section that holds the last key."""
    within: bool
    """Whether the error is about a part of the value: a member of a list, or one of several types."""


@dataclass(frozen=True)
class _Kind:
    """Describes pydantic's errors about one kind of file in plain words."""

    root: type[BaseModel]
    named: Mapping[str, Sections]

    def place(self, error: ErrorDetails) -> _Place:
        """Find the place of an error. pydantic's own location also has the section's name, types,
        and numbers in lists.
        """
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
            if len(keys) == 1 and loc and loc[0] in self.named.get(keys[0], {}):
                inner = self.named[keys[0]][str(loc.pop(0))]
            if loc and get_origin(inner) is dict:  # The keys of this mapping are the user's own.
                keys.append(str(loc.pop(0)))
                inner = get_args(inner)[1]
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
        if kind == "value_error":  # This is an error of ours, with a complete message.
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
        """Describe a key that its section does not have. A key of another section of that name is described as such."""
        for key, sections in self.named.items():
            has = [name for name, other in sections.items() if keys[-1] in other.model_fields]
            ours = [name for name, known in sections.items() if known is section]
            if has and ours:
                owner = called.removeprefix("a ")
                return f"is for {key} {listed(has)}, and the {owner} has {ours[0]}; remove it, or change {key}.name"
        return f"unknown key{did_you_mean(keys[-1], list(section.model_fields))}"
