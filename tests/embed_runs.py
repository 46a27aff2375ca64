"""Runs of `esmshard embed` that can be killed at any moment, and the content of outputs."""

import contextlib
import json
import multiprocessing
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
from esmshard.embed import engines, parts
from esmshard.embed.spec import request
from esmshard.model.trunk import Trunk
from esmshard.vocab import RESIDUES


def write_model(directory: Path, seed: int = 0) -> Path:
    return write_transformers(directory, fair_esm(TINY, seed), TINY)


def write_fasta(path: Path, records: int, seed: int = 0, longest: int = 200) -> Path:
    """Write random sequences. Each tenth record repeats an earlier sequence."""
    rng = np.random.default_rng(seed)
    sequences: list[str] = []
    for k in range(records):
        new = "".join(rng.choice(list(RESIDUES), rng.integers(1, longest)))
        sequences.append(sequences[rng.integers(k)] if k % 10 == 9 else new)
    path.write_text("".join(f">r{k:05d} words\n{text}\n" for k, text in enumerate(sequences)))
    return path


def embed(model: Path | str, out: Path, fasta: Path, **options: Any) -> dict[str, Any]:
    """Run `embed`. The options are those of `request` and of `engines.embed`."""
    names = ("fmt", "pools", "layers", "heads", "dtype", "precision", "long", "tracks", "join")
    asked = request(str(model), out, **{name: options.pop(name) for name in names if name in options})
    manifest = engines.embed(asked, fasta, **options)
    assert manifest is not None
    return manifest


def limit_memory(
    model: Trunk, tokens: int, patch: pytest.MonkeyPatch, error: Callable[[], Exception] = MemoryError
) -> list[int]:
    """Let a model fail for more tokens. Return a list to which each successful pass adds its number of tokens."""
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
    """`esmshard ARGUMENTS` as a process with its own group. `folder` gets stdout and stderr."""

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
        return self.process.exitcode is not None

    def wait(self, timeout: float = 1200) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.kill("group")
            raise AssertionError(f"still at work after {timeout} s: {self.stderr}")
        return self.process.exitcode

    @property
    def stderr(self) -> str:
        return self._files[1].read_text() if self._files[1].exists() else ""

    def workers(self) -> list[int]:
        """Return the ids of the processes that `--nproc` starts."""
        workers = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                arguments = stat.with_name("cmdline").read_bytes()
                if int(fields[1]) == self.pid and b"resource_tracker" not in arguments:
                    workers.append(int(stat.parent.name))
        return workers

    def kill(self, target: str, choice: int = 0) -> bool:
        """Kill the `parent`, a `worker` or the `group` with signal 9. Return False if it does not exist."""
        with contextlib.suppress(ProcessLookupError):
            if target == "worker" and (workers := self.workers()):
                os.kill(workers[choice % len(workers)], signal.SIGKILL)
                return True
            if target == "worker" or self.is_over:
                return False
            if target == "group":
                with contextlib.suppress(ProcessLookupError):  # it has no group yet
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
    fork = multiprocessing.get_context("fork")  # A spawned worker would import torch, which takes seconds.
    engines.multiprocessing.get_context = lambda _: fork  # type: ignore[assignment,return-value]
    sys.exit(command._main(arguments, environment))


ORDER = ("start", "planning", "planned", "computing", "computed", "writing", "written", "sealed", "removing", "done")


def stage(out: Path) -> str:
    """Return the stage of an output, from its files."""
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
    except FileNotFoundError:  # was removed at this moment
        return stage(out)
    if done < parts:
        return "computing" if done else "planned"
    return "writing" if any(out.parent.glob(".tmp-*")) else "written" if out.exists() else "computed"


def until(run: Run, condition: str, out: Path) -> None:
    """Wait for a stage, a later stage, or the end of the run."""
    while not run.is_over and ORDER.index(stage(out)) < ORDER.index(condition):
        time.sleep(0.002)


def content(out: Path) -> dict[str, object]:
    """Return the bytes of an output by file; for parts, only the note and the tensors."""
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
