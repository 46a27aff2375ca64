"""The result of a check, checks that fail themselves, and calls of other programs. No torch."""

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from esmshard.errors import InputError, UsageError

Level = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")
"""The levels, from harmless to one that makes a run fail or very slow."""

ANSWER = 15.0
"""Seconds to wait for another program. nvidia-smi takes two or three without persistence mode."""


@dataclass(frozen=True)
class Finding:
    """One line of a report."""

    check: str
    """The group of the finding, such as versions."""
    name: str
    """The thing that was checked, such as driver. Names stay the same between releases, because programs use them."""
    level: Level
    found: str
    """A sentence for people."""
    fix: str = ""
    """The fix, in one sentence; never empty for a warning or an error."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs, as JSON values; bytes and seconds without prefixes."""
    node: str = ""
    """The machine of the finding; empty for a finding about all machines."""

    def __post_init__(self) -> None:
        assert self.fix or self.level in ("ok", "note"), f"{self.name}: no fix"


Case = tuple[object, Level, str, str]
"""A condition, and the level, the sentence and the fix of the finding where it holds."""


def first_case(group: str, name: str, found: str, values: Mapping[str, Any], *cases: Case) -> Finding:
    """Return the finding of the first case whose condition holds, else an `ok` finding with the sentence `found`."""
    for applies, level, sentence, fix in cases:
        if applies:
            return Finding(group, name, level, sentence, fix, values)
    return Finding(group, name, "ok", found, "", values)


class Unanswered(InputError):
    """A program is not installed, cannot be run, or did not end in time. The message names the program."""


class Hangs(Unanswered):
    """A program did not end in time."""


@dataclass(frozen=True)
class Answer:
    """The output of a program, and its exit code."""

    code: int
    out: str
    err: str


def ask(command: Sequence[str], timeout: float = ANSWER) -> Answer:
    """Run a program and return its output; `Unanswered` if it cannot be run, and `Hangs` if it takes too long."""
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )
    except FileNotFoundError:
        raise Unanswered(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise Hangs(f"{command[0]} did not answer within {timeout:g} s") from None
    except OSError as error:
        raise Unanswered(f"{command[0]} cannot be run: {(error.strerror or str(error)).lower()}") from None
    return Answer(done.returncode, done.stdout, done.stderr)


def guarded(group: str, check: Callable[[], Iterable[Finding]], name: str = "", fix: str = "") -> list[Finding]:
    """Return the findings of one check.

    If the check fails, the findings so far are followed by one about the failure. If a file or a program of the machine
    could not be read, this is an error with the given fix, or a note if there is none; for other failures it is a
    warning. `UsageError` is raised.
    """
    found: list[Finding] = []
    try:
        for finding in check():
            found.append(finding)
    except UsageError:
        raise
    except (OSError, InputError) as error:
        message = str(error).replace("\n", "; ")
        note = Finding(group, group, "note", f"this could not be checked: {message}")
        found.append(Finding(group, name, "error", message, fix) if fix else note)
    except Exception as error:
        message = f"the check itself failed: {type(error).__name__}: {error}"
        fix = "check this by hand, and report this line as a bug"
        found.append(Finding(group, group, "warning", message, fix))
    return found


def gib(count: float) -> str:
    """Format bytes.

    >>> gib(3 * 2**30), gib(64 * 2**20), gib(5 * 2**40)
    ('3.0 GiB', '64 MiB', '5.0 TiB')
    """
    if count < 2**30:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / 2**30:.1f} GiB" if count < 2**40 else f"{count / 2**40:.1f} TiB"
