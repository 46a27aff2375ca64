"""The marks by which `make check` leaves tests out."""

from pathlib import Path

import pytest
from conftest import LENGTHY, LONG, TESTS, starts_processes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import subprocess", True),
        ("import os\nos.fork()", True),
        ("from esmshard.parallel import launch", True),
        ("def test() -> None:\n    from multiprocessing import get_context", True),
        ("from nbclient import NotebookClient", True),
        ("from ranks import run_ranks", True),  # a helper that imports multiprocessing
        ("import embed_runs", True),  # a helper that imports such a helper
        ("import os\nimport model_files\nfrom esmshard.parallel import process_group", False),
    ],
)
def test_a_file_starts_processes_by_what_it_imports(tmp_path: Path, text: str, expected: bool) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(text)
    assert starts_processes(path) == expected


def test_lists_name_files_that_exist() -> None:
    names = {path.stem.removeprefix("test_") for path in TESTS.rglob("test_*.py")}
    assert names.issuperset(LENGTHY)
    assert names.issuperset(LONG)
