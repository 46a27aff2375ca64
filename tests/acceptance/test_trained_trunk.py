"""A trained language model, fine-tuned for contacts, is better than its own attention maps were.

ESMSHARD_TRUNK names the model: a path, or a released name such as esm2_t6_8M_UR50D. Minutes on two cores with 8M.
"""

import json
import os
from pathlib import Path

import pytest
from command import esmshard

RECIPE = """\
task: {{name: contact, head: attention}}
model: {{name: {model}}}
data: {{train: sample:contact/train, valid: sample:contact/valid, test: sample:contact/test}}
batch: {{global_tokens: 2048, tokens_per_rank: auto}}
optim: {{lr: 1.0e-4, head_lr: 1.0e-3, warmup: 0.1}}
train: {{steps: {steps}, eval_every: 25}}
checkpoint: {{every: 25, keep: 1, keep_best: true}}
out: {out}
"""
METHODS = {"full": (), "lora": ("adapt.method=lora", "adapt.rank=8", "adapt.alpha=16", "optim.lr=1e-3")}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif("ESMSHARD_TRUNK" not in os.environ, reason="set ESMSHARD_TRUNK to a trained model"),
]


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model under its own unsupervised head, from which fine-tuning goes on."""
    out = tmp_path_factory.mktemp("trunk")
    recipe = out / "probe.yaml"
    recipe.write_text(RECIPE.format(model=os.environ["ESMSHARD_TRUNK"], steps=1, out=out / "probe"))
    done = esmshard("finetune", recipe, "adapt.method=probe", timeout=600)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("method", METHODS)
def test_fine_tuning_beats_the_unsupervised_head(probe: Path, method: str) -> None:
    recipe = probe / f"{method}.yaml"
    recipe.write_text(RECIPE.format(model=probe / "probe" / "model", steps=100, out=probe / method))
    done = esmshard("finetune", recipe, "--nproc", "2", *METHODS[method], timeout=3600)
    assert done.returncode == 0, done.stderr
    assert "the head goes on from the contact head of" in done.stderr
    evaluation = json.loads((probe / method / "evaluation.json").read_text())
    assert evaluation["differences"]["unsupervised head"]["long P@L"]["low"] > 0, done.stdout
