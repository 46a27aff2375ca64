"""A command as a user types it, in a process of its own.

The process is forked from one that has imported what commands import, which takes seconds; it has its own environment,
directory, output and exit code. What a command is before its imports, tests start with `subprocess`.
"""

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

TIMEOUT = 300.0

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        "esmshard.cli",
        "esmshard.infer.embed",
        "esmshard.infer.predict",
        "esmshard.parallel.launch",
        "esmshard.report.html",
        "esmshard.train.evaluate",
        "esmshard.train.finetune",
        "h5py",
        "sklearn.linear_model",
    ]
)


def esmshard(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Exit code (-N for signal N), stdout and stderr of `esmshard ARGUMENTS`.

    `finetune` writes its report only where asked to, since drawing it takes seconds.
    """
    command = ["esmshard", *map(str, arguments)]
    command += ["--no-report"] if arguments[0] == "finetune" and "--report" not in arguments else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = _forks.Process(target=_run, args=(command, str(cwd or Path.cwd()), environment, str(out), str(err)))
        process.start()
        process.join(TIMEOUT)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, TIMEOUT, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(command, process.exitcode, out.read_text(), err.read_text())


def _run(command: list[str], cwd: str, environment: Mapping[str, str], out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    from esmshard.cli import main

    try:
        main()
    finally:
        atexit._run_exitfuncs()  # a forked process leaves without them
