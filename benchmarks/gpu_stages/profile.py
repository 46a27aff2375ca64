"""Stage `profile`: the time of each kernel in training steps and in embedding."""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable

import peers
import random_models
import torch
from torch.profiler import ProfilerActivity, profile

from esmshard.batch import pack
from esmshard.data.batching.packing import by_length
from esmshard.model.families.family_registry import SIZES
from esmshard.parallel.layout import Layout
from gpu_stages import training
from gpu_stages.stage import Context, Figure, Found, Part, Stage, table

STEPS = 10
LISTED = 25
"""The number of kernels in the table; all others are one line."""

# The purpose of a kernel by patterns of its name; the first pattern that fits counts.
KINDS = {
    "attention": r"flash|fmha|varlen|scaled_dot_product|softmax",
    "matrix product": r"gemm|cutlass|nvjet|xmma|cublas|aten::(mm|addmm|bmm|linear|matmul)|mkl",
    "optimizer and norms": r"adam|multi_tensor|foreach|lpnorm",
    "layer norm": r"layer_?norm|RowwiseMoments|GammaBeta",
    "copies and casts": r"memcpy|memset|copy|cat|Cast|aten::(to|_to_copy|contiguous|clone|fill_|zero_)",
    "embedding and gather": r"embedding|index|gather|scatter",
}
OTHER = "element by element, and the rest"


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the time that intervals cover together. Time that two intervals share counts once.

    >>> length([(3, 4), (0, 2), (1, 2.5)])
    3.5
    """
    total, covered = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total


def kind_of(kernel: str) -> str:
    """Return the purpose of a kernel.

    >>> kind_of("void cutlass::Kernel2<...gemm...>"), kind_of("vectorized_elementwise_kernel<4, GeluCUDA>")
    ('matrix product', 'element by element, and the rest')
    """
    return next((kind for kind, sign in KINDS.items() if re.search(sign, kernel, re.IGNORECASE)), OTHER)


def _profiled(context: Context, work: Callable[[], object], steps: int, stem: str) -> Found:
    """Record some calls, and make tables of their kernels."""
    for _ in range(2):
        work()
    on_gpu = context.device.type == "cuda"
    # Operators of the host are not recorded. Recording them takes as long as running them, and would make the device
    # idle. A second, short recording has them, for the picture.
    found = _recorded(work, steps, ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU)
    trace = context.out / f"{stem}.trace.json.gz"
    both = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    _recorded(work, 1, *both).export_chrome_trace(str(trace))

    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in found.events() or ():
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        if is_kernel if on_gpu else not event.cpu_children:
            spans[event.name].append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    every = [span for several in spans.values() for span in several]
    wall = max(end for _, end in every) - min(start for start, _ in every)
    busy = length(every)
    seconds = {name: sum(end - start for start, end in several) for name, several in spans.items()}
    kinds: dict[str, float] = defaultdict(float)
    for name, own in seconds.items():
        kinds[kind_of(name)] += own
    total = sum(seconds.values())

    def row(name: str, own: float, calls: str) -> list[str]:
        return [name, f"{1e3 * own / steps:.3f}", f"{own / total:.1%}", calls]

    lines = table(
        ["kind", "ms a step", "share of busy time", "calls"],
        [row(kind, own, "") for kind, own in sorted(kinds.items(), key=lambda item: -item[1])],
    )
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    rows = [
        row(f"`{name[:110]}`".replace("|", "/"), own, str(len(spans[name]) // steps)) for name, own in ranked[:LISTED]
    ]
    if ranked[LISTED:]:
        rows.append(row(f"{len(ranked) - LISTED} others", sum(own for _, own in ranked[LISTED:]), ""))
    lines += table(["kernel" if on_gpu else "operator", "ms a step", "share of busy time", "calls a step"], rows)
    lines += [f"{steps} steps in {wall:.3f} s. One more is in {trace.name}, for Perfetto or chrome://tracing."]
    product = kinds["matrix product"] + kinds["attention"]
    figures = {
        "a step": Figure(1e3 * wall / steps, "ms"),
        "device idle, waiting for the host": Figure(1 - busy / wall, "%"),
        "neither matrix product nor attention": Figure(1 - product / total, "%"),
    }
    return Found("\n".join(lines), figures, {"seconds": seconds, "calls": {k: len(v) for k, v in spans.items()}})


def _recorded(work: Callable[[], object], steps: int, *activities: ProfilerActivity) -> profile:
    """Run some calls under the profiler. All kernels have ended when it stops."""
    wait = torch.cuda.synchronize if ProfilerActivity.CUDA in activities else lambda: None
    wait()
    with profile(activities=activities) as found:
        for _ in range(steps):
            work()
        wait()
    return found


def _training(context: Context, compiled: bool) -> Found:
    layout = Layout(precision=context.precision, compile=compiled)
    tokens = context.amount(16384, 256)
    with training.prepared(
        context.model("650M"), context.device, layout, tokens=tokens, longest=context.amount(1022, 60)
    ) as (
        step,
        _,
        _,
        _,
    ):
        return _profiled(context, step, context.amount(STEPS, 2), f"training{'-compiled' * compiled}")


def _embedding(context: Context) -> Found:
    """Compute packs like those of `embed`, one after the other, and copy the mean of each protein to the host."""
    esm = random_models.trunk(context.model("650M"), context.device, context.dtype)
    tokens = peers.sequences(peers.protein_lengths(context.amount(500, 4)))
    most = context.amount(16384, 512)
    groups = list(by_length([len(one) for one in tokens], most))
    batches = [pack([tokens[n] for n in group]).to(context.device) for group in groups]
    last = SIZES[context.model("650M")].n_layers

    def work() -> None:
        with torch.no_grad():
            for batch in batches:
                x_TD = esm(batch, layers=(last,)).representations[last]
                torch.stack([x_LD.float().mean(0) for x_LD in batch.residues(x_TD)]).cpu()

    return _profiled(context, work, context.amount(STEPS, 2), "embedding")


STAGE = Stage(
    "profile",
    "ten steps of training and of embedding with 650M: kernels, what is no matrix product, idle time",
    (
        Part("training, 650M", 40, functools.partial(_training, compiled=False), memory=60 * 2**30),
        Part("embedding, 650M", 25, _embedding, memory=12 * 2**30),
        Part("training, 650M, compiled", 60, functools.partial(_training, compiled=True), memory=60 * 2**30),
    ),
)
