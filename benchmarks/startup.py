"""Measures the time of `esmshard --help` beside an empty interpreter. `python benchmarks/startup.py --help`."""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import measure
import torch

ASKED = 0.5
"""The bound in seconds, on an idle machine."""
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "esmshard --help": ["-m", "esmshard", "--help"],
    "esmshard finetune --help": ["-m", "esmshard", "finetune", "--help"],
}


def main() -> None:
    """Time each command as a whole process, turn by turn, and store the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=10, help="number of turns of each command, after one turn to warm up"
    )
    parser.add_argument("--out", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(args.rounds + 1):
        for name, arguments in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
            if turn:
                seconds[name].append(time.perf_counter() - began)
    about = measure.facts(torch.device("cpu"))
    lines = ["|  | s, median [min, max] | asked |", "|---|---|---|"]
    for name, times in seconds.items():
        asked = f"{ASKED}" if name == "esmshard --help" else ""
        lines.append(f"| {name} | {statistics.median(times):.2f} [{min(times):.2f}, {max(times):.2f}] | {asked} |")
    command = " ".join(["python benchmarks/startup.py", *sys.argv[1:]])
    text = "\n".join([f"`{command}`", "", ", ".join(f"{k} {v}" for k, v in about.items()), "", *lines])
    print(text)
    stem = args.out / f"{about['date']}-startup"
    stem.with_suffix(".md").write_text(f"# startup, {about['date']}\n\n{text}\n", encoding="utf-8")
    raw = {"command": command, "about": about, "seconds": seconds}
    stem.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
