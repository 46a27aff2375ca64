"""Stage `whole`: commands of users: `make finetune`, `embed`, the start of a run, checkpoints."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import measure
import numpy as np
import peers
import random_models
import torch

from esmshard.checkpoint import manifest
from esmshard.checkpoint.sharded import Saver
from esmshard.io.paths import shipped
from esmshard.model.families.esm2 import ESM2
from esmshard.model.families.family_registry import SIZES
from esmshard.vocab import decode
from gpu_stages import large
from gpu_stages.stage import GIB, Context, Figure, Found, NotRunError, Part, Stage, table

ROOT = Path(__file__).resolve().parents[2]
LOOK = 0.05
"""The seconds between two checks for the first result."""


def _finetune(context: Context) -> Found:
    """Run `make finetune` as in README, with its own output directory."""
    if shutil.which("make") is None:
        raise NotRunError("make is not installed; install it (apt-get install make)")
    run = context.scratch / "contact"
    arguments = ""
    if context.rehearsal:
        for name, chains in (("train", range(12)), ("valid", range(4))):
            write_chains(context.scratch, name, chains, name)
        paths = {"train": "train", "valid": "valid", "test": "valid"}
        data = " ".join(f"data.{k}={context.scratch / v}.fasta" for k, v in paths.items())
        arguments = f"{data} data.max_length=64 train.steps=2 train.eval_every=2 --no-report"
    ready = Path(sys.prefix) / ".ready"  # the installed packages are measured
    command = ["make", "finetune", f"VENV={sys.prefix}", f"RUN={run}", f"ARGUMENTS={arguments}", "-o", str(ready)]
    command += ["NPROC=1"] if context.rehearsal else []
    began = time.perf_counter()
    _checked(command, cwd=ROOT)
    seconds = time.perf_counter() - began
    figures = {"the whole of make finetune": Figure(seconds, "s"), **_of_run(run)}
    evaluation = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    return Found("", figures, {"evaluation": evaluation, "metrics": _lines(run)})


def _start(context: Context) -> Found:
    """Measure `esmshard finetune` of a random 650M on masked residues: the time to the first step, and of the steps."""
    fasta = _fasta(context.scratch / "proteins.fasta", context.amount(2000, 12))
    few = _fasta(context.scratch / "few.fasta", context.amount(50, 3), seed=1)
    run = context.scratch / "start"
    recipe = context.scratch / "start.yaml"
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
    figures = {
        "from the command to the end of the first step": Figure(
            next(line["seconds"] for line in lines if line.get("event") == "first_step"), "s"
        ),
        "a step": Figure(statistics.median(line["step_s"] for line in warm), "s"),
        "training": Figure(statistics.median(line["residues_per_s"] for line in warm), "residues/s"),
        "waiting for data": Figure(
            sum(line["data_wait_s"] for line in warm) / sum(line["step_s"] for line in warm), "%"
        ),
    }
    if warm[0]["mfu"] is not None:
        figures["MFU of the data sheet"] = Figure(statistics.median(line["mfu"] for line in warm), "%")
    return figures


def _embed(context: Context) -> Found:
    """Measure `esmshard embed` of many sequences, and the share of the command outside the device's arithmetic."""
    name = context.model("650M")
    model, out = context.scratch / "model", context.scratch / "embedded.npy"
    large.write_in_layers(model, name, context.device)
    count = context.amount(20000, 12)
    fasta, note = _fasta(context.scratch / "many.fasta", count), context.scratch / "note.json"
    program = Path(__file__).resolve().parents[1] / "embed_programs.py"
    command = [sys.executable, str(program), str(note), "esmshard", str(model), str(fasta), "-o", str(out)]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        first = None
        partial = out.with_name(f"{out.name}.partial")
        while process.poll() is None:
            if first is None and any(partial.glob("parts/*.json")):
                first = time.perf_counter() - began
            time.sleep(LOOK)
        seconds = time.perf_counter() - began
        assert process.stderr is not None
        said = process.stderr.read()
    if process.returncode:
        raise RuntimeError(f"esmshard embed ended with exit code {process.returncode}: {said.strip()[-300:]}")
    known = json.loads(note.read_text(encoding="utf-8"))
    if np.load(out, mmap_mode="r").shape != (count, SIZES[name].dim):
        raise RuntimeError(f"{out} does not hold {count} rows of {SIZES[name].dim}")
    shutil.rmtree(model)

    lengths = peers.protein_lengths(count)
    esm = random_models.trunk(name, context.device, context.dtype)
    run = peers.embed_ours(esm, peers.sequences(lengths), 16384, context.device)
    run()
    arithmetic = measure.clock(run, context.device)
    figures = {
        f"embed of {count:,} sequences, the whole command": Figure(seconds, "s"),
        "embedding, the whole command": Figure(sum(lengths) / seconds, "residues/s"),
        "of the command, not the device's arithmetic": Figure(max(0.0, 1 - arithmetic / seconds), "%"),
        "of the work after loading, not the device's arithmetic": Figure(max(0.0, 1 - arithmetic / known["work"]), "%"),
    }
    if first is not None:
        figures["first finished rows"] = Figure(first, "s", most=3.0)
    parts = {
        "start-up": seconds - known["work"],
        "waiting for rows": known["computing"],
        "the same packs alone": arithmetic,
    }
    rows = [[what, f"{value:.2f}"] for what, value in parts.items()]
    return Found("\n".join(table(["", "s"], rows)), figures, known | {"seconds": seconds, "arithmetic": arithmetic})


def _checkpoints(context: Context) -> Found:
    """Measure saving and verifying the state of a 650M model under AdamW, from the device to the disk."""
    with torch.device("meta"):
        shapes = {key: parameter.shape for key, parameter in ESM2(SIZES[context.model("650M")]).named_parameters()}
    tensors = {
        f"{kind}.{key}": torch.rand(shape, device=context.device)
        for key, shape in shapes.items()
        for kind in ("model", "exp_avg", "exp_avg_sq")
    }
    size = sum(tensor.numel() * 4 for tensor in tensors.values())
    rows: list[list[str]] = []
    figures: dict[str, Figure] = {}
    for background in (False, True):
        folder = context.scratch / f"checkpoints-{background}"
        saver = Saver(folder, 1, background)
        saver.save(1, tensors, {})  # this run makes directories, and the buffers on the host
        saver.finish()
        began = time.perf_counter()
        saver.save(2, tensors, {})
        held = time.perf_counter() - began
        saver.finish()
        whole = time.perf_counter() - began
        words = "in the background" if background else "at once"
        rows.append([f"save {words}", f"{held:.2f}", f"{whole:.2f}", f"{size / whole / 1e9:.2f}"])
        figures[f"save {words}: training held up"] = Figure(held, "s")
        figures[f"save {words}"] = Figure(size / whole / 1e9, "GB/s")
        began = time.perf_counter()
        manifest.verify(manifest.path_of(folder, 2))
        verified = time.perf_counter() - began
        shutil.rmtree(folder)
    figures["verify"] = Figure(size / verified / 1e9, "GB/s")
    rows.append(["verify", "", f"{verified:.2f}", f"{size / verified / 1e9:.2f}"])
    text = table([f"{size / 1e9:.1f} GB", "training held up, s", "s", "GB/s"], rows)
    return Found("\n".join(text), figures)


def _fasta(path: Path, count: int, seed: int = 0) -> Path:
    """Write random proteins."""
    sequences = peers.sequences(peers.protein_lengths(count, seed), seed)
    path.write_text("".join(f">p{n}\n{decode(one)}\n" for n, one in enumerate(sequences)), encoding="utf-8")
    return path


def write_chains(folder: Path, split: str, chains: range, name: str) -> None:
    """Write some chains of a split of the sample, with their coordinates, as NAME.fasta and NAME.npz."""
    with np.load(shipped("data") / "contact" / f"{split}.npz") as file:
        known = {key: file[key] for key in file.files}
    offsets = known["offsets"]
    rows = np.concatenate([np.arange(offsets[k], offsets[k + 1]) for k in chains])
    lengths = [int(offsets[k + 1] - offsets[k]) for k in chains]
    few: dict[str, Any] = {key: known[key][list(chains)] for key in ("names", "seqs", "dssp8") if key in known}
    few |= {"offsets": np.cumsum([0, *lengths]).astype(offsets.dtype), "cb_dA": known["cb_dA"][rows]}
    np.savez(folder / f"{name}.npz", **few)
    text = "".join(f">{few['names'][n]}\n{few['seqs'][n]}\n" for n in range(len(lengths)))
    (folder / f"{name}.fasta").write_text(text, encoding="utf-8")


def _lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _checked(command: list[str], cwd: Path | None = None) -> None:
    """Run a command. If it fails, raise its last output as the error."""
    done = subprocess.run(command, cwd=cwd, env=dict(os.environ), capture_output=True, text=True, check=False)
    if done.returncode:
        said = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise RuntimeError(f"{' '.join(command[:4])} ended with exit code {done.returncode}: {said[-400:]}")


STAGE = Stage(
    "whole",
    "commands as users type them: make finetune, embed of 20,000 sequences, start-up, checkpoints",
    (
        Part("make finetune", 90, _finetune, memory=10 * GIB),
        Part("embed", 90, _embed, memory=12 * GIB, disk=3 * GIB),
        Part("start of a run", 90, _start, memory=60 * GIB, disk=25 * GIB),
        Part("checkpoints", 60, _checkpoints, memory=12 * GIB, disk=17 * GIB),
    ),
)
