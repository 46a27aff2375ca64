"""The example of a training loop of one's own: `examples/contrastive.py`, as torchrun starts it."""

import random
import runpy
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


def train(pairs: Path, out: Path, steps: int, ranks: int = 1) -> dict[str, torch.Tensor]:
    """The weights after so many steps, in this process or in ranks that torchrun starts."""
    arguments = [str(EXAMPLE), str(pairs), "demo", str(out), str(steps)]
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        done = subprocess.run([*launcher, *arguments], check=False, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", arguments)
            runpy.run_path(str(EXAMPLE), run_name="__main__")
    return load_file(out / "model" / "model.safetensors")


@pytest.mark.filterwarnings("ignore:.*has no contact_head")
def test_one_process_goes_on_from_a_checkpoint_of_three_and_ends_as_alone(pairs: Path, tmp_path: Path) -> None:
    alone = train(pairs, tmp_path / "one", 3)
    train(pairs, tmp_path / "many", 2, ranks=3)  # They divide four groups of pairs.
    together = train(pairs, tmp_path / "many", 3)
    base = esmshard.load_model("demo", torch.device("cpu")).state_dict()
    trained = esmshard.load_model(str(tmp_path / "one" / "model"), torch.device("cpu")).state_dict()
    assert max(float((alone[name] - together[name]).abs().max()) for name in alone) < 1e-6
    moved = {name: float((trained[name] - base[name]).abs().max()) for name in base}
    assert moved["layers.0.fc1.weight"] > 1e-4
    # What the loss does not reach stays as it was, although the optimizer has weight decay.
    assert max(change for name, change in moved.items() if name.startswith(("lm_head.dense", "contact_head"))) == 0
    with pytest.raises(esmshard.InputError, match="write_transformers"):
        consolidate(tmp_path / "many" / "step_000003", tmp_path / "model")
