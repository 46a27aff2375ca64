"""Windows of records of several chains that are longer than a model shall see at once. No torch.

Every window has a part of each chain, one residue at least, and the linkers between them. All chains get equal parts of
the room, and what a short chain does not need goes to the others, so that short chains stay whole.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError
from esmshard.vocab import chain_spans


@dataclass(frozen=True)
class ChainWindows:
    """The windows of one record."""

    spans: tuple[tuple[int, int], ...]
    """Where each chain begins and ends (exclusive) in the tokens of the record."""
    sizes: tuple[int, ...]
    """Residues of each chain in a window."""

    @property
    def rooms(self) -> list[int]:
        """The number of residues that a window leaves out of each chain."""
        return [end - start - size for (start, end), size in zip(self.spans, self.sizes, strict=True)]

    @property
    def count(self) -> int:
        """The fewest windows that have every residue between them."""
        lengths = [end - start for start, end in self.spans]
        return max(-(-length // size) for length, size in zip(lengths, self.sizes, strict=True))

    def spread(self, place: int) -> list[int]:
        """Return the first residue of each chain in one of `count` windows, which are evenly spread."""
        return [place * room // max(self.count - 1, 1) for room in self.rooms]

    def drawn(self, key: str) -> list[int]:
        """Draw the first residue of each chain in a window. The same key gives the same window."""
        digests = [hashlib.sha256(f"{key}:{k}".encode()).digest() for k in range(len(self.spans))]
        return [
            int.from_bytes(digest[:8], "little") % (room + 1) for digest, room in zip(digests, self.rooms, strict=True)
        ]

    def kept(self, starts: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return which tokens of the record a window has, int64 [W], by the first residue of each chain."""
        found, linker = list[npt.NDArray[np.int64]](), self.spans[0][0]
        for (begin, end), size, start in zip(self.spans, self.sizes, starts, strict=True):
            found += [np.arange(linker, begin), np.arange(begin + start, begin + start + size)]
            linker = end
        return np.concatenate(found)

    def name(self, starts: Sequence[int]) -> str:
        """Return the first and the last residue of each chain in a window, counted from 1, as `1-300:5-204`."""
        return ":".join(f"{start + 1}-{start + size}" for start, size in zip(starts, self.sizes, strict=True))


def chain_windows(tokens: npt.NDArray[np.uint8], most: int) -> ChainWindows:
    """Return the windows of at most `most` tokens, `<cls>` and `<eos>` not counted, of a longer record.

    >>> from esmshard.vocab import encode_residues
    >>> tokens = np.frombuffer(encode_residues("MKTAYIAKQR:GQI", linker=2), np.uint8)
    >>> chain_windows(tokens, 11).sizes
    (6, 3)

    Raises:
        InputError: there is no room for a residue of each chain between the linkers.
    """
    spans = chain_spans(tokens)
    lengths = [end - start for start, end in spans]
    linkers = len(tokens) - sum(lengths)
    room = most - linkers
    if room < len(spans):
        raise InputError(
            f"{most:,} residues leave no room for {len(spans)} chains and {linkers:,} residues of linkers; raise the "
            "limit, or join chains by a shorter linker"
        )
    sizes = [0] * len(spans)
    by_length = sorted(range(len(spans)), key=lengths.__getitem__)
    for done, k in enumerate(by_length):
        sizes[k] = min(lengths[k], room // (len(spans) - done))
        room -= sizes[k]
    return ChainWindows(tuple(spans), tuple(sizes))
