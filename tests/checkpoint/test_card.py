"""The model card says what is known, calls only ESM-2 by this name, and names no path of a machine."""

import re
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, own_caches
from huggingface_hub import ModelCard

from esmshard.checkpoint import card
from esmshard.recipe.sections import Recipe


def about(**changes: Any) -> dict[str, Any]:
    recipe = Recipe.model_validate(
        {
            "task": {"name": "contact", "channels": 8, "blocks": 1},
            "model": {"name": "esm2_t6_8M_UR50D"},
            "train": {"steps": 400},
            "data": {"train": "sample:contact/train", "valid": "/home/ada/b|c.fasta", "test": "/home/ada/c.fasta"},
            "optim": {"lr": 1e-4},
            "batch": {"global_tokens": 20000},
            "parallel": {"precision": "bf16"},
            "out": "/home/ada/runs/mine",
        }
    )
    counts = {"path": "/home/ada/x", "records": 1201, "residues": 345679}
    facts = {"esmshard": "0.1.0", "step": 380, "weights_sha256": "f" * 64, "recipe": recipe.model_dump(mode="json")}
    facts |= {"config": {"family": "esm2", "n_layers": 6, "dim": 320, "n_heads": 20}, "data": {"valid": counts}}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            facts["recipe"][section][name] = value
        else:
            (facts["recipe"] if key in facts["recipe"] else facts)[key] = value
    return facts


EVALUATION = {
    "split": "test",
    "data": "/home/ada/c.fasta",
    "records": 100,
    "without_value": {"long P@L": 3, "AUPRC": 0},
    "interval": "95% percentile bootstrap over records",
    "weights_sha256": "f" * 64,
    "metrics": {
        "fine-tuned": {"long P@L": {"value": 0.51239, "low": 0.4801, "high": 0.5449}, "AUPRC": {"value": None}},
    },
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def written(model: Path, about: dict[str, Any], evaluation: dict[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    """Return the front matter of a card, as the hub reads it, and the text of the card."""
    card.write(model, about, evaluation)
    text = (model / "README.md").read_text(encoding="utf-8")
    assert "/home" not in text
    front: dict[str, Any] = ModelCard(text).data.to_dict()
    return front, text.split("---\n", 2)[2]


def row(text: str, first: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.replace("\\|", "!").strip("|").split("|")]


def test_a_fine_tuned_released_model_and_its_scores(model: Path) -> None:
    front, text = written(model, about(), EVALUATION)
    assert front == {
        "license": "mit",
        "base_model": "facebook/esm2_t6_8M_UR50D",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "tags": ["biology", "protein-language-model", "esmshard", "contact-prediction"],
    }
    assert text.startswith("\n# mine\n\n")
    assert "not ESM-2" not in text
    expected = {
        "valid": ["`b!c.fasta`", "1,201", "345,679"],
        "steps": ["380 of 400"],
        "tokens a step, at most": ["20,000"],
        "learning rate": ["AdamW, cosine, 0.0001, head 0.0002"],
        "precision": ["bf16, weights and optimizer state in fp32"],
        "fine-tuned": ["0.512 [0.480, 0.545]", "no value"],
    }
    assert {name: row(text, name)[1:] for name in expected} == expected
    assert "Copyright Meta Platforms" in text
    assert "|  | long P@L | AUPRC |\n| --- | --- | --- |\n" in text
    assert "3 without long P@L." in text
    assert "scored before" not in text
    assert "scored before its weights were converted" in written(model, about(weights_sha256="e" * 64), EVALUATION)[1]
    assert "Not scored yet" in written(model, about())[1]


LICENCES: dict[str, dict[str, Any]] = {
    "cc-by-nc-sa-4.0": {"license": "cc-by-nc-sa-4.0"},
    "cambrian-non-commercial": {"license": "other", "license_name": "cambrian-non-commercial"},
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
            for start in (name, str(model)):  # the second model starts from the first, whose card has the licence
                known, text = written(model, about(model__name=start))
                assert known.items() >= entries.items()
                assert f"`{licence}`" in text


def test_other_weights_never_pass_for_esm2(model: Path) -> None:
    keys, parts = {"library_name", "tags"}, ["lm_head", "contact_head"]
    random = {"init": "random", "train__seed": 5, "unlearned": parts}
    for changes, more, token in (
        (random, set(), "**It is not ESM-2**: it was trained from random weights (seed 5)"),
        (random, set(), "which were not trained: LM head and contact regression"),
        ({"model__name": "starter"}, set(), "`starter`, a small model that comes with esmshard. **It is not ESM-2**"),
        ({"model__name": "/home/ada/esm2_t6_8M_UR50D.pt"}, set(), "in `esm2_t6_8M_UR50D.pt`, given as a file"),
        ({"model__name": "lab/esm2"}, {"base_model", "base_model_relation"}, "it is not known whether they are"),
    ):
        front, text = written(model, about(**changes))
        assert front.keys() == keys | more
        assert token in text
        assert "Copyright Meta" not in text


def test_names_of_others_are_neither_html_nor_markdown(model: Path) -> None:
    bad = "<img src=x onerror=alert(1)>[click](javascript:x)`|"
    scores = EVALUATION | {"split": bad, "data": bad, "interval": bad, "without_value": {bad: 2}, "columns": [bad]}
    scores["metrics"] = {bad: {bad: {"value": 0.5, "low": None, "high": None}}}
    given = about(out=f"runs/{bad}", data__train=bad, model__name=f"a/{bad}", task__head=bad, adapt__method=bad)
    _, text = written(model, given | {"weights_sha256": bad}, scores)
    assert "<" not in text
    assert re.search(r"(?<!\\)\]\(javascript", text) is None
    assert r"\\|" not in text, "a bar that is escaped twice ends a cell"
    assert len(text.split("\n\n")) == len(written(model, about(), EVALUATION)[1].split("\n\n"))
