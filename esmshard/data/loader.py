"""Records with their labels, cropped as the recipe says, ready for a task to collate."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from esmshard.data.packing import MicroBatch
from esmshard.data.symbols import shown
from esmshard.errors import InputError
from esmshard.vocab import CLS, EOS

Long = Literal["crop", "window", "full", "skip", "error"]

FIXED = "fixed"
"""The draw of examples outside training."""
SEEN = "seen_in_training.txt"
"""Ids of the training and validation records of a run, one a line, where its task keeps them; goes with the model, so
that a prediction of one of them is not taken for a test."""


class Labels(Protocol):
    """Arrays of record n by name."""

    @property
    def per_residue(self) -> bool:
        """Whether the first dimension is L, so that a crop of the sequence crops them too."""

    @property
    def labelled_N(self) -> npt.NDArray[np.bool_] | None:
        """Which records have labels, bool [N]; the others are left out. None where all have."""

    def __getitem__(self, n: int) -> Mapping[str, npt.NDArray[Any]]: ...


class Store(Protocol):
    """Records: a `TokenStore`, or what serves as one."""

    notices: list[str]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Residues of each record, int32 [N]."""

    @property
    def manifest(self) -> dict[str, Any]:
        """What is known of all of them; `residues` among it."""

    @property
    def digest(self) -> str:
        """Names the sequences and their order."""

    def __len__(self) -> int: ...

    def id(self, n: int) -> str:
        """The id of record n."""

    def residues(self, n: int) -> npt.NDArray[np.uint8]:
        """Its residue tokens, uint8 [L]."""


@dataclass(frozen=True)
class Example:
    """One record, or a window of it, as a task sees it."""

    id: str
    tokens: npt.NDArray[np.uint8]
    """`<cls> ... <eos>`, uint8 [L + 2]."""
    labels: Mapping[str, npt.NDArray[Any]]
    """Arrays of first dimension L, cropped with the tokens, or values of the whole protein."""
    draw: str = FIXED
    """What random choices are drawn from, the id besides: seed and epoch; FIXED outside training."""


class Examples:
    """A split: sequences, labels, and what happens to records over `max_length`.

    Args:
        name: of the split, for messages.
        path: of the FASTA file.
        store: its records.
        labels: of the same records, in the same order; None where there are none to learn from.
        long: see `recipe.DataSettings.long`.
        max_length: residues; None takes every record whole.
        seed: of the recipe; crops follow from (seed, epoch, id), never from rank or batch.
        members_N: which records belong to the split, bool [N]; all by default.
        digest: names sequences, their order and the choice among them; that of the store by default.

    Raises:
        InputError: a record is longer than `max_length` where that is an error, or none is left.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        store: Store,
        labels: Labels | None,
        *,
        long: Long = "full",
        max_length: int | None = None,
        seed: int = 0,
        members_N: npt.NDArray[np.bool_] | None = None,
        digest: str | None = None,
    ) -> None:
        self.name, self.path, self.store = name, path, store
        self._digest = digest
        self.notices = [*store.notices, *getattr(labels, "notices", ())]
        """What was changed or left out on the way here, one sentence each."""
        self.labels = labels
        """Of all records of the store."""
        self._seed = seed
        self._crop: int | None = None
        # Record and first residue of each example; None while every record is one example and begins at its start.
        self._record_E: npt.NDArray[np.int64] | None = None
        self._start_E: npt.NDArray[np.int64] | None = None
        cut_E: npt.NDArray[np.int32] = store.lengths
        taken_N = np.ones(len(store), dtype=np.bool_) if members_N is None else members_N
        if labels is not None and labels.labelled_N is not None:
            taken_N = taken_N & labels.labelled_N
        if not taken_N.all():
            self._record_E = np.flatnonzero(taken_N)
            cut_E = store.lengths[self._record_E]
            if not len(cut_E):
                raise InputError(f"{path}: {name} has no labelled record; give it labels, or another file")
        if max_length is not None and long != "full" and int(cut_E.max()) > max_length:
            cut_E = self._shorten(long, max_length, cut_E)
        self.tokens: npt.NDArray[np.int32] = cut_E + np.int32(2)
        """Tokens of each example as trained on, `<cls>` and `<eos>` counted, int32 [E]."""
        self.beside = 0
        """Tokens that go through the model with every micro-batch besides: of variants, those of the wild type."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def digest(self) -> str:
        """Names the sequences, their order and the choice among them."""
        return self._digest or self.store.digest

    def get(self, n: int, epoch: int | None = None) -> Example:
        """Example n as it is trained on in an epoch; without an epoch nothing is cropped at random.

        A crop or window keeps `<cls>` and `<eos>`, although its ends are no protein ends: every sequence of a batch
        has them.
        """
        record, start = self._origin(n)
        record_id, residues = self.id(n), self.store.residues(record)
        labels = {} if self.labels is None else self.labels[record]
        window = None
        if self._start_E is not None:
            window = slice(start, start + int(self.tokens[n]) - 2)
        elif epoch is not None and self._crop is not None and len(residues) > self._crop:
            digest = hashlib.sha256(f"{self._seed}:{epoch}:{record_id}".encode()).digest()
            start = int.from_bytes(digest[:8], "little") % (len(residues) - self._crop + 1)
            window = slice(start, start + self._crop)
        if window is not None:
            residues = residues[window]
            if self.labels is not None and self.labels.per_residue:
                labels = {name: values[window] for name, values in labels.items()}
        tokens = np.concatenate([[CLS], residues, [EOS]], dtype=np.uint8, casting="unsafe")
        return Example(record_id, tokens, labels, FIXED if epoch is None else f"{self._seed}:{epoch}")

    def id(self, n: int) -> str:
        """The id of example n, without its tokens."""
        record, start = self._origin(n)
        record_id, length = self.store.id(record), int(self.tokens[n]) - 2
        if self._start_E is None or length == self.store.lengths[record]:
            return record_id
        return f"{record_id}/{start + 1}-{start + length}"

    def length(self, n: int) -> int:
        """Residues of the record of example n."""
        return int(self.store.lengths[self._origin(n)[0]])

    def whole(self, n: int) -> npt.NDArray[np.uint8]:
        """Residue tokens of the record of example n, never cropped, uint8 [L]."""
        return self.store.residues(self._origin(n)[0])

    def blocks(self) -> npt.NDArray[np.int64] | None:
        """Which examples are no independent observations of each other, such as variants of one position: a number of
        each, int64 [E]. None where all stand for themselves.
        """
        block_N: npt.NDArray[np.int64] | None = getattr(self.labels, "block_N", None)
        if block_N is None or self._record_E is None:
            return block_N
        return block_N[self._record_E]

    def _origin(self, n: int) -> tuple[int, int]:
        """Record and first residue of an example."""
        record = n if self._record_E is None else int(self._record_E[n])
        return record, 0 if self._start_E is None else int(self._start_E[n])

    def _shorten(self, long: Long, most: int, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Residues of each example when records over `most` are dealt with."""
        over = np.flatnonzero(lengths > most)
        first = self.store.id(self._origin(int(over[0]))[0])
        if long == "error":
            raise InputError(
                f"{self.path}: record '{shown(first)}' has {lengths[over[0]]:,} residues, data.max_length is {most:,}; "
                "raise it, or set data.long to crop, window, full or skip"
            )
        if long == "crop":
            self._crop = most
            return np.minimum(lengths, most)
        count = f"{len(over):,} record{'s' if len(over) > 1 else ''} over {most:,} residues"
        more = ", ..." if len(over) > 1 else ""
        record_N = np.arange(len(lengths)) if self._record_E is None else self._record_E
        if long == "skip":
            if len(over) == len(lengths):
                raise InputError(f"{self.path}: every record is longer than data.max_length, {most:,}; raise it")
            self.notices.append(f"{count} left out ({shown(first)}{more})")
            self._record_E = record_N[lengths <= most]
            return lengths[lengths <= most]
        # As few windows as cover the record, evenly spread: neighbours overlap by about the same.
        windows = -(-lengths.astype(np.int64) // most)
        place_E = np.arange(windows.sum()) - np.repeat(np.cumsum(windows) - windows, windows)
        room_E = np.repeat(np.maximum(lengths - most, 0), windows)
        self._record_E = np.repeat(record_N, windows)
        self._start_E = place_E * room_E // np.maximum(np.repeat(windows, windows) - 1, 1)
        self.notices.append(f"{count} cut into {int(windows[over].sum()):,} windows ({shown(first)}{more})")
        return np.repeat(np.minimum(lengths, most), windows)


def digests(data: Examples, batches: Sequence[MicroBatch], epoch: int) -> dict[bytes, str]:
    """What tells the examples of some micro-batches from all others, with their ids; ghosts count for nothing.

    The number of an example is part of it, so that the same sequence under two ids is two.
    """
    numbers = (n for batch in batches if not batch.ghost for n in batch.records)
    examples = ((n, data.get(n, epoch)) for n in numbers)
    return {_digest(n, example): example.id for n, example in examples}


def _digest(number: int, example: Example) -> bytes:
    return hashlib.blake2b(f"{number} {example.id}\n".encode() + example.tokens.tobytes(), digest_size=16).digest()
