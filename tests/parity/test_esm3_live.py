"""ESM3 against the authors' code itself, in a process of its own, since fair-esm owns their package's name here."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from esm3_encoder_golden import main as _encoder_main
from esm3_golden import main as _main
from safetensors.torch import load_file
from test_esm3 import GOLDEN, TOLERANCE, authors_state, compare_with, model_of, published
from test_esm3_structure_encoder import GOLDEN as ENCODER_GOLDEN

WHERE = os.environ.get("ESMSHARD_TEST_ESM3")
SCRIPT, ENCODER_SCRIPT = (Path(main.__code__.co_filename) for main in (_main, _encoder_main))
NEEDED = "ESMSHARD_TEST_ESM3 names no directory with Biohub's esm (see esm3_golden.py)"


def run(script: Path, out: Path, *options: str) -> dict[str, torch.Tensor]:
    """What a script stores that runs the authors' code."""
    environment = os.environ | {"PYTHONPATH": str(WHERE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(out), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return load_file(out)


def compare(stored: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> None:
    assert stored.keys() == now.keys()
    for name, tensor in stored.items():
        if not name.startswith(("places.", "structures.places.")):
            assert (tensor - now[name]).abs().max() <= TOLERANCE * tensor.abs().max(), name


@pytest.mark.skipif(not WHERE, reason=NEEDED)
def test_the_authors_encoder_says_now_what_the_golden_file_holds(tmp_path: Path) -> None:
    compare(load_file(ENCODER_GOLDEN), run(ENCODER_SCRIPT, tmp_path / "encoder.safetensors"))


@pytest.mark.skipif(not WHERE, reason=NEEDED)
def test_the_authors_code_says_now_what_the_golden_file_holds(tmp_path: Path) -> None:
    compare(load_file(GOLDEN), run(SCRIPT, tmp_path / "small.safetensors"))
    whole = run(SCRIPT, tmp_path / "whole.safetensors", "--whole")
    state = {name.removeprefix("state."): tensor for name, tensor in whole.items() if name.startswith("state.")}
    mine = authors_state()
    assert state.keys() == mine.keys()
    assert all(torch.equal(tensor, mine[name]) for name, tensor in state.items())
    repository = published(tmp_path / "repository")
    for tracks in (False, True):
        worst, relative = compare_with(whole, model_of(repository), tracks)
        assert worst < TOLERANCE
        assert relative < TOLERANCE
