"""The model card says what is known, never more; nothing but ESM-2 is called so, and no path of a machine is told."""

import re
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, own_caches
from huggingface_hub import ModelCard
from ruamel.yaml import YAML

from esmshard.checkpoint import card
from esmshard.recipe.sections import Recipe


def about(**changes: Any) -> dict[str, Any]:
    recipe = Recipe.model_validate(
        {
            "task": {"name": "contact", "channels": 8, "blocks": 1},
            "model": {"name": "esm2_t6_8M_UR50D"},
            "train": {"steps": 400},
            "data": {"train": "sample:contact/train", "valid": "/home/ada/b|c.fasta", "test": "/home/ada/c.fasta"},
            "optim": {"lr": 1e-4, "warmup": 0.1},
            "batch": {"global_tokens": 20000},
            "parallel": {"precision": "bf16"},
            "out": "/home/ada/runs/mine",
        }
    )
    data = {
        name: {"path": f"/home/ada/{name}", "records": 1200 + n, "residues": 345678 + n, "tokens_sha256": 64 * str(n)}
        for n, name in enumerate(("train", "valid", "test"))
    }
    found = {
        "format": "esmshard-model",
        "esmshard": "0.1.0",
        "step": 380,
        "recipe": recipe.model_dump(mode="json"),
        "config": {"family": "esm2", "n_layers": 6, "dim": 320, "n_heads": 20},
        "data": data,
        "world_size": 4,
        "versions": {"torch": "2.13.0", "platform": "Linux-6.1-ada"},
        "dtype": "fp32",
        "weights_sha256": "f" * 64,
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            found["recipe"][section][name] = value
        elif key in found["recipe"]:
            found["recipe"][key] = value
        else:
            found[key] = value
    return found


EVALUATION = {
    "split": "test",
    "data": "/home/ada/c.fasta",
    "records": 100,
    "without_value": {"long P@L": 3, "AUPRC": 0},
    "interval": "95% percentile bootstrap over records",
    "weights_sha256": "f" * 64,
    "metrics": {
        "fine-tuned": {"long P@L": {"value": 0.51239, "low": 0.4801, "high": 0.5449}, "AUPRC": {"value": None}},
        "before fine-tuning": {"long P@L": {"value": 0.02, "low": 0.01, "high": 0.03}, "AUPRC": {"value": None}},
    },
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def written(model: Path, about: dict[str, Any], evaluation: dict[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    """Front matter and text of a card."""
    card.write(model, about, evaluation)
    text = (model / "README.md").read_text(encoding="utf-8")
    start, front, rest = text.split("---\n", 2)
    assert start == ""
    found = YAML(typ="safe", pure=True).load(front)
    assert ModelCard(text).data.to_dict() == found, "as the hub reads it"
    assert "/home" not in text
    assert "Linux" not in text
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    return found, rest


def row(text: str, first: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.replace("\\|", "!").strip("|").split("|")]


def test_a_fine_tuned_released_model(model: Path) -> None:
    front, text = written(model, about(), EVALUATION)
    assert front == {
        "license": "mit",
        "base_model": "facebook/esm2_t6_8M_UR50D",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "tags": ["biology", "protein-language-model", "esmshard", "contact-prediction"],
    }
    assert text.startswith("\n# mine\n\n")
    assert "a head for the task `contact` (head pairwise, channels 8, blocks 1)" in text
    assert "fine-tuned from `esm2_t6_8M_UR50D` ([facebook/esm2_t6_8M_UR50D](https://huggingface.co/facebook/" in text
    assert "not ESM-2" not in text
    assert row(text, "valid") == ["valid", "`b!c.fasta`", "1,201", "345,679"]
    assert "Training records of more than 1,022 residues: `crop`." in text
    expected = {
        "steps": "380 of 400",
        "tokens a step, at most": "20,000",
        "learning rate": "AdamW, cosine, 0.0001, head 0.0002",
        "precision": "bf16, weights and optimizer state in fp32",
    }
    assert {name: row(text, name)[1] for name in expected} == expected
    assert "MIT licence (Copyright Meta Platforms" in text
    assert text.endswith("Lin et al. 2023, Science 379:1123, doi:10.1126/science.ade2574\n")


def test_another_repository_is_named(model: Path) -> None:
    front, text = written(model, about(model__name="lab/esm2_mine"))
    assert (front["base_model"], front["base_model_relation"]) == ("lab/esm2_mine", "finetune")
    assert "license" not in front
    assert "whether they are those of a released ESM-2 model is not known here" in text
    assert "that of the weights it was fine-tuned from holds on" in text


LICENCES: dict[str, dict[str, Any]] = {
    "cc-by-nc-sa-4.0": {"license": "cc-by-nc-sa-4.0"},
    "cambrian-non-commercial": {"license": "other", "license_name": "cambrian-non-commercial"},
    "CC-BY-NC-4.0": {"license": ["CC-BY-NC-4.0"]},
    "mit, apache-2.0": {"license": ["mit", "apache-2.0"]},
}


def test_the_licence_of_the_base_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = own_caches(tmp_path, monkeypatch) / "models--lab--esm2_mine"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    places = {str(tmp_path / "base"): tmp_path / "base", "lab/esm2_mine": repository / "snapshots" / COMMIT}
    for name, base in places.items():
        base.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            (base / file).write_text("{}")
        for licence, entries in LICENCES.items():
            front = "".join(f"{key}: {value}\n" for key, value in entries.items())
            (base / "README.md").write_text(f"---\n{front}---\n# A model\nlicense: mit\n")
            known, text = written(model, about(model__name=name))
            assert f"Its card names the licence `{licence}`." in text
            assert known.items() >= entries.items()
            again, of_this = written(model, about(model__name=str(model)))
            assert again.items() >= entries.items(), "what is made from this model says it, too"
            assert f"`{licence}`" in of_this


def test_scores_stand_beside_their_baselines(model: Path) -> None:
    _, text = written(model, about(), EVALUATION)
    assert "Over the 100 records of `c.fasta` (test), with 95% percentile bootstrap over records." in text
    assert "left out of it: 3 without long P@L." in text
    assert row(text, "fine-tuned") == ["fine-tuned", "0.512 [0.480, 0.545]", "no value"]
    assert row(text, "before fine-tuning") == ["before fine-tuning", "0.020 [0.010, 0.030]", "no value"]
    assert "|  | long P@L | AUPRC |\n| --- | --- | --- |\n" in text
    assert "Scored before" not in text
    other = written(model, about(), EVALUATION | {"weights_sha256": "e" * 64})[1]
    assert "Scored before the weights were written in this layout and precision." in other
    assert "Not scored yet" in written(model, about())[1]


def test_other_weights_never_pass_for_esm2(model: Path) -> None:
    random = about(init="random", train__seed=5) | {"unlearned": ["lm_head", "contact_head"]}
    front, text = written(model, random)
    assert front.keys() == {"library_name", "tags"}
    assert "**It is not ESM-2**: it was trained from random weights (seed 5) in the shape of `esm2_t6_8M_UR50D`" in text
    assert "No licence is stated. It holds no weights of others." in text
    assert "MIT" not in text
    assert "never learned: LM head and contact regression" in text
    front, text = written(model, about(model__name="starter"))
    assert front.keys() == {"library_name", "tags"}
    assert "`starter`, a small model that comes with esmshard. **It is not ESM-2**" in text
    assert "not known here" not in text
    front, text = written(model, about(model__name="/home/ada/esm2_t6_8M_UR50D.pt"))
    assert front.keys() == {"library_name", "tags"}
    assert "fine-tuned from the weights in `esm2_t6_8M_UR50D.pt`, given as a file" in text
    assert "MIT" not in text


def test_names_of_others_are_neither_html_nor_markdown(model: Path) -> None:
    bad = "<img src=x onerror=alert(1)>[click](javascript:x)`|"
    scores = EVALUATION | {"split": bad, "data": bad, "interval": bad, "without_value": {bad: 2}, "columns": [bad]}
    scores["metrics"] = {bad: {bad: {"value": 0.5, "low": None, "high": None}}}
    given = about(out=f"runs/{bad}", data__train=bad, model__name=f"a/{bad}", task__head=bad, adapt__method=bad)
    given |= {"dtype": bad, "weights_sha256": bad, "world_size": 1, "versions": {"torch": bad}}
    _, text = written(model, given, scores)
    assert "<" not in text
    assert re.search(r"(?<!\\)\]\(javascript", text) is None
    assert r"\\|" not in text, "a bar that is escaped twice ends a cell"
    assert len(text.split("\n\n")) == len(written(model, about(), EVALUATION)[1].split("\n\n"))
