"""One name for a model's weights, wherever its files lie."""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from esmshard.data.store import cache_directory, sha256
from esmshard.model.weights import Weights


def model_hash(found: Weights) -> str:
    """sha256 over the hashes of the weight files and the architecture, as hexadecimal digits.

    Files that are copied or renamed keep it. Their hashes are remembered in the user's cache by path, size and time of
    change, so that a model of 60 GB is read once and not by each worker.
    """
    hashes = sorted(_hash(file) for file in found.files)
    known: dict[str, object] = {"config": asdict(found.config), "seed": found.seed, "files": hashes}
    if found.made:
        known["made"] = found.made
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _hash(file: Path) -> str:
    stat = file.stat()
    name = f"{file.resolve()}/{stat.st_size}/{stat.st_mtime_ns}"
    known = cache_directory() / "hashes" / hashlib.sha256(name.encode()).hexdigest()[:32]
    try:
        text = known.read_text(encoding="ascii")
        if len(text) == 64:
            return text
    except OSError:
        pass
    digest = sha256(file)
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        scratch = known.with_name(f"{known.name}.{os.getpid()}")
        scratch.write_text(digest, encoding="ascii")
        scratch.replace(known)
    except OSError:  # a cache that cannot be written to costs time only
        pass
    return digest
