"""Packs of sequences computed in parallel on the cores of a CPU."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

S = TypeVar("S")
T = TypeVar("T")


def packs_at_once(device: torch.device) -> int:
    """Return the number of packs to compute in parallel: on the CPU one for each thread, else one."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def side_by_side(
    function: Callable[[S], T], packs: Sequence[S], device: torch.device, *, threads: bool = True
) -> list[T]:
    """Return `function` of each pack, in order, computed without gradients.

    On the CPU each core computes a pack of its own. This is 1.15 times as fast as all cores on one operation after the
    other, since they wait for each other at the end of each operation. If there are too few packs for this, all cores
    compute one pack after the other. Without `threads` they do so, too: a model that several processes compute together
    (`Trunk.shared_on`) takes one call at a time.
    """
    workers = packs_at_once(device) if threads else 1

    def alone(one: S) -> T:
        with torch.no_grad():  # no_grad holds for one thread only
            return function(one)

    if workers == 1 or len(packs) < 2 * workers:
        return [alone(one) for one in packs]
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        # The last packs come first: they are the longest, and at the end no core should wait for one.
        return list(pool.map(alone, packs[::-1]))[::-1]
