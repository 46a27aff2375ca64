"""LoRA and head-only training on several ranks compute what one plain process computes, and nothing frozen moves. With
quantised matrices this process has the unpacked ones.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import equality
from ranks import run_ranks

ADAPT = {
    "lora": "adapt: {method: lora, rank: 3, alpha: 2.0}\n",
    "lora of some": "adapt: {method: lora, rank: 2, targets: [k, fc2], bias: none}\n",
    "head": "adapt: {method: head}\n",
    "lora on nf4": "adapt: {method: lora, rank: 3, alpha: 2.0}\n",
    "head on int8": "adapt: {method: head}\n",
}
CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [
        ("lora of some", {"activation_checkpointing": "full"}),
        ("lora on nf4", {"activation_checkpointing": "selective"}),
    ],
    2: [
        ("lora", {"cpu_offload": True, "activation_checkpointing": "selective"}),
        ("lora of some", {"strategy": "shard_grad_op", "accumulate": "unsharded"}),
        ("head", {"strategy": "shard_grad_op", "accumulate": "unsharded"}),
        ("lora on nf4", {"activation_checkpointing": "full", "cpu_offload": True}),
        ("head on int8", {"strategy": "no_shard"}),
    ],
}
"""By number of ranks. A frozen layer is a group without gradients, and the first one's input has none either."""


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recipe for each way to adapt, over one data set."""
    directory = tmp_path_factory.mktemp("adapt")
    text = equality.written(directory).read_text()
    for name, section in ADAPT.items():
        model = f"name: nano, quantize: {name.partition(' on ')[2] or 'null'}"
        (directory / f"{name}.yaml").write_text(text.replace("name: nano", model) + section)
    return {name: directory / f"{name}.yaml" for name in ADAPT}


@pytest.fixture(scope="module")
def references(recipes: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {name: equality.plain(str(path)) for name, path in recipes.items()}


def learns(method: str, name: str) -> bool:
    """Written out anew, and not asked of the code."""
    if name.startswith("head."):
        return True
    if method in ("lora", "lora on nf4"):
        of_trunk = name.startswith(("trunk.layers.", "trunk.emb_layer_norm_after."))
        return of_trunk and ("lora_" in name or name.endswith("bias"))
    return method == "lora of some" and "lora_" in name


@pytest.mark.parametrize("size", CASES)
def test_gradients_and_losses(recipes: dict[str, Path], references: dict[str, dict[str, Any]], size: int) -> None:
    wanted = [(str(recipes[method]), options) for method, options in CASES[size]]
    of_ranks = run_ranks("equality:recipes", size, recipes["lora"].parent, wanted, equality.STEPS)
    for case, (method, _) in enumerate(CASES[size]):
        reference = references[method]
        assert reference["gradients"].keys() == {name for name in reference["all_moved"] if learns(method, name)}
        largest = {name: np.abs(g).max() for name, g in reference["gradients"].items()}
        floor = max(largest.values()) / 100
        least = {"lora": 40, "lora of some": 15, "head": 5}[method.partition(" on ")[0]]
        assert sum(value > floor for value in largest.values()) >= least
        for found in (results[case] for results in of_ranks):
            assert found["loss"] == pytest.approx(reference["loss"], abs=1e-5)
            assert found["gradients"].keys() == reference["gradients"].keys()
            for name, gradient in reference["gradients"].items():
                worst = np.abs(found["gradients"][name] - gradient).max() / max(largest[name], floor)
                assert worst < 1e-5, (method, name)
            assert np.allclose(found["losses"], reference["losses"], rtol=0, atol=1e-5)
            for name, moved in found["all_moved"].items():
                assert (moved > 0) == learns(method, name) or name.endswith("k_proj.bias"), (method, name)
