"""Make one archive with everything that a machine with a GPU, but without network, needs to run `gpu.py`.

    make gpu-kit                                                    # build/gpu-kit.tar.xz
    make gpu-kit ARGUMENTS='--overwrite --has packages.txt'         # the machine has these packages already
    python benchmarks/gpu_kit.py kit.tar.xz --starter starter-data  # with the data that data/starter/build.py wrote

On the machine, which has Python and torch:

    tar -xf gpu-kit.tar.xz        # without the program xz: python3.12 -m tarfile -e gpu-kit.tar.xz
    python3.12 gpu-kit/install.py
    cd gpu-kit && .venv/bin/python benchmarks/gpu.py --out build/gpu

`packages.txt` is the output of `pip list --format freeze` on the machine. A name without a version always fits. These
packages are left out, unless another package requires a different version. Always left out are torch, packages that
only torch needs, packages that only transfer files over a network, and the test suites of numpy, scipy and
scikit-learn. The archive has these files:

    gpu-kit/install.py     the program `gpu_install.py` beside this file
    gpu-kit/kit.json       the machine that the kit is for, and the sha256 of each wheel
    gpu-kit/wheels/        esmshard, pip, and the packages
    gpu-kit/benchmarks/ tests/ recipes/ data/ Makefile ...   a checkout without esmshard/
    gpu-kit/starter-data/  only with --starter

pip chooses and downloads, under the user's own configuration. Wheels and training data are stored again without their
own compression, so that the archive can compress all of them together, and better.
"""

import argparse
import gzip
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from esmshard import __version__
from esmshard.cluster.bundle import wheelhouse
from esmshard.cluster.bundle.own_wheel import own_wheel
from esmshard.cluster.bundle.wheelhouse import Package, Target, WheelIndex
from esmshard.errors import InputError, UsageError
from esmshard.files import sha256
from esmshard.progress import say

ROOT = Path(__file__).resolve().parents[1]
TOP = "gpu-kit"
"""The only directory at the top of the archive."""
EXTRAS = ("gpu",)
"""The extras that the GPU tests need."""
ALWAYS = frozenset({"esmshard", "pip"})
"""The packages that are always included: esmshard, and pip for its installation."""
TRANSFER = frozenset({"hf-xet"})
"""The packages that only transfer files over a network: 3 MiB. huggingface_hub requires hf-xet, and works without."""
WITHOUT_TESTS = frozenset({"numpy", "scipy", "scikit_learn"})
"""The wheels whose test suites are left out, 6 MiB. Their other modules do not import the tests; those of h5py do."""
CHECKOUT = (
    "Makefile",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "recipes",
    "data/contact",
    "data/variants",
    "benchmarks",
    "tests",
)
NOT_IN_CHECKOUT = "benchmarks/results/"
STARTER = ("chains.fasta", "chains.npz", "valid_chains.fasta", "valid_chains.npz", "sequences.fasta.gz")
"""The files that data/starter/build.py writes."""
DICTIONARY = 128 * 2**20
"""The bytes of the compression's dictionary. Unpacking takes as much memory. All wheels together are larger."""
DOWNLOADS = 4
"""The number of wheels that are downloaded at the same time."""


@dataclass(frozen=True)
class Request:
    """The request for a kit."""

    target: Target
    torch: str
    """The version of torch on the machine."""
    has: Mapping[str, str | None]
    """The versions of other packages on the machine, by canonical name; None for an unknown version."""
    starter: Path | None
    limit: float
    """The largest size of the archive, in MiB."""
    preset: int
    """The effort of the compression, 0 to 9."""


def main(arguments: list[str] | None = None) -> int:
    """Make the kit and print its size. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="ARCHIVE", help="file to write, such as gpu-kit.tar.xz")
    parser.add_argument("--overwrite", action="store_true", help="replace ARCHIVE if it exists")
    parser.add_argument(
        "--python", default="3.12", metavar="VERSION", help="Python of the machine (default: %(default)s)"
    )
    parser.add_argument(
        "--platform",
        default="manylinux_2_28_x86_64",
        metavar="NAME",
        help="glibc and processor of the machine, or `here` (default: %(default)s)",
    )
    parser.add_argument(
        "--torch", default="2.11.0", metavar="VERSION", help="torch on the machine (default: %(default)s)"
    )
    parser.add_argument(
        "--has", type=Path, metavar="FILE", help="other packages of the machine, as `name==version` lines"
    )
    parser.add_argument("--starter", type=Path, metavar="DIR", help="training data of the starter model to include")
    parser.add_argument("--limit", type=float, default=60.0, metavar="MIB", help="largest archive (default: 60)")
    parser.add_argument(
        "--preset", type=int, default=6, choices=range(10), metavar="0-9", help="effort of the compression (default: 6)"
    )
    args = parser.parse_args(arguments)
    try:
        if os.path.lexists(args.output) and not args.overwrite:
            raise UsageError(f"{args.output}: exists already; choose another name or pass --overwrite")
        print(build(args.output, request_of(args)))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}; correct that and try again", file=sys.stderr)
        return 1
    return 0


def request_of(args: argparse.Namespace) -> Request:
    """Return the request of the command line.

    Raises:
        UsageError: with one sentence for each problem.
    """
    problems = []
    if not re.fullmatch(r"3\.\d{1,2}", args.python):
        problems.append(f"--python {args.python}: a version such as 3.12 is expected")
    if args.platform != "here" and not wheelhouse.is_platform(args.platform):
        problems.append(f"--platform {args.platform}: a name such as manylinux_2_28_x86_64, or `here`, is expected")
    if not re.fullmatch(r"\d+\.\d+\.\d+", args.torch):
        problems.append(f"--torch {args.torch}: a release such as 2.11.0 is expected")
    lacking = [name for name in STARTER if args.starter and not (args.starter / name).is_file()]
    if lacking:
        problems.append(f"--starter {args.starter}: has no {', '.join(lacking)}; make them with data/starter/build.py")
    if problems:
        raise UsageError(*problems)
    has = read_has(args.has) if args.has else {}
    known = has.get("torch")
    if known is not None and Version(known).base_version != Version(args.torch).base_version:
        raise UsageError(f"{args.has}: the machine has torch {known}; pass --torch {Version(known).base_version}")
    target = Target(args.python, None if args.platform == "here" else args.platform)
    return Request(target, args.torch, has, args.starter, args.limit, args.preset)


def read_has(path: Path) -> dict[str, str | None]:
    """Return versions by canonical name from a file of `name==version` and `name` lines, as pip writes it.

    If a version cannot be compared, as in Linux distributions, the package is left out, so that the kit includes it.

    Raises:
        UsageError: if a line names no package.
    """
    found: dict[str, str | None] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.split(" #")[0].strip()
        if not text or text.startswith(("#", "-")):  # This is a comment, or an option such as -e of pip freeze.
            continue
        match = re.fullmatch(r"([A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)(?:\s*={2,3}\s*(\S+)|\s*@\s*\S+)?", text)
        if match is None:
            raise UsageError(f"{path}:{number}: `{text}` is neither `name==version` nor `name`; correct the line")
        try:
            version = str(Version(match[2])) if match[2] else None
        except InvalidVersion:
            continue
        found[canonicalize_name(match[1])] = version
    return found


def build(output: Path, request: Request) -> str:
    """Make the archive.

    Returns:
        A text on what was made and how to use it.

    Raises:
        InputError: if a wheel cannot be obtained, or the archive is too large.
    """
    begun = time.monotonic()
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial")
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as scratch:
        work = Path(scratch)
        packages, kit = collect(work, request)
        largest = sorted(work.glob("fetched/*.whl"), key=lambda wheel: -wheel.stat().st_size)
        kept = [stored(wheel, work / "wheels") for wheel in sorted(largest, key=_order)]
        kit["wheels"] = {wheel.name: sha256(wheel) for wheel in kept}
        # A tenth covers scripts, directories and the last block of each file.
        kit["installed_bytes"] = sum(wheel.stat().st_size for wheel in kept) * 11 // 10
        (work / "kit.json").write_text(json.dumps(kit, indent=1) + "\n", encoding="utf-8")
        say(f"compressing {len(kept)} wheels")
        try:
            write_archive(partial, members(work, kept, request.starter), request)
            size = partial.stat().st_size / 2**20
            if size > request.limit:
                names = [
                    f"{wheel.name.split('-')[0]} ({wheel.stat().st_size / 2**20:.1f} MiB)" for wheel in largest[:3]
                ]
                raise InputError(
                    f"{output}: would have {size:.1f} MiB, and at most {request.limit:g} are allowed (--limit); the "
                    f"largest wheels are {', '.join(names)}; list what the machine has (`pip list --format freeze`) in "
                    "a file and pass --has FILE"
                )
            partial.replace(output)
        finally:
            partial.unlink(missing_ok=True)
    left = f", without {len(kit['expected'])} packages that the machine has" if kit["expected"] else ""
    return (
        f"{output}: {size:.1f} MiB in {time.monotonic() - begun:.0f} s, {len(packages) + 1} wheels for "
        f"{request.target.words()} with torch {request.torch}{left}\n"
        f"there: tar -xf {output.name} && python{request.target.python} {TOP}/install.py"
    )


def collect(work: Path, request: Request) -> tuple[list[Package], dict[str, Any]]:
    """Fetch all wheels into `work/fetched`.

    Returns:
        The packages without esmshard, and the content of kit.json without the checksums of the wheels.
    """
    fetched = work / "fetched"
    fetched.mkdir()
    (work / "wheels").mkdir()
    index = WheelIndex(None, (f"torch=={request.torch}",))
    own = own_wheel(fetched)
    say(f"asking pip for the packages of esmshard {__version__} for {request.target.words()}")
    resolved = wheelhouse.resolve(own, EXTRAS, request.target, index)
    packages = {str(canonicalize_name(package.name)): package for package in [package_of(own), *resolved]}
    roots = [Requirement(f"esmshard[{','.join(EXTRAS)}]"), Requirement("pip")]
    travelling, expected = divided(packages, roots, request.has, request.target.environment())
    chosen = [packages[name] for name in sorted(travelling - {"esmshard"})]
    say(f"fetching {len(chosen)} wheels")
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        wheels = list(pool.map(lambda one: wheelhouse.fetch(one, fetched, request.target, index), chosen))
    torch = next(one for one in map(Requirement, packages["esmshard"].requires) if one.name == "torch")
    kit = {
        "format": 1,
        "esmshard": __version__,
        **revision(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": request.target.python,
        "platform": request.target.platform,
        "machine": request.target.machine,
        "glibc": wheelhouse.least_glibc([wheel.name for wheel in wheels]),
        "torch": request.torch,
        "torch_at_least": next(one.version for one in torch.specifier if one.operator == ">="),
        "packages": {name: packages[name].version for name in sorted(travelling)},
        "expected": expected,
        "pip": packages["pip"].file,
    }
    return chosen, kit


def package_of(wheel: Path) -> Package:
    """Return the metadata of a wheel."""
    name, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as archive:
        meta = PathDistribution(zipfile.Path(archive, f"{name}-{version}.dist-info/"))
        return Package(name, version, wheel.resolve().as_uri(), sha256(wheel), tuple(meta.requires or ()))


def divided(
    packages: Mapping[str, Package],
    roots: list[Requirement],
    has: Mapping[str, str | None],
    environment: dict[str, str],
) -> tuple[set[str], dict[str, str | None]]:
    """Return the packages of the kit, and the packages that the machine is expected to have.

    A package of the machine is left out if its version fits all packages that require it, in the kit or on the
    machine. The machine has the package's own requirements, too, except those of a requested extra, which may not
    be installed. torch and its requirements are expected; packages that only transfer files are left out.

    Args:
        packages: the packages that pip would install, by canonical name; they include all requirements.
        roots: the first requirements.
        has: versions by canonical name; None fits always.
        environment: the values of environment markers.

    Returns:
        The canonical names, and the versions by canonical name.
    """
    never = {"torch", *TRANSFER}
    trusted = {name: version for name, version in has.items() if name in packages and name not in ALWAYS | never}
    while True:
        seen = {name: replace(one, requires=()) if name in never else one for name, one in packages.items()}
        for name, version in trusted.items():
            behind_extras = tuple(one for one in packages[name].requires if "extra" in str(Requirement(one).marker))
            seen[name] = replace(packages[name], version=version or packages[name].version, requires=behind_extras)
        names, missing = wheelhouse.followed(seen, roots, environment)
        refused = {canonicalize_name(Requirement(one).name) for one in missing} & trusted.keys()
        if not refused:
            expected = {name: trusted[name] for name in sorted(names & trusted.keys())}
            return names - trusted.keys() - never, expected
        trusted = {name: version for name, version in trusted.items() if name not in refused}


def revision() -> dict[str, Any]:
    """Return the git commit of the kit, and whether files differ from it; empty without git."""
    commit = _git("rev-parse", "HEAD")
    if not _is_clone() or commit is None:
        return {}
    return {"commit": commit.strip(), "differs_from_commit": bool(_git("status", "--porcelain"))}


def checkout_files() -> list[str]:
    """Return paths below the root of the clone: files that git knows or would add; without git all files but caches."""
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *CHECKOUT)
    if _is_clone() and listed is not None:
        names = set(listed.split("\0")) - {""}
    else:
        found = [path for part in CHECKOUT for path in [ROOT / part, *(ROOT / part).rglob("*")]]
        names = {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}
    return sorted(name for name in names if not name.startswith(NOT_IN_CHECKOUT) and (ROOT / name).is_file())


def _is_clone() -> bool:
    top = _git("rev-parse", "--show-toplevel")
    return top is not None and Path(top.strip()).resolve() == ROOT


def _git(*arguments: str) -> str | None:
    """Return the output of git; None if there is no git, or this directory is in no repository."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout


def _order(wheel: Path) -> tuple[bool, bool, int]:
    """Return a sort key: esmshard first, beside equal files of the clone, and shared libraries last, the largest first.

    Similar files must not be further apart than the compression's dictionary is long.
    """
    return not wheel.name.startswith("esmshard-"), not wheel.name.endswith("-none-any.whl"), -wheel.stat().st_size


def stored(archive: Path, into: Path) -> Path:
    """Copy a zip archive, a wheel or arrays of numpy, without compression.

    The members have the same names, contents, times and modes, in the same order. Only some wheels lose their test
    suites, and the lines of RECORD for these.
    """
    copy = into / archive.name
    strip = archive.name.split("-")[0] in WITHOUT_TESTS
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as target:
        for member in source.infolist():
            content = source.read(member)
            if strip and "/tests/" in member.filename:
                continue
            if strip and member.filename.endswith(".dist-info/RECORD"):
                lines = content.splitlines(keepends=True)
                content = b"".join(line for line in lines if b"/tests/" not in line.split(b",")[0])
            entry = zipfile.ZipInfo(member.filename, member.date_time)
            entry.create_system, entry.external_attr = member.create_system, member.external_attr
            target.writestr(entry, content)
    return copy


def starter_files(directory: Path, into: Path) -> Iterator[Path]:
    """Copy the training data of the starter model without compression."""
    for path in (directory / name for name in STARTER):
        if path.suffix == ".npz":
            yield stored(path, into)
        elif path.suffix == ".gz":
            copy = into / path.name
            copy.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=0, mtime=0))
            yield copy
        else:
            yield path


def members(work: Path, wheels: list[Path], starter: Path | None) -> Iterator[tuple[str, Path]]:
    """Return the names in the archive, below its directory, and the files."""
    yield "install.py", Path(__file__).with_name("gpu_install.py")
    yield "kit.json", work / "kit.json"
    for path in starter_files(starter, work) if starter else ():
        yield f"starter-data/{path.name}", path
    for name in checkout_files():
        yield name, ROOT / name
    for wheel in wheels:
        yield f"wheels/{wheel.name}", wheel


def write_archive(path: Path, files: Iterator[tuple[str, Path]], request: Request) -> None:
    """Write a tar archive, compressed for `tar -xf` and for Python's tarfile."""
    filters: list[dict[str, Any]] = [
        {"id": lzma.FILTER_LZMA2, "preset": request.preset, "dict_size": DICTIONARY},
    ]
    if (
        request.target.machine == "x86_64"
    ):  # Addresses of calls are made absolute, so that equal calls have equal bytes.
        filters.insert(0, {"id": lzma.FILTER_X86})
    with (
        lzma.open(path, "wb", format=lzma.FORMAT_XZ, filters=filters) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, file in files:
            entry = tarfile.TarInfo(f"{TOP}/{name}")
            content = file.read_bytes()
            entry.size, entry.mtime = len(content), int(file.stat().st_mtime)
            entry.mode = 0o755 if os.access(file, os.X_OK) or name == "install.py" else 0o644
            archive.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    sys.exit(main())
