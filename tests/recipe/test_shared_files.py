"""What users share (models, adapters, reports) does not say where anything lay on their machine."""

import json
import shutil
from pathlib import Path

import pytest
from command import in_process

from esmshard.io.paths import found_place, shared_place

NAME = "home-of-ada lovelace"
RECIPE = """\
task: {name: sequence, kind: number}
model: {name: nano}
init: random
data: {train: data/x.fasta, valid: data/x.fasta, test: data/t.fasta, labels: data/y.csv, target: [y]}
train: {steps: 1}
out: runs/first
"""


def holding(folder: Path, *texts: str) -> list[str]:
    """Files under a directory that hold one of some texts."""
    files = [folder] if folder.is_file() else [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path.name for path in files if any(text.encode() in path.read_bytes() for text in texts)]


def done(*arguments: str | Path, cwd: Path) -> str:
    result = in_process(*arguments, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of random weights, one with a LoRA on top of its model, and the adapter."""
    root = tmp_path_factory.mktemp("p") / NAME
    (root / "data").mkdir(parents=True)
    residues = ["MKTAYIAKQRQISFVKSHFSRQ", "MKVLAAGIVGLCAKAYIAKQ", "MSTNPKPQRKTKRNTNRRPQDVK"]
    (root / "data" / "x.fasta").write_text("".join(f">p{n}\n{one}\n" for n, one in enumerate(residues)))
    shutil.copy(root / "data" / "x.fasta", root / "data" / "t.fasta")
    (root / "data" / "y.csv").write_text("id,y\np0,-1\np1,2\np2,3\n")
    (root / "r.yaml").write_text(RECIPE)
    done("finetune", "r.yaml", "--nproc", "1", "--report", cwd=root)
    lora = ("init=pretrained", "model.name=runs/first/model", "adapt.method=lora", "out=runs/second")
    done("finetune", "r.yaml", *lora, "--nproc", "1", "--report", cwd=root)
    done("consolidate", "runs/second", "--adapter", "-o", "adapter", cwd=root)
    done("consolidate", "runs/second/model", "-o", "far/away/copy", cwd=root)
    return root


SHARED = ("model", "report.html")


def test_what_is_shared_names_no_place(project: Path) -> None:
    shared = [project / "runs" / run / part for run in ("first", "second") for part in SHARED]
    for place in (*shared, project / "adapter", project / "far"):
        assert holding(place, NAME, str(project), str(Path.home()) + "/") == []
    assert "recipe.yaml" in holding(project / "runs" / "first", NAME)  # it is found where it is
    about = json.loads((project / "runs" / "second" / "model" / "esmshard.json").read_text())
    assert (about["recipe"]["data"]["train"], about["recipe"]["out"]) == ("x.fasta", "second")
    assert about["recipe"]["model"]["name"] == about["base"]["name"] == "../../first/model"
    assert about["data"]["train"]["path"] == "x.fasta"
    copy = json.loads((project / "far" / "away" / "copy" / "esmshard.json").read_text())
    assert copy["recipe"]["model"]["name"] == "../../../runs/first/model"
    done("consolidate", "runs/second", "-o", "again", cwd=project)
    assert "| fine-tuned |" in (project / "again" / "README.md").read_text(), "scores still belong to the model"


def test_they_work_where_they_are_and_where_all_was_moved_to(project: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(project, moved)
    shutil.move(project, project.with_name("gone"))
    try:
        for model in ("adapter", "runs/second/model"):
            done("predict", moved / model, moved / "data" / "x.fasta", "-o", f"{Path(model).name}.csv", cwd=tmp_path)
        scored = ("--labels", moved / "data" / "y.csv", "-o", "scores")
        told = done("evaluate", moved / "far/away/copy", moved / "data" / "x.fasta", *scored, cwd=tmp_path)
        assert "left out of the table" not in told  # the base was found
    finally:
        shutil.move(project.with_name("gone"), project)
    assert (tmp_path / "adapter.csv").read_text().count("\n") == 4


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert shared_place("esm2_t6_8M_UR50D", Path("/x/model")) == "esm2_t6_8M_UR50D"
    assert shared_place("/data/w/a.pt", Path("/data/runs/m")) == "../../w/a.pt"
    assert shared_place("/data/m/a.pt", Path("/data/m")) == "./a.pt"
    assert shared_place("/home/ada/w/a.pt", Path("/scratch/m")) == "./a.pt"
    assert shared_place("/home/bob/w/a.pt", Path("/home/ada/m")) == "./a.pt"
    assert shared_place("/home/ada/w/a.pt", Path("/home/ada/m")) == "../w/a.pt"
    assert found_place("../w/a.pt", Path("/data/m")) == "/data/w/a.pt"
    assert found_place("starter", Path("/data/m")) == "starter"
