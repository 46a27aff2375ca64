"""A run that starts from the weights and the head of another run, and reports the records that this run has seen."""

import random
from pathlib import Path

import pytest
import torch

from esmshard.api.runs import Run, finetune, keys
from esmshard.model import weights
from esmshard.recipe import recipe_file
from esmshard.tasks.finetuned import new_head
from esmshard.tasks.registry import new_task
from esmshard.train.inputs import leakage_notices, prepare
from esmshard.vocab import STANDARD


def write(directory: Path, seed: int, target: str, shift: float = 0.0) -> None:
    """Write three splits of 12 records."""
    draw = random.Random(seed)
    for split in ("train", "valid", "test"):
        lines = []
        for n in range(12):
            sequence = "".join(draw.choices(STANDARD, k=draw.randint(20, 30)))
            lines.append(f">p{seed}_{n} {target}={sequence.count('A') + shift:.1f}\n{sequence}\n")
        (directory / f"{split}.fasta").write_text("".join(lines))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("first")
    write(directory, 0, "TARGET")
    return finetune(recipe(directory, "nano"), report=False)


def recipe(directory: Path, model: str, init: str = "random", **task: object) -> dict[str, object]:
    return {
        "task": {"name": "sequence", "kind": "number", **task},
        "model": {"name": model},
        "init": init,
        "data": {split: directory / f"{split}.fasta" for split in ("train", "valid", "test")},
        "batch": {"global_tokens": 200, "tokens_per_rank": 200},
        "train": {"steps": 2},
        "out": directory / "run",
    }


def second(first: Run, directory: Path, target: str = "TARGET", **task: object) -> recipe_file.Recipe:
    """Return the recipe of a run on other records that starts from the first run."""
    write(directory, 10, target, shift=100.0)
    (directory / "empty.yaml").write_text("{}\n")
    given = recipe(directory, str(first.path), "pretrained", **task)
    given["data"]["target"] = target  # type: ignore[index]
    return recipe_file.load(directory / "empty.yaml", keys(given))


def started(resolved: recipe_file.Recipe) -> tuple[torch.nn.Module, str | None]:
    job = prepare(resolved, 1, 1, torch.device("cpu"))
    return new_head(resolved, job.task, job.weights)


def test_the_head_goes_on_unless_it_means_something_else(first: Run, tmp_path: Path) -> None:
    before, model = weights.read(str(first.path)).head, first.path / "model"
    head, said = started(second(first, tmp_path))
    assert all(torch.equal(tensor, before[name]()) for name, tensor in head.state_dict().items())
    assert f"the head goes on from the sequence head of {model}" in str(said)
    for given, why in (
        ({"target": "OTHER"}, "for other classes or targets"),
        ({"dropout": 0.0, "hidden": 7}, "of another kind or size"),
    ):
        directory = tmp_path / why.split()[2]
        directory.mkdir()
        head, said = started(second(first, directory, **given))  # type: ignore[arg-type]
        assert said == f"{model}: its head is {why} and is left out; the head is new"
        assert any(
            name not in before or not torch.equal(tensor, before[name]()) for name, tensor in head.state_dict().items()
        )
    contact = recipe_file.load(recipe_file.resolve("contact"), [f"model.name={first.path}"])
    _, said = new_head(contact, new_task(contact.task, {}), weights.read(str(first.path)))
    assert said == f"{model}: its head is of task sequence and is left out; the head is new"


def test_records_of_the_first_run_are_leakage(first: Run, tmp_path: Path) -> None:
    resolved = second(first, tmp_path)
    job = prepare(resolved, 1, 1, torch.device("cpu"))
    sentence = f"leakage: {first.path / 'model'} was trained on 12 records of train.fasta, with which these "
    assert leakage_notices(job)[-1].startswith(sentence)
    earlier = recipe(first.path.parent, "")["data"]
    for test, count in (("train", 1), ("test", 0)):  # the test set of the first run had no influence on it
        data = resolved.data.model_copy(update={"test": str(earlier[test])})  # type: ignore[index]
        job = prepare(resolved.model_copy(update={"data": data}), 1, 1, torch.device("cpu"))
        found = [notice for notice in leakage_notices(job) if str(first.path) in notice]
        assert ["was trained on these records" in notice for notice in found] == [True] * count
