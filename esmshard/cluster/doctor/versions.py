"""The check whether the installed packages, the driver and the GPUs work together. Decisions take values and need no
torch.
"""

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import esmshard
from esmshard.cluster.bundle.drivers import WHEELS, Wheel, runs_on, version_of, wheel_for
from esmshard.cluster.doctor.findings import Case, Finding, first_case

GROUP = "versions"

GPU = tuple[str, tuple[int, int] | None]
"""A GPU: its name and compute capability."""

_LEFT_OUT = {"all", "test", "dev"}
"""The extras that combine others, or are for developers."""


def packages(requirements: Sequence[str], installed: Mapping[str, str]) -> Iterator[Finding]:
    """Compare installed versions, by canonical name, with our own requirements (`importlib.metadata.requires`), extra
    by extra.
    """
    missing: dict[str, list[str]] = {}
    fitting = {}
    for wanted in map(Requirement, requirements):
        extra = next(iter(re.findall(r"extra == ['\"]([\w-]+)['\"]", str(wanted.marker or ""))), "")
        name = str(canonicalize_name(wanted.name))
        is_for_here = wanted.marker is None or wanted.marker.evaluate({"extra": extra})
        if extra in _LEFT_OUT or name == "esmshard" or not is_for_here:
            continue
        version = installed.get(name)
        fits = version is not None and wanted.specifier.contains(version, prereleases=True)
        values = {"installed": version, "wanted": str(wanted.specifier)}
        wanted.marker = None
        if extra and (fits or version is None):
            missing.setdefault(extra, []).extend([] if fits else [name])
        elif extra:
            found = f"{name} {version} of the extra '{extra}' does not fit {wanted.specifier}"
            fix = f"pip install --upgrade 'esmshard[{extra}]'"
            yield Finding(GROUP, name, "warning", found, fix, values | {"extra": extra})
        elif fits:
            fitting[name] = version
        else:
            found = f"{name} is missing" if version is None else f"{name} {version} does not fit {wanted.specifier}"
            yield Finding(GROUP, name, "error", found, f"pip install --upgrade '{wanted}'", values)
    found = ", ".join(f"{name} {version}" for name, version in fitting.items())
    yield Finding(GROUP, "packages", "ok", found, values=fitting)
    lacks = {extra: names for extra, names in missing.items() if names}
    complete = [extra for extra in missing if extra not in lacks]
    found = f"installed: {', '.join(complete) or 'none'}"
    some = f"{found}; not installed: " + ", ".join(f"{extra} ({' '.join(names)})" for extra, names in lacks.items())
    fix = f"install those that you need: pip install 'esmshard[{','.join(lacks)}]'"
    case: Case = (lacks, "note", some, fix)
    yield first_case(GROUP, "extras", found, {"installed": complete, "missing": lacks}, case)


def esm_package(distributions: Mapping[str, str], folder: Path | None) -> Iterator[Finding]:
    """Check which package owns the folder `esm`: fair-esm (ESM-2) and esm (ESM3, ESM C) both install it.

    The package that is installed last overwrites files of the other. esmshard imports fair-esm for comparisons only.
    `distributions` has the versions of the two as far as installed, and `import esm` would use `folder`.
    """
    if not distributions:
        return
    is_fair = folder is not None and (folder / "model" / "esm2.py").is_file()
    found = ", ".join(f"{name} {version}" for name, version in distributions.items())
    yield first_case(
        GROUP,
        "esm",
        f"`import esm` takes {found}",
        {"distributions": dict(distributions), "importable": str(folder) if folder else None},
        (
            len(distributions) == 2,
            "warning",
            f"fair-esm and esm are both installed, and both own the package `esm`, in {folder}",
            "keep one: pip uninstall --yes esm fair-esm && pip install fair-esm==2.0.0",
        ),
        (
            "fair-esm" in distributions and not is_fair,
            "warning",
            f"fair-esm is installed, but `import esm` takes {folder or 'nothing'}: comparisons with fair-esm fail",
            "remove that folder from PYTHONPATH and the working directory, or pip install --force-reinstall fair-esm",
        ),
    )


def threads(environment: Mapping[str, str], cores: int) -> Finding:
    """Compare the threads of a process, as set by the environment, with the cores that it may use."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    wanted = {name: environment[name].strip() for name in names if environment.get(name, "").strip()}
    first = next(iter(wanted.values()), "").split(",")[0]
    found = ", ".join(f"{name}={value}" for name, value in wanted.items())
    found = f"{found}, of {cores} cores" if wanted else f"not set: the processes share {cores} cores"
    fix = f"unset {' '.join(wanted)}: esmshard then divides the cores among the processes"
    too_many = first.isdecimal() and int(first) > cores
    case: Case = (too_many, "warning", f"{found} that this process may use", fix)
    return first_case(GROUP, "threads", found, {"environment": wanted, "cores": cores}, case)


def driver_fits(
    torch: str,
    cuda: str | None,
    driver: str | None,
    gpus: Sequence[GPU],
    architectures: Sequence[str],
    usable: bool,
    reason: str = "",
) -> Iterator[Finding]:
    """Check whether driver, build of torch and GPUs work together.

    Args:
        torch: the version of torch.
        cuda: `torch.version.cuda`, such as 13.0; None for a build without CUDA.
        driver: the version of the NVIDIA driver; None if there is none.
        gpus: the GPUs that the driver reports.
        architectures: `torch.cuda.get_arch_list()`, such as sm_90 and compute_120.
        usable: `torch.cuda.is_available()`.
        reason: torch's message, if torch cannot use CUDA.
    """
    capabilities = tuple(sorted({capability for _, capability in gpus if capability}))
    best, newest = wheel_for(driver or "", capabilities), WHEELS["cu130"].driver
    wheel = _wheel_of(cuda) if cuda else None
    install = f"pip install --force-reinstall torch --index-url {best.address}" if best else ""
    update = f"update the driver to {wheel.driver if wheel and best else newest} or later"
    is_old = driver and wheel and version_of(driver) < version_of(wheel.driver)
    found = f"driver {driver}, " + (f"CUDA {cuda}" if cuda else "a torch without CUDA, and no GPU")
    if driver and wheel and version_of(driver) < version_of(wheel.native_driver):
        found += f", by minor version compatibility (the driver of this CUDA is {wheel.native_driver})"
    unused = f"{len(gpus)} x {''.join(name for name, _ in gpus[:1])}, but torch {torch} is built without CUDA"
    old = f"driver {driver} is too old for CUDA {cuda}, for which this torch is built: it needs "
    values = {
        "torch": torch,
        "cuda": cuda,
        "driver": driver,
        "capabilities": [f"{major}.{minor}" for major, minor in capabilities],
        "architectures": list(architectures),
    }
    yield first_case(
        GROUP,
        "driver",
        found,
        values,
        (driver is None and cuda is None, "ok", "no NVIDIA driver, and a torch without CUDA: the CPU", ""),
        (
            driver is None,
            "note",
            f"torch is built for CUDA {cuda}, but there is no NVIDIA driver: runs use the CPU",
            "where you expect GPUs: docker run --gpus all, apptainer --nv, or --gres=gpu in Slurm",
        ),
        (cuda is None and gpus, "error", unused, install or update),
        (is_old, "error", f"{old}{wheel.driver if wheel else ''}", ", or ".join(filter(None, (install, update)))),
    )
    if driver is None or cuda is None or is_old:
        return
    for name, capability in dict(gpus).items():
        if capability and architectures and not _built_for(capability, architectures):
            found = f"{name} has compute capability {capability[0]}.{capability[1]}, but this torch has code only for "
            found += " ".join(architectures)
            yield Finding(GROUP, "architecture", "error", found, install or update, values)
    if gpus and not usable:
        found = f"the driver reports {len(gpus)} GPU{'s' * (len(gpus) > 1)}, but torch cannot use CUDA"
        found += f": {reason}" if reason else ""
        fix = (
            "unset CUDA_VISIBLE_DEVICES if it is empty; else see what python -c 'import torch; torch.cuda.init()' says"
        )
        yield Finding(GROUP, "cuda", "error", found, fix, values)


def _wheel_of(cuda: str) -> Wheel | None:
    """Return the row of a CUDA version. A minor version outside the table gets the last row of its major version."""
    major = [wheel for wheel in WHEELS.values() if version_of(wheel.cuda)[:1] == version_of(cuda)[:1]]
    return next((wheel for wheel in major if wheel.cuda == cuda), major[-1] if major else None)


def _built_for(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether machine code (sm_80; sm_90a and sm_100f for one GPU only) or PTX (compute_80) runs on a GPU."""
    code: list[tuple[int, int]] = []
    for kind, major, minor, exact in re.findall(r"(sm|compute)_(\d+)(\d)([af]?)", " ".join(architectures)):
        built = int(major), int(minor)
        if built == capability or (kind == "compute" and not exact and built <= capability):
            return True
        code += [] if exact or kind == "compute" else [built]
    return runs_on(capability, tuple(code))


def nccl(loaded: str, wheel: str) -> Finding:
    """Check whether torch loaded the NCCL of the installed wheel, or another one that the environment names first."""
    found = f"torch loaded NCCL {loaded}, but came with {wheel}"
    fix = "remove the other NCCL from LD_PRELOAD and LD_LIBRARY_PATH, unless the site wants its own"
    case: Case = (version_of(loaded)[:3] != version_of(wheel)[:3], "warning", found, fix)
    return first_case(GROUP, "nccl", f"NCCL {loaded}", {"loaded": loaded, "wheel": wheel}, case)


def check(driver: str | None, gpus: Sequence[GPU], cores: int) -> Iterator[Finding]:
    """Run all these checks for this machine, with the driver, its GPUs, and the cores that this process may use."""
    import torch

    installed = {str(canonicalize_name(one.name)): one.version for one in metadata.distributions() if one.name}
    version, python = torch.__version__, platform.python_version()
    found = f"esmshard {esmshard.__version__}, Python {python}, torch {version}"
    values = {
        "esmshard": installed.get("esmshard"),
        "python": python,
        "executable": sys.executable,
        "torch": version,
        "platform": platform.platform(),
    }
    if "esmshard" in installed:
        yield Finding(GROUP, "esmshard", "ok", found, values=values)
        yield from packages(metadata.requires("esmshard") or [], installed)
    else:
        top = Path(esmshard.__file__).resolve().parent.parent
        found, fix = f"{found}; esmshard is not installed, but imported from {top}", f"pip install -e {top}"
        yield Finding(GROUP, "esmshard", "note", found, fix, values)
    usable, reason = torch.cuda.is_available(), ""
    if gpus and torch.version.cuda is not None and not usable:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
    yield from driver_fits(version, torch.version.cuda, driver, gpus, torch.cuda.get_arch_list(), usable, reason)
    wheels = [of for name, of in installed.items() if name.startswith("nvidia-nccl-cu")]
    if usable and torch.version.cuda is not None and wheels:
        yield nccl(".".join(map(str, torch.cuda.nccl.version())), wheels[0])  # type: ignore[no-untyped-call]
    spec = find_spec("esm")
    places = list(spec.submodule_search_locations or ()) if spec else []
    owners = {name: version for name, version in installed.items() if name in ("fair-esm", "esm")}
    yield from esm_package(owners, Path(places[0]) if places else None)
    yield threads(os.environ, cores)
