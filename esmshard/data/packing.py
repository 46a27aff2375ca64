"""Which records make up each optimizer step, and how a step is cut into micro-batches for the ranks.

Everything follows from lengths, (seed, epoch) and two integers, rank and world size, so one process can play all ranks.

An epoch's records are shuffled and cut into steps of about `global_tokens` tokens, all nearly equal, none left out. A
step is then dealt to the ranks: to W x m bins of nearly equal weight, m being the least number of micro-batches for
which no bin exceeds `tokens_per_rank`. The records of a step never depend on W.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError


@dataclass(frozen=True)
class MicroBatch:
    """Records that go through the model together.

    A `ghost` exists because every rank must take part in the collectives of every forward pass: it repeats a record
    so that a rank without work has something to compute, and counts for nothing.
    """

    records: tuple[int, ...]
    ghost: bool = False


def epoch_steps(
    lengths: npt.NDArray[np.int64], global_tokens: int, seed: int, epoch: int
) -> list[npt.NDArray[np.int64]]:
    """Cut one epoch into optimizer steps: record numbers, int64, step by step.

    Args:
        lengths: tokens of each record as trained on (crops applied, `<cls>` and `<eos>` counted).
        global_tokens: tokens wanted in a step. An epoch has round(all tokens / this) steps, and each differs from
            their mean by less than one record.
        seed: of the recipe.
        epoch: counted from 0.

    >>> [s.tolist() for s in epoch_steps(np.array([10, 10, 10, 10]), 20, seed=0, epoch=0)]
    [[2, 0], [1, 3]]
    """
    order = np.random.default_rng((seed, epoch)).permutation(len(lengths))
    ends = np.cumsum(lengths[order])
    n_steps = min(len(order), max(1, round(int(ends[-1]) / global_tokens)))
    # A record belongs to the step in which its middle falls; evenly spaced cuts leave no small step at the end.
    middles = ends - lengths[order] / 2
    cuts = np.searchsorted(middles, ends[-1] * np.arange(1, n_steps) / n_steps)
    return [step for step in np.split(order, cuts) if len(step)]


class Plan:
    """Maps a global step number to its epoch and records, forward through as many epochs as it takes."""

    def __init__(self, lengths: npt.NDArray[np.int64], global_tokens: int, seed: int) -> None:
        self._lengths, self._global_tokens, self._seed = lengths, global_tokens, seed
        self._first, self._epoch = 0, 0
        self._steps = epoch_steps(lengths, global_tokens, seed, 0)

    def step(self, number: int) -> tuple[int, npt.NDArray[np.int64]]:
        """(epoch, records) of the step with this number, counted from 0. The number of steps an epoch has varies."""
        if number < self._first:
            self._first, self._epoch = 0, 0
            self._steps = epoch_steps(self._lengths, self._global_tokens, self._seed, 0)
        while number >= self._first + len(self._steps):
            self._first += len(self._steps)
            self._epoch += 1
            self._steps = epoch_steps(self._lengths, self._global_tokens, self._seed, self._epoch)
        return self._epoch, self._steps[number - self._first]


def deal(
    records: Sequence[int] | npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    tokens_per_rank: int,
    rank: int,
    world_size: int,
) -> list[MicroBatch]:
    """The micro-batches of one rank. All ranks get the same number of them, of nearly equal token counts.

    Args:
        records: record numbers of the step.
        lengths: tokens of every record of the data set.
        tokens_per_rank: most tokens of a micro-batch.
        rank: 0 to world_size - 1.
        world_size: number of ranks.

    Raises:
        InputError: if a record alone exceeds `tokens_per_rank`.

    Three records of 4, 3 and 3 tokens on two ranks, at most 5 tokens at once: two micro-batches each, one a ghost.

    >>> tokens = np.array([4, 3, 3])
    >>> deal([0, 1, 2], tokens, 5, rank=0, world_size=2)
    [MicroBatch(records=(0,), ghost=False), MicroBatch(records=(2,), ghost=False)]
    >>> deal([0, 1, 2], tokens, 5, rank=1, world_size=2)
    [MicroBatch(records=(1,), ghost=False), MicroBatch(records=(1,), ghost=True)]
    """
    weights = [int(lengths[r]) for r in records]
    longest = max(weights)
    if longest > tokens_per_rank:
        raise InputError(
            f"the longest record of a step has {longest} tokens, but batch.tokens_per_rank is {tokens_per_rank}; "
            "raise it, or lower data.max_length"
        )
    per_rank = -(-sum(weights) // (tokens_per_rank * world_size))
    while True:
        bins, heaviest = _spread(weights, world_size * per_rank)
        if heaviest <= tokens_per_rank:
            break
        per_rank += 1
    shortest = int(records[min(range(len(weights)), key=lambda k: (weights[k], k))])
    mine = [bins[m * world_size + rank] for m in range(per_rank)]
    return [
        MicroBatch(tuple(int(records[k]) for k in chosen)) if chosen else MicroBatch((shortest,), ghost=True)
        for chosen in mine
    ]


def _spread(weights: Sequence[int], n_bins: int) -> tuple[list[list[int]], int]:
    """Longest first into the lightest bin (Graham 1969: within 4/3 of the best). Ties go to the lower number."""
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    heap = [(0, b) for b in range(n_bins)]
    for k in sorted(range(len(weights)), key=lambda k: (-weights[k], k)):
        weight, b = heapq.heappop(heap)
        bins[b].append(k)
        heapq.heappush(heap, (weight + weights[k], b))
    for chosen in bins:
        chosen.sort()
    return bins, max(weight for weight, _ in heap)
