"""Measures memory per rank and step time of every strategy, and loading, beside the estimates of the planner.

Everything is measured on CPU ranks of this machine; `gpu.py`, stage `large`, measures every option on one GPU. The
projection to larger clusters comes from `esmshard.planner`, whose estimates are compared with published runs.
"""

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import measure
import peaks
import torch
from published import RUNS, esm2
from random_models import SHORT

from esmshard import planner
from esmshard.model import weights
from esmshard.model.export import write_transformers
from esmshard.model.families.esm2 import ESM2, EsmConfig
from esmshard.model.families.family_registry import SIZES
from esmshard.parallel.layout import STRATEGIES, Layout, layout
from esmshard.parallel.load import materialise
from esmshard.parallel.process_group import World, world
from esmshard.parallel.shard import groups, local, shard
from esmshard.planner import Work, cost, exchanged, parse
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

TOGETHER: dict[str, dict[str, Any]] = {"full_shard": {}, "tensor 2": {"tensor": 2}, "context 2": {"context": 2}}

Table = list[list[str]]


def laid(world_size: int, **settings: Any) -> Layout:
    """Return the layout of a recipe's `parallel` section on CPU ranks, with two ranks on each machine."""
    parallel = ParallelSettings.model_validate(settings)
    return layout(parallel, world_size, 2, "fp32")


def memory(model: str, tokens: int, sizes: Sequence[int]) -> Table:
    """Compare measured peaks of every strategy with those of the planner."""
    table = [["ranks", "layout", "measured, MiB (largest rank)", "planned, MiB", "planned / measured", "peak at"]]
    numbers = peaks.numbers(SHORT[model])
    for size in sizes:
        for strategy in STRATEGIES if size > 2 else [s for s in STRATEGIES if s != "hybrid_shard"]:
            for option, settings in OPTIONS.items() if strategy == "full_shard" else [("", {})]:
                if size == 1 and (strategy, option[:5]) != ("full_shard", "check"[: len(option[:5])]):
                    continue
                how = laid(size, strategy=strategy, **settings)
                measured = max(peaks.measure(SHORT[model], how, tokens))
                planned = planner.memory(numbers, how, tokens, peaks.head_bytes(tokens), "cpu")
                name = "one process" if size == 1 else strategy
                row = [str(size), f"{name} {option}".strip(), f"{measured / MIB:,.0f}", f"{planned.total / MIB:,.0f}"]
                table.append([*row, f"{planned.total / measured:.2f}", planned.when])
                print("  " + " | ".join(table[-1]), file=sys.stderr, flush=True)
    return table


def checkpointing(model: str, tokens: int) -> Table:
    """Measure the memory that a forward pass leaves for the backward pass, with and without checkpointing."""
    table = [["activation_checkpointing", "kept for the backward pass, MiB", "none / this", "planned, MiB"]]
    first = 0.0
    for mode in ("none", "selective", "full"):
        how = laid(1, activation_checkpointing=mode)
        ((kept,),) = ranks_of("forward", [SHORT[model], asdict(how), tokens], 1, os.cpu_count() or 1, whole=True)
        first = first or kept
        numbers = peaks.numbers(SHORT[model])
        planned = tokens * numbers.config.n_layers * planner.layer_bytes(numbers, how, "cpu").kept
        table.append([mode, f"{kept / MIB:,.0f}", f"{first / kept:.1f}", f"{planned / MIB:,.0f}"])
        print("  " + " | ".join(table[-1]), file=sys.stderr, flush=True)
    return table


def steps(model: str, tokens: int, rounds: int) -> Table:
    """Measure seconds of a step on the same records in turns: a process with all threads, and ranks that share them."""
    threads = os.cpu_count() or 1
    variants: dict[str, tuple[Layout, int]] = {f"1 process, {threads} threads": (laid(1), threads)}
    for size in (2, 4):
        for strategy in STRATEGIES if size > 2 else [s for s in STRATEGIES if s != "hybrid_shard"]:
            own = max(1, threads // size)
            variants[f"{size} ranks x {own} thread{'s' * (own > 1)}, {strategy}"] = (laid(size, strategy=strategy), own)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        for name, (how, own) in variants.items():
            found = ranks_of("step", [SHORT[model], asdict(how), tokens], how.world_size, own)
            times[name].append(max(found))
            print(f"  turn {turn + 1}: {name}: {max(found):.2f} s", file=sys.stderr, flush=True)
    first = times[next(iter(times))]
    table = [["", "s a step, median", "time / one process, median [min, max]"]]
    for name, own_times in times.items():
        ratios = [own / one for own, one in zip(own_times, first, strict=True)]
        spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        table.append([name, f"{statistics.median(own_times):.2f}", spread])
    return table


def together(model: str, tokens: int, rounds: int) -> Table:
    """Compare steps of two ranks that compute layers together with steps of FSDP, and with what the planner foretells.

    The time that is foretold is that of FSDP, and of the bytes that the planner counts at the rate of these ranks.
    """
    numbers, machines = peaks.numbers(SHORT[model]), parse("2xA100-40GB")
    layouts = {name: laid(2, precision="fp32", **how) for name, how in TOGETHER.items()}
    times: dict[str, list[float]] = {name: [] for name in layouts}
    rates: list[float] = []
    for turn in range(rounds):
        for name, how in layouts.items():
            times[name].append(max(ranks_of("step", [SHORT[model], asdict(how), tokens], 2, 1)))
            print(f"  turn {turn + 1}: {name}: {times[name][-1]:.2f} s", file=sys.stderr, flush=True)
        rates.append(min(ranks_of("rate", [tokens, numbers.config.dim], 2, 1)))
    table = [["2 ranks", "s a step, median", "time / full_shard", "exchanged, MiB", "time / (full_shard + exchange)"]]
    for name, how in layouts.items():
        received = exchanged(numbers, how, machines, tokens).received
        first = times["full_shard"]
        ratios = [own / one for own, one in zip(times[name], first, strict=True)]
        foretold = [own / (one + received / rate) for own, one, rate in zip(times[name], first, rates, strict=True)]
        spreads = [f"{statistics.median(some):.2f} [{min(some):.2f}, {max(some):.2f}]" for some in (ratios, foretold)]
        row = [name, f"{statistics.median(times[name]):.2f}", spreads[0], f"{received / MIB:,.0f}", spreads[1]]
        table.append(row)
    print(f"  rate: {statistics.median(rates) / MIB:,.0f} MiB/s", file=sys.stderr, flush=True)
    return table


def rate_rank(tokens: int, dim: int) -> list[float]:
    """Return the bytes per second that this rank receives in collectives as large as those of a layer, fp32."""
    import torch.distributed as dist

    with world() as ranks:
        own = torch.ones(tokens // ranks.size, dim)
        everyone = torch.empty(tokens, dim)
        times = [measure.clock(lambda: dist.all_gather_into_tensor(everyone, own), ranks.device) for _ in range(9)]
        return [4.0 * (tokens - len(own)) * dim / statistics.median(times[2:])]


def loading(models: Sequence[str], size: int) -> Table:
    """Measure the peak memory of a rank that loads its share from a model on disk, above the memory before."""
    table = [["model", "ranks", "share, MiB", "largest layer, MiB", "peak, MiB", "peak / (share + layer)", "s"]]
    for model in models:
        config = SIZES[SHORT[model]]
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            write_random(Path(folder), config)
            found = ranks_of("load", [folder], size, 1)
        each = [row[1:] for row in found]
        share, peak = max(row[0] for row in each), max(row[1] for row in each)
        layer = 4 * peaks.numbers(SHORT[model]).layer_parameters
        row = [model, str(size), *(f"{n / MIB:,.0f}" for n in (share, layer, peak)), f"{peak / (share + layer):.2f}"]
        table.append([*row, f"{max(row[0] for row in found):.0f}"])
        print("  " + " | ".join(table[-1]), file=sys.stderr, flush=True)
    return table


def write_random(folder: Path, config: EsmConfig) -> None:
    """Write a model of random weights, fp32, as `consolidate` does."""
    base = weights.fresh(config, 0)
    write_transformers(folder, config, weights.shapes(config), base.__getitem__)


def fake(model: str, sizes: Iterable[tuple[int, dict[str, Any]]]) -> Table:
    """Build a model on the meta device and shard it as the first of many ranks that do not exist."""
    table = [["model", "ranks", "layout", "groups", "parameters of rank 0", "share", "s to build and shard"]]
    for size, settings in sizes:
        done = subprocess.run(
            [sys.executable, __file__, "--rank", json.dumps(["fake", SHORT[model], size, settings])],
            check=True,
            capture_output=True,
            text=True,
        )
        groups, held, whole, seconds = json.loads(done.stdout.splitlines()[-1])
        how = ", ".join(f"{v}" if k == "strategy" else f"{k} {v}" for k, v in settings.items())
        table.append([model, str(size), how, str(groups), f"{held:,}", f"1/{whole / held:.1f}", f"{seconds:.1f}"])
        print("  " + " | ".join(table[-1]), file=sys.stderr, flush=True)
    return table


def published() -> Table:
    """Compare the cost model with runs that others have published."""
    table = [["run", "published", "reckoned", "off by"]]
    for run in RUNS:
        digits = ",.0f" if run.published > 1 else ".1%"
        cells = [run.name, f"{run.published:{digits}}", f"{run.predicted():{digits}}", f"{run.error():+.0%}"]
        table.append(cells)
    return table


def projection() -> Table:
    """Estimate steps of 16,384 tokens for each GPU on machines of 8 H100, 400 Gbit/s each, with the fastest layout."""
    table = [["model", "GPUs", "layout", "GiB a GPU", "tokens/s a GPU", "MFU", "exposed", "of 8 GPUs' speed"]]
    attended, tokens = 400.0, 16384
    for model in ("650M", "3B", "15B"):
        config, first = SIZES[SHORT[model]], 0.0
        numbers = esm2(config.n_layers, config.dim, config.n_heads)
        for nodes in (1, 8, 64):
            machines = parse("8xH100-80GB", nodes, 400)
            found = []
            for strategy in STRATEGIES if nodes > 1 else [s for s in STRATEGIES if s != "hybrid_shard"]:
                for mode in ("none", "selective", "full"):
                    settings = ParallelSettings.model_validate({"strategy": strategy, "activation_checkpointing": mode})
                    how = layout(settings, machines.world_size, 8, "bf16")
                    need = planner.memory(numbers, how, tokens, 33 * 4 * tokens, "cuda").total
                    if need < 0.9 * machines.room:
                        spent = cost(numbers, how, Work(tokens=tokens, attended=attended), machines)
                        found.append((spent.seconds, f"{strategy}, checkpointing {mode}", need, spent))
            seconds, name, need, spent = min(found, key=lambda one: one[0])
            first = first or spent.tokens_per_second
            row = [model, str(machines.world_size), name, f"{need / 2**30:.1f}", f"{spent.tokens_per_second:,.0f}"]
            share = spent.tokens_per_second / first
            table.append([*row, f"{spent.mfu:.0%}", f"{spent.exposed / seconds:.1%}", f"{share:.1%}"])
    return table


def ranks_of(what: str, work: list[Any], size: int, threads: int, *, whole: bool = False) -> list[Any]:
    """Start ranks of this script. Return the last output of each, or its first number only."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {**os.environ, "OMP_NUM_THREADS": str(threads), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)} | (
        peaks.ALLOCATOR if what in ("load", "forward") else {}
    )
    command = [sys.executable, __file__, "--rank", json.dumps([what, *work])]
    started = [
        subprocess.Popen(
            command, env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, text=True
        )
        for r in range(size)
    ]
    outputs = [p.communicate()[0] for p in started]
    if any(p.returncode for p in started):
        raise RuntimeError(f"{what} {work}: a rank failed; its error stands above")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return found if whole or what == "load" else [row[0] for row in found]


def step_rank(name: str, how: dict[str, Any], tokens: int) -> list[float]:
    """Return the median seconds of a real step. The model has the small head of the contact task."""
    config, settings = SIZES[name], Layout(**how)
    with world(alone_too=settings.cpu_offload) as everyone:
        ranks = replace(everyone, together=settings.together)
        model = peaks._meta(config, peaks.FULL)
        shard(model, settings, ranks)
        base = weights.fresh(config, 0)
        task = new_task(peaks.TASK, {})
        materialise(model, model.rows_of(base, seeded(lambda: task.head(config))), settings, ranks)
        optimizer = adamw(model.train(), OptimSettings())  # type: ignore[call-arg]
        set_learning_rate(optimizer, 1.0)
        share = tokens // settings.data_size
        batch = peaks._batch(share, 256)
        targets = [torch.zeros(254, 254, dtype=torch.int8) for _ in range(len(batch))]

        def step() -> None:
            train_step(model, task, optimizer, [(batch, targets, False)], 1.0, ranks, settings)

        times = [measure.clock(step, ranks.device) for _ in range(7)]
        return [statistics.median(times[2:])]


def seeded(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Make the same new head on every rank."""
    torch.manual_seed(0)
    return make()


def forward_rank(name: str, how: dict[str, Any], tokens: int) -> list[float]:
    """Return the bytes after a forward pass above the bytes before it."""
    model = ESM2(SIZES[name])
    shard(model, Layout(**how), World(0, 1, torch.device("cpu"), None))
    model(peaks._batch(512, 256))  # this reads library pages that are loaded at their first use
    batch = peaks._batch(tokens, 256)
    gc.collect()
    before = measure._status("VmRSS")
    output = model(batch)
    kept = measure._status("VmRSS") - before
    assert output.representations
    return [kept]


def load_rank(folder: str) -> list[float]:
    """Return the seconds, the bytes of this rank's share, and its peak above the memory before."""
    with world() as ranks:
        found = weights.read(folder)
        with torch.device("meta"):
            model = ESM2(found.config)
        how = Layout(world_size=ranks.size, group=ranks.size)
        shard(model, how, ranks)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before, began = measure._status("VmRSS"), time.perf_counter()
        materialise(model, found.rows, how, ranks)
        peak, seconds = measure._status("VmHWM") - before, time.perf_counter() - began
        share = sum(local(p).numel() * 4 for p in model.parameters())
        return [seconds, share, peak]


def fake_rank(name: str, size: int, settings: dict[str, Any]) -> list[float]:
    """Return the number of groups, this rank's parameters, all parameters, and the seconds."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    began = time.perf_counter()
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    ranks = World(0, size, torch.device("cpu"), init_device_mesh("cpu", (size,), mesh_dim_names=("shard",)))
    with torch.device("meta"):
        model = ESM2(SIZES[name])
    whole = sum(p.numel() for p in model.parameters())
    how = layout(ParallelSettings.model_validate(settings), size, 8, "bf16")
    shard(model, how, ranks)
    held = sum(local(p).numel() for p in model.parameters())
    return [len(groups(model)), held, whole, time.perf_counter() - began]


def markdown(title: str, table: Table) -> str:
    """Return a table under its title."""
    head, *rows = table
    lines = [f"### {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])


FAKE = [
    (64, {"strategy": "full_shard"}),
    (64, {"strategy": "full_shard", "layers": 8}),
    (64, {"strategy": "hybrid_shard"}),
]


def run(args: argparse.Namespace) -> list[tuple[str, Table]]:
    """Return the tables of the requested measurements."""
    found: list[tuple[str, Table]] = []
    for model in args.models:
        if "memory" in args.work:
            title = f"Peak memory a rank, {model}, {args.tokens:,} tokens a rank, fp32"
            found.append((title, memory(model, args.tokens, (1, 2, 4))))
        if "steps" in args.work:
            found.append(
                (f"Step, {model}, {args.tokens:,} tokens in all, fp32", steps(model, args.tokens, args.rounds))
            )
        if "together" in args.work:
            title = f"Step of ranks that compute layers together, {model}, {args.tokens:,} tokens in all, fp32"
            found.append((title, together(model, args.tokens, args.rounds)))
    if "checkpointing" in args.work:
        found.append(("Activation memory, 150M, one process, fp32", checkpointing("150M", 4096)))
    if "load" in args.work:
        found.append(("Loading from disk", loading(("650M", "3B"), 4)))
    if "projection" in args.work:
        found.append(("Cost model and published runs", published()))
        found.append(("Projection, 16,384 tokens a GPU and step, bf16, 8 H100 a machine", projection()))
    if "fake" in args.work:
        found.append(("Sharding the 15B model as one of 64 ranks", fake("15B", FAKE)))
    return found


WORK = ("memory", "steps", "together", "checkpointing", "load", "fake", "projection")


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs="+", choices=WORK, default=WORK)
    parser.add_argument("--models", nargs="+", choices=SHORT, default=None)
    parser.add_argument("--tokens", type=int, default=None, help="a multiple of 1,024")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="sharding")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        what, *work = json.loads(args.rank)
        print(
            json.dumps(
                {
                    "step": step_rank,
                    "rate": rate_rank,
                    "load": load_rank,
                    "fake": fake_rank,
                    "forward": forward_rank,
                }[what](*work)
            )
        )
        return
    args.models, args.tokens = args.models or ["35M"], args.tokens or 2048
    tables = run(args)
    about = measure.facts(torch.device("cpu"))
    command = " ".join(["python benchmarks/sharding.py", *sys.argv[1:]])
    text = "\n".join([f"`{command}`", "", ", ".join(f"{k} {v}" for k, v in about.items()), ""])
    text += "\n" + "\n".join(markdown(title, table) for title, table in tables)
    print(text)
    stem = measure.RESULTS / f"{about['date']}-{args.name}"
    stem.with_suffix(".md").write_text(f"# {args.name}, {about['date']}\n\n{text}", encoding="utf-8")
    raw = {"command": command, "about": about, "tables": dict(tables)}
    stem.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
