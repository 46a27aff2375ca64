"""A run in which ranks would train on the wrong records ends before its first step."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from ranks import run_ranks


def test_ranks_with_the_wrong_records_are_stopped(tiny_recipe: Path, tmp_path: Path) -> None:
    text, what = tiny_recipe.read_text(), "on all ranks: ranks 0 and 1 would train on"
    messages = run_ranks("work:first_batch", 2, tmp_path, str(tiny_recipe), "the first share for all")
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"{what} the same records (first: '")

    tiny_recipe.write_text(text.replace("/run", "/again").replace("precision: fp32", "precision: fp32, tensor: 2"))
    messages = run_ranks("work:first_batch", 2, tmp_path, str(tiny_recipe), "a share for each")
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"{what} different records, but with parallel.tensor")

    tiny_recipe.write_text(text.replace("/run", "/third"))
    assert run_ranks("work:first_batch", 2, tmp_path, str(tiny_recipe), "") == ["here: the first step begins"] * 2
