"""Stage `large`: 3B and 15B on one GPU, and the memory of every option beside the estimate of `esmshard plan`."""

import functools
from dataclasses import asdict, replace
from typing import Any

import measure
import peers
import random_models
import torch
from measure import say, table

from esmshard.model.families.family_registry import SIZES
from esmshard.parallel.layout import Layout
from esmshard.recipe.sections import AdaptSettings
from gpu_stages import training
from gpu_stages.stage import GIB, Context, FailedError, Figure, Found, Part, Stage

LORA = AdaptSettings(method="lora")  # type: ignore[call-arg]
OFF = 0.10
"""The largest relative error of the planned memory."""


def _steps(context: Context, short: str, layout: Layout, steps: int, **more: Any) -> training.Trained:
    """Train a model of a size for some steps, on proteins up to the longest in the training of ESM-2."""
    tokens, longest = context.amount(16384, 256), context.amount(1022, 60)
    name = context.model(short)
    return training.train(name, context.device, layout, tokens=tokens, steps=steps, longest=longest, **more)


def _trained(context: Context, short: str, adapt: AdaptSettings, **options: Any) -> Found:
    """Train a few steps, and report speed, utilisation, and memory beside the planner's estimate."""
    layout = Layout(precision=context.precision, **options)
    run = _steps(context, short, layout, context.amount(5, 2), adapt=adapt)
    figures = {
        "training": Figure(run.tokens / run.second, "tokens/s"),
        "MFU of the measured matrix product": Figure(run.mfu, "%", least=0.45),
    }
    off: dict[str, float] = {}
    if run.peak is not None:
        off[""] = run.planned.total / run.peak - 1
        figures["peak memory"] = Figure(run.peak / GIB, "GiB")
        figures["planned / measured memory"] = Figure(1 + off[""], "x", least=1 - OFF, most=1 + OFF)
    rows = [[kind, f"{value / GIB:.2f}"] for kind, value in asdict(run.planned).items() if isinstance(value, int)]
    seconds = ", ".join(f"{s:.3f}" for s in run.seconds)
    text = f"Planned peak: {run.planned.when}. Steps of {run.tokens:,} tokens: {seconds} s; "
    text += f"matrix product {run.ceiling / 1e12:.0f} TFLOP/s."
    data = asdict(run) | {"planned_total": run.planned.total}
    return _judged(off, Found("\n".join([*table(["planned for", "GiB"], rows), text]), figures, data))


def _options(context: Context, short: str) -> Found:
    """Measure every option of `parallel`, LoRA, and several micro-batches, on one device."""
    plain = Layout(precision=context.precision)
    selective, full = (replace(plain, activation_checkpointing=mode) for mode in ("selective", "full"))  # type: ignore[arg-type]
    variants: dict[str, tuple[Layout, dict[str, Any]]] = {
        "none": (plain, {}),
        "checkpointing selective": (selective, {}),
        "checkpointing full": (full, {}),
        "two micro-batches": (plain, {"micro_batches": 2}),
        "LoRA": (plain, {"adapt": LORA}),
        "cpu_offload": (replace(plain, cpu_offload=True), {}),
        "compile": (replace(plain, compile=True), {}),
    }
    if not context.rehearsal:  # a rehearsal takes each option once
        variants["LoRA, checkpointing full"] = (full, {"adapt": LORA})
        variants["cpu_offload, checkpointing full"] = (replace(full, cpu_offload=True), {})
        variants["compile, checkpointing selective"] = (replace(selective, compile=True), {})
        variants["fp32"] = (replace(plain, precision="fp32"), {})
        variants["fp16"] = (replace(plain, precision="fp16"), {})
    rows: list[list[str]] = []
    off: dict[str, float] = {}
    for name, (layout, more) in variants.items():
        run = _steps(context, short, layout, context.amount(3, 1), **more)
        torch._dynamo.reset()
        if context.device.type == "cuda":
            torch.cuda.empty_cache()
        measured, ratio = "not measured", ""
        if run.peak is not None:
            off[name] = run.planned.total / run.peak - 1
            measured, ratio = f"{run.peak / GIB:.2f}", f"{1 + off[name]:.3f}"
        rows.append([name, measured, f"{run.planned.total / GIB:.2f}", ratio, run.planned.when, f"{run.second:.3f}"])
        rows[-1] += [f"{run.tokens / run.second:,.0f}", f"{run.mfu:.1%}"]
        say(f"{short} {' | '.join(rows[-1])}")
    head = ["options", "measured, GiB", "planned, GiB", "planned / measured", "planned peak"]
    figures: dict[str, Figure] = {}
    if off:
        worst = max(off, key=lambda name: abs(off[name]))
        what = f"planned / measured memory, worst of {len(off)} ({worst})"
        figures[what] = Figure(1 + off[worst], "x", least=1 - OFF, most=1 + OFF)
    return _judged(off, Found("\n".join(table([*head, "s a step", "tokens/s", "MFU"], rows)), figures, rows))


def _judged(off: dict[str, float], found: Found) -> Found:
    """Return the result, or raise its failure if the error of a planned peak is too large."""
    wrong = [f"{name} {by:+.0%}".strip() for name, by in off.items() if abs(by) > OFF]
    if wrong:
        raise FailedError(f"planned memory is off by more than {OFF:.0%}: {', '.join(wrong)}", found)
    return found


def _embedded(context: Context, short: str) -> Found:
    """Compute mean embeddings of random proteins, by a model whose weights were drawn on the device."""
    name = context.model(short)
    esm = random_models.trunk(name, context.device, context.dtype)
    lengths = peers.protein_lengths(context.amount(300, 4))
    run = peers.embed_ours(esm, peers.sequences(lengths), context.amount(16384, 512), context.device)
    run()
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [measure.clock(run, context.device) for _ in range(context.amount(3, 1))]
    ceiling = measure.ceiling(context.device, context.dtype)
    second, flops = sorted(seconds)[len(seconds) // 2], sum(peers.flops(SIZES[name], lengths))
    figures = {
        "embedding": Figure(sum(lengths) / second, "residues/s"),
        "share of the measured matrix product": Figure(flops / second / ceiling, "%", least=0.45),
    }
    if context.device.type == "cuda":
        figures["peak memory"] = Figure(torch.cuda.max_memory_allocated() / GIB, "GiB")
    turns = ", ".join(f"{s:.3f}" for s in seconds)
    text = (
        f"{len(lengths)} proteins of {sum(lengths):,} residues: {turns} s; matrix product {ceiling / 1e12:.1f} TFLOP/s."
    )
    return Found(text, figures, {"seconds": seconds, "ceiling": ceiling})


_three = functools.partial(_trained, short="3B", adapt=training.FULL)
_fifteen = functools.partial(_trained, short="15B", adapt=LORA, activation_checkpointing="full")
STAGE = Stage(
    "large",
    "3B full fine-tuning, 15B with LoRA and for embedding, and planned memory against measured",
    (
        Part("3B, full fine-tuning, 16,384 tokens a micro-batch", 45, _three, memory=120 * GIB),
        Part("15B, LoRA", 60, _fifteen, memory=100 * GIB),
        Part("15B, embedding", 40, functools.partial(_embedded, short="15B"), memory=70 * GIB),
        Part("options, 650M", 130, functools.partial(_options, short="650M"), memory=80 * GIB),
    ),
)
