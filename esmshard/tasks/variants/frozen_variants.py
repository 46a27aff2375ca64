"""Features of variants from a frozen model, for linear models. They are computed once for all folds and seeds of a
table.
"""

import hashlib
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from esmshard.batch import pack, pack_variants
from esmshard.files import cache_directory
from esmshard.model.threads import packs_at_once, side_by_side
from esmshard.progress import Progress
from esmshard.tasks.base import Inputs, batch_of
from esmshard.tasks.variants.variant_head import Pool, VariantHead, log_odds

if TYPE_CHECKING:
    from esmshard.tasks.finetuner import FineTuner

PACKED = 4096
"""Tokens that go through the model at once."""
FEWEST = 64
"""Variants from which on it is worth keeping what was computed."""


def frozen(
    base: "FineTuner",
    wild_type: npt.NDArray[np.uint8],
    variants: Sequence[npt.NDArray[np.uint8]],
    pool: Pool,
    tracks: Mapping[str, npt.NDArray[Any]] | None = None,
) -> npt.NDArray[np.float32]:
    """Compute the vectors of `VariantHead` without its LayerNorm and without probabilities, float32 [N, F].

    They are kept in the cache directory, under what the model says of the wild type, so that the runs of a
    cross-validation compute them once, unless several ranks compute the model together. (A file that cannot be read is
    made anew.)

    Args:
        base: the model before the first step.
        wild_type: tokens of the protein, `<cls> ... <eos>`.
        variants: of each variant.
        pool: `sites` or `mean`.
        tracks: of the wild type and of each variant, [L + 2, ...] by name.
    """
    known, paths, alone = base.remembered[pool], base.remembered["files"], base.trunk.shared_on is None
    if alone and pool not in paths:
        with torch.no_grad():
            batch = pack([wild_type], tracks=[tracks or {}]).to(base.device)
            x_TD = base.trunk(batch).representations[base.trunk.config.n_layers]
        key = hashlib.sha256(f"1 {pool} ".encode() + wild_type.tobytes() + x_TD.float().cpu().numpy().tobytes())
        paths[pool] = cache_directory() / "variants" / f"{key.hexdigest()[:32]}.npz"
        known |= _read(paths[pool])
    names = [variant.tobytes() for variant in variants]
    new = [n for n, name in enumerate(names) if name not in known]
    head = VariantHead(base.trunk.config.dim, 0, np.ones(1, np.float32), pool, 0.0, zero_shot=False)
    each = max(1, PACKED // len(wild_type))
    parts = [new[n : n + each] for n in range(0, len(new), each)]

    def one(part: list[int]) -> npt.NDArray[np.float32]:
        batch = pack_variants([variants[n] for n in part], wild_type, tracks=tracks).to(base.device)
        x_TD = base.trunk(batch).representations[base.trunk.config.n_layers].float()
        x_NF: npt.NDArray[np.float32] = head.features(x_TD, batch, None).cpu().numpy()
        return x_NF

    at_once = max(1, 4 * packs_at_once(base.device))
    with Progress("frozen model", len(new), show=alone and len(new) >= FEWEST) as progress:
        for first in range(0, len(parts), at_once):
            some = parts[first : first + at_once]
            for part, x_NF in zip(some, side_by_side(one, some, base.device, threads=alone), strict=True):
                known |= {names[n]: x_F for n, x_F in zip(part, x_NF, strict=True)}
            progress.update(min(len(new), (first + at_once) * each), "")
    if alone and len(new) >= FEWEST:
        _write(paths[pool], known)
    return np.stack([known[name] for name in names])


def seen_by(head: VariantHead, base: "FineTuner", inputs: Sequence[Inputs]) -> npt.NDArray[np.float32]:
    """Compute what the layers of a linear head see of some variants, [N, F], with the zero-shot score as the last
    column.
    """
    with torch.no_grad():
        batch = batch_of(inputs).to(base.device)
        said = base.trunk(batch, logits_at=batch.logits_at_P)
        x_TD = head.norm(said.representations[base.trunk.config.n_layers].float())
        x_NF = head.features(x_TD, batch, said.logits_PV)
        if said.logits_PV is not None:
            x_NF = torch.cat([x_NF, log_odds(said.logits_PV, batch)[:, None]], 1)
        found: npt.NDArray[np.float32] = x_NF.cpu().numpy()
    return found


def _read(path: Path) -> dict[bytes, npt.NDArray[np.float32]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name.tobytes(): x_F for name, x_F in zip(file["tokens"], file["features"], strict=True)}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return {}


def _write(path: Path, known: dict[bytes, npt.NDArray[np.float32]]) -> None:
    """Write the whole file or nothing, because other runs read it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.stack([np.frombuffer(name, np.uint8) for name in known])
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        np.savez(file, tokens=tokens, features=np.stack(list(known.values())))
    Path(file.name).replace(path)
