"""Checks at the start of a run: its processes train together on different records, and no rank is slow."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from esmshard.errors import InputError
from esmshard.parallel.process_group import World


def check_first_batch(world: World, digests: Callable[[], Mapping[bytes, str]]) -> None:
    """Stop if two ranks would train on the same records, or ranks that work together on different ones. Nothing
    else would show this, since the loss falls anyway.

    Args:
        world: the ranks that take the step together.
        digests: reads this rank's share of the first step, and returns the ids of its records by digest.

    Raises:
        InputError: on all ranks, if a record is in the shares of two ranks, or not in those of all that work together.
    """
    owners: dict[bytes, int] = {}
    shares = world.gather(world.agree(digests))
    for rank, share in enumerate(shares):
        first = rank - rank % world.together
        if first != rank:
            if differing := [*share.items() ^ shares[first].items()]:
                raise _shared(
                    f"ranks {first} and {rank} compute each layer together (parallel.tensor or context) and would "
                    f"train on different records (first: '{differing[0][1]}'); give both the same files, and the same "
                    "version of esmshard"
                )
            continue
        for digest, record_id in share.items():
            owner = owners.setdefault(digest, rank)
            if owner != rank:
                raise _shared(
                    f"ranks {owner} and {rank} would train on the same records (first: '{record_id}'); each rank must "
                    "take its own share: start through `esmshard finetune --nproc N` or torchrun, which set RANK and "
                    "WORLD_SIZE"
                )


def _shared(message: str) -> InputError:
    error = InputError(message)
    error.shared = True
    return error


SLOW = 1.2
"""The factor by which a slow rank takes longer than the median of the others."""
LEAST = 0.03
"""Seconds of a step below which no rank counts as slow, because a machine's noise on small models is that large."""


def slow_ranks(busy: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """Return the ranks that the others wait for.

    Args:
        busy: for each rank, the seconds of a step outside collectives, which are its own work.
        seconds: for each rank, the seconds of the whole step.

    A rank is slow if it is busy for more than 1.2 times the median of the others, and if this costs a tenth of a step
    and 0.03 s. Without the second condition, a step that is mostly communication would make the ratio meaningless.

    >>> slow_ranks([1.0, 1.5, 1.1], [1.6, 1.6, 1.6])
    [1]
    """
    if len(busy) < 2:
        return []
    others = [median([*busy[:rank], *busy[rank + 1 :]]) for rank in range(len(busy))]
    least = max(LEAST, 0.1 * median(seconds))
    return [
        rank
        for rank, (own, other) in enumerate(zip(busy, others, strict=True))
        if own > SLOW * other and own - other > least
    ]


FULL = 0.95
"""The share of its device's memory above which a rank counts as full."""
