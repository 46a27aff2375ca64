"""The head for point mutations, which reads what the model says at the changed residues beside what it says of the wild
type; and the vectors that it makes of variants with a frozen model, for linear models.
"""

import hashlib
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import Inputs, TokenBatch, batch_of, pack, pack_variants
from esmshard.devices import packs_at_once, side_by_side
from esmshard.errors import InputError
from esmshard.io.paths import cache_directory
from esmshard.model.dropout import of_changes
from esmshard.model.finetuner import FineTuner
from esmshard.model.weights import Weights
from esmshard.progress import Progress
from esmshard.tasks.labels import LabelHead
from esmshard.vocab import STANDARD, VOCAB_SIZE, encode

Pool = Literal["wild_type", "sites", "difference", "mean"]

AMINO_ACIDS = encode(STANDARD)[1:-1].tolist()
"""Tokens of the 20."""

PACKED = 4096
"""Tokens that go through the model at once."""
FEWEST = 64
"""Variants from which on it is worth keeping what was computed."""
ZERO_SHOT = 0.1
"""Weight that a new head gives to a unit of the zero-shot score, in standard deviations of the target: scores of single
substitutions deviate by 2 to 4 and explain a part of it, so that a new head ranks as the language model does."""


class VariantHead(LabelHead):
    """A head that makes a vector of each changed residue, applies one or two linear layers, and sums over the changes
    of a variant.

    The sum makes changes additive as far as the trunk, which sees all of them at once (but for `wild_type`), has not
    changed their vectors; the wild type is where the sum is empty. The vector, by `pool`:

    - `wild_type`: LayerNorm of the wild type's representation, which knows what the site is like; both letters; and
      with `zero_shot` the probabilities of the 20 amino acids there.
    - `sites`: what the variant's own representation there differs by, and the same.
    - `difference`: the first of these alone.
    - `mean`: no changes, but the mean over all residues of the variant.

    Args:
        dim: width of the model.
        hidden: of the layer before the last; 0 for none.
        sign_T: of each target, 1, or -1 if lower is better.
        pool: see above.
        dropout: share that is dropped.
        zero_shot: add the language model's score of the changes, read from the wild type's logits.
    """

    def __init__(
        self, dim: int, hidden: int, sign_T: npt.NDArray[np.float32], pool: Pool, dropout: float, *, zero_shot: bool
    ) -> None:
        super().__init__(dim, width(dim, pool, zero_shot=zero_shot), hidden, len(sign_T), dropout)
        self.pool, self.reads_logits = pool, zero_shot
        self.zero_shot = nn.Parameter(ZERO_SHOT * torch.from_numpy(sign_T)) if zero_shot else None

    def start(self, found: Weights) -> None:
        """Check that the model has an LM head, if its zero-shot score is a part of the head."""
        if self.reads_logits and "lm_head" in found.unlearned:
            raise InputError(
                f"{found.source}: has no trained LM head, whose zero-shot score is a part of the head for variants; "
                "set task.zero_shot=false, or train it first (task mlm, adapt.method head)"
            )

    def forward(
        self, x_TD: torch.Tensor, batch: TokenBatch, logits_MV: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return [T] for each variant."""
        draw_M = batch.draw_N if self.pool == "mean" else of_changes(batch)
        h_NF = self.features(self.norm(x_TD), batch, logits_MV, partial(self._hidden, draw_M=draw_M))
        out_NT = self.out(self.hidden_dropout(h_NF, batch.draw_N))
        if self.zero_shot is not None:
            assert logits_MV is not None
            out_NT = out_NT.float() + log_odds(logits_MV, batch)[:, None] * self.zero_shot
        return list(out_NT)

    def _hidden(self, x_MF: torch.Tensor, draw_M: torch.Tensor | None) -> torch.Tensor:
        return x_MF if self.hidden is None else F.gelu(self.hidden(self.dropout(x_MF, draw_M)))

    def features(
        self,
        x_TD: torch.Tensor,
        batch: TokenBatch,
        logits_MV: torch.Tensor | None,
        each: Callable[[torch.Tensor], torch.Tensor] = lambda x_MF: x_MF,
    ) -> torch.Tensor:
        """Return what is seen of each variant, [N, F]. `each` is applied to the vector of a change before these are
        summed.
        """
        if self.pool == "mean":
            residues = batch.residues(x_TD)[: batch.n_records]
            return each(torch.stack([x_LD.mean(0) for x_LD in residues]))
        assert batch.changes_4M is not None
        record_M, letter_M, mutant_M, wild_M = batch.changes_4M
        parts = [] if self.pool == "wild_type" else [x_TD[mutant_M] - x_TD[wild_M]]
        if self.pool != "difference":
            letters = [F.one_hot(at_M, VOCAB_SIZE).to(x_TD) for at_M in (batch.tokens_T[wild_M], letter_M)]
            parts += [x_TD[wild_M], *letters]
            if self.reads_logits:
                assert logits_MV is not None
                parts.append(logits_MV[:, AMINO_ACIDS].float().log_softmax(-1).to(x_TD))
        seen_MF = each(torch.cat(parts, 1))
        return seen_MF.new_zeros(batch.n_records, seen_MF.shape[1]).index_add(0, record_M, seen_MF)


def width(dim: int, pool: Pool, *, zero_shot: bool) -> int:
    """Return the width of the vector of a change."""
    if pool in ("difference", "mean"):
        return dim
    return dim * (1 if pool == "wild_type" else 2) + 2 * VOCAB_SIZE + (len(STANDARD) if zero_shot else 0)


def log_odds(logits_MV: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Sum log p(mutant) - log p(wild type) over the changes of each variant, float32 [N]: wild-type marginals.

    Only of changes between two of the 20 amino acids: any of them is far likelier than X or U, whatever it does there.
    """
    assert batch.changes_4M is not None
    record_M, letter_M, _, wild_M = batch.changes_4M
    both_M2 = torch.stack([letter_M, batch.tokens_T[wild_M]], 1)
    mutant, wild = logits_MV.float().gather(1, both_M2).unbind(1)  # the softmax has the same divisor in both
    # The tokens of the 20 follow each other.
    known_M = ((both_M2 >= min(AMINO_ACIDS)) & (both_M2 <= max(AMINO_ACIDS))).all(1)
    return mutant.new_zeros(batch.n_records).index_add(0, record_M, (mutant - wild) * known_M)


def frozen(
    base: FineTuner,
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


def seen_by(head: VariantHead, base: FineTuner, inputs: Sequence[Inputs]) -> npt.NDArray[np.float32]:
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
