"""Write lock.txt and tools.txt: every package that the image gets, with its version, torch left to constraints.txt.

pip resolves in a fresh environment with nothing to see, as it would for a user, and installs nothing. CUDA libraries
are not in the lock: torch's own metadata names each with its version, and a machine without a GPU does not see them.
Versions are not hashed, because one lock serves x86 and ARM, and Python 3.11 and NVIDIA's.
"""

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from dependencies import canonical

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TOOLS = ["hatchling>=1.27", "cyclonedx-bom>=5.0"]
HEADER = {
    "lock.txt": "# Python packages of the image besides torch: esmshard[test]. Written by `make lock`.\n",
    "tools.txt": "# What builds the wheel and the SBOM; none of it stays in the image. Written by `make lock`.\n",
}


def resolve(python: Path, *requirements: str) -> dict[str, str]:
    """Versions by canonical name that pip would install for the requirements into an empty environment."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"]
        command += ["--ignore-installed", "--report", report, "-c", ROOT / "constraints.txt", *requirements]
        subprocess.run(command, check=True)
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return {canonical(entry["name"]): entry["version"] for entry in found}


def main() -> None:
    """Resolve both lists and write them."""
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        python = Path(scratch) / "bin" / "python"
        found = {"lock.txt": resolve(python, f"{ROOT}[test]"), "tools.txt": resolve(python, *TOOLS)}
    for name, pins in found.items():
        lines = [f"{key}=={pins[key]}\n" for key in sorted(pins) if key not in {"torch", "esmshard"}]
        (HERE / name).write_text(HEADER[name] + "".join(lines))
        print(f"{name}: {len(lines)} packages", file=sys.stderr)


if __name__ == "__main__":
    main()
