"""Golden values: a sample of the outputs of a model in a small file, with which later computations are compared."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from esmshard import __version__
from esmshard.errors import InputError
from esmshard.files import read_json, replacing
from esmshard.model.families.peer import Outputs
from esmshard.verify.comparison import Comparison, difference
from esmshard.vocab import VOCAB_SIZE

FORMAT, VERSION = "esmshard-golden", 1
TOLERANCE = 1e-4
"""The bound for golden values: ten times that of a certificate, since they come from other processors and versions of
torch, which add in another order. A wrong tensor changes more.
"""
LAYERS, PLACES, CHANNELS, PAIRS = 5, 4, 32, 32
"""The most layers, tokens of a protein, channels of an embedding, and contacts of a protein in a sample. With the
built-in proteins a file has about 70 KB, whatever the size of the model.
"""

Values = dict[str, dict[str, torch.Tensor]]
"""For `logits`, `contacts` and each layer of embeddings (its number as text): [places, channels] of each record."""


def sample(outputs: Mapping[str, Outputs], parts: Sequence[str]) -> Values:
    """Return a sample of the outputs of a model: layers, tokens and channels at even distances, both ends included.

    Args:
        outputs: the outputs by record.
        parts: the trained parts, `lm_head` and `contact_head`; outputs of other parts are left out.
    """
    found: Values = {}
    for name, one in outputs.items():
        places_P = _spread(len(one.tokens), PLACES)
        for layer in _spread(len(one.layers), LAYERS).tolist():
            x_TD = one.layers[layer]
            found.setdefault(str(layer), {})[name] = x_TD[places_P][:, _spread(x_TD.shape[1], CHANNELS)]
        if "lm_head" in parts:
            found.setdefault("logits", {})[name] = one.logits[places_P, :VOCAB_SIZE]
        if "contact_head" in parts and one.contacts is not None:
            pairs_N = one.contacts.flatten()
            found.setdefault("contacts", {})[name] = pairs_N[_spread(len(pairs_N), PAIRS)][:, None]
    return found


def _spread(count: int, most: int) -> torch.Tensor:
    """Return at most so many places of `count`, at even distances, the first and the last included."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).round().long()


def write(path: Path, facts: Mapping[str, Any], files: Sequence[Path], values: Values) -> None:
    """Write golden values as JSON, with seven digits each.

    Args:
        path: the file.
        facts: model, sha256 of its weights, versions and device, as in a certificate.
        files: the weight files. The revision of a repository is taken from their place in the hub's cache.
        values: see `sample`.
    """
    digits = {
        what: {name: [[float(f"{x:.7g}") for x in row] for row in x_PC.tolist()] for name, x_PC in of.items()}
        for what, of in values.items()
    }
    about = {"format": FORMAT, "version": VERSION, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        content = {**about, **facts, "revision": _revision(files), "values": digits}
        file.write(json.dumps(content, allow_nan=False) + "\n")


def _revision(files: Sequence[Path]) -> str | None:
    """Return the revision of a repository, which the hub's cache has as a directory; None for other files."""
    found = [file.parts[file.parts.index("snapshots") + 1] for file in files if "snapshots" in file.parts]
    return found[0] if found else None


def read(path: Path, architecture: Mapping[str, Any]) -> tuple[dict[str, Any], Values]:
    """Read golden values for a comparison with a model.

    Args:
        path: the file.
        architecture: that of the model, as in a certificate.

    Returns:
        The record of the model that they come from, and the values.

    Raises:
        InputError: the file cannot be read, or has golden values of a model of another architecture.
    """
    try:
        found = read_json(path)
        if not isinstance(found, dict) or (found.get("format"), found.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"it is no file of format {FORMAT}, version {VERSION}")
        model = found["model"]
        name, known, _ = model["name"], dict(model["architecture"]), model["files"].items()
        values = {
            str(what): {str(record): torch.tensor(rows, dtype=torch.float32) for record, rows in of.items()}
            for what, of in found["values"].items()
        }
        if not all(x_PC.ndim == 2 and x_PC.isfinite().all() for of in values.values() for x_PC in of.values()):
            raise ValueError("its values are no tables of finite numbers")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise InputError(f"{path}: not a file of golden values ({why}); name another file, or delete it") from None
    if known | {"window": None} != {**architecture, "window": None}:
        raise InputError(
            f"{path}: has golden values of {name}, a model of another architecture; name another file, which is then "
            "made"
        )
    return model, values


def compare(
    of: Mapping[str, Any], ours: Values, path: Path, model: Mapping[str, Any], theirs: Values
) -> tuple[list[Comparison], list[str]]:
    """Compare values with golden values.

    Args:
        of: the record of the model that was computed, as in a certificate.
        ours: its values.
        path: the file of golden values, for messages.
        model: the record of the model of the golden values; see `read`.
        theirs: the golden values.

    Returns:
        The comparisons, and a sentence for each quantity that only one side has.

    Raises:
        InputError: the golden values are of other proteins, or of other places.
    """
    against = "golden values" if _digests(of) == _digests(model) else "golden values, of other files"
    found = []
    for what in sorted(ours.keys() & theirs.keys()):
        mine, kept = ours[what], theirs[what]
        if mine.keys() != kept.keys() or any(mine[name].shape != kept[name].shape for name in mine):
            raise InputError(
                f"{path}: its values are of other proteins or places than those of esmshard {__version__}; name "
                "another file, which is then made"
            )
        layer = int(what) if what.isdecimal() else None
        pairs = [(name, mine[name], kept[name]) for name in mine]
        compared = difference(against, what if layer is None else "embeddings", layer, pairs)
        found.append(replace(compared, tolerance=TOLERANCE))
    alone = [
        f"golden values of {what}: {path if what in ours else 'the model'} has none"
        for what in sorted(ours.keys() ^ theirs.keys())
    ]
    return found, alone


def _digests(model: Mapping[str, Any]) -> list[str]:
    return sorted(str(entry["sha256"]) for entry in model["files"].values())
