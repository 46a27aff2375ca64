"""Records without a result. A run continues without them, and a table beside its output lists them with the reasons."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from esmshard.files import replacing

COLUMNS = ("id", "length", "reason")


class Failure(NamedTuple):
    """A record that is missing in the output."""

    id: str
    length: int
    """The number of residues."""
    reason: str
    """The reason of the failure, as a clause for users."""


def failures_file(out: Path) -> Path:
    """Return the path of the list of an output's failures.

    >>> failures_file(Path("maps/x.npz")).as_posix()
    'maps/x.npz.failed.tsv'
    """
    return out.with_name(f"{out.name}.failed.tsv")


def write(out: Path, failures: Sequence[Failure]) -> None:
    """Write `OUT.failed.tsv`, in the order of the input. If nothing failed, remove the file of an earlier run."""
    path = failures_file(out)
    if not failures:
        path.unlink(missing_ok=True)
        return
    # Ids have no white space; reasons come from libraries, and may have any.
    rows = [COLUMNS, *((one.id, str(one.length), " ".join(one.reason.split())) for one in failures)]
    with replacing(path) as file:
        file.writelines("\t".join(row) + "\n" for row in rows)
