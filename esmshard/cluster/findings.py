"""What a check found, how checks that fail themselves are kept in line, and how other programs are asked. No torch."""

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from esmshard.errors import InputError, UsageError

Level = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")
"""From harmless to what makes a run fail or crawl."""

ANSWER = 15.0
"""Seconds that another program has for its answer. nvidia-smi takes two or three without persistence mode."""


@dataclass(frozen=True)
class Finding:
    """One line of a report."""

    check: str
    """Group that it is shown in, such as versions."""
    name: str
    """What was looked at, such as driver. Stable: programs go by it."""
    level: Level
    found: str
    """For people."""
    mend: str = ""
    """One sentence; never empty for a warning or an error."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs, as JSON has it; bytes and seconds without prefixes."""
    node: str = ""
    """Host that it is about; empty for what is about all of them."""

    def __post_init__(self) -> None:
        assert self.mend or self.level in ("ok", "note"), f"{self.name}: no mend"


class Unanswered(InputError):
    """A program that is not there, failed or did not end in time. The message says which."""


@dataclass(frozen=True)
class Answer:
    """What a program said."""

    code: int
    out: str
    err: str


def ask(command: Sequence[str], timeout: float = ANSWER) -> Answer:
    """Run a program and read what it says; `Unanswered` if it is not there or takes too long."""
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )
    except FileNotFoundError:
        raise Unanswered(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise Unanswered(f"{command[0]} did not answer within {timeout:g} s") from None
    except OSError as error:
        raise Unanswered(f"{command[0]} cannot be run: {(error.strerror or str(error)).lower()}") from None
    return Answer(done.returncode, done.stdout, done.stderr)


def guarded(check: str, name: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of one check, or one that says why it could not be made. Only `UsageError` goes through.

    A note where the machine does not let itself be looked at, a warning where the check is at fault.
    """
    found: list[Finding] = []
    try:
        for finding in look():  # what was found before it failed counts
            found.append(finding)
    except UsageError:
        raise
    except (OSError, InputError) as error:
        found.append(Finding(check, name, "note", f"could not be looked at: {error}"))
    except Exception as error:
        found.append(
            Finding(
                check,
                name,
                "warning",
                f"the check itself failed: {type(error).__name__}: {error}",
                "look at it by hand, and report this line: the check meets a machine that it does not know",
            )
        )
    return found


def gib(count: float) -> str:
    """Bytes for people.

    >>> gib(3 * 2**30), gib(64 * 2**20), gib(5 * 2**40)
    ('3.0 GiB', '64 MiB', '5.0 TiB')
    """
    if count < 2**30:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / 2**30:.1f} GiB" if count < 2**40 else f"{count / 2**40:.1f} TiB"
