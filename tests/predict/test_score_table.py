"""Tables of variants with zero-shot scores beside them: what is kept, said and refused."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_files import TINY, edit_tensors, fair_esm, ours, perturb, write_transformers
from scipy import stats

from esmshard.data.mutations import parse_variant
from esmshard.data.variants import read_variants
from esmshard.errors import InputError, UsageError
from esmshard.model import weights
from esmshard.model.families.esm2 import ESM2
from esmshard.predict.zero_shot import score, score_table
from esmshard.vocab import STANDARD

WT = "MKTAYIAKQRQISFVKSHFSRQLE"
SINGLES = [f"{WT[n]}{n + 1}{letter}" for n in range(1, 12) for letter in "CW"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose LM head says different things everywhere, in a directory `model`, and the protein."""
    found = tmp_path_factory.mktemp("score")
    model = ours(fair_esm(TINY), TINY)
    perturb(model, deviation=0.3)
    write_transformers(found / "model", model, TINY)
    (found / "wt.fasta").write_text(f">wt\n{WT}\n")
    return found


@pytest.fixture(scope="module")
def model(directory: Path) -> ESM2:
    return weights.build(weights.read(str(directory / "model")), torch.device("cpu")).eval()


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(directory: Path, text: str | None, model: str = "model", **given: Any) -> tuple[str, list[dict[str, str]]]:
    table = None
    if text is not None:
        table = Path("v.csv")
        table.write_text(text)
    said = score_table(str(directory / model), directory / "wt.fasta", table, Path("out.csv"), **given)
    with open("out.csv", newline="", encoding="utf-8") as file:
        return said, list(csv.DictReader(file))


def expected(model: ESM2, names: list[str], *rest: Any) -> list[float]:
    return score(model, WT, [parse_variant(name) for name in names], *rest).tolist()


def test_columns_are_kept_and_the_correlation_is_said(directory: Path, model: ESM2) -> None:
    values = [0.5 * n for n in range(len(SINGLES))]
    cells = [f'{name},"a, {n}",{value}' for n, (name, value) in enumerate(zip(SINGLES, values, strict=True))]
    said, rows = run(directory, "\n".join(["mutant,note,DMS_score", *cells]) + "\n")
    assert list(rows[0]) == ["mutant", "note", "DMS_score", "masked_marginals", "not scored because"]
    assert [(row["mutant"], row["note"]) for row in rows] == [(name, f"a, {n}") for n, name in enumerate(SINGLES)]
    scores = expected(model, SINGLES)
    assert [float(row["masked_marginals"]) for row in rows] == pytest.approx(scores, abs=1e-4)
    pattern = r"out.csv: 22 variants; Spearman with DMS_score (\S+) \[(\S+), (\S+)\] \(95% over positions\) over 22"
    value, low, high = map(float, re.match(pattern, said).groups())  # type: ignore[union-attr]
    assert value == pytest.approx(stats.spearmanr(scores, values).statistic, abs=5e-4)
    assert low < value < high


def test_residues_that_are_none_of_the_20_have_no_score(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model finds any residue likelier than X, so that X11L would head every ranking."""
    (tmp_path / "x.fasta").write_text(f">x\n{WT[:10]}X{WT[11:18]}U\n")
    out, method = tmp_path / "x.csv", "wild-type-marginals"
    said = score_table(str(directory / "model"), tmp_path / "x.fasta", None, out, method=method)  # type: ignore[arg-type]
    assert said == f"{out}: {17 * 19} variants"
    with open(out, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    reasons = {row["mutant"]: row["not scored because"] for row in rows if not row["wild_type_marginals"]}
    assert {name[:-1] for name in reasons} == {"X11", "U19"}
    assert all("none of the 20" in reason for reason in reasons.values())
    facts = json.loads((tmp_path / "x.csv.json").read_text())
    assert "not scored: 40 variants" in facts["notices"][0]
    assert facts["notices"][0] in capsys.readouterr().err
    assert (facts["rows"], facts["scored"], facts["method"]) == (19 * 19 + 2, 17 * 19, method)


def test_other_methods_and_a_window_have_their_scores(directory: Path, model: ESM2) -> None:
    names = ["K2A", "WT", "T3A:A4G"]
    for method, window in (("wild-type-marginals", None), ("pseudo-perplexity", None), ("masked-marginals", 9)):
        text = "\n".join(["mutant", *names, ""])
        said, rows = run(directory, text, method=method, window=window, overwrite=True)
        assert said == "out.csv: 3 variants"
        found = [float(row[method.replace("-", "_")]) for row in rows]
        assert found == pytest.approx(expected(model, names, method, window), abs=1e-4)
        assert len(set(found)) == 3
    assert np.abs(np.array(found) - expected(model, names)).max() > 1e-3, "what lies beyond the window matters"


def test_the_column_of_values_may_be_named_and_have_gaps(directory: Path, model: ESM2) -> None:
    def message(column: str, values: list[str], target: str | None = None) -> str:
        rows = "".join(f"{name},{n},{v}\n" for n, (name, v) in enumerate(zip(SINGLES, values, strict=False)))
        return run(directory, f"mutant,x,{column}\n{rows}", target=target, overwrite=True)[0]

    rho = stats.spearmanr(expected(model, [SINGLES[n] for n in (0, 2, 4, 5)]), [3, 1, 2, 5]).statistic
    values = ["3", "", "1", "NA", "2", "5"]
    assert f"Spearman with score {rho:.3f} (no interval" in message("score", values)
    assert f"Spearman with kd {rho:.3f} (no interval" in message("kd", values, "kd")
    assert "Spearman" not in message("kd", values)
    for values in (["7", "7", "7"], ["1", "", ""]):
        assert "Spearman with score undefined" in message("score", values)
    with pytest.raises(InputError, match="column 'ki'"):
        message("kd", values, "ki")


def test_rows_that_cannot_be_scored_keep_their_place(
    directory: Path, model: ESM2, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = ["A4*", *SINGLES, "K2del", "T3T", "A2G", *SINGLES[:1]]
    said, rows = run(directory, "variant,score\n" + "".join(f"{cell},{n * 7 % 29}\n" for n, cell in enumerate(cells)))
    assert [row["variant"] for row in rows] == cells
    assert [n for n, row in enumerate(rows) if not row["masked_marginals"]] == [0, 23, 25]
    assert float(rows[24]["masked_marginals"]) == 0, "a synonymous change is the wild type"
    assert rows[26]["masked_marginals"] == rows[1]["masked_marginals"], "each of two replicates"
    assert [float(row["masked_marginals"]) for row in rows[1:23]] == pytest.approx(expected(model, SINGLES), abs=1e-4)
    values = [n * 7 % 29 for n, row in enumerate(rows) if row["masked_marginals"]]
    values = [(values[0] + values.pop()) / 2, *values[1:]]  # two rows of one variant
    rho = stats.spearmanr(expected(model, [*SINGLES, "WT"]), values).statistic
    assert said.startswith(f"out.csv: 24 rows of 23 variants; Spearman with score {rho:.3f} [")
    assert said.endswith("over 23 variants")
    message = capsys.readouterr().err
    assert all(token in message for token in ("'K2del'", "stop codon (line 2)", "line 27 A2G"))


def test_another_numbering_is_found_or_given(directory: Path, model: ESM2) -> None:
    shifted = [f"{name[0]}{int(name[1:-1]) + 100}{name[-1]}" for name in SINGLES]
    text = "\n".join(["mutant", *shifted, "A104*", "A104U"]) + "\n"
    for offset in ("auto", -100):
        _, (*rows, stop, rare) = run(directory, text, offset=offset, overwrite=True)
        assert [row["mutant"] for row in rows] == shifted, "in the user's numbering"
        found = [float(row["masked_marginals"]) for row in rows]
        assert found == pytest.approx(expected(model, SINGLES), abs=1e-4)
        assert (stop["masked_marginals"], rare["masked_marginals"]) == ("", "")
        assert "stop codon" in stop["not scored because"]
        assert "A4U" in rare["not scored because"]
        assert json.loads(Path("out.csv.json").read_text())["offset"] == -100
    with pytest.raises(InputError, match=r"data\.offset=-100"):
        run(directory, text, offset=5, overwrite=True)


def test_a_model_without_an_lm_head_is_refused(directory: Path) -> None:
    without = Path(shutil.copytree(directory / "model", directory / "headless"))
    edit_tensors(without, lambda state: [state.pop(name) for name in list(state) if name.startswith("lm_head")])
    with pytest.raises(InputError, match="headless: has no trained LM head"):
        run(directory, "mutant\nK2A\n", "headless")
    assert not Path("out.csv").exists()


def test_a_first_plate_is_proposed(directory: Path, model: ESM2) -> None:
    said, rows = run(directory, None, propose=6, sites="1,2,3,20", png=Path("plate.png"))
    assert said == "out.csv: the wild type and 6 of 76 single substitutions"
    names = [row["mutant"] for row in rows]
    assert list(rows[0]) == ["mutant", "masked_marginals", "well"], "the first column names the variant"
    assert [row["well"] for row in rows] == [f"A{n}" for n in range(1, 8)]
    assert names[0] == "WT", "the next plate is aligned by it"
    assert len({*names}) == 7
    assert {int(name[1:-1]) for name in names[1:]} <= {1, 2, 3, 20}
    assert [float(row["masked_marginals"]) for row in rows] == pytest.approx(expected(model, names), abs=1e-4)
    every = [f"{WT[n - 1]}{n}{letter}" for n in (1, 2, 3, 20) for letter in STANDARD if letter != WT[n - 1]]
    assert names[1] == every[int(np.argmax(expected(model, every)))]
    facts = json.loads(Path("out.csv.json").read_text())
    assert facts["proposed"] | {"count": 6, "candidates": 76, "sites": "1,2,3,20"} == facts["proposed"]
    assert Path("plate.png").read_bytes().startswith(b"\x89PNG")
    Path("done.csv").write_text("".join(f"{n},0,{k}\n" for k, n in enumerate(["mutant", *names])).replace("0,0", "x,y"))
    measured = read_variants(Path("done.csv"), wild_type=WT)
    assert (measured.names(), measured.target_names) == (names, ("y",))
    for given, token in (
        ({"propose": 99, "sites": "1"}, "--propose 99"),
        ({"propose": 1, "sites": "25"}, "25 is not in"),
    ):
        with pytest.raises(UsageError, match=token):
            run(directory, None, overwrite=True, **given)


def test_mistakes(directory: Path) -> None:
    Path("mine.csv").write_text("mine")
    for kind, token, text, out, given in (
        (UsageError, "'best'", "mutant\nK2A\n", "out.csv", {"method": "best"}),
        (InputError, "'masked_marginals' already", "mutant,masked_marginals\nK2A,1\n", "out.csv", {}),
        (InputError, "column 'mutant'", "mutant\nhello\n", "out.csv", {}),
        (UsageError, r"x\.tsv", "mutant\nK2A\n", "x.tsv", {}),
        (UsageError, "exists already", "mutant\nK2A\n", "mine.csv", {}),
    ):
        Path("v.csv").write_text(text)
        with pytest.raises(kind, match=token):
            score_table(str(directory / "model"), directory / "wt.fasta", Path("v.csv"), Path(out), **given)
    pair = directory / "pair.fasta"
    Path("v.csv").write_text("mutant\nK2A\n")
    pair.write_text((directory / "wt.fasta").read_text().rstrip() + ":MKT\n")
    with pytest.raises(InputError, match="several chains"):
        score_table(str(directory / "model"), pair, Path("v.csv"), Path("out.csv"))
    assert {path.name for path in Path().iterdir()} == {"v.csv", "mine.csv"}, "nothing is left behind"
    assert Path("mine.csv").read_text() == "mine"


def test_a_second_method_goes_beside_the_first(directory: Path) -> None:
    run(directory, "mutant,note\n" + "".join(f"{name},x\n" for name in ("K2*", *SINGLES)))
    first = Path("out.csv").read_text(encoding="utf-8")
    _, rows = run(directory, first, method="wild-type-marginals", overwrite=True)
    assert list(rows[0]) == ["mutant", "note", "masked_marginals", "wild_type_marginals", "not scored because"]
    assert [row["not scored because"] for row in rows] == ["a stop codon", *[""] * len(SINGLES)]
    both = Path("out.csv").read_text(encoding="utf-8")
    with pytest.raises(InputError, match="'masked_marginals' already"):
        run(directory, both, model="no-such-model", overwrite=True)  # before any model is read
    assert Path("out.csv").read_text(encoding="utf-8") == both
