"""The example of a training loop of one's own: `examples/contrastive.py`, as torchrun starts it."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import esmshard
from esmshard.checkpoint.consolidate import consolidate
from esmshard.vocab import STANDARD

EXAMPLE = Path(__file__).parent.parent / "examples" / "contrastive.py"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty pairs; the second protein of each shares about half of its residues with the first."""
    draw, lines = random.Random(0), []
    for n in range(40):
        first = "".join(draw.choices(STANDARD, k=20 + n))
        second = "".join(draw.choice((letter, draw.choice(STANDARD))) for letter in first)
        lines += [f">{n}a", first, f">{n}b", second]
    file = tmp_path_factory.mktemp("pairs") / "pairs.fasta"
    file.write_text("\n".join(lines) + "\n")
    return file


def train(pairs: Path, out: Path, steps: int, ranks: int) -> dict[str, torch.Tensor]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*(launcher if ranks > 1 else [sys.executable]), EXAMPLE, pairs, "demo", out, str(steps)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return load_file(out / "model" / "model.safetensors")


@pytest.mark.filterwarnings("ignore:.*has no contact_head")
def test_three_ranks_that_go_on_from_a_checkpoint_end_as_one_process_does(pairs: Path, tmp_path: Path) -> None:
    alone = train(pairs, tmp_path / "one", 3, ranks=1)
    train(pairs, tmp_path / "many", 1, ranks=3)  # They divide four groups of pairs.
    together = train(pairs, tmp_path / "many", 3, ranks=3)
    base = esmshard.load_model("demo", torch.device("cpu")).state_dict()
    trained = esmshard.load_model(str(tmp_path / "one" / "model"), torch.device("cpu")).state_dict()
    assert max(float((alone[name] - together[name]).abs().max()) for name in alone) < 1e-6
    moved = {name: float((trained[name] - base[name]).abs().max()) for name in base}
    assert moved["layers.0.fc1.weight"] > 1e-4
    # What the loss does not reach stays as it was, although the optimizer has weight decay.
    assert max(change for name, change in moved.items() if name.startswith(("lm_head.dense", "contact_head"))) == 0
    with pytest.raises(esmshard.InputError, match="write_transformers"):
        consolidate(tmp_path / "many" / "step_000003", tmp_path / "model")
