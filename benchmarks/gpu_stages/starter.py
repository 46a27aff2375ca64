"""Stage `starter`: trains the small model of the package, for all seconds that are left."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from esmshard.io.paths import shipped
from gpu_stages import large, whole
from gpu_stages.stage import GIB, Context, Figure, Found, NotRunError, Part, Stage

STEPS = ("mlm", "contact", "lm_head", "probe")
"""The recipes in data/starter, in order."""
SHARES = {"mlm": 0.45, "contact": 0.45}
"""The shares of the remaining time for the two recipes whose number of steps depends on the time."""
PROBED = 30
"""The steps that measure the time of a step."""
RESERVE = 150.0
"""The seconds for the last two recipes, consolidation, and the assembly of the model."""
LEAST = 240.0
"""The seconds below which no training begins: the model would be worse than the shipped model."""
TOKENS = {"mlm": 65536, "contact": 16384}
"""The tokens of a step. A GPU computes in a second what two CPU cores compute in minutes."""


def _trained(context: Context) -> Found:
    """Run the recipes with as many steps as fit into the time, and assemble the model."""
    if context.starter_data is None and not context.rehearsal:
        raise NotRunError(
            "it needs the starter's training data; make them with data/starter/build.py and give --starter-data DIR"
        )
    if not context.rehearsal and context.seconds_left() < LEAST:
        raise NotRunError(
            f"{context.seconds_left():.0f} s are left, and a better starter needs {LEAST:.0f}; run it again"
        )
    work = context.scratch / "starter"
    work.mkdir()
    if context.starter_data is None:
        _a_few(work)
    else:
        for path in context.starter_data.iterdir():
            (work / path.name).symlink_to(path)
    large.write_in_layers(work / "shape", context.model("8M"), context.device)
    began, figures = time.time(), {}
    steps: dict[str, int] = {}
    for name in STEPS:
        more: list[str] = []
        if name in SHARES:
            steps[name] = context.amount(_steps_that_fit(context, work, name, began), 2)
            more = _scaled(context, name, steps[name], work)
        elif name == "lm_head":
            more = [f"train.steps={context.amount(400, 2)}"]
        _finetune(context, work, name, work / name, more)
        figures |= _validation(work / name, name)
    out = context.out / "starter-model"
    shutil.rmtree(out, ignore_errors=True)
    recipes = shipped("data") / "starter"
    _run([sys.executable, str(recipes / "assemble.py"), str(work), str(out)], work)
    shutil.copyfile(work / "contact" / "model" / "README.md", out / "README.md")
    evaluation = json.loads((work / "contact" / "evaluation.json").read_text(encoding="utf-8"))
    (out / "evaluation.json").write_text(json.dumps(evaluation, indent=1) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in out.iterdir())
    figures |= {f"steps of {name}": Figure(count) for name, count in steps.items()}
    figures["size"] = Figure(size / 1e6, "MB", most=20.0)
    text = f"The model and its card are in `{out.name}`. Trained for {time.time() - began:.0f} s on this device."
    return Found(text, figures, {"evaluation": evaluation})


def _steps_that_fit(context: Context, work: Path, name: str, began: float) -> int:
    """Return the steps that fit into the time, by the time of some steps. A cosine schedule needs the number first."""
    if context.rehearsal:
        return 2
    run = work / f"{name}-speed"
    _finetune(context, work, name, run, _scaled(context, name, PROBED, work))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = sorted(line["step_s"] for line in lines if "step_s" in line)
    total = context.deadline - began - RESERVE
    share = total * SHARES[name] if name == "mlm" else context.seconds_left() - RESERVE
    return max(PROBED, int(0.9 * share / steps[len(steps) // 2]))


def _scaled(context: Context, name: str, steps: int, work: Path) -> list[str]:
    """Return overrides for a GPU: a larger model, larger steps, and ten validations in a run."""
    every = max(1, steps // 10)
    found = [f"train.steps={steps}", f"train.eval_every={every}", f"checkpoint.every={every}"]
    if name == "mlm":  # only the shape is used; weights are drawn
        found += [f"model.name={work / 'shape'}"]
    if context.rehearsal:
        small = ["batch.global_tokens=600", "data.max_length=40"]
        return [*found, *small, *(["task.channels=4"] if name == "contact" else [])]
    if name == "contact":  # only longer pieces have pairs that are far apart
        found += ["data.max_length=256"]
    return [*found, f"batch.global_tokens={TOKENS[name]}"]


def _a_few(work: Path) -> None:
    """Write a few chains of the sample in place of the training data."""
    whole.write_chains(work, "valid", range(4), "chains")
    for ending in (".fasta", ".npz"):
        shutil.copyfile(work / f"chains{ending}", work / f"valid_chains{ending}")
    (work / "sequences.fasta.gz").write_bytes(gzip.compress((work / "chains.fasta").read_bytes()))


def _finetune(context: Context, work: Path, name: str, run: Path, more: list[str]) -> None:
    recipe = shipped("data") / "starter" / f"{name}.yaml"
    command = [
        sys.executable,
        "-m",
        "esmshard",
        "finetune",
        str(recipe),
        f"out={run}",
        *more,
        "--nproc",
        "1",
    ]
    if context.rehearsal:
        command += [f"data.test={work / 'valid_chains.fasta'}"]
    print(f"  starter: {name} {' '.join(more)}", file=sys.stderr, flush=True)
    _run([*command, "--no-report", "--overwrite"], work)


def _run(command: list[str], work: Path) -> None:
    environment = {**os.environ, "SCRATCH": str(work)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise RuntimeError(f"{' '.join(command[1:5])} ended with exit code {done.returncode}: {said[-400:]}")


def _validation(run: Path, name: str) -> dict[str, Figure]:
    """Return the headline metric of the last validation of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    valid = [line for line in lines if line.get("split") == "valid"]
    if not valid:
        return {}
    headline = next(key for key in valid[-1] if key not in ("step", "split", "loss", "time"))
    return {f"{name}: validation, {headline}": Figure(valid[-1][headline] or float("nan"))}


STAGE = Stage(
    "starter",
    "trains the starter from its recipes for as long as there are seconds; leaves the model and its card",
    (Part("starter", LEAST, _trained, memory=20 * GIB, disk=GIB),),
)
