"""The language models whose scores a table has: one, or several whose scores are averaged."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from esmshard.data.tracks import track_files
from esmshard.devices import DeviceName, chosen_device
from esmshard.errors import InputError, UsageError
from esmshard.model import weights
from esmshard.model.families.family_registry import family_of, window_of
from esmshard.model.trunk import Trunk
from esmshard.model.weights import Weights
from esmshard.vocab import Chains

T = TypeVar("T")


def check_finite(scores: npt.NDArray[Any], model: str) -> None:
    """Refuse scores, [..., N], that are no finite numbers. `InputError` with their number."""
    wrong = int((~np.isfinite(scores)).any(tuple(range(scores.ndim - 1))).sum())
    if wrong:
        raise InputError(
            f"{model}: {wrong:,} of {scores.shape[-1]:,} scores are no finite numbers: its weights are damaged, or so "
            "large that what it computes overflows; take another model or an earlier checkpoint"
        )


@dataclass(frozen=True)
class LanguageModels:
    """M models with trained LM heads, whose weights are read one model at a time."""

    names: tuple[str, ...]
    weights: tuple[Weights, ...]
    window: int
    """Residues of a long protein that each of them sees at once."""
    device: torch.device
    """The device that computes."""

    def each(self, compute: Callable[[Trunk], T]) -> list[T]:
        """Return what `compute` makes of each model. One model at a time is in memory."""
        found = []
        for one in self.weights:
            weights.report_altered(one.files)
            model = weights.build(one, self.device).eval()
            found.append(compute(model))
            del model
        return found

    def facts(self) -> dict[str, object]:
        """Return what the facts about a table say of its models."""
        several = {"ensemble": list(self.names[1:])} if len(self.names) > 1 else {}
        return {"model": self.names[0], **several, "device": str(self.device)}


def read_models(
    model: str,
    ensemble: Sequence[str],
    *,
    window: int | None,
    tracks: Mapping[str, str],
    device: DeviceName,
    chains: Chains | None = None,
) -> LanguageModels:
    """Find models and check all of them, before the first of them computes anything.

    Args:
        model: see `weights.read`.
        ensemble: further models.
        window: by default as many residues as the models saw in training, the fewest of all.
        tracks: the names and paths of the tracks that all models get.
        device: see `chosen_device`.
        chains: how the chains of a record are joined; by default as the first model says.

    Raises:
        UsageError: a model is named twice, does not take a track, or has no positions for the window.
        InputError: a model cannot be read, or has no trained LM head.
    """
    names = (model, *ensemble)
    for name, count in Counter(names).items():
        if count > 1:
            raise UsageError(f"--ensemble {name}: the model is named twice; name each model once")
    opened = []
    for name in names:
        one = weights.joining(weights.read(name), chains, f"--join: {name}")
        chains = one.config.chains
        if "lm_head" in one.unlearned:
            raise InputError(f"{name}: has no trained LM head, which scores are read from; take another model")
        track_files(tracks, family_of(one.config).tracks, name, "--track ")
        most = one.config.most_tokens
        if window is not None and most is not None and window + 2 > most:
            raise UsageError(
                f"--window {window}: {name} has learned positions for {most - 2}; pass at most this number"
            )
        opened.append(one)
    if window is None:
        window = min(window_of(one.config) for one in opened)
    return LanguageModels(names, tuple(opened), window, chosen_device(device))


def mean_and_sd(
    scores_MN: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64] | None]:
    """Return the mean and the standard deviation of each score over M models, float64 [N]. The deviation, with M - 1 in
    its denominator, is None for one model.
    """
    return scores_MN.mean(0), scores_MN.std(0, ddof=1) if len(scores_MN) > 1 else None
