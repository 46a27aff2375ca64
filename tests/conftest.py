"""A small labelled data set cut from the shipped sample, and a recipe over it that trains in seconds."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from esmshard.data.labels import UNRESOLVED
from esmshard.shipped import shipped

torch.set_num_threads(1)  # ranks and tests share the cores

RECIPE = """\
task: {{name: contact, channels: 8, blocks: 1}}
model: {{name: nano}}
init: random
data: {{train: train.fasta, valid: valid.fasta, test: valid.fasta, long: crop, max_length: 60}}
batch: {{global_tokens: 400, tokens_per_rank: {tokens_per_rank}}}
optim: {{lr: 3.0e-3, head_lr: 3.0e-3}}
train: {{steps: 6, seed: 3, eval_every: 3}}
parallel: {{precision: fp32}}
checkpoint: {{every: 2, keep: 2}}
out: {out}
"""


LONG = {"equality", "cli", "adapted_runs", "saver", "plan", "sharded_runs", "stuck", "attempts", "launch", "restarts"}
LONG |= {"variants_command", "landscape", "shipped_recipes"}
LONG |= {"embed_drills", "embed_faults", "embed_verify"}
LONG |= {"gpu_runner", "elastic", "launch_nodes", "slurm_run", "kubernetes", "doctor", "tracker", "bundle"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first: workers take a file at a time, and none should be left alone with one at the end."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # of commands, too
    os.environ["ESMSHARD_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    # No test may find, or fetch, a released model by accident. Tests of downloads start processes of their own.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path_factory.mktemp("hf"))}
    os.environ["TORCH_HOME"] = str(tmp_path_factory.mktemp("torch"))


def write_subset(directory: Path, name: str, split: str, chains: range, unresolved: int | None = None) -> Path:
    """Some chains of a sample split as `name.fasta` and `name.npz`; chain number `unresolved` loses its coordinates."""
    with np.load(shipped("data") / "contact" / f"{split}.npz") as file:
        names, seqs, offsets, cb, dssp8 = (file[key] for key in ("names", "seqs", "offsets", "cb_dA", "dssp8"))
    parts = [cb[offsets[k] : offsets[k + 1]].copy() for k in chains]
    if unresolved is not None:
        parts[unresolved][:] = UNRESOLVED
    fasta = directory / f"{name}.fasta"
    fasta.write_text("".join(f">{names[k]}\n{seqs[k]}\n" for k in chains))
    np.savez(
        directory / f"{name}.npz",
        names=names[list(chains)],
        seqs=seqs[list(chains)],
        dssp8=dssp8[list(chains)],
        offsets=np.cumsum([0, *map(len, parts)]).astype(np.int32),
        cb_dA=np.concatenate(parts),
    )
    return fasta


@pytest.fixture
def tiny_recipe(tmp_path: Path) -> Path:
    """24 training chains (one without coordinates), 5 to validate and test on; a nano model; 6 steps."""
    write_subset(tmp_path, "train", "train", range(24), unresolved=5)
    write_subset(tmp_path, "valid", "valid", range(5))
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE.format(tokens_per_rank=130, out=tmp_path / "run"))
    return path
