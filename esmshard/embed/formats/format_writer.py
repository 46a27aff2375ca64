"""The base class of the file formats: rows are added one by one, and a file gets its name when it is complete.

The memory of a writer does not grow with the number of records, except for a header that must be complete.
"""

import importlib
import os
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from esmshard.embed.compute.outputs import NUMPY, POOLS, About, Dtype, Pool, Row
from esmshard.errors import UsageError
from esmshard.predict.writers import Writer, check


class FormatWriter(Writer):
    """A writer that collects rows under a temporary name beside `out`.

    `add` is called `about.n_records` times, in input order.
    """

    default_pool: ClassVar[Pool]
    """The pool that is computed without `--pool`."""
    pools: ClassVar[tuple[Pool, ...]] = POOLS
    """The pools that the format can hold."""
    dtypes: ClassVar[tuple[Dtype, ...]] = ("fp32", "fp16")
    """The dtypes that the format can hold. numpy, HDF5 and Arrow have no bfloat16."""
    several: ClassVar[bool] = True
    """Whether the format can hold more than one output."""
    by_sequence: ClassVar[bool] = False
    """Whether rows are stored by their sequences, so that each sequence is stored once, with its first id."""
    exact: ClassVar[bool] = True
    """Whether the bytes of numbers and ids in the file are known in advance, and not only bounded."""
    extra: ClassVar[tuple[str, str] | None] = None
    """The module that writes the format, and the extra of this package that installs the module."""

    def __init__(self, out: Path, about: About) -> None:
        self.require(out)
        super().__init__(out)
        self.about = about
        self.work = out.with_name(f".tmp-{os.getpid()}-{out.name}")
        self.attributes: dict[str, Any] = {**about.attributes, "records": about.n_records, "dim": about.dim}
        self.n = 0
        """The number of rows so far. While a row is written, this is its number, counted from 0."""

    @classmethod
    def number_bytes(cls, dtype: Dtype) -> int:
        """Return the bytes of a number in the file; the most bytes, if the numbers differ in this."""
        return np.dtype(NUMPY[dtype]).itemsize

    @classmethod
    def require(cls, out: Path) -> Any:
        """Return the library, or raise a `UsageError` that says how to install it."""
        if cls.extra is None:
            return None
        module, extra = cls.extra
        try:
            return importlib.import_module(module)
        except ImportError:
            raise UsageError(f"{out}: writing it needs {module}; pip install 'esmshard[{extra}]'") from None

    @classmethod
    def check_place(cls, out: Path, *, overwrite: bool) -> None:
        """Refuse to replace an existing file without `overwrite`."""
        check(out, overwrite=overwrite)

    @classmethod  # most formats have no limit
    def check_size(cls, out: Path, outputs: int, records: int, id_bytes: int) -> None:
        """Refuse more records, or longer ids, than a file can hold. Counted are the outputs, the records, and the bytes
        of all ids.
        """

    def add(self, row: Row) -> None:
        """Write one record."""
        for output in self.about.outputs:
            values = row.values[output.name]
            assert values.dtype == NUMPY[self.about.dtype], f"{row.id}: {output.name} is {values.dtype}"
            assert not output.pooled or values.shape == (self.about.dim,), f"{row.id}: {output.name} is {values.shape}"
        self.write(row)
        self.n += 1

    @abstractmethod
    def write(self, row: Row) -> None:
        """Write a row that `add` has checked."""

    def finish(self) -> None:
        """Check the number of rows. Formats write their remaining data after that."""
        assert self.n == self.about.n_records, f"{self.n} rows came, {self.about.n_records} were announced"
