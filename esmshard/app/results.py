"""Pictures and tables of a job, from the files that its commands have written, in the style of the report."""

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.app.jobs import Job
from esmshard.data.labels.coordinates import MIN_SEPARATION
from esmshard.data.structures.chains import is_structure_name, read_chains
from esmshard.errors import InputError
from esmshard.io.paths import read_json
from esmshard.io.tables import read_table
from esmshard.predict import pictures
from esmshard.report import charts
from esmshard.report.charts import Values, chart
from esmshard.report.page import number
from esmshard.tasks.metrics import Interval
from esmshard.train.run_dir import is_step, metrics_of

BEST = 20
"""The number of rows in a table of results."""
MOST_POINTS, MOST_COLOURS = 20_000, 12
"""The maximum number of proteins, and of colours, in a picture of embeddings."""
MOST_PROTEINS = 20
"""The maximum number of proteins whose residues are coloured."""
MOST_MAPS = 1_000
"""The maximum number of contact maps to choose from."""
MOST_PAIRS = 2_000
"""The maximum number of pairs that are drawn on a structure."""


def of(job: Job) -> dict[str, Any]:
    """Return what the page shows of a job: `progress`, `verdict` (of a run), `figures` (source, text, whole width),
    `tables` (head, rows, text), `residues` (proteins whose residues have colours) and their `legend`, `maps` (records
    of contact maps, and whether there are structures), `report` (whether there is one), and `problem` (a sentence about
    a picture that is not possible).
    """
    shown: dict[str, Any] = {"figures": [], "tables": [], "residues": [], "legend": {}, "maps": None}
    shown |= dict.fromkeys(("progress", "verdict", "problem"), "")
    shown["report"] = (job.directory / "run" / "report.html").is_file()
    if job.state == "running":
        steps = re.findall(r"^([a-z][\w ,]*? \d[\d,]*/\d[\d,]*.*)$", job.log, re.MULTILINE)
        shown["progress"] = steps[-1] if steps else ""
        metrics = sorted(job.directory.glob("run/**/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
        if metrics:
            lines = list(metrics_of(metrics[-1].parent))
            of_kind = {
                "training": filter(is_step, lines),
                "validation": (x for x in lines if x.get("split") == "valid"),
            }
            points = {name: [(x["step"], number(x.get("loss"))) for x in each] for name, each in of_kind.items()}
            curves = {name: tuple(np.array(each, dtype=float).T) for name, each in points.items() if each}
            if curves:
                text = f"Loss of {metrics[-1].parent.name}."
                shown["figures"].append((chart(charts.curves, "loss", curves), text, False))
    elif job.state == "done" or (job.state == "failed" and job.step):
        try:
            _RESULTS[job.kind](job, shown)
        except InputError as error:
            shown["problem"] = str(error)
        except FileNotFoundError:
            if job.state == "done":
                raise
    return shown


def _rank(job: Job, shown: dict[str, Any]) -> None:
    rows = _rows(job.directory / "run" / "ranked.csv")
    shown["verdict"] = read_json(job.directory / "run" / "summary.json")["verdict"]
    of_best = {row["mutant"]: _interval(row) for row in rows[:BEST]}
    text = (
        f"The {len(of_best)} best predicted substitutions. Lines are the limits of 90% of the errors on other folds, "
    )
    text += "for substitutions at positions that were varied in training."
    shown["figures"].append((chart(charts.intervals, of_best, "", "prediction", height=5, width=5), text, False))
    if (job.directory / "plate.csv").is_file():
        plate = [row for row in _rows(job.directory / "plate.csv") if row["well"].rpartition("-")[0] in ("", "1")]
        wells = {row["well"].rpartition("-")[2]: (row["mutant"], number(row["prediction"])) for row in plate}
        text = "The first 96-well plate: the variants to measure next, coloured by prediction. plate.csv has all."
        shown["figures"].append((chart(draw_plate, wells, height=4.2, width=10), text, True))


def _interval(row: Mapping[str, str]) -> Interval:
    return Interval(*(number(row.get(name)) for name in ("prediction", "low 90%", "high 90%")))


def draw_plate(axes: Any, wells: Mapping[str, tuple[str, float]]) -> None:
    """Draw the 96 wells of a plate, with the name and, as colour, the value of the variant in each well."""
    places = [(int(well[1:]), "ABCDEFGH".index(well[0])) for well in wells]
    values = np.array([value for _, value in wells.values()])
    x_N, y_N = np.array(places).reshape(-1, 2).T
    dots = axes.scatter(x_N, y_N, s=650, c=values, cmap="viridis", edgecolors=charts.GREY, linewidths=0.5)
    column_N, row_N = np.indices((12, 8)).reshape(2, -1)
    axes.scatter(column_N + 1, row_N, s=650, c="none", edgecolors=charts.GREY, linewidths=0.3)
    middle = float(np.nanmin(values) + np.nanmax(values)) / 2 if np.isfinite(values).any() else 0.0
    for (x, y), (name, value) in zip(places, wells.values(), strict=True):
        lines = name if len(name) < 8 else name.replace(":", "\n")
        axes.text(x, y, lines, ha="center", va="center", fontsize=5.5, color="white" if value < middle else "black")
    axes.set(xlim=(0.4, 12.6), ylim=(7.6, -0.6))
    axes.set_xticks(range(1, 13))
    axes.set_yticks(range(8), list("ABCDEFGH"))
    axes.grid(visible=False)
    axes.figure.colorbar(dots, ax=axes, label="prediction", pad=0.01)


def _labels(job: Job, shown: dict[str, Any]) -> None:
    if not job.values["task"].startswith("residue"):
        return
    of_protein: dict[str, list[dict[str, str]]] = {}
    for row in _rows(job.directory / "predictions.csv"):
        of_protein.setdefault(row["id"], []).append(row)
    every = [row["prediction"] for rows in of_protein.values() for row in rows]
    if all(np.isfinite(number(value)) for value in every):
        low, high = np.percentile([number(value) for value in every], [2, 98])
        colours = {
            x: f"{charts.ORANGE}{int(255 * np.clip((number(x) - low) / (high - low or 1), 0, 1)):02x}" for x in every
        }
        shown["legend"] = {f"{low:.3g} or less": f"{charts.ORANGE}00", f"{high:.3g} or more": f"{charts.ORANGE}ff"}
    else:
        names = sorted(set(every))
        colours = {name: f"hsl({360 * n / len(names):.0f} 70% 55% / 0.5)" for n, name in enumerate(names)}
        shown["legend"] = colours
    shown["residues"] = [
        (
            name,
            [(row["residue"], colours[row["prediction"]], f"{row['position']}: {row['prediction']}") for row in rows],
        )
        for name, rows in list(of_protein.items())[:MOST_PROTEINS]
    ]


def _embed(job: Job, shown: dict[str, Any]) -> None:
    from sklearn.decomposition import PCA

    ids, x_ND = _embeddings(job.directory / f"embeddings.{job.values['format']}")
    if len(ids) < 3:
        return
    pca = PCA(2, random_state=0)
    xy_N2 = pca.fit_transform(x_ND)
    groups, text = [""] * len(ids), ""
    if column := job.values["colour"]:
        table = read_table(Path(job.directory.parents[1], job.values["data"]))
        key = "id" if "id" in table.columns else next(iter(table.columns))
        of_id = dict(zip(table.column(key), table.column(column, "name another column"), strict=True))
        groups = [of_id.get(name, "") for name in ids]
        text = f", coloured by {column}"
    first, second = pca.explained_variance_ratio_
    shares = f"{first:.0%} and {second:.0%} of the variance"
    source = chart(draw_points, xy_N2, groups, height=4.5, width=7)
    shown["figures"].append((source, f"{len(ids):,} proteins on two principal components ({shares}){text}.", True))


def _embeddings(path: Path) -> tuple[list[str], Values]:
    """Read the ids and vectors of at most MOST_POINTS proteins from an output of `embed --pool mean`, [N, D]."""
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row, _ in zip(csv.reader(file), range(MOST_POINTS + 1), strict=False)][1:]
        return [row[0] for row in rows], np.array([row[1:] for row in rows], dtype=np.float64)
    if path.suffix == ".npz":
        arrays: Any = np.load(path)
    else:
        import h5py

        arrays = h5py.File(path)
    with arrays:
        ids = list(arrays)[:MOST_POINTS]
        return ids, np.array([arrays[name][()] for name in ids], dtype=np.float64)


def draw_points(axes: Any, xy_N2: Values, groups: Sequence[str]) -> None:
    """Draw a point for each protein. Numbers in `groups` become a colour scale, and other texts get a colour each."""
    values = np.array([number(group) for group in groups])
    if np.isfinite(values).any():
        dots = axes.scatter(*xy_N2.T, s=12, c=values, cmap="viridis", linewidths=0)
        axes.figure.colorbar(dots, ax=axes)
    else:
        names, counts = np.unique(groups, return_counts=True)
        common = names[np.argsort(-counts, kind="stable")][:MOST_COLOURS]
        for n, name in enumerate((*common, None) if len(names) > len(common) else common):
            chosen = [group not in common if name is None else group == name for group in groups]
            colour, marker = charts.METHODS[n % len(charts.METHODS)]
            label = "others" if name is None else name
            axes.scatter(*xy_N2[chosen].T, s=12, color=colour, marker=marker, linewidths=0, alpha=0.7, label=label)
        if len(names) > 1:
            axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set(xlabel="first component", ylabel="second component")


def _score(job: Job, shown: dict[str, Any]) -> None:
    source = charts.data_uri((job.directory / "map.png").read_bytes(), "png")
    shown["figures"].append((source, "The score of each single substitution. A dot marks the protein's letter.", True))
    head, *rows = _csv(job.directory / "scores.csv")
    best = sorted(rows, key=lambda row: -number(row[1]))[:BEST]
    shown["tables"].append((head, best, f"The {len(best)} best of {len(rows):,} substitutions."))


def _plan(job: Job, shown: dict[str, Any]) -> None:
    plan = json.loads(job.output)
    rows = [
        (option["layout"]["strategy"] + ", checkpointing " + option["layout"]["activation_checkpointing"], option)
        for option in plan["options"][:10]
    ]
    memory = {name: option["memory"] for name, option in rows}
    height = 1.6 + 0.4 * len(memory)
    text = f"Memory of a GPU by part; the line is what the GPU has. {plan['reason'] or ''}"
    source = chart(draw_memory, memory, plan["room_bytes"], height=height, width=10)
    shown["figures"].append((source, text, True))
    if plan["best"]:
        shown["tables"].append((["settings of the best option"], [[key] for key in plan["keys"]], ""))


def draw_memory(axes: Any, options: Mapping[str, Mapping[str, Any]], room: float) -> None:
    """Draw the memory of each option as a bar of its parts, in GiB. `room` is the memory of the GPU in bytes."""
    parts = ("parameters", "gradients", "optimizer", "gathered", "activations", "head", "workspace")
    colours = (*(colour for colour, _ in charts.METHODS), "#444b54")
    for place, memory in enumerate(reversed([*options.values()])):
        start = 0.0
        for part, colour in zip(parts, colours, strict=True):
            width = memory[part] / 2**30
            axes.barh(place, width, left=start, color=colour, label=part if place == 0 else None)
            start += width
    axes.axvline(room / 2**30, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(options)), [*options][::-1])
    axes.set_xlabel("GiB")
    axes.legend(fontsize="small", frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.4, 1.0))


def _contacts(job: Job, shown: dict[str, Any]) -> None:
    with np.load(job.directory / "contacts.npz") as maps:
        names = maps.files
    shown["maps"] = {"records": {name: _usual_threshold(_map(job, name)) for name in names[:MOST_MAPS]}}
    shown["maps"]["structures"] = bool(_structures(job))


def _usual_threshold(map_LL: npt.NDArray[np.float32]) -> float:
    """Return the probability of the L-th best pair of L residues, because proteins have some L contacts."""
    best = np.sort(map_LL[np.triu_indices(len(map_LL), MIN_SEPARATION)])[-len(map_LL) :]
    return float(np.floor(best[0] * 100) / 100) if len(best) else 0.0


def contact_map(job: Job, record: str, threshold: float) -> bytes:
    """Return a PNG picture of the pairs of a record whose probability is at least the threshold."""
    map_LL = _map(job, record)
    shown_LL = np.where(map_LL >= threshold, map_LL, 0.0).astype(np.float32)
    return pictures.draw(shown_LL, record, note=f"pairs with a probability of at least {threshold:.2f}")


def pairs(job: Job, record: str, threshold: float) -> dict[str, Any]:
    """Return the pairs of a record whose probability is at least the threshold, the highest first, and where the
    record is in a structure file: residue numbers from 1, positions of CA in Angstrom, and the file's address.
    """
    map_LL = _map(job, record)
    far_LL = np.triu(map_LL, MIN_SEPARATION)
    i_K, j_K = np.nonzero(far_LL >= max(threshold, 1e-6))
    order_K = np.argsort(-map_LL[i_K, j_K], kind="stable")[:MOST_PAIRS]
    found: dict[str, Any] = {"count": len(i_K), "pairs": [], "structure": None}
    ca_L3: npt.NDArray[np.float32] | None = None
    for path in _structures(job):
        for chain in read_chains(path):
            if chain.id == record and len(chain.sequence) == len(map_LL):
                ca_L3 = chain.backbone_L33[:, 1]
                found["structure"] = f"data/{path.name}"
    for i, j in zip(i_K[order_K].tolist(), j_K[order_K].tolist(), strict=True):
        pair: dict[str, Any] = {"i": i + 1, "j": j + 1, "p": round(float(map_LL[i, j]), 3)}
        if ca_L3 is not None and np.isfinite(ca_L3[[i, j]]).all():
            pair["ends"] = [dict(zip("xyz", end, strict=True)) for end in ca_L3[[i, j]].tolist()]
        found["pairs"].append(pair)
    return found


def _map(job: Job, record: str) -> npt.NDArray[np.float32]:
    with np.load(job.directory / "contacts.npz") as maps:
        map_LL: npt.NDArray[np.float32] = maps[record]
        return map_LL


def _structures(job: Job) -> list[Path]:
    given = Path(job.directory.parents[1], job.values["data"])
    paths = sorted(given.iterdir()) if given.is_dir() else [given]
    # 3Dmol.js reads no compressed files.
    return [
        path
        for path in paths
        if is_structure_name(path.name) and path.suffix.lower() not in (".gz", ".bz2", ".xz", ".zst")
    ]


def _csv(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def _rows(path: Path) -> list[dict[str, str]]:
    head, *rows = _csv(path)
    return [dict(zip(head, row, strict=True)) for row in rows]


_RESULTS: dict[str, Callable[[Job, dict[str, Any]], None]] = {
    "rank": _rank,
    "contacts": _contacts,
    "labels": _labels,
    "embed": _embed,
    "score": _score,
    "plan": _plan,
}
