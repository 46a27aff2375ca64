"""What users get from deploy/: the image's versions, entry and audit, and the requirements of the conda package."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from ruamel.yaml import YAML

import esmshard

ROOT = Path(__file__).parents[2]
HERE = ROOT / "deploy" / "image"
if not (ROOT / "Dockerfile").is_file():
    pytest.skip("needs the whole repository, whose Dockerfile these tests read", allow_module_level=True)
sys.path.insert(0, str(HERE))

import audit  # noqa: E402
import dependencies  # noqa: E402

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
"""Names of conda-forge that are not those of the package index."""


def test_the_lock_meets_the_floors_of_the_package() -> None:
    """All that `esmshard[test]` asks for on Linux, in a version it accepts; torch stands in constraints.txt."""
    extras = PROJECT["optional-dependencies"]

    def asked(lines: list[str]) -> list[Requirement]:
        found = []
        for line in map(Requirement, lines):
            found += [r for extra in line.extras for r in asked(extras[extra])] if line.name == "esmshard" else [line]
        return found

    pins = dependencies.read_lock((HERE / "lock.txt").read_text())
    torch = dependencies.read_lock((ROOT / "constraints.txt").read_text())
    assert (torch.keys(), "torch" in pins) == ({"torch"}, False)
    for requirement in asked([*PROJECT["dependencies"], *extras["test"]]):
        version = (pins | torch).get(dependencies.canonical(requirement.name))
        assert version, f"{requirement} is not in the lock: make lock"
        assert requirement.specifier.contains(version), f"{requirement}, but {version} in the lock: make lock"


def test_a_base_with_its_own_torch_keeps_its_packages() -> None:
    pins = {"numpy": "2.4.6", "biopython": "1.88"}
    assert dependencies.requirements(pins, {"numpy", "pip"}, own_torch=True) == ["numpy", "biopython==1.88"]
    assert dependencies.requirements(pins, {"numpy", "pip"}, own_torch=False) == ["numpy==2.4.6", "biopython==1.88"]
    floors = ["torch>=2.11", "numpy>=1.26", "h5py>=3.10; extra == 'h5'"]
    assert dependencies.below_floor(floors, {"torch": "2.11.0a0+git1234.nv26.1", "numpy": "1.26.4"}) == []
    assert len(dependencies.below_floor(floors, {"torch": "2.10.0a0+nv", "scipy": "1.0"})) == 2


def test_a_build_sees_what_the_dockerfile_takes_and_nothing_else() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )?(.*) \S+$", text, re.MULTILINE)
    bound = re.findall(r"--mount=type=bind,source=([^,]+)", text)
    taken = {name for line in [*copied, *bound] for name in line.split()}
    assert rules[0] == "*"
    assert taken == {rule[1:] for rule in rules if rule[0] == "!"}
    assert all((ROOT / name).exists() for name in taken)
    assert {"**/__pycache__", "**/runs"} <= set(rules)


def test_the_entry_hands_everything_to_esmshard_or_runs_the_suite(tmp_path: Path) -> None:
    """Programs in place of pytest and esmshard print what they were given."""
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "left_out.txt").write_text("# why\n\ntests/test_a.py::test_b needs a clone\ntests/c.py too\n")
    for name in ("pytest", "esmshard"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nprintf "{name} $PWD "; for a in "$@"; do printf "[%s]" "$a"; done\nexit 7\n')
        program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ESMSHARD_SUITE": str(tmp_path / "suite"), "TMPDIR": "/t"}
    left_out = "[--ignore=tests/c.py][--deselect=tests/test_a.py::test_b]"
    both = f"{HERE}/entrypoint finetune 'a b.yaml' 'out=*'; echo \" $?\"; exec {HERE}/entrypoint test -k 'a or b'"
    done = subprocess.run(["sh", "-c", both], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    runs = f"esmshard {tmp_path} [finetune][a b.yaml][out=*] 7\n"
    tests = f"pytest {tmp_path / 'suite'} [-p][no:cacheprovider]{left_out}[-k][a or b]"
    assert (done.returncode, done.stdout) == (7, runs + tests), "the exit code is that of the program"


def test_silence_of_the_audit_is_not_taken_for_good_news() -> None:
    skipped = {"name": "a", "skip_reason": "Dependency not found on PyPI and could not be audited: a (1)"}
    clean = {"name": "b", "version": "1", "vulns": []}
    bad = {"name": "c", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
    for packages, code in (((clean,), 0), ((skipped, skipped), 3), ((clean, skipped), 3), ((skipped, bad), 1), ((), 3)):
        assert audit.verdict(json.dumps({"dependencies": packages, "fixes": []}), "")[0] == code
    assert audit.verdict("", "x\nno connection\n")[0] == 3


def test_the_conda_package_has_the_requirements_of_the_project() -> None:
    recipe = YAML(typ="safe").load(ROOT / "deploy" / "conda" / "recipe.yaml")
    assert recipe["context"]["version"] == esmshard.__version__
    assert f"esmshard = {PROJECT['scripts']['esmshard']}" in recipe["build"]["python"]["entry_points"]
    extras = [one for extra in ("h5", "plots", "tables") for one in PROJECT["optional-dependencies"][extra]]
    expected = {f"python {PROJECT['requires-python']}", "backports.zstd"}  # which the extra of xopen is
    for requirement in [*PROJECT["dependencies"], *extras]:
        name, bound = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(.*)", requirement).groups()  # type: ignore[union-attr]
        expected.add(f"{CONDA_NAMES.get(name, name)} {bound}")
    assert set(recipe["requirements"]["run"]) == expected
