"""Records without a result: a run goes on without them, and a table beside its output says which they are and why."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from esmshard import spreadsheet
from esmshard.files import replacing

COLUMNS = ("id", "length", "reason")


class Failure(NamedTuple):
    """A record for which there is nothing in the output."""

    id: str
    length: int
    """Residues."""
    reason: str
    """A clause for people."""


def failures_file(out: Path) -> Path:
    """Where the failures of an output are listed.

    >>> failures_file(Path("maps/x.npz")).as_posix()
    'maps/x.npz.failed.tsv'
    """
    return out.with_name(f"{out.name}.failed.tsv")


def write(out: Path, failures: Sequence[Failure]) -> None:
    """Write `OUT.failed.tsv`, in the order of the input; where nothing failed, remove one of an earlier run."""
    path = failures_file(out)
    if not failures:
        path.unlink(missing_ok=True)
        return
    # Ids hold no white space; reasons come from libraries, and may hold anything.
    rows = [COLUMNS, *((one.id, str(one.length), " ".join(one.reason.split())) for one in failures)]
    with replacing(path) as file:
        file.writelines(map(spreadsheet.tab_line, rows))
