"""The part of `data/demo/build.py` that reads a BLAST database."""

import importlib.util
import sys
from pathlib import Path

import pytest

from esmshard.shipped import shipped


def test_sequences_of_a_blast_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script adds the directory of its neighbours
    spec = importlib.util.spec_from_file_location("demo_build", shipped("data") / "demo" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    # NCBIstdaa: A is 1, C 3, M 12, W 20, X 21, Y 22, U 24, O 26.
    (tmp_path / "few.psq").write_bytes(b"\0" + bytes([12, 1, 3]) + b"\0" + bytes([20, 22, 21, 24, 26]) + b"\0")
    assert build.blast_sequences(tmp_path / "few.psq") == [("few_0", "MAC"), ("few_1", "WYXUO")]
