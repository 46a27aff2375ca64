"""Rows of a mutation table that cannot be used: left out and named, or refused; and how many are too many."""

from pathlib import Path

import pytest

from esmshard.data.variants import Variants, read_variants
from esmshard.errors import InputError

WT = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRV"
GOOD = [f"{WT[n]}{n + 1}{letter}" for n in range(20) for letter in "CG"]
"""Forty variants."""


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(*cells: str, good: int = 36, shift: int = 0, **settings: object) -> Variants:
    """Of good cells, and others behind them; all numbered from `shift` + 1."""
    shifted = [f"{cell[0]}{int(cell[1:-1]) + shift}{cell[-1]}" for cell in GOOD[:good]]
    rows = [f'"{cell}",{n}' for n, cell in enumerate([*shifted, *cells])]
    Path("v.csv").write_text("\n".join(["mutant,score", *rows]) + "\n")
    given = {"wild_type": WT, "unusable": "drop", **settings}
    return read_variants(Path("v.csv"), **given)  # type: ignore[arg-type]


def refused(*cells: str, **settings: object) -> str:
    with pytest.raises(InputError) as error:
        read(*cells, **settings)  # type: ignore[arg-type]
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def test_cells_that_name_no_substitution_are_left_out_and_named() -> None:
    found = read("K2del", "hello", "K2del", "A4fs")
    assert found.names() == GOOD[:36]
    assert found.target_NT[:, 0].tolist() == list(range(36))
    assert found.notices == [
        "v.csv: left out 4 rows whose 'mutant' names no substitutions: line 38 'K2del' is no substitution, line 39 "
        "'hello' is no substitution, line 40 'K2del' is no substitution, ...",
    ]


def test_another_residue_than_the_wild_type_has_is_left_out_and_named() -> None:
    found = read("A2G", "K2W:A3G", "K99A", "K2W")
    assert found.names() == [*GOOD[:36], "K2W"]
    assert found.notices == [
        "v.csv: left out 3 rows with another residue than the wild type has: line 38 A2G (the wild type has K), line "
        "39 A3G (the wild type has T), line 40 K99A (the wild type has no such position)"
    ]


@pytest.mark.parametrize(("good", "cells", "ok"), [(36, 4, True), (35, 4, False), (27, 3, True), (26, 3, False)])
@pytest.mark.parametrize("cell", ["K2del", "A2G"])
def test_more_than_a_tenth_is_an_error(good: int, cells: int, ok: bool, cell: str) -> None:
    if ok:
        assert len(read(*[cell] * cells, good=good)) == good
        return
    said = refused(*[cell] * cells, good=good)
    if cell == "K2del":
        assert said.startswith(f"v.csv: {cells} of {good + cells} cells of column 'mutant' cannot be used: line")
    else:
        assert said.startswith(f"v.csv: {cells} of {good + cells} mutations do not fit the wild type of 40 residues")


def test_rows_are_counted_and_not_their_mutations() -> None:
    """One row with three wrong residues of forty rows is one of forty."""
    assert len(read("A1G:A2G:A3G", *GOOD[37:40])) == 39
    assert len(read("A1G:A2G:A3G", "A5G:A6G", "A9G:A10G", "C1G:C2G")) == 36


def test_the_shift_is_found_although_rows_do_not_fit() -> None:
    found = read("A27G", "K2del", "W28A", shift=25, good=38, offset="auto")
    assert found.names() == GOOD[:38]
    assert found.notices[0].startswith("v.csv: left out 1 row whose 'mutant' names no substitutions: line 41 'K2del'")
    assert found.notices[1] == (
        "v.csv: 4 of 40 mutations fit the wild type as numbered, 38 fit when shifted by -25, which was done"
    )
    assert found.notices[2] == (
        "v.csv: left out 2 rows with another residue than the wild type has: line 40 A27G (the wild type has K), line "
        "42 W28A (the wild type has T)"
    )
    assert found.offset == -25
    assert found.names()[0] == GOOD[0]
    assert found.left_out == {
        38: "A27G (the wild type has K)",
        39: "'K2del' is no substitution",
        40: "W28A (the wild type has T)",
    }


def test_a_shift_that_too_few_fit_is_refused() -> None:
    said = refused(*["W28A"] * 5, shift=25, offset="auto")
    assert "36 fit when shifted by -25" in said
    assert "data.offset=-25" in said
    # By hand, what misfits in too many rows is refused under the given shift too.
    assert "5 of 41 mutations shifted by -25 do not fit" in refused(*["W28A"] * 5, shift=25, offset=-25)


def test_a_good_numbering_is_not_shifted() -> None:
    found = read("A2G", offset="auto")
    assert found.names() == GOOD[:36]
    assert [notice for notice in found.notices if "shifted" in notice] == []


def test_mutated_sequences_are_left_out_alike() -> None:
    rows = [f"{WT[:n]}W{WT[n + 1 :]},{n}" for n in range(10)]
    Path("s.csv").write_text("\n".join(["sequence,score", *rows, f"{WT[:-1]},0"]) + "\n")
    found = read_variants(Path("s.csv"), wild_type=WT, unusable="drop")
    assert found.names() == [f"{WT[n]}{n + 1}W" for n in range(10)]
    (notice,) = found.notices
    assert notice.startswith("s.csv: left out 1 row whose 'sequence' names no substitutions: line 12 ")


@pytest.mark.parametrize("settings", [{}, {"unusable": "error"}])
def test_by_default_one_row_is_an_error(settings: dict[str, str]) -> None:
    Path("v.csv").write_text("mutant,score\n" + "".join(f"{cell},1\n" for cell in [*GOOD, "K2del"]))
    with pytest.raises(InputError, match="1 of 41 cells of column 'mutant' cannot be used: line 42 'K2del' is no"):
        read_variants(Path("v.csv"), wild_type=WT, **settings)  # type: ignore[arg-type]
    Path("v.csv").write_text("mutant,score\n" + "".join(f"{cell},1\n" for cell in [*GOOD, "A2G"]))
    with pytest.raises(
        InputError,
        match=r"1 of 41 mutations do not fit the wild type.*: line 42 A2G \(the wild type has K",
    ):
        read_variants(Path("v.csv"), wild_type=WT, **settings)  # type: ignore[arg-type]
