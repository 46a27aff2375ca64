"""What ranks do in the drills of lost ranks: steps in which one of them is killed, stopped, stuck or wrong.

    python watching.py FOLDER

runs all drills side by side. Ranks are forked, so that torch is imported once; each writes FOLDER/JOB-RANK.json.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import free_port

from esmshard.errors import InputError
from esmshard.parallel import watch
from esmshard.parallel.process_group import world
from esmshard.parallel.watch import Control, Watch, recorder_settings

TIMEOUT = 12
"""The seconds that a collective waits."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(3000)


def mistake() -> None:
    raise InputError("train.fasta:7: record 'x' is empty")


def crash() -> None:
    raise KeyError("trunk")


JOBS: dict[str, tuple[int, int, Callable[[], None], str]] = {
    "killed": (4, 1, kill, "step"),  # rank 3 is no neighbour of the one that is gone
    "first-killed": (3, 0, kill, "step"),
    "stopped": (3, 2, stop, "step"),
    "first-stopped-with-store": (3, 0, stop, "step"),
    "stuck-loader": (3, 2, sleep, "loader"),
    "mistake": (3, 2, mistake, "step"),
    "crash": (3, 1, crash, "step"),
    "nothing": (3, 3, kill, "step"),
}
"""For each drill the number of ranks, the victim, what it does in the third step, and where."""


def rank_of(job: str, rank: int, port: int, folder: Path) -> None:
    size, victim, act, where = JOBS[job]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": str("with-store" not in job), "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ |= recorder_settings(folder / job / "flight_recorder")
    watch.BEAT, watch.ROLL_CALL, watch.STORE_SILENCE = 0.2, 5.0, 15.0
    with open(folder / f"{job}-{rank}.log", "w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)

    def act_in(place: str, step: int) -> None:
        if rank == victim and step == 3 and place == where:
            notes, there = ranks.store.clone(), [3, "waiting for data" if where == "loader" else "computing"]
            while json.loads(notes.get(f"note/{rank}"))[1:] != there:  # until the note of this place is sent
                time.sleep(0.05)
            act()

    def batches(step: int) -> Iterator[int]:
        act_in("loader", step)
        yield 1

    outcome = {"says": "", "shared": False, "code": 0}
    try:
        with world(600, TIMEOUT) as ranks, Control(ranks, folder / job / "flight_recorder") as control:
            observed = Watch(ranks, control)
            for step in range(1, 6):
                observed.begin_step(step, 10, 0)
                for _ in observed.data(batches(step)):
                    act_in("step", step)
                    dist.all_reduce(torch.ones(3))
                observed.report(ranks.rows(observed.numbers()))
    except InputError as error:
        outcome = {"says": str(error), "shared": error.shared, "code": error.exit_code}
    part = folder / f"{job}-{rank}.part"
    part.write_text(json.dumps(outcome), encoding="utf-8")
    part.rename(folder / f"{job}-{rank}.json")
    os._exit(0)


def hold_stores(ports: list[int]) -> None:
    """As an elastic launcher does; in a process of its own, for they have threads, and forks must have none."""
    stores = [dist.TCPStore("127.0.0.1", p, is_master=True, wait_for_workers=False) for p in ports]
    signal.pause()
    del stores


def main() -> None:
    folder, context = Path(sys.argv[1]), multiprocessing.get_context("fork")
    ports = {job: free_port() for job in JOBS}
    processes = [context.Process(target=hold_stores, args=([ports[job] for job in JOBS if "with-store" not in job],))]
    processes[0].start()
    for job, (size, *_) in JOBS.items():
        for rank in range(size):
            processes.append(context.Process(target=rank_of, args=(job, rank, ports[job], folder)))
            processes[-1].start()
    waiting = set(processes[1:])
    victims = sum(act in (stop, sleep) for _, _, act, _ in JOBS.values())
    end = time.monotonic() + 300
    while len(waiting) > victims and time.monotonic() < end:
        waiting = {process for process in waiting if process.is_alive()}
        time.sleep(0.1)
    for process in [*waiting, processes[0]]:
        process.kill()


if __name__ == "__main__":
    main()
