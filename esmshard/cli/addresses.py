"""Addresses in buckets on the command line: which arguments of which commands they may be.

Inputs are copied into the local cache first. Results of commands that write them at their end are written on this
machine and then uploaded. `embed` uploads while it computes (`esmshard.embed.job.remote_output`).
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from esmshard.errors import UsageError

READ = {
    "predict": ("data",),
    "score": ("sequences", "table"),
    "evaluate": ("data", "labels"),
    "ingest": ("fasta", "verify"),
    "split": ("data", "sets", "clusters", "wild_type"),
    "track": ("structures", "weights"),
    "consolidate": ("source",),
    "finetune": ("resume",),
}
"""The arguments of each command that are copied before it runs."""
UPLOADED = ("ingest", "split", "track", "consolidate", "predict", "score", "evaluate", "report")
"""The commands whose `-o` is uploaded when they have ended."""
OWN = {
    "embed": ("model", "fasta", "reuse", "out"),
    "predict": ("model",),
    "score": ("model", "ensemble"),
    "evaluate": ("model",),
    "push": ("model",),
}
"""The arguments of which the code of a command knows that they may be addresses."""


def with_addresses(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take addresses in buckets where it can, and refuse them in one sentence elsewhere."""
    name = command.__name__

    @functools.wraps(command)
    def run(**values: Any) -> None:
        if not any(_is_address(value) for value in values.values()):
            return command(**values)
        return _with_addresses(command, name, values)

    return run


def _is_address(value: Any) -> bool:
    return any(str(one).startswith(("s3:/", "gs:/")) for one in (value if isinstance(value, list) else [value]))


def _with_addresses(command: Callable[..., None], name: str, values: dict[str, Any]) -> None:
    from esmshard import remote

    for key, value in values.items():
        if not _is_address(value) or key in OWN.get(name, ()) or (key == "out" and name in UPLOADED):
            continue
        if key not in READ.get(name, ()):
            url = remote.address(value[0] if isinstance(value, list) else value)
            raise UsageError(
                f"{url}: `esmshard {name}` takes no address in a bucket for {key.replace('_', ' ')}; name a path on a "
                "disk, and copy it with `aws s3 sync` or `gcloud storage rsync`"
            )
        copies = [remote.local(one) for one in (value if isinstance(value, list) else [value])]
        values[key] = copies if isinstance(value, list) else type(value)(copies[0])
    out = values.get("out")
    if out is None or name not in UPLOADED or (url := remote.address(out)) is None:
        return command(**values)
    left: list[typer.Exit | SystemExit] = []

    def write(path: Path) -> None:
        try:
            command(**{**values, "out": path})
        except (typer.Exit, SystemExit) as leaving:  # the result is written, as with --strict
            left.append(leaving)

    remote.write_at(url, bool(values.get("overwrite")), write)
    if left:
        raise left[0]
