import torch

from esmshard.model.families.esm2 import ESM2
from esmshard.model.families.family_registry import SIZES
from esmshard.model.finetuner import FineTuner
from esmshard.recipe.sections import AdaptSettings, OptimSettings
from esmshard.tasks.contact import ContactSettings, ContactTask
from esmshard.train.optim import adamw, schedule

LORA = AdaptSettings(method="lora", rank=2, targets=("k", "fc1"))


def model(adapt: AdaptSettings | None = None) -> FineTuner:
    task = ContactTask(ContactSettings(name="contact", channels=8, blocks=1), {})
    tuner = FineTuner(ESM2(SIZES["nano"]), task.head(SIZES["nano"]))
    tuner.adapt(adapt or AdaptSettings(), 0)
    return tuner


def groups(tuner: FineTuner) -> dict[str, tuple[float, float] | None]:
    """Return the peak learning rate and weight decay of each parameter; None without a group."""
    optimizer = adamw(tuner, OptimSettings(lr=1e-5, head_lr=1e-3, weight_decay=0.1))
    group_of = {id(p): (g["peak"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    return {name: group_of.get(id(p)) for name, p in tuner.named_parameters()}


def test_every_trainable_parameter_is_in_its_group() -> None:
    tuner = model()
    named = groups(tuner)
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
    assert {name: named[name] for name in expected} == expected
    trained = {name for name, p in tuner.named_parameters() if p.requires_grad}
    assert {name for name, group in named.items() if group} == trained
    assert named["trunk.contact_head.regression.weight"] is named["trunk.lm_head.dense.weight"] is None
    named = groups(model(LORA))
    assert named["trunk.layers.0.self_attn.k_proj.lora_A.weight"] == (1e-5, 0.1)
    assert named["trunk.layers.1.fc1.bias"] == named["trunk.emb_layer_norm_after.bias"] == (1e-5, 0.0)
    assert named["head.left.weight"] == (1e-3, 0.1)
    frozen = {name for name, group in named.items() if group is None}
    assert {n for n in named if n.startswith("trunk.layers.") and n.endswith("_proj.weight")} <= frozen
    # No output depends on the last two, biases or not.
    assert {"trunk.embed_tokens.weight", "trunk.lm_head.bias", "trunk.contact_head.regression.bias"} <= frozen


def test_schedules_rise_and_fall() -> None:
    for kind in ("cosine", "linear"):
        shares = [schedule(s, 100, 0.1, kind) for s in range(100)]  # type: ignore[arg-type]
        assert shares == sorted(shares[:9]) + sorted(shares[9:], reverse=True)
        assert shares[9] == 1.0
        assert shares[0] > 0 < shares[-1] < 0.02, "the last step trains, too"
    assert {schedule(s, 100, 0.1, "constant") for s in range(10, 100)} == {1.0}
    assert schedule(0, 1, 0.0, "cosine") >= 0
    assert torch.isfinite(torch.tensor(schedule(0, 1, 1.0, "linear")))
