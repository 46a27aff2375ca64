"""The hash that identifies a model's weights, independent of their location."""

import hashlib
import json
from dataclasses import asdict

from esmshard.files import remembered_sha256
from esmshard.model.weights.open_weights import Weights


def model_hash(found: Weights) -> str:
    """Return the sha256, in hexadecimal digits, over the hashes of the weight files and the architecture.

    Copied or renamed files keep their hash.
    """
    hashes = sorted(remembered_sha256(file) for file in found.files)
    known: dict[str, object] = {"config": asdict(found.config), "seed": found.seed, "files": hashes}
    if found.made:
        known["made"] = found.made
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
