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


class Unanswered(InputError):
    """A program is not installed or did not end in time. The message names the program."""

    hangs = False


@dataclass(frozen=True)
class Answer:
    """The output of a program, and its exit code."""

    code: int
    out: str
    err: str


def ask(command: Sequence[str], timeout: float = ANSWER) -> Answer:
    """Run a program and return its output; `Unanswered` if it is not installed or takes too long."""
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )
    except FileNotFoundError:
        raise Unanswered(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        unanswered = Unanswered(f"{command[0]} did not answer within {timeout:g} s")
        unanswered.hangs = True
        raise unanswered from None
    except OSError as error:
        raise Unanswered(f"{command[0]} cannot be run: {(error.strerror or str(error)).lower()}") from None
    return Answer(done.returncode, done.stdout, done.stderr)


def guarded(group: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of one check. If it fails, add `failed` to the findings so far. `UsageError` is raised."""
    found: list[Finding] = []
    try:
        for finding in check():
            found.append(finding)
    except UsageError:
        raise
    except Exception as error:
        found.append(failed(group, error))
    return found


def failed(group: str, error: Exception) -> Finding:
    """Return the finding for a check that failed: a note if the machine did not answer, else a warning."""
    if isinstance(error, OSError | InputError):
        return Finding(group, group, "note", f"this could not be checked: {error}")
    message = f"the check itself failed: {type(error).__name__}: {error}"
    return Finding(group, group, "warning", message, "check this by hand, and report this line as a bug")


def gib(count: float) -> str:
    """Format bytes.

    >>> gib(3 * 2**30), gib(64 * 2**20), gib(5 * 2**40)
    ('3.0 GiB', '64 MiB', '5.0 TiB')
    """
    if count < 2**30:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / 2**30:.1f} GiB" if count < 2**40 else f"{count / 2**40:.1f} TiB"
