"""Write dist/esmshard.cdx.json: what an installation from the lock consists of, as CycloneDX.

It is read from a fresh environment that is thrown away; the one that `make` works in has tools of developers besides.
The image has its own, made from what is installed there: with its CUDA libraries.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def main() -> None:
    """Install, list, write."""
    target = ROOT / "dist" / "esmshard.cdx.json"
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=False)
        python = Path(scratch) / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-compile", "-r", HERE / "lock.txt", "-r", ROOT / "constraints.txt"], check=True)
        subprocess.run([*pip, "--no-deps", ROOT], check=True)
        command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
        command += ["--output-file", target, python]
        subprocess.run(command, check=True)
    print(target, file=sys.stderr)


if __name__ == "__main__":
    main()
