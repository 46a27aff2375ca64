"""The tutorials do what they say: their blocks are run from the text, in order, in an empty directory."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("tutorial-*.md"))
if not PAGES:
    pytest.skip("needs the whole repository, whose pages these tests read", allow_module_level=True)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block."""
    yield from re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def script(page: Path) -> str:
    """All blocks as one script of bash, which writes the output of block k to `k.txt` and its exit code to `k.code`."""
    lines = []
    for k, (language, text) in enumerate(blocks(page)):
        typed = f"{sys.executable} - <<'END_OF_BLOCK'\n{text}END_OF_BLOCK\n" if language == "python" else text
        if language != "text":
            lines += [f"exec > $OUTPUTS/{k}.txt 2>&1", f"{typed}echo $? > $OUTPUTS/{k}.code"]
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_can_be_typed(page: Path, tmp_path: Path) -> None:
    outputs, empty = tmp_path / "outputs", tmp_path / "empty"
    outputs.mkdir()
    empty.mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OUTPUTS": str(outputs), "OMP_NUM_THREADS": "1"}
    subprocess.run(["bash", "-c", script(page)], cwd=empty, env=environment, timeout=2400, check=False)
    said = ""
    for k, (language, text) in enumerate(blocks(page)):
        if language == "text":
            assert [line for line in text.splitlines() if line not in said] == [], said
            continue
        said = (outputs / f"{k}.txt").read_text()
        assert int((outputs / f"{k}.code").read_text()) in (0, 75), f"{text}\n{said}"
        assert "Traceback" not in said, said
        for result in re.findall(r"^print\(.*  # (.+)$", text, re.MULTILINE):
            assert result in said.splitlines(), said
