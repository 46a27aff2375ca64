"""What is shipped, and that no recipe key is decoration."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pydantic import BaseModel

import esmshard
from esmshard.recipe import Recipe

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT],
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_recipes_samples_and_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "esmshard/py.typed" in names
    assert "esmshard/_shipped/recipes/contact.yaml" in names
    for split in ("train", "valid", "test"):
        assert {f"esmshard/_shipped/data/contact/{split}{end}" for end in (".fasta", ".npz")} <= names
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


def test_the_wheel_works_in_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    env = {**os.environ, "PYTHONPATH": str(site), "ESMSHARD_CACHE": str(tmp_path / "cache")}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "esmshard", *arguments]
        done = subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("recipes", "ls").startswith("contact ")
    plan = run("finetune", "contact", "--dry-run")
    assert "train 776, valid 99, test 100" in plan
    assert f"{empty / 'runs' / 'contact'}" in plan
    assert not list(empty.iterdir()), "a dry run writes nothing"
    where = subprocess.run(
        [sys.executable, "-c", "import esmshard; print(esmshard.__file__)"],
        cwd=empty,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(site)), "the test must not have run the clone's package"


def leaves(model: type[BaseModel]) -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        found += leaves(kind) if isinstance(kind, type) and issubclass(kind, BaseModel) else [name]
    return found


def test_every_recipe_key_is_read_somewhere() -> None:
    code = "\n".join(p.read_text() for p in (ROOT / "esmshard").rglob("*.py") if p.name != "recipe.py")
    keys = leaves(Recipe)
    assert len(keys) > 20
    by_name = {"train", "valid", "test"}  # getattr(recipe.data, name)
    assert [key for key in keys if not re.search(rf"\.{key}\b", code) and key not in by_name] == []


def test_public_names_are_there() -> None:
    assert len(esmshard.__all__) > 8
    for name in esmshard.__all__:
        assert getattr(esmshard, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = esmshard.nothing
