import torch

from esmshard.model.families.esm2 import ESM2
from esmshard.model.families.family_registry import SIZES
from esmshard.model.finetuner import FineTuner
from esmshard.recipe.sections import AdaptSettings, OptimSettings
from esmshard.tasks.contact import ContactSettings, ContactTask
from esmshard.train.optim import adamw, schedule, state_tensors


def model(adapt: AdaptSettings | None = None) -> FineTuner:
    task = ContactTask(ContactSettings(name="contact", channels=8, blocks=1), {})
    tuner = FineTuner(ESM2(SIZES["nano"]), task.head(SIZES["nano"]))
    tuner.adapt(adapt or AdaptSettings(), 0)
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


def test_schedules_rise_and_fall() -> None:
    for kind in ("cosine", "linear"):
        shares = [schedule(s, 100, 0.1, kind) for s in range(100)]  # type: ignore[arg-type]
        assert shares[:10] == sorted(shares[:10])
        assert shares[9] == 1.0 == max(shares)
        assert shares[9:] == sorted(shares[9:], reverse=True)
        assert shares[0] > 0
        assert 1e-4 < shares[-1] < 0.02, "the last step trains, too"
    assert {schedule(s, 100, 0.1, "constant") for s in range(10, 100)} == {1.0}
    assert schedule(0, 1, 0.0, "cosine") >= 0
    assert torch.isfinite(torch.tensor(schedule(0, 1, 1.0, "linear")))


LORA = AdaptSettings(method="lora", rank=2, targets=("k", "fc1"))


def test_lora_matrices_decay_and_biases_do_not() -> None:
    tuner = model(LORA)
    optimizer = adamw(tuner, OptimSettings(lr=1e-5, head_lr=1e-3, weight_decay=0.1))
    found = {id(p): (g["peak"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    named = {name: found.get(id(p)) for name, p in tuner.named_parameters()}
    assert named["trunk.layers.0.self_attn.k_proj.lora_A.weight"] == (1e-5, 0.1)
    assert named["trunk.layers.1.fc1.bias"] == (1e-5, 0.0)
    assert named["trunk.emb_layer_norm_after.bias"] == (1e-5, 0.0)
    assert named["head.left.weight"] == (1e-3, 0.1)
    frozen = {name for name, group in named.items() if group is None}
    assert {n for n in named if n.startswith("trunk.layers.") and n.endswith("_proj.weight")} <= frozen
    # No output depends on the last two, biases or not.
    assert {"trunk.embed_tokens.weight", "trunk.lm_head.bias", "trunk.contact_head.regression.bias"} <= frozen


def test_state_tensors_hold_all_or_what_learns() -> None:
    tuner = model(LORA)
    tuner.head.register_buffer("running", torch.ones(3))
    optimizer = adamw(tuner, OptimSettings(lr=1e-5, head_lr=1e-3))
    everything = state_tensors(tuner, optimizer)
    some = state_tensors(tuner, optimizer, trained_only=True)
    learns = {name for name, p in tuner.named_parameters() if p.requires_grad}
    of_model = {name.removeprefix("model.") for name in some if name.startswith("model.")}
    assert of_model == learns | {"head.running"}
    assert {n for n in some if n.startswith("optim.")} == {
        f"optim.{name}.{key}" for name in learns for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert everything.keys() - some.keys() == {
        f"model.{name}" for name, p in tuner.named_parameters() if not p.requires_grad
    } | {f"model.trunk.layers.{n}.self_attn.rot_emb.inv_freq" for n in range(2)}
    assert all(everything[name] is some[name] for name in some if name.startswith("optim."))
