"""A task of another package, as docs/own-task.md shows it, from the recipe to the report."""

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import in_process

from esmshard.errors import InputError
from esmshard.io.paths import shipped
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe
from esmshard.tasks.registry import registered

PAGE = Path(__file__).parents[2] / "docs" / "own-task.md"
if not PAGE.is_file():
    pytest.skip("needs the whole repository, whose page this test reads", allow_module_level=True)


def register(site: Path, package: str, *tasks: str) -> None:
    about = site / f"{package.replace('-', '_')}-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("\n".join(["[esmshard.tasks]", *tasks, ""]))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package of the page, beside its recipe over a few short proteins; and packages that are wrong."""
    made = tmp_path
    blocks = re.findall(r"^```(python|toml|text)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (_, task), (_, project), (_, recipe) = blocks
    package = made / "site" / "net_charge"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(task)
    (entry,) = re.findall(r'^\[project.entry-points."esmshard.tasks"\]\n(\w+) = "(.*)"$', project, re.MULTILINE)
    register(made / "site", "net-charge-task", " = ".join(entry))
    records = (shipped("data") / "contact" / "train.fasta").read_text().split(">")[1:]
    short = sorted(records, key=len)[:24]
    (made / "many.fasta").write_text("".join(f">{record}" for record in short))
    (made / "few.fasta").write_text("".join(f">x{record}" for record in short[:8]))
    recipe = re.sub(r"^data: .*$", "data: {train: many.fasta, valid: few.fasta, test: few.fasta}", recipe, flags=re.M)
    recipe = re.sub(r"^train: .*$", "train: {steps: 4, eval_every: 2}", recipe, flags=re.MULTILINE)
    (made / "charge.yaml").write_text(re.sub(r"^out: .*$", "out: run", recipe, flags=re.MULTILINE))
    (made / "site" / "wrong.py").write_text("from esmshard.recipe.sections import TaskSettings\nimport not_there\n")
    (made / "site" / "other.py").write_text("class Task: pass\n")
    register(made / "site", "broken", "broken = wrong:Task", "foreign = other:Task")
    register(made / "site", "rival", "mlm = net_charge:NetCharge")
    monkeypatch.syspath_prepend(made / "site")
    monkeypatch.chdir(made)
    registered.cache_clear()
    Recipe.model_rebuild(force=True)
    yield made
    monkeypatch.undo()
    registered.cache_clear()
    Recipe.model_rebuild(force=True)
    for name in ("net_charge", "wrong", "other"):
        sys.modules.pop(name, None)


def test_a_task_of_another_package_runs_from_recipe_to_report(directory: Path) -> None:
    for command in (
        ("finetune", "charge.yaml"),
        ("predict", "run/model", "few.fasta", "-o", "charges.csv"),
        ("evaluate", "run/model", "few.fasta", "-o", "scores"),
        ("report", "run"),
        ("recipes", "schema"),
    ):
        done = in_process(*command)
        assert done.returncode == 0, done.stderr
    assert '"net_charge": "#/$defs/NetChargeSettings"' in done.stdout
    assert "The charge of a histidine." in done.stdout
    with open("charges.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["id", "net charge"]
    assert len(rows) == len({row["net charge"] for row in rows}) == 8
    for folder in ("run", "scores"):
        evaluation = json.loads(Path(folder, "evaluation.json").read_text())
        assert evaluation["task"] == "net_charge"
        assert evaluation["metrics"]["fine-tuned"]["error"]["value"] > 0
    with open("run/per_protein.csv", newline="") as file:
        errors = {row["id"]: float(row["error"]) for row in csv.DictReader(file)}
    predicted = {row["id"]: float(row["net charge"]) for row in rows}
    charge_of = {"K": 1, "R": 1, "D": -1, "E": -1, "H": 0.1}
    for record in Path("few.fasta").read_text().split(">")[1:]:
        name, charge = record.split()[0], sum(charge_of.get(x, 0) for x in record.partition("\n")[2])
        assert errors[name] == pytest.approx(abs(predicted[name] - charge), abs=1e-3)
    assert "net_charge" in Path("run/report.html").read_text()
    assert "A protein language model with a head for the task `net_charge`" in Path("run/model/README.md").read_text()


def test_what_cannot_be_used_is_refused_with_the_reason(directory: Path) -> None:
    for override, token in (
        ("task.histidin=1", "did you mean 'histidine'"),
        ("data.labels=x.csv", "data.labels: .*net_charge"),
        ("data.long=crop", "data.long: crop"),
        ("adapt.method=probe", "adapt.method: probe"),
        ("task.name=net_charg", "'net_charg'"),
        ("task.name=broken", "No module named 'not_there'"),
        ("task.name=foreign", "Settings must be"),
        ("task.name=mlm", "registered by esmshard itself and by rival 0.1"),
    ):
        with pytest.raises(InputError, match=token):
            recipe_file.load(Path("charge.yaml"), [override])
    recipe_file.load(Path("charge.yaml"))
