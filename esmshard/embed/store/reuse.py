"""The reuse of rows: a sequence that an earlier embedding store holds with the same spec is not computed again."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from esmshard.embed.store.embedding_store import EmbeddingStore
from esmshard.embed.store.part_plan import Spec
from esmshard.embed.store.parts import DONE
from esmshard.errors import InputError, UsageError


class Reuse:
    """An earlier embedding store from which rows are copied.

    Args:
        path: the directory of the earlier store.
        spec: the spec of the new store.

    Raises:
        UsageError: if the earlier store has another spec.
        InputError: if the directory is no embedding store, or is damaged.
    """

    def __init__(self, path: Path, spec: Spec) -> None:
        self._product = EmbeddingStore(path)
        theirs = self._product.spec
        missing = [one.title for one in spec.outputs if one not in theirs.outputs]
        if missing:
            held = ", ".join(sorted(one.title for one in theirs.outputs))
            raise UsageError(f"--reuse {path}: holds {held}, and no {' and '.join(missing)}")
        alike = replace(theirs, outputs=spec.outputs)  # the earlier store may hold more outputs
        facts = self._product.manifest["facts"]
        if difference := spec.differs(alike, "", str(facts["model"])):
            raise UsageError(f"--reuse {path}: was made {difference}")
        self._names = [one.name for one in spec.outputs]
        self.damaged = 0
        """The number of rows that were not copied, because their bytes are not those that were written."""

    def rows(self, content_U16: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Return the row of each content key, or -1, int64 [n]."""
        return self._product.index.rows_of(content_U16)

    def get(self, row: int, key_16: npt.NDArray[np.uint8]) -> Sequence[memoryview] | None:
        """Return the bytes of the row with a content key; None if the row lacks the requested values or is damaged."""
        index = self._product.index
        try:
            part = index.part_of(row)
            reader, at = self._product.reader(part), row - index.bounds[part]
            values, key, status = reader.values(at), reader.marks("key")[at], reader.status_U[at]
        except (InputError, IndexError, ValueError):  # a damaged index raises the last two
            self.damaged += 1
            return None
        if not np.array_equal(key, key_16):
            self.damaged += 1
            return None
        if values is None or status != DONE:
            return None
        return [values[name].reshape(-1).view(np.uint8).data for name in self._names]
