"""Files that would take the time or the memory of a machine, and numbers with digits too many, are refused at once."""

from pathlib import Path

import pytest
from command import esmshard

from esmshard.errors import UsageError
from esmshard.model.families import family_registry
from esmshard.model.families.family_registry import SIZES
from esmshard.recipe import recipe_file

NOT_FOR_ANYBODY = {
    "a 13th month": ("out: 2020-13-40", "month must be"),
    "text that is to be a number": ("train: {steps: !!int many}", "invalid literal"),
    "a tag on what it is not for": ("out: !!omap x", "a tag does not fit"),
}


@pytest.mark.parametrize("case", NOT_FOR_ANYBODY)
def test_yaml_beyond_the_bounds_is_one_sentence(case: str, tmp_path: Path) -> None:
    text, reason = NOT_FOR_ANYBODY[case]
    recipe = tmp_path / "my.yaml"
    recipe.write_text(text)
    with pytest.raises(UsageError, match=reason) as error:
        recipe_file.load(recipe)
    assert str(error.value).startswith(f"{recipe}:")
    assert len(str(error.value).splitlines()) == 1


def test_no_size_is_near_the_bounds() -> None:
    for config in SIZES.values():
        files = family_registry.family_of(config)
        assert files.read_config(files.write_config(config)) == config


TOO_MUCH = {
    "train.steps=99999999999": "100000000",
    "train.epochs=1e9": "1000000",
    "train.seed=99999999999": "4294967296",
    "train.eval_every=99999999999": "100000000",
    "optim.lr=65536": "10",
    "optim.head_lr=65536": "10",
    "optim.weight_decay=1e9": "100",
    "optim.clip=1e300": "1000000000",
    "batch.global_tokens=99999999999": "1000000000",
    "batch.tokens_per_rank=-5": "3",
    "checkpoint.every=99999999999": "100000000",
    "parallel.step_timeout=99999999999": "100000000",
    "data.max_length=99999999999": "1000000",
    "data.folds=99999999999": "10000",
    "out=/dev/zero": "belongs to the system",
    "out=/proc/self/x": "belongs to the system",
}


@pytest.mark.parametrize("override", TOO_MUCH)
def test_numbers_and_places_that_no_run_has(override: str) -> None:
    with pytest.raises(UsageError) as error:
        recipe_file.load(recipe_file.resolve("contact"), [override])
    said = str(error.value)
    assert said.startswith(f"{override}: {override.partition('=')[0]}: ")
    assert TOO_MUCH[override] in said
    assert len(said.splitlines()) == 1


def test_shared_memory_is_a_place_for_a_run() -> None:
    assert recipe_file.load(recipe_file.resolve("contact"), ["out=/dev/shm/run"]).out == "/dev/shm/run"


@pytest.mark.parametrize("option", ["--nproc", "--seeds", "--folds", "--profile"])
def test_options_are_bounded_too(option: str, tmp_path: Path) -> None:
    result = esmshard("finetune", "contact", option, "99999999999", cwd=tmp_path)
    assert result.returncode == 2
    assert f"Invalid value for '{option}'" in result.stderr
