"""Tables and pictures of records with several chains: residues are counted in each chain."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest

from esmshard.io.writers import TableWriter
from esmshard.predict.contact_pictures import draw_map, matplotlib_figure
from esmshard.predict.predictions import columns_of, rows_of

VALUES = np.array([[0.1], [0.2], [0.3], [0.4], [0.5]], dtype=np.float32)
LINES = [("a", 1, 1, "M"), ("a", 1, 2, "K"), ("a", 2, 1, "T"), ("a", 2, 2, "V"), ("a", 2, 3, "L"), ("b", 1, 1, "G")]


TASK: Any = SimpleNamespace(per_residue=True, names=["y"], one_of_names=False, settings=SimpleNamespace(pairs=False))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("chains", [True, False])
def test_residues_are_counted_in_each_chain(tmp_path: Path, ending: str, chains: bool) -> None:
    out = tmp_path / f"x.{ending}"
    with TableWriter(out, columns_of(TASK, chains=chains)) as writer:
        writer.add(rows_of(TASK, "a", VALUES, "MK:TVL"))
        writer.add(rows_of(TASK, "b", VALUES[:1], "G"))
    table = pandas.read_csv(out) if ending == "csv" else pandas.read_parquet(out)
    assert list(table.columns) == ["id", *(["chain"] if chains else []), "position", "residue", "y"]
    assert table.drop(columns="y").to_numpy().tolist() == [
        [name, *([chain] if chains else []), place, letter] for name, chain, place, letter in LINES
    ]
    assert table["y"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.1])


def test_a_target_with_the_name_of_a_column_is_called_predicted() -> None:
    task: Any = SimpleNamespace(**vars(TASK) | {"names": ["H", "id"]})
    assert list(columns_of(task, chains=False)) == ["id", "position", "residue", "H", "id (predicted)"]


def test_a_map_shows_where_the_second_chain_begins() -> None:
    figure, settings = matplotlib_figure()
    map_LL = np.full((90, 90), 0.5, np.float32)
    with settings:
        axes, alone = figure().add_subplot(), figure().add_subplot()
        image = draw_map(axes, map_LL, chains=[50, 40])
        draw_map(alone, map_LL)
    assert [line.get_xdata()[0] for line in axes.lines[::2]] == [50.5]
    assert [line.get_ydata()[0] for line in axes.lines[1::2]] == [50.5]
    ticks = [(int(x), text.get_text()) for x, text in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)]
    assert ticks == [
        *[(1, "1: 1"), (10, "10"), (20, "20"), (30, "30"), (40, "40")],
        *[(51, "2: 1"), (60, "10"), (70, "20"), (80, "30")],
    ]
    shown = np.ma.filled(image.get_array(), np.nan)
    assert np.isnan(shown[48, 49])  # neighbours of a chain
    assert shown[49, 50] == 0.5  # the last residue of the first chain and the first of the second
    assert not alone.lines
    assert alone.get_xlabel() == "residue"
