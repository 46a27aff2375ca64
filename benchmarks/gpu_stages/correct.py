"""Stage `correct`: the tests that need a GPU, each file in its own process."""

import functools
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from measure import table

from gpu_stages.stage import Context, FailedError, Figure, Found, NotRunError, Part, Stage

TESTS = Path(__file__).resolve().parents[2] / "tests" / "gpu"


def _tests(context: Context, name: str, files: Sequence[Path]) -> Found:
    """Run some files of tests in one process, and make a table of the results."""
    report = context.scratch / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *map(str, files), "-p", "no:cacheprovider"]
    environment = {**os.environ, "ESMSHARD_REHEARSAL": "1" if context.rehearsal else "0"}
    command += ["-p", "no:xdist", f"--junitxml={report}"]
    done = subprocess.run(command, env=environment, cwd=TESTS.parents[1], capture_output=True, text=True, check=False)
    (context.out / f"tests-{name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if not report.is_file():
        output = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
        raise RuntimeError(f"pytest ended with exit code {done.returncode} and no report; its last line: {output[-1]}")
    if done.returncode == 5:
        raise NotRunError("pytest found no tests; the packages that these tests need are missing")
    cases = [(case, _outcome(case)) for case in ET.parse(report).iter("testcase")]
    rows = [[str(case.get("name")), outcome, f"{float(case.get('time', 0)):.1f}"] for case, (outcome, _) in cases]
    rows[:] = [[name.replace("|", "/"), *rest] for name, *rest in rows]
    bad = [(str(case.get("name")), why) for case, (outcome, why) in cases if outcome == "failed"]
    skipped = [(str(case.get("name")), why) for case, (outcome, why) in cases if outcome == "skipped"]
    lines = table(["test", "outcome", "s"], rows)
    lines += [f"- {test}: {why}" for test, why in [*bad, *skipped]]
    passed = len(cases) - len(bad) - len(skipped)
    figures = {"tests passed": Figure(passed, f"of {len(cases)}", least=len(cases))}
    found = Found("\n".join(lines), figures, data=rows)
    if bad or done.returncode or not cases:
        names = ", ".join(test for test, _ in bad[:6]) or f"pytest ended with exit code {done.returncode}"
        raise FailedError(f"{len(bad)} of {len(cases)} tests failed: {names}", found)
    return found


def _outcome(case: ET.Element) -> tuple[str, str]:
    """Return the result of a test, and the first line of its reason."""
    for kind, word in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(kind)) is not None:
            lines = (found.get("message") or found.text or "").strip().splitlines()
            return word, lines[0][:300] if lines else ""
    return "passed", ""


SECONDS = {
    "kernels": 20.0,
    "models": 50.0,
    "gradients": 45.0,
    "runs": 90.0,
    "sharding": 25.0,
    "saving": 30.0,
    "memory": 90.0,
    "exhaustion": 45.0,
    "layers": 15.0,
    "compiled": 60.0,
    "packed": 30.0,
}
"""The files of tests, the most valuable first, with the expected seconds of each."""
OTHERS = 45.0
"""The expected seconds of any other file."""


def _parts() -> tuple[Part, ...]:
    names = {file.stem.removeprefix("test_"): file for file in sorted(TESTS.glob("test_*.py"))}
    # In a rehearsal one process runs all files: no test can end the others, and each start takes seconds.
    every = Part("all", 0.0, functools.partial(_tests, name="all", files=[*names.values()]), when="rehearsal")
    first = [name for name in SECONDS if name in names]
    return (
        *(
            Part(name, SECONDS.get(name, OTHERS), functools.partial(_tests, name=name, files=[names[name]]), when="gpu")
            for name in [*first, *(names.keys() - SECONDS.keys())]
        ),
        every,
    )


STAGE = Stage(
    "correct",
    "the tests marked gpu: kernels, models, gradients, sharding, saving and memory against the CPU",
    _parts(),
)
