"""Writing a job's file, and handing it to the scheduler where there is one."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from esmshard.errors import InputError, UsageError

COMMANDS = {"slurm": ("sbatch",), "kubernetes": ("kubectl", "apply", "-f")}
"""The command of each target. The file is its last argument."""


def write(text: str, path: Path, overwrite: bool, reads: Sequence[str]) -> None:
    """Write the file. An existing file with the same text stays; any other existing file is refused.

    Args:
        text: the text of the file.
        path: the path of the file.
        overwrite: whether another file may be replaced.
        reads: the paths that the job reads, its recipe included. These are never replaced.

    Raises:
        UsageError: if another file exists there, or the job reads it.
        InputError: if the file cannot be written.
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
    """Submit a file. Return the scheduler's answer with the job's number, or the command to type if there is no
    scheduler.

    Raises:
        InputError: if the scheduler refuses the file.
    """
    program, *arguments = COMMANDS[target]
    found = shutil.which(program)
    file = str(path) if path.is_absolute() else f"./{path}"  # a name that begins with - would be an option
    if found is None:
        command = " ".join([program, *arguments, quote(file)])
        return f"there is no {program} here; where there is one: {command}"
    done = subprocess.run([found, *arguments, file], check=False, capture_output=True, text=True)  # noqa: S603
    said = "; ".join(line for line in (done.stderr + done.stdout).splitlines() if line.strip())
    if done.returncode:
        raise InputError(f"{path}: {program} refuses it: {said or f'exit code {done.returncode}'}")
    return said
