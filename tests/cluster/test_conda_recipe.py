"""The conda package says the same of versions and requirements as pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import esmshard

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deploy" / "conda" / "recipe.yaml"
if not RECIPE.is_file():
    pytest.skip("needs the whole repository", allow_module_level=True)
NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
"""Names of conda-forge that are not those of the package index."""
EXTRAS = ("h5", "plots", "tables")
"""The extras that the conda package has."""


def test_requirements_are_those_of_the_project() -> None:
    recipe = YAML(typ="safe").load(RECIPE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert recipe["context"]["version"] == esmshard.__version__
    assert f"esmshard = {project['scripts']['esmshard']}" in recipe["build"]["python"]["entry_points"]
    wanted = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    expected = {f"python {project['requires-python']}", "backports.zstd"}  # which the extra of xopen is
    for requirement in wanted:
        name, bound = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(.*)", requirement).groups()  # type: ignore[union-attr]
        expected.add(f"{NAMES.get(name, name)} {bound}")
    assert set(recipe["requirements"]["run"]) == expected
