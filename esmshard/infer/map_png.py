"""Pair maps as pictures, one PNG a record, drawn with matplotlib (extra `plots`)."""

import io
import re
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.structures import MIN_SEPARATION
from esmshard.errors import InputError, UsageError

LEAST_DPI = 140
INCHES = 3.8
"""About the side of the map in a picture of 5.0 x 4.5 inches."""
SIDE = 2400
"""Most pixels along a map. Of a longer protein each shows the highest probability of a square of pairs, or single
contacts would be lost between two pixels."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def check(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder in which there is something, unless told to, and a machine that cannot draw."""
    matplotlib_figure(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; name a directory for the pictures")
    if folder.is_dir() and not overwrite and any(folder.iterdir()):
        raise UsageError(f"{folder}: is not empty; choose another directory or pass --overwrite")


def matplotlib_figure(folder: Path) -> tuple[Any, Any]:
    """The class of figures, which needs no display, and matplotlib. `UsageError` without it."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(f"{folder}: drawing maps needs matplotlib; pip install 'esmshard[plots]'") from None
    return Figure, matplotlib


def colours() -> Any:
    """The colours of probabilities, for matplotlib: white for 0 and for what is not predicted."""
    from matplotlib.colors import LinearSegmentedColormap

    found = LinearSegmentedColormap.from_list("contacts", ["#ffffff", "#9ecae1", "#4292c6", "#08519c", "#08306b"])
    return found.with_extremes(bad="white")


class MapFolder:
    """A folder of `ID.png`. They come to lie there together, at the end; files of the same names are replaced.

    A context manager: leaving it with an error removes what was drawn.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._work = folder, folder / ".tmp-maps"
        self._made = not folder.exists()
        self._names = FileNames()

    def add(self, record_id: str, probability_LL: npt.NDArray[np.float32]) -> None:
        """Draw one record."""
        self.keep(record_id, draw(probability_LL, record_id))

    def keep(self, record_id: str, png: bytes) -> None:
        """A picture of a record that is drawn already."""
        (self._work / self._names.new(record_id)).write_bytes(png)

    def __enter__(self) -> "MapFolder":
        matplotlib_figure(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._work, ignore_errors=True)  # of a process that was killed
        self._work.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for picture in self._work.iterdir():
                    picture.replace(self._folder / picture.name)
        finally:
            shutil.rmtree(self._work, ignore_errors=True)
            if kind is not None and self._made:
                with suppress(OSError):  # somebody else has put something there
                    self._folder.rmdir()


class FileNames:
    """Names of files for ids: letters, digits and `._-`, at most 80 of them, all else as `_`; no two alike.

    >>> names = FileNames()
    >>> [names.new(one) for one in ("sp|P1|N", "a/b", "a_b", "A_B", "..")]
    ['sp_P1_N.png', 'a_b.png', 'a_b_2.png', 'A_B_3.png', '_..png']
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._alike: Counter[str] = Counter()

    def new(self, record_id: str) -> str:
        """The name of the next one."""
        base = _UNSAFE.sub("_", record_id)[:80]
        if base.startswith("."):
            base = f"_{base[1:]}"  # a hidden file otherwise, or a folder
        name = base
        # Some file systems hold a.png and A.png for one file.
        while name.lower() in self._taken:
            self._alike[base.lower()] += 1
            name = f"{base}_{self._alike[base.lower()] + 1}"
        self._taken.add(name.lower())
        return f"{name}.png"


def draw(probability_LL: npt.NDArray[np.float32], record_id: str) -> bytes:
    """A PNG of one map: white at 0, dark blue at 1 whatever the protein, residues counted from 1, the id as its title.

    Pairs fewer than six residues apart, of which no contact head learns anything, are white.

    The id stands whole under `Title` in the file's own text, where programs find it.
    """
    figure_of, matplotlib = matplotlib_figure(Path(record_id))
    length = len(probability_LL)
    place_L = np.arange(length)
    far_LL = np.abs(place_L[:, None] - place_L) >= MIN_SEPARATION
    shown = _coarse(np.where(far_LL, probability_LL, np.nan).astype(np.float32))
    # An id is text: matplotlib would read formulae between dollar signs.
    with matplotlib.rc_context({"text.parse_math": False, "font.size": 9}):
        figure = figure_of(figsize=(5.0, 4.5), layout="constrained", dpi=max(LEAST_DPI, len(shown) / INCHES))
        axes = figure.add_subplot()
        edges = (0.5, length + 0.5, length + 0.5, 0.5)
        image = axes.imshow(shown, cmap=colours(), vmin=0, vmax=1, extent=edges, interpolation="nearest")
        axes.locator_params(integer=True)
        axes.set_title(
            record_id if len(record_id) <= 60 else f"{record_id[:59]}\N{HORIZONTAL ELLIPSIS}", fontsize="medium"
        )
        axes.set_xlabel("residue")
        axes.set_ylabel("residue")
        figure.colorbar(image, ax=axes, label="predicted probability", shrink=0.85)
        out = io.BytesIO()
        figure.savefig(out, format="png", facecolor="white", metadata={"Title": record_id})
    return out.getvalue()


def _coarse(probability_LL: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The map, or its maxima over squares where it is longer than SIDE."""
    length = len(probability_LL)
    step = -(-length // SIDE)
    if step == 1:
        return probability_LL
    starts = np.arange(0, length, step)
    rows = np.fmax.reduceat(probability_LL, starts, axis=0)
    return np.asarray(np.fmax.reduceat(rows, starts, axis=1))
