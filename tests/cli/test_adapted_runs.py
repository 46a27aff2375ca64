"""`finetune` with LoRA and head only, as a user runs it: small checkpoints, resumed to the bit, consolidated, used."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from command import esmshard, in_process
from conftest import RECIPE, write_subset
from safetensors.torch import load_file

from esmshard.checkpoint import sharded
from esmshard.checkpoint.consolidate import consolidate
from esmshard.errors import InputError, UsageError
from esmshard.model import weights
from esmshard.model.export import write_transformers
from esmshard.model.families.family_registry import SIZES

SECTIONS = {
    "lora": "adapt: {method: lora, rank: 2, alpha: 8.0, targets: [q, v, fc2]}\n",
    "head": "adapt: {method: head}\n",
}


@dataclass(frozen=True)
class Trained:
    recipe: Path
    run: Path
    base: Path


def write_base(directory: Path, seed: int) -> Path:
    """Weights of the nano model as a directory of `transformers`."""
    directory.mkdir()
    found = weights.fresh(SIZES["nano"], seed)
    sizes = {name: size for name, size in weights.shapes(SIZES["nano"]).items() if name != "lm_head.weight"}
    write_transformers(directory, SIZES["nano"], sizes, found.__getitem__)
    return directory


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """A run of six steps, with LoRA on two processes, on top of a base in a directory; each method once."""
    known: dict[str, Trained] = {}

    def run(method: str) -> Trained:
        if method not in known:
            directory = tmp_path_factory.mktemp(method)
            write_subset(directory, "train", "train", range(24), unresolved=5)
            write_subset(directory, "valid", "valid", range(5))
            text = RECIPE.format(tokens_per_rank=130, out=directory / "run").replace("init: random\n", "")
            text = text.replace("{name: nano}", f"{{name: {write_base(directory / 'base', seed=11)}}}")
            (directory / "tiny.yaml").write_text(text + SECTIONS[method])
            command = esmshard if method == "lora" else in_process
            done = command("finetune", directory / "tiny.yaml", "--nproc", "2" if method == "lora" else "1")
            assert done.returncode == 0, done.stderr
            known[method] = Trained(directory / "tiny.yaml", directory / "run", directory / "base")
        return known[method]

    return run


def contents(checkpoint: Path) -> dict[str, torch.Tensor]:
    names, read = sharded.reader(checkpoint)
    return {name: read(name) for name in names}


def interrupted(found: Trained, out: Path) -> Path:
    """A copy of the run as it was after step 4."""
    shutil.copytree(found.run, out)
    shutil.rmtree(out / "checkpoints" / "step_000006")
    (out / "checkpoints" / "LATEST").write_text("step_000004\n")
    shutil.rmtree(out / "model")
    return out


@pytest.mark.parametrize("method", SECTIONS)
def test_a_checkpoint_holds_what_was_trained_and_names_the_base(trained: Callable[[str], Trained], method: str) -> None:
    found = trained(method)
    state = contents(found.run / "checkpoints" / "step_000006")
    names = state.keys()
    of_model = {name.removeprefix("model.") for name in names if name.startswith("model.")}
    assert {name.removesuffix(".exp_avg") for name in names if name.endswith(".exp_avg")} == {
        f"optim.{name}" for name in of_model if "running" not in name and "num_batches" not in name
    }
    of_trunk = {name.removeprefix("trunk.") for name in of_model if not name.startswith("head.")}
    if method == "head":
        assert of_trunk == set()
    else:
        places = [f"layers.{n}.{p}" for n in range(2) for p in ("self_attn.q_proj", "self_attn.v_proj", "fc2")]
        assert {name for name in of_trunk if "lora" in name} == {
            f"{place}.{part}.weight" for place in places for part in ("lora_A", "lora_B")
        }
        # Eight biases a layer (six linear layers and two norms), and that of the last norm.
        assert {name.rsplit(".", 1)[1] for name in of_trunk if "lora" not in name} == {"bias"}
        assert len([name for name in of_trunk if "lora" not in name]) == 2 * 8 + 1
    base = json.loads((found.run / "checkpoints" / "step_000006" / "state.json").read_text())["base"]
    assert base["name"] == str(found.base)
    assert base["files"].keys() == {"model.safetensors"}
    moments = [t for n, t in state.items() if n.endswith(".exp_avg")]
    assert sum(bool(t.abs().max() > 0) for t in moments) > 0.9 * len(moments), "what is saved was trained"


def test_it_goes_on_from_there_to_the_last_bit(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    found = trained("lora")
    run = interrupted(found, tmp_path / "again")
    done = esmshard("finetune", found.recipe, f"out={run}", "--resume", "auto", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert "going on after step 4 of 6" in done.stderr
    mine, whole = (contents(r / "checkpoints" / "step_000006") for r in (run, found.run))
    assert mine.keys() == whole.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in whole.items())


def test_another_base_is_refused(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    found = trained("lora")
    other = write_base(tmp_path / "base", seed=12)
    with pytest.raises(InputError, match=r"step_000006: .*base is another model"):
        consolidate(found.run, tmp_path / "out", base=str(other))
    run = interrupted(found, tmp_path / "again")
    kept = (found.base / "model.safetensors").read_bytes()
    try:
        (found.base / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
        done = in_process("finetune", found.recipe, f"out={run}", "--resume", "auto", "--nproc", "1")
        assert done.returncode == 1
        assert done.stderr.count("error: ") == 1
        assert "another model (other files); give the model that it was trained on" in done.stderr
        (found.base / "model.safetensors").unlink()
        with pytest.raises(InputError, match=r"not a complete model.* needs this base model: .*--base"):
            consolidate(found.run, tmp_path / "out")
    finally:
        (found.base / "model.safetensors").write_bytes(kept)
    moved = shutil.copytree(found.base, tmp_path / "moved")
    consolidate(found.run, tmp_path / "out", base=str(moved))
    same = load_file(found.run / "model" / "model.safetensors")
    assert all(torch.equal(t, same[n]) for n, t in load_file(tmp_path / "out" / "model.safetensors").items())


@pytest.mark.parametrize("method", SECTIONS)
def test_the_model_is_the_base_with_what_was_trained(trained: Callable[[str], Trained], method: str) -> None:
    found = trained(method)
    base, model = (load_file(d / "model.safetensors") for d in (found.base, found.run / "model"))
    state = contents(found.run / "checkpoints" / "step_000006")
    assert model.keys() - base.keys() == {n.removeprefix("model.") for n in state if n.startswith("model.head.")}
    changed = {name for name in base if not torch.equal(base[name], model[name])}
    of_weights = {name for name in changed if name.endswith("weight")}
    if method == "head":
        assert changed == set()
    else:
        places = ("attention.self.query", "attention.self.value", "output.dense")
        expected = {f"esm.encoder.layer.{n}.{p}.weight" for n in range(2) for p in places}
        assert of_weights == expected, "not attention.output.dense"
        a, b = (state[f"model.trunk.layers.1.fc2.lora_{x}.weight"] for x in "AB")
        name = "esm.encoder.layer.1.output.dense.weight"
        assert (model[name] - (base[name] + 4.0 * b @ a)).abs().max() < 1e-6


def test_commands_take_the_adapter_for_the_model(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    found = trained("lora")
    adapter = consolidate(found.run, tmp_path / "adapter", adapter=True)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"]) == (2, 8.0, "all")
    assert (adapter / config["base_model_name_or_path"]).resolve() == found.base.resolve()
    fasta = found.recipe.parent / "valid.fasta"
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for model in (found.run / "model", adapter):
        for command, out in (("predict", "x.npz"), ("embed", "x.npy")):
            done = in_process(command, model, fasta, "-o", tmp_path / f"{model.name}-{out}")
            assert done.returncode == 0, done.stderr
        with np.load(tmp_path / f"{model.name}-x.npz") as file:
            arrays[model.name] = {name: file[name] for name in file.files}
        arrays[model.name]["embeddings"] = np.load(tmp_path / f"{model.name}-x.npy")
    assert len(arrays["model"]) == 6
    for name, values in arrays["model"].items():
        assert np.abs(arrays["adapter"][name] - values).max() < 1e-6
    consolidate(adapter, tmp_path / "merged")
    merged, model = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", found.run / "model"))
    assert merged.keys() == model.keys()
    assert all(torch.equal(tensor, model[name]) for name, tensor in merged.items())
    assert json.loads((tmp_path / "merged" / "esmshard.json").read_text())["format"] == "esmshard-model"
    with pytest.raises(UsageError, match="adapter: is a model and not a run"):
        consolidate(adapter, tmp_path / "other", base="x")
    with pytest.raises(UsageError, match="exists already"):
        consolidate(found.run, adapter, adapter=True)
