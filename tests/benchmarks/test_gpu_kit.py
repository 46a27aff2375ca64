"""The archive for a GPU machine without network: what goes into it, and its installer in new environments.

pip is real and works on tiny wheels that are made here, one for each package of this environment; esmshard's wheel and
pip's are real, too.
"""

import ast
import base64
import ensurepip
import gzip
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from venv import EnvBuilder

import numpy as np
import pytest
import wheels
from packaging.requirements import Requirement
from packaging.version import Version

from esmshard import __version__
from esmshard.cluster.bundle.wheelhouse import RUNNING, Package, Target
from esmshard.errors import InputError, UsageError

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("needs the whole repository, of which these tests make an archive", allow_module_level=True)
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_install  # noqa: E402
import gpu_kit  # noqa: E402

TORCH = Version(importlib.metadata.version("torch")).base_version
OWN = f"esmshard-{__version__}-py3-none-any.whl"
INSTALLED = {
    gpu_kit.canonicalize_name(one.metadata["Name"]): (one.metadata["Name"], one.version)
    for one in importlib.metadata.distributions()
}


SEQUENCES = b">x\nMKTAYIAKQR\n"


def write_wheel(
    directory: Path, name: str, version: str, text: str = "", more: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """A wheel with one module, and more files in a directory of its name."""
    module = name.replace("-", "_").replace(".", "_")
    files = {f"{module}.py": text, **{f"{module}/{path}": line for path, line in more.items()}}
    return wheels.write_wheel(directory, name, version, files)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that pip finds: a tiny wheel for each installed package, and pip's own."""
    place = tmp_path_factory.mktemp("index")
    for name, version in INSTALLED.values():
        if name not in ("esmshard", "pip"):
            write_wheel(place, name, version)
    (pip,) = Path(str(ensurepip.__file__)).parent.glob("_bundled/pip-*.whl")
    shutil.copy(pip, place)
    return place


@pytest.fixture(scope="module")
def archive(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit for this very Python, which has everything but esmshard's wheel."""
    place = tmp_path_factory.mktemp("archive")
    starter = place / "starter"
    starter.mkdir()
    for name in gpu_kit.STARTER:
        (starter / name).write_bytes(name.encode())
    (starter / "sequences.fasta.gz").write_bytes(gzip.compress(SEQUENCES))
    for name in ("chains.npz", "valid_chains.npz"):
        np.savez_compressed(starter / name, names=[name], cb_dA=np.arange(30, dtype=np.int16).reshape(10, 3))
    (place / "has.txt").write_text("".join(f"{name}=={version}\n" for name, version in INSTALLED.values()))
    options = ["--python", RUNNING, "--platform", "here", "--torch", TORCH, "--has", str(place / "has.txt")]
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("PIP_")]:
            patch.delenv(variable)
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(index))
        patch.setattr(gpu_kit, "DICTIONARY", 2**20)
        out = place / "new" / "kit.tar.xz"
        assert gpu_kit.main([str(out), *options, "--starter", str(starter), "--preset", "0"]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["kit.tar.xz"]
    return out


@pytest.fixture(scope="module")
def unpacked(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("a place") / "it's"  # both in a path that shells and pip must quote
    place.mkdir()
    with tarfile.open(archive) as opened:
        opened.extractall(place, filter="data")
    assert [path.name for path in place.iterdir()] == ["gpu-kit"]
    return place / "gpu-kit"


def files_below(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_the_archive_has_a_checkout_without_the_package(unpacked: Path) -> None:
    files = files_below(unpacked)
    assert files["install.py"] == (ROOT / "benchmarks" / "gpu_install.py").read_bytes()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "CHANGELOG.md"):
        assert files[name] == (ROOT / name).read_bytes()
    for name in ("recipes/contact.yaml", "data/contact/train.npz", "data/variants/landscape.csv", "tests/conftest.py"):
        assert files[name] == (ROOT / name).read_bytes()
    # Whether git knows it yet or not.
    assert files["tests/benchmarks/test_gpu_kit.py"] == Path(__file__).read_bytes()
    assert {name for name in files if name.startswith(("esmshard/", "benchmarks/results/", "data/starter/"))} == set()
    assert not [name for name in files if "__pycache__" in name or name.endswith(".pyc")]


def test_training_data_keep_their_contents(unpacked: Path) -> None:
    place = unpacked / "starter-data"
    assert {path.name for path in place.iterdir()} == set(gpu_kit.STARTER)
    for name in ("chains.fasta", "valid_chains.fasta"):
        assert (place / name).read_text() == name
    for name in ("chains.npz", "valid_chains.npz"):
        with np.load(place / name) as arrays:
            assert sorted(arrays) == ["cb_dA", "names"]
            assert arrays["names"].tolist() == [name]
            assert arrays["cb_dA"].dtype == np.int16
            assert arrays["cb_dA"].ravel().tolist() == list(range(30))
    assert gzip.decompress((place / "sequences.fasta.gz").read_bytes()) == SEQUENCES
    assert SEQUENCES in (place / "sequences.fasta.gz").read_bytes()  # the archive's own compression sees it


def test_only_what_the_machine_lacks_travels(unpacked: Path) -> None:
    kit = json.loads((unpacked / "kit.json").read_text())
    assert kit["packages"].keys() == {"esmshard", "pip"}
    wheels = {path.name for path in (unpacked / "wheels").iterdir()}
    assert wheels == {OWN, kit["pip"]} == set(kit["wheels"])
    for name in wheels:
        assert kit["wheels"][name] == hashlib.sha256((unpacked / "wheels" / name).read_bytes()).hexdigest()
    # What the group asks for beyond the plain package: h5, hf, the reference implementation, and pytest.
    assert {"h5py", "transformers", "fair-esm", "pytest", "pytest-timeout", "numpy"} <= kit["expected"].keys()
    assert not {"torch", "esmshard", "pip", "matplotlib", "wandb"} & kit["expected"].keys()
    assert kit["expected"]["numpy"] == importlib.metadata.version("numpy")
    assert (kit["python"], kit["torch"], kit["torch_at_least"]) == (RUNNING, TORCH, "2.11")
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    assert kit.get("commit") == (head.stdout.strip() if head.returncode == 0 else None)


def test_wheels_are_the_originals_without_compression(index: Path, unpacked: Path) -> None:
    (name,) = [path.name for path in index.glob("pip-*.whl")]
    with zipfile.ZipFile(index / name) as original, zipfile.ZipFile(unpacked / "wheels" / name) as copy:
        assert copy.testzip() is None
        assert {one.compress_type for one in original.infolist()} == {zipfile.ZIP_DEFLATED}
        assert {one.compress_type for one in copy.infolist()} == {zipfile.ZIP_STORED}
        pairs = list(zip(original.infolist(), copy.infolist(), strict=True))
        assert len(pairs) > 400
        for before, after in pairs:
            for field in ("filename", "date_time", "external_attr", "create_system", "CRC", "file_size"):
                assert getattr(before, field) == getattr(after, field)
            assert original.read(before) == copy.read(after)


def test_test_suites_of_three_packages_stay_out(tmp_path: Path) -> None:
    for place in ("original", "copy"):
        (tmp_path / place).mkdir()
    more = {"part/tests/test_x.py": "x", "tests/__init__.py": "", "contests/tests.py": "kept"}
    for name, left_out in (("scikit-learn", True), ("h5py", False)):
        wheel = write_wheel(tmp_path / "original", name, "1.0", more=more)
        with zipfile.ZipFile(wheel) as original, zipfile.ZipFile(gpu_kit.stored(wheel, tmp_path / "copy")) as copy:
            lost = set(original.namelist()) - set(copy.namelist())
            module = name.replace("-", "_")
            assert lost == ({f"{module}/part/tests/test_x.py", f"{module}/tests/__init__.py"} if left_out else set())
            record = f"{module}-1.0.dist-info/RECORD"
            rows = [line.split(",") for line in copy.read(record).decode().splitlines()]
            assert [row[0] for row in rows] == copy.namelist()
            for path, announced, size in rows[:-1]:
                content = copy.read(path)
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                assert (announced, size) == (f"sha256={digest}", str(len(content)))


def test_tar_reads_the_archive_like_python(archive: Path, unpacked: Path, tmp_path: Path) -> None:
    if not shutil.which("tar") or not shutil.which("xz"):
        pytest.skip("needs tar and xz")
    subprocess.run(["tar", "-xf", archive, "-C", tmp_path], check=True)
    assert files_below(tmp_path / "gpu-kit") == files_below(unpacked)


def sealed(command: list[str]) -> list[str]:
    """The same, in a network namespace of its own, where that is allowed."""
    allowed = shutil.which("unshare") and subprocess.run(["unshare", "-rn", "true"], check=False).returncode == 0
    return ["unshare", "-rn", *command] if allowed else command


def fake_torch(directory: Path, text: str, version: str = "2.11.0+cu130") -> Path:
    """A directory for PYTHONPATH whose torch has a version; the real one takes seconds to import."""
    (directory / "fake" / "torch").mkdir(parents=True)
    (directory / "fake" / "torch" / "__init__.py").write_text(text)
    (directory / "fake" / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    return directory / "fake"


def install(kit: Path, home: Path, *arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run install.py without network, where every setting of pip would lead it astray."""
    settings = home / ".config" / "pip" / "pip.conf"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(f"[global]\nindex-url = http://127.0.0.1:9/\nno-binary = :all:\ntarget = {home}/elsewhere\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment |= {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "PIP_REQUIRE_HASHES": "1"}
    environment |= {"PIP_FIND_LINKS": "/nonexistent", "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_USER": "1"}
    environment |= more
    command = sealed([sys.executable, str(kit / "install.py"), *map(str, arguments)])
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, check=False)


def said(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(sealed([*map(str, command)]), cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


WHERE = "import esmshard, os, numpy; print(os.path.dirname(esmshard.__file__)); print(os.path.dirname(numpy.__file__))"


def test_the_kit_installs_without_network(unpacked: Path, tmp_path: Path) -> None:
    done = install(unpacked, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    venv = unpacked / ".venv"
    assert (venv / ".ready").is_file()
    assert not (tmp_path / "elsewhere").exists()
    (site,) = venv.glob("lib/python*/site-packages")
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert told["esmshard"] == f"{__version__}, {site / 'esmshard'}"
    assert told["torch"].startswith(importlib.metadata.version("torch"))
    assert told["CUDA:"]
    assert said(venv / "bin" / "esmshard", "recipes", "ls", cwd=tmp_path).startswith("contact ")
    assert said(venv / "bin" / "python", "-m", "esmshard", "--version", cwd=tmp_path).strip().endswith(__version__)
    ours, numpy = said(venv / "bin" / "python", "-c", WHERE, cwd=tmp_path).split("\n")[:2]
    assert ours == str(site / "esmshard")
    assert not numpy.startswith(str(venv))
    # The Makefile takes it for its own. Without the settings of a make that runs this suite: its `w` beats the option.
    alone = ("env", "--unset=MAKEFLAGS", "--unset=MAKELEVEL")
    question = ("make", "--no-print-directory", "--dry-run", "--question", venv.name + "/.ready")
    assert said(*alone, *question, cwd=unpacked) == ""
    again = install(unpacked, tmp_path)
    assert (again.returncode, again.stdout) == (1, "")
    assert "exists already; remove it (rm -r " in again.stderr
    assert (venv / ".ready").is_file()


def test_a_clone_runs_in_place_of_the_kit(unpacked: Path, tmp_path: Path) -> None:
    clone = tmp_path / "a 'clone'"
    (clone / "esmshard" / "cli").mkdir(parents=True)
    (clone / "esmshard" / "cli" / "__init__.py").touch()
    (clone / "esmshard" / "__init__.py").write_text("__version__ = '9.9'\n")
    (clone / "esmshard" / "cli" / "app.py").write_text("def main():\n    print(__file__)\n")
    (clone / "esmshard" / "__main__.py").write_text("from esmshard.cli.app import main\n\nmain()\n")
    venv = tmp_path / "venv"
    torch = (
        "from types import SimpleNamespace\n__version__ = '2.12'\ncuda = SimpleNamespace(is_available=lambda: False)\n"
    )
    done = install(unpacked, tmp_path, venv, "--source", clone, PYTHONPATH=str(fake_torch(tmp_path, torch)))
    assert (done.returncode, done.stderr) == (0, "")
    assert "CUDA: not available\n" in done.stdout
    assert f"esmshard 9.9, {clone / 'esmshard'}\n" in done.stdout
    for command in ([venv / "bin" / "esmshard"], [venv / "bin" / "python", "-m", "esmshard"]):
        assert said(*command, cwd=tmp_path) == f"{clone / 'esmshard' / 'cli' / 'app.py'}\n"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A kit with one tiny wheel."""
    kit = tmp_path / "kit"
    (kit / "wheels").mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks" / "gpu_install.py", kit / "install.py")
    wheel = write_wheel(kit / "wheels", "tiny", "1.0")
    (pip,) = Path(str(ensurepip.__file__)).parent.glob("_bundled/pip-*.whl")
    shutil.copy(pip, kit / "wheels")
    content = {"format": 1, "python": RUNNING, "machine": os.uname().machine, "glibc": None, "torch_at_least": "2.11"}
    content |= {"expected": {"numpy": None}, "installed_bytes": 1, "pip": pip.name}
    content["wheels"] = {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest()}
    (kit / "kit.json").write_text(json.dumps(content))
    return kit


def change(kit: Path, **values: object) -> None:
    path = kit / "kit.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(kit: Path, *arguments: str | Path, options: tuple[str, ...] = (), **more: str) -> str:
    """What install.py says where it installs nothing: one sentence."""
    before = set(kit.rglob("*"))
    command = [sys.executable, *options, str(kit / "install.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **more}, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert {path for path in kit.rglob("*") if path.name != "__pycache__"} == before
    return done.stderr


def test_the_installer_alone_is_no_kit(tmp_path: Path) -> None:
    shutil.copy(ROOT / "benchmarks" / "gpu_install.py", tmp_path / "install.py")
    assert "kit.json is missing; make a kit with `make gpu-kit`" in refused(tmp_path)
    (tmp_path / "kit.json").write_text('{"format": ')
    assert "kit.json is damaged; copy the archive to this machine again" in refused(tmp_path)
    (tmp_path / "kit.json").write_text('{"format": 2}')
    assert "kit.json is of another kind than this install.py; copy" in refused(tmp_path)


def test_a_machine_of_another_kind_is_refused(small: Path) -> None:
    change(small, python="3.99")
    assert f"is Python {RUNNING}, and the kit is for 3.99; run `python3.99 install.py`, or" in refused(small)
    change(small, python=RUNNING, machine="vax")
    assert "and the kit is for vax; make a kit with `make gpu-kit ARGUMENTS='--platform manylinux" in refused(small)
    change(small, machine=os.uname().machine, glibc="99.1")
    assert "and the kit needs glibc 99.1; use a newer system, or make" in refused(small)


def test_torch_must_be_there_and_new_enough(small: Path, tmp_path: Path) -> None:
    told = refused(small, options=("-S",))
    assert "has no torch; run install.py with the Python that has it, or first install it there: `" in told
    assert "-m pip install 'torch>=2.11'`" in told
    (tmp_path / "torch").mkdir()
    assert "has no torch" in refused(small, options=("-S",), PYTHONPATH=str(tmp_path))  # a directory is no package
    place = fake_torch(tmp_path, "raise SystemExit('imported')", "2.9.1+cu128")
    told = refused(small, options=("-S",), PYTHONPATH=str(place))
    assert f"torch 2.9.1+cu128 in {place / 'torch'} is too old, and 2.11 is needed; run" in told


def test_what_the_machine_was_said_to_have_must_be_there(small: Path) -> None:
    change(small, expected={"numpy": "1.0", "no-such-package": None, "another": "2.0"})
    assert "has no no-such-package, another, which this kit leaves out because of --has; make a kit" in refused(small)


def test_a_place_without_room_or_with_something_in_it_is_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    assert "there exists already; remove it (rm -r " in refused(small, tmp_path / "there")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    assert "dangling exists already" in refused(small, tmp_path / "dangling")
    assert "there/venv: Not a directory; correct that and run" in refused(small, tmp_path / "there" / "venv")
    assert "no virtual environment can be in a path with :; name another" in refused(small, tmp_path / "a:b")
    assert "--source kit: has no esmshard/__init__.py; give the directory of a clone" in refused(
        small, "--source", "kit"
    )
    change(small, installed_bytes=2**60)
    told = refused(small, tmp_path / "not" / "yet" / "venv")
    assert f"needs {2**40} MiB, and " in told
    assert f"are free in {tmp_path}; name a directory where there is room: install.py DIRECTORY" in told


def test_a_damaged_wheel_is_refused(small: Path) -> None:
    wheel = small / "wheels" / "tiny-1.0-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.write_bytes(content)
    told = refused(small)
    assert f"{wheel} is damaged (its sha256 is not the one in kit.json); copy the archive to this machine" in told
    assert told.endswith("again and unpack it: `tar -xf gpu-kit.tar.xz`\n")
    wheel.unlink()
    assert f"{wheel} is missing; copy the archive to this machine again" in refused(small)


def test_a_failed_installation_leaves_nothing(small: Path) -> None:
    wheel = small / "wheels" / "tiny-1.0-py3-none-any.whl"
    wheel.write_bytes(b"no archive at all")
    change(small, wheels={wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest()})
    told = refused(small)
    assert "pip could not install the wheels (ERROR: Wheel 'tiny'" in told


def test_an_installation_that_does_not_run_is_removed(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = fake_torch(tmp_path, "raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(place))
    monkeypatch.setattr(gpu_install, "KIT", small)
    monkeypatch.setattr(gpu_install, "_make", lambda venv, kit: EnvBuilder(symlinks=True).create(venv))
    assert gpu_install.main([str(small / "venv")]) == 1
    told = capsys.readouterr().err
    assert "what was installed does not run (OSError: libcudart.so.13: cannot open shared object file); look" in told
    assert not (small / "venv").exists()


def test_an_interrupted_installation_leaves_nothing(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(venv: Path, kit: dict[str, object]) -> None:
        venv.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_install, "KIT", small)
    monkeypatch.setattr(gpu_install, "_make", interrupt)
    assert gpu_install.main([str(small / "venv")]) == 130
    assert capsys.readouterr().err == "error: interrupted; nothing was installed, so run install.py again\n"
    assert not (small / "venv").exists()


def test_the_installer_needs_nothing_but_python() -> None:
    """An older Python reads it as far as the sentence that says which one is needed."""
    tree = ast.parse((ROOT / "benchmarks" / "gpu_install.py").read_text(), feature_version=(3, 7))
    names = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert len(names) > 10
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def made_up(*entries: str) -> dict[str, Package]:
    """Packages from lines as `name version: requirement, requirement`."""
    found = {}
    for entry in entries:
        head, _, asked = entry.partition(":")
        name, version = head.split()
        requires = tuple(one.strip() for one in asked.split(",") if one.strip())
        found[name] = Package(name, version, f"https://index/{name}-{version}-py3-none-any.whl", "", requires)
    return found


PACKAGES = made_up(
    'esmshard 1.0: torch>=2.11, array>=1.5, table[fast]>=2; extra == "gpu", checker; extra == "gpu", '
    'old; extra == "other"',
    "pip 26.0:",
    "torch 2.11.0: symbols>=1, array",
    "symbols 1.0:",
    "array 2.0: hf-xet",
    "hf-xet 1.0: tls",
    "tls 1.0:",
    'table 2.0: array>=2, columns, speed; extra == "fast", slow; extra == "slow"',
    "columns 1.0: array",
    "speed 1.0:",
    'checker 1.0: newer; python_version >= "3.12", older; python_version < "3.12"',
    "newer 1.0:",
    "older 1.0:",
    "slow 1.0:",
    "old 1.0:",
)
ALL = {"esmshard", "pip", "array", "table", "columns", "speed", "checker", "newer"}


@pytest.mark.parametrize(
    ("has", "left_out"),
    [
        ({}, set()),
        # In the version of the kit, in an older one that does, and in a version that nobody said.
        ({"columns": "1.0"}, {"columns"}),
        ({"checker": "0.1"}, {"checker", "newer"}),
        ({"array": None}, {"array"}),
        # `table` travels, and asks for a newer one than esmshard does.
        ({"array": "1.7"}, set()),
        # With the machine's `table` only esmshard and `torch` ask for it.
        ({"array": "1.7", "table": "3.0"}, {"array", "table", "columns"}),
        # Too old for esmshard itself, so that all below it travels as well.
        ({"array": "1.7", "table": "1.9"}, set()),
        # What a package needs is not followed, but for what an extra brings.
        ({"table": "2.0"}, {"table", "columns"}),
        ({"table": "2.0", "speed": None}, {"table", "columns", "speed"}),
        # These always travel, and a package that the kit does not need changes nothing.
        ({"esmshard": "1.0", "pip": "26.0", "unknown": "1.0", "old": None, "torch": None, "hf-xet": None}, set()),
    ],
)
def test_what_the_machine_has_stays_out(has: dict[str, str | None], left_out: set[str]) -> None:
    roots = [Requirement("esmshard[gpu]"), Requirement("pip")]
    environment = Target("3.12", "manylinux_2_28_x86_64").environment()
    travelling, expected = gpu_kit.divided(PACKAGES, roots, has, environment)
    assert travelling == ALL - left_out
    assert expected == {name: has[name] for name in sorted(left_out & has.keys())}


def test_packages_of_the_machine_are_read_as_pip_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "has.txt"
    lines = ["# a comment", "", "Ruamel.YAML==0.19.1", "huggingface_hub", "torch==2.11.0+cu130", "numpy == 2.4  # why"]
    lines += ["-e git+https://host/x.git@1#egg=x", "local @ file:///place/local-1.0-py3-none-any.whl"]
    lines += ["distribution-s-own==1.7build1", "legacy===1.0"]
    path.write_text("\n".join(lines))
    assert gpu_kit.read_has(path) == {
        "ruamel-yaml": "0.19.1",
        "huggingface-hub": None,
        "torch": "2.11.0+cu130",
        "numpy": "2.4",
        "local": None,
        "legacy": "1.0",
    }
    path.write_text("numpy\nscipy>=1.0\n")
    with pytest.raises(UsageError, match=r"has\.txt:2: `scipy>=1\.0` is neither `name==version` nor `name`; correct"):
        gpu_kit.read_has(path)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--platform", "windows"], "--platform windows: a name such as manylinux_2_28_x86_64, or `here`, is expected"),
        (["--python", "3"], "--python 3: a version such as 3.12 is expected"),
        (["--torch", "latest"], "--torch latest: a release such as 2.11.0 is expected"),
        (["--starter", "."], "--starter .: has no chains.fasta, chains.npz, valid_chains.fasta, valid_chains.npz, seq"),
        (["--has", "has.txt"], "has.txt: the machine has torch 2.12.1+cu130; pass --torch 2.12.1"),
        (["--has", "nothing.txt"], "nothing.txt: No such file or directory; correct that and try again"),
    ],
)
def test_a_wrong_request_is_one_sentence(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("has.txt").write_text("torch==2.12.1+cu130\n")
    assert gpu_kit.main(["kit.tar.xz", *arguments]) in (1, 2)
    assert capsys.readouterr().err.startswith(f"error: {told}")
    assert [path.name for path in tmp_path.iterdir()] == ["has.txt"]


def tiny_collect(work: Path, request: gpu_kit.Request) -> tuple[list[Package], dict[str, object]]:
    """In place of pip: two wheels, one of them large."""
    for place in ("fetched", "wheels"):
        (work / place).mkdir()
    write_wheel(work / "fetched", "esmshard", "1.0")
    write_wheel(work / "fetched", "huge", "1.0", text=f"{bytes(os.urandom(300_000)).hex()!r}")
    return [], {"expected": {}}


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setattr(gpu_kit, "collect", tiny_collect)
    monkeypatch.setattr(gpu_kit, "CHECKOUT", ("LICENSE",))
    monkeypatch.setattr(gpu_kit, "DICTIONARY", 2**20)

    def make(output: Path, limit: float) -> str:
        return gpu_kit.build(output, gpu_kit.Request(Target(), TORCH, {}, None, limit, 0))

    return make


def test_an_archive_that_is_too_large_is_removed(build: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"MiB, and at most 0\.1 are allowed \(--limit\); the largest wheels are huge"):
        build(tmp_path / "kit.tar.xz", 0.1)
    assert list(tmp_path.iterdir()) == []
    assert build(tmp_path / "kit.tar.xz", 60).startswith(f"{tmp_path / 'kit.tar.xz'}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["kit.tar.xz"]


def test_an_archive_that_exists_is_replaced_only_where_asked(
    build: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kit.tar.xz"
    out.write_text("mine")
    assert gpu_kit.main([str(out)]) == 2
    assert "exists already; choose another name or pass --overwrite" in capsys.readouterr().err
    assert gpu_kit.main([str(out), "--overwrite", "--limit", "0.1"]) == 1
    assert out.read_text() == "mine"
    assert gpu_kit.main([str(out), "--overwrite", "--preset", "0"]) == 0
    with tarfile.open(out) as opened:
        assert "gpu-kit/wheels/huge-1.0-py3-none-any.whl" in opened.getnames()


def test_files_are_found_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    with_git = set(gpu_kit.checkout_files())
    monkeypatch.setattr(gpu_kit, "_git", lambda *arguments: None)
    found = gpu_kit.checkout_files()
    assert with_git <= set(found)
    assert {"tests/benchmarks/test_gpu_kit.py", "recipes/contact.yaml", "LICENSE"} <= with_git
    assert not [name for name in found if "__pycache__" in name or name.startswith("benchmarks/results/")]
    assert gpu_kit.revision() == {}
