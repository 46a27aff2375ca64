"""Install the GPU kit that contains this file, on a machine without network.

    python3.12 install.py                        # makes .venv beside this file
    python3.12 install.py VENV                   # makes VENV
    python3.12 install.py VENV --source CLONE    # CLONE/esmshard is used, not the esmshard of the kit

Run it with the Python of the machine that has torch. VENV is a new virtual environment with the packages of the kit;
torch and the other packages of this Python stay where they are, and VENV uses them. Nothing is downloaded, and
nothing outside VENV changes. `make gpu-kit` writes the kit, in which this file is called install.py.
"""

# The syntax is that of Python 3.7, so that an old Python can read this file and print that it is too old.
from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

KIT = Path(__file__).resolve().parent

_REPORT = """
import os, platform, sys, warnings
warnings.simplefilter("ignore")
import torch
import esmshard
cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "not available"
print(f"Python {platform.python_version()}, {sys.executable}")
print(f"torch {torch.__version__}, {os.path.dirname(torch.__file__)}")
print(f"CUDA: {cuda}")
print(f"esmshard {esmshard.__version__}, {os.path.dirname(esmshard.__file__)}")
"""
"""A program that prints the versions in the new environment."""


class Refusal(Exception):
    """Nothing was installed. The message is one sentence with the reason and a fix."""


def main(arguments: list[str] | None = None) -> int:
    """Check the machine and the kit, install, and print the versions. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", nargs="?", metavar="VENV", default=str(KIT / ".venv"), help="directory to make")
    parser.add_argument("--source", metavar="DIR", help="a clone, whose esmshard/ is used instead of the kit's")
    args = parser.parse_args(arguments)
    try:
        kit = read_kit()
        check_machine(kit)
        torch = torch_directory(kit)
        check_expected(kit)
        source = source_directory(args.source)
        venv = Path(os.path.abspath(args.venv))  # noqa: PTH100  # symbolic links are kept
        check_place(venv, kit)
        check_wheels(kit)
        report = install(venv, kit, torch, source)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}; correct that and run install.py again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was installed, so run install.py again", file=sys.stderr)
        return 130
    print(report, end="")
    print(f"now: {shlex.quote(str(venv / 'bin' / 'python'))} benchmarks/gpu.py --list    (in {KIT})")
    return 0


def read_kit() -> dict[str, Any]:
    """Return the content of kit.json."""
    path = KIT / "kit.json"
    if not path.is_file():
        raise Refusal(f"{path} is missing; make a kit with `make gpu-kit`, unpack it, and run the install.py inside")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise Refusal(f"{path} is damaged; {_again()}") from None
    if not isinstance(found, dict) or found.get("format") != 1:
        raise Refusal(f"{path} is of another kind than this install.py; {_again()}")
    return found


def check_machine(kit: dict[str, Any]) -> None:
    """Refuse a machine whose Python, processor or C library does not fit the wheels."""
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if running != kit["python"]:
        raise Refusal(
            f"{sys.executable} is Python {running}, and the kit is for {kit['python']}; run "
            f"`python{kit['python']} install.py`, or make a kit with `make gpu-kit ARGUMENTS='--python {running}'`"
        )
    if platform.machine() != kit["machine"]:
        raise Refusal(
            f"this machine's processor is {platform.machine()}, and the kit is for {kit['machine']}; make a kit with "
            f"`make gpu-kit ARGUMENTS='--platform manylinux_2_28_{platform.machine()}'`"
        )
    library, version = platform.libc_ver()
    if kit["glibc"] and (library != "glibc" or _numbers(version) < _numbers(kit["glibc"])):
        oldest = f"manylinux_{version.replace('.', '_')}_{platform.machine()}"
        raise Refusal(
            f"this machine has {f'glibc {version}' if library == 'glibc' else 'no glibc'}, and the kit needs glibc "
            f"{kit['glibc']}; use a newer system, or make a kit with `make gpu-kit ARGUMENTS='--platform {oldest}'`"
        )


def torch_directory(kit: dict[str, Any]) -> str:
    """Return the directory of the machine's torch. The torch must be new enough."""
    least = kit["torch_at_least"]
    try:
        found = importlib.util.find_spec("torch")
    except ValueError:
        found = None
    if found is None or not found.origin:
        raise Refusal(
            f"{sys.executable} has no torch; run install.py with the Python that has it, or first install it there: "
            f"`{sys.executable} -m pip install 'torch>={least}'`"
        )
    package = Path(found.origin).parent
    text = (package / "version.py").read_text(encoding="utf-8") if (package / "version.py").is_file() else ""
    version = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", text)
    if version is None or _numbers(version[1]) < _numbers(least):
        raise Refusal(
            f"torch {version[1] if version else 'without a version'} in {package} is too old, and {least} is needed; "
            f"run install.py with another Python, or first `{sys.executable} -m pip install 'torch>={least}'`"
        )
    return str(package.parent)


def check_expected(kit: dict[str, Any]) -> None:
    """Refuse a machine that lacks a package which the kit leaves out, because the machine was expected to have it."""
    installed = {_canonical(str(one.metadata["Name"])) for one in importlib.metadata.distributions()}
    missing = [name for name in kit["expected"] if name not in installed]
    if missing:
        raise Refusal(
            f"{sys.executable} has no {', '.join(missing)}, which this kit leaves out because of --has; make a kit "
            "without it: `make gpu-kit`"
        )


def source_directory(asked: str | None) -> str | None:
    """Return the absolute path of a clone."""
    if asked is None:
        return None
    source = os.path.abspath(asked)  # noqa: PTH100
    if not (Path(source) / "esmshard" / "__init__.py").is_file():
        raise Refusal(f"--source {asked}: has no esmshard/__init__.py; give the directory of a clone")
    return source


def check_place(venv: Path, kit: dict[str, Any]) -> None:
    """Refuse a VENV that exists already, or for which there is no room."""
    if os.path.lexists(str(venv)):
        raise Refusal(
            f"{venv} exists already; remove it (rm -r {shlex.quote(str(venv))}), or name another directory: "
            "install.py DIRECTORY"
        )
    there = next(place for place in venv.parents if place.is_dir())
    needed, free = kit["installed_bytes"], shutil.disk_usage(str(there)).free
    if free < needed:
        raise Refusal(
            f"{venv} needs {needed / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are free in {there}; name a directory "
            "where there is room: install.py DIRECTORY"
        )


def check_wheels(kit: dict[str, Any]) -> None:
    """Refuse a kit with missing or changed wheels."""
    for name, announced in kit["wheels"].items():
        path = KIT / "wheels" / name
        if not path.is_file():
            raise Refusal(f"{path} is missing; {_again()}")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != announced:
            raise Refusal(f"{path} is damaged (its sha256 is not the one in kit.json); {_again()}")


def install(venv: Path, kit: dict[str, Any], torch: str, source: str | None) -> str:
    """Make VENV, install the wheels in it, and return the versions. If a step fails, remove VENV."""
    try:
        _make(venv, kit)
        (packages,) = venv.glob("lib/python*/site-packages")
        # This comes after pip, because pip does not install packages that it finds outside of VENV in the same version.
        lines = [f"import site; site.addsitedir({place!a})" for place in machine_directories(torch)]
        (packages / "packages_of_the_machine.pth").write_text("\n".join([*lines, ""]), encoding="utf-8")
        if source is not None:
            line = f"import sys; sys.path.insert(0, {source!a})\n"
            (packages / "source_of_esmshard.pth").write_text(line, encoding="utf-8")
        done = subprocess.run(
            [str(venv / "bin" / "python"), "-c", _REPORT],
            cwd=str(venv),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Refusal(
                f"what was installed does not run ({_last_line(done.stderr, done.returncode)}); look whether "
                f"`{sys.executable} -c 'import torch'` works on this machine"
            )
        (venv / ".ready").touch()  # Without this file, the Makefile would make VENV again.
    except BaseException:
        shutil.rmtree(str(venv), ignore_errors=True)
        raise
    return done.stdout


def machine_directories(torch: str) -> list[str]:
    """Return the directories with packages of the running Python, in Python's order, including that of torch.

    The running Python may be a virtual environment. `--system-site-packages` would not give access to its packages.
    """
    found = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    return list(dict.fromkeys(found if torch in found else [torch, *found]))


def _make(venv: Path, kit: dict[str, Any]) -> None:
    """Make a virtual environment with the wheels of the kit."""
    try:
        from venv import EnvBuilder
    except ImportError:
        raise Refusal(
            f"{sys.executable} has no module venv; install it (Debian and Ubuntu: `apt-get install python3-venv`)"
        ) from None
    try:
        EnvBuilder(symlinks=True, with_pip=False).create(str(venv))
    except ValueError:
        raise Refusal(
            f"{venv}: no virtual environment can be in a path with {os.pathsep}; name another directory: "
            "install.py DIRECTORY"
        ) from None
    wheels = [os.path.join("wheels", name) for name in kit["wheels"]]  # noqa: PTH118
    # pip runs from its own wheel, because VENV has no pip. The machine's settings of pip must have no effect.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    command = [str(venv / "bin" / "python"), "-I", os.path.join("wheels", kit["pip"], "pip")]  # noqa: PTH118
    command += ["install", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--quiet"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", *wheels],
        cwd=str(KIT),
        env={**environment, "PIP_CONFIG_FILE": os.devnull},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Refusal(
            f"pip could not install the wheels ({_last_line(done.stdout, done.returncode)}); correct that, or "
            f"{_again()}"
        )


def _again() -> str:
    """Return the fix for an incomplete kit."""
    return "copy the archive to this machine again and unpack it: `tar -xf gpu-kit.tar.xz`"


def _last_line(text: str, code: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or [f"exit code {code}"])[-1]


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (2, 11) for 2.11.0a0+git."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
