"""No task returns views from a sharded model: torch would warn of each of them, in every process."""

import warnings
from pathlib import Path

import pytest
from ranks import run_ranks

from esmshard.recipe import recipe_file
from esmshard.train import finetune

VARIANT = [
    "task.zero_shot=false",
    "model.name=nano",
    "init=random",
    "data.folds=5",
    "data.fold=0",
    "batch={sequences: 8}",
]
TASKS = {
    "contact": [],
    "mlm": ["task={name: mlm}"],
    "residue": ["task={name: residue}", "data.target=[dssp8]"],
    "convolved residue": ["task={name: residue, hidden: 8}", "data.target=[dssp8]"],
    "sequence": ["task={name: sequence}", "data.labels=sample:contact/labels.csv", "data.target=[helix]"],
    "variant": VARIANT,
}


def warned(path: str, options: list[str]) -> list[str]:
    """What is said of views in two steps; called on every rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        finetune.run(recipe_file.load(Path(path), options))
    return [str(one.message) for one in caught if "view tensor" in str(one.message)]


@pytest.mark.parametrize("task", TASKS)
def test_no_output_of_a_sharded_model_is_a_view(tiny_recipe: Path, tmp_path: Path, task: str) -> None:
    recipe = recipe_file.resolve("variants") if task == "variant" else tiny_recipe
    options = [*TASKS[task], "data.long=full", f"out={tmp_path / 'out'}"]
    options += [
        "batch.tokens_per_rank=2000",
        "train={steps: 2, seed: 3, eval_every: 100}",
        "parallel={precision: fp32}",
    ]
    assert run_ranks("test_views:warned", 2, tmp_path, str(recipe), options) == [[], []]
