"""A model directory from a checkpoint: the same bits, in little memory, or nothing."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from esm.pretrained import load_model_and_alphabet_local
from model_files import TINY, fair_esm, tokenise
from safetensors import safe_open
from transformers import EsmForMaskedLM

from esmshard.checkpoint import sharded
from esmshard.checkpoint.consolidate import consolidate
from esmshard.errors import InputError, UsageError
from esmshard.model import weights
from esmshard.model.families.esm2 import TIED, EsmConfig
from esmshard.recipe.recipe_file import for_others
from esmshard.recipe.sections import Recipe
from esmshard.tasks.registry import new_task

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from drills import fork, killed_at
from ranks import run_ranks

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "XBUZO<mask>LLGG<mask>AVW"]
TASK = {"name": "contact", "channels": 4, "blocks": 1}


def state_of(config: EsmConfig) -> dict[str, Any]:
    data = {"train": "/home/ada/a.fasta", "valid": "/home/ada/b.fasta", "test": "/home/ada/c.fasta"}
    recipe = Recipe.model_validate(
        {"task": TASK, "model": {"name": "nano"}, "init": "random", "data": data, "out": "/home/ada/runs/mine"}
    )
    return {"recipe": recipe.model_dump(mode="json"), "config": config.recorded(), "world_size": 2, "facts": {}}


def tensors_of(config: EsmConfig) -> dict[str, torch.Tensor]:
    """Return names and values as a run saves them: fair-esm's model, and a head with a large last layer."""
    found = {f"model.trunk.{n}": t for n, t in fair_esm(config).state_dict().items() if n != TIED}
    torch.manual_seed(1)
    head = new_task(Recipe.model_validate(state_of(config)["recipe"]).task, {}).head(config).state_dict()
    head["out.weight"] = torch.randn(head["out.weight"].shape)
    return found | {f"model.head.{n}": t for n, t in head.items()} | {"optim.trunk.fc.step": torch.ones(3)}


def write_run(run: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda it: None) -> Path:
    tensors = tensors_of(TINY)
    change(tensors)
    sharded.write(run / "checkpoints", 7, tensors, state_of(TINY), keep=1)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "mine")


def keys(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    return found


def test_transformers_and_fair_esm_compute_what_the_run_computes(run: Path, tmp_path: Path) -> None:
    out = consolidate(run, tmp_path / "model", warn=pytest.fail)
    pt = consolidate(run, tmp_path / "esm2_it", to="fair-esm", warn=pytest.fail)
    reference = fair_esm(TINY)
    block, _ = tokenise(SEQUENCES)
    mask = (block != 1).long()
    theirs, info = EsmForMaskedLM.from_pretrained(out, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    head = {n.removeprefix("model.") for n in tensors_of(TINY) if n.startswith("model.head.")}
    assert set(info["unexpected_keys"]) == head
    with torch.serialization.safe_globals([argparse.Namespace]):
        oracle = load_model_and_alphabet_local(pt / "esm2_it.pt")[0].eval()
    assert all(torch.equal(t, reference.state_dict()[n]) for n, t in oracle.state_dict().items())
    with torch.no_grad():
        expected = reference(block, return_contacts=True)
        found = oracle(block, return_contacts=True)
        logits, contacts = theirs(block, attention_mask=mask).logits, theirs.predict_contacts(block, mask)
    assert torch.equal(found["logits"], expected["logits"])
    assert torch.equal(found["contacts"], expected["contacts"])
    kept = block != 1
    assert (logits - expected["logits"])[kept].abs().max() <= 1e-5
    assert (contacts - expected["contacts"])[:, :18, :18].abs().max() <= 1e-5
    assert expected["contacts"].std() > 0.005
    assert not list(pt.glob("tensors*"))


def test_files_and_tensors_of_a_model_directory(run: Path, tmp_path: Path) -> None:
    out = consolidate(run, tmp_path / "model", dtype="bf16")
    names = {"README.md", "config.json", "esmshard.json", "model.safetensors", "special_tokens_map.json"}
    assert {p.name for p in out.iterdir()} == names | {"tokenizer_config.json", "vocab.txt"}
    about = json.loads((out / "esmshard.json").read_text())
    state = state_of(TINY)
    state["recipe"] = for_others(state["recipe"], out)
    assert {key: about[key] for key in state} == state
    assert (about["step"], about["format"], about["dtype"]) == (7, "esmshard-model", "bf16")
    stored = keys(out)
    assert {str(t.dtype) for key, t in stored.items() if "inv_freq" not in key} == {"torch.bfloat16"}
    tensors = tensors_of(TINY)
    assert len(stored) == len([n for n in tensors if n.startswith("model.")])
    assert torch.equal(stored["head.out.weight"], tensors["model.head.out.weight"].bfloat16())
    assert not [key for key in stored if key.startswith(("optim", "model", "trunk")) or key == "lm_head.decoder.weight"]


def test_no_wrapper_leaves_its_name(tiny_recipe: Path, tmp_path: Path) -> None:
    options = "precision: fp32, compile: true, activation_checkpointing: full"
    tiny_recipe.write_text(tiny_recipe.read_text().replace("precision: fp32", options))
    run_ranks("work:save", 2, tmp_path, str(tiny_recipe), str(tmp_path / "run" / "checkpoints"), 0.5)
    out = consolidate(tmp_path / "run", tmp_path / "model")
    found = keys(out)
    assert not [key for key in found if key.split(".")[0] not in ("esm", "lm_head", "head")]
    assert not [key for key in found if any(part.startswith("_") for part in key.split("."))]
    assert not EsmForMaskedLM.from_pretrained(out, output_loading_info=True)[1]["missing_keys"]


def test_scores_of_the_same_model_are_on_its_card(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    row = {"long P@L": {"value": 0.5, "low": 0.4, "high": 0.6}}
    facts = {"split": "test", "data": "c.fasta", "records": 5, "without_value": {}, "interval": "95%"}
    facts |= {"metrics": {"fine-tuned": row}, "step": 7, "recipe": state_of(TINY)["recipe"], "weights_sha256": "x"}
    scores, checkpoint = run / "evaluation.json", run / "checkpoints" / "step_000007" / "state.json"

    def scored(source: Path, **changes: object) -> bool:
        scores.write_text(json.dumps(facts | changes))
        text = (consolidate(source, tmp_path / "out", overwrite=True) / "README.md").read_text()
        assert ("0.500 [0.400, 0.600]" in text) is ("Not scored yet" not in text)
        return "0.500" in text

    assert scored(run)
    assert not scored(run, step=6)
    model = consolidate(run, run / "model")
    assert not scored(model), "scores of other weights"
    same = {"weights_sha256": json.loads((model / "esmshard.json").read_text())["weights_sha256"]}
    assert scored(model, **same)
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 0x80]))
    notices: list[str] = []
    consolidate(model, tmp_path / "altered", warn=notices.append)
    assert any("is not the file that" in notice for notice in notices)
    assert not scored(model, **same), "scores of altered weights"
    os.utime(checkpoint, (2**33, 2**33))
    assert not scored(run), "older than the checkpoint"
    scores.write_text("[")
    assert "Not scored yet" in (consolidate(run, tmp_path / "again") / "README.md").read_text()


def poison(value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors["model.trunk.layers.1.fc1.weight"][3, 4].fill_(value)


def test_a_checkpoint_that_is_no_model_leaves_nothing(tmp_path: Path) -> None:
    two, unfit = torch.ones(2), ".bias: do not fit"
    changes: list[tuple[Any, str, str]] = [
        (poison(float("nan")), "fp32", "layers.1.fc1.weight holds a value that is not finite"),
        (poison(1e6), "fp16", "too large for torch.float16"),
        (lambda t: t.pop("model.trunk.layers.0.fc1.bias"), "fp32", f"layers.0.fc1{unfit}"),
        (lambda t: t.update({"model.trunk.layers.9.fc1.bias": two}), "fp32", f"layers.9.fc1{unfit}"),
        (lambda t: t.update({"model.trunk.lm_head.bias": two}), "fp32", f"lm_head{unfit}"),
    ]
    for n, (change, dtype, says) in enumerate(changes):
        run = write_run(tmp_path / "runs" / str(n), change)
        with pytest.raises(InputError, match=f"^{run}.*{re.escape(says)}"):
            consolidate(run, tmp_path / "out" / "model", dtype=dtype)
        assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_only_models_are_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name, token in (("notes", "a.txt"), ("file", "is a file"), ("dangling", "is a file")):
        for overwrite, says in ((True, token), (False, "exists already")):
            with pytest.raises(UsageError, match=says):
                consolidate(run, tmp_path / name, overwrite=overwrite)
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    for to in (None, "fair-esm", None):
        consolidate(run, tmp_path / "empty", overwrite=True, to=to)


def test_a_call_that_is_killed_leaves_the_old_model_or_the_new_one(run: Path, tmp_path: Path) -> None:
    digests, found = {}, []
    for n in range(1, 100, 3):
        directory = tmp_path / str(n)
        consolidate(run, directory / "model", dtype="bf16")
        if not killed_at(n, directory, lambda it: consolidate(run, it / "model", overwrite=True)):
            break
        model = directory / "model"
        with pytest.raises(UsageError, match="exists already"):  # and removes what the dead call left
            consolidate(run, model)
        about = json.loads((model / "esmshard.json").read_text())
        found.append(about["dtype"])
        digests.setdefault(about["dtype"], about["weights_sha256"])
        assert about["weights_sha256"] == digests[about["dtype"]]
        assert len(weights.read(str(model)).read) > 30
        assert (model / "README.md").is_file()
        assert [p.name for p in directory.iterdir()] == ["model"]
    assert found == sorted(found), "bf16, then fp32"
    assert set(found) == {"bf16", "fp32"}
    assert len(found) >= 5


def test_memory_is_that_of_one_file_and_not_of_the_model(run: Path, tmp_path: Path) -> None:
    """The peak of the resident memory, with mapped files, for a model of 156 MB in files of at most 20 MB."""
    config = EsmConfig(n_layers=8, dim=640, n_heads=20)
    flat = weights.fresh(config, 0)
    tensors = {f"model.trunk.{name}": flat[name] for name in weights.shapes(config) if name != TIED}
    sharded.write(tmp_path / "run" / "checkpoints", 1, tensors, state_of(config), keep=1)
    del tensors

    def resident(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

    def work() -> int:
        consolidate(run, tmp_path / "small")  # loads the pages of torch's code
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        out = consolidate(tmp_path / "run", tmp_path / "model", max_file_bytes=20_000_000)
        (tmp_path / "peak").write_text(str(resident("VmHWM") - before))
        return 0 if out.is_dir() else 1

    assert fork(work) == 0
    assert sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors")) > 155e6
    assert int((tmp_path / "peak").read_text()) < 50e6


def test_best_reaches_the_checkpoints(tmp_path: Path) -> None:
    copy = write_run(tmp_path / "run")
    sharded.write(copy / "checkpoints", 3, tensors_of(TINY), state_of(TINY), keep=9, best=True)
    sharded.write(copy / "checkpoints", 9, tensors_of(TINY), state_of(TINY), keep=9)
    for best, step in ((True, 3), (False, 9)):
        out = consolidate(copy, tmp_path / str(step), best=best)
        assert json.loads((out / "esmshard.json").read_text())["step"] == step
