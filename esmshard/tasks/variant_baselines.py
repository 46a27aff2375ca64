"""The baselines of task `variant`: ridge regressions and zero-shot scores, without training of the language model.

The features of a variant depend on the data:

| | one protein | several proteins | insertions and deletions (`task.context: sequence`) |
|---|---|---|---|
| ONE_HOT | the letter at each varied position | the old and the new letters | left out |
| SCORE | log p(mutant) - log p(wild type), masked | the same, in one pass without masks | pseudo-log-likelihood |
| AUGMENTED | both of the above | both of the above | left out |
| FROZEN | representations at the changes | representations at the changes | mean representation |
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from esmshard.batch import batch_of, pack, pack_variants
from esmshard.data.batching.loader import Example
from esmshard.devices import packs_at_once, side_by_side
from esmshard.model.families.family_registry import corruption_of
from esmshard.model.finetuner import FineTuner
from esmshard.progress import Progress
from esmshard.tasks.base import Outputs
from esmshard.tasks.baselines import apply, fit_numbers
from esmshard.tasks.likelihood import sequence_scores
from esmshard.tasks.marginals import log_probabilities
from esmshard.tasks.variant_head import Pool, VariantHead
from esmshard.vocab import RESIDUES, STANDARD, TOKENS, VOCAB_SIZE

if TYPE_CHECKING:
    from esmshard.tasks.variants import VariantTask

Tokens = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

ONE_HOT, SCORE, AUGMENTED, FROZEN = "one-hot ridge", "zero-shot", "one-hot + zero-shot ridge", "frozen embedding ridge"
"""The names of the four baselines in reports."""
SHORT = {"one-hot": ONE_HOT, "zero-shot": SCORE, "augmented": AUGMENTED, "embedding": FROZEN}
"""The full name of each baseline, by its short name for the command-line option `--with`."""
LIGHT = 10.0
"""The factor by which the baseline AUGMENTED scales the zero-shot score. The ridge penalty then hardly affects the
score, as in Hsu et al. 2022."""
PACKED, LONG = 4096, 64
"""The maximum number of tokens in a forward pass, and the minimum number of variants for a progress bar."""

_KEPT: dict[tuple[str | None, str], dict[Any, Any]] = {}
"""Outputs of a frozen model, for later folds in this process. The keys are `FineTuner.origin` and the kind."""


def fit(task: "VariantTask", train: Sequence[Example], base: FineTuner | None, only: str | None) -> dict[str, Array]:
    """Fit the baselines to training variants, and return arrays by name. For the arguments see `Task.baselines`."""
    wanted = set(SHORT.values()) if only is None else {only}
    scaled_NT = np.stack([task.inputs(example).target[0] for example in train])
    fitted: dict[str, Array] = {}
    if not (task.several or task.reads_whole):
        fitted["letters"] = _varied_letters(np.stack([example.tokens for example in train]))
    if not task.reads_whole:
        one_hot_NF = _one_hot(task, train, fitted)
        if ONE_HOT in wanted:
            fitted[ONE_HOT] = fit_numbers(one_hot_NF, scaled_NT)
    if base is None:
        return fitted
    if task.settings.zero_shot and wanted & {SCORE, AUGMENTED}:
        if not task.reads_whole:
            tracks = train[0].tracks or task.tracks
            fitted["log_p"] = np.concatenate([_of_wild_type(task, name, base, tracks) for name in task.tokens])
        score_N = _scores(task, train, fitted, base)
        fitted["score_scale"] = scale = np.array([score_N.mean(), score_N.std() or 1.0])
        if AUGMENTED in wanted and not task.reads_whole:
            both_NF = np.column_stack([one_hot_NF, (score_N - scale[0]) / scale[1]])
            light_F = np.where(np.arange(both_NF.shape[1]) < one_hot_NF.shape[1], 1.0, LIGHT)
            fitted[AUGMENTED] = fit_numbers(both_NF, scaled_NT, light_F)
    if FROZEN in wanted:
        fitted[FROZEN] = fit_numbers(frozen(task, train, base), scaled_NT)
    return fitted


def outputs(
    task: "VariantTask",
    examples: Sequence[Example],
    known: Mapping[str, Array],
    base: FineTuner | None,
    sign_T: npt.NDArray[np.float32],
) -> Outputs:
    """Return the outputs of the fitted baselines for each variant. The zero-shot score is standardised over the
    training variants. `sign_T` is -1 for a target whose lower values are better.
    """
    found: Outputs = {}
    score_N = np.full(len(examples), np.nan)
    if "score_scale" in known and ("log_p" in known or base is not None):
        mean, deviation = known["score_scale"]
        score_N = (_scores(task, examples, known, base) - mean) / deviation
        found[SCORE] = list((score_N[:, None] * sign_T).astype(np.float32))
    if ONE_HOT in known or AUGMENTED in known:
        one_hot_NF = _one_hot(task, examples, known)
        for name, x_NF in ((ONE_HOT, one_hot_NF), (AUGMENTED, np.column_stack([one_hot_NF, score_N]))):
            if name in known:
                found[name] = list(apply(known[name], x_NF))
    if base is not None and FROZEN in known:
        found[FROZEN] = list(apply(known[FROZEN], frozen(task, examples, base)))
    return found


def _varied_letters(tokens_NL: Tokens) -> npt.NDArray[np.int64]:
    """Return all F pairs (index, token) that occur at the indices where the variants differ, int64 [F, 2]."""
    places = np.flatnonzero((tokens_NL != tokens_NL[0]).any(0))
    pairs = [(place, token) for place in places.tolist() for token in np.unique(tokens_NL[:, place]).tolist()]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _one_hot(task: "VariantTask", examples: Sequence[Example], known: Mapping[str, Array]) -> npt.NDArray[np.float32]:
    """Return the F features of ONE_HOT for each variant, float32 [N, F].

    For one protein: 1 for each pair (index, token) of `letters` that the variant has, otherwise 0. For several proteins
    positions do not correspond, so there is a count for each old and for each new token.
    """
    x_NF = np.zeros((len(examples), 2 * VOCAB_SIZE if task.several else len(known["letters"])), np.float32)
    for x_F, example in zip(x_NF, examples, strict=True):
        if task.several:
            wild_type = task.wild_type(example)
            changed = example.tokens != wild_type
            np.add.at(x_F, wild_type[changed].astype(np.int64), 1)
            np.add.at(x_F, VOCAB_SIZE + example.tokens[changed].astype(np.int64), 1)
        else:
            x_F[:] = example.tokens[known["letters"][:, 0]] == known["letters"][:, 1]
    return x_NF


def _of_wild_type(
    task: "VariantTask", protein: str, base: FineTuner, tracks: Mapping[str, Array]
) -> npt.NDArray[np.float32]:
    """Return the log probability of each letter at each token between `<cls>` and `<eos>` of a wild type, [L, A]."""
    tokens = task.tokens[protein]
    kept = _remembered(base, SCORE, tracks)
    if (key := tokens.tobytes()) not in kept:
        sites = [n for n, token in enumerate(tokens[1:-1].tolist()) if TOKENS[token] in RESIDUES]
        kept[key] = np.zeros((len(tokens) - 2, len(RESIDUES)), np.float32)
        # Masks need a forward pass for each residue, which would take hours for hundreds of proteins.
        hidden = not task.several
        kept[key][sites] = log_probabilities(base.trunk, tokens, sites, hidden=hidden, tracks=tracks)
    log_p_LA: npt.NDArray[np.float32] = kept[key]
    return log_p_LA


def _scores(
    task: "VariantTask", examples: Sequence[Example], known: Mapping[str, Array], base: FineTuner | None
) -> npt.NDArray[np.float64]:
    """Return the zero-shot score of each variant, float64 [N]."""
    if task.reads_whole:
        assert base is not None
        return _whole_scores(task, examples, base)
    first = dict(zip(task.tokens, np.cumsum([0, *(len(each) - 2 for each in task.tokens.values())]), strict=False))
    score_N = np.zeros(len(examples))
    for n, example in enumerate(examples):
        wild_type, protein = task.wild_type(example), task.protein(example)
        for place in np.flatnonzero(example.tokens != wild_type).tolist():
            old, new = TOKENS[wild_type[place]], TOKENS[example.tokens[place]]
            if old in STANDARD and new in STANDARD:
                log_p_A = known["log_p"][first[protein] + place - 1]
                score_N[n] += log_p_A[RESIDUES.index(new)] - log_p_A[RESIDUES.index(old)]
    return score_N


@torch.no_grad()
def _whole_scores(task: "VariantTask", examples: Sequence[Example], base: FineTuner) -> npt.NDArray[np.float64]:
    """Return the pseudo-log-likelihood of each variant minus that of its wild type, float64 [N]."""
    kept, visible = _remembered(base, f"{SCORE} of sequences", {}), corruption_of(base.trunk.config)
    assert visible is not None
    keys = [(task.wild_type(example).tobytes(), example.tokens.tobytes()) for example in examples]
    of_key = dict(zip(keys, examples, strict=True))
    new = [key for key in of_key if key not in kept]
    each = max(1, PACKED // max(len(example.tokens) for example in examples))
    with Progress("zero-shot", len(new), show=base.trunk.shared_on is None and len(new) >= LONG) as progress:
        for first in range(0, len(new), each):
            part = new[first : first + each]
            batch = batch_of([task.question(of_key[key]) for key in part]).to(base.device)
            logits_PV = base.trunk(batch, logits_at=batch.logits_at_P).logits_PV
            kept.update(zip(part, sequence_scores(logits_PV, batch, visible).tolist(), strict=True))
            progress.update(first + len(part), "")
    return np.array([kept[key] for key in keys])


def frozen(task: "VariantTask", examples: Sequence[Example], base: FineTuner) -> npt.NDArray[np.float32]:
    """Compute the features of N variants with the frozen model, float32 [N, F].

    Features are results of `VariantHead.features` for pool `sites` or `mean`, without LayerNorm and probabilities. They
    are kept for later calls, by wild type and variant.
    """
    pool: Pool = "mean" if task.settings.pool == "mean" or task.reads_whole else "sites"
    tracks = examples[0].tracks or task.tracks
    kept, alone = _remembered(base, f"{FROZEN} {pool}", tracks), base.trunk.shared_on is None
    keys = [(task.wild_type(example).tobytes(), example.tokens.tobytes()) for example in examples]
    of_key = dict(zip(keys, examples, strict=True))
    new = [key for key in of_key if key not in kept]
    head = VariantHead(base.trunk.config.dim, 0, np.ones(1, np.float32), pool, 0.0, zero_shot=False)
    each = max(1, PACKED // max(len(example.tokens) for example in examples))
    parts = [new[n : n + each] for n in range(0, len(new), each)]

    def compute(part: list[tuple[bytes, bytes]]) -> npt.NDArray[np.float32]:
        variants = [of_key[key].tokens for key in part]
        if pool == "mean":
            batch = pack(variants, tracks=[tracks] * len(part)).to(base.device)
        else:
            wild_types = [task.wild_type(of_key[key]) for key in part]
            batch = pack_variants(variants, wild_types, tracks=tracks).to(base.device)
        x_TD = base.trunk(batch).representations[base.trunk.config.n_layers].float()
        x_NF: npt.NDArray[np.float32] = head.features(x_TD, batch, None).cpu().numpy()
        return x_NF

    at_once = max(1, 4 * packs_at_once(base.device))
    with Progress("frozen model", len(new), show=alone and len(new) >= LONG) as progress:
        for first in range(0, len(parts), at_once):
            group = parts[first : first + at_once]
            for part, x_NF in zip(group, side_by_side(compute, group, base.device, threads=alone), strict=True):
                kept.update(zip(part, x_NF, strict=True))
            progress.update(min(len(new), (first + at_once) * each), "")
    return np.stack([kept[key] for key in keys])


def _remembered(base: FineTuner, kind: str, tracks: Mapping[str, Array]) -> dict[Any, Any]:
    """Return the outputs of a frozen model that were computed before, by keys of the caller's choice."""
    if base.origin is not None and not tracks and kind not in base.remembered:
        if any(origin != base.origin for origin, _ in _KEPT):  # another model would only take memory
            _KEPT.clear()
        base.remembered[kind] = _KEPT.setdefault((base.origin, kind), {})
    return base.remembered[kind]
