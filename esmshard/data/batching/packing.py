"""Plans the records of each optimizer step, and divides each step into micro-batches for the ranks.

The plan depends only on lengths, seed, epoch, rank and world size, so each process can compute the plans of all ranks.

1. The records of an epoch are shuffled and divided into windows of 64 steps or more (fewer in a shorter epoch). All
   windows have the same mix of lengths.
2. The records of a window are divided into steps with nearly equal numbers of tokens. A step has at most
   `global_tokens` tokens, unless it is a single longer record. The steps do not depend on the number of ranks.
3. For W ranks, the records of a step are assigned to W x m bins (micro-batches) with nearly equal numbers of tokens,
   at most `tokens_per_rank`. The number m is the smallest for which an assignment is found. Tokens are balanced, not
   the cost of attention. But long records are assigned first, so the mix of lengths is similar in all bins.
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
"""The minimum number of steps in a window, unless the epoch has fewer steps. A resumed run computes the plan of one
window, not of all earlier steps.
"""
SCORED_TOKENS = 4096
"""The maximum number of tokens in a batch of the final evaluation, unless the batch is a single longer record."""
SLACK = 160
"""On average, at least 1 / SLACK of a step is empty. A full step would fit only if all ranks got exactly equal numbers
of tokens. In a test with 3,000 steps of 50 proteins and 16,384 tokens, all steps fit 4 ranks of 4,096 tokens, and 99.9%
fit 8 ranks of 2,048 tokens.
"""


@dataclass(frozen=True)
class MicroBatch:
    """The records that a rank sends through the model together.

    All ranks must take part in the collective operations of a forward pass. So a rank without records computes a dummy:
    a repeated record that does not count in loss or metrics.
    """

    records: tuple[int, ...]
    is_dummy: bool = False


class StepPlan:
    """The plan of training: the epoch and the records of each optimizer step.

    Every epoch has every record once, in other combinations and another order. The number of steps of an epoch depends
    only on `lengths` and `global_tokens`. No step is empty. No step exceeds `global_tokens`, except a step with a
    single longer record. An epoch starts with shuffling and sorting (1.4 seconds for 6 million records on one core); a
    window of the epoch starts in milliseconds. Memory is 6 bytes per record, and about 16 bytes at the peak.

    For W windows, records are sorted by length and cut into groups of W records. Each window gets a random record of
    each group. So the k-th longest record of a window is never longer than the longest record of the k-th group.
    First-fit decreasing assigns the longest record of each group to a step. Since these records fit into the steps, the
    records of every window of every epoch fit too.

    Args:
        lengths: the number of tokens of each record after cropping, with `<cls>` and `<eos>`, integers [N], N > 0.
        global_tokens: the maximum number of tokens in a step.
        seed: the random seed of the recipe.

    >>> plan = StepPlan(np.array([10, 9, 11, 10]), 25, seed=0)
    >>> plan.steps_per_epoch
    2
    >>> [(epoch, records.tolist()) for epoch, records in map(plan.step, range(4))]
    [(0, [3, 0]), (0, [2, 1]), (1, [1, 2]), (1, [0, 3])]
    """

    def __init__(self, lengths: npt.NDArray[np.integer[Any]], global_tokens: int, seed: int) -> None:
        total, count = int(lengths.sum(dtype=np.int64)), len(lengths)
        wanted = max(-(-total * SLACK // (global_tokens * (SLACK - 1))), fewest_bins(lengths, global_tokens))
        self._lengths = lengths.astype(np.min_scalar_type(int(lengths.max())))
        self._seed, self._max_tokens = seed, global_tokens
        self._n_windows, steps, self._pattern = _windows(
            np.sort(self._lengths)[::-1], min(count, wanted), global_tokens
        )
        longer, shorter = min(steps, -(-count // self._n_windows)), min(steps, count // self._n_windows)
        first_windows = count % self._n_windows  # The first windows have one more record than the last windows.
        each = np.where(np.arange(self._n_windows) < first_windows, longer, shorter)
        self._first_steps: list[int] = [0, *np.cumsum(each).tolist()]
        self.steps_per_epoch = self._first_steps[-1]
        self._epoch, self._window = -1, -1

    def step(self, number: int) -> tuple[int, Integers]:
        """Return the epoch and the record indices of step `number`. Steps are counted from 0 through all epochs."""
        epoch, position = divmod(number, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = _shuffled(len(self._lengths), self._seed, epoch)
            if self._n_windows > 1:  # Sort by length, longest first. Records of equal length stay shuffled.
                self._order = self._order[(self._lengths.max() - self._lengths[self._order]).argsort(kind="stable")]
            self._epoch, self._window = epoch, -1
        window = bisect_right(self._first_steps, position) - 1
        if window != self._window:
            self._window, self._steps = window, self._fill_window(window)
        return epoch, self._steps[position - self._first_steps[window]]

    def _records_of(self, window: int) -> Integers:
        """Return the record indices of a window of the current epoch, in random order."""
        count, n_windows = len(self._lengths), self._n_windows
        if n_windows == 1:
            return self._order.astype(np.int64)
        turns = self._drawn(-(-count // n_windows), 0) % np.uint64(n_windows)
        if count % n_windows:
            turns[-1] = 0  # The last group is not full. The first windows always get its records.
        places = np.arange(len(turns)) * n_windows + (window + turns.astype(np.int64)) % n_windows
        records = self._order[places[places < count]].astype(np.int64)
        shuffled: Integers = records[self._drawn(len(records), 1 + window).argsort(kind="stable")]
        return shuffled

    def _drawn(self, n: int, what: int) -> npt.NDArray[np.uint64]:
        """Return n random numbers. They depend only on seed, current epoch and `what`, a number for each use."""
        return np.random.PCG64(np.random.SeedSequence((self._seed, self._epoch, what))).random_raw(n)

    def _fill_window(self, window: int) -> list[Integers]:
        """Return the record indices of each step of a window of the current epoch. The steps are in random order."""
        records = self._records_of(window)
        tokens = self._lengths[records].astype(np.int64)
        n_steps = self._first_steps[window + 1] - self._first_steps[window]
        small = np.flatnonzero(tokens <= self._max_tokens)
        n_longer = len(tokens) - len(small)
        bins = np.zeros(len(tokens), np.int64)
        bins[tokens > self._max_tokens] = np.arange(n_steps - n_longer, n_steps)
        if len(small):
            bins[small] = self._small(tokens[small], n_steps - n_longer, n_longer)
        steps = sorted(_members(bins, n_steps), key=lambda step: int(step[0]))
        return [records[step] for step in steps]

    def _small(self, tokens: Integers, n_steps: int, longer: int) -> Integers:
        """Assign the records that fit into a step to `n_steps` steps, and return the step of each record. `tokens` has
        their numbers of tokens. `longer` is the number of records of the window that do not fit into a step.
        """
        within = int(tokens.sum()) // n_steps // 256
        # Sorted by exact length, a small data set would get the same steps in every epoch. So round to powers of 2.
        queue = np.argsort(-np.frexp(tokens)[1].astype(np.int8), kind="stable")
        bins, loads = _balanced(tokens, queue, n_steps, within)
        if loads.max() <= self._max_tokens:
            return bins
        # Otherwise use `_pattern`, which always fits.
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


def _windows(longest_first: npt.NDArray[np.integer[Any]], wanted: int, max_tokens: int) -> tuple[int, int, Integers]:
    """Return the number of windows of an epoch, the number of steps of a full window, and a pattern. `wanted` is the
    minimum number of steps of the epoch.

    If the k-th longest record of a window goes to step `pattern[k]`, no step exceeds `max_tokens`, except a step with a
    single longer record. Several numbers of windows are tried. The number with the fewest steps per epoch is returned.
    """
    usual = max(1, wanted // WINDOW)
    possible: list[tuple[int, int, Integers]] = []
    for n_windows in range(usual, max(usual // 2, usual - 16), -1):
        pattern = _first_fit(longest_first[::n_windows].astype(np.int64), max_tokens)
        steps = max(-(-wanted // n_windows), int(pattern.max()) + 1)
        possible.append((n_windows, steps, pattern))
        if n_windows * steps <= wanted:
            break
    return min(possible, key=lambda choice: choice[0] * choice[1])


def _first_fit(longest_first: Integers, max_tokens: int) -> Integers:
    """Assign records to bins by first-fit decreasing: each record goes to the first bin that has room for it. Return
    the bin of each record. A record over `max_tokens` tokens gets a separate bin.

    >>> _first_fit(np.array([6, 5, 5, 4, 3]), 10).tolist()
    [0, 1, 1, 0, 2]
    """
    sizes, counts = np.unique(np.minimum(longest_first, max_tokens), return_counts=True)
    free, bins = np.zeros(0, np.int64), []
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        room = free // size
        taken = np.clip(count - (np.cumsum(room) - room), 0, room)
        new = np.full(-(-(count - int(taken.sum())) // (max_tokens // size)), max_tokens // size)
        if len(new):
            new[-1] -= new.sum() - (count - taken.sum())
        taken = np.concatenate([taken, new])
        free = np.concatenate([free, np.full(len(new), max_tokens)]) - taken * size
        bins.append(np.repeat(np.arange(len(free)), taken))
    return np.concatenate(bins)


def _shuffled(n: int, seed: int, epoch: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return the numbers 0 to n - 1 in the random order of this seed and epoch, as the smallest possible integer type.

    The lower bits of n random numbers are replaced by 0 to n - 1, and the results are sorted. The order of
    `Generator.permutation` may change between versions of numpy, but raw random numbers never change (NEP 19).
    """
    bits = n.bit_length()
    keys = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(n)
    keys >>= np.uint64(bits)
    keys <<= np.uint64(bits)
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()  # All keys differ, so every sorting method gives the same result.
    keys &= np.uint64(2**bits - 1)
    return keys.astype(np.min_scalar_type(n - 1))


def undivided(records: Sequence[int], rank: int) -> list[MicroBatch]:
    """Return one micro-batch with all records of a step. It counts on rank 0, and the other ranks compute it too.

    >>> undivided([4, 2], rank=1)
    [MicroBatch(records=(4, 2), is_dummy=True)]
    """
    return [MicroBatch(tuple(records), is_dummy=rank > 0)]


def assign(
    records: Sequence[int] | Integers,
    lengths: npt.NDArray[np.integer[Any]],
    tokens_per_rank: int,
    rank: int,
    world_size: int,
) -> list[MicroBatch]:
    """Divide the records of a step into micro-batches of at most `tokens_per_rank` tokens, and return those for `rank`.

    All ranks get the same number of micro-batches, with nearly equal numbers of tokens. `lengths` has the number of
    tokens of every record of the data set. Raises `InputError` if a record has more than `tokens_per_rank` tokens.

    >>> tokens = np.array([4, 3, 3])
    >>> assign([0, 1, 2], tokens, 5, rank=0, world_size=2)
    [MicroBatch(records=(0,), is_dummy=False), MicroBatch(records=(1,), is_dummy=True)]
    >>> assign([0, 1, 2], tokens, 5, rank=1, world_size=2)
    [MicroBatch(records=(1,), is_dummy=False), MicroBatch(records=(2,), is_dummy=False)]
    """
    numbers = np.asarray(records, dtype=np.int64)
    tokens = lengths[numbers].astype(np.int64)
    if tokens.max() > tokens_per_rank:
        raise InputError(
            f"the longest record of a step has {tokens.max()} tokens, but batch.tokens_per_rank is {tokens_per_rank}; "
            "raise batch.tokens_per_rank, or lower data.max_length"
        )
    queue = np.argsort(-tokens, kind="stable")
    per_rank = -(-fewest_bins(tokens, tokens_per_rank) // world_size)
    while True:
        n_bins = world_size * per_rank
        bins, loads = _balanced(tokens, queue, n_bins, within=int(tokens.sum()) // n_bins // 1024)
        if loads.max() <= tokens_per_rank:
            break
        per_rank += 1 + per_rank // 1000  # A validation set may need a thousand micro-batches.
    # Each round gives a bin to each rank, beginning with the heaviest bins, and every second round in reverse order. So
    # the ranks have nearly equal numbers of tokens in each round and in total.
    rounds = np.argsort(-loads, kind="stable").reshape(per_rank, world_size)
    rounds[1::2] = rounds[1::2, ::-1].copy()
    members, dummy = _members(bins, n_bins), MicroBatch((int(numbers[tokens.argmin()]),), is_dummy=True)
    mine = (numbers[members[b]].tolist() for b in rounds[:, rank])
    return [MicroBatch(tuple(chosen)) if chosen else dummy for chosen in mine]


def fewest_bins(lengths: npt.NDArray[np.integer[Any]], tokens: int) -> int:
    """Return a lower bound for the number of bins that records of these `lengths` need. Each bin has room for `tokens`
    tokens. The bound is exact for records of equal length.

    A bin has room for at most j records that are longer than 1 / (j + 1) of the bin (Martello & Toth 1990, chapter 8).
    For example, 16,384 tokens have room for 56 records of 288 tokens, although 16,384 / 288 is 56.9.
    """
    counts = np.bincount(lengths)
    total = int(counts @ np.arange(len(counts)))
    longer = len(lengths) - np.cumsum(counts)  # longer[t] is the number of records with more than t tokens.
    records_J = np.arange(1, max(1, tokens // max(1, int(lengths.min()))) + 1)
    longer_J = longer[np.minimum(tokens // (records_J + 1), len(counts) - 1)]
    return max(-(-total // tokens), int((-(-longer_J // records_J)).max()))


def _balanced(tokens: Integers, queue: Integers, n_bins: int, within: int) -> tuple[Integers, Integers]:
    """Assign records to `n_bins` bins. Return the bin of each record, and the number of tokens in each bin.

    In the order of `queue` (record indices), each record goes to the bin with the fewest tokens. (Graham 1969: if the
    longest records come first, the heaviest bin has at most 4/3 of the optimum.) Then records are swapped, see `_even`.
    No bin is empty unless there are fewer records than bins. Every sort is stable, so all ranks get the same result.
    """
    bins, loads = np.zeros(len(tokens), np.int64), np.zeros(n_bins, np.int64)
    queued, at = tokens[queue], 0
    while at < len(queue):
        # A pass assigns the next records to the lightest bin, the second lightest bin and so on. It ends before a bin
        # that is not lighter than an earlier bin with its new record.
        sizes = queued[at : at + n_bins]
        lightest = loads.argsort(kind="stable")[: len(sizes)]
        before = loads[lightest]
        after = before + sizes
        late = before[1:] >= np.minimum.accumulate(after)[:-1]
        n = int(late.argmax()) + 1 if late.any() else len(sizes)
        bins[queue[at : at + n]] = lightest[:n]
        loads[lightest[:n]] = after[:n]
        at += n
    _even(tokens, bins, loads, within)
    return bins, loads


def _even(tokens: Integers, bins: Integers, loads: Integers, within: int) -> None:
    """Swap records of the heaviest bin until all bins differ by at most `within` tokens, or until no swap helps.
    `bins` (the bin of each record) and `loads` (the number of tokens in each bin) are changed in place.
    """
    while True:
        heaviest, lightest_bin = int(loads.argmax()), int(loads.argmin())
        if loads[heaviest] - loads[lightest_bin] <= within:
            break
        swapped = _swap(tokens, bins, loads, heaviest, np.flatnonzero(bins == lightest_bin))
        if not swapped and not _swap(tokens, bins, loads, heaviest, np.flatnonzero(bins != heaviest)):
            break


def _swap(tokens: Integers, bins: Integers, loads: Integers, heaviest: int, others: Integers) -> bool:
    """Swap a record of the heaviest bin with a record of `others`, so that the two bins become as equal as possible.
    Return False if no swap helps. Only 64 x 4,096 pairs are tried, since more pairs hardly improve the result.
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
    """Return the record indices of each bin, in ascending order."""
    return np.split(np.argsort(bins, kind="stable"), np.cumsum(np.bincount(bins, minlength=n_bins))[:-1])


def by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield groups of record indices, shortest records first. The total length of a group is at most `max_tokens`,
    unless the group is a single longer record.

    >>> list(by_length([5, 2, 9, 3], 6))
    [[1, 3], [0], [2]]
    """
    group: list[int] = []
    total = 0
    for n in sorted(range(len(lengths)), key=lambda n: lengths[n]):
        if group and total + lengths[n] > max_tokens:
            yield group
            group, total = [], 0
        group.append(n)
        total += lengths[n]
    yield group
