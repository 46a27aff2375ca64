"""Tests and measures esmshard on one NVIDIA GPU, in stages that can be interrupted and continued.

    python benchmarks/gpu.py --list                            # the stages, and how long each takes
    python benchmarks/gpu.py --out build/gpu                   # all stages, the most valuable first
    python benchmarks/gpu.py --out build/gpu --seconds 540     # as much as fits into nine minutes; repeat to continue
    python benchmarks/gpu.py --out build/gpu --stage speed     # one stage; --again repeats its measurements
    python benchmarks/gpu.py --rehearse --out build/rehearsal  # the same code on the CPU, with tiny models
    python benchmarks/gpu.py --collect build/gpu               # results into benchmarks/results and README.md

Each part of a stage runs in a process of its own. After each part, the JSON and Markdown files of the stage are written
again. A part that fails, crashes or hangs is recorded with its reason, and the next part runs. The machine needs no
network; `make gpu-wheels` fetches the packages that it lacks.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- gpu.py --collect writes from here -->", "<!-- to here -->"
NOTHING = "Nothing has been measured on a GPU yet.\n"

PATIENCE = (120.0, 3.0)
"""How many seconds a part may take, and the multiple of its expected time; the larger limit counts."""
REHEARSAL_SECONDS = 1200.0
"""How many seconds each part of a rehearsal may take: a machine with other work may be slow."""
ENDED = ("done", "failed")
"""The states of parts that the same command does not begin again."""


def main() -> int:
    """Parse, then list, collect, or run. Return the exit code: 0 if every part of this run is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the stages and their parts")
    parser.add_argument("--stage", action="append", metavar="NAME", help="run only this stage; may be repeated")
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory of results; earlier results are continued")
    parser.add_argument(
        "--seconds", type=_seconds, default=math.inf, metavar="N", help="begin no part that takes longer"
    )
    parser.add_argument("--again", action="store_true", help="repeat parts that have a result, or have failed")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, with tiny models")
    parser.add_argument("--collect", type=Path, metavar="DIR", help="directory of results")
    parser.add_argument("--inside", nargs=2, metavar=("PART", "SCRATCH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.collect:
        return collect(args.collect)
    if args.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # this comes before the import of torch, so that no GPU is used

    from gpu_stages import STAGES

    names = [stage.name for stage in STAGES]
    for name in args.stage or ():
        if name not in names:
            parser.error(f"--stage {name}: no such stage; there are {', '.join(names)}")
    if args.list:
        for stage in STAGES:
            parts = stage.chosen(rehearsal=args.rehearse)
            print(f"{stage.name:<9} {sum(part.seconds for part in parts):>4.0f} s  {stage.about}")
            for part in parts:
                print(f"          {part.seconds:>4.0f} s    {part.name}")
        return 0
    if args.out is None:
        parser.error("--out DIR is needed, for the results")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out}: is a file; name a directory")
    chosen = [stage for stage in STAGES if stage.name in (args.stage or names)]
    if args.inside is not None:
        return _inside(chosen[0], args)
    try:
        return _run(chosen, args)
    except KeyboardInterrupt:
        _say("interrupted; the same command goes on with what is left")
        return 130
    except OSError as error:
        _say(f"{error.filename or args.out}: {(error.strerror or str(error)).lower()}; name another --out")
        return 2


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError(text)  # argparse names the option
    return seconds


def _run(chosen: list[Any], args: argparse.Namespace) -> int:
    """Run the parts of stages one after the other, until all are done or the time is over."""
    import gpu_device
    from gpu_stages.stage import Record

    until = time.time() + args.seconds
    obstacle = None if args.rehearse else gpu_device.obstacle()
    counts: dict[str, int] = {}
    for stage in chosen:
        record = Record(args.out, stage.name, rehearsal=args.rehearse)
        command = ["python", "benchmarks/gpu.py", "--stage", stage.name, *(["--rehearse"] if args.rehearse else [])]
        record.content["command"] = shlex.join(command)
        for part in stage.chosen(rehearsal=args.rehearse):
            entry = record.parts.get(part.name, {"state": "not run"})
            if args.again or entry["state"] not in ENDED:
                left = until - time.time()
                if obstacle:
                    entry = entry if entry["state"] in ENDED else {"state": "not run", "reason": obstacle}
                elif part.seconds > left:
                    reason = f"it needs about {part.seconds:.0f} s, and {max(0.0, left):.0f} s are left"
                    entry = {"state": "not run", "reason": f"{reason}; run the same command again"}
                else:
                    _say(f"{stage.name}: {part.name} (about {part.seconds:.0f} s)")
                    entry = record.note(part.name, _part(stage, part, args, record, left))
            counts[entry["state"]] = counts.get(entry["state"], 0) + 1
            took = f"{entry['seconds']:.0f} s" if "seconds" in entry else ""
            print(f"{stage.name:<9} {entry['state']:<8} {took:>6}  {part.name}  {entry.get('reason', '')}".rstrip())
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    return 0 if set(counts) <= {"done"} else 1


def _part(stage: Any, part: Any, args: argparse.Namespace, record: Any, left: float) -> dict[str, Any]:
    """Run a part in a process of its own, and return its entry. The process ends when the part takes much too long."""
    args.out.mkdir(parents=True, exist_ok=True)
    limit = REHEARSAL_SECONDS if args.rehearse else max(PATIENCE[0], PATIENCE[1] * part.seconds)
    # This process makes the directory, because a killed process could not remove a model of 30 GB.
    with tempfile.TemporaryDirectory(prefix="esmshard-gpu-", ignore_cleanup_errors=True) as scratch:
        command = [sys.executable, sys.argv[0], "--stage", stage.name, "--out", str(args.out)]
        command += [*(["--rehearse"] if args.rehearse else []), "--inside", part.name, scratch]
        began = time.time()
        process = subprocess.Popen(command, start_new_session=True)
        ended = ""
        try:
            code = process.wait(timeout=min(limit, left))
        except subprocess.TimeoutExpired:
            ended = "it was ended, because it took far too long" if limit < left else "it was ended: time was up"
        finally:
            if process.poll() is None:  # all processes that the part has started end with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        answer = Path(scratch) / "answer.json"
        if not ended and answer.is_file():
            content = json.loads(answer.read_text(encoding="utf-8"))
            record.content["about"] = content["about"]
            return content["entry"]  # type: ignore[no-any-return]
        ended = ended or f"its process ended by {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        state = "not run" if ended.endswith("up") else "failed"
        return {"state": state, "reason": ended, "seconds": round(time.time() - began, 1)}


def _inside(stage: Any, args: argparse.Namespace) -> int:
    """Run one part in this process, and leave its entry in a file."""
    import torch
    from gpu_stages.stage import context_of, run_part

    name, scratch = args.inside[0], Path(args.inside[1])
    part = next(part for part in stage.parts if part.name == name)
    context = context_of(
        torch.device("cpu" if args.rehearse else "cuda"), args.out.resolve(), scratch, rehearsal=args.rehearse
    )
    about, entry = run_part(part, context)
    _say(f"{stage.name}: {name}: {entry['state']} after {entry['seconds']:.0f} s {entry.get('reason', '')}".rstrip())
    (scratch / "answer.json").write_text(json.dumps({"about": about, "entry": entry}), encoding="utf-8")
    return 0


def collect(source: Path) -> int:
    """Copy the results of GPU runs, and rewrite the table in README.md from all results in `results/`."""
    measured = [path for path in sorted(source.rglob("*-gpu-*.json")) if _measured(path)]
    if not measured:
        _say(f"--collect {source}: holds no results of a GPU run (rehearsals do not count)")
        return 1
    RESULTS.mkdir(exist_ok=True)
    for path in measured:
        for one in (path, path.with_suffix(".md")):
            shutil.copyfile(one, RESULTS / one.name)
            print(RESULTS / one.name)
    head, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    README.write_text(f"{head}{BEGIN}\n{summary(RESULTS)}{END}{tail}", encoding="utf-8")
    print(README)
    return 0


def _measured(path: Path) -> bool:
    """Return whether a file is the record of a stage on a GPU. A message names a file that is no record."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return not content["rehearsal"] and any(entry["state"] in ENDED for entry in content["parts"].values())
    except (ValueError, LookupError, TypeError, AttributeError):
        _say(f"{path}: is not the record of a stage, and is left out")
        return False


def summary(results: Path) -> str:
    """Return the table for README.md: the figures of the newest record of each stage, and parts without a result."""
    from gpu_stages import STAGES
    from gpu_stages.stage import Figure
    from measure import table

    rows: list[list[str]] = []
    missing: list[str] = []
    machines: dict[str, None] = {}
    for stage in STAGES:
        records = [path for path in sorted(results.glob(f"????-??-??-gpu-{stage.name}.json")) if _measured(path)]
        if not records:
            missing.append(f"- {stage.name}: not run")
            continue
        content = json.loads(records[-1].read_text(encoding="utf-8"))
        about = content["about"]
        machines[f"{about.get('device')}, driver {about.get('driver')}, torch {about.get('torch')}"] = None
        link = f"[{records[-1].name[:10]}](results/{records[-1].with_suffix('.md').name})"
        for name, entry in content["parts"].items():
            if entry["state"] != "done":
                missing.append(f"- {stage.name}, {name}: {entry['state']} ({entry.get('reason', 'no reason given')})")
            for what, known in entry.get("figures", {}).items():
                figure = Figure(**known)
                rows.append([stage.name, name, what, str(figure), figure.target(), link])
    if not rows:
        return NOTHING
    lines = [f"On {'; '.join(machines)}:", "", *table(["stage", "part", "figure", "value", "target", "record"], rows)]
    return "\n".join([*lines, *(["Failed or not run:", "", *missing, ""] if missing else [])])


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
