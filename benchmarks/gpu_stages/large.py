"""Stage `large`: 3B and 15B on one GPU, and the memory of every option beside the estimate of `esmshard plan`."""

import functools
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import measure
import peers
import random_models
import torch
from safetensors.torch import save_file

from esmshard.model.attention import inverse_frequencies
from esmshard.model.families.esm2 import FAMILY, TIED
from esmshard.model.families.family_registry import SIZES
from esmshard.model.weights import shapes
from esmshard.parallel.layout import Layout
from esmshard.recipe.sections import AdaptSettings
from esmshard.vocab import decode
from gpu_stages import training
from gpu_stages.stage import GIB, Context, FailedError, Figure, Found, Part, Stage, table

LORA = AdaptSettings(method="lora")  # type: ignore[call-arg]
OFF = 0.10
"""The largest relative error of the planned memory."""


def _steps(context: Context, short: str, layout: Layout, tokens: int, steps: int, **more: Any) -> training.Trained:
    """Train a model of a size for some steps, on proteins up to the longest in the training of ESM-2."""
    tokens, longest = context.amount(tokens, 256), context.amount(1022, 60)
    return training.train(
        context.model(short), context.device, layout, tokens=tokens, steps=steps, longest=longest, **more
    )


def _trained(
    context: Context, short: str, adapt: AdaptSettings, layout: Layout, tokens: int, least: float | None
) -> Found:
    """Train a few steps, and report speed, utilisation, and memory beside the planner's estimate."""
    found = _steps(context, short, layout, tokens, context.amount(5, 2), adapt=adapt)
    figures = {
        "training": Figure(found.tokens / found.second, "tokens/s"),
        "MFU of the measured matrix product": Figure(found.mfu, "%", least=least),
    }
    off: dict[str, float] = {}
    if found.peak is not None:
        off[""] = found.planned.total / found.peak - 1
        figures["peak memory"] = Figure(found.peak / GIB, "GiB")
        figures["planned / measured memory"] = Figure(1 + off[""], "x", least=1 - OFF, most=1 + OFF)
    rows = [[kind, f"{value / GIB:.2f}"] for kind, value in asdict(found.planned).items() if isinstance(value, int)]
    lines = table(["planned for", "GiB"], rows)
    lines += [f"Planned peak: {found.planned.when}. Steps of {found.tokens:,} tokens: "]
    lines[-1] += (
        ", ".join(f"{s:.3f}" for s in found.seconds) + f" s; matrix product {found.ceiling / 1e12:.0f} TFLOP/s."
    )
    data = asdict(found) | {"planned_total": found.planned.total}
    return _judged(off, Found("\n".join(lines), figures, data))


def _options(context: Context, short: str, tokens: int) -> Found:
    """Measure every option of `parallel`, LoRA, and several micro-batches, on one device."""
    plain = Layout(precision=context.precision)
    whole: dict[str, Any] = {"adapt": training.FULL, "micro_batches": 1}
    variants: dict[str, tuple[Layout, dict[str, Any]]] = {
        "none": (plain, whole),
        "checkpointing selective": (replace(plain, activation_checkpointing="selective"), whole),
        "checkpointing full": (replace(plain, activation_checkpointing="full"), whole),
        "two micro-batches": (plain, whole | {"micro_batches": 2}),
        "LoRA": (plain, whole | {"adapt": LORA}),
        "LoRA, checkpointing full": (replace(plain, activation_checkpointing="full"), whole | {"adapt": LORA}),
        "cpu_offload": (replace(plain, cpu_offload=True), whole),
        "cpu_offload, checkpointing full": (
            replace(plain, cpu_offload=True, activation_checkpointing="full"),
            whole,
        ),
        "fp32": (replace(plain, precision="fp32"), whole),
        "compile": (replace(plain, compile=True), whole),
        "compile, checkpointing selective": (
            replace(plain, compile=True, activation_checkpointing="selective"),
            whole,
        ),
    }
    if context.rehearsal:  # each option once is enough to see that it works, and a CPU computes in fp32 as it is
        for name in [name for name in variants if "," in name or name == "fp32"]:
            del variants[name]
    if context.device.type == "cuda":
        variants["fp16"] = (replace(plain, precision="fp16"), whole)
    rows: list[list[str]] = []
    off: dict[str, float] = {}
    for name, (layout, more) in variants.items():
        found = _steps(context, short, layout, tokens, context.amount(3, 1), **more)
        torch._dynamo.reset()
        if context.device.type == "cuda":
            torch.cuda.empty_cache()
        measured, ratio, speed = "not measured", "", found.tokens / found.second
        if found.peak is not None:
            off[name] = found.planned.total / found.peak - 1
            measured, ratio = f"{found.peak / GIB:.2f}", f"{1 + off[name]:.3f}"
        rows.append([name, measured, f"{found.planned.total / GIB:.2f}", ratio])
        rows[-1] += [found.planned.when, f"{found.second:.3f}", f"{speed:,.0f}", f"{found.mfu:.1%}"]
        print(f"  {short} {' | '.join(rows[-1])}", file=sys.stderr, flush=True)
    head = ["options", "measured, GiB", "planned, GiB", "planned / measured", "planned peak"]
    lines = table([*head, "s a step", "tokens/s", "MFU"], rows)
    figures: dict[str, Figure] = {}
    if off:
        worst = max(off, key=lambda name: abs(off[name]))
        what = f"planned / measured memory, worst of {len(off)} ({worst})"
        figures[what] = Figure(1 + off[worst], "x", least=1 - OFF, most=1 + OFF)
    return _judged(off, Found("\n".join(lines), figures, rows))


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


def _from_file(context: Context, short: str) -> Found:
    """Run `esmshard embed` with a large model on disk, with one file for each layer, like released models."""
    folder = context.scratch / "large-model"
    name = context.model(short)
    began = time.perf_counter()
    written = write_in_layers(folder, name, context.device)
    writing = time.perf_counter() - began
    lengths = peers.protein_lengths(context.amount(100, 3))
    fasta, out = context.scratch / "some.fasta", context.scratch / "large.npy"
    sequences = peers.sequences(lengths)
    fasta.write_text("".join(f">p{n}\n{decode(one)}\n" for n, one in enumerate(sequences)), encoding="utf-8")
    command = [sys.executable, "-m", "esmshard", "embed", str(folder), str(fasta), "-o", str(out), "--overwrite"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    if done.returncode:
        raise RuntimeError(f"esmshard embed ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    figures = {
        f"embed of {len(lengths)} proteins, the whole command": Figure(seconds, "s"),
        "writing the model": Figure(written / writing / 1e9, "GB/s"),
    }
    return Found(f"`esmshard embed` read a model of {written / 1e9:.1f} GB in bf16.", figures)


@torch.no_grad()
def write_in_layers(folder: Path, name: str, device: torch.device) -> int:
    """Write a random model in bf16 in the layout of `transformers`, with a file for each layer. Return its bytes."""
    config = SIZES[name]
    folder.mkdir()
    groups: dict[str, dict[str, torch.Size]] = {}
    for key, shape in shapes(config).items():
        if key != TIED:
            part = key.split(".")[1] if key.startswith("layers.") else "rest"
            groups.setdefault(part, {})[key] = shape
    where: dict[str, str] = {}
    total = 0
    generator = torch.Generator(device).manual_seed(0)
    for part, members in groups.items():
        file, tensors = f"model-{part}.safetensors", {}
        for key, shape in members.items():
            if key.endswith("inv_freq"):
                tensors[FAMILY.key(key)] = inverse_frequencies(config.head_dim)
                continue
            drawn = torch.empty(shape, device=device).normal_(0, random_models.DEVIATION, generator=generator)
            drawn += 1.0 if "layer_norm" in key and key.endswith("weight") else 0.0
            tensors[FAMILY.key(key)] = drawn.to(torch.bfloat16).cpu()
        save_file(tensors, folder / file, {"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        total += (folder / file).stat().st_size
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(FAMILY.write_config(config)), encoding="utf-8")
    return total


def _plain(context: Context, **options: Any) -> Layout:
    return Layout(precision=context.precision, **options)


def _three(context: Context) -> Found:
    return _trained(context, "3B", training.FULL, _plain(context), 16384, 0.45)


def _fifteen(context: Context) -> Found:
    return _trained(context, "15B", LORA, _plain(context, activation_checkpointing="full"), 16384, 0.45)


STAGE = Stage(
    "large",
    "3B full fine-tuning, 15B with LoRA and for embedding, and planned memory against measured",
    (
        Part("3B, full fine-tuning, 16,384 tokens a micro-batch", 45, _three, memory=120 * GIB),
        Part("15B, LoRA", 60, _fifteen, memory=100 * GIB),
        Part("15B, embedding", 40, functools.partial(_embedded, short="15B"), memory=70 * GIB),
        Part("options, 650M", 130, functools.partial(_options, short="650M", tokens=16384), memory=80 * GIB),
        Part("options, 150M", 80, functools.partial(_options, short="150M", tokens=16384), when="gpu"),
        Part(
            "15B, embedding from files", 120, functools.partial(_from_file, short="15B"), memory=40 * GIB, disk=34 * GIB
        ),
    ),
)
