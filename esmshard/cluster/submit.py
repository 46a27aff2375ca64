"""Write a job's file, and hand it to the scheduler where there is one."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from esmshard.errors import InputError, UsageError

COMMANDS = {"slurm": ("sbatch",), "kubernetes": ("kubectl", "apply", "-f")}
"""By the target. The file comes last."""


def write(text: str, path: Path, overwrite: bool, reads: Sequence[str]) -> None:
    """Write the file. One that is there already stays if it says the same, and is else refused.

    Args:
        text: of the file.
        path: where to.
        overwrite: whether another file may be replaced.
        reads: what the job reads, its recipe among it; these are never replaced.

    Raises:
        UsageError: something else lies there, or the job reads it.
        InputError: it cannot be written.
    """
    raw = text.encode("utf-8", "surrogateescape")  # names of files need not be UTF-8
    try:
        if path.is_dir():
            raise UsageError(f"{path}: is a directory; name a file with -o")
        if path.exists() and any(Path(one).exists() and path.samefile(one) for one in reads):
            raise UsageError(f"{path}: is what the job reads; choose another file with -o")
        if path.exists() and path.read_bytes() != raw and not overwrite:
            raise UsageError(f"{path}: exists already; choose another one with -o, or pass --overwrite")
        path.write_bytes(raw)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({(error.strerror or str(error)).lower()})") from None


def submit(path: Path, target: str) -> str:
    """Hand a file to the scheduler; what it said, with the job's number, or how to do so by hand where it is not.

    Raises:
        InputError: it refuses the file.
    """
    program, *arguments = COMMANDS[target]
    found = shutil.which(program)
    file = str(path) if path.is_absolute() else f"./{path}"  # a name that begins with - is no option
    if found is None:
        command = " ".join([program, *arguments, quote(file)])
        return f"there is no {program} here; where there is one: {command}"
    done = subprocess.run([found, *arguments, file], check=False, capture_output=True, text=True)  # noqa: S603
    said = "; ".join(line for line in (done.stderr + done.stdout).splitlines() if line.strip())
    if done.returncode:
        raise InputError(f"{path}: {program} refuses it: {said or f'exit code {done.returncode}'}")
    return said
