"""The verdict in one sentence, the same in the terminal, the files and the report, and tables for the terminal."""

import math
from collections.abc import Mapping, Sequence

from esmshard.tasks.base import BEFORE, MAIN
from esmshard.tasks.metrics import LEAST, Interval


def aligned(rows: Sequence[Sequence[str]]) -> str:
    r"""Format a table for the terminal, with columns aligned to the left.

    >>> aligned([["", "MCC"], ["fine-tuned", "0.5"]])
    '            MCC\nfine-tuned  0.5'
    """
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    return "\n".join("".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def strongest(intervals: Mapping[str, Interval], gains: Mapping[str, Interval], *, lower_is_better: bool) -> str | None:
    """Return the baseline with the best value of a metric; None if no baseline has a value.

    Args:
        intervals: the intervals of the metric, by method.
        gains: the differences MAIN minus each baseline.
        lower_is_better: whether lower values of the metric are better.
    """
    sign = -1 if lower_is_better else 1
    known = [name for name in gains if name in intervals and math.isfinite(intervals[name].value)]
    return max(known, key=lambda name: sign * intervals[name].value, default=None)


def comparison(gain: Interval, *, lower_is_better: bool) -> str:
    """Say whether a difference to a baseline is for the better: `better than`, `worse than` or `not clearly apart
    from`. Without an interval only the sample is described: `better in this sample than`.
    """
    sign = -1 if lower_is_better else 1
    if math.isnan(gain.value):
        return "not comparable with"
    if math.isnan(gain.low):
        how = "equal" if gain.value == 0 else "better" if sign * gain.value > 0 else "worse"
        return f"{how} in this sample {'to' if how == 'equal' else 'than'}"
    low, high = sorted((sign * gain.low, sign * gain.high))
    return "better than" if low > 0 else "worse than" if high < 0 else "not clearly apart from"


def verdict(
    metric: str,
    intervals: Mapping[str, Interval],
    gains: Mapping[str, Interval],
    basis: str,
    *,
    lower_is_better: bool = False,
) -> str:
    """Return one sentence: whether fine-tuning was better than the best of the baselines, and so worth it.

    Args:
        metric: the metric that models are chosen by.
        intervals: its intervals, by method, MAIN included.
        gains: the differences MAIN minus each baseline, paired.
        basis: the units of the intervals, as `paired over 12 positions`.
        lower_is_better: whether lower values of the metric are better.
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
    how = comparison(gain, lower_is_better=lower_is_better)
    if math.isnan(gain.low):
        return (
            f"Fine-tuning was {how} the best baseline, {name}: {values}, but whether that is more than chance cannot "
            f"be said: there is no interval ({basis}; an interval takes {LEAST})."
        )
    how, consequence = {
        "better than": ("beat", ""),
        "worse than": ("was worse than", f"; it was not worth it, as {name} needs none and is better"),
        "not clearly apart from": (
            "was not clearly apart from",
            f"; that it was worth it is not shown, as {name} needs none",
        ),
    }[how]
    interval = f"[{gain.low:+.3f}, {gain.high:+.3f}] (95%, {basis})"
    return f"Fine-tuning {how} the best baseline, {name}: {values} {interval}{consequence}."


def in_sample(seen: int, records: int) -> str:
    """Return the sentence that stands before a verdict if a model was trained on test records; else an empty text."""
    if not seen:
        return ""
    return f"In sample: {seen:,} of {records:,} test records were in training, and the values count them. "
