"""Tests and measures esmshard on one NVIDIA GPU, in stages that can be interrupted and continued.

    python benchmarks/gpu.py --list                            # the stages, and how long each takes
    python benchmarks/gpu.py --out build/gpu                   # all stages, the most valuable first
    python benchmarks/gpu.py --out build/gpu --seconds 540     # as much as fits into nine minutes; repeat to continue
    python benchmarks/gpu.py --out build/gpu --stage speed     # one stage; --again repeats its measurements
    python benchmarks/gpu.py --rehearse --out build/rehearsal  # the same code on the CPU, with tiny models
    python benchmarks/gpu.py --collect build/gpu               # results into benchmarks/results and README.md

Each stage runs in a process of its own, which writes a dated JSON and Markdown file after each of its parts. A part
that fails is recorded with its reason, and the next part runs; a process that crashes or hangs is ended, and the
stage continues in a new process. The machine needs no network; `make gpu-wheels` fetches the packages that it lacks.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- gpu.py --collect writes from here -->", "<!-- to here -->"
NOTHING = "Nothing has been measured on a GPU yet.\n"

STAGE_SECONDS = 540
"""The seconds after which a stage is ended. On machines that are lent for ten minutes a command must end in time."""
PATIENCE = (120.0, 3.0)
"""The seconds that a part may take, and the multiple of its expected time; the larger limit counts."""
REHEARSAL_SECONDS = 1200.0
"""The seconds for each part of a rehearsal: a machine with other work may take long."""
START_SECONDS = 30.0
"""The seconds that the process of a stage has after its end, to record the parts that it does not begin."""
ENDED = ("done", "failed")
"""The states of parts that the same command does not begin again."""


def main() -> int:
    """Parse, then list, collect, or run. Return the exit code: 0 if every part of this run is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the stages and their parts")
    parser.add_argument("--stage", action="append", metavar="NAME", help="run only this stage; may be repeated")
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory of results; earlier results are continued")
    parser.add_argument(
        "--seconds", type=_seconds, metavar="N", help="seconds of this command; no part that takes longer is begun"
    )
    parser.add_argument("--again", action="store_true", help="repeat parts that have a result, or have failed")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, with tiny models")
    parser.add_argument(
        "--starter-data", type=Path, metavar="DIR", help="directory that data/starter/build.py has written"
    )
    parser.add_argument("--collect", type=Path, metavar="DIR", help="directory of results, or a .tar.gz of one")
    parser.add_argument("--inside", nargs=2, metavar=("DEADLINE", "SCRATCH"), help=argparse.SUPPRESS)
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
            print(f"{stage.name:<9} {stage.seconds:>4.0f} s  {stage.about}")
            for part in stage.chosen(rehearsal=args.rehearse):
                print(f"          {part.seconds:>4.0f} s    {part.name}")
        return 0
    if args.out is None:
        parser.error("--out DIR is needed, for the results")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out}: is a file; name a directory")
    if args.starter_data and not (args.starter_data / "chains.npz").is_file():
        parser.error(f"--starter-data {args.starter_data}: has no chains.npz; make it with data/starter/build.py")
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
    """Run stages one after the other, each in its own processes, until all are done or the time is over."""
    import gpu_device
    from gpu_stages.stage import Record

    until = time.time() + (args.seconds or math.inf)
    rows: list[tuple[Any, Any, str | None]] = []
    for stage in chosen:
        record = Record(args.out, stage.name, rehearsal=args.rehearse)
        parts = stage.chosen(rehearsal=args.rehearse)
        left = [part for part in parts if args.again or record.state(part.name) not in ENDED]
        reason = None
        if left and not args.rehearse:
            reason = gpu_device.obstacle()
            if reason is None and time.time() + min(part.seconds for part in left) > until:
                reason = f"{max(0.0, until - time.time()):.0f} s are left; run the same command again"
        if left and reason is None:
            if args.again:
                record = _anew(record, stage.name, args)
            args.out.mkdir(parents=True, exist_ok=True)
            record.forget_running()
            _stage(stage, record, args, until)
        rows.append((stage, record, reason))
    return _summary(rows, rehearsal=args.rehearse)


def _stage(stage: Any, record: Any, args: argparse.Namespace, until: float) -> None:
    """Run one stage. If its process dies, start another process for the remaining parts."""
    deadline = min(until, math.inf if args.rehearse else time.time() + STAGE_SECONDS)
    for _ in stage.chosen(rehearsal=args.rehearse):
        code, ended = _watched(stage, record, args, deadline)
        part = record.running()
        if part is None and (code == 0 or ended):
            return
        if part is not None:
            why = ended or f"its process ended by {f'signal {-code}' if code < 0 else f'exit code {code}'}"
            why += f" after {time.time() - record.parts[part]['since']:.0f} s"
            if time.time() > deadline:
                record.note(part, "not run", reason=f"{why}; run the same command again")
            else:
                record.note(part, "failed", reason=why)
            _say(f"{stage.name}: {part}: {why}")
        elif code not in (0, 3):
            _say(f"{stage.name}: its process ended with exit code {code} before its first part; see above")
            for one in stage.chosen(rehearsal=args.rehearse):
                if record.state(one.name) is None:
                    record.note(one.name, "failed", reason=f"its process ended with exit code {code}")
            return
        if time.time() > deadline:
            return


def _anew(record: Any, stage: str, args: argparse.Namespace) -> Any:
    """Return an empty record of a stage with today's date."""
    for path in (record.path, record.path.with_suffix(".md")):
        path.unlink(missing_ok=True)
    return type(record)(args.out, stage, rehearsal=args.rehearse)


def _watched(stage: Any, record: Any, args: argparse.Namespace, deadline: float) -> tuple[int, str]:
    """Run a stage's process, and end it if a part takes much too long or the time is over.

    Returns:
        The exit code, and why the process was ended; empty if it ended by itself. `record` has the results so far.
    """
    command = [sys.executable, sys.argv[0], "--stage", stage.name, "--out", str(args.out)]
    command += ["--rehearse"] if args.rehearse else []
    command += ["--starter-data", str(args.starter_data)] if args.starter_data else []
    expected = {part.name: part.seconds for part in stage.parts}
    # This process makes the directory, because a killed process could not remove a model of 30 GB.
    with tempfile.TemporaryDirectory(prefix="esmshard-gpu-", ignore_cleanup_errors=True) as scratch:
        process = subprocess.Popen([*command, "--inside", str(deadline), scratch], start_new_session=True)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=1), ""
                record.reload()
                part = record.running()
                if time.time() > deadline + (0 if part else START_SECONDS):
                    return _end(process), "it was ended, for time was up,"
                if part is None:
                    continue
                least, times = PATIENCE
                limit = REHEARSAL_SECONDS if args.rehearse else max(least, times * expected[part])
                if time.time() > record.parts[part]["since"] + limit:
                    return _end(process), "it was ended, for it took far too long,"
        finally:
            _end(process)
            record.reload()


def _end(process: subprocess.Popen[bytes]) -> int:
    """Kill a stage with all processes that it has started, and return its exit code."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _inside(stage: Any, args: argparse.Namespace) -> int:
    """Run in the process of a stage."""
    import torch
    from gpu_stages.stage import Record, context_of, run_stage

    device = torch.device("cpu" if args.rehearse else "cuda")
    data = args.starter_data.resolve() if args.starter_data else None
    deadline, scratch = float(args.inside[0]), Path(args.inside[1])
    context = context_of(device, args.out.resolve(), scratch, deadline, rehearsal=args.rehearse, starter_data=data)
    command = ["python", "benchmarks/gpu.py", "--stage", stage.name, *(["--rehearse"] if args.rehearse else [])]
    return run_stage(stage, context, Record(args.out, stage.name, rehearsal=args.rehearse), shlex.join(command))


def _summary(rows: list[tuple[Any, Any, str | None]], *, rehearsal: bool) -> int:
    """Print the state of each part; return 1 if a part failed or was not run."""
    counts: dict[str, int] = {}
    for stage, record, obstacle in rows:
        parts = stage.chosen(rehearsal=rehearsal)
        for part in parts:
            entry = record.parts.get(part.name, {"state": "not run", "reason": obstacle})
            counts[entry["state"]] = counts.get(entry["state"], 0) + 1
            if part.name not in record.parts:
                continue
            took = f"{entry['seconds']:.0f} s" if "seconds" in entry else ""
            print(f"{stage.name:<9} {entry['state']:<8} {took:>6}  {part.name}")
            if entry.get("reason"):
                print(f"{'':<27}{entry['reason']}")
        if obstacle is not None:
            print(f"{stage.name:<9} {'not run':<8}         {obstacle}")
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    return 0 if set(counts) <= {"done"} else 1


def collect(source: Path) -> int:
    """Copy the results of GPU runs, and rewrite the table in README.md from all results in `results/`."""
    if not source.exists():
        _say(f"--collect {source}: no such file or directory; give the --out of a run")
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        if source.is_file():
            try:
                with tarfile.open(source) as archive:
                    archive.extractall(scratch, filter="data")
            except (tarfile.TarError, OSError) as error:
                _say(f"--collect {source}: not an archive that can be read ({error}); give a directory or a .tar.gz")
                return 2
            source = Path(scratch)
        found = [path for path in sorted(source.rglob("*-gpu-*.json")) if _measured(path)]
        if not found:
            _say(f"--collect {source}: holds no results of a GPU run (rehearsals do not count)")
            return 1
        RESULTS.mkdir(exist_ok=True)
        for path in found:
            for one in (path, path.with_suffix(".md")):
                shutil.copyfile(one, RESULTS / one.name)
                print(RESULTS / one.name)
    text = README.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
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
    from gpu_stages.stage import Figure, table

    rows: list[list[str]] = []
    amiss: list[str] = []
    machines: dict[str, None] = {}
    for stage in STAGES:
        records = [path for path in sorted(results.glob(f"????-??-??-gpu-{stage.name}.json")) if _measured(path)]
        if not records:
            amiss.append(f"- {stage.name}: not run")
            continue
        content = json.loads(records[-1].read_text(encoding="utf-8"))
        about = content["about"]
        machines[f"{about.get('device')}, driver {about.get('driver')}, torch {about.get('torch')}"] = None
        link = f"[{records[-1].name[:10]}](results/{records[-1].with_suffix('.md').name})"
        for name, entry in content["parts"].items():
            if entry["state"] != "done":
                amiss.append(f"- {stage.name}, {name}: {entry['state']} ({entry.get('reason', 'no reason given')})")
            for what, known in entry.get("figures", {}).items():
                figure = Figure(**known)
                rows.append([stage.name, name, what, str(figure), figure.target(), link])
    if not rows:
        return NOTHING
    lines = [f"On {'; '.join(machines)}:", "", *table(["stage", "part", "figure", "value", "target", "record"], rows)]
    return "\n".join([*lines, *(["Failed or not run:", "", *amiss, ""] if amiss else [])])


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
