"""Read a Dockerfile: stages, instructions, variables, and which files `.dockerignore` lets in.

What this file does not know (heredocs, ADD, ONBUILD, SHELL, other mounts than `bind`) is an error, never passed over:
the steps that `run_steps.py` runs are then all the steps there are.
"""

import fnmatch
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = {"ARG", "FROM", "ENV", "RUN", "COPY", "WORKDIR", "USER", "LABEL", "ENTRYPOINT", "CMD"}


class DockerfileError(ValueError):
    """Something in a Dockerfile that is wrong, or that this reader does not know; names the line."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: `flags` are (name, value) pairs of `--name=value`; `text` is what follows them, lines joined."""

    line: int
    name: str
    flags: tuple[tuple[str, str], ...]
    text: str


@dataclass
class Stage:
    """A FROM and what follows it. `base` is as written, variables unexpanded; `name` is empty without AS."""

    base: str
    name: str
    line: int
    steps: list[Instruction] = field(default_factory=list)


@dataclass
class Dockerfile:
    """`arguments` are the ARGs before the first FROM, with their default (None without one)."""

    arguments: dict[str, str | None]
    stages: list[Stage]

    def stage(self, name: str) -> Stage:
        """The stage of this name. KeyError where there is none."""
        return {stage.name: stage for stage in self.stages if stage.name}[name]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """(line number, whole instruction): comments left out, continued lines joined with a space."""
    parts: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not parts):
            continue
        if not parts:
            start = number
        continued = line.rstrip().endswith("\\")
        parts.append(line.rstrip()[:-1] if continued else line)
        if not continued:
            yield start, " ".join(part.strip() for part in parts if part.strip())
            parts = []
    if parts:
        raise DockerfileError(f"line {start}: the file ends within an instruction")


def parse(text: str) -> Dockerfile:
    """Read a Dockerfile's text. Raises DockerfileError."""
    found = Dockerfile({}, [])
    for line, whole in _lines(text):
        name, _, rest = whole.partition(" ")
        name, rest = name.upper(), rest.strip()
        if name not in KNOWN:
            raise DockerfileError(f"line {line}: {name} is not an instruction known here")
        if "<<" in rest and name in {"RUN", "COPY"}:
            raise DockerfileError(f"line {line}: heredocs are not known here")
        flags = []
        while flag := re.match(r"--([a-z]+)=(\S+)\s*", rest):
            flags.append((flag[1], flag[2]))
            rest = rest[flag.end() :]
        if name == "FROM":
            words = rest.split()
            if len(words) == 3 and words[1].upper() == "AS":
                found.stages.append(Stage(words[0], words[2], line))
            elif len(words) == 1:
                found.stages.append(Stage(words[0], "", line))
            else:
                raise DockerfileError(f"line {line}: FROM {rest}")
        elif found.stages:
            found.stages[-1].steps.append(Instruction(line, name, tuple(flags), rest))
        elif name == "ARG":
            key, _, value = rest.partition("=")
            found.arguments[key] = unquote(value) if "=" in rest else None
        else:
            raise DockerfileError(f"line {line}: {name} before the first FROM")
    if not found.stages:
        raise DockerfileError("no FROM")
    return found


def unquote(text: str) -> str:
    """One word without its quotes."""
    return "".join(shlex.split(text))


def expand(text: str, values: dict[str, str]) -> str:
    """Replace $NAME, ${NAME}, ${NAME:-default} and ${NAME:+instead}; an unknown name is empty, as in Docker."""

    def value(found: re.Match[str]) -> str:
        held = values.get(found["plain"] or found["name"], "")
        if found["how"] == ":-":
            return held or found["word"]
        return (found["word"] if held else "") if found["how"] == ":+" else held

    return re.sub(r"\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?:(?P<how>:[-+])(?P<word>[^}]*))?\})", value, text)


def pairs(instruction: Instruction) -> list[tuple[str, str]]:
    """The key=value pairs of ENV, LABEL or ARG, unquoted, unexpanded; a bare ARG has the value ''."""
    found = []
    for word in shlex.split(instruction.text):
        key, equals, value = word.partition("=")
        if not equals and instruction.name != "ARG":
            raise DockerfileError(f"line {instruction.line}: {instruction.name} {word} has no `=`")
        found.append((key, value))
    return found


def command(instruction: Instruction) -> list[str]:
    """The words of an ENTRYPOINT, CMD or COPY; not of the shell form, which signals do not reach."""
    if instruction.text.startswith("["):
        return [str(word) for word in json.loads(instruction.text)]
    if instruction.name == "COPY":
        return shlex.split(instruction.text)
    raise DockerfileError(f"line {instruction.line}: {instruction.name} in the shell form")


def _matches(path: str, pattern: str) -> bool:
    """A path, or one of its directories, against one pattern; `*` stays within a name, `**` is any number of names."""
    names = path.split("/")
    return any(_match(names[:n], pattern.strip("/").split("/")) for n in range(1, len(names) + 1))


def _match(names: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_match(names[n:], patterns[1:]) for n in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], patterns[0]) and _match(names[1:], patterns[1:])


def context(root: Path, ignore: str) -> list[str]:
    """The files below `root` that a build sees, relative, sorted; the last matching line of `.dockerignore` decides."""
    rules = [line.strip() for line in ignore.splitlines() if line.strip() and not line.startswith("#")]
    exceptions = [rule[1:] for rule in rules if rule.startswith("!")]

    def is_out(path: str) -> bool:
        out = False
        for rule in rules:
            if _matches(path, rule.removeprefix("!")):
                out = not rule.startswith("!")
        return out

    def may_hold(path: str) -> bool:
        return not is_out(path) or any("*" in name or name.startswith(f"{path}/") for name in exceptions)

    kept = []
    for directory, folders, files in os.walk(root):
        inside = Path(directory).relative_to(root).as_posix()
        start = "" if inside == "." else f"{inside}/"
        folders[:] = [name for name in folders if may_hold(start + name)]  # an environment has 50,000 files
        kept += [start + name for name in files if not is_out(start + name)]
    return sorted(kept)
