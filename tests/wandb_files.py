"""What a run at W&B holds, read from its files by the format of their log: LevelDB's, with a header of its own."""

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 32768


@dataclass
class Offline:
    """Of one file `run-ID.wandb`."""

    id: str = ""
    project: str = ""
    name: str = ""
    group: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of what W&B adds, whose names begin with `_`, only the step."""
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None


def offline(run: Path) -> list[Offline]:
    """Every file of a run directory, in the order of their making."""
    return [read(path) for path in sorted(run.glob("wandb/offline-run-*/run-*.wandb"))]


def read(path: Path) -> Offline:
    from wandb.proto.wandb_internal_pb2 import Record

    found = Offline()
    for data in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.id, found.project = record.run.run_id, record.run.project
            found.name, found.group = record.run.display_name, record.run.run_group
            _update(found.config, record.run.config.update)
        elif kind == "config":
            _update(found.config, record.config.update)
        elif kind == "history":
            row: dict[str, Any] = {}
            _update(row, record.history.item)
            found.rows.append({k: v for k, v in row.items() if k == "_step" or not k.startswith("_")})
        elif kind == "summary":
            _update(found.summary, record.summary.update)
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def _update(content: dict[str, Any], items: Any) -> None:
    for item in items:
        key = item.key or "/".join(item.nested_key)
        content[key] = json.loads(item.value_json)


def _records(data: bytes) -> list[bytes]:
    assert data[:4] == b":W&B"
    place, found, parts = 7, [], b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:  # too short for a header: filled with zeros
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(parts)
            parts = b""
    return found
