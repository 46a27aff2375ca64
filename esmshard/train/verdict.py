"""Whether fine-tuning was worth it, in one sentence: the same words at the end of a run, in its files and report."""

import math
from collections.abc import Mapping

from esmshard.tasks.intervals import LEAST, Interval
from esmshard.tasks.protocol import BEFORE

MAIN = "fine-tuned"
"""The method that the others are compared with."""


def strongest(intervals: Mapping[str, Interval], gains: Mapping[str, Interval], *, lower_is_better: bool) -> str | None:
    """The baseline with the best value of a metric; None if no baseline has one.

    Args:
        intervals: of the metric, by method.
        gains: MAIN minus each baseline.
        lower_is_better: of the metric.
    """
    sign = -1 if lower_is_better else 1
    known = [name for name in gains if name in intervals and math.isfinite(intervals[name].value)]
    return max(known, key=lambda name: sign * intervals[name].value, default=None)


def comparison(gain: Interval, *, lower_is_better: bool) -> str:
    """What the interval of a difference to a baseline says, as `better than`."""
    worse, better = gain.high < 0, gain.low > 0
    if lower_is_better:
        worse, better = better, worse
    return "better than" if better else "worse than" if worse else "not clearly apart from"


def verdict(
    metric: str,
    intervals: Mapping[str, Interval],
    gains: Mapping[str, Interval],
    basis: str,
    *,
    lower_is_better: bool = False,
) -> str:
    """One sentence: whether fine-tuning beat the best of the baselines.

    Args:
        metric: the one that models are chosen by.
        intervals: of it, by method, MAIN among them.
        gains: MAIN minus each baseline, paired.
        basis: what the intervals are over, as `paired over 12 positions`.
        lower_is_better: of the metric.
    """
    if not gains:
        return f"There is no baseline to compare the {metric} of the fine-tuned model with."
    best = strongest(intervals, gains, lower_is_better=lower_is_better)
    ours = intervals[MAIN].value
    if best is None or not math.isfinite(ours):
        return f"{metric} is undefined for the model or for every baseline, so that they cannot be compared."
    gain = gains[best]
    name = "the model before fine-tuning" if best == BEFORE else best
    values = f"{metric} {ours:.3f} against {intervals[best].value:.3f}, a difference of {gain.value:+.3f}"
    if math.isnan(gain.low):
        # No interval: what the sample says is said, and that it proves nothing.
        worse = gain.value > 0 if lower_is_better else gain.value < 0
        how = "equal to" if gain.value == 0 else "worse than" if worse else "better than"
        return (
            f"Fine-tuning was {how} the best baseline, {name}: {values}, but whether that is more than chance cannot "
            f"be said: there is no interval ({basis}; an interval takes {LEAST})."
        )
    how = {"better than": "beat", "worse than": "was worse than"}.get(
        comparison(gain, lower_is_better=lower_is_better), "was not clearly apart from"
    )
    return f"Fine-tuning {how} the best baseline, {name}: {values} [{gain.low:+.3f}, {gain.high:+.3f}] (95%, {basis})."
