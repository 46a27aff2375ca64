"""Runs of `esmshard embed` that can be killed at any moment, and what they leave behind."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import command
import numpy as np
import pytest
from forks import forks
from model_files import TINY, fair_esm, write_transformers
from safetensors import safe_open

from esmshard.batch import TokenBatch
from esmshard.embed import parts
from esmshard.model.trunk import Trunk
from esmshard.vocab import RESIDUES


def write_model(directory: Path, seed: int = 0) -> Path:
    """A model of two layers with random weights."""
    return write_transformers(directory, fair_esm(TINY, seed), TINY)


def write_fasta(path: Path, records: int, seed: int = 0, longest: int = 200) -> Path:
    """Random sequences; each tenth is that of an earlier record."""
    rng = np.random.default_rng(seed)
    sequences: list[str] = []
    for k in range(records):
        new = "".join(rng.choice(list(RESIDUES), rng.integers(1, longest)))
        sequences.append(sequences[rng.integers(k)] if k % 10 == 9 else new)
    path.write_text("".join(f">r{k:05d} words\n{one}\n" for k, one in enumerate(sequences)))
    return path


def limit_memory(
    model: Trunk, tokens: int, patch: pytest.MonkeyPatch, error: Callable[[], Exception] = MemoryError
) -> list[int]:
    """Let a model have memory for so many tokens; the tokens of its successful passes."""
    passes: list[int] = []
    forward = model.forward

    def limited(batch: TokenBatch, *args: Any, **options: Any) -> Any:
        if batch.bounds[-1] > tokens:
            raise error()
        passes.append(batch.bounds[-1])
        return forward(batch, *args, **options)

    patch.setattr(model, "forward", limited)
    return passes


class Run:
    """`esmshard ARGUMENTS` as a process in a group of its own.

    Args:
        arguments: of the command.
        folder: where stdout and stderr go.
        part_tokens: of a part; there are many parts of little work then.
    """

    def __init__(self, *arguments: str | Path, folder: Path, part_tokens: int) -> None:
        folder.mkdir(exist_ok=True)
        self._files = folder / "stdout", folder / "stderr"
        for file in self._files:
            file.unlink(missing_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        what = ["esmshard", *map(str, arguments)], environment, part_tokens, *map(str, self._files)
        self.process = forks.Process(target=_be, args=what)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def is_over(self) -> bool:
        """Whether the command itself has ended."""
        return self.process.exitcode is not None

    def wait(self, timeout: float = 1200) -> int:
        """Exit code; -9 if it was killed."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.kill("group")
            raise AssertionError(f"still at work after {timeout} s: {self.stderr}")
        return self.process.exitcode

    @property
    def stderr(self) -> str:
        return self._files[1].read_text() if self._files[1].exists() else ""

    def workers(self) -> list[int]:
        """Process ids of `--nproc`."""
        workers = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                arguments = stat.with_name("cmdline").read_bytes()
                if int(fields[1]) == self.pid and b"spawn_main" in arguments:
                    workers.append(int(stat.parent.name))
        return workers

    def kill(self, whom: str, choice: int = 0) -> bool:
        """kill -9 of the `parent`, of a `worker` or of the `group`; False if there is nobody."""
        with contextlib.suppress(ProcessLookupError):
            if whom == "worker":
                workers = self.workers()
                if not workers:
                    return False
                os.kill(workers[choice % len(workers)], signal.SIGKILL)
                return True
            if self.is_over:
                return False
            if whom == "group":
                with contextlib.suppress(ProcessLookupError):  # it is too young to have one
                    os.killpg(self.pid, signal.SIGKILL)
            os.kill(self.pid, signal.SIGKILL)
            self.process.join()
            return self.process.exitcode == -signal.SIGKILL
        return False


def _be(arguments: list[str], environment: Mapping[str, str], part_tokens: int, out: str, err: str) -> None:
    os.setsid()
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    parts._part_tokens = lambda *_: part_tokens
    sys.exit(command._main(arguments, environment))


ORDER = ("start", "planning", "planned", "computing", "computed", "writing", "written", "sealed", "removing", "done")


def stage(out: Path) -> str:
    """How far an output is, seen from outside."""
    work = out.with_name(f"{out.name}.partial")
    if not work.exists():
        removing = work.with_name(f".removed-{work.name}").exists()
        return "removing" if removing else "done" if out.exists() else "start"
    if (work / "manifest.json").exists():
        return "sealed"
    try:
        parts = len(json.loads((work / "plan.json").read_text())["bounds"]) - 1
    except OSError:
        return "planning"
    try:
        done = sum(1 for _ in (work / "parts").glob("[0-9]*.safetensors"))
    except FileNotFoundError:  # it is removed at this moment
        return stage(out)
    if done < parts:
        return "computing" if done else "planned"
    return "writing" if any(out.parent.glob(".tmp-*")) else "written" if out.exists() else "computed"


def until(run: Run, condition: str, out: Path) -> None:
    """Wait for a stage, or a later one, or the end of the run."""
    while not run.is_over and ORDER.index(stage(out)) < ORDER.index(condition):
        time.sleep(0.002)


def content(out: Path) -> dict[str, object]:
    """Everything that an output says, by file; of parts without what differs from run to run."""
    if (out / "manifest.json").exists():
        found: dict[str, object] = {}
        for path in out.rglob("*"):
            if path.suffix == ".safetensors":
                with safe_open(path, "np") as file:
                    note = json.loads(file.metadata()["note"])
                    found[path.name] = note, {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
            elif path.is_file():
                found[str(path.relative_to(out))] = path.read_bytes()
        return found
    files = [path for path in out.parent.rglob("*") if path.is_file()]
    return {str(path.relative_to(out.parent)): path.read_bytes() for path in files}
