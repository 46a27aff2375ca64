"""`esmshard embed` may be killed at any moment, and share its work with others: nothing is lost, doubled or mixed."""

import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from embed_runs import ORDER, Run, content, stage, until, write_fasta, write_model

from esmshard.embed import engines
from esmshard.embed.engines import embed
from esmshard.embed.parts import begin, partial
from esmshard.embed.spec import request

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")

PART = 4096
NAMES = ("x.npy", "x.h5", "x")
STAGES = ("planning", "planned", "computing", "computed", "writing", "sealed", "removing")
"""That kills wait for."""


class Given(NamedTuple):
    model: Path
    fasta: Path
    whole: dict[str, dict[str, object]]
    """What an uninterrupted run writes, by the name of the output."""


def give(directory: Path, records: int) -> Given:
    model, fasta = write_model(directory / "model"), write_fasta(directory / "x.fasta", records)
    whole = {}
    for name in NAMES:
        out = directory / f"whole-{name}" / name
        out.parent.mkdir()
        run = Run("embed", model, fasta, "-o", out, folder=directory / "said", part_tokens=PART)
        assert run.wait() == 0, run.said
        whole[name] = content(out)
    return Given(model, fasta, whole)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    return give(tmp_path_factory.mktemp("given"), 600)


def drill(given: Given, directory: Path, kills: int, seed: int, processes: float) -> Counter[str]:
    """Kill runs until so many have been killed, and look at each output that gets finished; where the kills fell.

    Args:
        given: to embed.
        directory: for the outputs.
        kills: in all.
        seed: of when, and of whom.
        processes: share of the runs with two of them.
    """
    rng = np.random.default_rng(seed)
    fell: Counter[str] = Counter()
    outputs, attempts = 0, 0
    while fell.total() < kills or outputs < 1:
        name = NAMES[outputs % len(NAMES)]
        out = directory / str(outputs) / name
        out.parent.mkdir(exist_ok=True)
        attempts += 1
        assert attempts < 4 * kills + 10, "it does not get anywhere"
        began = time.monotonic()
        several = rng.random() < processes
        options = ("--nproc", "2") if several else ()
        run = Run("embed", given.model, given.fasta, "-o", out, *options, folder=directory / "said", part_tokens=PART)
        losses, ahead = 0, [one for one in STAGES if ORDER.index(one) > ORDER.index(stage(out))]
        while fell.total() < kills and not run.is_over and losses < 3:
            if not ahead or rng.random() < 0.5:
                end = began + rng.uniform(0, 6.0 if several else 2.0)
                while time.monotonic() < end and not run.is_over:
                    time.sleep(0.005)
            else:
                until(run, ahead[rng.integers(len(ahead))], out)
                time.sleep(rng.choice([0.0, rng.uniform(0, 0.01)]))
            whom = ("parent", "worker", "group")[rng.integers(3)]
            at = stage(out)
            if not run.kill(whom, int(rng.integers(2))):
                continue
            fell[f"{whom} {at}"] += 1
            losses += 1
            if whom != "worker":
                break
        if run.wait() == -9:
            continue
        assert run.process.exitcode == 0, run.said
        assert content(out) == given.whole[name]
        left = sorted(path.name for path in out.parent.iterdir())
        assert left == ([name] if out.is_dir() else sorted(given.whole[name])), "nothing else is there"
        outputs += 1
    return fell


def test_runs_that_are_killed_again_and_again_write_the_same(given: Given, tmp_path: Path) -> None:
    assert drill(given, tmp_path, kills=8, seed=1, processes=0.4).total() == 8


@pytest.mark.parametrize("name", ["x.npy", "x"])
@pytest.mark.parametrize("where", ["check_fits", "compute_here", "conclude"])
def test_another_command_may_finish_at_any_moment(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    """The directory that this one works in is gone then."""
    out = tmp_path / "out" / name
    asked, step = request(str(given.model), out), getattr(engines, where)
    others = 0

    def after_another(*arguments: Any) -> Any:
        nonlocal others
        monkeypatch.setattr(engines, where, step)
        embed(asked, given.fasta, part_tokens=PART)
        others += 1
        return step(*arguments)

    monkeypatch.setattr(engines, where, after_another)
    report = embed(asked, given.fasta, part_tokens=PART)
    assert (others, report.records) == (1, 600)
    assert content(out) == given.whole[name]
    left = sorted(path.name for path in out.parent.iterdir())
    assert left == ([name] if out.is_dir() else sorted(given.whole[name]))


@pytest.mark.parametrize("name", ["x.npy", "x"])
def test_what_killed_processes_left_is_removed(given: Given, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out" / name
    asked = request(str(given.model), out)
    directory = partial(asked.out)
    begin(directory, given.fasta, asked, part_tokens=PART)
    (out.parent / f".removed-{name}.partial" / "parts").mkdir(parents=True)
    here = f".tmp-{socket.gethostname()}-999999999"
    for left in (f"{here}-{name}", f"{here}-{name}.ids") if name == "x.npy" else ():
        (out.parent / left).write_text("half of it")
    (out.parent / f"{here}-other.npy").write_text("of another output")
    strays = "parts/000001-12345678.safetensors", "parts/.000001.safetensors-12345678"
    for stray in strays:
        (directory / stray).write_text("half of it")
    (out.parent / f".planning-{name}.partial-abc" / "index").mkdir(parents=True)
    embed(asked, given.fasta)
    key = "x.npy" if name == "x.npy" else "index/ids.txt"
    assert content(out)[key] == given.whole[name][key]
    wanted = {"x"} if out.is_dir() else set(given.whole[name])
    assert {path.name for path in out.parent.iterdir()} == wanted | {f"{here}-other.npy"}
    if out.is_dir():
        assert {path.name for path in out.iterdir()} == {"plan.json", "manifest.json", "index", "parts"}
