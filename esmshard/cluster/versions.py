"""Do the installed packages fit each other, the driver and the GPUs? Decisions take values, and no torch."""

import os
import platform
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import esmshard
from esmshard.cluster.drivers import TORCH_FLOOR, WHEELS, Wheel, runs_on, version_of, wheel_for
from esmshard.cluster.findings import Finding

CHECK = "versions"

_REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)(\[[^\]]*\])?\s*([^;]*)(?:;\s*(.*))?")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")
_LEFT_OUT = ("all", "test", "dev")  # made of the others, and tools of developers


def normal(name: str) -> str:
    """A package's name as PyPI compares it (PEP 503).

    >>> normal("ruamel.yaml"), normal("huggingface_hub")
    ('ruamel-yaml', 'huggingface-hub')
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def packages(requirements: Sequence[str], installed: Mapping[str, str]) -> Iterator[Finding]:
    """Installed versions beside the floors of the package's own metadata, extra by extra.

    Args:
        requirements: as `importlib.metadata.requires` gives them: `h5py>=3.10; extra == 'h5'`.
        installed: name, as `normal` writes it, to version.
    """
    extras: dict[str, list[tuple[str, str]]] = {}
    fitting = {}
    for text in requirements:
        name, of_it, wanted, marker = _REQUIREMENT.match(text.strip()).groups()  # type: ignore[union-attr]
        of = _EXTRA.search(marker or "")
        key, floor = normal(name), wanted.strip()
        here = installed.get(key)
        least = re.search(r">=\s*([\d.]+)", floor)
        low = here is not None and least is not None and version_of(here) < version_of(least[1])
        if of is None and (here is None or low):
            is_torch = key == "torch"
            yield Finding(
                CHECK,
                key,
                "error",
                f"{name} {here} is older than the least version, {least[1]}" if low and least else f"{name} is missing",
                f"pip install --upgrade '{name}{of_it or ''}{floor}'"
                + (" from the index of its wheel" if is_torch else ""),
                {"installed": here, "wanted": floor},
            )
        elif of is None:
            fitting[key] = here
        elif of[1] not in _LEFT_OUT and key != "esmshard" and low and least:
            yield Finding(
                CHECK,
                key,
                "warning",
                f"{name} {here}, of the extra '{of[1]}', is older than the least version, {least[1]}",
                f"pip install --upgrade 'esmshard[{of[1]}]'",
                {"installed": here, "wanted": floor, "extra": of[1]},
            )
        elif of[1] not in _LEFT_OUT and key != "esmshard":
            extras.setdefault(of[1], []).append((key, here or ""))
    yield Finding(
        CHECK, "packages", "ok", ", ".join(f"{name} {version}" for name, version in fitting.items()), values=fitting
    )
    lacking = {extra: [name for name, here in of if not here] for extra, of in extras.items()}
    missing = {extra: names for extra, names in lacking.items() if names}
    whole = [extra for extra in extras if extra not in missing]
    if missing:
        yield Finding(
            CHECK,
            "extras",
            "note",
            f"installed: {', '.join(whole) or 'none'}; not: "
            + ", ".join(f"{extra} ({' '.join(names)})" for extra, names in missing.items()),
            f"what is wanted of these: pip install 'esmshard[{','.join(missing)}]'",
            {"installed": whole, "missing": missing},
        )
    else:
        yield Finding(CHECK, "extras", "ok", f"installed: {', '.join(whole)}", values={"installed": whole})


def esm_package(distributions: Mapping[str, str], folder: Path | None) -> Iterator[Finding]:
    """Two packages of PyPI install a folder `esm`: fair-esm, whose models ESM-2 are, and esm, of ESM3.

    Whichever came last overwrites files of the other one. Nothing here imports either but to compare with fair-esm.

    Args:
        distributions: `fair-esm` and `esm`, as far as installed, to version.
        folder: what `import esm` would take; None for nothing.
    """
    values = {"distributions": dict(distributions), "importable": str(folder) if folder else None}
    if folder is None:
        if distributions:
            names = " and ".join(distributions)
            yield Finding(
                CHECK,
                "esm",
                "warning",
                f"{names} is installed, but no package `esm` can be imported: another one took its files along",
                f"pip install --force-reinstall --no-deps {next(iter(distributions))}",
                values,
            )
        return
    fair, new = (folder / "model" / "esm2.py").is_file(), (folder / "models" / "esm3.py").is_file()
    if fair and new:
        which = "files of both packages, mixed"
    elif fair:
        which = "fair-esm's"
    else:
        which = "that of PyPI's esm (ESM3, ESM C)" if new else "neither fair-esm's nor PyPI's esm"
    where = f"`import esm` takes {which}, in {folder}"
    if len(distributions) == 2 or (fair and new):
        yield Finding(
            CHECK,
            "esm",
            "warning",
            f"fair-esm and esm are both installed, and both own the package `esm`; {where}",
            "keep one: pip uninstall --yes esm fair-esm && pip install fair-esm==2.0.0",
            values,
        )
    elif not fair and ("fair-esm" in distributions or not new):
        yield Finding(
            CHECK,
            "esm",
            "warning",
            where,
            "take that folder from PYTHONPATH or the working directory, or rename it: comparisons with fair-esm fail",
            values,
        )
    else:
        told = where if fair else f"{where}; comparisons with fair-esm are left out, all else works"
        yield Finding(CHECK, "esm", "ok" if fair else "note", told, values=values)


def threads(environment: Mapping[str, str], cores: int) -> Iterator[Finding]:
    """Threads of a process, as the environment sets them, over the cores that it may use."""
    asked = {
        name: environment[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if environment.get(name, "").strip()
    }
    values = {"environment": asked, "cores": cores}
    first = next(iter(asked.values()), "")
    if not asked:
        yield Finding(CHECK, "threads", "ok", f"not set: the launcher shares {cores} cores out", values=values)
    elif first.split(",")[0].isdecimal() and int(first.split(",")[0]) > cores:
        yield Finding(
            CHECK,
            "threads",
            "warning",
            f"{next(iter(asked))}={first}, more than the {cores} cores that this process may use",
            f"unset {' '.join(asked)}: the launcher shares the cores out among the processes",
            values,
        )
    else:
        set_to = ", ".join(f"{name}={value}" for name, value in asked.items())
        yield Finding(CHECK, "threads", "ok", f"{set_to}, of {cores} cores", values=values)


def driver_fits(
    torch: str,
    cuda: str | None,
    driver: str | None,
    gpus: Sequence[tuple[str, tuple[int, int] | None]],
    architectures: Sequence[str],
    usable: bool,
    reason: str = "",
) -> Iterator[Finding]:
    """Driver, wheel of torch and GPUs: does each take the others?

    Args:
        torch: its version.
        cuda: what it is built for, as 13.0; None for a build without.
        driver: the NVIDIA driver's version; None where there is none.
        gpus: name and compute capability of each that the driver shows.
        architectures: `torch.cuda.get_arch_list()`, as sm_90 and compute_120.
        usable: `torch.cuda.is_available()`.
        reason: why not, in torch's words.
    """
    capabilities = tuple(sorted({capability for _, capability in gpus if capability}))
    values = {
        "torch": torch,
        "cuda": cuda,
        "driver": driver,
        "capabilities": [f"{a}.{b}" for a, b in capabilities],
        "architectures": list(architectures),
    }
    if driver is None:
        if cuda is None:
            yield Finding(CHECK, "driver", "ok", "no NVIDIA driver, and a torch without CUDA: the CPU", values=values)
        else:
            yield Finding(
                CHECK,
                "driver",
                "note",
                f"torch is built for CUDA {cuda}, but there is no NVIDIA driver: runs go to the CPU",
                "where GPUs are expected: docker run --gpus all, apptainer --nv, or --gres=gpu in Slurm",
                values,
            )
        return
    best = wheel_for(driver, capabilities)
    mend = (
        f"pip install --force-reinstall torch --index-url {best.address}"
        if best
        else f"update the driver to {WHEELS['cu130'].driver} or later"
    )
    if cuda is None:
        if not gpus:
            return
        told = f"{len(gpus)} x {gpus[0][0]}, but torch {torch} is built without CUDA"
        yield Finding(CHECK, "driver", "error", told, mend, values)
        return
    wheel = _wheel_of(cuda)
    if wheel is None:
        yield Finding(CHECK, "driver", "note", f"CUDA {cuda} is not in the table of drivers", values=values)
    elif version_of(driver) < version_of(wheel.driver):
        yield Finding(
            CHECK,
            "driver",
            "error",
            f"driver {driver} is too old for CUDA {cuda}, for which this torch is built: {wheel.driver} is the least",
            mend + ("" if best is None else f", or update the driver to {wheel.driver} or later"),
            values | {"least": wheel.driver},
        )
        return
    elif version_of(driver) < version_of(wheel.native_driver):
        told = f"driver {driver} runs CUDA {cuda} by minor version compatibility (its own is {wheel.native_driver})"
        yield Finding(CHECK, "driver", "ok", told, values=values)
    else:
        yield Finding(CHECK, "driver", "ok", f"driver {driver}, CUDA {cuda}", values=values)
    for name, capability in dict(gpus).items():
        if capability and architectures and not _built_for(capability, architectures):
            yield Finding(
                CHECK,
                "architecture",
                "error",
                f"{name} has compute capability {capability[0]}.{capability[1]}, and this torch holds code for "
                f"{' '.join(architectures)} only",
                mend,
                values,
            )
    if gpus and not usable:
        yield Finding(
            CHECK,
            "cuda",
            "error",
            f"the driver shows {len(gpus)} GPU{'s' * (len(gpus) > 1)}, but torch cannot use CUDA"
            + (f": {reason}" if reason else ""),
            "unset CUDA_VISIBLE_DEVICES if it is empty; else python -c 'import torch; torch.cuda.init()' says more",
            values,
        )


def _wheel_of(cuda: str) -> Wheel | None:
    """The row of a CUDA version; one of the same major version for a minor one that is not in the table."""
    major = [wheel for wheel in WHEELS.values() if version_of(wheel.cuda)[:1] == version_of(cuda)[:1]]
    exact = [wheel for wheel in major if wheel.cuda == cuda]
    return exact[0] if exact else major[-1] if major else None


def _built_for(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    code = [_capability(one) for one in architectures if re.fullmatch(r"sm_\d+", one)]
    exact = [_capability(one[:-1]) for one in architectures if re.fullmatch(r"sm_\d+[af]", one)]
    intermediate = [_capability(one) for one in architectures if re.fullmatch(r"compute_\d+", one)]
    return runs_on(capability, tuple(code)) or capability in exact or any(capability >= one for one in intermediate)


def _capability(architecture: str) -> tuple[int, int]:
    digits = architecture.rpartition("_")[2]
    return int(digits[:-1]), int(digits[-1])


def nccl(loaded: str | None, wheel: str | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    """NCCL as torch loaded it, beside the one of its wheel, and others that the environment puts before it.

    Args:
        loaded: version that torch says, as 2.27.5; None for a torch without NCCL.
        wheel: version of the installed package nvidia-nccl-cu12 or -cu13; None without one.
        environment: with LD_LIBRARY_PATH and LD_PRELOAD.
    """
    others = _libraries(environment)
    values = {"loaded": loaded, "wheel": wheel, "others": others}
    if loaded is None:
        return
    if wheel is not None and version_of(loaded)[:3] != version_of(wheel)[:3]:
        yield Finding(
            CHECK,
            "nccl",
            "warning",
            f"torch loaded NCCL {loaded}, but came with {wheel}" + (f"; see {' and '.join(others)}" if others else ""),
            "take it out of LD_PRELOAD and LD_LIBRARY_PATH, unless the site wants its own NCCL",
            values,
        )
    elif others:
        yield Finding(
            CHECK,
            "nccl",
            "warning",
            f"NCCL {loaded}; LD_PRELOAD or LD_LIBRARY_PATH lead to {' and '.join(others)}, which may be loaded instead",
            "take it out of them, unless the site wants its own NCCL; all nodes need the same",
            values,
        )
    else:
        yield Finding(CHECK, "nccl", "ok", f"NCCL {loaded}", values=values)


def _libraries(environment: Mapping[str, str]) -> list[str]:
    found = [Path(one) for one in re.split(r"[ :]+", environment.get("LD_PRELOAD", "")) if "libnccl.so" in one]
    for folder in filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")):
        found += sorted(Path(folder).glob("libnccl.so*"))[:1]
    return list(dict.fromkeys(str(path.resolve()) for path in found if path.exists()))


def look(driver: str | None, gpus: Sequence[tuple[str, tuple[int, int] | None]], cores: int) -> Iterator[Finding]:
    """All of it on this machine.

    Args:
        driver: version, as the driver's own tools say it.
        gpus: name and compute capability of each.
        cores: that this process may use.
    """
    import torch

    installed = {normal(d.name): d.version for d in metadata.distributions() if d.name}
    version = torch.__version__
    clone = clone_of(Path(esmshard.__file__))
    told = installed.get("esmshard") or f"{esmshard.__version__} (not installed, {clone or 'no clone either'})"
    mend = "" if "esmshard" in installed else f"the command and what it needs: pip install -e {clone or '.'}"
    yield Finding(
        CHECK,
        "esmshard",
        "ok" if "esmshard" in installed else "note",
        f"esmshard {told}, Python {platform.python_version()}, torch {version}",
        mend,
        values={
            "esmshard": installed.get("esmshard"),
            "python": platform.python_version(),
            "executable": sys.executable,
            "torch": version,
            "platform": platform.platform(),
        },
    )
    if version_of(version) < version_of(TORCH_FLOOR):
        yield Finding(
            CHECK,
            "torch",
            "error",
            f"torch {version} is older than the least version, {TORCH_FLOOR}",
            f"pip install --upgrade 'torch>={TORCH_FLOOR}'",
            {"installed": version},
        )
    yield from packages([one for one in _required(clone) if not one.startswith("torch>")], installed)
    yield from driver_fits(version, torch.version.cuda, driver, gpus, torch.cuda.get_arch_list(), *_cuda(gpus))
    has_nccl = torch.version.cuda is not None and torch.cuda.is_available()
    loaded = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None  # type: ignore[no-untyped-call]
    wheels = [found for name, found in installed.items() if name.startswith("nvidia-nccl-cu")]
    yield from nccl(loaded, wheels[0] if wheels else None, os.environ)
    owners: dict[str, str] = {name: installed[name] for name in ("fair-esm", "esm") if name in installed}
    yield from esm_package(owners, _folder_of("esm"))
    yield from threads(os.environ, cores)


def clone_of(package: Path) -> Path | None:
    """The clone whose package this file is of; None for an installed one."""
    top = package.resolve().parent.parent
    return top if (top / "pyproject.toml").is_file() else None


def _required(clone: Path | None) -> list[str]:
    """Requirements as `importlib.metadata.requires` gives them; where nothing is installed, those of the clone."""
    try:
        return metadata.requires("esmshard") or []
    except metadata.PackageNotFoundError:
        pass
    if clone is None:
        return []
    project = tomllib.loads((clone / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    return [*project["dependencies"], *(f"{one}; extra == '{extra}'" for extra, of in extras for one in of)]


def _cuda(gpus: Sequence[object]) -> tuple[bool, str]:
    """Whether torch can use CUDA, and why not. Asks torch for its reason only where there are GPUs."""
    import torch

    if torch.cuda.is_available() or not gpus or torch.version.cuda is None:
        return torch.cuda.is_available(), ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return False, str(error).splitlines()[0]
    return False, ""


def _folder_of(package: str) -> Path | None:
    """Directory that `import package` would take. Nothing is imported."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    return Path(places[0]) if places else Path(spec.origin).parent if spec.origin else None
