"""Which records make up each optimizer step, and how a step is cut into micro-batches for the ranks.

Everything follows from lengths, (seed, epoch) and two integers, rank and world size, so one process can play all ranks.

An epoch's records are shuffled and divided into windows of 64 steps or more, each with the same mix of lengths; inside
a window they are put together so that its steps have nearly equal token counts. No step has more tokens than it may
have, but for a single longer record. A step is then dealt to the ranks: to W x m bins of nearly equal token counts, m
being the least number of micro-batches for which no bin exceeds `tokens_per_rank`. The records of a step never depend
on W. Tokens are what is balanced: that attention costs the square of a length is not modelled, but longest-first
dealing gives all bins a similar mix of lengths.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError

Integers = npt.NDArray[np.int64]

WINDOW = 64
"""Steps, at least, whose records are put together at a time. It bounds the work of opening a plan anywhere, and more
would not be filled better."""

SLACK = 160
"""One part in this many of every step stays free, or the ranks' shares would only fit their budgets when exactly equal.
Of 3,000 steps of 50 proteins, 16,384 tokens, all then fit 4 shares of 4,096, and 99.9% fit 8 shares of 2,048."""


@dataclass(frozen=True)
class MicroBatch:
    """Records that go through the model together.

    A `ghost` exists because every rank must take part in the collectives of every forward pass: it repeats a record
    so that a rank without work has something to compute, and counts for nothing.
    """

    records: tuple[int, ...]
    ghost: bool = False


class Plan:
    """Maps a global step number to its epoch and records, in constant time however far it lies.

    Every epoch has the same number of steps, from lengths alone. Opening an epoch costs one shuffle and one sort of all
    records (6 million: 1.4 seconds on one core), going on to another window of it milliseconds; memory is about 16
    bytes a record at the peak and 6 between. Each record comes once an epoch. Which records meet in a step, and when,
    changes with every epoch. No step is empty, and none exceeds `global_tokens`, but a record that is longer alone:
    that one has a step to itself.

    Records are sorted by length, and each W neighbours are spread over the W windows, turned by a number that is drawn
    for them. So the k-th longest record of a window is never longer than the k-th longest of the longest neighbours:
    where these fit so many steps (first-fit decreasing), the records of every window of every epoch do.

    Args:
        lengths: tokens of each record as trained on (crops applied, `<cls>` and `<eos>` counted), integers [N], N > 0.
        global_tokens: most tokens of a step.
        seed: of the recipe.

    >>> plan = Plan(np.array([10, 9, 11, 10]), 25, seed=0)
    >>> plan.steps_per_epoch, plan.fill
    (2, 0.8)
    >>> [(epoch, records.tolist()) for epoch, records in map(plan.step, range(4))]
    [(0, [3, 0]), (0, [2, 1]), (1, [1, 2]), (1, [0, 3])]
    """

    def __init__(self, lengths: npt.NDArray[np.integer[Any]], global_tokens: int, seed: int) -> None:
        total, count = int(lengths.sum(dtype=np.int64)), len(lengths)
        wanted = max(-(-total * SLACK // (global_tokens * (SLACK - 1))), fewest_bins(lengths, global_tokens))
        self._lengths = lengths.astype(np.min_scalar_type(int(lengths.max())))
        self._seed, self._most = seed, global_tokens
        self._n_windows, steps, self._pattern = _windows(
            np.sort(self._lengths)[::-1], min(count, wanted), global_tokens
        )
        longer, shorter = min(steps, -(-count // self._n_windows)), min(steps, count // self._n_windows)
        first_windows = count % self._n_windows  # they have a record more
        each = np.where(np.arange(self._n_windows) < first_windows, longer, shorter)
        self._first_steps: list[int] = [0, *np.cumsum(each).tolist()]
        self.steps_per_epoch = self._first_steps[-1]
        self.fill = total / (self.steps_per_epoch * global_tokens)
        """Mean share of `global_tokens` that the steps hold; above 1 if many records are longer than that."""
        self._epoch, self._window = -1, -1

    def step(self, number: int) -> tuple[int, Integers]:
        """(epoch, record numbers) of the step with this number, counted from 0 through all epochs."""
        epoch, position = divmod(number, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = _shuffled(len(self._lengths), self._seed, epoch)
            if self._n_windows > 1:  # longest first, equal ones as shuffled
                self._order = self._order[(self._lengths.max() - self._lengths[self._order]).argsort(kind="stable")]
            self._epoch, self._window = epoch, -1
        window = bisect_right(self._first_steps, position) - 1
        if window != self._window:
            self._steps = self._fill_window(window)
            self._window = window
        return epoch, self._steps[position - self._first_steps[window]]

    def _records_of(self, window: int) -> Integers:
        """Those of a window of the epoch that is open, in the order of its shuffle."""
        count, n_windows = len(self._lengths), self._n_windows
        if n_windows == 1:
            return self._order.astype(np.int64)
        turns = self._drawn(-(-count // n_windows), 0) % np.uint64(n_windows)
        if count % n_windows:
            turns[-1] = 0  # of a rest; it is always the first windows that have a record more
        places = np.arange(len(turns)) * n_windows + (window + turns.astype(np.int64)) % n_windows
        records = self._order[places[places < count]].astype(np.int64)
        shuffled: Integers = records[self._drawn(len(records), 1 + window).argsort(kind="stable")]
        return shuffled

    def _drawn(self, n: int, what: int) -> npt.NDArray[np.uint64]:
        """Random numbers of the epoch that is open, from a raw stream, as in `_shuffled`."""
        return np.random.PCG64(np.random.SeedSequence((self._seed, self._epoch, what))).random_raw(n)

    def _fill_window(self, window: int) -> list[Integers]:
        """The records of each step of a window, in the order in which the shuffle comes to the steps' first records."""
        records = self._records_of(window)
        tokens = self._lengths[records].astype(np.int64)
        n_steps = self._first_steps[window + 1] - self._first_steps[window]
        small = np.flatnonzero(tokens <= self._most)
        alone = len(tokens) - len(small)
        bins = np.zeros(len(tokens), np.int64)
        bins[tokens > self._most] = np.arange(n_steps - alone, n_steps)
        if len(small):
            bins[small] = self._small(tokens[small], n_steps - alone, alone)
        steps = sorted(_members(bins, n_steps), key=lambda step: int(step[0]))
        return [records[step] for step in steps]

    def _small(self, tokens: Integers, n_steps: int, longer: int) -> Integers:
        """The step of each record of a window that is no longer than one.

        Args:
            tokens: of each record.
            n_steps: for them.
            longer: records of the window that are longer than a step.
        """
        within = int(tokens.sum()) // n_steps // 256
        # By powers of 2 only: in the exact order of lengths, a small data set would be put together the same way in
        # every epoch, and the first step would always hold the longest record.
        queue = np.argsort(-np.frexp(tokens)[1].astype(np.int8), kind="stable")
        bins, loads = _balanced(tokens, queue, n_steps, within)
        if loads.max() <= self._most:
            return bins
        # What is known to fit. Equal records take their places as they are shuffled.
        longest_first = np.argsort(-tokens, kind="stable")
        bins[longest_first] = np.unique(self._pattern[longer : longer + len(tokens)], return_inverse=True)[1]
        counts = np.bincount(bins, minlength=n_steps)
        loads = np.bincount(bins, weights=tokens, minlength=n_steps).astype(np.int64)
        for empty in np.flatnonzero(counts == 0).tolist():
            heaviest = int(np.where(counts > 1, loads, -1).argmax())
            moved = np.flatnonzero(bins == heaviest)[0]
            bins[moved] = empty
            counts[[heaviest, empty]] += [-1, 1]
            loads[[heaviest, empty]] += [-tokens[moved], tokens[moved]]
        _even(tokens, bins, loads, within)
        return bins


def _windows(longest_first: npt.NDArray[np.integer[Any]], wanted: int, most: int) -> tuple[int, int, Integers]:
    """Number of windows, steps of a window (where it has as many records), and a step for the k-th longest record of a
    window that it surely fits into.

    Of the numbers of windows that there may be, one that needs few steps more than are wanted is taken.

    Args:
        longest_first: tokens of each record.
        wanted: steps of an epoch.
        most: tokens of a step; a longer record fills one.
    """
    usual = max(1, wanted // WINDOW)
    best: tuple[int, int, Integers] | None = None
    for n_windows in range(usual, max(usual // 2, usual - 16), -1):
        pattern = _first_fit(longest_first[::n_windows].astype(np.int64), most)
        steps = max(-(-wanted // n_windows), int(pattern.max()) + 1)
        if best is None or n_windows * steps < best[0] * best[1]:
            best = n_windows, steps, pattern
        if n_windows * steps <= wanted:
            break
    assert best is not None, "there is at least one window"
    return best


def _first_fit(longest_first: Integers, most: int) -> Integers:
    """First-fit decreasing: the bin of each record, the first one that has room. A record over `most` fills one.

    >>> _first_fit(np.array([6, 5, 5, 4, 3]), 10).tolist()
    [0, 1, 1, 0, 2]
    """
    sizes, counts = np.unique(np.minimum(longest_first, most), return_counts=True)
    free, bins = np.zeros(0, np.int64), []
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):  # equal ones at a time
        room = free // size
        taken = np.clip(count - (np.cumsum(room) - room), 0, room)
        new = np.full(-(-(count - int(taken.sum())) // (most // size)), most // size)
        if len(new):
            new[-1] -= new.sum() - (count - taken.sum())
        taken = np.concatenate([taken, new])
        free = np.concatenate([free, np.full(len(new), most)]) - taken * size
        bins.append(np.repeat(np.arange(len(free)), taken))
    return np.concatenate(bins)


def _shuffled(n: int, seed: int, epoch: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """0 to n - 1 in an order that follows from (seed, epoch), in the smallest type that holds them.

    Sorts random numbers whose lower bits are replaced by the record number. As fast as `Generator.permutation`, whose
    order may change with the version of numpy, while the raw stream of a bit generator is promised not to (NEP 19).
    """
    bits = n.bit_length()
    keys = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(n)
    keys >>= np.uint64(bits)
    keys <<= np.uint64(bits)
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()  # all differ: any sort gives the same
    keys &= np.uint64(2**bits - 1)
    return keys.astype(np.min_scalar_type(n - 1))


def deal(
    records: Sequence[int] | Integers,
    lengths: npt.NDArray[np.integer[Any]],
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
    [MicroBatch(records=(0,), ghost=False), MicroBatch(records=(1,), ghost=True)]
    >>> deal([0, 1, 2], tokens, 5, rank=1, world_size=2)
    [MicroBatch(records=(1,), ghost=False), MicroBatch(records=(2,), ghost=False)]
    """
    numbers = np.asarray(records, dtype=np.int64)
    tokens = lengths[numbers].astype(np.int64)
    if tokens.max() > tokens_per_rank:
        raise InputError(
            f"the longest record of a step has {tokens.max()} tokens, but batch.tokens_per_rank is {tokens_per_rank}; "
            "raise it, or lower data.max_length"
        )
    queue = np.argsort(-tokens, kind="stable")
    per_rank = -(-fewest_bins(tokens, tokens_per_rank) // world_size)
    while True:
        n_bins = world_size * per_rank
        bins, loads = _balanced(tokens, queue, n_bins, within=int(tokens.sum()) // n_bins // 1024)
        if loads.max() <= tokens_per_rank:
            break
        per_rank += 1 + per_rank // 1000  # a step has no thousand, but a split to validate on may
    # Heaviest first, to and fro over the ranks: all are about equal in each round and in the sum.
    rounds = np.argsort(-loads, kind="stable").reshape(per_rank, world_size)
    rounds[1::2] = rounds[1::2, ::-1].copy()
    members, ghost = _members(bins, n_bins), MicroBatch((int(numbers[tokens.argmin()]),), ghost=True)
    mine = (numbers[members[b]].tolist() for b in rounds[:, rank])
    return [MicroBatch(tuple(chosen)) if chosen else ghost for chosen in mine]


def fewest_bins(lengths: npt.NDArray[np.integer[Any]], tokens: int) -> int:
    """A number of bins of so many tokens below which the records surely do not fit; exact if all are equally long.

    Of the records longer than 1 / (j + 1) of a bin, a bin holds j at most (Martello & Toth 1990, chapter 8). Counting
    tokens alone would plan 57 records of 288 tokens for a step of 16,384, which holds 56.
    """
    counts = np.bincount(lengths)
    total = int(counts @ np.arange(len(counts)))
    longer = len(lengths) - np.cumsum(counts)  # longer[t]: records of more than t tokens
    most = np.arange(1, max(1, tokens // max(1, int(lengths.min()))) + 1)
    held = longer[np.minimum(tokens // (most + 1), len(counts) - 1)]
    return max(-(-total // tokens), int((-(-held // most)).max()))


def _balanced(tokens: Integers, queue: Integers, n_bins: int, within: int) -> tuple[Integers, Integers]:
    """Each record's bin, and each bin's tokens.

    Records are taken from the queue one after another into the lightest bin (Graham 1969: queued longest first, within
    4/3 of the best), then swapped out of the heaviest bin until all bins are `within` so many tokens of each other or
    no swap helps. Swaps of one record for none could not help: each record went into what was the lightest bin. Ties go
    to the lower number, and every sort is stable. No bin is empty unless there are fewer records than bins.
    """
    bins, loads = np.zeros(len(tokens), np.int64), np.zeros(n_bins, np.int64)
    queued, at = tokens[queue], 0
    while at < len(queue):
        # Many at a time: the next ones go to the lightest, second lightest ... bin, as far as all bins that were served
        # before are by then heavier.
        some = queued[at : at + n_bins]
        lightest = loads.argsort(kind="stable")[: len(some)]
        before = loads[lightest]
        after = before + some
        late = before[1:] >= np.minimum.accumulate(after)[:-1]
        n = int(late.argmax()) + 1 if late.any() else len(some)
        bins[queue[at : at + n]] = lightest[:n]
        loads[lightest[:n]] = after[:n]
        at += n
    _even(tokens, bins, loads, within)
    return bins, loads


def _even(tokens: Integers, bins: Integers, loads: Integers, within: int) -> None:
    """Swap records out of the heaviest bin, in place, until bins are `within` so many tokens or no swap helps."""
    while True:
        heaviest, lightest_bin = int(loads.argmax()), int(loads.argmin())
        if loads[heaviest] - loads[lightest_bin] <= within:
            break
        swapped = _swap(tokens, bins, loads, heaviest, np.flatnonzero(bins == lightest_bin))
        if not swapped and not _swap(tokens, bins, loads, heaviest, np.flatnonzero(bins != heaviest)):
            break


def _swap(tokens: Integers, bins: Integers, loads: Integers, heaviest: int, others: Integers) -> bool:
    """Swap a record of the heaviest bin for that one of others that leaves the two bins best; False if none helps.

    A sample is enough: among 64 x 4,096 pairs one is about as good as the best of billions.
    """
    mine, others = np.flatnonzero(bins == heaviest)[:64], others[:4096]
    if len(others) == 0:
        return False
    saved = tokens[mine][:, None] - tokens[others]
    heavier = np.maximum(loads[heaviest] - saved, loads[bins[others]] + saved)
    i, j = divmod(int(heavier.argmin()), len(others))
    if heavier[i, j] >= loads[heaviest]:
        return False
    bin_of_other = int(bins[others[j]])
    loads[heaviest] -= saved[i, j]
    loads[bin_of_other] += saved[i, j]
    bins[mine[i]], bins[others[j]] = bin_of_other, heaviest
    return True


def _members(bins: Integers, n_bins: int) -> list[Integers]:
    """Places of the records of each bin, ascending."""
    return np.split(np.argsort(bins, kind="stable"), np.cumsum(np.bincount(bins, minlength=n_bins))[:-1])


def by_length(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Places in `lengths`, shortest first, in groups of at most `most` tokens; a longer one stands alone.

    >>> list(by_length([5, 2, 9, 3], 6))
    [[1, 3], [0], [2]]
    """
    group: list[int] = []
    total = 0
    for n in sorted(range(len(lengths)), key=lambda n: lengths[n]):
        if group and total + lengths[n] > most:
            yield group
            group, total = [], 0
        group.append(n)
        total += lengths[n]
    yield group
