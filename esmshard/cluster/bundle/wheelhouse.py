"""The wheels from which pip installs esmshard without network: their choice and their download.

pip chooses and downloads, under the user's own configuration (indexes, mirrors, certificates, credentials). pip
evaluates environment markers such as `python_version >= "3.12"` for the interpreter in which it runs, whatever
--python-version says (pypa/pip#11664). So the requirements of the wheels are followed here a second time, for the
target: missing packages are requested by name, and packages that the target does not need are left out.
"""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from esmshard.errors import InputError
from esmshard.files import read_json, sha256

RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The version of the running Python."""

_MANYLINUX = re.compile(r"manylinux(?:_2_(\d+)|(2014|2010|1))_(\w+)")
_LEGACY = {"2014": 17, "2010": 12, "1": 5}
"""The older names of platforms: manylinux2014 is manylinux_2_17."""
_ROUNDS = 8
"""The limit of rounds. Requirements of the target alone may have further such requirements; three rounds are the most
seen.
"""


@dataclass(frozen=True)
class Target:
    """The machines on which the wheels will be installed."""

    python: str = RUNNING
    """The major and minor version, such as 3.12."""
    platform: str | None = None
    """The oldest glibc and the processor, as manylinux_2_28_x86_64. None is this machine."""

    @property
    def machine(self) -> str:
        """Return the processor, as `uname -m` prints it."""
        found = _MANYLINUX.fullmatch(self.platform or "")
        return found[3] if found else platform.machine()

    def words(self) -> str:
        """Describe the target for messages."""
        return f"Python {self.python} on {self.platform or 'this platform'}"

    def options(self) -> list[str]:
        """Return options for pip. A platform is listed with all older ones, since pip does not add them."""
        chosen = ["--only-binary", ":all:"]
        if (self.python, self.platform) != (RUNNING, None):
            chosen += ["--python-version", self.python, "--implementation", "cp"]
        found = _MANYLINUX.fullmatch(self.platform or "")
        if found:
            newest = int(found[1]) if found[1] else _LEGACY[found[2]]
            names = [f"manylinux_2_{minor}_{found[3]}" for minor in range(newest, 4, -1)]
            names += [f"manylinux{name}_{found[3]}" for name, minor in _LEGACY.items() if minor <= newest]
            chosen += [part for name in [*names, f"linux_{found[3]}"] for part in ("--platform", name)]
        return chosen

    def environment(self) -> dict[str, str]:
        """Return the values of environment markers."""
        if (self.python, self.platform) == (RUNNING, None):
            return {}
        values = {"python_version": self.python, "python_full_version": f"{self.python}.0", "os_name": "posix"}
        values |= {"implementation_version": f"{self.python}.0", "implementation_name": "cpython"}
        values |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": self.machine}
        return values | {"platform_python_implementation": "CPython"}


def is_platform(name: str) -> bool:
    """Whether this is the name of a platform with wheels."""
    return _MANYLINUX.fullmatch(name) is not None


@dataclass(frozen=True)
class Package:
    """One wheel."""

    name: str
    version: str
    url: str
    sha256: str
    """The checksum; empty if the index has none."""
    requires: tuple[str, ...]

    @property
    def file(self) -> str:
        """Return the file name of the wheel."""
        return unquote(Path(urlparse(self.url).path).name)


@dataclass(frozen=True)
class WheelIndex:
    """An additional package index, and versions that pip must choose."""

    extra: str | None
    """The address of one more package index, or a directory."""
    pinned: tuple[str, ...]
    """Further requirements, such as torch==2.13.0+cu126."""


def resolve(own: Path, extras: tuple[str, ...], target: Target, index: WheelIndex) -> list[Package]:
    """Return the wheels that esmshard needs on the target, with pip's wheel but without esmshard's.

    Raises:
        InputError: if pip is missing or finds no wheel; the message names the package.
    """
    chosen = f"[{','.join(extras)}]" if extras else ""
    roots = [f"esmshard{chosen} @ {own.resolve().as_uri()}", "pip"]
    # These are not constraints, because pip's message on a constraint without a wheel does not name the package.
    asked = [*roots, *index.pinned]
    for _ in range(_ROUNDS):
        packages = _asked_of_pip(asked, target, index)
        needed, missing = followed(packages, [Requirement(root) for root in roots], target.environment())
        if not missing:
            return sorted((packages[name] for name in needed if name != "esmshard"), key=lambda one: one.name.lower())
        asked += missing
    raise InputError(
        f"{', '.join(missing)}: no wheel for {target.words()} fits the other packages; run the command in "
        f"Python {target.python}"
    )


def followed(
    packages: Mapping[str, Package], roots: list[Requirement], environment: dict[str, str]
) -> tuple[set[str], list[str]]:
    """Return the packages that the roots need in an environment, and requirements that no package meets."""
    todo = [(canonicalize_name(root.name), extra) for root in roots for extra in ("", *root.extras)]
    seen: set[tuple[str, str]] = set()
    missing: dict[str, None] = {}
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in packages[name].requires:
            wanted = Requirement(text)
            if wanted.marker and not wanted.marker.evaluate({**environment, "extra": extra}):
                continue
            other = canonicalize_name(wanted.name)
            if other not in packages or not wanted.specifier.contains(packages[other].version, prereleases=True):
                wanted.marker = None
                missing[str(wanted)] = None
                continue
            todo += [(other, more) for more in ("", *wanted.extras)]
    return {name for name, _ in seen}, list(missing)


def _asked_of_pip(requirements: list[str], target: Target, index: WheelIndex) -> dict[str, Package]:
    """Return the packages that pip would install, by canonical name. Wheels are not downloaded if an index has
    metadata.
    """
    with tempfile.TemporaryDirectory() as work:
        report = Path(work, "report.json")
        command = ["install", "--dry-run", "--ignore-installed", "--report", str(report)]
        # pip requires a target directory with --python-version; nothing is written to it.
        command += ["--target", str(Path(work, "nothing")), *target.options()]
        command += ["--extra-index-url", index.extra] if index.extra else []
        done = run_pip([*command, *requirements])
        if done.returncode:
            raise _refused(done, target)
        found = read_json(report)
    packages: dict[str, Package] = {}
    for entry in found["install"]:
        meta, source = entry["metadata"], entry["download_info"]
        digest = source.get("archive_info", {}).get("hashes", {}).get("sha256", "")
        package = Package(meta["name"], meta["version"], source["url"], digest, tuple(meta.get("requires_dist", ())))
        packages[canonicalize_name(package.name)] = package
    return packages


def fetch(package: Package, into: Path, target: Target, index: WheelIndex) -> Path:
    """Fetch one wheel: copy it if it is a file of this machine, else download it with pip; compare its sha256.

    Raises:
        InputError: if the wheel is unavailable or has another checksum.
    """
    place = into / package.file
    address = urlparse(package.url)
    if address.scheme == "file":
        try:
            shutil.copyfile(unquote(address.path), place)
        except OSError as error:  # the error names the source file, whichever file failed
            place.unlink(missing_ok=True)
            reason = str(error.strerror).lower()
            raise InputError(f"{package.url}: cannot be copied to {into} ({reason}); fix that and try again") from None
    else:
        with tempfile.TemporaryDirectory() as work:
            line = f"{package.name}=={package.version}"
            line += f" --hash=sha256:{package.sha256}" if package.sha256 else ""
            listed = Path(work, "requirements.txt")
            listed.write_text(f"{line}\n", encoding="utf-8")
            command = ["download", "--no-deps", "--quiet", "--dest", str(into), "--requirement", str(listed)]
            command += ["--extra-index-url", index.extra] if index.extra else []
            done = run_pip([*command, *target.options()])
        if done.returncode or not place.is_file():
            raise _refused(done, target, package.name)
    if package.sha256 and sha256(place) != package.sha256:
        place.unlink()
        raise InputError(f"{package.url}: is not the file that its index announces, and was deleted; try again")
    return place


def run_pip(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run pip of this environment, without prompts.

    Raises:
        InputError: if pip is not installed.
    """
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"{sys.executable}: has no pip, which collects the wheels; `{sys.executable} -m ensurepip`, or, in an "
            "environment of uv, `uv pip install pip`"
        )
    # --user of a configuration conflicts with --target, and the caller's PYTHONPATH is not for pip.
    environment = {**os.environ, "PIP_USER": "0", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603


def _refused(done: subprocess.CompletedProcess[str], target: Target, name: str | None = None) -> InputError:
    """Return why pip failed, as an error with one sentence."""
    said = done.stderr + done.stdout
    if "No space left on device" in said:
        return InputError("pip: no space left, here or in the directory for temporary files; set TMPDIR to another one")
    if re.search(r"NewConnectionError|Failed to establish|Name or service not known|ConnectTimeout|timed out", said):
        where = re.search(r"host='([^']+)'", said)
        return InputError(
            f"pip: {where[1] if where else 'the package index'} could not be reached; run the command where there is a "
            "network, or give pip the site's mirror (PIP_INDEX_URL)"
        )
    if "DO NOT MATCH THE HASHES" in said:
        wrong = re.search(r"^ {4}(\S+) .*:$", said, re.MULTILINE)
        return InputError(
            f"{name or (wrong[1] if wrong else 'pip')}: is not the file that its index announces (sha256); try again, "
            "and if it stays so look for a proxy that alters files"
        )
    missing = re.search(r"No matching distribution found for ([^\s(;]+)", said)
    if missing:
        torch = ", --torch or --torch-version" if missing[1].startswith("torch=") else ""
        return InputError(
            f"{missing[1]}: no wheel for {target.words()} in the package indexes; choose another --python, --platform"
            f"{torch or ' or index'}"
        )
    if "ResolutionImpossible" in said:
        cause = re.search(r"The conflict is caused by:\s*\n(.*?)\n\s*\n", said, re.DOTALL)
        message = "; ".join(line.strip() for line in cause[1].splitlines()) if cause else last_words(done)
        return InputError(f"pip: the packages do not go together for {target.words()}: {message}")
    return InputError(f"{name or 'pip'}: could not be fetched for {target.words()}: {last_words(done)}")


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last error message of pip, or else its last line."""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or [f"pip left with exit code {done.returncode}"])[-1]


def least_glibc(wheels: list[str]) -> str | None:
    """Return the lowest glibc version on which all wheels run, such as 2.28; None if no wheel requires one.

    >>> least_glibc(["a-1-py3-none-any.whl", "b-1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"])
    '2.27'
    """
    needs = []
    for wheel in wheels:
        platforms = [tag.platform for tag in parse_wheel_filename(wheel)[3]]
        found = [match for match in map(_MANYLINUX.fullmatch, platforms) if match]
        if found and "any" not in platforms:
            needs.append(min(int(match[1]) if match[1] else _LEGACY[match[2]] for match in found))
    return f"2.{max(needs)}" if needs else None


def cuda_of(packages: list[Package]) -> str | None:
    """Return the CUDA version of torch, such as 13.0; None for a CPU build."""
    for package in packages:
        if re.fullmatch(r"cuda-toolkit|nvidia-cuda-runtime(-cu\d+)?", canonicalize_name(package.name)):
            return ".".join(package.version.split(".")[:2])
    return None


def as_json(packages: list[Package]) -> list[dict[str, Any]]:
    """Convert packages for a JSON file."""
    return [asdict(package) for package in packages]


def from_json(entries: list[dict[str, Any]]) -> list[Package]:
    """Read packages from JSON."""
    return [Package(**{**entry, "requires": tuple(entry["requires"])}) for entry in entries]
