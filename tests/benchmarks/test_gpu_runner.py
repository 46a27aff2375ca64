"""`benchmarks/gpu.py`: the rehearsal of every stage, and what becomes of parts that fail, crash, hang or do not fit."""

import json
import runpy
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import command
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu  # noqa: E402
import gpu_device  # noqa: E402
import gpu_stages  # noqa: E402
from gpu_stages import STAGES, correct, profile  # noqa: E402
from gpu_stages.stage import GIB, Context, FailedError, Figure, Found, Part, Record, Stage, run_stage  # noqa: E402

TOY = """
import os, signal, sys, time
sys.path.insert(0, {benchmarks!r})
import gpu, gpu_stages
from gpu_stages.stage import FailedError, Figure, Found, NotRunError, Part, Stage

def fine(context):
    return Found("fine", {{"speed": Figure(3.0, "x", least=2.0)}})

def wrong(context):
    raise ValueError("two\\nlines")

def off(context):
    raise FailedError("the result is off", Found("a table", {{"error": Figure(0.5, "%", most=0.1)}}))

def absent(context):
    raise NotRunError("there is no second GPU; add one")

def dies(context):
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(context):
    time.sleep(600)

parts = (Part("first", 1, fine), Part("raises", 1, wrong), Part("off", 1, off), Part("absent", 1, absent),
         Part("dies", 1, dies), Part("hangs", 1, hangs), Part("last", 1, fine), Part("large", 1, fine, when="gpu"))
gpu_stages.STAGES = (Stage("toy", "a toy", parts), Stage("other", "another", (Part("only", 1, fine),)))
if __name__ == "__main__":
    sys.exit(gpu.main())
"""


def entries(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["parts"]


def context(tmp_path: Path, *, seconds: float = 1000.0, rehearsal: bool = False) -> Context:
    return Context(torch.device("cpu"), rehearsal, tmp_path, tmp_path, time.time() + seconds)


def fine(_: Context) -> Found:
    return Found("fine")


def test_every_stage_is_rehearsed_on_the_cpu(tmp_path: Path) -> None:
    """All code that a GPU will run but the kernels, with tiny models; nothing may fail for a reason that is no GPU."""
    out = tmp_path / "out"
    done = command.python(BENCHMARKS / "gpu.py", "--rehearse", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    for stage in STAGES:
        (path,) = out.glob(f"*-gpu-rehearsal-{stage.name}.json")
        content = json.loads(path.read_text())
        assert {"torch", "python", "device"} <= content["about"].keys()
        assert content["command"] == f"python benchmarks/gpu.py --stage {stage.name} --rehearse"
        expected = {part.name for part in stage.chosen(rehearsal=True)}
        assert {name for name, entry in content["parts"].items() if entry["state"] == "done"} == expected
        assert all(entry["figures"] or entry["text"] for entry in content["parts"].values())
        text = path.with_suffix(".md").read_text()
        assert all(f"## {name}\n" in text for name in expected)
    assert (out / "starter-model" / "model.safetensors").is_file()
    assert (out / "starter-model" / "README.md").is_file()
    assert gpu.collect(out) == 1, "a rehearsal is no result"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script with other stages, which this process knows, too; no GPU is used."""
    script = tmp_path / "toy.py"
    script.write_text(TOY.format(benchmarks=str(BENCHMARKS)))
    for module, name in ((gpu_stages, "STAGES"), (gpu, "REHEARSAL_SECONDS")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    runpy.run_path(str(script))
    gpu.REHEARSAL_SECONDS = 6.0
    return script


def called(script: Path, *arguments: str | Path) -> int:
    """The exit code of `python SCRIPT ARGUMENTS`, but in this process; each stage runs in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        try:
            return gpu.main()
        except SystemExit as left:  # of argparse
            return int(left.code or 0)


def test_what_fails_is_written_down_and_the_next_part_runs(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert called(toy, "--rehearse", "--out", out) == 1
    said = capsys.readouterr().out
    (path,) = out.glob("*-toy.json")
    found = entries(path)
    states = {name: entry["state"] for name, entry in found.items()}
    expected = {"first": "done", "raises": "failed", "off": "failed", "absent": "not run"}
    assert states == expected | {"dies": "failed", "hangs": "failed", "last": "done"}
    assert found["raises"]["reason"] == "ValueError: two lines"
    assert found["off"]["text"] == "a table"
    assert "signal 9" in found["dies"]["reason"]
    assert found["hangs"]["reason"].startswith("it was ended, for it took far too long, after ")
    assert (next(out.glob("*-other.json"))).is_file(), "the next stage runs, too"
    text = path.with_suffix(".md").read_text()
    assert "**not run**: there is no second GPU; add one" in text
    assert "| speed | 3 x | at least 2 x: yes |" in text
    assert "| error | 50.0% | at most 10.0%: no |" in text
    assert said.splitlines()[-1] == "3 done, 4 failed, 1 not run"

    called(toy, "--rehearse", "--out", out, "--stage", "toy")
    assert entries(path)["absent"]["time"] >= found["absent"]["time"], "what was not run is tried again"
    for name in ("first", "raises", "dies", "last"):
        assert entries(path)[name] == found[name], "what has a result, or has failed, is kept"
    assert capsys.readouterr().out.splitlines()[-1] == "2 done, 4 failed, 1 not run"


def test_a_part_that_is_running_when_time_is_up_is_ended(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    record = Record(out, "toy", rehearsal=True)
    for name in ("first", "raises", "off", "absent", "dies", "last"):
        record.note(name, "done", seconds=1.0)
    # An earlier command was killed in the middle of this part, long ago; that says nothing of the one that runs now.
    record.note("hangs", "running", since=time.time() - 3600)
    began = time.time()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    gpu.REHEARSAL_SECONDS = 1000.0
    assert called(toy, "--rehearse", "--out", out, "--stage", "toy", "--seconds", "20") == 1
    (path,) = out.glob("*-toy.json")
    found = entries(path)["hangs"]
    assert found["state"] == "not run"
    assert found["reason"].startswith("it was ended, for time was up, after ")
    assert found["reason"].endswith("; run the same command again")
    assert time.time() >= began + 20
    assert list(scratch.iterdir()) == [], "what a killed process has written is removed"


def test_an_interrupt_is_a_sentence_and_nothing_stays_behind(toy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(toy), "--rehearse", "--out", str(out), "--stage", "toy"]
    # A job in the background of a shell is born deaf to SIGINT, and so would be the process that it starts.
    hearing = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, hearing)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "raises" in line:
            process.send_signal(signal.SIGINT)
            break
    lines += process.stderr.readlines()
    assert process.wait() == 130
    assert lines[-1] == "interrupted; the same command goes on with what is left\n"
    (path,) = out.glob("*-toy.json")
    assert entries(path)["first"]["state"] == "done"


@pytest.mark.parametrize(
    ("arguments", "token"),
    [
        (("--out", "DIR", "--seconds", "inf"), "--seconds"),
        (("--out", "FILE"), "is a file"),
        (("--out", "FILE/below"), "--out"),
        (("--out", "DIR", "--stage", "nonsense"), "toy, other"),
    ],
)
def test_bad_arguments_are_refused(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: tuple[str, ...], token: str
) -> None:
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    assert called(toy, "--rehearse", *arguments) == 2
    assert token in capsys.readouterr().err.splitlines()[-1]


def test_without_a_gpu_each_stage_is_said_not_to_have_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    arguments = ("--out", tmp_path / "out", "--stage", "large")
    assert called(BENCHMARKS / "gpu.py", *arguments) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("large     not run")
    assert first.endswith(("or with --rehearse", "or rehearse with --rehearse"))
    assert last == "6 not run"
    assert not (tmp_path / "out").exists(), "nothing was measured, so nothing is written"
    record = Record(tmp_path / "out", "large", rehearsal=False)
    record.note(STAGES[3].parts[0].name, "done", seconds=1.0, figures={})
    called(BENCHMARKS / "gpu.py", *arguments, "--again")
    assert entries(record.path) == record.parts, "what was measured before is kept if nothing can be measured anew"


@pytest.mark.parametrize(
    ("found", "token"),
    [
        ({"built": None, "error": "Torch not compiled with CUDA enabled"}, "is built without CUDA"),
        (
            {"error": "The NVIDIA driver on your system is too old (found version 11040)."},
            "driver is too old for torch",
        ),
        (
            {"error": "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"},
            "no CUDA device",
        ),
        ({"error": "No CUDA GPUs are available"}, "no CUDA device: No CUDA GPUs are available; run this"),
        ({"free": 60 * GIB, "total": 80 * GIB}, "20.00 GiB of the GPU's 80.00 GiB are in use by python (pid 7"),
        ({"free": 79 * GIB, "total": 80 * GIB}, None),
    ],
)
def test_what_is_in_the_way_of_measuring(found: dict[str, Any], token: str | None) -> None:
    answer = gpu_device.judged({"torch": "2.11.0+cu130", "built": "13.0"} | found, "python (pid 7, 20000 MiB)")
    assert answer is None if token is None else token in str(answer)


def test_a_part_that_takes_longer_than_there_is_time_is_not_begun(tmp_path: Path) -> None:
    stage = Stage("s", "", (Part("long", 100, fine), Part("short", 5, fine), Part("large", 1, fine, disk=1e18)))
    record = Record(tmp_path, "s", rehearsal=False)
    assert run_stage(stage, context(tmp_path, seconds=20), record, "c") == 0
    assert record.state("long") == "not run"
    assert record.state("short") == "done"
    assert record.state("large") == "not run"
    assert "GiB are free in" in record.parts["large"]["reason"]
    reason = record.parts["long"]["reason"]
    assert reason.startswith("it needs about 100 s, and ")
    assert reason.endswith("s are left; run this stage again")
    assert run_stage(stage, context(tmp_path), Record(tmp_path, "s", rehearsal=False), "c") == 0
    assert Record(tmp_path, "s", rehearsal=False).state("long") == "done", "the next run goes on with it"


@pytest.fixture
def collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, Path]:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{gpu.BEGIN}\nold\n{gpu.END}\nafter\n")
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(gpu, "README", readme)
    return gpu, readme


def test_results_are_collected_into_the_readme(collected: tuple[ModuleType, Path], tmp_path: Path) -> None:
    runner, readme = collected
    out = tmp_path / "out"
    record = Record(out, "speed", rehearsal=False)
    record.content["about"] = {"device": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0+cu130"}

    def off(_: Context) -> Found:
        raise FailedError("too slow", Found("", {"MFU": Figure(0.31, "%", least=0.5)}))

    run_stage(
        Stage("speed", "", (Part("embedding", 1, off), Part("long", 1e6, fine))), context(out_of(out)), record, "c"
    )
    record.content["about"] |= {"device": "NVIDIA H200", "driver": "580.1"}
    record.write()
    archive = tmp_path / "results.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(out, "gpu")
    for source in (out, archive, out):
        assert runner.collect(source) == 0
        text = readme.read_text()
        assert text.startswith(f"before\n{gpu.BEGIN}\nOn NVIDIA H200, driver 580.1, torch ")
        assert text.endswith(f"{gpu.END}\nafter\n")
        assert "| speed | embedding | MFU | 31.0% | at least 50.0%: no | [" in text
        assert "- speed, embedding: failed (too slow)\n" in text
        assert "- speed, long: not run (it needs about 1000000 s" in text
        assert "- whole: not run\n" in text
        assert len(list((tmp_path / "results").iterdir())) == 2
    assert runner.summary(tmp_path / "empty") == gpu.NOTHING


def out_of(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def test_what_is_no_record_is_left_out(collected: tuple[ModuleType, Path], tmp_path: Path, capsys: Any) -> None:
    for name, text in (("cut", '{"rehearsal": fal'), ("list", "[1]"), ("other", '{"rehearsal": false}')):
        out_of(tmp_path / "found").joinpath(f"2026-01-01-gpu-{name}.json").write_text(text)
    assert collected[0].collect(tmp_path / "found") == 1
    assert capsys.readouterr().err.count("is not the record of a stage, and is left out") == 3
    (tmp_path / "x.tar.gz").write_text("no archive")
    assert collected[0].collect(tmp_path / "x.tar.gz") == 2


def test_the_readme_says_what_has_been_measured() -> None:
    """The summary in benchmarks/README.md is the one of the records that lie in benchmarks/results."""
    _, _, rest = (BENCHMARKS / "README.md").read_text().partition(gpu.BEGIN + "\n")
    assert rest.partition(gpu.END)[0] == gpu.summary(gpu.RESULTS)


def test_tests_that_fail_make_their_part_fail(tmp_path: Path) -> None:
    file = tmp_path / "test_toy.py"
    file.write_text(
        "import pytest\npytestmark = pytest.mark.gpu\n"
        "def test_good(): pass\ndef test_bad(): assert 1 == 2\ndef test_left(): pytest.skip('no second GPU')\n"
    )
    with pytest.raises(FailedError, match="1 of 3 tests failed: test_bad") as caught:
        correct._tests(context(tmp_path, rehearsal=True), "toy", [file])
    assert "| test_bad | failed |" in caught.value.found.text
    assert "- test_left: no second GPU" in caught.value.found.text
    assert caught.value.found.figures["tests passed"].value == 1


KERNELS = {
    "nvjet_hsh_128x256_64x4_2x1_v_bz_TNN": "matrix product",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": "matrix product",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>": "matrix product",
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>": "attention",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>": "layer norm",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer and norms",
    "Memcpy DtoH (Device -> Pinned)": "copies and casts",
    "void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>": profile.OTHER,
}


def test_kernels_are_sorted_by_what_they_are_for() -> None:
    assert {kernel: profile.kind_of(kernel) for kernel in KERNELS} == KERNELS
