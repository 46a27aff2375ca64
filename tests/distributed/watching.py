"""What ranks do in the tests of watching: steps of a toy model in which one of them is slow, stuck, killed or wrong.

    python watching.py FOLDER [JOB...]

runs all jobs or some: first those that measure time, then the others side by side. Ranks are forked, so that torch is
imported once; each writes FOLDER/JOB-RANK.json.
"""

import atexit
import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from ranks import free_port
from torch import nn

from esmshard.errors import InputError
from esmshard.monitor import stuck_ranks
from esmshard.monitor.profiler import Profile
from esmshard.monitor.stuck_ranks import Control, recorder_settings
from esmshard.monitor.watch import Numbers, Watch
from esmshard.parallel.layout import Layout
from esmshard.parallel.process_group import World, world
from esmshard.parallel.shard import shard

WIDTH = 64
LAYOUTS = {
    "full_shard": Layout(strategy="full_shard", world_size=4, group=4),
    "hybrid_shard": Layout(strategy="hybrid_shard", world_size=4, group=2),
    "no_shard": Layout(strategy="no_shard", world_size=4, group=1),
}


class Block(nn.Module):
    """A layer that calls `before` ahead of its forward and `before_backward` ahead of its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.before: Callable[[], None] = lambda: None
        self.before_backward: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        y = self.linear(x).relu()
        if y.requires_grad:
            y.register_hook(lambda _: self.before_backward())
        return y


class Toy(nn.Module):
    """Two layers, and a matrix in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().sum()


def build(ranks: World, layout: Layout) -> Toy:
    torch.manual_seed(0)
    model = Toy()
    shard(model, layout, ranks)
    return model


def one_step(model: Toy, ranks: World, watch: Watch, seed: int = 0) -> list[list[float]]:
    """Two micro-batches, other ones on each rank, and the collective in which the ranks' numbers travel."""
    batches = (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed + 7 * ranks.rank)) for _ in range(2))
    for batch in watch.data(batches):
        model(batch).backward()
    return ranks.rows(watch.numbers())


def gradients(model: Toy) -> list[list[float]]:
    found = [p.grad.to_local().flatten().tolist() for p in model.parameters()]
    model.zero_grad()
    return found


def measured(ranks: World, folder: Path) -> dict[str, Any]:
    """By layout: gradients with and without the clock, and the numbers of all ranks where one sleeps.

    In both micro-batches rank 1 sleeps 0.2 s before its forward pass, rank 2 0.3 s in its backward one. On a busy
    machine a rank may come late to a collective, and waits less than these sleeps take: then all sleep longer.
    """
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        model = build(ranks, layout)
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(ranks.rank))
        model(batch).backward()
        plain = gradients(model)
        with Control(ranks, start_timeout=600, step_timeout=600, dumps=folder) as control:
            watch = Watch(model, ranks, control, peak=1e6)
            watch.begin_step(1, residues=0, flops=0)
            model(batch).backward()
            same = gradients(model) == plain
            watch.begin_step(1, residues=100 * (ranks.rank + 1), flops=2e5)
            quiet = one_step(model, ranks, watch)
            watch.report(quiet)
            for factor in (1, 4, 16, 64):
                slow = one_slow_step(model, ranks, watch, factor)
                if all(Numbers(*row).communication_s > w * factor for row, w in zip(slow, LEAST_WAITS, strict=True)):
                    break
        found[name] = {"same": same, "quiet": quiet, "slow": slow, "factor": factor, "moved": any(map(any, plain))}
    return found


LEAST_WAITS = [0.5, 0.3, 0.2, 0.5]
"""Half of the seconds for which each of four ranks waits for rank 1 and rank 2, if it comes in time itself."""


def one_slow_step(model: Toy, ranks: World, watch: Watch, factor: int) -> list[list[float]]:
    block = model.layers[0]
    if ranks.rank == 1:
        block.before = lambda: time.sleep(0.2 * factor)
    if ranks.rank == 2:
        block.before_backward = lambda: time.sleep(0.3 * factor)
    watch.begin_step(2, residues=100 * (ranks.rank + 1), flops=2e5)
    rows = one_step(model, ranks, watch)
    watch.report(rows)
    block.before = block.before_backward = lambda: None
    model.zero_grad()
    return rows


def profiled(ranks: World, folder: Path) -> dict[str, Any]:
    """Three steps with a loader that takes 0.1 s a batch."""
    model = build(ranks, Layout(strategy="full_shard", world_size=2, group=2))

    def slow_loader() -> Iterator[torch.Tensor]:
        for _ in range(2):
            time.sleep(0.1)
            yield torch.randn(8, WIDTH)

    tables = []
    with Control(ranks, start_timeout=600, step_timeout=600, dumps=folder) as control:
        watch = Watch(model, ranks, control)
        with Profile(ranks, 3, 10, folder / "profile") as profile:
            for step in range(1, 8):
                watch.begin_step(step, 10, 0)
                for batch in watch.data(slow_loader()):
                    model(batch).backward()
                watch.report(ranks.rows(watch.numbers()))
                tables.append(profile.step_done())
    return {"tables": tables}


How = Callable[[Control], None]
"""What a victim does."""


def stopped(ranks: World, folder: Path, victim: int, how: How, where: str, layout: Layout) -> dict[str, Any]:
    """Steps until the victim does something in the third; what each rank then says, and how long after it began."""
    began = time.monotonic()
    try:
        with Control(ranks, start_timeout=600, step_timeout=600, dumps=folder / "flight_recorder") as control:
            model = build(ranks, layout)
            watch = Watch(model, ranks, control)
            meet = partial(come_to, control, ranks, victim, how)
            for step in range(1, 6):
                if step == 3 and victim < ranks.size:
                    began = time.monotonic()
                    if where == "outside":
                        meet()
                    elif where == "forward":
                        model.layers[0].before = meet
                    elif where == "loader":
                        watch.data = partial(after, meet, watch.data)
                    else:
                        model.layers[1].before_backward = meet
                watch.begin_step(step, 10, 0)
                watch.report(one_step(model, ranks, watch))
    except InputError as error:
        return said(error, began)
    return {"says": "", "shared": False, "after": time.monotonic() - began}


def said(error: InputError, began: float) -> dict[str, Any]:
    after = time.monotonic() - began
    return {"says": str(error), "shared": error.shared, "code": error.exit_code, "after": after}


def come_to(control: Control, ranks: World, victim: int, how: How) -> None:
    """The victim does something; the others wait until it is there and is known to be there.

    From then on a step may take 2 s where the victim holds it up, and minutes where its end is noticed at once.
    """
    store = control._store
    if ranks.rank == victim:
        wait_until(lambda: control._noted(victim) == control._doing)
        store.set("there", "")
        how(control)
    else:
        wait_until(lambda: store.check(["there"]))
        answers = set(range(ranks.size)) - ({victim} if how in (kill, sleep_on, be_late) else set())
        stuck_ranks.time = Clock(store, ranks.rank, answers, how is be_late)  # type: ignore[assignment]
        if how in (sleep_on, be_late):
            control._timeout = 2
            control._set_timeouts()


def wait_until(true: Callable[[], object]) -> None:
    while not true():
        time.sleep(0.01)


class Clock:
    """The time of a roll call on a rank. It stands still until all that answer in time have done so, and were seen."""

    def __init__(self, store: Any, rank: int, answers: set[int], late: bool) -> None:
        self._store, self._rank, self._answers, self._seen = store, rank, answers, 0
        self._then = stuck_ranks.ROLL_CALL * (0.5 if late else 1.5)

    def monotonic(self) -> float:
        if all(self._store.check([f"answer/{n}"]) or self._store.check([f"ended/{n}"]) for n in self._answers):
            self._seen += 1
        if self._seen < 3:  # the roll call begins, looks, and looks again
            return 0.0
        if json.loads(self._store.get("call"))[0] == self._rank:
            self._store.set("time has passed", "")
        return self._then

    sleep = staticmethod(time.sleep)


def after(how: Callable[[], None], data: Any, batches: Any) -> Any:
    """The batches of a loader that does something first."""

    def loader() -> Iterator[Any]:
        how()
        yield from batches

    return data(loader())


def kill(_: Control) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_on(_: Control) -> None:
    time.sleep(3000)


def be_late(control: Control) -> None:
    """Come when the rank that called the roll has waited."""
    wait_until(lambda: control._store.check(["time has passed"]))


def bad_record(_: Control) -> None:
    raise InputError("train.fasta:7: record 'x' is empty")


def our_mistake(_: Control) -> None:
    raise KeyError("trunk")


SIX = Layout(strategy="full_shard", world_size=6, group=6)
"""In a ring of six most ranks are no neighbours of the one that is gone, and see no error of their own."""


def three(strategy: str = "full_shard") -> Layout:
    return Layout(strategy=strategy, world_size=3, group=3 if strategy == "full_shard" else 1)


def at_the_start(ranks: World, folder: Path) -> dict[str, Any]:
    """Rank 1 reads its weights for ever; the others go on to the first step."""
    began = time.monotonic()
    try:
        with Control(ranks, start_timeout=600, step_timeout=600, dumps=folder / "flight_recorder") as control:
            if ranks.rank == 1:
                control.note("reading weights")
            come_to(control, ranks, 1, sleep_on)
            control.begin_step(1)
    except InputError as error:
        return said(error, began)
    return {"says": ""}


def other(victim: int, how: How, where: str, strategy: str = "full_shard") -> Callable[..., dict[str, Any]]:
    size = 4 if strategy == "hybrid_shard" else 3
    layout = LAYOUTS[strategy] if size == 4 else three(strategy)
    return lambda ranks, folder: stopped(ranks, folder, victim, how, where, layout)


JOBS: dict[str, tuple[int, Callable[[World, Path], dict[str, Any]]]] = {
    "measured": (4, measured),
    "profiled": (2, profiled),
    "absent": (3, other(1, sleep_on, "outside")),
    "absent-at-barrier": (3, other(2, sleep_on, "outside")),
    "first-absent": (3, other(0, sleep_on, "outside")),
    "stuck-forward": (3, other(1, sleep_on, "forward")),
    "stuck-backward": (4, other(3, sleep_on, "backward", "hybrid_shard")),
    "stuck-loader": (3, other(2, sleep_on, "loader")),
    "killed": (3, other(1, kill, "forward")),
    "killed-of-six": (6, partial(stopped, victim=1, how=kill, where="forward", layout=SIX)),
    "first-killed": (3, other(0, kill, "backward", "no_shard")),
    "first-killed-with-store": (3, other(0, kill, "forward")),
    "late": (3, other(1, be_late, "forward")),
    "bad-record": (3, other(2, bad_record, "forward")),
    "our-mistake": (3, other(1, our_mistake, "backward")),
    "nothing": (3, other(3, kill, "outside")),
    "start": (3, at_the_start),
}
MEASURED = ["measured", "profiled"]
OWN_STORE = {"first-killed-with-store"}
"""Jobs whose first rank holds the store, as it does without an elastic launcher."""
SLEEPS_ON = {"absent", "absent-at-barrier", "first-absent", "stuck-forward", "stuck-backward", "stuck-loader", "start"}
"""Jobs of which one rank would sleep for longer than all tests may take."""


def rank_of(job: str, rank: int, size: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": str(job not in OWN_STORE), "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ |= recorder_settings(folder / job / "flight_recorder")
    stuck_ranks.STORE_SILENCE, stuck_ranks.TELL_EVERY = 600.0, 0.02
    stuck_ranks.BARRIER_EVERY = 0.0 if job == "absent-at-barrier" else 10.0
    with open(folder / f"{job}-{rank}.log", "w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if "WATCHING_DEBUG" in os.environ:
        import faulthandler

        faulthandler.dump_traceback_later(9)
    with contextlib.suppress(KeyError), world(600) as ranks:
        result = JOBS[job][1](ranks, folder / job)
        partial = folder / f"{job}-{rank}.part"
        partial.write_text(json.dumps(result), encoding="utf-8")
        partial.rename(folder / f"{job}-{rank}.json")
        os._exit(0)  # a group that was broken off is no longer there to be destroyed


@cache
def runs() -> tuple[Path, dict[str, dict[int, dict[str, Any]]]]:
    """What each rank of each job had to say, and the folder that they wrote to. Ranks that were killed say nothing."""
    folder = Path(tempfile.mkdtemp(prefix="watching-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, str(folder)], env=environment, check=True, timeout=2000)
    said: dict[str, dict[int, dict[str, Any]]] = {job: {} for job in JOBS}
    for path in folder.glob("*.json"):
        job, rank = path.stem.rsplit("-", 1)
        said[job][int(rank)] = json.loads(path.read_text(encoding="utf-8"))
    return folder, said


def hold_stores(ports: list[int]) -> None:
    """As an elastic launcher does; in a process of its own, for they have threads, and forks must have none."""
    stores = [torch.distributed.TCPStore("127.0.0.1", p, is_master=True, wait_for_workers=False) for p in ports]
    signal.pause()
    del stores


def run_side_by_side(folder: Path, jobs: list[str]) -> None:
    context = multiprocessing.get_context("fork")
    ports = {job: free_port() for job in jobs}
    holder = context.Process(target=hold_stores, args=([ports[job] for job in jobs if job not in OWN_STORE],))
    holder.start()
    ranks: dict[str, list[Any]] = {}
    for job in jobs:
        size = JOBS[job][0]
        ranks[job] = [context.Process(target=rank_of, args=(job, r, size, ports[job], folder)) for r in range(size)]
        for process in ranks[job]:
            process.start()
    deadline = time.monotonic() + 1000
    while any(p.is_alive() for processes in ranks.values() for p in processes):
        for job, processes in ranks.items():
            # Who sleeps on is not waited for once the others have spoken.
            sleepers = 1 if job in SLEEPS_ON else 0
            if sum(p.is_alive() for p in processes) <= sleepers or time.monotonic() > deadline:
                for process in processes:
                    process.kill()
        time.sleep(0.05)
    holder.kill()


def main() -> None:
    folder, chosen = Path(sys.argv[1]), sys.argv[2:] or list(JOBS)
    importlib.import_module("torch._dynamo")  # FSDP imports it, for seconds; here once for all ranks
    for jobs in (MEASURED, [job for job in JOBS if job not in MEASURED]):
        run_side_by_side(folder, [job for job in jobs if job in chosen])


if __name__ == "__main__":
    main()
