import torch

from esmshard.model.config import SIZES
from esmshard.model.esm2 import ESM2
from esmshard.settings import OptimSettings, TaskSettings
from esmshard.tasks.contact import ContactTask
from esmshard.tasks.finetuner import FineTuner
from esmshard.train.optim import adamw, schedule, set_learning_rate


def model() -> FineTuner:
    task = ContactTask(TaskSettings(name="contact", channels=8, blocks=1))
    tuner = FineTuner(ESM2(SIZES["nano"]), task.head(SIZES["nano"]))
    tuner.freeze_unused()
    return tuner


def test_every_trainable_parameter_is_in_the_group_it_belongs_to() -> None:
    tuner = model()
    optimizer = adamw(tuner, OptimSettings(lr=1e-5, head_lr=1e-3, weight_decay=0.1))
    found = {id(p): (g["peak"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    expected = {
        "trunk.embed_tokens.weight": (1e-5, 0.0),
        "trunk.layers.0.fc1.weight": (1e-5, 0.1),
        "trunk.layers.0.fc1.bias": (1e-5, 0.0),
        "trunk.layers.1.final_layer_norm.weight": (1e-5, 0.0),
        "trunk.emb_layer_norm_after.weight": (1e-5, 0.0),
        "head.left.weight": (1e-3, 0.1),
        "head.separation.weight": (1e-3, 0.0),
        "head.blocks.0.norm1.weight": (1e-3, 0.0),
        "head.blocks.0.conv1.weight": (1e-3, 0.1),
        "head.out.bias": (1e-3, 0.0),
    }
    named = dict(tuner.named_parameters())
    assert {name: found[id(named[name])] for name in expected} == expected
    assert len(found) == sum(p.requires_grad for p in tuner.parameters())
    assert id(named["trunk.contact_head.regression.weight"]) not in found
    assert id(named["trunk.lm_head.dense.weight"]) not in found


def test_betas_and_learning_rates_are_those_of_the_recipe() -> None:
    optimizer = adamw(model(), OptimSettings(lr=1e-5, head_lr=1e-3, betas=(0.8, 0.9)))
    set_learning_rate(optimizer, 0.5)
    assert {g["lr"] for g in optimizer.param_groups} == {5e-6, 5e-4}
    assert all(g["betas"] == (0.8, 0.9) for g in optimizer.param_groups)


def test_schedules_rise_and_fall() -> None:
    for kind in ("cosine", "linear"):
        shares = [schedule(s, 100, 0.1, kind) for s in range(100)]  # type: ignore[arg-type]
        assert shares[:10] == sorted(shares[:10])
        assert shares[9] == 1.0 == max(shares)
        assert shares[9:] == sorted(shares[9:], reverse=True)
        assert shares[0] > 0
        assert abs(shares[-1]) < 1e-12
    assert {schedule(s, 100, 0.1, "constant") for s in range(10, 100)} == {1.0}
    assert schedule(0, 1, 0.0, "cosine") >= 0
    assert torch.isfinite(torch.tensor(schedule(0, 1, 1.0, "linear")))
