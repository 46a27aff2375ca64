"""`--overwrite` and `--resume` remove what an earlier result of esmshard left, and never a file of the user's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esmshard.api.runs import finetune
from esmshard.checkpoint.consolidate import consolidate
from esmshard.data.splits.split_files import may_write
from esmshard.errors import UsageError
from esmshard.io.store import ingest
from esmshard.model import hub
from esmshard.train import cross_validation as repeats


def test_a_run_removes_nothing_that_no_run_left(tiny_recipe: Path, tmp_path: Path) -> None:
    out, files = tmp_path / "project", ("figures/paper.svg", "report.html", "status.json")
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("{}")
    options: tuple[dict[str, Any], ...] = ({"overwrite": True}, {"resume": "auto"})
    for how in options:
        with pytest.raises(UsageError, match=r"status\.json, figures, report\.html"):
            finetune(tiny_recipe, out=out, report=False, **how)
    assert all((out / name).exists() for name in files)


def test_several_runs_and_sweeps_replace_nothing_of_the_user(tiny_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "variants.csv").write_text("mutant,score\n")
    with pytest.raises(UsageError, match=r"variants\.csv"):
        repeats.check_out(tmp_path)
    (tmp_path / "summary.json").write_text('{"verdict": ""}')
    repeats.check_out(tmp_path)
    out, settings = tmp_path / "project", tmp_path / "sweep.yaml"
    (out / "trials").mkdir(parents=True)
    (out / "sweep.json").write_text('{"entry": "first day"}\n')  # of another program
    settings.write_text("space:\n  optim.lr: {low: 1.0e-5, high: 1.0e-3}\n")
    with pytest.raises(UsageError, match="exists already"):
        finetune(tiny_recipe, out=out, sweep=settings)
    assert (out / "trials").is_dir()


WRITERS: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "consolidate": ("config.json", lambda out, _: consolidate("starter", out, overwrite=True)),
    "consolidate beside a model of ours": ("esmshard.json", lambda out, _: consolidate("starter", out, overwrite=True)),
    "split": ("splits.tsv", lambda out, _: may_write(out, overwrite=True)),
    "split beside a split of ours": ("split.json", lambda out, _: may_write(out, overwrite=True)),
    "ingest": ("manifest.json", lambda out, fasta: ingest([fasta], out, overwrite=True)),
    "download": ("config.json", lambda out, _: hub.check([out.name], out.parent, overwrite=True)),
}


def test_a_directory_with_files_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    out, fasta = tmp_path / "esm2_t6_8M_UR50D", tmp_path / "x.fasta"
    out.mkdir()
    fasta.write_text(">a\nMKV\n")
    (out / "thesis.txt").write_text("years of work")
    for name, write in WRITERS.values():
        (out / name).write_text("{}")
        with pytest.raises(UsageError, match=r"thesis\.txt"):
            write(out, fasta)
        assert (out / "thesis.txt").read_text() == "years of work"
        (out / name).unlink()
