"""A command as a user types it: `in_process` runs it in the process of the tests, `esmshard` in a forked process.

The process is forked from a server that has imported what commands import, which takes seconds, and so are the ranks
and workers that it starts. Each has its own environment, directory, output and exit code. Tests of imports and of
signals use `subprocess`.
"""

import atexit
import contextlib
import importlib
import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from forks import IMPORTED, forks

from esmshard.cli import app
from esmshard.parallel.launch import LAUNCHER


def in_process(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Exit code, stdout and stderr of `esmshard ARGUMENTS`, in this process and without ranks."""
    more = ["--no-report"] if arguments[0] == "finetune" and "--report" not in arguments else []
    command, err = [*map(str, arguments), *more], io.StringIO()
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", "surrogateescape", newline="", write_through=True)
    argv, environment, code = sys.argv, {**os.environ}, 0
    try:
        with contextlib.chdir(cwd or Path.cwd()), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            sys.argv = ["esmshard", *command]
            app.main()
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)
    out.seek(0)
    return subprocess.CompletedProcess(command, code, out.read(), err.getvalue())


def esmshard(
    *arguments: str | Path, cwd: Path | None = None, timeout: float = 1200.0
) -> subprocess.CompletedProcess[str]:
    """Exit code (-N for signal N), stdout and stderr of `esmshard ARGUMENTS`.

    `finetune` writes its report only where asked to, since drawing it takes seconds.
    """
    more = ["--no-report"] if arguments[0] == "finetune" and "--report" not in arguments else []
    return python("-m", "esmshard", *arguments, *more, cwd=cwd, timeout=timeout)


def python(
    *arguments: str | Path, cwd: Path | None = None, timeout: float = 1200.0
) -> subprocess.CompletedProcess[str]:
    """The same of `python -m MODULE ...` and `python FILE ...`."""
    command = [*map(str, arguments)]
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
    from esmshard.parallel import launch

    subprocess.Popen = launch.Popen = Forked  # type: ignore[assignment,misc]
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    sys.exit(_main(command, environment))


def _main(command: list[str], environment: Mapping[str, str]) -> int:
    """Be `python COMMAND`; the exit code."""
    os.environ.clear()
    os.environ.update(environment)
    atexit._clear()
    code: Any = 0
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            with warnings.catch_warnings():
                # It is executed anew, whoever has imported it.
                warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as left:
        code = left.code
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
            code = 1
    finally:
        atexit._run_exitfuncs()  # a forked process leaves without them
        sys.stdout.flush()
        sys.stderr.flush()
    return code or 0


class Rank:
    """A rank for a launcher in the process of the tests, which cannot fork: it has computed, and has threads.

    As much of `subprocess.Popen` as `launch` asks for. Where it writes, no test can see.
    """

    def __init__(self, args: Sequence[str], env: Mapping[str, str], *, start_new_session: bool) -> None:
        assert start_new_session
        self.args = args
        self._process = forks.Process(target=_be_rank, args=([*args[1:]], {**env}, str(Path.cwd())))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # its number may be another's by now
            assert self.pid is not None
            os.kill(self.pid, number)


def _be_rank(command: list[str], environment: Mapping[str, str], cwd: str) -> NoReturn:
    # A rank leaves when its parent does: here the server that forks.
    _be(command, {**environment, LAUNCHER: str(os.getppid())}, cwd, [-1] * 6, True)


class Forked(subprocess.Popen[Any]):
    """A process that is forked where `subprocess.Popen` would start `python -m esmshard...` or `python FILE ...`."""

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        _, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *pipes = rest[:15]
        interpreter, *command = [args] if shell or isinstance(args, str | os.PathLike) else args
        command = command[command[:1] == ["-u"] :]
        is_file, is_module = command[:1] and command[0].endswith(".py"), command[:1] == ["-m"]
        is_ours = is_file or (is_module and command[1].startswith("esmshard"))
        if interpreter != sys.executable or not is_ours or preexec_fn or pass_fds:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        *_, start_new_session, _ = rest
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _be(command, os.environ.copy() if env is None else env, cwd, pipes, start_new_session)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _be(
    command: list[str], environment: Mapping[str, str], cwd: str | None, pipes: list[int], start_new_session: bool
) -> NoReturn:
    """Be a forked process with these ends of pipes, of which -1 is none: (child's, parent's) stdin, and so on."""
    code = 1
    try:
        if start_new_session:
            os.setsid()
        to_read, _, _, out, _, err = pipes
        for number, pipe in enumerate((to_read, out, err)):
            if pipe != -1:
                os.dup2(pipe, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # such as the launcher's store, which would outlive the launcher
        sys.stdin = os.fdopen(0, closefd=False)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)) and number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)  # the parent's; a process that is started has none
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if cwd is not None:
            os.chdir(cwd)
        code = _main(command, environment)
    except BaseException:
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":  # `python command.py -m torch.distributed.run ...` forks its ranks
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    for module in IMPORTED:
        importlib.import_module(module)
    subprocess_handler.Popen = Forked  # type: ignore[assignment,misc]
    os._exit(_main(sys.argv[1:], {**os.environ}))  # all has been done that is done at the end
