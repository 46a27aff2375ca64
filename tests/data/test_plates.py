"""Several tables of variants as one: alignment of their values, places of rows, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esmshard.data.plates import read_plates
from esmshard.data.variants import Variants
from esmshard.errors import InputError

WT = "MKTAYIAKQRQISFVKSH"
FIRST = {"WT": 1.0, "K2A": 2.0, "T3A": 3.0, "Y5A": 4.0, "I6A": 5.0}


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, values: dict[str, Any], head: str = "mutant,score") -> Path:
    Path(name).write_text("".join(f"{line}\n" for line in (head, *(f"{k},{v}" for k, v in values.items()))))
    return Path(name)


def read(*paths: Path, align: Any = "shift", log: bool = False, **rules: Any) -> Variants:
    rules = {"replicates": "mean", "unusable": "drop", **rules}
    return read_plates(paths, wild_type=WT, align=align, log=log, **rules)


def values(variants: Variants) -> dict[str, float]:
    return dict(zip(variants.names(), variants.target_NT[:, 0].round(6).tolist(), strict=True))


def test_later_tables_are_shifted_by_the_median_of_shared_variants() -> None:
    one = write("r1.csv", FIRST)
    # Each value is 10 higher. One of the shared variants is far off, so a mean would be wrong.
    two = write("r2.csv", {**{k: v + 10 for k, v in FIRST.items()}, "I6A": 99, "K8A": 17, "A7W": 16, "Q9*": 1})
    three = write("r3.csv", {"K8A": 4, "R10A": 0})  # in common with the second table only
    variants = read(one, two, three)
    expected = FIRST | {"I6A": (5 + 89) / 2, "K8A": 7, "A7W": 6, "R10A": 3}
    assert values(variants) == expected
    assert [fact["shift"] for fact in variants.alignment] == [-10, 3]
    assert [fact["shared"] for fact in variants.alignment] == [5, 1]
    before, here = np.array([*FIRST.values()]), np.array([11, 12, 13, 14, 99])
    assert variants.alignment[0]["correlation"] == pytest.approx(np.corrcoef(before, here)[0, 1])
    assert variants.alignment[1]["correlation"] is None
    assert any(notice.startswith("r2.csv: values of 'score' were shifted by -10") for notice in variants.notices)
    assert variants.table.columns["plate"] == ["r1.csv"] * 5 + ["r2.csv"] * 8 + ["r3.csv"] * 2
    assert variants.left_out == {12: "a stop codon"}
    assert variants.left_out_groups == {"with a stop codon": [12]}
    assert [reading["file"] for reading in variants.readings] == ["r1.csv", "r2.csv", "r3.csv"]
    assert (variants.table.where(12), variants.table.at(13)) == ("r2.csv:9", "r3.csv line 2")
    assert values(read(one, two, align="none"))["K2A"] == 7
    with pytest.raises(InputError, match=r"r2\.csv line 3"):
        read(one, two, replicates="error")


def test_ratios_are_aligned_by_a_factor() -> None:
    two = write("r2.csv", {"WT": 4, "K2A": 8, "K8A": 40, "A7W": -1})
    variants = read(write("r1.csv", FIRST), two, log=True)
    assert values(variants) == FIRST | {"K8A": 10, "A7W": -0.25}
    assert variants.alignment[0]["factor"] == pytest.approx(0.25)


def test_each_target_and_each_numbering_is_aligned_alone() -> None:
    one = write("r1.csv", {"WT": "1,5", "K2A": "2,", "T3A": "3,7"}, "mutant,kd,tm")
    shifted = {"K12A": "4,1", "T13A": ",2", "Y15A": "6,3", "I16A": "7,", "K18A": "8,", "Q19A": "9,"}
    two = write("r2.csv", shifted, "mutation,kd,tm")
    variants = read(one, two, targets=["kd", "tm"], offset="auto")
    found = dict(zip(variants.names(), variants.target_NT.tolist(), strict=True))
    assert found["Y5A"] == [4, 8]
    assert found["T3A"] == [3, 7]
    assert found["K2A"] == [2, 6]
    assert [(fact["target"], fact["shift"]) for fact in variants.alignment] == [("kd", -2), ("tm", 5)]
    assert (variants.offset, len(variants.table.columns)) == (0, 5)


def test_tables_that_do_not_go_together() -> None:
    one = write("r1.csv", FIRST)
    with pytest.raises(InputError, match=r"r2\.csv: .*data\.align=none"):
        read(one, write("r2.csv", {"K8A": 1, "Y5A": ""}))
    with pytest.raises(InputError, match=r"r2\.csv: has values of 'fitness', but r1\.csv of 'score'"):
        read(one, write("r2.csv", FIRST, "mutant,fitness"))


def test_files_of_one_name_stay_apart() -> None:
    for folder in ("a", "b"):
        Path(folder).mkdir()
        write(f"{folder}/r.csv", FIRST)
    variants = read(Path("a/r.csv"), Path("b/r.csv"))
    assert variants.table.columns["plate"] == ["a/r.csv"] * 5 + ["b/r.csv"] * 5
