"""The evaluation after training: every rank scores records, and none ever holds the whole model."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))
import work
from ranks import run_ranks

from esmshard.train import finetune


def evaluated(path: str, out: str, tensor: int) -> float:
    """Run a recipe. Return the largest share of the parameters that this rank held whole during the evaluation."""
    recipe = work.load(path)
    parallel = recipe.parallel.model_copy(update={"strategy": "shard_grad_op", "tensor": tensor})
    original, shares = finetune._evaluate, [0.0]

    def watched(job: Any, model: Any, *others: Any) -> None:
        def look(*_: Any) -> None:
            sizes = [(p.numel(), isinstance(p, DTensor)) for p in model.parameters()]
            shares.append(sum(n for n, divided in sizes if not divided) / sum(n for n, _ in sizes))

        for layer in model.layers:
            layer.register_forward_pre_hook(look)  # after FSDP's own, which gathers the layer
        original(job, model, *others)

    finetune._evaluate = watched
    finetune.run(recipe.model_copy(update={"out": out, "parallel": parallel}))
    return max(shares)


def test_any_number_of_ranks_writes_the_same_results(tiny_recipe: Path) -> None:
    text = tiny_recipe.read_text().replace("lr: 3.0e-3", "lr: 1.0e-4").replace("steps: 6", "steps: 2")
    tiny_recipe.write_text(
        text.replace("eval_every: 3", "eval_every: 1").replace("keep: 2", "keep: 2, keep_best: true")
    )
    written: list[tuple[list[dict[str, str]], Any]] = []
    for name, size, tensor in (("1", 1, 1), ("2", 2, 1), ("tensor", 2, 2)):
        out = tiny_recipe.parent / f"on-{name}"
        given = (tiny_recipe.parent, str(tiny_recipe), str(out), tensor)
        shares = run_ranks("test_sharded_evaluation:evaluated", size, *given)
        assert name != "2" or 0 < max(shares) < 0.6, "one layer and what lies outside the layers"
        rows = list(csv.DictReader((out / "per_protein.csv").read_text().splitlines()))
        written.append((rows, json.loads((out / "evaluation.json").read_text())))
    (rows, evaluation), *others = written
    assert len(rows) == 5
    assert {"before fine-tuning", "unsupervised head"} < evaluation["metrics"].keys()
    for other_rows, other in others:
        assert other["step"] == evaluation["step"]
        for row, theirs in zip(rows, other_rows, strict=True):
            assert row.keys() == theirs.keys()
            for key in row.keys() - {"id"}:
                expected = float(theirs[key] or "nan")
                assert float(row[key] or "nan") == pytest.approx(expected, abs=1e-5, nan_ok=True), key
        for method, metrics in evaluation["metrics"].items():
            found = {name: one["value"] for name, one in other["metrics"][method].items()}
            assert found == pytest.approx({name: one["value"] for name, one in metrics.items()}, abs=1e-4), method


def test_tokens_per_rank_are_chosen_anew_on_another_number_of_ranks(tiny_recipe: Path) -> None:
    tiny_recipe.write_text(tiny_recipe.read_text().replace("tokens_per_rank: 130", "tokens_per_rank: auto"))
    out, chosen = tiny_recipe.parent / "run", []
    for size, stop in ((2, 3), (1, None)):
        run_ranks("saving:until", size, tiny_recipe.parent, str(tiny_recipe), str(out), stop)
        chosen.append(work.load(str(out / "recipe.yaml")).batch.tokens_per_rank)
    assert chosen == [200, 400]
