"""Records with their labels, cropped as the recipe says, ready for a task to collate."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from esmshard.data.store import TokenStore
from esmshard.errors import InputError
from esmshard.vocab import CLS, EOS

Long = Literal["crop", "full", "error"]


class Labels(Protocol):
    """Per-residue arrays of record n, first dimension L, by name."""

    def __getitem__(self, n: int) -> Mapping[str, npt.NDArray[np.float32]]: ...


@dataclass(frozen=True)
class Example:
    """One record as a task sees it."""

    id: str
    tokens: npt.NDArray[np.uint8]
    """`<cls> ... <eos>`, uint8 [L + 2]."""
    labels: Mapping[str, npt.NDArray[np.float32]]
    """Arrays of first dimension L, cropped with the tokens."""


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
    """

    def __init__(
        self,
        name: str,
        path: Path,
        store: TokenStore,
        labels: Labels | None,
        *,
        long: Long = "full",
        max_length: int | None = None,
        seed: int = 0,
    ) -> None:
        self.name, self.path, self.store = name, path, store
        self._labels, self._seed = labels, seed
        self._max_length = max_length if long == "crop" else None
        residues = store.lengths
        if long == "error" and max_length is not None and (residues > max_length).any():
            n = int(np.argmax(residues > max_length))
            raise InputError(
                f"{path}: record '{store.ids[n]}' has {residues[n]} residues, data.max_length is {max_length}; "
                "raise it, or set data.long to crop or full"
            )
        cut = residues if self._max_length is None else np.minimum(residues, self._max_length)
        self.tokens: npt.NDArray[np.int64] = cut + 2
        """Tokens of each record after cropping, `<cls>` and `<eos>` counted, int64 [N]."""

    def __len__(self) -> int:
        return len(self.store)

    def get(self, n: int, epoch: int | None = None) -> Example:
        """Record n: whole, or as it is trained on in an epoch.

        A crop keeps `<cls>` and `<eos>`, although its ends are no protein ends: every sequence of a batch has them.
        """
        record_id, residues = self.store.ids[n], self.store.residues(n)
        labels = {} if self._labels is None else self._labels[n]
        if epoch is not None and self._max_length is not None and len(residues) > self._max_length:
            digest = hashlib.sha256(f"{self._seed}:{epoch}:{record_id}".encode()).digest()
            start = int.from_bytes(digest[:8], "little") % (len(residues) - self._max_length + 1)
            window = slice(start, start + self._max_length)
            residues, labels = residues[window], {name: values[window] for name, values in labels.items()}
        tokens = np.concatenate([[CLS], residues, [EOS]], dtype=np.uint8, casting="unsafe")
        return Example(record_id, tokens, labels)
