"""Measures the memory of `esmshard consolidate` for each layout and precision, with checkpoints of random weights.

Each case is a process of its own, watched from outside: its anonymous memory (RssAnon, which the kernel cannot drop)
is read every two milliseconds. Memory from before the measurement does not count: imports, and the consolidation of a
nano model, which runs all code once.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import measure
import torch

from esmshard.checkpoint import sharded
from esmshard.checkpoint.consolidate import consolidate
from esmshard.model import weights
from esmshard.model.families.esm2 import EsmConfig
from esmshard.model.families.esm_base import TIED
from esmshard.model.families.family_registry import SIZES, n_parameters
from esmshard.recipe.sections import Recipe
from esmshard.tasks.registry import new_task

SHORT = {"8M": "esm2_t6_8M_UR50D", "650M": "esm2_t33_650M_UR50D", "3B": "esm2_t36_3B_UR50D"}
CASES = (("hf", "fp32"), ("hf", "bf16"), ("fair-esm", "fp32"))
MIB = 2**20


def write_run(run: Path, name: str) -> None:
    """Make a run with one checkpoint of random weights by one rank: each tensor is one piece, the hardest case.

    The weights are read from a mapped file, because DCP needs all of them at once.
    """
    run.mkdir(parents=True)
    config = SIZES[name]
    recipe = Recipe.model_validate(
        {
            "task": {"name": "contact", "channels": 8, "blocks": 1},
            "model": {"name": name},
            "init": "random",
            "data": {"train": "a.fasta", "valid": "b.fasta", "test": "c.fasta"},
            "out": run.name,
        }
    )
    shapes = {key: shape for key, shape in weights.shapes(config).items() if key != TIED}
    flat = run / "flat"
    memory = torch.from_file(str(flat), shared=True, size=sum(shape.numel() for shape in shapes.values()))
    parts = memory.split([shape.numel() for shape in shapes.values()])
    tensors = {f"model.trunk.{key}": part.view(shape) for part, (key, shape) in zip(parts, shapes.items(), strict=True)}
    for key, shape in shapes.items():
        fill(tensors[f"model.trunk.{key}"], key, shape, weights.fresh(config, 0))
    head = new_task(recipe.task, {}).head(config)
    tensors |= {f"model.head.{key}": tensor for key, tensor in head.state_dict().items()}
    state = {"recipe": recipe.model_dump(mode="json"), "config": config.recorded(), "world_size": 1, "facts": {}}
    sharded.write(run / "checkpoints", 1, tensors, state, keep=1)
    flat.unlink()


def fill(tensor: torch.Tensor, key: str, shape: torch.Size, fresh: weights.Weights) -> None:
    """Fill weights with the distribution of new weights. Drawing gigabytes name by name would take minutes."""
    if len(shape) == 2 and key.startswith("layers."):
        tensor.uniform_(-1, 1).mul_((6 / sum(shape)) ** 0.5)
    else:
        tensor.copy_(fresh[key])


def peak(run: Path, nano: Path, to: str, dtype: str) -> tuple[int, int]:
    """Return the bytes of the largest file, and of the peak of anonymous memory."""
    with tempfile.TemporaryDirectory(dir=run.parent) as scratch:
        out = Path(scratch) / "esm2_model"
        command = [sys.executable, __file__, "--child", str(run), str(nano), str(out), to, dtype]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdin is not None
            child.stdout.readline()  # the process has finished the work that is not measured
            before, most = resident(child.pid), 0
            child.stdin.write("go\n")
            child.stdin.flush()
            while child.poll() is None:
                most = max(most, resident(child.pid))
                time.sleep(0.002)
        if child.returncode:
            raise RuntimeError("consolidate failed; its error stands above")
        return max(p.stat().st_size for p in out.iterdir()), most - before


def child(run: str, nano: str, out: str, to: str, dtype: str) -> None:
    """Run in the process that is measured."""
    make(Path(nano), Path(out).with_name("esm2_nano"), to, dtype)
    print("ready", flush=True)
    sys.stdin.readline()
    make(Path(run), Path(out), to, dtype)


def make(run: Path, out: Path, to: str, dtype: str) -> None:
    """Measure one case."""
    consolidate(run, out, to="hf" if to == "hf" else "fair-esm", dtype=dtype)


def resident(pid: int) -> int:
    """Return RssAnon of a process in bytes; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def largest(config: EsmConfig) -> tuple[int, int]:
    """Return the bytes of the largest tensor and of a layer, in fp32."""
    shapes = weights.shapes(config)
    layer = sum(shape.numel() for key, shape in shapes.items() if key.startswith("layers.0."))
    return 4 * max(shape.numel() for shape in shapes.values()), 4 * layer


def table(models: Sequence[str], scratch: Path) -> list[list[str]]:
    """Measure every case of every model."""
    head = "model | layout | precision | model, MiB | largest file, MiB | largest tensor and layer, MiB"
    rows = [[*head.split(" | "), "peak, MiB", "peak / largest file"]]
    nano = scratch / "nano"
    if not nano.exists():
        write_run(nano, "nano")
    for model in models:
        run = scratch / model
        if not run.exists():
            write_run(run, SHORT[model])
        tensor, layer = largest(SIZES[SHORT[model]])
        for to, dtype in CASES:
            file, most = peak(run, nano, to, dtype)
            sizes = (n_parameters(SIZES[SHORT[model]]) * (4 if dtype == "fp32" else 2), file)
            cells = [model, to, dtype, *(f"{size / MIB:,.0f}" for size in sizes)]
            cells += [f"{tensor / MIB:,.0f} + {layer / MIB:,.0f}", f"{most / MIB:,.0f}", f"{most / file:.2f}"]
            rows.append(cells)
            print("  " + " | ".join(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SHORT, default=["8M", "650M", "3B"])
    parser.add_argument("--scratch", type=Path, help="directory in which checkpoints are kept for the next call")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = table(args.models, args.scratch or Path(folder))
    about = measure.facts(torch.device("cpu"))
    title = "Peak memory of consolidate"
    command = " ".join(["python benchmarks/consolidate.py --models", *args.models])
    lines = [f"`{command}`", "", ", ".join(f"{k} {v}" for k, v in about.items()), "", f"### {title}", ""]
    lines += ["| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]]
    text = "\n".join(lines) + "\n"
    print(text)
    stem = measure.RESULTS / f"{about['date']}-consolidate"
    stem.with_suffix(".md").write_text(f"# consolidate, {about['date']}\n\n{text}", encoding="utf-8")
    raw = {"command": command, "about": about, "tables": {title: rows}}
    stem.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
