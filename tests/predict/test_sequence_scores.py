"""Pseudo-perplexities of sequences beside fair-esm, one masked residue at a time, and their tables."""

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import in_process
from esm.model.esm2 import ESM2 as FairEsm
from model_files import ALPHABET, SMALL, TINY, fair_esm, ours, perturb, tokenise, write_transformers
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from tracked_model import random_pairs, track, write_model, write_pairs

from esmshard.batch import pack
from esmshard.errors import InputError, UsageError
from esmshard.io import writers
from esmshard.io.paths import shipped
from esmshard.model.families.family import Corruption
from esmshard.predict.heads import predict
from esmshard.predict.zero_shot import score, score_sequences, score_table
from esmshard.tasks import marginals
from esmshard.tasks.marginals import as_masked
from esmshard.vocab import STANDARD

RECORDS = {
    "one": "M",
    "short": "MKTAYIAKQRQISFVKSHF",
    "rare": "XKTAUYIBAKQZRO",
    "long": "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQ",
}
SEEN = Corruption(random=0.1, unchanged=0.1, letters=20)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models whose LM heads say different things everywhere, and sequences."""
    found = tmp_path_factory.mktemp("sequences")
    for name, seed in (("model", 0), ("other", 1)):
        write_transformers(found / name, ours(reference(seed), TINY), TINY)
    write_transformers(found / "esm1b", ours(fair_esm(SMALL["ESM-1b"]), SMALL["ESM-1b"]), SMALL["ESM-1b"])
    (found / "x.fasta").write_text("".join(f">{name}\n{sequence}\n" for name, sequence in RECORDS.items()))
    return found


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def reference(seed: int = 0) -> FairEsm:
    model = fair_esm(TINY, seed)
    perturb(model, seed, deviation=0.3)
    return model


@torch.no_grad()
def own_log_p(model: FairEsm, sequence: str, site: int, hidden: bool = True) -> float:
    """log p of the residue at a site, by fair-esm, of one sequence and one site."""
    block, _ = tokenise([sequence])
    residue = int(block[0, site + 1])
    if hidden:
        block[0, site + 1] = ALPHABET.mask_idx
    return float(model(block)["logits"][0, site + 1].log_softmax(-1)[residue])


def sums(model: FairEsm, sequence: str) -> tuple[float, float]:
    """The pseudo-log-likelihood, and its estimate from one pass: p r / (u + r - u p) with r = 0.1 / 20 and u = 0.1."""
    sites = [n for n, residue in enumerate(sequence) if residue in STANDARD]
    p = np.exp([own_log_p(model, sequence, n, hidden=False) for n in sites])
    masked = sum(own_log_p(model, sequence, n) for n in sites)
    return masked, float(np.log(p * 0.005 / (0.105 - 0.1 * p)).sum())


def run(directory: Path, out: str = "out.csv", model: str = "model", **given: Any) -> tuple[str, list[dict[str, str]]]:
    said = score_sequences(str(directory / model), directory / "x.fasta", Path(out), **given)
    with open(out, newline="", encoding="utf-8") as file:
        return said, list(csv.DictReader(file))


def test_both_methods_are_those_of_fair_esm(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference()
    monkeypatch.setattr("esmshard.predict.zero_shot.GROUP_ROWS", 3)
    monkeypatch.setattr(writers, "GROUP_ROWS", 3)
    for k, (method, prefix) in enumerate((("pseudo-perplexity", ""), ("one-pass", "one_pass_"))):
        message, lines = run(directory, method=method, overwrite=True)
        assert message == "out.csv: 4 records"
        out = Path(f"{method}.parquet")
        score_sequences(str(directory / "model"), directory / "x.fasta", out, method=method)  # type: ignore[arg-type]
        assert parquet.ParquetFile(out).num_row_groups == 2
        rows = parquet.read_table(out).to_pylist()
        columns = [f"{prefix}{name}" for name in ("pseudo_log_likelihood", "mean_log_p", "pseudo_perplexity")]
        assert list(rows[0]) == list(lines[0]) == ["id", "length", "not_scored", "window", *columns]
        sizes = [(row["id"], row["length"], row["not_scored"]) for row in rows]
        assert sizes == [("one", 1, 0), ("short", 19, 0), ("rare", 14, 5), ("long", 45, 0)]
        for row, line, sequence in zip(rows, lines, RECORDS.values(), strict=True):
            scored, total = sum(residue in STANDARD for residue in sequence), sums(model, sequence)[k]
            found = [row[name] for name in columns]
            assert found[:2] == pytest.approx([total, total / scored], abs=1e-5 * scored)
            assert found[2] == pytest.approx(np.exp(-total / scored), rel=1e-4)
            assert [float(line[name]) for name in columns] == pytest.approx(found, rel=1e-5)
    about = json.loads(Path("out.csv.json").read_text())
    assert (about["records"], about["window"], about["method"]) == (4, 1022, "one-pass")
    with pytest.raises(UsageError, match="exists already"):
        run(directory)


def test_packs_make_no_difference(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, sizes = run(directory)[1], list[int]()
    monkeypatch.setattr(marginals, "pack", lambda tokens, **rest: sizes.append(len(tokens)) or pack(tokens, **rest))
    monkeypatch.setattr(marginals, "TOKENS", 60)
    assert run(directory, overwrite=True)[1] == whole
    assert (sum(sizes), max(sizes)) == (1 + 19 + 9 + 45, 3), "a pass for each residue; those of several share a pack"
    sizes.clear()
    run(directory, method="one-pass", overwrite=True)
    assert sum(sizes) == len(RECORDS)


def test_the_estimate_is_bayes_rule_over_what_training_shows() -> None:
    """Every way in which a visible letter comes about in training, listed, gives the probability that is inverted."""
    masked = np.random.default_rng(0).dirichlet(np.full(20, 0.3))
    for seen in (SEEN, Corruption(random=0.15, unchanged=0.05, letters=20)):
        for shown in range(20):
            ways = [masked[true] * (seen.unchanged * (true == shown) + seen.random / 20) for true in range(20)]
            visible = ways[shown] / sum(ways)
            assert as_masked(torch.tensor([visible]).double().log(), seen).exp().item() == pytest.approx(
                masked[shown], rel=1e-9
            )
    assert as_masked(torch.tensor([0.0, -800.0]), SEEN).tolist() == pytest.approx([0, -800 - np.log(21)])


def test_an_ensemble_gives_means_and_deviations(directory: Path) -> None:
    def columns(model: str, **given: Any) -> dict[str, np.ndarray]:
        _, rows = run(directory, model=model, method="one-pass", overwrite=True, **given)
        return {name[9:]: np.array([float(row[name]) for row in rows]) for name in rows[0] if "one_pass" in name}

    one, other = columns("model"), columns("other")
    both, means = columns("model", ensemble=[str(directory / "other")]), (one["mean_log_p"] + other["mean_log_p"]) / 2
    assert both["mean_log_p"] == pytest.approx(means, rel=1e-4)
    deviations = np.abs(one["mean_log_p"] - other["mean_log_p"]) / 2**0.5
    assert both["mean_log_p_sd"] == pytest.approx(deviations, abs=1e-4)
    assert deviations.min() > 0
    assert both["pseudo_perplexity"] == pytest.approx(np.exp(-means), rel=1e-3)
    totals = (one["pseudo_log_likelihood"] + other["pseudo_log_likelihood"]) / 2
    assert both["pseudo_log_likelihood"] == pytest.approx(totals, rel=1e-4)


def test_an_ensemble_scores_variants(directory: Path) -> None:
    Path("wt.fasta").write_text(f">wt\n{RECORDS['short']}\n")
    Path("v.csv").write_text("mutant\nK2A\nK2U\nY5W\n")
    first, *others = [str(directory / name) for name in ("model", "other", "esm1b")]

    def lines(name: str, ensemble: Sequence[str] = ()) -> list[list[str]]:
        score_table(name, Path("wt.fasta"), Path("v.csv"), Path("x.csv"), ensemble=ensemble, overwrite=True)
        return [line.split(",") for line in Path("x.csv").read_text().splitlines()]

    values = np.array([[cells[1] for cells in lines(name)[1::2]] for name in (first, *others)], float)
    head, *rows = lines(first, others)
    assert head == ["mutant", "masked_marginals", "masked_marginals_sd", "not scored because"]
    assert rows[1][:3] == ["K2U", "", ""]
    found = np.array([rows[0][1:3], rows[2][1:3]], float)
    assert found == pytest.approx(np.stack([values.mean(0), values.std(0, ddof=1)], axis=1), abs=1e-4)
    assert json.loads(Path("x.csv.json").read_text())["ensemble"] == ["other", "esm1b"]


def test_long_records_are_seen_in_windows(directory: Path) -> None:
    model, sequence = reference(), RECORDS["long"]
    _, rows = run(directory, window=12)
    assert [row["window"] for row in rows] == ["1", "12", "12", "12"]
    starts = [min(max(site - 6, 0), len(sequence) - 12) for site in range(len(sequence))]
    masked = [own_log_p(model, sequence[at : at + 12], site - at) for site, at in enumerate(starts)]
    assert float(rows[3]["pseudo_log_likelihood"]) == pytest.approx(sum(masked), abs=1e-3)
    # Windows at residues 0, 5, 11, 16, 22, 27 and 33; the middles of neighbours are 5 or 6 residues apart.
    _, rows = run(directory, window=12, method="one-pass", overwrite=True)
    starts = [0, 5, 11, 16, 22, 27, 33]
    nearest = [min(starts, key=lambda at: (abs(at + 6 - site), at)) for site in range(len(sequence))]
    p = np.exp([own_log_p(model, sequence[at : at + 12], n - at, hidden=False) for n, at in enumerate(nearest)])
    expected = float(np.log(p * 0.005 / (0.105 - 0.1 * p)).sum())
    assert float(rows[3]["one_pass_pseudo_log_likelihood"]) == pytest.approx(expected, abs=1e-3)


def test_records_without_one_of_the_20(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.fasta").write_text(">a\nMK\n>b\nXXU\n")
    for out in ("out.csv", "out.parquet"):
        score_sequences(str(directory / "model"), Path("x.fasta"), Path(out), overwrite=True)
    assert Path("out.csv").read_text().splitlines()[2] == "b,3,3,3,,,"
    assert list(parquet.read_table("out.parquet").to_pylist()[1].values()) == ["b", 3, 3, 3, *[None] * 3]
    assert "1 record without a score, as no residue is one of the 20 amino acids" in capsys.readouterr().err


def test_variants_leave_the_same_residues_out(directory: Path) -> None:
    """The pseudo-perplexity of a variant is that of its sequence as a record."""
    rare, model = RECORDS["rare"], str(directory / "model")
    Path("wt.fasta").write_text(f">wt\n{rare}\n")
    Path("v.csv").write_text("mutant\nWT\nK2A\n")
    score_table(model, Path("wt.fasta"), Path("v.csv"), Path("v2.csv"), method="pseudo-perplexity")
    Path("x.fasta").write_text(f">wt\n{rare}\n>K2A\nXA{rare[2:]}\n")
    score_sequences(model, Path("x.fasta"), Path("x.csv"))
    found, records = (
        [line.split(",")[column] for line in Path(name).read_text().splitlines()[1:]]
        for name, column in (("v2.csv", 1), ("x.csv", 5))
    )
    assert found == records
    assert found[0] != found[1]
    assert np.isnan(score(ours(reference(), TINY), "XX", [()], "pseudo-perplexity")).all(), "no residue is of the 20"


@torch.no_grad()
def test_scores_are_of_the_residues_in_the_joined_sequence(directory: Path) -> None:
    a, b = "MKTAYIAKQR", "GQISFVKSH"
    Path("x.fasta").write_text(f">ab\n{a}:{b}\n>a\n{a}\n")
    score_sequences(str(directory / "model"), Path("x.fasta"), Path("x.csv"), join="linker:6")
    with open("x.csv", newline="") as file:
        joined, alone = csv.DictReader(file)
    assert (joined["length"], joined["not_scored"], joined["window"]) == ("19", "0", "25")
    assert (alone["length"], alone["window"]) == ("10", "10")
    plain, model = a + "G" * 6 + b, reference()
    total = sum(own_log_p(model, plain, site) for site in range(25) if not 10 <= site < 16)
    assert float(joined["pseudo_log_likelihood"]) == pytest.approx(total, abs=1e-3)
    assert '"join": "linker:6"' in Path("x.csv.json").read_text()


def test_tracks_are_read(tmp_path: Path) -> None:
    """The pseudo-perplexity is that of `score`, which `test_zero_shot` computes by hand."""
    name, model = write_model(tmp_path / "model")
    pairs = random_pairs({"a": 14, "b": 9})
    fasta, letters = write_pairs(tmp_path, pairs)
    score_sequences(name, fasta, tmp_path / "x.csv", tracks={"3di": str(letters)})
    rows = (tmp_path / "x.csv").read_text().splitlines()[1:]
    for row, (sequence, three_di) in zip(rows, pairs.values(), strict=True):
        expected = score(model, sequence, [()], "pseudo-perplexity", tracks={"3di": track(three_di)})
        assert float(row.split(",")[5]) == pytest.approx(expected[0], abs=1e-4)
    assert json.loads((tmp_path / "x.csv.json").read_text())["tracks"] == {"3di": letters.name}
    score_sequences(name, fasta, tmp_path / "y.csv")
    assert (tmp_path / "y.csv").read_text().splitlines()[1:] != rows
    with pytest.raises(UsageError, match="SaProt"):
        score_sequences(name, fasta, tmp_path / "z.csv", method="one-pass")


def test_mistakes(directory: Path) -> None:
    for given, token in (
        ({"method": "best"}, "--method best"),
        ({"ensemble": ["nowhere"]}, "nowhere"),
        ({"ensemble": ["MODEL"]}, "named twice"),
        ({"out": Path("x.npz")}, "x.npz"),
        ({"tracks": {"3di": "x"}}, "takes no track"),
        ({"text": ""}, "holds no record"),
        ({"text": ">a\n" + "ACGT" * 30 + "\n"}, "DNA"),
        ({"model": "esm1b", "window": 1023}, "1022"),
    ):
        Path("x.fasta").write_text(given.pop("text", ">a\nMKT\n"))
        model, out = str(directory / given.pop("model", "model")), given.pop("out", Path("x.csv"))
        if "ensemble" in given:
            given["ensemble"] = [model if one == "MODEL" else one for one in given["ensemble"]]
        with pytest.raises((InputError, UsageError), match=token):
            score_sequences(model, Path("x.fasta"), out, **given)
        assert [path.name for path in Path().iterdir()] == ["x.fasta"], "nothing is written"


def test_options_of_variants_are_refused_for_sequences(directory: Path) -> None:
    mistakes = (["v.csv", "--propose", "3"], "--propose"), (["--sites", "1"], "--sites"), (["--png", "x.png"], "--png")
    for more, token in ((["--target", "kd"], "--target"), (["v.csv", "--all-singles"], "--all-singles"), *mistakes):
        done = in_process("score", str(directory / "model"), str(directory / "x.fasta"), *more, "-o", "x.csv")
        assert done.returncode == 2
        assert token in done.stderr


def test_outputs_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    """The starter with a last LayerNorm that overflows."""
    model = Path(shutil.copytree(shipped("data") / "starter" / "model", tmp_path / "model"))
    weights, name = load_file(model / "model.safetensors"), "esm.encoder.emb_layer_norm_after.weight"
    weights[name] = torch.full(weights[name].shape, 3e38)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    (tmp_path / "x.fasta").write_text(">a\nMKTAYIAKQR\n>b\nMKV\n")
    (tmp_path / "wt.fasta").write_text(">a\nMKTAYIAKQR\n")
    with pytest.raises(InputError, match="NaN or infinite"):
        predict(str(model), tmp_path / "x.fasta", tmp_path / "x.npz", device="cpu")
    assert len((tmp_path / "x.npz.failed.tsv").read_text().splitlines()) == 3
    with pytest.raises(InputError, match="2 of 2 scores"):
        score_sequences(str(model), tmp_path / "x.fasta", tmp_path / "x.csv", device="cpu")
    with pytest.raises(InputError, match="190 of 190 scores"):
        score_table(str(model), tmp_path / "wt.fasta", None, tmp_path / "y.csv", device="cpu")
    assert not any((tmp_path / name).exists() for name in ("x.npz", "x.csv", "y.csv"))
