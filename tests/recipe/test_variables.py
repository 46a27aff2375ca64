"""Which environment variables a recipe reads."""

from pathlib import Path

import pytest

from esmshard.errors import UsageError
from esmshard.recipe import recipe_file

SECRET = "hf_abcdefgh"


def test_a_recipe_reads_no_variable_that_may_hold_a_secret(tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("SLURM_JWT", SECRET)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    for name in ("HF_TOKEN", "SLURM_JWT"):
        with pytest.raises(UsageError, match=rf"out=\${name}") as caught:
            recipe_file.load(tiny_recipe, [f"out=sec/${{{name}}}"])
        assert SECRET not in str(caught.value)
    assert recipe_file.load(tiny_recipe, ["out=/runs/${SLURM_JOB_ID}"]).out == "/runs/17"
