"""Measures memory per rank, step time and loading of every strategy on CPU ranks, beside the estimates of the planner.

`gpu.py`, stage `large`, measures every option on one GPU. `published.py` compares the planner with published runs.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import measure
import peaks
import torch
from measure import say, spread
from random_models import CONFIGS, SHORT

from esmshard import planner
from esmshard.model import weights
from esmshard.model.export import write_transformers
from esmshard.model.families.esm2 import ESM2
from esmshard.parallel.layout import STRATEGIES, Layout, layout
from esmshard.parallel.load import materialise
from esmshard.parallel.process_group import world
from esmshard.parallel.shard import local, shard
from esmshard.recipe.sections import OptimSettings, ParallelSettings
from esmshard.tasks.registry import new_task
from esmshard.train.optim import adamw, set_learning_rate
from esmshard.train.step import train_step

MIB = 2**20
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "checkpointing selective": {"activation_checkpointing": "selective"},
    "checkpointing full": {"activation_checkpointing": "full"},
    "reduce_dtype bf16": {"reduce_dtype": "bf16"},
}
WORK = ("memory", "steps", "load")


def laid(world_size: int, **settings: Any) -> Layout:
    """Return the layout of a recipe's `parallel` section on CPU ranks, with two ranks on each machine."""
    return layout(ParallelSettings.model_validate(settings), world_size, 2, "fp32")


def strategies(size: int) -> list[str]:
    """Return the strategies that so many ranks can use."""
    return [one for one in STRATEGIES if size > 2 or one != "hybrid_shard"]


def memory(model: str, tokens: int, sizes: Sequence[int] = (1, 2, 4)) -> list[str]:
    """Compare measured peaks of every strategy with those of the planner."""
    numbers, rows = peaks.numbers(SHORT[model]), []
    for size in sizes:
        for strategy in strategies(size) if size > 1 else ["full_shard"]:
            options = OPTIONS if strategy == "full_shard" else {"": {}}
            for option, settings in options.items():
                how = laid(size, strategy=strategy, **settings)
                measured = max(peaks.measure(SHORT[model], how, tokens))
                planned = planner.memory(numbers, how, tokens, peaks.head_bytes(tokens), "cpu")
                name = f"{'one process' if size == 1 else strategy} {option}".strip()
                cells = [f"{measured / MIB:,.0f}", f"{planned.total / MIB:,.0f}", f"{planned.total / measured:.2f}"]
                rows.append([str(size), name, *cells, planned.when])
                say(" | ".join(rows[-1]))
    head = ["ranks", "layout", "measured, MiB (largest rank)", "planned, MiB", "planned / measured", "peak at"]
    title = f"### Peak memory a rank, {model}, {tokens:,} tokens a rank, fp32"
    return [title, "", *measure.table(head, rows)]


def steps(model: str, tokens: int, rounds: int) -> list[str]:
    """Compare a step of one process, which has all threads, with steps of ranks that share the threads."""
    threads = os.cpu_count() or 1
    layouts = {f"1 process, {threads} threads": (laid(1), threads)}
    for size in (2, 4):
        for strategy in strategies(size):
            each = max(1, threads // size)
            layouts[f"{size} ranks, threads of each: {each}, {strategy}"] = (laid(size, strategy=strategy), each)
    times: dict[str, list[float]] = {name: [] for name in layouts}
    for turn in range(rounds):
        for name, (how, each) in layouts.items():
            work = ["step", SHORT[model], asdict(how), tokens]
            times[name].append(max(measure.ranks_of(__file__, work, how.world_size, each)))
            say(f"turn {turn + 1}: {name}: {times[name][-1]:.2f} s")
    alone = next(iter(times.values()))
    rows = [[n, f"{statistics.median(own):.2f}", spread(measure.over(own, alone))] for n, own in times.items()]
    head = ["", "s a step, median", "time / one process, median [min, max]"]
    return [f"### Step, {model}, {tokens:,} tokens in all, fp32", "", *measure.table(head, rows)]


def loading(model: str, size: int = 4) -> list[str]:
    """Measure the peak memory of a rank that loads its share from a model on disk, above the memory before."""
    config = CONFIGS[SHORT[model]]
    with tempfile.TemporaryDirectory() as folder:
        base = weights.fresh(config, 0)
        write_transformers(Path(folder), config, weights.shapes(config), base.__getitem__)
        ranks = measure.ranks_of(__file__, ["load", folder], size, **peaks.ALLOCATOR)
    seconds, share, peak = (max(column) for column in zip(*ranks, strict=True))
    layer = 4 * peaks.numbers(SHORT[model]).layer_parameters
    row = [model, str(size), *(f"{n / MIB:,.0f}" for n in (share, layer, peak)), f"{peak / (share + layer):.2f}"]
    head = ["model", "ranks", "share, MiB", "largest layer, MiB", "peak, MiB", "peak / (share + layer)", "s"]
    return [f"### Loading from disk, {model}", "", *measure.table(head, [[*row, f"{seconds:.0f}"]])]


# In the processes of the ranks


def step_rank(name: str, how: dict[str, Any], tokens: int) -> float:
    """Return the median seconds of a real step. The model has the small head of the contact task."""
    config, settings = CONFIGS[name], Layout(**how)
    with world(alone_too=settings.cpu_offload) as everyone:
        ranks = replace(everyone, together=settings.together)
        model = peaks.on_meta(config, peaks.FULL)
        shard(model, settings, ranks)
        task = new_task(peaks.TASK, {})
        torch.manual_seed(0)  # every rank makes the same new head
        head = task.head(config)
        materialise(model, model.rows_of(weights.fresh(config, 0), head), settings, ranks)
        optimizer = adamw(model.train(), OptimSettings())  # type: ignore[call-arg]
        set_learning_rate(optimizer, 1.0)
        batch = peaks.batch_of(tokens // settings.data_size, 256)
        targets = [torch.zeros(254, 254, dtype=torch.int8) for _ in range(len(batch))]

        def step() -> None:
            train_step(model, task, optimizer, [(batch, targets, False)], 1.0, ranks, settings)

        return statistics.median([measure.clock(step, ranks.device) for _ in range(7)][2:])


def load_rank(folder: str) -> list[float]:
    """Return the seconds, the bytes of this rank's share, and its peak above the memory before."""
    with world() as ranks:
        stored = weights.read(folder)
        with torch.device("meta"):
            model = ESM2(stored.config)
        how = Layout(world_size=ranks.size, group=ranks.size)
        shard(model, how, ranks)
        measure.reset_peak()
        before, began = measure.resident(), time.perf_counter()
        materialise(model, stored.rows, how, ranks)
        peak, seconds = measure.resident("VmHWM") - before, time.perf_counter() - began
        return [seconds, sum(local(p).numel() * 4 for p in model.parameters()), peak]


def main() -> None:
    """Measure, print, and store."""
    parser = measure.parser(__doc__)
    parser.add_argument("--work", nargs="+", choices=WORK, default=WORK)
    parser.add_argument("--model", choices=SHORT, default="35M", help="model of everything but `load`")
    parser.add_argument("--load", nargs="+", choices=SHORT, default=["650M", "3B"])
    parser.add_argument("--tokens", type=int, default=2048, help="a multiple of 1,024")
    args = parser.parse_args()
    if args.rank:
        what, *work = args.rank
        print(json.dumps({"step": step_rank, "load": load_rank}[what](*work)))
        return
    lines: list[str] = []
    for work in args.work:
        if work == "memory":
            lines += memory(args.model, args.tokens)
        elif work == "load":
            lines += [line for model in args.load for line in loading(model)]
        else:
            lines += steps(args.model, args.tokens, args.rounds)
    measure.store("-".join(["sharding", *args.work]), lines, lines, args.out)


if __name__ == "__main__":
    main()
