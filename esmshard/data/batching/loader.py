"""Makes the examples of a data set: records with labels and tracks, cropped as the recipe says."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from esmshard.data.batching.packing import MicroBatch
from esmshard.data.tracks import RecordTracks
from esmshard.errors import InputError
from esmshard.io.store import linker_of
from esmshard.io.symbols import JOINED, ChainWindows, chain_windows, shown
from esmshard.vocab import CLS, EOS, chain_spans, is_residue

Long = Literal["crop", "window", "full", "skip", "error"]

FIXED = "fixed"
"""The value of `Example.draw` outside training."""
SEEN = "seen_in_training.txt"
"""The file in a model directory that lists the ids of the training and validation records, one per line. A prediction
for one of these records does not test the model.
"""


class Labels(Protocol):
    """The labels of all records of a store. `labels[n]` is a mapping from name to array for record n."""

    @property
    def per_residue(self) -> bool:
        """Whether arrays have a value for each residue, [L, ...], and are cropped together with the sequence."""

    @property
    def labelled_N(self) -> npt.NDArray[np.bool_] | None:
        """Whether each record has labels, bool [N]; None if all records have labels."""

    def __getitem__(self, n: int) -> Mapping[str, npt.NDArray[Any]]: ...


class Store(Protocol):
    """A store of N records, such as a `TokenStore` or `VariantRecords`."""

    notices: list[str]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """The number of residues of each record, int32 [N]."""

    @property
    def manifest(self) -> dict[str, Any]:
        """Facts about the store by name. The fact `residues` is the total number of residues."""

    @property
    def digest(self) -> str:
        """A hash of all sequences in their order."""

    def __len__(self) -> int: ...

    def id(self, n: int) -> str:
        """Return the id of record n."""

    def residues(self, n: int) -> npt.NDArray[np.uint8]:
        """Return the residues of record n as tokens, uint8 [L]."""


@dataclass(frozen=True)
class Example:
    """The tokens, labels and tracks of a record or of a part of a record."""

    id: str
    tokens: npt.NDArray[np.uint8]
    """The tokens `<cls>`, L residues and `<eos>`, uint8 [L + 2]."""
    labels: Mapping[str, npt.NDArray[Any]]
    """The label arrays by name, for the whole protein or for each residue, [L, ...]."""
    draw: str = FIXED
    """The random seed: `SEED:EPOCH` in training, FIXED otherwise. Random choices depend on `draw` and `id`."""
    tracks: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """The track values of all tokens, [L + 2, ...], by track name."""


class Examples:
    """The E examples of a data set. An example is a record, or a crop or window of a long record.

    Args:
        name: the name of the set for messages, such as `train`.
        path: the file of the records, for messages.
        store: the N records of the file.
        labels: the labels of the N records; None if there are no labels.
        long: how records with more than `max_length` residues are treated; see the recipe key `data.long`.
        max_length: the maximum number of residues of an example; None means no limit.
        seed: the random seed of the recipe. Crops depend on seed, epoch and id, never on rank or batch.
        members_N: whether each record belongs to the set, bool [N]; by default true for all records.
        digest: a hash of the sequences, their order and `members_N`; by default the digest of the store.
        apart: whether the model reads each chain of a record as a separate sequence. If true, `max_length` is the
            maximum length of a chain, not of a record.

    Raises:
        InputError: a record is longer than `max_length` and `long` is `error`; or the linkers of a record leave no
            room for its chains in `max_length`; or no record is left.
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
        apart: bool = False,
    ) -> None:
        self.name, self.path, self.store = name, path, store
        self._digest = digest
        about_records = [notice for notice in store.notices if not (apart and notice.startswith(JOINED))]
        self.notices = [*about_records, *getattr(labels, "notices", ())]
        """Sentences about changed or left-out records and labels."""
        self.labels = labels
        self.tracks: RecordTracks | None = None
        self._seed = seed
        self._long: Long = "full"
        self._max_length = 0  # the maximum length of a crop or window; 0 if no record is cut
        self._chained = linker_of(store.manifest) is not None
        longest_N, tokens_N = _of_chains(store) if apart else (store.lengths, None)
        taken_N = np.ones(len(store), dtype=np.bool_) if members_N is None else members_N
        if labels is not None and labels.labelled_N is not None:
            taken_N = taken_N & labels.labelled_N
        # The record and window of each example. A range and a broadcast number need little memory.
        self._record_E: range | npt.NDArray[np.int64] = range(len(store))
        length_E: npt.NDArray[np.int32] = longest_N
        if not taken_N.all():
            self._record_E = np.flatnonzero(taken_N)
            length_E = longest_N[self._record_E]
            if not len(length_E):
                raise InputError(f"{path}: no {name} record has a label; add labels, or choose another file")
        self._window_E: npt.NDArray[np.int64] = np.broadcast_to(np.int64(0), len(length_E))
        if max_length is not None and long != "full" and int(length_E.max()) > max_length:
            length_E = self._shorten(long, max_length, length_E)
        self.tokens: npt.NDArray[np.int32] = length_E + np.int32(2) if tokens_N is None else tokens_N[self._record_E]
        """The number of tokens of each example after cropping, with `<cls>` and `<eos>`, int32 [E]."""
        self.beside = 0
        """How many tokens each micro-batch has in addition to the tokens of its examples: for variants, the tokens of
        the wild type; otherwise 0."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def digest(self) -> str:
        """A hash of the records of this set, their order and their tracks."""
        digest = self._digest or self.store.digest
        if self.tracks is None:
            return digest
        return hashlib.sha256(f"{digest} {self.tracks.digest}".encode()).hexdigest()

    def add_tracks(self, tracks: RecordTracks) -> None:
        """Add tracks to all examples, and add notices about the tracks."""
        self.tracks = tracks
        self.notices += tracks.notices(np.unique(self._record_E))

    def get(self, n: int, epoch: int | None = None) -> Example:
        """Return example n of an epoch. If `epoch` is None, records are not cropped, but windows are still cut.

        A crop or window begins with `<cls>` and ends with `<eos>`, even inside the protein.
        """
        record = int(self._record_E[n])
        record_id, residues = self.id(n), self.store.residues(record)
        labels = {} if self.labels is None else self.labels[record]
        part: slice | npt.NDArray[np.int64] = slice(None)
        draw = f"{self._seed}:{epoch}"
        windows = None if self._long == "crop" and epoch is None else self._windows(record)
        if windows is not None:
            if self._long == "window":
                starts = windows.spread(int(self._window_E[n]))
            else:
                starts = windows.drawn(f"{draw}:{record_id}")
            part = windows.kept(starts)
            residues = residues[part]
            if self.labels is not None and self.labels.per_residue:
                labels = {name: values[part] for name, values in labels.items()}
        tokens = np.concatenate([[CLS], residues, [EOS]], dtype=np.uint8, casting="unsafe")
        tracks = {} if self.tracks is None else self.tracks.get(record, part)
        return Example(record_id, tokens, labels, FIXED if epoch is None else draw, tracks)

    def id(self, n: int) -> str:
        """Return the id of example n. The id of a window also has its range of residues: `P01308/1-30`."""
        record = int(self._record_E[n])
        record_id = self.store.id(record)
        windows = self._windows(record) if self._long == "window" else None
        if windows is None:
            return record_id
        return f"{record_id}/{windows.name(windows.spread(int(self._window_E[n])))}"

    def length(self, n: int) -> int:
        """Return the number of residues in the uncropped record of example n, without linkers."""
        record = int(self._record_E[n])
        return int(is_residue(self.store.residues(record)).sum() if self._chained else self.store.lengths[record])

    def whole(self, n: int) -> npt.NDArray[np.uint8]:
        """Return the tokens of the uncropped record of example n, uint8 [L], without `<cls>` and `<eos>`."""
        return self.store.residues(int(self._record_E[n]))

    def blocks(self) -> npt.NDArray[np.int64] | None:
        """Return the block number of each example, int64 [E]; None without blocks. The bootstrap resamples a block as a
        unit. Variants that change the same positions are in one block.
        """
        block_N: npt.NDArray[np.int64] | None = getattr(self.labels, "block_N", None)
        return None if block_N is None else block_N[self._record_E]

    def _windows(self, record: int) -> ChainWindows | None:
        """Return the windows of a record; None if the record is not cut."""
        if not self._max_length or (length := int(self.store.lengths[record])) <= self._max_length:
            return None
        if self._chained:
            return chain_windows(self.store.residues(record), self._max_length)
        return ChainWindows(((0, length),), (self._max_length,))

    def _shorten(self, long: Long, max_length: int, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Crop, cut or leave out (`long`) records over `max_length` residues. Return the length of each example [E]."""
        over = np.flatnonzero(lengths > max_length)
        first = self.store.id(int(self._record_E[over[0]]))
        if long == "error":
            raise InputError(
                f"{self.path}: record '{shown(first)}' has {lengths[over[0]]:,} residues, data.max_length is "
                f"{max_length:,}; raise data.max_length, or set data.long to crop, window, full or skip"
            )
        record_E = np.asarray(self._record_E)
        count = f"{len(over):,} record{'s' if len(over) > 1 else ''} over {max_length:,} residues"
        more = ", ..." if len(over) > 1 else ""
        if long == "skip":
            if len(over) == len(lengths):
                raise InputError(f"{self.path}: every record is longer than data.max_length, {max_length:,}; raise it")
            self.notices.append(f"{count} left out ({shown(first)}{more})")
            self._record_E = record_E[lengths <= max_length]
            self._window_E = self._window_E[: len(self._record_E)]
            return lengths[lengths <= max_length]
        self._long, self._max_length = long, max_length
        windows = -(-lengths.astype(np.int64) // max_length)
        for k in over.tolist() if self._chained else ():
            try:
                windows[k] = chain_windows(self.store.residues(int(record_E[k])), max_length).count
            except InputError as error:  # The linkers leave no room for the chains.
                name = shown(self.store.id(int(record_E[k])))
                raise InputError(f"{self.path}: record '{name}': data.max_length: {error}") from None
        if long == "window":
            self._record_E = np.repeat(record_E, windows)
            self._window_E = np.arange(windows.sum()) - np.repeat(np.cumsum(windows) - windows, windows)
            self.notices.append(f"{count} cut into {int(windows[over].sum()):,} windows ({shown(first)}{more})")
            lengths = np.repeat(lengths, windows)
        return np.minimum(lengths, max_length)


def _of_chains(store: Store) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the length of the longest chain, and the number of tokens of all chains, of each record, int32 [N]."""
    chains = [[end - start for start, end in chain_spans(store.residues(n))] for n in range(len(store))]
    tokens = [sum(lengths) + 2 * len(lengths) for lengths in chains]
    return np.array(list(map(max, chains)), dtype=np.int32), np.array(tokens, dtype=np.int32)


def digests(data: Examples, batches: Sequence[MicroBatch], epoch: int) -> dict[bytes, str]:
    """Return a dict from hash to id of each example in `batches`. The hash is of the index, id and tokens of the
    example. Dummy micro-batches are left out.
    """
    id_of: dict[bytes, str] = {}
    for n in (n for batch in batches if not batch.is_dummy for n in batch.records):
        example = data.get(n, epoch)
        text = f"{n} {example.id}\n".encode() + example.tokens.tobytes()
        id_of[hashlib.blake2b(text, digest_size=16).digest()] = example.id
    return id_of
