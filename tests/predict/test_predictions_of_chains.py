"""Tables and pictures of records with several chains: residues are counted in each chain."""

from pathlib import Path

import numpy as np
import pytest

from esmshard.predict.contact_pictures import draw_map, matplotlib_figure
from esmshard.writers import CsvWriter, ParquetWriter

VALUES = np.array([[0.1], [0.2], [0.3], [0.4], [0.5]], dtype=np.float32)
LINES = [("a", 1, 1, "M"), ("a", 1, 2, "K"), ("a", 2, 1, "T"), ("a", 2, 2, "V"), ("a", 2, 3, "L"), ("b", 1, 1, "G")]


def test_a_csv_counts_residues_in_each_chain(tmp_path: Path) -> None:
    with CsvWriter(tmp_path / "x.csv", ["y"], per_residue=True, choose=False, chains=True) as writer:
        writer.add("a", VALUES, "MK:TVL")
        writer.add("b", VALUES[:1], "G")
    rows = [line.split(",") for line in (tmp_path / "x.csv").read_text().splitlines()]
    assert rows[0] == ["id", "chain", "position", "residue", "y"]
    assert [tuple(row[:4]) for row in rows[1:]] == [tuple(map(str, line)) for line in LINES]
    assert [float(row[4]) for row in rows[1:]] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.1])


def test_a_parquet_file_too(tmp_path: Path) -> None:
    from pyarrow import parquet

    out = tmp_path / "x.parquet"
    with ParquetWriter(out, ["y"], per_residue=True, choose=False, chains=True, about={}) as writer:
        writer.add("a", VALUES, "MK:TVL")
        writer.add("b", VALUES[:1], "G")
    rows = parquet.read_table(out).to_pylist()
    assert [(row["id"], row["chain"], row["position"], row["residue"]) for row in rows] == LINES


def test_without_such_records_there_is_no_column_of_chains(tmp_path: Path) -> None:
    with CsvWriter(tmp_path / "x.csv", ["y"], per_residue=True, choose=False) as writer:
        writer.add("a", VALUES[:2], "MK")
    assert (tmp_path / "x.csv").read_text().splitlines() == ["id,position,residue,y", "a,1,M,0.1", "a,2,K,0.2"]


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
