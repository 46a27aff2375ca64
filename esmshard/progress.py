"""Show progress on stderr: a bar on a terminal, or a line every few seconds in the log of a batch job."""

import sys
import time
from types import TracebackType

INTERVAL = 5.0
"""The minimum number of seconds between two lines of progress, if stderr is no terminal."""


class Progress:
    """Counts finished items up to `total`, and shows the count and, from the second update on, the remaining time.

    With `show=False`, as on all ranks except the first, nothing is shown. The library rich estimates the remaining time
    from the latest 1,000 updates. It leaves out the first update, because the first item takes longer (warm-up).

    >>> with Progress("embed", total=2, show=False) as progress:
    ...     progress.update(1, "10 residues/s")
    """

    def __init__(self, title: str, total: int, *, show: bool = True) -> None:
        from rich import progress as bars  # This import takes a tenth of a second.
        from rich.console import Console
        from rich.table import Column

        console = Console(stderr=True, highlight=False)
        self._title, self._total, self._show = printable(title), total, show
        self._has_bar, self._last_line = show and console.is_interactive, -INTERVAL
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(16),
            bars.TaskProgressColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("left"),
            bars.TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=console,
            expand=True,  # A narrow terminal then cuts the text, not the bar.
            redirect_stdout=False,  # Otherwise stdout would be written to stderr.
            refresh_per_second=4,
            speed_estimate_period=float("inf"),
            get_time=time.monotonic,
        )
        self._bar.add_task(self._title, total=total, text="")
        self._task = self._bar.tasks[0]

    def __enter__(self) -> "Progress":
        if self._has_bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._has_bar:
            # The bar stays visible if the work is done or has failed, but not if there were fewer items than expected.
            self._bar.update(self._task.id, visible=self._task.finished or kind is not None)
            self._bar.stop()

    def update(self, done: int, text: str) -> None:
        """Show `text`, and that `done` of `total` items are finished. The last update always prints a line or a bar."""
        self._bar.update(self._task.id, completed=done, text=printable(text))
        now = time.monotonic()
        if self._show and not self._has_bar and (done == self._total or now - self._last_line >= INTERVAL):
            self._last_line, left = now, self._task.time_remaining
            say(f"{self._title} {done}/{self._total}  {text}" + (f"  {duration(left)} left" if left else ""))


def say(message: str) -> None:
    """Print one line on stderr, with control characters escaped."""
    print(printable(message), file=sys.stderr, flush=True)


def printable(message: str) -> str:
    r"""Escape every control character of a message, because text from a file could control the terminal.

    >>> printable("unknown key '\x1b[31mlr'")
    "unknown key '\\x1b[31mlr'"
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in message)


def duration(seconds: float) -> str:
    """Format a duration as `45s`, `12m05s` or `3h20m`; `?` if it is negative, infinite or NaN.

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
    """Format a rate with up to three digits, as `850`, `12.3k` or `1.20M`.

    >>> rate(12345)
    '12.3k'
    """
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if per_second >= factor:
            value = per_second / factor
            return f"{value:.{2 - (value >= 10) - (value >= 100)}f}{unit}"
    return f"{per_second:.0f}"
