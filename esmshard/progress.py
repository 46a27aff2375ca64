"""Progress on stderr: a live line on a terminal, otherwise, as in the log of a batch job, one line in a few seconds."""

import sys
import time
from collections import deque
from types import TracebackType

from rich.console import Console
from rich.markup import escape

INTERVAL = 5.0
"""The seconds between two lines if stderr is no terminal."""
_WINDOW = 60.0
"""The seconds of recent work from which the remaining time follows. The first unit is left out: it warms up."""


class Progress:
    """A counter up to `total` that prints the remaining time, from the second update on. With `show=False`, as on all
    ranks but the first, it prints nothing.

    >>> with Progress("embed", total=2, show=False) as progress:
    ...     progress.update(1, "10 residues/s")
    """

    def __init__(self, title: str, total: int, *, show: bool = True) -> None:
        self._title, self._total, self._show = title, total, show
        self._recent: deque[tuple[float, int]] = deque()  # times, at least a second apart, and units done by then
        self._last_line = -INTERVAL
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status(escape(title)) if show and self._console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self._status:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status:
            self._status.stop()

    def update(self, done: int, text: str) -> None:
        """Print that `done` of `total` are finished, with the text `text`. The last call always prints a line."""
        if not self._show:
            return
        now = time.monotonic()
        line = f"{self._title} {done}/{self._total}  {text}"
        if self._recent and self._recent[0][1] < done < self._total:
            since, before = self._recent[0]
            line += f"  {duration(max(1.0, (now - since) / (done - before) * (self._total - done)))} left"
        if not self._recent or now - self._recent[-1][0] >= 1:
            self._recent.append((now, done))
        while len(self._recent) > 2 and now - self._recent[1][0] >= _WINDOW:
            self._recent.popleft()
        if self._status:
            self._status.update(escape(printable(line)))
        if done == self._total or (not self._status and now - self._last_line >= INTERVAL):
            self._last_line = now
            say(line)


def say(message: str) -> None:
    """Print one line on stderr."""
    print(printable(message), file=sys.stderr, flush=True)


def printable(message: str) -> str:
    r"""Return a message with every control character escaped, since what it quotes of a file could steer a terminal.

    >>> printable("unknown key '\x1b[31mlr'")
    "unknown key '\\x1b[31mlr'"
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in message)


def duration(seconds: float) -> str:
    """Format seconds as `45s`, `12m05s` or `3h20m`; `?` if they are unknown.

    >>> duration(725), duration(12000)
    ('12m05s', '3h20m')
    """
    if not seconds >= 0 or seconds == float("inf"):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def rate(per_second: float) -> str:
    """Format a rate with three digits: `850`, `12.3k`, `1.20M`.

    >>> rate(12345)
    '12.3k'
    """
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if per_second >= factor:
            value = per_second / factor
            return f"{value:.{2 - (value >= 10) - (value >= 100)}f}{unit}"
    return f"{per_second:.0f}"
