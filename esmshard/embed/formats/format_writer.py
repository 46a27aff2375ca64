"""The base class of the file formats: rows are added one by one, and a file gets its name when it is complete.

The memory of a writer does not grow with the number of records, except for a header that must be complete.
"""

import importlib
import os
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from esmshard.embed.compute.outputs import NUMPY, POOLS, About, Dtype, Pool, Row
from esmshard.errors import UsageError
from esmshard.predict.writers import check


class FormatWriter(ABC):
    """A writer that collects rows under a temporary name beside `out`.

    It is a context manager. A block that ends without an error puts the file in place. A block that ends with an error
    removes the temporary file, and leaves an older file unchanged. `add` is called `about.n_records` times, in input
    order.
    """

    default_pool: ClassVar[Pool]
    """The pool that is computed without `--pool`."""
    pools: ClassVar[tuple[Pool, ...]] = POOLS
    """The pools that the format can hold."""
    dtypes: ClassVar[tuple[Dtype, ...]] = ("fp32", "fp16")
    """The dtypes that the format can hold. numpy, HDF5 and Arrow have no bfloat16."""
    several: ClassVar[bool] = True
    """Whether the format can hold more than one output."""
    extra: ClassVar[tuple[str, str] | None] = None
    """The module that writes the format, and the extra of this package that installs the module."""

    def __init__(self, out: Path, about: About) -> None:
        self.require(out)
        self.out, self.about = out, about
        self.work = out.with_name(f".tmp-{os.getpid()}-{out.name}")
        self.attributes: dict[str, Any] = {**about.attributes, "records": about.n_records, "dim": about.dim}
        self.n = 0
        """The number of rows so far. While a row is written, this is its number, counted from 0."""
        out.parent.mkdir(parents=True, exist_ok=True)

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

    @classmethod  # noqa: B027  # most formats have no limit
    def check_size(cls, out: Path, outputs: int, records: int, id_bytes: int) -> None:
        """Refuse more records, or longer ids, than a file can hold. Counted are the outputs, the records, and the bytes
        of all ids.
        """

    @abstractmethod
    def open(self) -> None:
        """Create the temporary file."""

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

    def finish(self) -> None:  # noqa: B027  # most formats have nothing to do here
        """Write the remaining data after the last row."""

    @abstractmethod
    def close(self) -> None:
        """Close the temporary file, whether complete or not."""

    def commit(self) -> None:
        """Give the finished file its name."""
        self.work.replace(self.out)

    def discard(self) -> None:
        """Remove all files under temporary names."""
        self.work.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            try:
                if kind is None:
                    assert self.n == self.about.n_records, f"{self.n} rows came, {self.about.n_records} were announced"
                    self.finish()
            finally:
                self.close()
            if kind is None:
                self.commit()
        finally:
            self.discard()
