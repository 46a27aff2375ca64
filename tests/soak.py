"""A soak test: runs that are killed again and again, at random moments, and come to the same end as one that was not.

    python tests/soak.py --kills 200 --seed 0

Real runs of a nano model: in one process, in two, changing between both from attempt to attempt; with checkpoints
written at once or in the background. Most attempts end by SIGKILL to one or all processes, some by SIGTERM. Each next
one goes on with `resume="auto"`; when a run is through, its losses and its model are compared with those of an unbroken
run: bit by bit, or to 1e-4 where the number of processes changed. pytest does not collect it: it takes minutes.

What runs import is imported once; the processes of a run are forked from there.
"""

import argparse
import contextlib
import hashlib
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "distributed"))
from conftest import RECIPE, write_subset
from forks import IMPORTED
from ranks import free_port

from esmshard.checkpoint import manifest
from esmshard.errors import ExitCode, InputError
from esmshard.parallel.preemption import Preempted
from esmshard.recipe import recipe_file
from esmshard.train import finetune
from esmshard.train.run_dir import LOCK, metrics_of, read_status

STEPS, KEEP = 40, 2  # the recipe keeps so many checkpoints
LEFT, LOST, CRASHED = Preempted.exit_code, ExitCode.LOST, 99
KILLED, ASKED = -signal.SIGKILL, -signal.SIGTERM
PATIENCE = 120
"""Seconds in which processes have to end by themselves."""

KINDS: dict[str, tuple[Sequence[int], bool]] = {
    "1 process": ((1,), False),
    "2 processes": ((2,), False),
    "1 process, background": ((1,), True),
    "2 processes, background": ((2,), True),
    "1 and 2 in turn": ((1, 2), False),
    "2 and 1 in turn, background": ((2, 1), True),
}
"""Numbers of processes that an attempt after the other has, and whether checkpoints are written in the background."""


@dataclass
class Tally:
    """What happened."""

    kills: Counter[str] = field(default_factory=Counter)
    """By signal."""
    runs: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    """Steps lost at each start after a kill."""
    failures: list[str] = field(default_factory=list)

    @property
    def killed(self) -> int:
        return sum(self.kills.values())


def start(recipe: Path, out: Path, processes: int, background: bool, log: Path) -> list[int]:
    """Fork the processes of an attempt; their ids."""
    port, children = free_port(), []
    for rank in range(processes):
        if child := os.fork():
            children.append(child)
            continue
        code = CRASHED
        try:
            _redirect(log.with_name(f"{log.name}-{rank}"))
            if processes > 1:
                names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
                values = (rank, rank, processes, processes, "127.0.0.1", port)
                os.environ |= {name: str(value) for name, value in zip(names, values, strict=True)}
            code = _run(recipe, out, background)
        finally:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(code)
    return children


def _run(recipe: Path, out: Path, background: bool) -> int:
    """The main job as the command runs it."""
    overrides = [f"out={out}", f"checkpoint.async_save={str(background).lower()}"]
    try:
        finetune.run(recipe_file.load(recipe, overrides), resume="auto")
    except Preempted as stop:
        print(stop, file=sys.stderr)
        return stop.exit_code
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BaseException:
        traceback.print_exc()
        return CRASHED
    return 0


def _redirect(log: Path) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def wait(children: Sequence[int], codes: dict[int, int], until: Callable[[], bool]) -> None:
    """Collect exit codes until all have ended or something holds."""
    while len(codes) < len(children) and not until():
        for child in set(children) - codes.keys():
            found, state = os.waitpid(child, os.WNOHANG)
            if found:
                codes[child] = os.waitstatus_to_exitcode(state)
        time.sleep(0.005)


def after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def reached(out: Path, begin: float, step: int, delay: float) -> Callable[[], bool]:
    """Whether the attempt that was started at `begin` took a step, some seconds ago."""
    end: float | None = None

    def now() -> bool:
        nonlocal end
        if end is None and max((line["step"] for line in own(out, begin) if "loss" in line), default=0) >= step:
            end = time.monotonic() + delay
        return end is not None and time.monotonic() >= end

    return now


def moment(out: Path, begin: float, dice: random.Random) -> Callable[[], bool]:
    """When an attempt is to be stopped: mostly after a few steps, so that each goes a bit further than the last."""
    saved = manifest.complete(out / "checkpoints")
    done = (manifest.step_of(saved[-1]) or 0) if saved else 0
    if done == STEPS and dice.random() < 0.4:
        return after(PATIENCE)  # or it would never come to its end where that takes long
    if done == STEPS or dice.random() < 0.15:
        return after(dice.uniform(0, 4))
    step = done + dice.randint(1, 8)
    return reached(out, begin, min(step, STEPS), dice.uniform(0, 0.3 if step <= STEPS else 4))


def own(out: Path, begin: float) -> list[dict[str, Any]]:
    """Lines of the attempt that was started at `begin`."""
    lines = metrics(out)
    first = [n for n, line in enumerate(lines) if line.get("event") == "attempt" and line["started"] >= begin]
    return lines[first[0] :] if first else []


def metrics(out: Path) -> list[dict[str, Any]]:
    return list(metrics_of(out))


def results(out: Path) -> dict[str, Any]:
    """What a finished run came to. Raises `AssertionError` where it is not what a finished run leaves."""
    lines = metrics(out)
    steps = [line for line in lines if "loss" in line and "split" not in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1)), "each step has one line"
    assert (found := read_status(out)), "there is a status"
    assert (found["state"], found["step"], found["exit_code"]) == ("done", STEPS, 0), f"status {found}"
    files = [path.name for path in [*out.iterdir(), *(out / "checkpoints").iterdir()]]
    left = [name for name in files if name.startswith(".") or name == LOCK]
    assert not left, f"left behind: {left}"
    names = [path.name for path in manifest.named(out / "checkpoints")]
    assert len(names) == KEEP, names  # the one before the last may be of any step: SIGTERM saves
    assert names[-1] == f"step_{STEPS:06d}", names
    for path in manifest.named(out / "checkpoints"):
        manifest.verify(path)
    return {
        "losses": [line["loss"] for line in steps],
        "valid": [line["loss"] for line in lines if line.get("split") == "valid"],
        "model": hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest(),
    }


def differs(found: dict[str, Any], unbroken: dict[str, Any], exact: bool) -> str:
    """How a run differs from the unbroken one; nothing if it is as it should be."""
    for name in ("losses", "valid"):
        a, b = found[name], unbroken[name]
        if len(a) != len(b):
            return f"{len(a)} {name} instead of {len(b)}"
        worst = max(abs(x - y) for x, y in zip(a, b, strict=True))
        if worst > (0 if exact else 1e-4):
            return f"{name} differ by up to {worst:.3g}"
    return "the model differs" if exact and found["model"] != unbroken["model"] else ""


def broken_run(recipe: Path, out: Path, kind: str, dice: random.Random, tally: Tally, most: int) -> None:
    """One run, stopped again and again until it is through, or `most` kills are done."""
    sizes, background = KINDS[kind]
    attempt = 0
    while True:
        processes = sizes[attempt % len(sizes)]
        begin = time.time()
        children = start(recipe, out, processes, background, out.with_name(f"{out.name}-{attempt}"))
        attempt += 1
        codes: dict[int, int] = {}
        calm = tally.killed >= most  # let it come to its end
        wait(children, codes, after(PATIENCE) if calm else moment(out, begin, dice))
        if len(codes) == processes and set(codes.values()) == {0}:
            return
        running = [child for child in children if child not in codes]
        if calm or not running:  # nobody stopped it, or it failed before anybody did
            for child in running:
                os.kill(child, signal.SIGKILL)
            wait(children, codes, after(PATIENCE))
            raise AssertionError(f"attempt {attempt} ended by itself with {sorted(codes.values())}")
        ask = dice.random() < 0.15
        number = signal.SIGTERM if ask else signal.SIGKILL
        first = running if dice.random() < 0.5 else [dice.choice(running)]
        for child in first:
            os.kill(child, number)
        wait(children, codes, after(PATIENCE if ask or dice.random() < 0.2 else dice.uniform(0, 0.3)))
        stuck = [child for child in children if child not in codes]
        if ask and stuck:
            tally.failures.append(f"{kind}: {len(stuck)} of {processes} did not leave within {PATIENCE} s of SIGTERM")
        for child in stuck:  # as a launcher does, or a machine that is lost
            os.kill(child, signal.SIGKILL)
        wait(children, codes, after(PATIENCE))
        tally.kills[number.name] += 1
        # Who loses another one ends with one sentence. Who is asked to stop saves, and all with it; but one that alone
        # is asked before the first step leaves alone.
        allowed = {0, LEFT, ASKED, KILLED} if ask else {0, KILLED}
        allowed |= {LOST} if len(first) < processes or not ask else set()
        if set(codes.values()) - allowed:
            raise AssertionError(f"attempt {attempt}: exit codes {sorted(codes.values())} after {number.name}")
        if set(codes.values()) == {0}:
            return


def soak(kills: int, seed: int, directory: Path) -> Tally:
    """Runs until so many kills are done, and no run is left unfinished."""
    for name, chains in (("train", range(24)), ("valid", range(5))):
        write_subset(directory, name, name, chains)
    recipe = directory / "nano.yaml"
    text = RECIPE.format(tokens_per_rank=130, out=directory / "run")
    recipe.write_text(text.replace("steps: 6", f"steps: {STEPS}").replace("eval_every: 3", "eval_every: 13"))

    unbroken = {}
    for processes in (1, 2):
        out, codes = directory / f"unbroken-{processes}", dict[int, int]()
        children = start(recipe, out, processes, False, directory / f"unbroken-{processes}-log")
        wait(children, codes, after(PATIENCE))
        assert set(codes.values()) == {0}, f"an unbroken run fails: {codes}, see {directory}"
        unbroken[processes] = results(out)

    dice, tally, n = random.Random(seed), Tally(), 0
    while tally.killed < kills:
        kind = list(KINDS)[n % len(KINDS)]
        out = directory / f"run-{n}"
        sizes, before = KINDS[kind][0], tally.killed
        try:
            broken_run(recipe, out, kind, dice, tally, kills)
            difference = differs(results(out), unbroken[sizes[0]], exact=len(sizes) == 1)
            assert not difference, difference
            lost = [line["steps_lost"] for line in metrics(out) if line.get("event") == "attempt"]
            tally.lost += lost[1:]
            tally.runs[kind] += 1
            shutil.rmtree(out)
            for log in directory.glob(f"{out.name}-*"):
                log.unlink()
            verdict = "as the unbroken one"
        except AssertionError as error:
            verdict = f"FAILED: {error} (see {out})"
            tally.failures.append(f"{kind}: {verdict}")
        n += 1
        print(f"run {n}, {kind}: {tally.killed - before} kills, {verdict}; {tally.killed} of {kills}", flush=True)
    return tally


def summary(tally: Tally) -> str:
    lost = tally.lost or [0]
    kills, runs = (
        ", ".join(f"{count} x {name}" for name, count in sorted(c.items())) for c in (tally.kills, tally.runs)
    )
    lines = [f"stopped: {kills}", f"runs that came to the end of the unbroken one: {sum(tally.runs.values())} ({runs})"]
    lines.append(f"steps lost at a start: mean {sum(lost) / len(lost):.2f}, most {max(lost)}")
    return "\n".join([*lines, f"failures: {len(tally.failures)}", *tally.failures])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for module in IMPORTED:
        importlib.import_module(module)
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    os.environ["ESMSHARD_CACHE"] = str(directory / "cache")
    begin = time.monotonic()
    tally = soak(arguments.kills, arguments.seed, directory)
    print(f"{summary(tally)}\n{time.monotonic() - begin:.0f} s, seed {arguments.seed}")
    if tally.failures:
        raise SystemExit(f"what failed lies in {directory}")
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
