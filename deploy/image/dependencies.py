"""What pip is to install in the image, and whether what is there suffices.

`list LOCK` prints requirements. On a plain base image they are the lock itself. A base that brings its own torch brings
packages that fit it (numpy above all); these are named without a version, so that pip leaves them as they are.

`check`, run by the image's Python after installation, compares every package with the floors of esmshard's metadata.
pip cannot: to it NVIDIA's torch 2.11.0a0+... is older than 2.11.
"""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path


def canonical(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> dict[str, str]:
    """Versions by canonical name, of lines `name==version`. Raises ValueError for any other line but comments."""
    pins: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;]+)", line)
        if not found or canonical(found[1]) in pins:
            raise ValueError(f"line {number}: {line!r} is not one `name==version` a package")
        pins[canonical(found[1])] = found[2]
    return pins


def requirements(pins: dict[str, str], present: set[str], own_torch: bool) -> list[str]:
    """Lines for pip; `present` are the canonical names that the base image has."""
    return [name if own_torch and name in present else f"{name}=={version}" for name, version in pins.items()]


def below_floor(requires: list[str], versions: dict[str, str]) -> list[str]:
    """A sentence for each requirement without an extra that the installed versions do not meet."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    sentences = []
    for requirement in map(Requirement, requires):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = versions.get(canonical(requirement.name))
        if found is None:
            sentences.append(f"{requirement.name} is not installed; esmshard needs {requirement}")
        elif not requirement.specifier.contains(Version(found).base_version):
            sentences.append(f"{requirement.name} {found} is installed; esmshard needs {requirement}")
    return sentences


def main(arguments: list[str]) -> int:
    """Run one of the two commands; the exit code."""
    versions = {canonical(found.metadata["Name"]): found.version for found in importlib.metadata.distributions()}
    if arguments[:1] == ["list"] and len(arguments) == 2:
        own_torch = importlib.util.find_spec("torch") is not None
        print(*requirements(read_lock(Path(arguments[1]).read_text()), set(versions), own_torch), sep="\n")
        return 0
    if arguments == ["check"]:
        sentences = below_floor(importlib.metadata.requires("esmshard") or [], versions)
        for sentence in sentences:
            print(f"{sentence}. Take a newer base image.", file=sys.stderr)
        return 1 if sentences else 0
    print("usage: dependencies.py list LOCK | check", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
