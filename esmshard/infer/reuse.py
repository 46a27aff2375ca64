"""Rows of an earlier product: a sequence that it holds, computed in the same way, need not be computed again."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError, UsageError
from esmshard.infer.parts import DONE
from esmshard.infer.product import Product
from esmshard.infer.product_plan import Spec


class Reuse:
    """An earlier product, of which rows are taken.

    Args:
        path: of it.
        spec: of the new one.

    Raises:
        UsageError: its rows are none of those that are wanted.
        InputError: it is no product, or damaged.
    """

    def __init__(self, path: Path, spec: Spec) -> None:
        self._product = Product(path)
        theirs = self._product.spec
        names = {one.name for one in theirs.outputs}
        missing = [one.name for one in spec.outputs if one.name not in names]
        if missing:
            raise UsageError(f"--reuse {path}: holds {', '.join(sorted(names))}, and no {' and '.join(missing)}")
        alike = Spec(theirs.model_hash, spec.outputs, theirs.dim, theirs.dtype, theirs.compute, theirs.long)
        facts = self._product.manifest["facts"]
        if difference := spec.differs(alike, "", str(facts["model"])):
            raise UsageError(f"--reuse {path}: was made {difference}")
        self._names = [one.name for one in spec.outputs]
        self.damaged = 0
        """Rows that were not taken, because their bytes are not those that were written."""

    def rows(self, content_U16: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Where each content key is there, or -1, int64 [n]."""
        return self._product.index.rows_of(content_U16)

    def get(self, row: int, key_16: npt.NDArray[np.uint8]) -> Sequence[memoryview] | None:
        """The bytes of a row of that content key; None if it has no values as asked for, or was damaged since."""
        index = self._product.index
        try:
            part = index.part_of(row)
            reader, at = self._product.reader(part), row - index.bounds[part]
            values, key, status = reader.values(at), reader.marks("key")[at], reader.status_U[at]
        except (InputError, IndexError, ValueError):  # with an index that was damaged, too
            self.damaged += 1
            return None
        if not np.array_equal(key, key_16):
            self.damaged += 1
            return None
        if values is None or status != DONE:
            return None
        return [values[name].reshape(-1).view(np.uint8).data for name in self._names]
