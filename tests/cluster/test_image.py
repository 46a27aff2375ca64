"""The Dockerfile as it reads, the lock beside pyproject.toml, and the scripts that the image is made and tested with.

`make image-steps` runs the Dockerfile's steps; here is what can be said without.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
HERE = ROOT / "deploy" / "image"
if not (ROOT / "Dockerfile").is_file():
    pytest.skip("needs the whole repository, whose Dockerfile these tests read", allow_module_level=True)
sys.path.insert(0, str(HERE))

import audit  # noqa: E402
import dependencies  # noqa: E402
import dockerfile  # noqa: E402
import layers  # noqa: E402

OTHER_NAMES = {
    "Bio": "biopython",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "esm": "fair-esm",
    "ruamel": "ruamel-yaml",
}
SECRET = re.compile(r"token|secret|password|passwd|credential|api_?key", re.IGNORECASE)


@pytest.fixture(scope="module")
def ours() -> dockerfile.Dockerfile:
    return dockerfile.parse((ROOT / "Dockerfile").read_text())


def steps(stage: dockerfile.Stage, name: str) -> list[dockerfile.Instruction]:
    return [step for step in stage.steps if step.name == name]


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_no_secret_goes_into_a_layer(ours: dockerfile.Dockerfile) -> None:
    given = [step for stage in ours.stages for step in stage.steps if step.name in {"ARG", "ENV"}]
    named = [key for step in given for key, _ in dockerfile.pairs(step)]
    assert len(named) > 8
    assert [key for key in [*ours.arguments, *named] if SECRET.search(key)] == []
    assert not re.search(r"^ADD|https?://[^ ]*@", (ROOT / "Dockerfile").read_text(), re.MULTILINE)


def test_the_lock_meets_the_floors_of_the_package() -> None:
    """All that `esmshard[test]` asks for on Linux, in a version it accepts; torch stands in constraints.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def asked(lines: list[str]) -> list[Requirement]:
        found = []
        for line in map(Requirement, lines):
            found += [r for extra in line.extras for r in asked(extras[extra])] if line.name == "esmshard" else [line]
        return found

    pins = dependencies.read_lock((HERE / "lock.txt").read_text())
    torch = dependencies.read_lock((ROOT / "constraints.txt").read_text())
    assert torch.keys() == {"torch"}
    assert "torch" not in pins
    needed = asked([*project["dependencies"], *extras["test"]])
    assert len(needed) > 25
    for requirement in needed:
        version = (pins | torch).get(dependencies.canonical(requirement.name))
        assert version, f"{requirement} is not in the lock: make lock"
        assert requirement.specifier.contains(version), f"{requirement}, but {version} in the lock: make lock"


def test_the_lock_names_what_its_packages_need() -> None:
    """Of the packages that are installed here: their requirements are locked, too."""
    pins = dependencies.read_lock((HERE / "lock.txt").read_text())
    missing = []
    for name in ("scikit-learn", "matplotlib", "transformers", "huggingface-hub", "pytest", "rich", "pandas"):
        for line in map(Requirement, requires(name) or []):
            wanted = line.marker is None or line.marker.evaluate({"extra": "", "python_version": "3.11"})
            if wanted and dependencies.canonical(line.name) not in pins:
                missing.append(f"{name}: {line}")
    assert missing == []


def test_a_base_with_its_own_torch_keeps_its_packages() -> None:
    pins = {"numpy": "2.4.6", "biopython": "1.88"}
    assert dependencies.requirements(pins, {"numpy", "pip"}, own_torch=True) == ["numpy", "biopython==1.88"]
    assert dependencies.requirements(pins, {"numpy", "pip"}, own_torch=False) == ["numpy==2.4.6", "biopython==1.88"]


def test_floors_are_compared_with_the_release_that_a_vendor_built_from() -> None:
    asked = ["torch>=2.11", "numpy>=1.26", "h5py>=3.10; extra == 'h5'"]
    assert dependencies.below_floor(asked, {"torch": "2.11.0a0+git1234.nv26.1", "numpy": "1.26.4"}) == []
    assert dependencies.below_floor(asked, {"torch": "2.10.0a0+nv", "scipy": "1.0"}) == [
        "torch 2.10.0a0+nv is installed; esmshard needs torch>=2.11",
        "numpy is not installed; esmshard needs numpy>=1.26",
    ]


def test_what_a_build_sees() -> None:
    """What the suite in the image needs, and nothing that merely lies in a clone."""
    seen = set(dockerfile.context(ROOT, (ROOT / ".dockerignore").read_text()))
    assert {"pyproject.toml", "constraints.txt", "tests/conftest.py", "tests/golden/contact_losses.txt"} <= seen
    assert {"deploy/image/lock.txt", "deploy/image/entrypoint", "recipes/contact.yaml", "docs/variants.md"} <= seen
    assert "esmshard/cli/app.py" in seen
    tops = {name.split("/")[0] for name in seen if "/" in name}
    assert tops == {"esmshard", "recipes", "data", "tests", "benchmarks", "docs", "deploy"}
    assert not [name for name in seen if "__pycache__" in name or name.endswith((".pyc", ".whl"))]


def test_the_reader_of_dockerfiles() -> None:
    text = """\
# a comment
ARG BASE=debian:12
FROM ${BASE} AS first

RUN --mount=type=bind,source=a,target=/a one \\
    # between
    && two
ENV A=1 \\
    B="two words" C=$A
FROM first
COPY --from=first --chmod=0755 /x /y
ENTRYPOINT ["tini", "--"]
"""
    found = dockerfile.parse(text)
    assert found.arguments == {"BASE": "debian:12"}
    run, env = found.stage("first").steps
    assert (run.line, run.flags, run.text) == (5, (("mount", "type=bind,source=a,target=/a"),), "one && two")
    assert dockerfile.pairs(env) == [("A", "1"), ("B", "two words"), ("C", "$A")]
    copied, entry = found.stages[1].steps
    assert copied.flags == (("from", "first"), ("chmod", "0755"))
    assert dockerfile.command(copied) == ["/x", "/y"]
    assert dockerfile.command(entry) == ["tini", "--"]
    values = {"A": "1", "EMPTY": ""}
    assert dockerfile.expand("$A-${A}-${B:-d}-${EMPTY:-e}-${A:+i}-${B:+i}-$B", values) == "1-1-d-e-i--"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite of its own, and programs in place of pytest and esmshard that print what they were given, and where."""
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "left_out.txt").write_text("# why\n\ntests/test_a.py::test_b needs a clone\ntests/c.py too\n")
    for name in ("pytest", "esmshard"):
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\nprintf "{name}\\n"; for a in "$@"; do printf "[%s]" "$a"; done\n'
            'printf "\\n%s\\n%s\\n" "$PWD" "$HYPOTHESIS_STORAGE_DIRECTORY"\nexit 7\n'
        )
        program.chmod(0o755)
    return tmp_path


def enter(suite: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{suite}:{os.environ['PATH']}", "ESMSHARD_SUITE": str(suite / "suite"), "TMPDIR": "/t"}
    return subprocess.run(
        [HERE / "entrypoint", *arguments],
        cwd=suite,
        env=env | {"HYPOTHESIS_STORAGE_DIRECTORY": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_entry_hands_everything_to_esmshard(suite: Path) -> None:
    done = enter(suite, "finetune", "a b.yaml", "out=*")
    assert done.stdout.splitlines() == ["esmshard", "[finetune][a b.yaml][out=*]", str(suite), ""]
    assert done.returncode == 7, "the exit code is esmshard's: 75 asks to be started again"
    assert enter(suite).stdout.startswith("esmshard\n")


def test_the_entry_runs_the_suite(suite: Path) -> None:
    done = enter(suite, "test")
    given = "[-p][no:cacheprovider][--ignore=tests/c.py][--deselect=tests/test_a.py::test_b]"
    workers = "[-n][2][--dist][loadfile][--no-loadscope-reorder]"
    assert done.stdout.splitlines() == ["pytest", given + workers, str(suite / "suite"), "/t/hypothesis"]
    assert done.stderr == "left out: tests/test_a.py::test_b (needs a clone)\nleft out: tests/c.py (too)\n"
    assert done.returncode == 7
    done = enter(suite, "test", "-m", "gpu", "-k", "a or b")
    assert done.stdout.splitlines()[1] == given + "[-m][gpu][-k][a or b]"


def left_out() -> dict[str, str]:
    lines = [line for line in (HERE / "left_out.txt").read_text().splitlines() if not line.startswith("#")]
    return {name: reason for name, _, reason in (line.partition(" ") for line in lines)}


def test_what_is_left_out_of_the_image_exists() -> None:
    assert len(left_out()) > 3
    for name, reason in left_out().items():
        file, _, test = name.partition("::")
        assert reason
        assert f"def {test}" in (ROOT / file).read_text()


def test_the_image_has_what_its_tests_import() -> None:
    """One module that is not there would keep pytest from running any test."""
    pins = dependencies.read_lock((HERE / "lock.txt").read_text()).keys() | {"torch", "esmshard"}
    own = {path.stem for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*")}
    missing, seen = [], set()
    for path in (ROOT / "tests").rglob("*.py"):
        if str(path.relative_to(ROOT)) in left_out():
            continue
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in {name.partition(".")[0] for name in names} - own - set(sys.stdlib_module_names):
                seen.add(name)
                if dependencies.canonical(OTHER_NAMES.get(name, name)) not in pins:
                    missing.append(f"{path.relative_to(ROOT)} imports {name}: into the extra `test`, or left_out.txt")
    assert missing == []
    assert {"pytest", "numpy", "torch", "esmshard", "hypothesis"} <= seen


def test_silence_of_the_audit_is_not_taken_for_good_news() -> None:
    skipped = {"name": "a", "skip_reason": "Dependency not found on PyPI and could not be audited: a (1)"}
    clean = {"name": "b", "version": "1", "vulns": []}
    bad = {"name": "c", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}

    def verdict(*packages: object) -> tuple[int, list[str]]:
        return audit.verdict(json.dumps({"dependencies": packages, "fixes": []}), "")

    assert verdict(clean) == (0, ["1 of 1 packages looked up, 0 known to be vulnerable."])
    code, said = verdict(skipped, skipped)
    assert code == 3
    assert said[0].startswith("NOT AUDITED: nothing was looked up; 2 of 2 packages. pip-audit: Dependency not found")
    code, said = verdict(clean, skipped)
    assert code == 3
    assert said[0].startswith("NOT AUDITED: a; 1 of 2 packages.")
    code, said = verdict(clean, skipped, bad)
    assert code == 1
    assert said[0] == "VULNERABLE: c 2: PYSEC-1; mended in: 2.1"
    assert verdict() == (3, ["NOT AUDITED: nothing was looked up. pip-audit: no report"])
    code, said = audit.verdict("", "x\nno connection\n")
    assert (code, said) == (3, ["NOT AUDITED: nothing was looked up. pip-audit: no connection"])


def test_faults_of_layers_are_found(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    files = ["usr/bin/gcc", "opt/esmshard/bin/pip", "tmp/left", "dist/a.whl", "usr/bin/su", "opt/own", "etc/open"]
    for path in [good / "opt/esmshard/bin/python", *(bad / name for name in files)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        path.chmod(0o755)
    (bad / "usr/bin/su").chmod(0o4755)
    (bad / "opt/own").chmod(0o700)
    (bad / "etc/open").chmod(0o666)
    assert layers.faults([good]) == []
    assert sorted(set(layers.faults([bad]))) == [
        "anyone may write: /etc/open",
        "compiler: /usr/bin/gcc",
        "left over: /dist",
        "left over: /dist/a.whl",
        "left over: /opt/esmshard/bin/pip",
        "left over: /tmp/left",
        "only its owner may read: /opt/own",
        "setuid or setgid: /usr/bin/su",
    ]


def test_being_unable_is_loud_and_in_ci_a_failure(tmp_path: Path) -> None:
    """Without `unshare` on the PATH, or without root."""
    for name in ("chroot", "mount", "ip"):
        (tmp_path / name).symlink_to(shutil.which("true") or "/bin/true")
    for flags, code in (([], 0), (["--required"], 1)):
        done = subprocess.run(
            [sys.executable, HERE / "run_steps.py", *flags],
            env={"PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code
        assert done.stderr.startswith("SKIPPED: the steps of the Dockerfile were not run and nothing is proved; ")
