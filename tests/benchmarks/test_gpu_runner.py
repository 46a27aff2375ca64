"""`benchmarks/gpu.py`: the rehearsal of every stage, and what becomes of parts that fail, crash, hang or do not fit."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GIB = 2**30
sys.path.append(str(BENCHMARKS))

import gpu  # noqa: E402
import gpu_device  # noqa: E402
import gpu_stages  # noqa: E402
from gpu_stages import STAGES, correct  # noqa: E402
from gpu_stages.stage import Context, FailedError, Figure, Found, NotRunError, Part, Record, Stage, run_part  # noqa: E402

TOY = """
import os, signal, sys, time
sys.path.insert(0, {benchmarks!r})
import gpu, gpu_stages
from gpu_stages.stage import Part, Stage
parts = (Part("dies", 1, lambda context: os.kill(os.getpid(), signal.SIGKILL)),
         Part("hangs", 1, lambda context: time.sleep(600)))
gpu_stages.STAGES = (Stage("toy", "a toy", parts),)
sys.exit(gpu.main())
"""


def called(*arguments: str | Path, script: Path = BENCHMARKS / "gpu.py") -> int:
    """The exit code of `python SCRIPT ARGUMENTS`, but in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        try:
            return gpu.main()
        except SystemExit as left:  # of argparse
            return int(left.code or 0)


def context(tmp_path: Path, *, rehearsal: bool = True) -> Context:
    return Context(torch.device("cpu"), rehearsal, tmp_path, tmp_path)


def fine(_: Context) -> Found:
    return Found("fine", {"speed": Figure(3.0, "x", least=2.0)})


def wrong(_: Context) -> Found:
    raise ValueError("two\nlines")


def off(_: Context) -> Found:
    raise FailedError("off by half", Found("a table", {"error": Figure(0.5, "%", most=0.1)}))


def absent(_: Context) -> Found:
    raise NotRunError("there is no second GPU; add one")


PARTS = tuple(Part(run.__name__, 1, run) for run in (fine, wrong, off, absent))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Toy stages, whose parts run in this process, and the names of the parts that have run."""
    ran: list[str] = []

    def here(stage: Stage, part: Part, args: Any, record: Record, left: float) -> dict[str, Any]:
        args.out.mkdir(parents=True, exist_ok=True)
        ran.append(part.name)
        record.content["about"], entry = run_part(part, context(tmp_path))
        return entry

    other = Stage("other", "another", (Part("large", 1e6, fine),))
    monkeypatch.setattr(gpu_stages, "STAGES", (Stage("toy", "a toy", PARTS), other))
    monkeypatch.setattr(gpu, "_part", here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return ran


@pytest.mark.slow
def test_every_stage_is_rehearsed_on_the_cpu(tmp_path: Path) -> None:
    """All code that a GPU will run but the kernels, with tiny models; nothing may fail for a reason that is no GPU."""
    out = tmp_path / "out"
    assert called("--rehearse", "--out", out) == 0
    for stage in STAGES:
        (path,) = out.glob(f"*-gpu-rehearsal-{stage.name}.json")
        content = json.loads(path.read_text())
        assert {"torch", "python", "device"} <= content["about"].keys()
        assert content["command"] == f"python benchmarks/gpu.py --stage {stage.name} --rehearse"
        expected = {part.name for part in stage.chosen(rehearsal=True)}
        assert {name for name, entry in content["parts"].items() if entry["state"] == "done"} == expected
        assert all(entry["figures"] or entry["text"] for entry in content["parts"].values())
        assert all(f"## {name}\n" in path.with_suffix(".md").read_text() for name in expected)
    assert gpu.collect(out) == 1, "a rehearsal is no result"


def test_what_fails_is_written_down_and_only_what_did_not_run_is_tried_again(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert called("--rehearse", "--out", out, "--seconds", "1000") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 done, 2 failed, 2 not run"
    (path,) = out.glob("*-toy.json")
    parts = json.loads(path.read_text())["parts"]
    states = {name: entry["state"] for name, entry in parts.items()}
    assert states == {"fine": "done", "wrong": "failed", "off": "failed", "absent": "not run"}
    assert parts["wrong"]["reason"] == "ValueError: two lines"
    assert not list(out.glob("*-other.json")), "a part that does not fit into the time is not begun"
    text = path.with_suffix(".md").read_text()
    assert "**not run**: there is no second GPU; add one" in text
    assert "| speed | 3 x | at least 2 x: yes |" in text
    assert "| error | 50.0% | at most 10.0%: no |" in text
    toy.clear()
    called("--rehearse", "--out", out, "--stage", "toy")
    assert toy == ["absent"]

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "_part", interrupted)
    assert called("--rehearse", "--out", out) == 130
    assert json.loads(path.read_text())["parts"]["fine"]["state"] == "done"


@pytest.mark.parametrize(
    ("name", "reason"), [("dies", "signal 9"), pytest.param("hangs", "took far too long", marks=pytest.mark.slow)]
)
def test_a_process_that_ends_badly_is_a_failure(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(gpu, "REHEARSAL_SECONDS", 60.0)
    script = tmp_path / "toy.py"
    script.write_text(TOY.format(benchmarks=str(BENCHMARKS)))
    monkeypatch.setattr(gpu_stages, "STAGES", (Stage("toy", "a toy", (Part(name, 1, fine),)),))
    assert called("--rehearse", "--out", tmp_path / "out", script=script) == 1
    (path,) = (tmp_path / "out").glob("*-toy.json")
    entry = json.loads(path.read_text())["parts"][name]
    assert entry["state"] == "failed"
    assert reason in entry["reason"]
    assert list((tmp_path / "scratch").iterdir()) == [], "what a killed process has written is removed"


def test_bad_arguments_are_refused(toy: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    for arguments, token in (
        (("--out", "DIR", "--seconds", "inf"), "--seconds"),
        (("--out", "FILE"), "is a file"),
        (("--out", "FILE/below"), "--out"),
        (("--out", "DIR", "--stage", "nonsense"), "toy, other"),
    ):
        assert called("--rehearse", *arguments) == 2
        assert token in capsys.readouterr().err.splitlines()[-1]


def test_an_obstacle_to_measuring_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for answer, token in (
        ({"built": None, "error": "Torch not compiled with CUDA enabled"}, "is built without CUDA"),
        ({"error": "The NVIDIA driver on your system is too old (found version 11040)."}, "driver is too old"),
        ({"error": "No CUDA GPUs are available"}, "no CUDA device: No CUDA GPUs are available; run this"),
        ({"free": 60 * GIB, "total": 80 * GIB}, "20.00 GiB of the GPU's 80.00 GiB are in use by python (pid 7"),
    ):
        obstacle = gpu_device.judged({"torch": "2.11.0+cu130", "built": "13.0"} | answer, "python (pid 7, 20000 MiB)")
        assert token in str(obstacle)
    assert gpu_device.judged({"torch": "2", "built": "13", "free": 79 * GIB, "total": 80 * GIB}, "") is None
    monkeypatch.setattr(gpu_device, "obstacle", lambda: obstacle)
    assert called("--out", tmp_path / "out", "--stage", "large") == 1
    assert obstacle in capsys.readouterr().out
    assert not (tmp_path / "out").exists(), "nothing was measured, so nothing is written"


def test_results_are_collected_into_the_readme(
    toy: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    readme, out = tmp_path / "README.md", tmp_path / "out"
    readme.write_text(f"before\n{gpu.BEGIN}\nold\n{gpu.END}\nafter\n")
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(gpu, "README", readme)
    monkeypatch.setattr(gpu_device, "obstacle", lambda: None)
    called("--out", out, "--stage", "toy")
    (out / "2026-01-01-gpu-cut.json").write_text('{"rehearsal": fal')
    assert called("--collect", out) == 0
    assert "is not the record of a stage" in capsys.readouterr().err
    text = readme.read_text()
    assert text.startswith(f"before\n{gpu.BEGIN}\nOn ")
    assert text.endswith(f"{gpu.END}\nafter\n")
    assert "| toy | off | error | 50.0% | at most 10.0%: no | [" in text
    assert len(list((tmp_path / "results").iterdir())) == 2


def test_the_readme_says_what_has_been_measured() -> None:
    """The summary in benchmarks/README.md is the one of the records that lie in benchmarks/results."""
    _, _, rest = (BENCHMARKS / "README.md").read_text().partition(gpu.BEGIN + "\n")
    assert rest.partition(gpu.END)[0] == gpu.summary(gpu.RESULTS)


@pytest.mark.slow
def test_tests_that_fail_make_their_part_fail(tmp_path: Path) -> None:
    file = tmp_path / "test_toy.py"
    file.write_text(
        "import pytest\npytestmark = pytest.mark.gpu\ndef test_good(): pass\ndef test_bad(): assert 1 == 2\n"
    )
    with pytest.raises(FailedError, match="1 of 2 tests failed: test_bad"):
        correct._tests(context(tmp_path), "toy", [file])
