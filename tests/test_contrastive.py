"""The example of a training loop of one's own: `examples/contrastive.py`, as torchrun starts it."""

import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_files import TINY, fair_esm, ours, write_transformers
from safetensors.torch import load_file

import esmshard
from esmshard.checkpoint.consolidate import consolidate
from esmshard.vocab import STANDARD

EXAMPLE = Path(__file__).parent.parent / "examples" / "contrastive.py"


def write_pairs(file: Path) -> None:
    """Forty pairs; the second protein of each shares about half of its residues with the first."""
    draw, lines = random.Random(0), []
    for n in range(40):
        first = "".join(draw.choices(STANDARD, k=20 + n))
        second = "".join(draw.choice((letter, draw.choice(STANDARD))) for letter in first)
        lines += [f">{n}a", first, f">{n}b", second]
    file.write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_one_process_goes_on_from_a_checkpoint_of_three_and_ends_as_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pairs(Path("pairs.fasta"))
    base = ours(fair_esm(TINY), TINY)
    write_transformers(Path("base"), base, TINY)

    def train(out: str, steps: int) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "pairs.fasta", "base", out, str(steps)])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return load_file(Path(out) / "model" / "model.safetensors")

    alone = train("one", 2)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    command = [*launcher, str(EXAMPLE), "pairs.fasta", "base", "many", "1"]  # The ranks divide four groups of pairs.
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    together = train("many", 2)
    assert max(float((alone[name] - together[name]).abs().max()) for name in alone) < 1e-6
    trained = esmshard.load_model("one/model", torch.device("cpu")).state_dict()
    moved = {name: float((trained[name] - tensor).abs().max()) for name, tensor in base.state_dict().items()}
    assert moved["layers.0.fc1.weight"] > 1e-4
    # What the loss does not reach stays as it was, although the optimizer has weight decay.
    assert max(change for name, change in moved.items() if name.startswith(("lm_head.dense", "contact_head"))) == 0
    with pytest.raises(esmshard.InputError, match="write_transformers"):
        consolidate(Path("many/step_000002"), Path("model"))
