"""What the file formats of embeddings share: rows go in one by one, and a file gets its name when it is whole.

Whatever a writer needs in memory does not grow with the number of records, but for a header that has to be whole.
"""

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from esmshard.errors import UsageError
from esmshard.infer.outputs import NUMPY, POOLS, About, Dtype, Output, Pool, Row
from esmshard.infer.writers import check


class FormatWriter(ABC):
    """Collects rows under a temporary name beside `out`.

    A context manager: leaving it without an error puts the file in place, leaving it with one removes what was written
    and lets alone what was there before. `add` is called `about.n_records` times, in input order.
    """

    default_pool: ClassVar[Pool]
    """Computed where `--pool` is not given."""
    pools: ClassVar[tuple[Pool, ...]] = POOLS
    """That the format has a place for."""
    dtypes: ClassVar[tuple[Dtype, ...]] = ("fp32", "fp16")
    """Of the numbers that it can hold. numpy, HDF5 and Arrow have no bfloat16."""
    several: ClassVar[bool] = True
    """Whether it holds more than one output."""
    extra: ClassVar[tuple[str, str] | None] = None
    """Module that writes it, and the extra of this package that installs the module."""

    def __init__(self, out: Path, about: About) -> None:
        self.require(out)
        self.out, self.about = out, about
        self.work = out.with_name(f".tmp-{os.getpid()}-{out.name}")
        self.attributes: dict[str, Any] = {**about.attributes, "records": about.n_records, "dim": about.dim}
        self.n = 0
        """Rows so far; while one is written, its number counted from 0."""
        out.parent.mkdir(parents=True, exist_ok=True)

    @classmethod
    def require(cls, out: Path) -> Any:
        """The library, or a `UsageError` that says how it is installed."""
        if cls.extra is None:
            return None
        module, extra = cls.extra
        try:
            return importlib.import_module(module)
        except ImportError:
            raise UsageError(f"{out}: writing it needs {module}; pip install 'esmshard[{extra}]'") from None

    @classmethod
    def check_place(cls, out: Path, *, overwrite: bool) -> None:
        """Refuse to replace what is there unless told to."""
        check(out, overwrite=overwrite)

    @classmethod
    @abstractmethod
    def overhead(cls, outputs: Sequence[Output], row: int, records: int, residues: int, id_bytes: int) -> int:
        """Bytes of the file beside the numbers, as measured.

        Args:
            outputs: that it holds.
            row: bytes of a vector of D numbers.
            records: number of them.
            residues: of all records together.
            id_bytes: of all ids together, in UTF-8.
        """

    @abstractmethod
    def open(self) -> None:
        """Make the temporary file."""

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
        """What `add` does of a row that is as announced."""

    def finish(self) -> None:  # noqa: B027  # most formats have nothing left to do
        """Write what is left when all rows have come."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the temporary file, whole or not."""

    def commit(self) -> None:
        """Give the finished file its name."""
        self.work.replace(self.out)

    def discard(self) -> None:
        """Remove whatever is left under temporary names."""
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
