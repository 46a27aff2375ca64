"""Stage `whole`: commands of users: `make finetune`, `embed`, the start of a run."""

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import embed
import measure
import numpy as np
import peers
import random_models
import torch

from esmshard.model.families.family_registry import SIZES
from gpu_stages.stage import GIB, Context, Figure, Found, NotRunError, Part, Stage

ROOT = Path(__file__).resolve().parents[2]


def _finetune(context: Context) -> Found:
    """Run `make finetune` as in README, with its own output directory."""
    if shutil.which("make") is None:
        raise NotRunError("make is not installed; install it (apt-get install make)")
    run = context.scratch / "contact"
    small = "model.name=nano init=random train.steps=2 train.eval_every=2 data.max_length=64 --no-report"
    ready = Path(sys.prefix) / ".ready"  # the installed packages are measured
    command = ["make", "finetune", f"VENV={sys.prefix}", f"RUN={run}", "-o", str(ready)]
    command += ["NPROC=1", f"ARGUMENTS={small}"] if context.rehearsal else []
    began = time.perf_counter()
    _checked(command, cwd=ROOT)
    figures = {"the whole of make finetune": Figure(time.perf_counter() - began, "s"), **_of_run(run)}
    evaluation = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    return Found("", figures, {"evaluation": evaluation, "metrics": _lines(run)})


def _start(context: Context) -> Found:
    """Measure `esmshard finetune` of a random 650M on masked residues: the time to the first step, and of the steps."""
    lengths = peers.protein_lengths(context.amount(2000, 12))
    fasta = embed.write_fasta(context.scratch / "proteins.fasta", lengths)
    few = embed.write_fasta(context.scratch / "few.fasta", lengths[:3], seed=2)
    run, recipe = context.scratch / "start", context.scratch / "start.yaml"
    recipe.write_text(
        f"task: {{name: mlm}}\nmodel: {{name: {context.model('650M')}}}\ninit: random\n"
        f"data: {{train: {fasta}, valid: {few}, test: {few}, long: crop}}\n"
        f"batch: {{global_tokens: {context.amount(65536, 1100)}, tokens_per_rank: {context.amount(16384, 1100)}}}\n"
        f"train: {{steps: {context.amount(8, 2)}}}\n"
        f"checkpoint: {{every: {context.amount(4, 1)}, keep: 1}}\nout: {run}\n",
        encoding="utf-8",
    )
    _checked([sys.executable, "-m", "esmshard", "finetune", str(recipe), "--nproc", "1", "--no-report"])
    figures = _of_run(run)
    stalls = [line["stall_s"] for line in _lines(run) if line.get("event") == "checkpoint"]
    figures["a checkpoint holds training up for"] = Figure(statistics.median(stalls), "s")
    return Found("", figures, {"metrics": _lines(run)})


def _of_run(run: Path) -> dict[str, Figure]:
    """Return the speed from the records of a run. The first steps are a warm-up."""
    lines = _lines(run)
    steps = [line for line in lines if "loss" in line and "split" not in line]
    warm = steps[2:] or steps
    first = next(line["seconds"] for line in lines if line.get("event") == "first_step")
    waiting = sum(line["data_wait_s"] for line in warm) / sum(line["step_s"] for line in warm)
    figures = {
        "from the command to the end of the first step": Figure(first, "s"),
        "a step": Figure(statistics.median(line["step_s"] for line in warm), "s"),
        "training": Figure(statistics.median(line["residues_per_s"] for line in warm), "residues/s"),
        "waiting for data": Figure(waiting, "%"),
    }
    if warm[0]["mfu"] is not None:
        figures["MFU of the data sheet"] = Figure(statistics.median(line["mfu"] for line in warm), "%")
    return figures


def _embed(context: Context) -> Found:
    """Measure `esmshard embed` of many sequences, and the share of the command outside the device's arithmetic."""
    name, count = context.model("650M"), context.amount(20000, 12)
    bench = embed.Bench(context.scratch, 1)
    lengths = peers.protein_lengths(count)
    fasta = embed.write_fasta(context.scratch / "many.fasta", lengths)
    run = bench.embed(bench.model(name), fasta, threads=torch.get_num_threads())
    if np.load(context.scratch / "e.npy", mmap_mode="r").shape != (count, SIZES[name].dim):
        raise RuntimeError(f"the output does not hold {count} rows of {SIZES[name].dim}")
    esm = random_models.trunk(name, context.device, context.dtype)
    same_packs = peers.embed_ours(esm, peers.sequences(lengths), 16384, context.device)
    same_packs()
    arithmetic = measure.clock(same_packs, context.device)
    figures = {
        f"embed of {count:,} sequences, the whole command": Figure(run.seconds, "s"),
        "embedding, the whole command": Figure(sum(lengths) / run.seconds, "residues/s"),
        "of the command, not the device's arithmetic": Figure(max(0.0, 1 - arithmetic / run.seconds), "%"),
        "first finished rows": Figure(run.first_result, "s", most=3.0),
    }
    return Found(f"The same packs alone take {arithmetic:.2f} s.", figures)


def _lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _checked(command: list[str], cwd: Path | None = None) -> None:
    """Run a command. If it fails, raise its last output as the error."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        output = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise RuntimeError(f"{' '.join(command[:4])} ended with exit code {done.returncode}: {output[-400:]}")


STAGE = Stage(
    "whole",
    "commands as users type them: make finetune, embed of 20,000 sequences, start-up",
    (
        Part("make finetune", 90, _finetune, memory=10 * GIB),
        Part("embed", 90, _embed, memory=12 * GIB, disk=6 * GIB),
        Part("start of a run", 90, _start, memory=60 * GIB, disk=25 * GIB),
    ),
)
