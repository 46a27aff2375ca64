"""What a person sees on the terminal: the time that is left, what Ctrl-C says, choices in the help."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
from command import in_process

from esmshard import progress
from esmshard.cli import data, infer, models
from esmshard.data.splits.split_files import OF_SEQUENCES, OF_VARIANTS
from esmshard.embed.compute import Embedder
from esmshard.io.array_formats import FORMATS
from esmshard.io.paths import shipped
from esmshard.model.config import RELEASED_NAMES
from esmshard.model.families.family_registry import FAMILIES, RELEASED
from esmshard.predict import zero_shot
from esmshard.train import loop


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def _interrupted_at_step_5(training: loop.Training, done: int) -> None:
    if done == 5:
        raise KeyboardInterrupt
    validate_and_save(training, done)


validate_and_save = loop.Training.validate_and_save


def to_type(stderr: str) -> list[str]:
    (line,) = (line for line in stderr.splitlines() if line.startswith("interrupted: "))
    assert "Traceback" not in stderr
    return shlex.split(line.partition(": esmshard ")[2])


def test_ctrl_c_says_what_to_type_and_that_goes_on(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fasta, out, table = (tmp_path / name for name in ("x.fasta", "x.npy", "x.csv"))
    fasta.write_text(">a\nMKTAYIAK\n")
    embed, score = ("embed", "demo", fasta, "-o", out, "--overwrite"), ("score", "demo", fasta, "-o", table)
    for words, place, name, interrupt, result, kept in (
        (embed, Embedder, "each", _interrupted, out, "the parts that were finished are kept"),
        (score, zero_shot, "_columns", _interrupted, table, "no result was written"),
        (
            ("finetune", tiny_recipe, "--no-report", "--resume", "never"),
            loop.Training,
            "validate_and_save",
            _interrupted_at_step_5,
            tmp_path / "run/model",
            f"the checkpoint of step 4 is kept in {tmp_path / 'run'}",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, interrupt)
            done = in_process(*words)
        assert done.returncode == 130
        assert f"interrupted: {kept}; to " in done.stderr
        assert not result.exists()
        done = in_process(*to_type(done.stderr))
        assert done.returncode == 0, done.stderr
        assert "step 5/6" in done.stderr or "step 1/6" not in done.stderr
        assert result.exists()


@pytest.mark.parametrize("on_terminal", [False, True])
def test_the_warm_up_is_left_out_of_the_remaining_time(
    on_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"FORCE_COLOR": "1" if on_terminal else "", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    seconds = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: seconds))
    with suppress(KeyboardInterrupt), progress.Progress("step", 10) as shown:
        for seconds, done in ((100.0, 1), (110.0, 2)):  # noqa: B007  # `monotonic` returns it
            shown.update(done, "loss [0.1]")
        sys.stdout.write("a result\n")
        raise KeyboardInterrupt
    out, err = capsys.readouterr()
    assert out == "a result\n"
    if on_terminal:
        assert "20%  2/10 0:01:50 0:01:20 left loss [0.1]" in re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", err)
    else:
        assert err == "step 1/10  loss [0.1]\nstep 2/10  loss [0.1]  1m20s left\n"


TYPED = {
    "finetune con": {"contact", "contact-esm2", "contact-esmc"},
    "finetune my": {"my.yaml"},
    "recipes cp my": set[str](),
    "launch d": {"doctor"},
    "plan contact optim.l": {"optim.lr="},
    "plan contact optim.lr=1 checkpoint.ev": {"checkpoint.every="},
    "finetune contact optim.lr = ": set[str](),  # as bash divides it
    "score esmc_": {"esmc_300m", "esmc_600m", "esmc_6b"},
    "download demo": set[str](),
}
COMPLETE = """
import os, sys
from esmshard.cli.app import app
for typed in sys.argv[1:]:
    words = ["esmshard", *typed.split(" ")]
    os.environ |= {"COMP_WORDS": "\\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    try:
        app(prog_name="esmshard")
    except SystemExit:
        print("end")
assert "torch" not in sys.modules
"""


def test_the_shell_completes_recipes_keys_and_models_without_torch(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").touch()
    environment = {**os.environ, "_ESMSHARD_COMPLETE": "complete_bash"}
    command = [sys.executable, "-c", COMPLETE, *TYPED]
    shown = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert [set(words.split()) for words in shown.split("end\n")[:-1]] == [*TYPED.values()]
    assert {*RELEASED_NAMES.split()} == {*RELEASED}


def test_choices_are_those_of_the_registries() -> None:
    layouts = {"hf"}.union(*(family.pickles for family in FAMILIES.values()))
    tracks = set[str]().union(*(family.encoders for family in FAMILIES.values()))
    for function, name, known in (
        (data.split, "by", {*OF_SEQUENCES, *OF_VARIANTS}),
        (data.track, "name", tracks),
        (models.consolidate, "to", layouts),
        (infer.embed, "fmt", {*FORMATS, "parts"}),
    ):
        offered = get_args(get_type_hints(function)[name])
        assert {*(get_args(offered[0]) or offered)} == known


def test_control_characters_of_a_file_are_escaped(tmp_path: Path) -> None:
    recipe, fasta = tmp_path / "x.yaml", tmp_path / "x.fasta"
    recipe.write_text('"\\e]0;owned\\aoptim": 1\n')
    fasta.write_text(">a\x1b[31m\nMK\n>a\x1b[31m\nMMM\n")
    for words in (("finetune", recipe), ("ingest", fasta, "-o", tmp_path / "x.store")):
        done = in_process(*words)
        assert done.returncode in (1, 2)
        assert "\x1b" not in done.stderr
        assert "\\x1b" in done.stderr


def test_results_name_files_without_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fasta = tmp_path / "x.fasta"
    fasta.write_text("".join(f">r{k}\nMKTAYIAKQR{'ACDEFGHIKL'[k]}\n" for k in range(3)))
    shutil.copytree(shipped("data") / "demo" / "model", tmp_path / "model")
    for name, out in (("embed", "x.h5"), ("embed", "parts"), ("score", "x.csv"), ("evaluate", "scores")):
        done = in_process(name, tmp_path / "model", fasta, "-o", f"out-{out}/{out}")
        assert done.returncode == 0, done.stderr
        written = [path for path in (tmp_path / f"out-{out}").rglob("*") if path.is_file()]
        assert any(b"x.fasta" in path.read_bytes() for path in written)
        for path in written:
            assert str(tmp_path).encode() not in path.read_bytes(), path
