"""Heads for contacts: symmetric, alone, exact, and the trunk learns through each."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_files import TINY, fair_esm, ours, perturb, tokenise
from torch import nn

from esmshard.batch import TokenBatch, pack
from esmshard.model import weight_reader, weights
from esmshard.model.config import ModelConfig
from esmshard.model.contacts import predict_contacts
from esmshard.model.families.esm2 import ESM2
from esmshard.model.finetuner import FineTuner
from esmshard.model.weights import Weights
from esmshard.parallel.layout import Layout
from esmshard.parallel.process_group import World
from esmshard.parallel.shard import shard
from esmshard.recipe.sections import AdaptSettings
from esmshard.tasks import contact_heads
from esmshard.tasks.contact import ContactSettings, ContactTask
from esmshard.tasks.contact_heads import PRIOR, AttentionHead, BothHead, PairwiseHead
from esmshard.tasks.finetuned import start_values
from esmshard.tasks.registry import new_task
from esmshard.vocab import encode

HEAD_NAMES = ("attention", "pairwise", "both")
LENGTHS = (30, 1, 2, 75, 9)


def settings(head: str, **keys: Any) -> ContactSettings:
    return ContactSettings(**{"name": "contact", "head": head, "channels": 8, "blocks": 3} | keys)  # type: ignore[arg-type]


def new_head(made: ContactSettings, config: ModelConfig) -> nn.Module:
    return ContactTask(made, {}).head(config)


@pytest.fixture(scope="module")
def trunk() -> ESM2:
    return ours(fair_esm(TINY), TINY)


def model(trunk: ESM2, head: str, **keys: Any) -> FineTuner:
    torch.manual_seed(0)
    made = new_head(settings(head, **keys), TINY)
    perturb(made, deviation=0.3)
    for part in made.modules():
        if isinstance(part, PairwiseHead):
            nn.init.normal_(part.out.weight, std=0.3)  # a new one is tiny, and all logits nearly equal
        elif isinstance(part, AttentionHead | BothHead):
            nn.init.normal_(part.regression.weight)
    tuner = FineTuner(copy.deepcopy(trunk).requires_grad_(True), made).eval()
    tuner.adapt(AdaptSettings(), 0)
    return tuner


def batch_of(*lengths: int) -> TokenBatch:
    letters = "ACDEFGHIKLMNPQRSTVWY"
    return tokenise(["".join(letters[(7 * n * n + 3 * n + k) % 20] for n in range(k)) for k in lengths])[1]


def backward(tuner: FineTuner, batch: TokenBatch) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]:
    """Outputs, and the gradients of a loss that weights all pairs differently."""
    outputs = tuner(batch)
    weight = [torch.rand(o.shape, generator=torch.Generator().manual_seed(len(o))) for o in outputs]
    torch.stack([(o.sigmoid() * w).mean() for o, w in zip(outputs, weight, strict=True)]).sum().backward()
    return [o.detach() for o in outputs], {name: p.grad for name, p in tuner.named_parameters()}


def assert_same_gradients(one: dict[str, Any], other: dict[str, Any], off: float) -> None:
    assert {name for name in one if one[name] is None} == {name for name in other if other[name] is None}
    for name, gradient in one.items():
        if gradient is not None:
            assert (gradient - other[name]).abs().max() <= off * max(1e-2, float(gradient.abs().max())), name


@pytest.mark.parametrize("head", HEAD_NAMES)
def test_logits_are_symmetric_differ_and_do_not_depend_on_the_batch(trunk: ESM2, head: str) -> None:
    tuner = model(trunk, head)
    with torch.no_grad():
        together = tuner(batch_of(*LENGTHS))
        turned = tuner(batch_of(*LENGTHS[::-1]))[::-1]
        alone = [tuner(batch_of(n))[0] for n in LENGTHS]
    for n, a, b, c in zip(LENGTHS, together, turned, alone, strict=True):
        assert (a.dtype, tuple(a.shape)) == (torch.float32, (n, n))
        assert a.isfinite().all()
        assert (a - a.T).abs().max() <= 1e-6
        assert max((a - b).abs().max(), (a - c).abs().max()) <= 2e-5
    assert together[3].std() > 0.05
    # Every parameter that learns has a gradient, queries and keys of the last layer too. What no logit of the attention
    # head depends on has zeros: without a gradient it would have no optimizer state, and FSDP would not gather it.
    _, gradients = backward(tuner, batch_of(40, 12))
    unused = {f"trunk.layers.1.{n}" for n in ("self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2")}
    unused |= {"trunk.layers.1.final_layer_norm", "trunk.emb_layer_norm_after"}
    for name, parameter in tuner.named_parameters():
        gradient = gradients[name]
        assert (gradient is not None) == parameter.requires_grad, name
        if gradient is not None and not name.endswith("k_proj.bias"):  # a bias on all keys moves no softmax
            of_nothing = head == "attention" and name.rpartition(".")[0] in unused
            assert bool(gradient.abs().max() > 1e-9) != of_nothing, name


def test_computing_layers_or_blocks_twice_changes_no_gradient(trunk: ESM2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run again in the backward pass, and hand their queries and keys out again."""
    batch = batch_of(*LENGTHS)
    for head, mode in (("attention", "selective"), ("both", "full"), ("both", "none")):
        plain = backward(model(trunk, head), batch)
        again = model(trunk, head)
        with monkeypatch.context() as patch:
            if mode == "none":
                patch.setattr(contact_heads, "KEPT_PAIRS", 60**2)
            else:
                layout = Layout(activation_checkpointing=mode)  # type: ignore[arg-type]
                shard(again, layout, World(0, 1, torch.device("cpu"), None))
            found = backward(again, batch)
        assert plain[0][3].std() > 0.05
        for one, other in zip(plain[0], found[0], strict=True):
            assert (one - other).abs().max() <= 1e-5
        assert_same_gradients(plain[1], found[1], 1e-4)


def test_bf16_of_the_trunk_leaves_contacts_in_fp32(trunk: ESM2) -> None:
    tuner, batch = model(trunk, "attention"), batch_of(60)
    with torch.no_grad():
        exact = tuner(batch)[0]
        with torch.autocast("cpu", torch.bfloat16):
            found = tuner(batch)[0]
    assert found.dtype == torch.float32
    assert 1e-6 < (found - exact).abs().mean() < 0.05 * exact.std()


def test_the_attention_head_says_what_the_models_own_contact_head_says(trunk: ESM2) -> None:
    head, batch = new_head(settings("attention"), TINY), batch_of(50, 20)
    head.start(Weights(TINY, "trained", weight_reader.tensors(trunk.state_dict())))
    with torch.no_grad():
        for logits_LL, contacts_LL in zip(FineTuner(trunk, head)(batch), predict_contacts(trunk, batch), strict=True):
            assert (logits_LL.sigmoid() - contacts_LL).abs().max() <= 1e-6
            assert contacts_LL.std() > 0.01


def test_a_head_goes_on_from_one_of_its_kind_and_size(trunk: ESM2) -> None:
    task = new_task(settings("both"), {})
    before, after = task.head(TINY), task.head(TINY)
    state = trunk.state_dict() | {f"head.{n}": t for n, t in before.state_dict().items()}
    found = Weights(TINY, "my contacts", weight_reader.tensors(state))
    assert any(not torch.equal(t, before.state_dict()[n]) for n, t in after.state_dict().items())
    assert "goes on from the contact head of my contacts" in str(start_values(task, after, found))
    assert all(torch.equal(t, before.state_dict()[n]) for n, t in after.state_dict().items())
    for other in ({"channels": 12}, {"blocks": 1}):
        head = new_head(settings("both", **other), TINY)
        kept = {n: t.clone() for n, t in head.state_dict().items() if not n.startswith("regression.")}
        assert "left out" in str(start_values(task, head, found))
        assert all(torch.equal(head.state_dict()[n], t) for n, t in kept.items())


def test_a_new_head_starts_near_the_share_of_contacts_and_tells_pairs_apart() -> None:
    torch.manual_seed(0)
    trunk = weights.build(weights.fresh(TINY, 0), torch.device("cpu"))
    for head, blocks in (("attention", 0), ("pairwise", 0), ("pairwise", 4), ("both", 1)):
        tuner = FineTuner(trunk, new_head(settings(head, blocks=blocks), TINY))
        (logits_LL,) = tuner(pack([encode("MKTAYIAKMKWW")]))
        assert torch.allclose(logits_LL.sigmoid(), torch.full((12, 12), PRIOR), rtol=0, atol=PRIOR / 4)
        assert len(logits_LL.unique()) > 50


def reference(head: PairwiseHead, x_LD: torch.Tensor, second: int | None = None) -> torch.Tensor:
    """The network on a whole map, pair by pair; `second` is where a second chain begins."""
    x_LD = F.layer_norm(x_LD, x_LD.shape[1:], head.norm.weight, head.norm.bias)
    left, right = head.left(x_LD), head.right(x_LD)
    n = len(x_LD)
    z = torch.empty(1, left.shape[1], n, n)
    for i in range(n):
        for j in range(n):
            apart = min(abs(i - j), 64) if second is None or (i < second) == (j < second) else 64
            z[0, :, i, j] = left[i] * right[j] + left[j] * right[i] + head.separation.weight[apart]
    for k, block in enumerate(head.blocks):
        h, dilation = z, (1, 2, 4)[k % 3]
        for norm, conv, wide in ((block.norm1, block.conv1, dilation), (block.norm2, block.conv2, 1)):
            h = F.gelu(F.instance_norm(h, weight=norm.weight, bias=norm.bias))
            h = F.conv2d(F.pad(h, (wide,) * 4), conv.weight, conv.bias, dilation=wide)
        z = z + h
    logits = torch.einsum("c,cij->ij", head.out.weight[0, :, 0, 0], z[0]) + head.out.bias
    return (logits + logits.T) / 2


def test_the_network_computes_what_one_writes_down(trunk: ESM2, monkeypatch: pytest.MonkeyPatch) -> None:
    head = model(trunk, "pairwise", blocks=4).head
    x_TD = torch.randn(82, TINY.dim, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(contact_heads, "KEPT_PAIRS", 60**2)  # blocks are computed twice
    with torch.no_grad():
        expected = reference(head, x_TD[1:-1])
    for train in (False, True):
        with torch.set_grad_enabled(train):
            (found,) = head(x_TD, batch_of(80))
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_residues_of_two_chains_are_as_far_apart_as_can_be(trunk: ESM2) -> None:
    head = model(trunk, "pairwise", blocks=2).head
    batch = pack([encode("MKTAYIAKQRQISFVKSHFSRQ" + ":GGLVNDECHWSFPMKTA", linker=1)])
    x_TD = torch.randn(len(batch.tokens_T), TINY.dim, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        (found,) = head(x_TD, batch)
        chains = [reference(head, x_TD[1:-1], second) for second in (22, 23, None)]
    own_L = torch.arange(len(found)) != 22  # of the linker no pair is asked for
    off = [(found - expected)[own_L][:, own_L].abs().max() for expected in chains]
    assert min(off[:2]) <= 2e-5 * found.abs().max()
    assert off[2] > 0.01 * found.abs().max()


def test_memory_for_the_backward_pass_is_as_planned(trunk: ESM2) -> None:
    for head in HEAD_NAMES:
        made = settings(head, channels=16, blocks=2)
        tuner = FineTuner(trunk, new_head(made, TINY))
        batch, kept = batch_of(120), dict[int, torch.UntypedStorage]()

        def keep(tensor: torch.Tensor, kept: Any = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        given = [tuner.head.attention(batch)] if head != "pairwise" else []
        x_TD = trunk(batch, on_attention=given[0].add if given else None).representations[TINY.n_layers].detach()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            tuner.head(x_TD.requires_grad_(), batch, *given)
        share = sum(storage.nbytes() for storage in kept.values()) / made.head_bytes(122, 33, TINY.dim)
        assert (0 if head == "attention" else 0.6) < share < (1 if head == "attention" else 1.3)
