"""Whether the installed packages, the driver and the GPUs work together. Decisions take values and need no torch."""

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import esmshard
from esmshard.cluster.doctor.drivers import WHEELS, Wheel, runs_on, version_of, wheel_for
from esmshard.cluster.doctor.findings import Finding

GPU = tuple[str, tuple[int, int] | None]
"""A GPU: its name and compute capability."""

_LEFT_OUT = {"all", "test", "dev"}
"""The extras that combine others, or are for developers."""


def packages(requirements: Sequence[str], installed: Mapping[str, str]) -> Iterator[Finding]:
    """Compare installed versions, by canonical name, with our own requirements, extra by extra."""
    fitting: dict[str, str] = {}
    missing: dict[str, list[str]] = {}
    for wanted in map(Requirement, requirements):
        extra = next(iter(re.findall(r"extra == ['\"]([\w-]+)['\"]", str(wanted.marker or ""))), "")
        name = str(canonicalize_name(wanted.name))
        is_for_here = wanted.marker is None or wanted.marker.evaluate({"extra": extra})
        if extra in _LEFT_OUT or name == "esmshard" or not is_for_here:
            continue
        version = installed.get(name)
        wanted.marker = None
        if version is None and extra:
            missing.setdefault(extra, []).append(name)
        elif version is None or not wanted.specifier.contains(version, prereleases=True):
            of = f" of the extra '{extra}'" if extra else ""
            found = f"{name} {version}{of} does not fit {wanted.specifier}" if version else f"{name} is missing"
            fix = f"pip install --upgrade '{f'esmshard[{extra}]' if extra else wanted}'"
            values = {"installed": version, "wanted": str(wanted.specifier)} | ({"extra": extra} if extra else {})
            yield Finding(name, "warning" if extra else "error", found, fix, values)
        elif extra:
            missing.setdefault(extra, [])
        else:
            fitting[name] = version
    found = ", ".join(f"{name} {version}" for name, version in fitting.items())
    yield Finding("packages", "ok", found, values=fitting)
    complete = [extra for extra, names in missing.items() if not names]
    lacks = {extra: names for extra, names in missing.items() if names}
    found = f"installed: {', '.join(complete) or 'none'}"
    values = {"installed": complete, "missing": lacks}
    if lacks:
        found += "; not installed: " + ", ".join(f"{extra} ({' '.join(names)})" for extra, names in lacks.items())
        fix = f"install those that you need: pip install 'esmshard[{','.join(lacks)}]'"
        yield Finding("extras", "note", found, fix, values)
    else:
        yield Finding("extras", "ok", found, values=values)


def esm_package(distributions: Mapping[str, str], folder: Path | None) -> Finding:
    """Check which package owns the folder `esm`: fair-esm (ESM-2) and esm (ESM3, ESM C) both install it.

    The package that is installed last overwrites files of the other. esmshard imports fair-esm for comparisons only.
    `distributions` has the versions of the two as far as installed, and `import esm` would use `folder`.
    """
    values = {"distributions": dict(distributions), "importable": str(folder) if folder else None}
    if len(distributions) == 2:
        found = f"fair-esm and esm are both installed, and both own the package `esm`, in {folder}"
        fix = "keep one: pip uninstall --yes esm fair-esm && pip install fair-esm==2.0.0"
        return Finding("esm", "warning", found, fix, values)
    if "fair-esm" in distributions and not (folder and (folder / "model" / "esm2.py").is_file()):
        found = f"fair-esm is installed, but `import esm` takes {folder or 'nothing'}: comparisons with fair-esm fail"
        fix = "remove that folder from PYTHONPATH and the working directory, or pip install --force-reinstall fair-esm"
        return Finding("esm", "warning", found, fix, values)
    found = f"`import esm` takes {', '.join(f'{name} {version}' for name, version in distributions.items())}"
    return Finding("esm", "ok", found, values=values)


def threads(environment: Mapping[str, str], cores: int) -> Finding:
    """Compare the threads of a process, as set by the environment, with the cores that it may use."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    wanted = {name: environment[name].strip() for name in names if environment.get(name, "").strip()}
    first = next(iter(wanted.values()), "").split(",")[0]
    found = ", ".join(f"{name}={value}" for name, value in wanted.items())
    found = f"{found}, of {cores} cores" if wanted else f"not set: the processes share {cores} cores"
    values = {"environment": wanted, "cores": cores}
    if first.isdecimal() and int(first) > cores:
        fix = f"unset {' '.join(wanted)}: esmshard then divides the cores among the processes"
        return Finding("threads", "warning", f"{found} that this process may use", fix, values)
    return Finding("threads", "ok", found, values=values)


def driver_fits(
    torch: str,
    cuda: str | None,
    driver: str | None,
    gpus: Sequence[GPU],
    architectures: Sequence[str],
    obstacle: str,
) -> Iterator[Finding]:
    """Check whether driver, build of torch and GPUs work together.

    Args:
        torch: the version of torch.
        cuda: `torch.version.cuda`, such as 13.0; None for a build without CUDA.
        driver: the version of the NVIDIA driver; None if there is none.
        gpus: the GPUs that the driver reports.
        architectures: `torch.cuda.get_arch_list()`, such as sm_90 and compute_120.
        obstacle: torch's message if it cannot use CUDA; else empty.
    """
    capabilities = tuple(sorted({capability for _, capability in gpus if capability}))
    best, wheel = wheel_for(driver or "", capabilities), _wheel_of(cuda) if cuda else None
    install = f"pip install --force-reinstall torch --index-url {best.address}" if best else ""
    update = f"update the driver to {wheel.driver if wheel and best else WHEELS['cu130'].driver} or later"
    values = {
        "torch": torch,
        "cuda": cuda,
        "driver": driver,
        "capabilities": [f"{major}.{minor}" for major, minor in capabilities],
        "architectures": list(architectures),
    }
    finding = partial(Finding, "driver", values=values)
    if driver is None and cuda is None:
        yield finding("ok", "no NVIDIA driver, and a torch without CUDA: the CPU")
    elif driver is None:
        fix = "where you expect GPUs: docker run --gpus all, apptainer --nv, or --gres=gpu in Slurm"
        yield finding("note", f"torch is built for CUDA {cuda}, but there is no NVIDIA driver: runs use the CPU", fix)
    elif cuda is None and gpus:
        found = f"{len(gpus)} x {gpus[0][0]}, but torch {torch} is built without CUDA"
        yield finding("error", found, install or update)
    elif cuda is None:
        yield finding("ok", f"driver {driver}, a torch without CUDA, and no GPU")
    elif wheel and version_of(driver) < version_of(wheel.driver):
        found = f"driver {driver} is too old for CUDA {cuda}, for which this torch is built: it needs {wheel.driver}"
        yield finding("error", found, ", or ".join(filter(None, (install, update))))
    else:
        found = f"driver {driver}, CUDA {cuda}"
        if wheel and version_of(driver) < version_of(wheel.native_driver):
            found += f", by minor version compatibility (the driver of this CUDA is {wheel.native_driver})"
        yield finding("ok", found)
        for name, (major, minor) in {name: capability for name, capability in gpus if capability}.items():
            if architectures and not _built_for((major, minor), architectures):
                found = f"{name} has compute capability {major}.{minor}, but this torch has code only for "
                yield Finding("architecture", "error", found + " ".join(architectures), install or update, values)
        if gpus and obstacle:
            found = f"the driver reports {len(gpus)} GPU{'s' * (len(gpus) > 1)}, but torch cannot use CUDA: {obstacle}"
            fix = "unset CUDA_VISIBLE_DEVICES if it is empty; else see what "
            yield Finding("cuda", "error", found, f"{fix}python -c 'import torch; torch.cuda.init()' says", values)


def _wheel_of(cuda: str) -> Wheel | None:
    """Return the row of a CUDA version. A minor version outside the table gets the last row of its major version."""
    major = [wheel for wheel in WHEELS.values() if version_of(wheel.cuda)[:1] == version_of(cuda)[:1]]
    return next((wheel for wheel in major if wheel.cuda == cuda), major[-1] if major else None)


def _built_for(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether machine code (sm_80; sm_90a and sm_100f for one GPU only) or PTX (compute_80) runs on a GPU."""
    for kind, major, minor, exact in re.findall(r"(sm|compute)_(\d+)(\d)([af]?)", " ".join(architectures)):
        built = int(major), int(minor)
        others = built <= capability if kind == "compute" else runs_on(capability, (built,))
        if built == capability or (others and not exact):
            return True
    return False


def nccl(loaded: str, wheel: str) -> Finding:
    """Check whether torch loaded the NCCL of the installed wheel, or another one that the environment names first."""
    values = {"loaded": loaded, "wheel": wheel}
    if version_of(loaded)[:3] == version_of(wheel)[:3]:
        return Finding("nccl", "ok", f"NCCL {loaded}", values=values)
    fix = "remove the other NCCL from LD_PRELOAD and LD_LIBRARY_PATH, unless the site wants its own"
    return Finding("nccl", "warning", f"torch loaded NCCL {loaded}, but came with {wheel}", fix, values)


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
        yield Finding("esmshard", "ok", found, values=values)
        yield from packages(metadata.requires("esmshard") or [], installed)
    else:
        top = Path(esmshard.__file__).resolve().parent.parent
        found, fix = f"{found}; esmshard is not installed, but imported from {top}", f"pip install -e {top}"
        yield Finding("esmshard", "note", found, fix, values)
    obstacle = ""
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            obstacle = str(error).splitlines()[0]
    yield from driver_fits(version, torch.version.cuda, driver, gpus, torch.cuda.get_arch_list(), obstacle)
    wheels = [of for name, of in installed.items() if name.startswith("nvidia-nccl-cu")]
    if wheels and not obstacle:
        yield nccl(".".join(map(str, torch.cuda.nccl.version())), wheels[0])  # type: ignore[no-untyped-call]
    spec = find_spec("esm")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if owners := {name: version for name, version in installed.items() if name in ("fair-esm", "esm")}:
        yield esm_package(owners, Path(places[0]) if places else None)
    yield threads(os.environ, cores)
