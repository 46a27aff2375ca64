"""`finetune --dry-run` refuses and tells what the command does; training data of one's own stand beside no sample."""

from pathlib import Path

import pytest
from command import esmshard

from esmshard.checkpoint import manifest

PROTEINS = "".join(f">r{n}\nMKTAYIAKQR{'AVLSGCDEFH'[n] * 3}\n" for n in range(10))


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))


def both(*arguments: str) -> str:
    """What the command and its dry run say on stderr when they refuse; the same."""
    said = []
    for more in ((), ("--dry-run",)):
        done = esmshard("finetune", *arguments, *more)
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1
        said.append(done.stderr)
    assert said[0] == said[1]
    return said[0]


def test_a_dry_run_refuses_and_tells_what_the_command_does(tiny_recipe: Path) -> None:
    tiny_recipe.with_name("train.fasta").write_text(
        tiny_recipe.with_name("train.fasta").read_text().replace("\n", "*\n", 2).replace("*", "", 1)
    )
    dry = esmshard("finetune", tiny_recipe, "--dry-run")
    assert dry.returncode == 0
    assert "task      contact" in dry.stdout
    out = tiny_recipe.with_name("run")
    assert not out.exists()
    done = esmshard("finetune", tiny_recipe, "train.steps=2", "checkpoint.every=1")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if ".fasta: " in line]
    assert any("a '*' at the end was removed in 1 record" in line for line in told)
    assert [line for line in dry.stderr.splitlines() if ".fasta: " in line] == told
    refused = both(str(tiny_recipe))
    assert "run: exists already; pass --resume auto to go on, --overwrite to start again, or out=DIR" in refused
    before = sorted(path.name for path in (out / "checkpoints").iterdir())
    changed = ("train.steps=2", "checkpoint.every=1", "optim.lr=0.0123", "--resume", "auto")
    assert "was written under another recipe: optim.lr (0.0123, was " in both(str(tiny_recipe), *changed)
    assert both(str(tiny_recipe), "--resume", "nowhere").startswith("error: --resume nowhere: no such directory")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == before
    newest = manifest.named(out / "checkpoints")[-1]
    assert manifest.damage(newest) == ""
    assert esmshard("finetune", tiny_recipe, "train.steps=2", "--resume", "auto", "--dry-run").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("sequence", "data.train=mine.csv"),
            "data.labels is still sample:contact/labels.csv, of other proteins; give data.labels=FILE too. If the "
            "labels are in ",
        ),
        (("sequence-esm2", "data.train=mine.csv"), "data.labels=null data.target=COLUMN"),
        (
            ("variants", "data.table=mine.csv"),
            "data.table: is yours, and data.wild_type is still sample:variants/wild_type.fasta, of other proteins; "
            "give data.wild_type=FILE too",
        ),
        (("variants", "data.wild_type=mine.fasta"), "give data.table=FILE too"),
    ],
)
def test_training_data_of_ones_own_stand_beside_no_sample(arguments: tuple[str, ...], says: str) -> None:
    Path("mine.fasta").write_text(PROTEINS)
    assert says in both(*arguments)


@pytest.mark.parametrize("model", ["starter", "lab/esm2_of_nobody"])
def test_a_dry_run_sends_nothing_over_a_network(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "HF_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where every request fails
    far = [f"data.{name}=s3://bucket/x.fasta" for name in ("train", "valid", "test")] if model == "starter" else []
    done = esmshard("finetune", "contact", *far, f"model.name={model}", "data.labels=null", "out=x", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "not looked at" in done.stderr
    assert not Path("x").exists()
