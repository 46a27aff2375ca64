"""Commands over a run whose newest checkpoint holds code: it is not run, and a sentence says what is wrong."""

import shutil
from pathlib import Path

import pytest
from command import esmshard
from planted import Touch, plant


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps; its checkpoint is that of the second."""
    folder = tmp_path_factory.mktemp("planted")
    sequences = "".join(f">p{n}\n{'MKTAYIAKQRQISFVKSHFSRQ'[n:]}\n" for n in range(6))
    for name in ("train", "valid"):
        (folder / f"{name}.fasta").write_text(sequences)
    (folder / "recipe.yaml").write_text(
        "task: {name: mlm}\nmodel: {name: nano}\ninit: random\n"
        f"data: {{train: {folder}/train.fasta, valid: {folder}/valid.fasta, test: {folder}/valid.fasta}}\n"
        f"train: {{steps: 2}}\ncheckpoint: {{every: 1, keep: 1}}\nout: {folder / 'run'}\n"
    )
    done = esmshard("finetune", folder / "recipe.yaml", "--nproc", "1")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("finetune", "recipe.yaml", "--nproc", "1", "--resume", "auto"), 1),
        (("finetune", "recipe.yaml", "--nproc", "1", "--resume", "run"), 1),
        (("finetune", "recipe.yaml", "--nproc", "2", "--resume", "run/checkpoints/step_000002"), 1),
        (("consolidate", "run", "-o", "exported"), 1),
        (("consolidate", "run/checkpoints/step_000002", "-o", "exported"), 1),
        (("report", "run"), 0),
    ],
    ids=["auto", "resume run", "resume path", "consolidate run", "consolidate path", "report"],
)
@pytest.mark.parametrize("name", ["model.trunk.embed_tokens.weight", "optim.trunk.embed_tokens.weight.exp_avg"])
def test_what_is_planted_in_a_checkpoint_is_not_run(
    trained: Path, tmp_path: Path, command: tuple[str, ...], code: int, name: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(f"out: {trained}", f"out: {folder}"))
    plant(folder / "run" / "checkpoints" / "step_000002", name, Touch(str(tmp_path / "called")))
    done = esmshard(*command, cwd=folder)
    assert not (tmp_path / "called").exists()
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert "not the index of a checkpoint" in done.stderr
        assert not (folder / "exported").exists()
