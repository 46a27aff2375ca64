"""A small labelled data set cut from the shipped sample, and a recipe over it that trains in seconds."""

import ast
import gc
import os
import signal
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from esmshard.data.labels.coordinates import UNRESOLVED
from esmshard.io.paths import shipped

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


LONG = {
    *("equality", "engines", "slurm_run", "sweep", "variants_command", "kubernetes", "sharded_evaluation", "attempts"),
    *("saver", "checkpoints", "shipped_recipes", "memory_model", "pair_runs", "stuck_ranks", "cli", "dropout"),
    *("finetune_function", "interchain_runs", "adapted_runs", "consolidate", "package", "remote", "embed_job"),
    *("tracker", "embed_in_bucket", "crashes", "heads", "every_key", "parts", "sharded_runs", "elastic", "likelihood"),
}
"""Files that are begun first."""
LENGTHY = {
    "shipped_recipes": "a run of each recipe, with each kind of starting weights",
    "sequence_embedder": "scikit-learn's own checks, which fit a model again and again",
}
"""Files that need no process of their own, and take longer than `make check` has time for. The reason stands beside."""
STARTERS = {"subprocess", "multiprocessing", "esmshard.parallel.launch", "nbclient"}
"""Modules by which a test starts a process."""
TESTS = Path(__file__).parent


def pytest_configure() -> None:
    """Let processes of tests hear Ctrl-C, SIGQUIT and SIGHUP.

    A job in the background of a shell, or under nohup, ignores them from its birth, and so does every process that it
    starts.
    """
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    for number, heard in defaults.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, heard)


def pytest_collection() -> None:
    """Look for no garbage while modules of tests are imported: it would take a third of the time."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first and mark tests that `make check` leaves out.

    Workers take a file at a time, and none should be left alone with a long one at the end.
    """
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)
    for item in items:
        if TESTS in item.path.parents and starts_processes(item.path):  # else it is a doctest of the package
            item.add_marker(pytest.mark.processes)
        if item.path.stem.removeprefix("test_") in LENGTHY:
            item.add_marker(pytest.mark.lengthy)


def pytest_collection_finish() -> None:
    """Look for garbage again, but not among what the imports have made."""
    gc.freeze()
    gc.enable()


@cache
def starts_processes(path: Path) -> bool:
    """Whether a file of tests, or a helper module that it imports, forks or imports one of `STARTERS`."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    forks = any(isinstance(node, ast.Attribute) and node.attr == "fork" for node in nodes)
    own = [helpers()[name] for name in names if name in helpers() and name != "conftest"]
    return forks or bool(names & STARTERS) or any(map(starts_processes, own))


@cache
def helpers() -> dict[str, Path]:
    """The modules that tests import from each other, by name."""
    return {path.stem: path for path in TESTS.rglob("*.py")}


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # of commands, too
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["ESMSHARD_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    # No test may find, or fetch, a released model by accident. Tests of downloads start processes of their own.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path_factory.mktemp("hf"))}
    # The server that forks processes imports torch's compiler, which makes its directory at once.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))
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
