"""ESM3 against the authors' code itself, in a process of its own, since fair-esm owns their package's name here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from esm3_golden import main as _main
from safetensors.torch import load_file
from test_esm3 import GOLDEN, TOLERANCE, authors_state, compare_with, model_of, published

WHERE = os.environ.get("ESMSHARD_TEST_ESM3")
SCRIPT = Path(_main.__code__.co_filename)


@pytest.mark.skipif(not WHERE, reason="ESMSHARD_TEST_ESM3 names no directory with Biohub's esm (see esm3_golden.py)")
def test_the_authors_code_says_now_what_the_golden_file_holds(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(WHERE), "OMP_NUM_THREADS": "1"}
    for name, options in (("small", []), ("whole", ["--whole"])):
        command = [sys.executable, str(SCRIPT), str(tmp_path / f"{name}.safetensors"), *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    stored, now = load_file(GOLDEN), load_file(tmp_path / "small.safetensors")
    assert stored.keys() == now.keys()
    for name, tensor in stored.items():
        if not name.startswith("places."):
            assert (tensor - now[name]).abs().max() <= TOLERANCE * tensor.abs().max(), name
    whole = load_file(tmp_path / "whole.safetensors")
    state = {name.removeprefix("state."): tensor for name, tensor in whole.items() if name.startswith("state.")}
    mine = authors_state()
    assert state.keys() == mine.keys()
    assert all(torch.equal(tensor, mine[name]) for name, tensor in state.items())
    repository = published(tmp_path / "repository")
    for tracks in (False, True):
        worst, relative = compare_with(whole, model_of(repository), tracks)
        assert worst < TOLERANCE
        assert relative < TOLERANCE
