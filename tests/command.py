"""A command as a user types it, in a process of its own.

The process is forked from one that has imported what commands import, which takes seconds, and `--nproc N` forks its
ranks likewise. Each has its own environment, directory, output and exit code. What a command is before its imports, and
how it answers signals, tests see with `subprocess`.
"""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from forks import forks


def esmshard(
    *arguments: str | Path, cwd: Path | None = None, timeout: float = 1200.0
) -> subprocess.CompletedProcess[str]:
    """Exit code (-N for signal N), stdout and stderr of `esmshard ARGUMENTS`.

    `finetune` writes its report only where asked to, since drawing it takes seconds.
    """
    command = ["esmshard", *map(str, arguments)]
    command += ["--no-report"] if arguments[0] == "finetune" and "--report" not in arguments else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = forks.Process(target=_run, args=(command, str(cwd or Path.cwd()), environment, str(out), str(err)))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(command, process.exitcode, out.read_text(), err.read_text())


def _run(command: list[str], cwd: str, environment: Mapping[str, str], out: str, err: str) -> None:
    from esmshard.launch import local_processes

    local_processes.Popen = _Rank  # type: ignore[assignment,misc]
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    sys.exit(_main(command, environment))


def _main(command: list[str], environment: Mapping[str, str]) -> int:
    from esmshard.cli.app import main

    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    atexit._clear()
    code = 0
    try:
        main()
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        atexit._run_exitfuncs()  # a forked process leaves without them
        sys.stdout.flush()
        sys.stderr.flush()
    return code


class _Rank:
    """A rank that the launcher forks in place of starting it: as much of `subprocess.Popen` as the launcher asks for."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], *, start_new_session: bool) -> None:
        assert start_new_session, "a forked rank gets a session of its own"
        self.args = args
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            self._be(["esmshard", *args[args.index("esmshard") + 1 :]], env)

    def _be(self, command: list[str], environment: Mapping[str, str]) -> NoReturn:
        os.setsid()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # such as the launcher's store, which would outlive the launcher
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)) and number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)  # the launcher's; a process that is started has none
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = 1
        try:
            code = _main(command, environment)
        except BaseException:
            traceback.print_exc()
        os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # its number may be another's by now
            os.kill(self.pid, number)
