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

    finetune._evaluate = watched  # type: ignore[assignment]
    finetune.run(recipe.model_copy(update={"out": out, "parallel": parallel}))
    return max(shares)


def rows_of(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "per_protein.csv").read_text().splitlines()))


@pytest.mark.parametrize("keep_best", [False, True])
def test_any_number_of_ranks_writes_the_same_results(tiny_recipe: Path, keep_best: bool) -> None:
    """The learning rate is large: the scores of the last weights are not those of the best ones."""
    text = tiny_recipe.read_text().replace("lr: 3.0e-3", "lr: 1.0e-4").replace("steps: 6", "steps: 4")
    text = text.replace("eval_every: 3", "eval_every: 1").replace("keep: 2", f"keep: 2, keep_best: {keep_best}")
    tiny_recipe.write_text(text)
    written: dict[int | str, Any] = {}
    for name, size, tensor in (("1", 1, 1), ("2", 2, 1), ("3", 3, 1), ("tensor", 2, 2)):
        if tensor > 1 and keep_best:
            continue
        out = tiny_recipe.parent / f"on-{name}"
        shares = run_ranks(
            "test_sharded_evaluation:evaluated", size, tiny_recipe.parent, str(tiny_recipe), str(out), tensor
        )
        if size > 1 and tensor == 1:
            assert 0 < max(shares) < 0.6, "one layer and what lies outside the layers"
        written[name] = (rows_of(out), json.loads((out / "evaluation.json").read_text()))
    rows, evaluation = written.pop("1")
    assert len(rows) == 5
    assert {"before fine-tuning", "unsupervised head"} < evaluation["metrics"].keys()
    for other_rows, other in written.values():
        assert other["step"] == evaluation["step"]
        for row, theirs in zip(rows, other_rows, strict=True):
            assert row.keys() == theirs.keys()
            for key in row.keys() - {"id"}:
                assert float(row[key] or "nan") == pytest.approx(float(theirs[key] or "nan"), abs=1e-5, nan_ok=True), (
                    key
                )
        for method, metrics in evaluation["metrics"].items():
            found = {name: one["value"] for name, one in other["metrics"][method].items()}
            assert found == pytest.approx({name: one["value"] for name, one in metrics.items()}, abs=1e-4), method


def test_tokens_per_rank_are_chosen_anew_on_another_number_of_ranks(tiny_recipe: Path) -> None:
    tiny_recipe.write_text(tiny_recipe.read_text().replace("tokens_per_rank: 130", "tokens_per_rank: auto"))
    chosen, losses = {}, {}
    for name, sizes in (("whole", [(1, None)]), ("resumed", [(2, 3), (1, None)])):
        out = tiny_recipe.parent / name
        for size, stop in sizes:
            run_ranks("saving:until", size, tiny_recipe.parent, str(tiny_recipe), str(out), stop)
            chosen[name, size] = work.load(str(out / "recipe.yaml")).batch.tokens_per_rank
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses[name] = {line["step"]: line["loss"] for line in lines if "lr" in line}
    assert chosen == {("whole", 1): 400, ("resumed", 2): 200, ("resumed", 1): 400}
    assert losses["resumed"] == pytest.approx(losses["whole"], abs=1e-5)
