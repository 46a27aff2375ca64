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
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, ScalarEvent
from ruamel.yaml.reader import ReaderError

from esmshard.data_settings import Clash, listed
from esmshard.errors import UsageError
from esmshard.files import MAX_DIGITS, read_text

M = TypeVar("M", bound=BaseModel)

MAX_YAML_BYTES, MAX_YAML_DEPTH, MAX_YAML_VALUES = 2**20, 20, 10_000
"""Of a file: its size, how many lists and mappings may lie in one another, and how many values there may be. Those that
are shipped have at most 10 kB, four and 100."""
_LIKE_A_NUMBER = re.compile(r"[-+.0-9][-+.0-9_:xoa-fA-F]*")

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
            value = parse_yaml(raw) if raw.strip() else ""
        except YAMLError:
            value = raw
        except ValueError as error:
            self.problems.append(f"{dotted.strip()}: {error}")
            return
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
        node = parse_yaml(read_text(path, MAX_YAML_BYTES))
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
    except _Beyond as error:
        raise UsageError(f"{path}:{error.line}: {error}") from None
    except ValueError as error:
        raise UsageError(f"{path}: cannot be read as YAML: {error}") from None
    if node is None and may_be_empty:
        node = CommentedMap()
    if not isinstance(node, CommentedMap):
        raise UsageError(f"{path}:1:1: {called} is a YAML mapping with the keys {', '.join(root.model_fields)}")
    return Tree(node, str(path), called)


class _Beyond(ValueError):
    """A text of YAML is beyond the bounds of `parse_yaml`; `line` says where, as `4:3`."""

    def __init__(self, mark: Any, reason: str) -> None:
        super().__init__(reason)
        self.line = f"{mark.line + 1}:{mark.column + 1}"


def parse_yaml(text: str) -> Any:
    """What a text of YAML says, as `ruamel.yaml` gives it back. The one place where YAML is read.

    Raises:
        YAMLError: it is no YAML.
        ValueError: it is larger than a person writes, or says what no value is, such as a date in a 13th month.
    """
    _check_bounds(text)
    try:
        return YAML().load(text)
    except (YAMLError, ValueError):
        raise
    except Exception as error:  # tags such as !!omap on what is none raise whatever they like
        raise ValueError(f"a tag does not fit its value ({type(error).__name__}: {error})") from None


def _check_bounds(text: str) -> None:
    """Refuse nesting, sizes and numbers that would take the memory or the time of a machine. Nothing is built for that.

    An alias counts as much as what it stands for, so that a few lines cannot stand for billions of values.
    """
    total = 0
    open_at: list[tuple[int, str]] = []  # where a collection began, in values so far, and its anchor
    sizes: dict[str, int | None] = {}  # of anchors; None while the collection is open
    for event in YAML(typ="rt").parse(text):
        anchor: str = getattr(event, "anchor", None) or ""
        if isinstance(event, AliasEvent):
            size = sizes.get(anchor, 1)
            if size is None:
                raise _Beyond(event.start_mark, f"*{anchor} stands for what it is a part of; write it out")
            total += size
        elif isinstance(event, CollectionStartEvent):
            total += 1
            open_at.append((total, anchor))
            if anchor:
                sizes[anchor] = None
            if len(open_at) > MAX_YAML_DEPTH:
                raise _Beyond(event.start_mark, f"lists or mappings lie in one another more than {MAX_YAML_DEPTH} deep")
        elif isinstance(event, CollectionEndEvent):
            began, name = open_at.pop()
            if name:
                sizes[name] = total - began + 1
        elif isinstance(event, ScalarEvent):
            total += 1
            if anchor:
                sizes[anchor] = 1
            if re.search("[\0\ud800-\udfff]", event.value):
                raise _Beyond(event.start_mark, "a text holds a NUL or half of a surrogate pair; remove it")
            if len(event.value) > MAX_DIGITS and _LIKE_A_NUMBER.fullmatch(event.value):
                raise _Beyond(event.start_mark, f"a number has {len(event.value):,} characters; write a shorter one")
        if total > MAX_YAML_VALUES:
            raise _Beyond(
                event.start_mark,
                f"there are more than {MAX_YAML_VALUES:,} values, each alias counted as what it stands for; "
                "write a shorter file",
            )


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
