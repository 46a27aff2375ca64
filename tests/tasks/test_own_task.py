"""A task of another package, as docs/own-task.md shows it, from the recipe to the report."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from esmshard.io.paths import shipped

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own-task.md"
if not PAGE.is_file():
    pytest.skip("needs the whole repository, whose page this test reads", allow_module_level=True)

COMMANDS = """\
import sys
from esmshard.cli.app import main

def esmshard(*arguments):
    sys.argv = ["esmshard", *arguments]
    try:
        main()
    except SystemExit as left:
        assert not left.code, (arguments, left.code)

esmshard("finetune", "charge.yaml", "--no-report")
esmshard("predict", "run/model", "few.fasta", "-o", "charges.csv")
esmshard("evaluate", "run/model", "few.fasta", "-o", "scores")
esmshard("consolidate", "run", "-o", "again")
esmshard("report", "run")
esmshard("recipes", "schema")
"""
REFUSED = """\
from pathlib import Path
from esmshard.errors import InputError
from esmshard.recipe import recipe_file

for override in {overrides!r}:
    try:
        recipe_file.load(Path("charge.yaml"), override)
    except InputError as error:
        print(error)
    else:
        print("accepted")
"""


def register(site: Path, package: str, *tasks: str) -> None:
    """What pip leaves of an installed package."""
    about = site / f"{package.replace('-', '_')}-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("\n".join(["[esmshard.tasks]", *tasks, ""]))


def python(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(directory / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the page, beside its recipe over a few short proteins; and packages that are wrong."""
    made = tmp_path_factory.mktemp("own")
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
    return made


def test_a_task_of_another_package_runs_from_recipe_to_report(directory: Path) -> None:
    done = python(COMMANDS, directory)
    assert done.returncode == 0, done.stderr
    with open(directory / "charges.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["id", "net charge"]
    assert len(rows) == 8
    assert len({row["net charge"] for row in rows}) == 8
    for found in (directory / "run", directory / "scores"):
        evaluation = json.loads((found / "evaluation.json").read_text())
        assert evaluation["task"] == "net_charge"
        assert evaluation["metrics"]["fine-tuned"]["error"]["value"] > 0
    text = (directory / "few.fasta").read_text()
    with open(directory / "run" / "per_protein.csv", newline="") as file:
        errors = {row["id"]: float(row["error"]) for row in csv.DictReader(file)}
    said = {row["id"]: float(row["net charge"]) for row in rows}
    for record in text.split(">")[1:]:
        name, sequence = record.split()[0], "".join(record.splitlines()[1:])
        charge = sum(sequence.count(one) for one in "KR") - sum(sequence.count(one) for one in "DE")
        charge += 0.1 * sequence.count("H")
        assert errors[name] == pytest.approx(abs(said[name] - charge), abs=1e-3)
    assert "net_charge" in (directory / "run" / "report.html").read_text()
    card = (directory / "again" / "README.md").read_text()
    assert "A protein language model with a head for the task `net_charge`" in card
    assert '"net_charge": "#/$defs/NetChargeSettings"' in done.stdout
    assert "The charge of a histidine." in done.stdout


def test_what_cannot_be_used_is_refused_with_the_reason(directory: Path) -> None:
    overrides = [
        ["task.histidin=1"],
        ["data.labels=x.csv"],
        ["data.long=crop"],
        ["adapt.method=probe"],
        *([f"task.name={name}"] for name in ("net_charg", "broken", "foreign", "mlm")),
        [],
    ]
    done = python(REFUSED.format(overrides=overrides), directory)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    for part in (
        "task.histidin: unknown key; did you mean 'histidine'?",
        "data.labels: is for task pair, residue and sequence, and the recipe has net_charge; remove it",
        "data.long: crop may remove the cause of the label of a protein; choose full or skip",
        "adapt.method: probe is not offered by task net_charge; choose full, lora or head",
        "'net_charg' found",
        "task.name: task broken of broken 0.1 cannot be imported from wrong:Task (ModuleNotFoundError: No module "
        "named 'not_there'); correct or reinstall broken 0.1",
        "task.name: task foreign of broken 0.1 cannot be imported from other:Task (TypeError: it has no "
        "Settings that are a subclass of esmshard.recipe.sections.TaskSettings); correct or reinstall broken 0.1",
        "task.name: task mlm is registered by esmshard itself and by rival 0.1; uninstall rival 0.1, or give its task "
        "another name",
        "accepted",
    ):
        assert part in said
    assert said.count("accepted") == 1
