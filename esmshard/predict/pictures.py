"""Draws maps with matplotlib (install the extra `plots`): residue pairs of a record, and substitutions of a protein."""

import io
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.labels.coordinates import MIN_SEPARATION
from esmshard.data.mutations import Mutation
from esmshard.errors import InputError, UsageError
from esmshard.io.paths import scratch_directory

LEAST_DPI = 140
INCHES = 3.8  # the side of the map in a picture of 5.0 x 4.5 inches
SIDE = 2400
"""The maximum number of pixels along a side of a map. For a longer protein, each pixel shows the highest probability in
a square of pairs, so that no contact is lost."""
HIT, MISSED, WRONG = "#0072b2", "0.72", "#d55e00"
"""The colours of predicted contacts, missed contacts (grey) and wrong predictions; palette of Okabe and Ito."""

LETTERS = "GAVLIMCFYWPSTNQHKRDE"
"""The rows of a substitution map, in groups of amino acids: aliphatic, aromatic, proline, polar, positive, negative."""
BLOCK = 100
"""The maximum number of positions in one block of a substitution map."""


def check(folder: Path, *, overwrite: bool) -> None:
    """Raise `UsageError` if `folder` is a file or (without `overwrite`) not empty, or if matplotlib is missing."""
    matplotlib_figure()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; name a directory for the pictures")
    if folder.is_dir() and not overwrite and any(folder.iterdir()):
        raise UsageError(f"{folder}: is not empty; choose another directory or pass --overwrite")


def matplotlib_figure() -> tuple[Any, Any]:
    """Return matplotlib's `Figure` and a context with drawing settings. Raises `UsageError` without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("a figure needs matplotlib; pip install 'esmshard[plots]'") from None
    # Without `parse_math`, a dollar sign in an id does not begin a formula.
    settings: Any = {"text.parse_math": False, "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "esmshard"}
    return Figure, matplotlib.rc_context(settings)


def colours() -> Any:
    """Return the colour map for probabilities: white for 0 and for pairs without a prediction, dark blue for 1."""
    from matplotlib.colors import LinearSegmentedColormap

    blues = ["#ffffff", "#9ecae1", "#4292c6", "#08519c", "#08306b"]
    return LinearSegmentedColormap.from_list("contacts", blues).with_extremes(bad="white")


def file_name(record_id: str, taken: set[str]) -> str:
    """Return the file name for the picture of a record, and add it to `taken`. Two names never differ only in case.

    >>> taken = set()
    >>> [file_name(record_id, taken) for record_id in ("sp|P1|N", "a/b", "a_b", "A_B", "..")]
    ['sp_P1_N.png', 'a_b.png', 'a_b_2.png', 'A_B_3.png', '_..png']
    """
    base = re.sub(r"[^A-Za-z0-9._-]", "_", record_id)[:80]
    if base.startswith("."):
        base = f"_{base[1:]}"  # A name that begins with `.` is a hidden file, or the folder `..`.
    name, count = base, 1
    while name.lower() in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name.lower())
    return f"{name}.png"


@contextmanager
def collected(folder: Path) -> Iterator[Callable[[str, bytes], object]]:
    """Provide a function that saves a picture under an id. If the `with` block fails, `folder` gets no picture."""
    # An existing directory may be another disk, and files cannot be renamed from one disk to another.
    with scratch_directory(folder / "pictures" if folder.is_dir() else folder) as work:
        taken = set[str]()
        yield lambda record_id, picture: (work / file_name(record_id, taken)).write_bytes(picture)
        folder.mkdir(exist_ok=True)
        for path in work.iterdir():
            path.replace(folder / path.name)


def draw(
    probability_LL: npt.NDArray[np.float32],
    record_id: str,
    labels_LL: npt.NDArray[np.int8] | None = None,
    note: str = "",
    chains: Sequence[int] = (),
) -> bytes:
    """Draw the map of one record, with the id as title, and return the content of a PNG file.

    Residues are counted from 1. Without labels, all proteins have the same colour scale: probability 0 is white, and 1
    is dark blue. Pairs fewer than six residues apart in a chain are white, since contact heads are not trained on them.

    Args:
        probability_LL: the predicted probability of each pair.
        record_id: the id of the protein; also the metadata `Title` of the file.
        labels_LL: true contacts, drawn below the diagonal. Predictions are then drawn only above the diagonal.
        note: the second line of the title.
        chains: the number of residues of each chain. Lines divide the chains, and residues are counted in each chain.
    """
    figure_of, settings = matplotlib_figure()
    with settings:
        dpi = max(LEAST_DPI, min(len(probability_LL), SIDE) / INCHES)
        figure = figure_of(figsize=(5.0, 4.5 if labels_LL is None else 5.0), layout="constrained", dpi=dpi)
        axes = figure.add_subplot()
        image = draw_map(axes, probability_LL, labels_LL, chains)
        title = record_id if len(record_id) <= 60 else f"{record_id[:59]}\N{HORIZONTAL ELLIPSIS}"
        axes.set_title(f"{title}\n{note}" if note else title, fontsize="medium")
        label = "predicted probability" + ("" if labels_LL is None else " (upper triangle)")
        figure.colorbar(image, ax=axes, label=label, shrink=0.85)
        out = io.BytesIO()
        figure.savefig(out, format="png", facecolor="white", metadata={"Title": record_id})
    return out.getvalue()


def draw_map(
    axes: Any,
    probability_LL: npt.NDArray[np.float32],
    labels_LL: npt.NDArray[np.int8] | None = None,
    chains: Sequence[int] = (),
) -> Any:
    """Draw a map on empty axes of matplotlib, and return the image; see `draw` for the arguments.

    If `labels_LL` is given, the colour scale ends at the highest probability. Coloured squares below the diagonal then
    show true contacts, and the L labelled pairs with the highest probabilities (for L residues).
    """
    length = len(probability_LL)
    apart_LL = np.arange(length) - np.arange(length)[:, None]
    chain_L = np.repeat(np.arange(len(chains)), chains) if chains else np.zeros(length, dtype=np.int64)
    least_LL = np.where(chain_L == chain_L[:, None], MIN_SEPARATION, 1)
    far_LL = (np.abs(apart_LL) if labels_LL is None else apart_LL) >= least_LL
    top = 1.0 if labels_LL is None else max(0.1, float(probability_LL[far_LL].max(initial=0.0)))
    shown_SS = np.where(far_LL, probability_LL, np.nan).astype(np.float32)
    starts = np.arange(0, length, -(-length // SIDE))
    for axis in (0, 1) if length > SIDE else ():
        shown_SS = np.fmax.reduceat(shown_SS, starts, axis=axis)
    edges = (0.5, length + 0.5, length + 0.5, 0.5)
    image = axes.imshow(shown_SS, cmap=colours(), vmin=0, vmax=top, extent=edges, interpolation="nearest")
    axes.locator_params(integer=True)
    axes.set_xlabel("residue")
    axes.set_ylabel("residue")
    if len(chains) > 1:
        _divide(axes, chains)
    if labels_LL is None:
        return image
    i_K, j_K = np.nonzero(far_LL & (labels_LL >= 0))
    true_K = labels_LL[i_K, j_K] == 1
    hit_K = np.zeros(len(i_K), dtype=bool)
    hit_K[np.argsort(-probability_LL[i_K, j_K], kind="stable")[:length]] = True
    side = float(np.clip(340 / max(length, 1), 1.2, 5))  # the size of a pair in points, within limits
    for chosen_K, colour, label in (
        (true_K & ~hit_K, MISSED, "contact, not among the L best"),
        (~true_K & hit_K, WRONG, "L best, no contact"),
        (true_K & hit_K, HIT, "L best, contact"),
    ):
        axes.scatter(i_K[chosen_K] + 1, j_K[chosen_K] + 1, s=side**2, c=colour, marker="s", linewidths=0, label=label)
    legend = axes.figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    for handle in legend.legend_handles:
        handle.set_sizes([25])
    return image


def _divide(axes: Any, chains: Sequence[int]) -> None:
    """Draw lines between the chains, and label the ticks of each chain with residue numbers from 1."""
    from matplotlib.ticker import MaxNLocator

    total = sum(chains)
    step = max(10, int(np.diff(MaxNLocator(16, steps=[1, 2, 5, 10]).tick_values(0, total))[0]))
    ticks, names, start = list[int](), list[str](), 0
    for k, length in enumerate(chains, 1):
        if start:
            axes.axvline(start + 0.5, color="black", linewidth=0.8)
            axes.axhline(start + 0.5, color="black", linewidth=0.8)
        # The first residue's label is long, since it has the chain's number. It would cover a tick just before it.
        inner = range(step, length + 1 - step // 2, step)
        ticks += [start + place for place in (1, *inner)]
        names += [f"{k}: 1", *map(str, inner)]
        start += length
    axes.set_xticks(ticks, names, rotation=90)
    axes.set_yticks(ticks, names)
    axes.set_xlabel("chain: residue")
    axes.set_ylabel("chain: residue")


def substitution_grid(
    mutations: Sequence[Mutation], values: Sequence[float] | npt.NDArray[np.float64], first: int, last: int
) -> npt.NDArray[np.float64]:
    """Arrange the values of single substitutions at the positions `first` to `last` in an array, float64 [A, P], with a
    row for each of LETTERS. Missing values are NaN.
    """
    grid_AP = np.full((len(LETTERS), last - first + 1), np.nan)
    for mutation, value in zip(mutations, values, strict=True):
        if first <= mutation.position <= last and mutation.mutant in LETTERS:
            grid_AP[LETTERS.index(mutation.mutant), mutation.position - first] = value
    return grid_AP


def draw_substitutions(
    protein: str,
    mutations: Sequence[Mutation],
    value_N: npt.NDArray[np.float64],
    chosen: Collection[Mutation],
    label: str,
) -> bytes:
    """Draw the values of N single substitutions of a protein, and return the content of a PNG file.

    The map has the positions from the first to the last substitution. Crosses mark the `chosen` substitutions, and the
    colour scale ends at the 2nd and the 98th percentile. `label` says what the values are.
    """
    places = [mutation.position for mutation in mutations]
    first, last = min(places), max(places)
    wild_P = np.array([LETTERS.find(letter) for letter in protein[first : last + 1]])
    limits = np.percentile(value_N, [2, 98]).tolist()
    figure_of, settings = matplotlib_figure()
    with settings:
        lines = -(-len(wild_P) // BLOCK)
        figure = figure_of(figsize=(10, 0.3 + 2.3 * lines), layout="constrained", dpi=LEAST_DPI)
        grid_AP = substitution_grid(mutations, value_N, first, last)
        draw_substitution_map(figure, grid_AP, first + 1, wild_P, LETTERS, (limits[0], limits[1]), label)
        for axes in figure.axes[:lines]:
            marks = [(m.position + 1, LETTERS.index(m.mutant)) for m in chosen]
            axes.plot(*np.array(marks).reshape(-1, 2).T, "x", color=WRONG, markersize=5, markeredgewidth=1.5)
        out = io.BytesIO()
        figure.savefig(out, format="png", facecolor="white")
    return out.getvalue()


def draw_substitution_map(
    figure: Any,
    value_AP: npt.NDArray[np.float64],
    first: int,
    wild_P: npt.NDArray[np.int64],
    letters: str,
    limits: tuple[float, float],
    label: str,
) -> None:
    """Draw a substitution map on an empty figure of matplotlib. Letters are rows, positions are columns, and a long
    protein is divided into blocks, one below the other.

    Args:
        figure: the figure.
        value_AP: the value of each letter at each position; NaN for a missing value.
        first: the number of the first position.
        wild_P: the row of the wild type's letter at each position, which gets a dot; -1 if unknown.
        letters: the A letters of the rows.
        limits: the values at the ends of the colour scale.
        label: the label of the colour scale.
    """
    positions = value_AP.shape[1]
    lines = -(-positions // BLOCK)
    width = -(-positions // lines)
    blocks = figure.subplots(lines, squeeze=False)[:, 0]
    for line, axes in enumerate(blocks):
        begin, end = first + line * width, first + min((line + 1) * width, positions)
        part = slice(begin - first, end - first)
        image = axes.imshow(
            np.ma.masked_invalid(value_AP[:, part]),
            extent=(begin - 0.5, end - 0.5, len(letters) - 0.5, -0.5),
            vmin=limits[0],
            vmax=limits[1],
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
        )
        known = wild_P[part] >= 0
        axes.plot(np.arange(begin, end)[known], wild_P[part][known], "k.", markersize=3)
        axes.set_xlim(begin - 0.5, begin + max(width, BLOCK // 3) - 0.5)  # limits the width of a cell
        axes.set_yticks(range(len(letters)), list(letters))
        axes.grid(visible=False)
        axes.set_facecolor("0.8")  # The grey is visible where a substitution has no value.
        axes.tick_params(length=0, labelsize=6.5)
    bar = figure.colorbar(image, ax=blocks, extend="both", pad=0.01, fraction=0.02, label=label)
    bar.solids.set_rasterized(True)
