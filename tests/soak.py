"""A soak test: runs that are killed again and again at random moments end like an unbroken run.

    python tests/soak.py --kills 200 --seed 0

The runs train a nano model in one process, in two, or in one and two by turns, with checkpoints in the foreground or
background. Most attempts end by SIGKILL of one or all processes, some by SIGTERM. The next attempt continues with
`resume="auto"`. Losses and model equal those of an unbroken run: bit by bit, or to 1e-4 if the number of processes
changed. The test takes minutes, so pytest does not collect this file.
"""

import argparse
import contextlib
import importlib
import json
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

STEPS, KEEP, CRASHED = 40, 2, 99
PATIENCE = 120
"""The number of seconds in which processes must end by themselves."""
KINDS = [((1,), False), ((2,), False), ((1,), True), ((2,), True), ((1, 2), False), ((2, 1), True)]
"""The numbers of processes of successive attempts, and whether checkpoints are written in the background."""


def start(recipe: Path, out: Path, processes: int, background: bool, log: Path) -> list[int]:
    """Fork the processes of an attempt, and return their ids."""
    port, children = free_port(), []
    for rank in range(processes):
        if child := os.fork():
            children.append(child)
            continue
        code = CRASHED
        try:
            handle = os.open(log.with_name(f"{log.name}-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            if processes > 1:
                names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
                values = (rank, rank, processes, processes, "127.0.0.1", port)
                os.environ |= {name: str(value) for name, value in zip(names, values, strict=True)}
            overrides = [f"out={out}", f"checkpoint.async_save={json.dumps(background)}"]
            finetune.run(recipe_file.load(recipe, overrides), resume="auto")
            code = 0
        except (Preempted, InputError) as stop:
            print(stop, file=sys.stderr)
            code = stop.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(code)
    return children


def wait(children: Sequence[int], codes: dict[int, int], until: Callable[[], bool]) -> None:
    """Collect exit codes until all processes have ended or `until` holds."""
    while len(codes) < len(children) and not until():
        for child in set(children) - codes.keys():
            ended, state = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(state)
        time.sleep(0.005)


def after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def moment(out: Path, dice: random.Random) -> Callable[[], bool]:
    """Choose when to stop an attempt, mostly after a few steps, so that each attempt comes further than the last."""
    saved = manifest.complete(out / "checkpoints")
    done = (manifest.step_of(saved[-1]) or 0) if saved else 0
    if done == STEPS and dice.random() < 0.4:
        return after(PATIENCE)  # the run may end
    if done == STEPS or dice.random() < 0.15:
        return after(dice.uniform(0, 4))
    step, begin = min(done + dice.randint(1, 8), STEPS), time.time()
    return lambda: any(line.get("step", 0) >= step and line["time"] > begin for line in metrics_of(out) if "lr" in line)


def results(out: Path) -> dict[str, Any]:
    """Check the files of a finished run, and return its losses and model."""
    lines = list(metrics_of(out))
    steps = [line for line in lines if "loss" in line and "split" not in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1)), "each step has one line"
    assert (status := read_status(out)), "there is a status"
    assert (status["state"], status["step"], status["exit_code"]) == ("done", STEPS, 0), f"status {status}"
    names = [path.name for path in [*out.iterdir(), *(out / "checkpoints").iterdir()]]
    assert not [name for name in names if name.startswith(".") or name == LOCK], names
    checkpoints = manifest.named(out / "checkpoints")
    assert len(checkpoints) == KEEP, checkpoints
    assert checkpoints[-1].name == f"step_{STEPS:06d}", checkpoints
    for path in checkpoints:
        manifest.verify(path)
    losses = [line["loss"] for line in lines if "loss" in line]
    return {"losses": torch.tensor(losses), "model": (out / "model" / "model.safetensors").read_bytes()}


def broken_run(recipe: Path, out: Path, kind: int, dice: random.Random, kills: Counter[str], most: int) -> None:
    """Stop a run again and again until it is done, or until there were `most` kills."""
    sizes, background = KINDS[kind]
    for attempt in range(1000):
        processes, codes = sizes[attempt % len(sizes)], dict[int, int]()
        is_calm = kills.total() >= most
        until = after(PATIENCE) if is_calm else moment(out, dice)
        children = start(recipe, out, processes, background, out.with_name(f"{out.name}-{attempt}"))
        wait(children, codes, until)
        if len(codes) == processes and set(codes.values()) == {0}:
            return
        running = [child for child in children if child not in codes]
        assert running, f"attempt {attempt} ended by itself with {sorted(codes.values())}"
        ask = dice.random() < 0.15
        number = signal.SIGTERM if ask else signal.SIGKILL
        first = running if dice.random() < 0.5 else [dice.choice(running)]
        for child in first:
            os.kill(child, number)
        wait(children, codes, after(PATIENCE if ask or dice.random() < 0.2 else dice.uniform(0, 0.3)))
        stuck = [child for child in children if child not in codes]
        for child in stuck:  # as a launcher does
            os.kill(child, signal.SIGKILL)
        wait(children, codes, after(PATIENCE))
        assert not is_calm, f"attempt {attempt} does not end"
        assert not (ask and stuck), f"{len(stuck)} of {processes} did not leave within {PATIENCE} s of SIGTERM"
        kills[number.name] += 1
        # All processes save if one is asked to stop. A process that loses another one ends with LOST.
        allowed = {0, -signal.SIGKILL} | ({Preempted.exit_code, -signal.SIGTERM} if ask else set())
        allowed |= {ExitCode.LOST} if len(first) < processes or not ask else set()
        assert set(codes.values()) <= allowed, f"attempt {attempt}: {sorted(codes.values())} after {number.name}"
        if set(codes.values()) == {0}:
            return


def soak(kills: int, seed: int, directory: Path) -> int:
    """Start runs until `kills` attempts were stopped, and return the number of failed runs."""
    for name, chains in (("train", range(24)), ("valid", range(5))):
        write_subset(directory, name, name, chains)
    recipe = directory / "nano.yaml"
    text = RECIPE.format(tokens_per_rank=130, out=directory / "run")
    recipe.write_text(text.replace("steps: 6", f"steps: {STEPS}").replace("eval_every: 3", "eval_every: 13"))
    unbroken, dice, stops, failures, n = {}, random.Random(seed), Counter[str](), 0, 0
    for processes in (1, 2):
        out, codes = directory / f"unbroken-{processes}", dict[int, int]()
        wait(start(recipe, out, processes, False, directory / f"log-{processes}"), codes, after(PATIENCE))
        assert set(codes.values()) == {0}, f"an unbroken run fails: {codes}, see {directory}"
        unbroken[processes] = results(out)
    while stops.total() < kills:
        out, sizes = directory / f"run-{n}", KINDS[n % len(KINDS)][0]
        verdict = "as the unbroken run"
        try:
            broken_run(recipe, out, n % len(KINDS), dice, stops, kills)
            mine, whole, exact = results(out), unbroken[sizes[0]], len(sizes) == 1
            torch.testing.assert_close(mine["losses"], whole["losses"], rtol=0, atol=0 if exact else 1e-4)
            assert not exact or mine["model"] == whole["model"], "the model differs"
            shutil.rmtree(out)
        except AssertionError as error:
            verdict, failures = f"FAILED: {error} (see {out})", failures + 1
        n += 1
        print(f"run {n}, {KINDS[(n - 1) % len(KINDS)]}: {verdict}; {dict(stops)} of {kills} stops", flush=True)
    return failures


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
    if failures := soak(arguments.kills, arguments.seed, directory):
        raise SystemExit(f"{failures} runs failed, see {directory}")
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
