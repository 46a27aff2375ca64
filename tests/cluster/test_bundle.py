"""Bundles for sites without internet: real pip against tiny wheels that are made here, and the real thing once."""

import ensurepip
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import wheels
from hub_server import COMMIT, NAME, Hub, own_caches, snapshot
from hub_server import sha256 as hub_sha256
from huggingface_hub import snapshot_download

from esmshard import __version__
from esmshard.cluster.bundle import build_bundle, wheelhouse
from esmshard.cluster.bundle.build_bundle import BundleRequest, bundle
from esmshard.cluster.bundle.drivers import WHEELS
from esmshard.cluster.bundle.own_wheel import own_wheel
from esmshard.cluster.bundle.wheelhouse import Target
from esmshard.errors import InputError, UsageError
from esmshard.files import sha256
from esmshard.model.weights import hub

ROOT = Path(__file__).parent.parent.parent
GUIDE = ROOT / "docs" / "airgapped.md"
PLAIN = BundleRequest(extras=())
OF_THIS_MACHINE = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
OWN = f"esmshard-{__version__}-py3-none-any.whl"

PROGRAM = f"""\
import pathlib, sys
def main():
    if sys.argv[1:] == ["--version"]:
        print("esmshard {__version__}")
    if sys.argv[1] == "embed":
        pathlib.Path("check.npy").write_text("")
"""
"""Of the tiny esmshard: what install.sh calls to see whether the installation works."""
FINDS = """\
import os, pathlib
def find(name):
    return next(pathlib.Path(os.environ["HF_HOME"]).glob(f"hub/models--facebook--{name}/snapshots/*/config.json"), None)
"""


def write_wheel(
    directory: Path, name: str, version: str, requires: tuple[str, ...] = (), tag: str = "py3-none-any", **modules: str
) -> Path:
    """A wheel that pip installs. `__` in the names of modules is a slash."""
    files = {f"{key.replace('__', '/')}.py": text for key, text in modules.items()} or {f"{name}.py": ""}
    if name == "esmshard":
        files["*.dist-info/entry_points.txt"] = "[console_scripts]\nesmshard = esmshard.cli.app:main\n"
    metadata = "".join(f"Requires-Dist: {one}\n" for one in requires) + "Provides-Extra: h5\n"
    return wheels.write_wheel(directory, name, version, files, metadata=metadata, tag=tag)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that pip finds: tiny wheels, among them a torch and what it needs here and elsewhere; pip's is its own."""
    place = tmp_path_factory.mktemp("index")
    torch = importlib.metadata.version("torch").partition("+")[0]
    needs = ("numpy>=2", 'later>=2; python_version >= "3.13"', 'earlier; python_version < "3.13"')
    for tag in ("cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64", "cp312-cp312-manylinux_2_28_x86_64"):
        write_wheel(place, "torch", torch, needs, tag)
    write_wheel(place, "torch", torch, needs, "cp313-cp313-manylinux_2_28_x86_64")
    for name in ("numpy", "earlier", "later", "h5py"):
        write_wheel(place, name, "2.0")
        write_wheel(place, name, "1.0")
    (pip,) = Path(str(ensurepip.__file__)).parent.glob("_bundled/pip-*.whl")
    shutil.copy(pip, place)
    return place


def tiny(into: Path) -> Path:
    """In place of the wheel of this clone, which is tested by itself."""
    modules = {"esmshard____init__": "", "esmshard__cli____init__": "", "esmshard__cli__app": PROGRAM}
    modules |= {"esmshard__model____init__": "", "esmshard__model__weights____init__": ""}
    modules |= {"esmshard__model__weights__hub": FINDS}
    return write_wheel(into, "esmshard", __version__, ("torch>=2", 'h5py; extra == "h5"'), **modules)


@pytest.fixture(scope="module", autouse=True)
def _only_tiny_wheels(index: Path) -> Iterator[None]:
    """Nothing of the indexes that pip knows on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("PIP_")]:
            patch.delenv(variable)
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(index))
        patch.setattr(build_bundle, "own_wheel", tiny)
        yield


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub with a tiny model under a released name, for processes that are started."""
    files = {"config.json": b"{}", "vocab.txt": b"<cls>\n", "model.safetensors": os.urandom(5000)}
    with Hub(files) as running, pytest.MonkeyPatch.context() as patch:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        patch.setenv("HF_ENDPOINT", running.url)
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv("NO_PROXY", "*")
        own_caches(tmp_path_factory.mktemp("caches"), patch)
        yield running
        running.shutdown()


ODD = "a b; touch pwned $(touch pwned) 'q\""


@pytest.fixture(scope="module")
def made(index: Path, released: Hub, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A bundle in a directory with an odd name, and what was said of it. It was interrupted when all was there."""
    out = tmp_path_factory.mktemp("made") / ODD
    asked = BundleRequest(extras=("h5",), weights=(NAME,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_bundle, "_write_files", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bundle(out, asked)
    return out, bundle(out, asked)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def wheels_of(directory: Path) -> list[str]:
    return sorted("-".join(path.name.split("-")[:2]) for path in (directory / "wheels").iterdir())


def sealed(command: list[str]) -> list[str]:
    """The same, in a network namespace of its own, where that is allowed."""
    allowed = shutil.which("unshare") and subprocess.run(["unshare", "-n", "true"], check=False).returncode == 0
    return ["unshare", "-n", *command] if allowed else command


def install(directory: Path, *arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(directory / "install.sh"), *map(str, arguments)]
    env = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
    } | more
    return subprocess.run(sealed(command), env=env, capture_output=True, text=True, timeout=1800, check=False)


def own_python() -> str:
    """The interpreter below a virtual environment."""
    return str(Path(sys.base_prefix, "bin", f"python{wheelhouse.RUNNING}"))


def test_a_bundle_lists_all_that_is_in_it(made: tuple[Path, str], released: Hub) -> None:
    out, told = made
    # Nothing came twice.
    assert released.asked == ["list", "model.safetensors", "vocab.txt", "config.json"]
    held = json.loads((out / "bundle.json").read_text())
    assert wheels_of(out)[0] == "earlier-2.0"
    assert {name.split("-")[0] for name in wheels_of(out)} == {"earlier", "esmshard", "h5py", "numpy", "pip", "torch"}
    assert (held["python"], held["glibc"], held["extras"]) == (wheelhouse.RUNNING, "2.27", ["h5"])
    assert held["weights"] == {NAME: COMMIT}
    assert held["torch"]["cuda"] is None
    snapshot = out / f"hf/hub/models--facebook--{NAME}/snapshots/{COMMIT}"
    assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == released.files
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert sorted(path.name for path in (out / "hf/hub").iterdir()) == [f"models--facebook--{NAME}"]
    sums = dict(reversed(line.split("  ")) for line in (out / "SHA256SUMS").read_text().splitlines())  # type: ignore[misc]
    assert set(sums) == {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} - {"SHA256SUMS"}
    assert sums[f"{snapshot.relative_to(out)}/model.safetensors"] == hub_sha256(released.files["model.safetensors"])
    assert f"sha256 of SHA256SUMS: {sha256(out / 'SHA256SUMS')}" in told
    assert not list(out.parent.rglob("pwned"))
    assert not list(Path.cwd().glob("pwned"))


def test_a_bundle_installs_in_an_empty_place_without_network(made: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / ODD
    shutil.copytree(made[0], out)
    write_wheel(out / "wheels", "numpy", "9.0", numpy="raise SystemExit('planted')")  # newer, and in no list
    site = tmp_path / "the site's; place"
    (site / "venv" / "bin").mkdir(parents=True)  # as an installation leaves that was interrupted
    (site / ".incomplete").touch()
    # A variable of the site that would take pip elsewhere is of no consequence.
    done = install(out, "--python", own_python(), site, PIP_TARGET="/nonexistent", PYTHONPATH="/nonexistent")
    assert done.returncode == 0, done.stderr
    assert f"esmshard {__version__}\n" in done.stdout
    assert not (site / ".incomplete").exists()
    installed = {path.name.removesuffix(".dist-info") for path in (site / "venv").rglob("*.dist-info")}
    assert installed == set(wheels_of(made[0]))
    script = 'source "$1"; echo "$HF_HUB_OFFLINE $WANDB_MODE $PIP_NO_INDEX $HF_HOME"; esmshard --version'
    sourced = subprocess.run(["bash", "-c", script, "-", site / "env.sh"], capture_output=True, text=True, check=True)
    assert sourced.stdout == f"1 offline 1 {site}/hf\nesmshard {__version__}\n"
    found = Path(snapshot_download(f"facebook/{NAME}", cache_dir=site / "hf" / "hub", local_files_only=True))
    assert found.name == COMMIT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(site / "hf" / "hub"))
        assert hub.find(NAME) == found
    again = install(out, "--python", own_python(), site)
    assert again.returncode == 1
    assert again.stderr == f"error: {site}: exists already; choose another directory\n"
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("file", ["wheels/numpy-2.0-py3-none-any.whl", "requirements.txt", "bundle.json"])
def test_files_that_were_changed_are_not_installed(made: tuple[Path, str], tmp_path: Path, file: str) -> None:
    shutil.copytree(made[0], tmp_path / "out")
    with (tmp_path / "out" / file).open("ab") as changed:
        changed.write(b"\n")
    done = install(tmp_path / "out", "--python", own_python(), tmp_path / "site")
    assert done.returncode == 1
    assert f"{file}: FAILED" in done.stdout
    assert "not what SHA256SUMS says; copy the bundle again" in done.stderr
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--python", "/usr/bin/false"], "/usr/bin/false: does not run"),
        (["--python", "nopython"], f"nopython: not found; name Python {wheelhouse.RUNNING} with --python"),
        (["--pyton", "x"], "--pyton: unknown option; see install.sh --help"),
        (["a", "b"], "b: one directory is expected"),
        (["/tmp/$(id)"], '/tmp/$(id): choose a directory without $, `, ", \\, : and line breaks in its path'),
    ],
)
def test_what_is_wrong_on_the_site_is_said(
    made: tuple[Path, str], tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    done = install(made[0], *arguments, HOME=str(tmp_path / "home"))
    assert done.returncode in (1, 2)
    assert done.stderr.splitlines()[-1] == f"error: {sentence}"
    assert not (tmp_path / "home").exists()


def test_a_site_of_another_kind_is_said(made: tuple[Path, str], tmp_path: Path) -> None:
    for setting, value, sentence in (
        ("machine", "riscv64", "and the bundle is for Linux riscv64; make one with --platform"),
        ("glibc", "2.99", "and the bundle needs glibc 2.99; make one with --platform manylinux_2"),
        (
            "python_version",
            "3.10",
            "and the bundle is for 3.10; name one with --python, or make a bundle with --python",
        ),
        ("needed_kib", str(10**13), "MiB are free; choose another directory"),
    ):
        out = tmp_path / setting
        shutil.copytree(made[0], out)
        script = out / "install.sh"
        lines = [f"{setting}='{value}'" if x.startswith(f"{setting}=") else x for x in script.read_text().splitlines()]
        old = sha256(script)
        script.write_text("\n".join(lines) + "\n")
        sums = (out / "SHA256SUMS").read_text()
        assert old != sha256(script)
        (out / "SHA256SUMS").write_text(sums.replace(old, sha256(script)))
        done = install(out, "--python", own_python(), tmp_path / "site")
        assert done.returncode == 1
        assert sentence in done.stderr.splitlines()[-1]


def test_the_script_is_clean_for_shellcheck(made: tuple[Path, str]) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("needs shellcheck")
    checked = subprocess.run([shellcheck, made[0] / "install.sh"], capture_output=True, text=True, check=False)
    assert checked.stdout == ""
    assert not re.search(r"'@\w+@'", (made[0] / "install.sh").read_text())


def test_another_python_gets_what_its_markers_ask_for(index: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()  # an empty directory is as good as none
    # pip alone would judge the markers by the Python that runs it.
    bundle(tmp_path / "out", BundleRequest(extras=(), python="3.13", platform="manylinux_2_34_x86_64"))
    names = wheels_of(tmp_path / "out")
    assert "later-2.0" in names
    assert not any(name.startswith("earlier") for name in names)
    assert next(path.name for path in (tmp_path / "out/wheels").glob("torch*")).split("-")[2] == "cp313"
    held = json.loads((tmp_path / "out/bundle.json").read_text())
    assert (held["python"], held["platform"], held["machine"]) == ("3.13", "manylinux_2_34_x86_64", "x86_64")
    assert held["glibc"] == "2.28"


def test_a_package_without_a_wheel_is_named(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError) as caught:
        bundle(tmp_path / "old", BundleRequest(extras=(), platform="manylinux2014_x86_64"))
    assert str(caught.value).startswith("torch==")
    assert f"no wheel for Python {wheelhouse.RUNNING} on manylinux2014_x86_64 in the package indexes" in str(
        caught.value
    )
    for wheel in (*index.glob("torch-*"), *index.glob("pip-*"), *index.glob("earlier-*")):
        shutil.copy(wheel, tmp_path)
    (tmp_path / "numpy-2.0.tar.gz").write_bytes(b"source code")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(InputError, match=r"^numpy>=2: no wheel for Python 3\.\d+ on this platform"):
        bundle(tmp_path / "out", PLAIN)


def test_a_build_of_torch_comes_from_its_own_index(index: Path, tmp_path: Path) -> None:
    version = PLAIN.index.pinned[0].split("==")[1]
    place = tmp_path / "builds" / "cpu" / "torch"
    place.mkdir(parents=True)
    wheel = write_wheel(place, "torch", f"{version}+cpu", ("numpy",), "cp312-cp312-manylinux_2_28_x86_64")
    (place / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    # --no-index would keep pip from it; an empty index stands in for the usual one.
    (tmp_path / "none").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PIP_NO_INDEX")
        patch.setenv("PIP_INDEX_URL", (tmp_path / "none").as_uri())
        asked = BundleRequest(extras=(), torch="cpu", python="3.12", platform="manylinux_2_28_x86_64")
        bundle(tmp_path / "out", BundleRequest(**{**vars(asked), "torch_index": (tmp_path / "builds").as_uri()}))
    assert json.loads((tmp_path / "out/bundle.json").read_text())["torch"]["version"] == f"{version}+cpu"


class Served(SimpleHTTPRequestHandler):
    """A package index over HTTP, that counts what is taken from it."""

    taken: list[str]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.taken.append(self.path.rsplit("/", 1)[-1])
        super().do_GET()


@pytest.fixture
def served(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two packages on a web server, the others in a directory; the files that were taken from the server."""
    simple, local = tmp_path / "web" / "simple", tmp_path / "local"
    local.mkdir()
    for wheel in (*index.glob("torch-*"), *index.glob("pip-*")):
        shutil.copy(wheel, local)
    for wheel in (*index.glob("numpy-*"), *index.glob("earlier-*")):
        page = simple / wheel.name.split("-")[0]
        page.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, page)
        with (page / "index.html").open("a") as file:
            file.write(f'<a href="{wheel.name}#sha256={sha256(wheel)}">{wheel.name}</a>\n')
    handler = type("Handler", (Served,), {"taken": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path / "web"))) as server:  # type: ignore[arg-type]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_FIND_LINKS", str(local))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("NO_PROXY", "*")
        yield handler.taken  # type: ignore[attr-defined]
        server.shutdown()


def test_an_interrupted_bundle_goes_on(served: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    real, came = wheelhouse.fetch, []

    def third_is_interrupted(package: wheelhouse.Package, *rest: object) -> Path:
        if len(came) == 2:
            raise KeyboardInterrupt
        came.append(package.file)
        return real(package, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(wheelhouse, "fetch", third_is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        bundle(out, PLAIN)
    monkeypatch.setattr(wheelhouse, "fetch", real)
    assert came == ["earlier-2.0-py3-none-any.whl", "numpy-2.0-py3-none-any.whl"]
    assert not (out / "SHA256SUMS").exists()

    with pytest.raises(UsageError, match="with another extras, torch; pass the same"):
        bundle(out, BundleRequest(torch="cpu"))

    whole, damaged = (out / "wheels" / name for name in came)
    damaged.write_bytes(b"cut off")
    (out / "wheels" / "pip-junk.tmp").touch()
    before = whole.stat()
    served.clear()
    bundle(out, PLAIN)
    assert (whole.stat().st_mtime_ns, whole.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert "earlier-2.0-py3-none-any.whl" not in served
    assert served.count("numpy-2.0-py3-none-any.whl") == 1
    assert zipfile.is_zipfile(damaged)
    assert not (out / ".partial.json").exists()
    assert not (out / "wheels" / "pip-junk.tmp").exists()
    check = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=out, capture_output=True, check=False
    )
    assert check.returncode == 0


def test_a_wheel_that_its_index_does_not_announce_is_refused(served: list[str], tmp_path: Path) -> None:
    # Changed behind the back of the index, whose page has the sum of another file.
    page = tmp_path / "web" / "simple" / "earlier"
    write_wheel(page, "earlier", "2.0", earlier="print('changed')")
    with pytest.raises(InputError, match=r"^earlier: is not the file that its index announces"):
        bundle(tmp_path / "out", PLAIN)
    assert not (tmp_path / "out" / "wheels" / "earlier-2.0-py3-none-any.whl").exists()


def test_a_wheel_that_cannot_be_copied_is_said(tmp_path: Path) -> None:
    package = wheelhouse.Package("gone", "1", (tmp_path / "gone-1-py3-none-any.whl").as_uri(), "", ())
    with pytest.raises(InputError) as caught:
        wheelhouse.fetch(package, tmp_path, Target(), PLAIN.index)
    assert str(caught.value) == (
        f"{package.url}: cannot be copied to {tmp_path} (no such file or directory); fix that and try again"
    )


def test_an_index_out_of_reach_is_said(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(InputError, match=r"^pip: the package index could not be reached; run the command where"):
        bundle(tmp_path / "out", PLAIN)


def test_directories_that_exist(made: tuple[Path, str], tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=r"mine: exists already and is no bundle; choose another directory"):
            bundle(mine, PLAIN, overwrite)
    assert (mine / "thesis.txt").read_text() == "years of work"
    out = tmp_path / "out"
    shutil.copytree(made[0], out)
    with pytest.raises(UsageError, match=r"out: exists already; choose another directory or pass --overwrite"):
        bundle(out, PLAIN)
    bundle(out, PLAIN, overwrite=True)
    assert not any(name.startswith("h5py") for name in wheels_of(out))
    assert not (out / "hf").exists()


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"weights": ("esm2_t33_650M_UR50",)}, "--weights esm2_t33_650M_UR50: not a released model; did you mean "),
        ({"extras": ("plot",)}, "--extras plot: no such part; did you mean plots?"),
        ({"python": "3.9"}, "--python 3.9: a version from 3.11 on is expected, as 3.12"),
        ({"python": "3"}, "--python 3: a version from 3.11 on is expected, as 3.12"),
        ({"platform": "linux"}, "--platform linux: a name as manylinux_2_28_x86_64 is expected"),
        ({"torch": "cu131"}, "--torch cu131: esmshard runs on no such build; did you mean cu132?"),
        ({"torch": "cu118"}, "--torch cu118: esmshard runs on no such build; did you mean cu128?"),
        ({"torch_version": "2"}, "--torch-version 2: a release is expected, as 2.13.0"),
        (
            {"torch": "cu128", "torch_version": "2.13.0"},
            "--torch cu128: torch 2.13.0 is not built for it, releases from 2.7 to 2.11 are; choose one by "
            "--torch-version, or another --torch",
        ),
        (
            {"torch": "cu132", "torch_version": "2.11.0"},
            "--torch cu132: torch 2.11.0 is not built for it, releases from 2.12 on are; choose one by "
            "--torch-version, or another --torch",
        ),
    ],
)
def test_wrong_options_are_one_sentence_each(request_: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_bundle.check(BundleRequest(**request_))  # type: ignore[arg-type]
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(sentence)


def test_builds_of_torch_that_there_are_pass() -> None:
    for build, version in (("cu128", "2.11.0"), ("cu126", "2.13.0"), ("cu130", "2.13.0"), ("cpu", "2.13.0")):
        build_bundle.check(BundleRequest(torch=build, torch_version=version))
    asked = BundleRequest(torch="cu126", torch_version="2.13.0").index
    assert asked == wheelhouse.WheelIndex("https://download.pytorch.org/whl/cu126", ("torch==2.13.0+cu126",))


def test_what_pip_is_asked_for_a_platform() -> None:
    options = Target("3.12", "manylinux_2_17_aarch64").options()
    platforms = [options[at + 1] for at, option in enumerate(options) if option == "--platform"]
    assert platforms[:2] == ["manylinux_2_17_aarch64", "manylinux_2_16_aarch64"]
    assert {"manylinux2014_aarch64", "linux_aarch64"} <= set(platforms)
    assert "manylinux_2_28_aarch64" not in platforms
    assert Target().options() == ["--only-binary", ":all:"]
    packages = [wheelhouse.Package("nvidia-cuda-runtime-cu12", "12.8.90", "u", "", ())]
    assert wheelhouse.cuda_of(packages) == "12.8"
    assert wheelhouse.cuda_of([wheelhouse.Package("cuda-toolkit", "13.0.3.0", "u", "", ())]) == "13.0"


def test_pip_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The environments that uv makes are of this kind.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    code = "from esmshard.cluster.bundle import wheelhouse; wheelhouse.run_pip(['--version'])"
    paths = [str(ROOT), str(tmp_path / "site")]
    shutil.copytree(Path(importlib.util.find_spec("packaging").origin).parent, tmp_path / "site" / "packaging")  # type: ignore[union-attr,arg-type]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [tmp_path / "venv/bin/python", "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert "has no pip, which collects the wheels; `" in done.stderr.splitlines()[-1]


def test_weights_of_the_users_cache_are_copied_and_compared(
    released: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = own_caches(tmp_path, monkeypatch)
    body = released.files["model.safetensors"]
    blob = cache / "blobs" / hub_sha256(body)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(body)
    kept = snapshot(cache, {"config.json": b"{}"}, "abcdef" + 34 * "0")
    (kept / "model.safetensors").symlink_to(blob)
    released.asked.clear()
    bundle(tmp_path / "out", BundleRequest(extras=(), weights=(NAME,)))
    assert released.asked == []
    assert next((tmp_path / "out").rglob("refs/main")).read_text() == "abcdef" + 34 * "0"
    (copied,) = (tmp_path / "out").rglob("model.safetensors")
    assert copied.read_bytes() == body
    assert not copied.is_symlink()
    blob.write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"model\.safetensors is damaged .*; remove .*snapshots"):
        bundle(tmp_path / "other", BundleRequest(extras=(), weights=(NAME,)))


def test_weights_that_do_not_come_are_one_sentence(
    released: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(released.sent, "model.safetensors", bytes(5000))
    top = tmp_path / "hub" / f"models--facebook--{NAME}"
    with pytest.raises(InputError, match=rf"^{NAME}: model\.safetensors .* has sha256 .* was announced") as caught:
        build_bundle._downloaded(NAME, tmp_path / "hub", top)
    assert "\n" not in str(caught.value)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


PACKS = """
import pathlib, sys, esmshard
from esmshard.cluster.bundle.own_wheel import own_wheel
into = pathlib.Path(sys.argv[1])
own_wheel(into)
with pathlib.Path(esmshard.__file__).with_name("vocab.py").open("a") as file:
    file.write("# edited")
try:
    own_wheel(into)
except ValueError as error:
    print(error)
"""
"""Of an installed esmshard: its wheel, and none after one of its files was edited."""


def test_the_own_wheel_of_a_clone_and_of_an_installation_are_one(tmp_path: Path) -> None:
    (tmp_path / "clone").mkdir()
    (tmp_path / "packed").mkdir()
    built = own_wheel(tmp_path / "clone")
    assert built.name == OWN
    assert [path.name for path in (tmp_path / "clone").iterdir()] == [OWN]
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, built]
    subprocess.run(pip, check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-P", "-c", PACKS, str(tmp_path / "packed")],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    found, wanted = contents(tmp_path / "packed" / OWN), contents(built)
    info = f"esmshard-{__version__}.dist-info/RECORD"
    assert sorted(found.pop(info).decode().splitlines()) == sorted(wanted.pop(info).decode().splitlines())
    assert found == wanted
    assert done.stdout == (
        f"{site}/esmshard/vocab.py: is not the file that was installed, so no wheel can be made of it; "
        "install esmshard again\n"
    )


def documented(language: str) -> str:
    """The code block of a language in the guide."""
    found = re.search(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found
    return found[1]


def test_the_guide_has_the_table_of_drivers() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in GUIDE.read_text().splitlines() if "| `cu" in line
    ]
    wanted = []
    for wheel in WHEELS.values():
        if wheel.is_usable:
            capabilities = ", ".join(f"{major}.{minor}" for major, minor in wheel.capabilities)
            until = f"to {wheel.last_torch}" if wheel.last_torch else "and newer"
            cells = [f"`{wheel.index}`", wheel.cuda, wheel.driver, capabilities, f"{wheel.first_torch} {until}"]
            wanted.append(cells)
    assert rows == wanted


SET = [
    "PATH=/apps/esmshard/0.1.0/venv/bin",
    "HF_HOME=/apps/esmshard/0.1.0/hf",
    "HF_HUB_OFFLINE=1",
    "WANDB_MODE=offline",
    "PIP_NO_INDEX=1",
]
"""What both modules of the guide set."""


def test_the_module_for_lmod_sets_what_it_says(tmp_path: Path) -> None:
    lua = next(filter(None, map(shutil.which, ("lua", "lua5.4", "lua5.3", "lua5.1", "luajit", "texlua"))), None)
    if lua is None:
        pytest.skip("needs a Lua interpreter")
    words = """
        function help() end; function whatis() end; function conflict() end
        function pathJoin(...) return table.concat({...}, "/") end
        function setenv(name, value) print(name .. "=" .. value) end
        prepend_path = setenv
    """
    (tmp_path / "module.lua").write_text(words + documented("lua"))
    done = subprocess.run([lua, tmp_path / "module.lua"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == SET


def test_the_module_for_environment_modules_sets_what_it_says(tmp_path: Path) -> None:
    tclsh = shutil.which("tclsh")
    if tclsh is None:
        pytest.skip("needs tclsh")
    words = """
        proc module-whatis {text} {}
        proc conflict {name} {}
        proc setenv {name value} { puts "$name=$value" }
        proc prepend-path {name value} { puts "$name=$value" }
    """
    (tmp_path / "module.tcl").write_text(words + documented("tcl"))
    done = subprocess.run([tclsh, tmp_path / "module.tcl"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == SET


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_real_thing_trains_and_embeds_without_network(tmp_path: Path) -> None:
    """The wheels of this clone, from the indexes that pip knows here; then a machine that has none of them."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")} | OF_THIS_MACHINE
    command = [sys.executable, "-m", "esmshard", "bundle", "-o", str(tmp_path / "out"), "--extras", "none"]
    made = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    done = install(tmp_path / "out", "--python", own_python(), tmp_path / "the site")
    assert done.returncode == 0, done.stderr
    script = (
        'set -euo pipefail; source "$1/env.sh"; cd "$1"; printf ">a\\nMKTAYIAKQRQISFVK\\n" > q.fasta; '
        "esmshard finetune contact train.steps=2 train.eval_every=2 data.train=sample:contact/valid out=run "
        "--no-report; "
        "esmshard embed starter q.fasta -o q.npy; "
        "python -c 'import numpy; print(numpy.load(\"q.npy\").shape)'"
    )
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = sealed(["bash", "-c", script, "-", str(tmp_path / "the site")])
    run = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "(1, 192)"
