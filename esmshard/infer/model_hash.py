"""One name for a model's weights, wherever its files lie."""

import hashlib
import json
from dataclasses import asdict

from esmshard.files import remembered_sha256
from esmshard.model.weights import Weights


def model_hash(found: Weights) -> str:
    """sha256 over the hashes of the weight files and the architecture, as hexadecimal digits.

    Files that are copied or renamed keep it.
    """
    hashes = sorted(remembered_sha256(file) for file in found.files)
    known: dict[str, object] = {"config": asdict(found.config), "seed": found.seed, "files": hashes}
    if found.made:
        known["made"] = found.made
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
