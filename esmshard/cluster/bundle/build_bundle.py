"""A directory with all files for an installation without internet: wheels, weights, checksums, install.sh.

    DIR/install.sh          verifies, installs, checks
    DIR/wheels/             esmshard, the packages that it needs, and pip
    DIR/requirements.txt    every version with its sha256
    DIR/hf/                 weights, as the Hugging Face cache has them: HF_HOME=DIR/hf finds them in place
    DIR/bundle.json         the content, and the machines it is for
    DIR/SHA256SUMS          the checksum of every file

While the bundle is being made, DIR/.partial.json holds the request, the packages that pip chose, and the checksums of
the finished files. The same command then continues an interrupted bundle.
"""

import difflib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from esmshard import __version__
from esmshard.cluster.bundle import wheelhouse
from esmshard.cluster.bundle.drivers import WHEELS, version_of
from esmshard.cluster.bundle.own_wheel import own_wheel
from esmshard.cluster.bundle.wheelhouse import Package, Target, WheelIndex
from esmshard.errors import InputError, UsageError
from esmshard.files import is_hub_name, read_json, sha256
from esmshard.model.families.family_registry import RELEASED
from esmshard.model.weights import hub
from esmshard.progress import Progress, say

FORMAT = 1
TORCH_INDEX = "https://download.pytorch.org/whl"
"""The address of torch's builds; the name of a CUDA version, such as cu126, follows."""
EXTRAS = ("big", "h5", "hf", "plots", "quantize", "tables", "track", "wandb")
"""The extras that can be bundled. `all` means all of them."""

_PARTIAL = ".partial.json"
_MANIFEST = "bundle.json"
_SUMS = "SHA256SUMS"
_HUB = Path("hf", "hub")


@dataclass(frozen=True, kw_only=True)
class BundleRequest:
    """The requested content of a bundle."""

    weights: tuple[str, ...] = ()
    extras: tuple[str, ...] = ("all",)
    torch: str = "default"
    """The build of torch: `default` is the plain version of the package index; otherwise cpu or a CUDA version such as
    cu126.
    """
    torch_version: str | None = None
    """A version such as 2.13.0. None is the installed version."""
    torch_index: str = TORCH_INDEX
    python: str = wheelhouse.RUNNING
    platform: str | None = None

    @property
    def target(self) -> Target:
        """Return the machines that the bundle is for."""
        return Target(self.python, self.platform)

    @property
    def index(self) -> WheelIndex:
        """Return the package index for pip, and the required torch."""
        version = self.torch_version or importlib.metadata.version("torch").partition("+")[0]
        if self.torch == "default":
            return WheelIndex(None, (f"torch=={version}",))
        # The version has a local part, because a plain torch of another index would otherwise be accepted, too.
        return WheelIndex(f"{self.torch_index.rstrip('/')}/{self.torch}", (f"torch=={version}+{self.torch}",))


def check(request: BundleRequest) -> None:
    """Check a request before anything is built.

    Raises:
        UsageError: with one sentence for each problem.
    """
    problems = []
    for name in request.weights:
        if name not in RELEASED and not is_hub_name(name):
            problems.append(f"--weights {name}: not a released model{_near(name, list(RELEASED))}")
    for extra in request.extras:
        if extra not in (*EXTRAS, "all"):
            problems.append(f"--extras {extra}: no such part{_near(extra, [*EXTRAS, 'all', 'none'])}")
    if not re.fullmatch(r"3\.\d{1,2}", request.python) or version_of(request.python) < (3, 11):
        problems.append(f"--python {request.python}: a version from 3.11 on is expected, as 3.12")
    if request.platform is not None and not wheelhouse.is_platform(request.platform):
        problems.append(f"--platform {request.platform}: a name as manylinux_2_28_x86_64 is expected")
    if request.platform is None and platform.system() != "Linux":
        problems.append(
            "--platform: bundles are for Linux, and this is another system; pass --platform manylinux_2_28_x86_64"
        )
    if request.torch_version is not None and not re.fullmatch(r"\d+\.\d+\.\d+", request.torch_version):
        problems.append(f"--torch-version {request.torch_version}: a release is expected, as 2.13.0")
    known = ["default", "cpu", *(name for name, wheel in WHEELS.items() if wheel.is_usable)]
    if request.torch not in known:
        problems.append(f"--torch {request.torch}: esmshard runs on no such build{_near(request.torch, known)}")
    elif not problems and request.torch in WHEELS:
        wheel, torch = WHEELS[request.torch], request.index.pinned[0].split("==")[1]
        first, last = version_of(wheel.first_torch), version_of(wheel.last_torch or "999")
        if not first <= version_of(torch)[: len(first)] or version_of(torch)[: len(last)] > last:
            until = f" to {wheel.last_torch}" if wheel.last_torch else " on"
            problems.append(
                f"--torch {request.torch}: torch {torch.partition('+')[0]} is not built for it, releases from "
                f"{wheel.first_torch}{until} are; choose one by --torch-version, or another --torch"
            )
    if problems:
        raise UsageError(*problems)


def _near(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; one of {', '.join(known)}"


class _Partial:
    """The state of an unfinished bundle. It is written to disk after every file."""

    def __init__(self, directory: Path, request: BundleRequest) -> None:
        self.path = directory / _PARTIAL
        self.directory = directory
        self.asked = json.loads(json.dumps({"esmshard": __version__, **asdict(request)}))
        self.sums: dict[str, str] = {}
        """The sha256 of each file, by path below the directory."""
        self.packages: list[Package] = []
        self.own = ""
        """The sha256 of the esmshard wheel for which the packages were chosen."""

    def read(self) -> None:
        """Read the state of an interrupted bundle.

        Raises:
            UsageError: if that bundle was begun with another request.
        """
        try:
            found = read_json(self.path)
            packages = wheelhouse.from_json(found["packages"])
            asked, sums, own = found["asked"], dict(found["sums"]), str(found["own"])
        except (ValueError, KeyError, TypeError):  # the first write was cut off
            return
        if asked != self.asked:
            differing = ", ".join(sorted(key for key in self.asked if asked.get(key) != self.asked[key]))
            raise UsageError(
                f"{self.directory}: has an unfinished bundle with another {differing}; pass the same "
                "options to continue it, or --overwrite to begin again"
            )
        self.packages, self.sums, self.own = packages, sums, own

    def write(self) -> None:
        content = {"asked": self.asked, "own": self.own, "sums": self.sums}
        content["packages"] = wheelhouse.as_json(self.packages)
        work = self.path.with_suffix(".new")
        work.write_text(json.dumps(content, indent=1), encoding="utf-8")
        work.replace(self.path)

    def holds(self, name: str) -> bool:
        """Whether a file exists with its recorded checksum."""
        path = self.directory / name
        return name in self.sums and path.is_file() and sha256(path) == self.sums[name]

    def came(self, path: Path) -> None:
        """Record a finished file."""
        self.sums[path.relative_to(self.directory).as_posix()] = sha256(path)
        self.write()


def bundle(out: Path, request: BundleRequest, overwrite: bool = False) -> str:
    """Make a bundle, or continue one that was interrupted.

    Args:
        out: the directory to make. A directory that holds anything but an unfinished bundle is refused.
        request: the requested content.
        overwrite: replace an earlier bundle. A directory that is no bundle is never removed.

    Returns:
        A text on what was made and how to use it.

    Raises:
        UsageError: for a wrong request, or if the directory exists.
        InputError: if a file cannot be obtained; the message names it.
    """
    check(request)
    out = Path(os.path.abspath(out))  # noqa: PTH100  # symbolic links are kept
    partial = _opened(out, request, overwrite)
    wheels = out / "wheels"
    wheels.mkdir(exist_ok=True)
    own = own_wheel(out)
    if partial.own != sha256(own) or not partial.packages:
        say(f"asking pip for the packages of esmshard {__version__} for {request.target.words()}")
        partial.packages = wheelhouse.resolve(own, _extras(request), request.target, request.index)
        partial.own = sha256(own)
        partial.write()
    own = own.replace(wheels / own.name)
    partial.came(own)
    _fetch_wheels(partial, wheels, own.name, request)
    revisions = {name: _weights(partial, name) for name in request.weights}
    for stale in {path.name for path in out.iterdir()} - {"wheels", "hf", _PARTIAL}:
        _removed(out / stale)
    manifest = _manifest(partial, own.name, request, revisions)
    _write_files(partial, own.name, manifest)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return (
        f"{out}: {len(partial.packages) + 1} wheels, {len(revisions)} models, {size / 1e9:.2f} GB for "
        f"{request.target.words()}\nsha256 of {_SUMS}: {sha256(out / _SUMS)}\n"
        f"there: bash {shlex.quote(out.name)}/install.sh DIR"
    )


def _opened(out: Path, request: BundleRequest, overwrite: bool) -> _Partial:
    """Create the directory, or open an unfinished bundle in it."""
    partial = _Partial(out, request)
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        begun, done = (out / _PARTIAL).is_file(), (out / _MANIFEST).is_file() and (out / _SUMS).is_file()
        if not (begun or done):
            raise UsageError(f"{out}: exists already and is no bundle; choose another directory")
        if not begun and not overwrite:
            raise UsageError(f"{out}: exists already; choose another directory or pass --overwrite")
        if overwrite:
            _removed(out)
        else:
            partial.read()
            say(f"{out}: continuing an unfinished bundle")
    out.mkdir(parents=True, exist_ok=True)
    partial.write()
    return partial


def _removed(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _extras(request: BundleRequest) -> tuple[str, ...]:
    """Return the names of the requested extras. `all` of the package does not include wandb."""
    return EXTRAS if "all" in request.extras else tuple(sorted(set(request.extras)))


def _fetch_wheels(partial: _Partial, wheels: Path, own: str, request: BundleRequest) -> None:
    """Fetch all missing wheels, one after the other, and remove files that do not belong there."""
    wanted = [package for package in partial.packages if not partial.holds(f"wheels/{package.file}")]
    for stale in {path.name for path in wheels.iterdir()} - {own, *(package.file for package in partial.packages)}:
        _removed(wheels / stale)
        partial.sums.pop(f"wheels/{stale}", None)
    with Progress("wheels", len(partial.packages)) as progress:
        for number, package in enumerate(wanted, len(partial.packages) - len(wanted) + 1):
            partial.came(wheelhouse.fetch(package, wheels, request.target, request.index))
            progress.update(number, package.file)


def _weights(partial: _Partial, name: str) -> str:
    """Fetch a model into the bundle's own cache, and return its revision on the hub."""
    top = partial.directory / _HUB / f"models--{hub.repository(name).replace('/', '--')}"
    known = [file for file in partial.sums if (partial.directory / file).is_relative_to(top)]
    # The revision is recorded last, so all files exist once it is recorded.
    if not (known and any(file.endswith("/refs/main") for file in known) and all(map(partial.holds, known))):
        for file in known:
            del partial.sums[file]
        cached = hub.find(name)
        if cached is not None and cached.is_dir():
            _verified(name, cached)
            copied = hub.fetch(name, partial.directory / ".weights", overwrite=True)
            shutil.rmtree(top, ignore_errors=True)
            (top / "snapshots").mkdir(parents=True)
            copied.rename(top / "snapshots" / cached.name)
            revision = cached.name
        else:
            revision = _downloaded(name, partial.directory / _HUB, top)
        for path in sorted(filter(Path.is_file, (top / "snapshots" / revision).rglob("*"))):
            partial.came(path)
        (top / "refs").mkdir(exist_ok=True)
        (top / "refs" / "main").write_text(revision, encoding="utf-8")
        partial.came(top / "refs" / "main")
    return (top / "refs" / "main").read_text(encoding="utf-8")


def _verified(name: str, snapshot: Path) -> None:
    """Compare the weights of the user's cache with their sha256, which is their file name in the cache."""
    for path in snapshot.rglob("*"):
        announced = path.resolve().name
        if re.fullmatch("[0-9a-f]{64}", announced) and sha256(path) != announced:
            raise InputError(
                f"{name}: {path} is damaged (its sha256 is not the one it was downloaded with); remove {snapshot} and "
                "try again"
            )


def _downloaded(name: str, cache: Path, top: Path) -> str:
    """Download a model into the bundle by `esmshard download`, which continues an interrupted download.

    This is a separate process, because the hub's library reads its environment variables on import.
    """
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "TORCH_HOME": str(cache / ".none")}
    environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "esmshard", "download", name]
    message = ""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:  # noqa: S603  # our own command
        assert process.stderr is not None
        assert process.stdout is not None
        for line in process.stderr:
            if line.startswith(f"{name}: "):
                say(line.rstrip())
            message = line.strip() or message
        printed = process.stdout.read().strip()
    if process.returncode:
        raise InputError(message.removeprefix("error: ") or f"{name}: the download broke off; try again")
    snapshot = Path(printed)
    for path in list(snapshot.rglob("*")):  # plain files, since not every file system has symbolic links
        if path.is_symlink():
            blob = path.resolve()
            path.unlink()
            blob.rename(path)
    for rest in ("blobs", ".no_exist"):
        shutil.rmtree(top / rest, ignore_errors=True)
    for note in (*cache.glob(".*"), *cache.glob("CACHEDIR.TAG")):
        _removed(note)
    return snapshot.name


def _manifest(partial: _Partial, own: str, request: BundleRequest, revisions: dict[str, str]) -> dict[str, Any]:
    """Return the content of bundle.json."""
    packages = {str(canonicalize_name(package.name)): package.version for package in partial.packages}
    files = [own, *(package.file for package in partial.packages)]
    cuda = wheelhouse.cuda_of(partial.packages)
    wheel = next((wheel for wheel in WHEELS.values() if wheel.cuda == cuda), None)
    unpacked = 0
    for file in files:
        with zipfile.ZipFile(partial.directory / "wheels" / file) as archive:
            unpacked += sum(entry.file_size for entry in archive.infolist())
    weights = sum((partial.directory / name).stat().st_size for name in partial.sums if name.startswith("hf/"))
    return {
        "format": FORMAT,
        "esmshard": __version__,
        "python": request.python,
        "platform": request.platform,
        "machine": request.target.machine,
        "glibc": wheelhouse.least_glibc(files),
        "torch": {"version": packages["torch"], "cuda": cuda, "least_driver": wheel.driver if wheel else None},
        "extras": list(_extras(request)),
        "weights": revisions,
        "packages": packages,
        "installed_bytes": unpacked + weights,
    }


def _write_files(partial: _Partial, own: str, manifest: dict[str, Any]) -> None:
    """Write requirements.txt, install.sh and bundle.json, then all checksums. The bundle is then finished."""
    out = partial.directory
    chosen = f"[{','.join(manifest['extras'])}]" if manifest["extras"] else ""
    lines = [f"esmshard{chosen}=={__version__} --hash=sha256:{partial.sums[f'wheels/{own}']}"]
    for package in partial.packages:
        lines.append(f"{package.name}=={package.version} --hash=sha256:{partial.sums[f'wheels/{package.file}']}")
    (out / "requirements.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    settings = {key: manifest[key] or "" for key in ("python", "machine", "glibc")}
    settings |= {"version": __version__, "driver": manifest["torch"]["least_driver"] or ""}
    settings["pip_wheel"] = next(package.file for package in partial.packages if package.name == "pip")
    # Compiled bytecode needs about as much space again as the Python files; a tenth of the total covers it.
    settings["needed_kib"] = str(manifest["installed_bytes"] * 11 // 10 // 1024)
    settings["weights"] = " ".join(manifest["weights"])
    script = Path(__file__).with_name("install.sh").read_text(encoding="utf-8")
    for key, value in settings.items():
        script = script.replace(f"'@{key}@'", shlex.quote(value))
    (out / "install.sh").write_text(script, encoding="utf-8")
    (out / "install.sh").chmod(0o755)
    (out / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for name in ("requirements.txt", "install.sh", _MANIFEST):
        partial.came(out / name)
    sums = "".join(f"{digest}  {name}\n" for name, digest in sorted(partial.sums.items()))
    (out / _SUMS).write_text(sums, encoding="utf-8")
    partial.path.unlink()
