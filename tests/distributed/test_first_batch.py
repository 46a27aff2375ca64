"""A run in which two ranks would train on the same records ends before its first step."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from ranks import run_ranks


def test_two_ranks_with_one_share_are_stopped_and_two_with_their_own_go_on(tiny_recipe: Path, tmp_path: Path) -> None:
    messages = run_ranks("work:first_batch", 2, tmp_path, str(tiny_recipe), "the first share for all")
    assert messages[0] == messages[1]
    assert messages[0].startswith("on all ranks: ranks 0 and 1 would train on the same records (first: '")

    tiny_recipe.write_text(tiny_recipe.read_text().replace("/run", "/again"))
    assert run_ranks("work:first_batch", 2, tmp_path, str(tiny_recipe), "") == ["here: the first step begins"] * 2


def test_two_ranks_that_compute_layers_together_must_have_the_same_records(tiny_recipe: Path, tmp_path: Path) -> None:
    tiny_recipe.write_text(tiny_recipe.read_text().replace("precision: fp32", "precision: fp32, tensor: 2"))
    messages = run_ranks("work:first_batch", 2, tmp_path, str(tiny_recipe), "a share for each")
    assert messages[0] == messages[1]
    assert messages[0].startswith(
        "on all ranks: ranks 0 and 1 would train on different records, though parallel.tensor or context"
    )

    tiny_recipe.write_text(tiny_recipe.read_text().replace("/run", "/again"))
    assert run_ranks("work:first_batch", 2, tmp_path, str(tiny_recipe), "") == ["here: the first step begins"] * 2
