"""`finetune --dry-run` refuses and tells what the command does."""

from pathlib import Path

import pytest
from command import in_process

from esmshard.checkpoint import manifest


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))


def both(*arguments: str) -> str:
    """The refusal on stderr, which is the same with and without `--dry-run`."""
    done = [in_process("finetune", *arguments, *more) for more in ((), ("--dry-run",))]
    assert [one.returncode for one in done] == [2, 2]
    assert done[0].stderr == done[1].stderr
    assert len(done[0].stderr.splitlines()) == 1
    return done[0].stderr


def test_a_dry_run_refuses_and_tells_what_the_command_does(tiny_recipe: Path) -> None:
    tiny_recipe.with_name("train.fasta").write_text(
        tiny_recipe.with_name("train.fasta").read_text().replace("\n", "*\n", 2).replace("*", "", 1)
    )
    dry = in_process("finetune", tiny_recipe, "--dry-run")
    assert dry.returncode == 0
    assert "task      contact" in dry.stdout
    out = tiny_recipe.with_name("run")
    assert not out.exists()
    done = in_process("finetune", tiny_recipe, "train.steps=1", "checkpoint.every=1")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if ".fasta: " in line]
    assert any("a '*' at the end was removed in 1 record" in line for line in told)
    assert [line for line in dry.stderr.splitlines() if ".fasta: " in line] == told
    refused = both(str(tiny_recipe))
    assert "run: exists already; pass --resume auto to go on, --overwrite to start again, or out=DIR" in refused
    before = sorted(path.name for path in (out / "checkpoints").iterdir())
    changed = ("train.steps=1", "checkpoint.every=1", "optim.lr=0.0123", "--resume", "auto")
    assert "was written under another recipe: optim.lr (0.0123, was " in both(str(tiny_recipe), *changed)
    assert both(str(tiny_recipe), "--resume", "nowhere").startswith("error: --resume nowhere: no such directory")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == before
    newest = manifest.named(out / "checkpoints")[-1]
    assert manifest.damage(newest) == ""
    assert in_process("finetune", tiny_recipe, "train.steps=1", "--resume", "auto", "--dry-run").returncode == 0


def test_a_dry_run_downloads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where every request fails
    done = in_process("finetune", "contact", "model.name=lab/esm2_of_nobody", "out=x", "--dry-run")
    assert done.returncode == 2
    assert "esmshard download lab/esm2_of_nobody first" in done.stderr
    assert not Path("x").exists()
