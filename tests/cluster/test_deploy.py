"""What users get from deploy/: the image's versions and audit, and the requirements of the conda package.

`make image-steps` runs the Dockerfile's steps; here is what can be said without.
"""

import json
import re
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
import dockerfile  # noqa: E402
import layers  # noqa: E402

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SECRET = re.compile(r"token|secret|password|passwd|credential|api_?key", re.IGNORECASE)
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
"""Names of conda-forge that are not those of the package index."""


def test_no_secret_goes_into_a_layer() -> None:
    text = (ROOT / "Dockerfile").read_text()
    image = dockerfile.parse(text)
    given = [step for stage in image.stages for step in stage.steps if step.name in {"ARG", "ENV"}]
    names = [key for step in given for key, _ in dockerfile.pairs(step)]
    assert len(names) > 8
    assert [key for key in [*image.arguments, *names] if SECRET.search(key)] == []
    assert not re.search(r"^ADD|https?://[^ ]*@", text, re.MULTILINE)


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


def test_what_a_build_sees() -> None:
    """What the suite in the image needs, and nothing that merely lies in a clone."""
    seen = set(dockerfile.context(ROOT, (ROOT / ".dockerignore").read_text()))
    assert {"pyproject.toml", "constraints.txt", "deploy/image/lock.txt", "esmshard/cli/app.py"} <= seen
    tops = {name.split("/")[0] for name in seen if "/" in name}
    assert tops == {"esmshard", "recipes", "data", "tests", "benchmarks", "docs", "deploy"}
    assert not [name for name in seen if "__pycache__" in name or name.endswith((".pyc", ".whl"))]
    left_out = [line.split()[0] for line in (HERE / "left_out.txt").read_text().splitlines() if line[0] != "#"]
    assert all((ROOT / name.partition("::")[0]).is_file() for name in left_out)


def test_silence_of_the_audit_is_not_taken_for_good_news() -> None:
    skipped = {"name": "a", "skip_reason": "Dependency not found on PyPI and could not be audited: a (1)"}
    clean = {"name": "b", "version": "1", "vulns": []}
    bad = {"name": "c", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
    for packages, code in (((clean,), 0), ((skipped, skipped), 3), ((clean, skipped), 3), ((skipped, bad), 1), ((), 3)):
        assert audit.verdict(json.dumps({"dependencies": packages, "fixes": []}), "")[0] == code
    assert audit.verdict("", "x\nno connection\n")[0] == 3


def test_faults_of_layers_are_found(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    modes = {"usr/bin/gcc": 0o755, "opt/esmshard/bin/pip": 0o755, "tmp/left": 0o755, "dist/a.whl": 0o755}
    modes |= {"usr/bin/su": 0o4755, "opt/own": 0o700, "etc/open": 0o666}
    for path, mode in {good / "opt/esmshard/bin/python": 0o755, **{bad / k: v for k, v in modes.items()}}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.chmod(mode)
    assert layers.faults([good]) == []
    assert {fault.split("/", 1)[1] for fault in layers.faults([bad])} == {"dist", *modes}


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
