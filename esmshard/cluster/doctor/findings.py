"""The result of a check, and checks that fail themselves. No torch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from esmshard.errors import InputError, UsageError

Level = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")
"""The levels, from harmless to one that makes a run fail or very slow."""


@dataclass(frozen=True)
class Finding:
    """One line of a report."""

    name: str
    """The thing that was checked, such as driver. Names stay the same between releases, because programs use them."""
    level: Level
    found: str
    """A sentence for people."""
    fix: str = ""
    """The fix, in one sentence; never empty for a warning or an error."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs, as JSON values; bytes and seconds without prefixes."""
    check: str = ""
    """The group of the finding, such as versions. `guarded` sets it."""
    node: str = ""
    """The machine of the finding; empty for a finding about all machines."""

    def __post_init__(self) -> None:
        assert self.fix or self.level in ("ok", "note"), f"{self.name}: no fix"


def guarded(group: str, check: Callable[[], Iterable[Finding]], name: str = "", fix: str = "") -> list[Finding]:
    """Return the findings of one check, as findings of a group.

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
        note = Finding(group, "note", f"this could not be checked: {message}")
        found.append(Finding(name, "error", message, fix) if fix else note)
    except Exception as error:
        message = f"the check itself failed: {type(error).__name__}: {error}"
        found.append(Finding(group, "warning", message, "check this by hand, and report this line as a bug"))
    return [replace(finding, check=group) for finding in found]
