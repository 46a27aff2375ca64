"""The contact task: head, loss and baselines; and what every task must fulfil."""

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from model_files import TINY, fair_esm, ours, perturb, tokenise

from esmshard.batch import pack
from esmshard.data.loader import Example
from esmshard.model.esm2 import ESM2
from esmshard.settings import AdaptSettings, TaskSettings
from esmshard.tasks import TASKS
from esmshard.tasks.contact import PRIOR, ContactTask
from esmshard.tasks.finetuner import FineTuner
from esmshard.tasks.numbers import HEADS
from esmshard.tasks.protocol import Task, collate
from esmshard.vocab import STANDARD, encode

SETTINGS = TaskSettings(name="contact", channels=8, blocks=3)
TASK = ContactTask(SETTINGS)
LENGTHS = (30, 2, 75, 9)


@pytest.fixture(scope="module")
def trunk() -> ESM2:
    return ours(fair_esm(TINY), TINY)


@pytest.fixture
def model(trunk: ESM2) -> FineTuner:
    torch.manual_seed(0)
    head = TASK.head(TINY)
    perturb(head, deviation=0.3)
    torch.nn.init.normal_(head.out.weight, std=0.3)  # a new one is tiny, and all logits nearly equal
    trunk.zero_grad()
    return FineTuner(trunk.requires_grad_(True), head).eval()


def sequences() -> list[str]:
    rng = np.random.default_rng(4)
    return ["".join(rng.choice(list(STANDARD), length)) for length in LENGTHS]


def labels(length: int, *contacts: tuple[int, int], unresolved: tuple[int, ...] = ()) -> torch.Tensor:
    """int8 [L, L] of the contacts named, all other pairs 0, those of unresolved residues -1."""
    labels_LL = torch.eye(length, dtype=torch.int8)
    for i, j in contacts:
        labels_LL[i, j] = labels_LL[j, i] = 1
    for i in unresolved:
        labels_LL[i], labels_LL[:, i] = -1, -1
    return labels_LL


# Head


def test_logits_are_symmetric_and_differ(model: FineTuner) -> None:
    with torch.no_grad():
        outputs = model(tokenise(sequences())[1])
    assert [tuple(o.shape) for o in outputs] == [(n, n) for n in LENGTHS]
    for logits_LL in outputs:
        assert logits_LL.dtype == torch.float32
        assert torch.equal(logits_LL, logits_LL.T)
    assert outputs[2].std() > 0.1


def test_logits_of_a_record_do_not_depend_on_its_batch(model: FineTuner) -> None:
    with torch.no_grad():
        together = model(tokenise(sequences())[1])
        turned = model(tokenise(sequences()[::-1])[1])[::-1]
        alone = [model(tokenise([s])[1])[0] for s in sequences()]
    for a, b, c in zip(together, turned, alone, strict=True):
        assert (a - b).abs().max() <= 1e-5
        assert (a - c).abs().max() <= 1e-5


def test_pairs_are_multiplied_both_ways_round(model: FineTuner) -> None:
    batch = tokenise(sequences())[1]
    with torch.no_grad():
        before = model(batch)
        model.head.left, model.head.right = model.head.right, model.head.left
        after = model(batch)
    for a, b in zip(before, after, strict=True):
        assert (a - b).abs().max() <= 1e-5


@pytest.mark.parametrize("blocks", [0, 1, 4])
def test_a_new_head_starts_near_the_share_of_contacts_and_tells_pairs_apart(blocks: int) -> None:
    head = ContactTask(TaskSettings(name="contact", channels=4, blocks=blocks)).head(TINY)
    batch = pack([encode("MKTAYIAK")])
    (logits_LL,) = head(torch.randn(10, TINY.dim), batch)
    assert torch.allclose(logits_LL.sigmoid(), torch.full((8, 8), PRIOR), rtol=0, atol=PRIOR / 5)
    assert len(logits_LL.unique()) > 20


@pytest.mark.parametrize("training", [False, True])
def test_a_protein_of_one_residue_goes_through(model: FineTuner, training: bool) -> None:
    (logits_LL,) = model.train(training)(tokenise(["M"])[1])
    assert logits_LL.shape == (1, 1)
    assert logits_LL.isfinite().all()


# Loss


def entropy(logit: float, label: int) -> float:
    return math.log1p(math.exp(-logit if label else logit))


def test_the_loss_is_what_one_computes_by_hand() -> None:
    """Nine residues have six pairs at least six apart; residue 8 is unresolved, which leaves three."""
    logits_LL = torch.arange(81.0).reshape(9, 9) / 40 - 1
    target_LL = labels(9, (0, 6), (1, 2), (0, 8), (3, 8), unresolved=(8,))
    first = (entropy(logits_LL[0, 6], 1) + entropy(logits_LL[0, 7], 0) + entropy(logits_LL[1, 7], 0)) / 3
    found = TASK.loss([logits_LL], [target_LL])
    assert float(found.sum) == pytest.approx(first, rel=1e-6)
    assert float(found.count) == 1

    # A second protein of one pair weighs as much as the first; a third without a pair weighs nothing.
    second_LL, third_LL = torch.full((7, 7), 2.0), torch.full((6, 6), 5.0)
    found = TASK.loss([logits_LL, second_LL, third_LL], [target_LL, labels(7, (0, 6)), labels(6)])
    assert float(found.sum) == pytest.approx(first + entropy(2.0, 1), rel=1e-6)
    assert float(found.count) == 2


def test_only_valid_pairs_have_a_gradient() -> None:
    logits_LL = torch.randn(12, 12, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target_LL = labels(12, (0, 6), (2, 11), (3, 5), unresolved=(1, 7))
    TASK.loss([logits_LL], [target_LL]).sum.backward()
    pairs = {tuple(p) for p in logits_LL.grad.nonzero().tolist()}
    assert pairs == {(i, j) for i in range(12) for j in range(i + 6, 12) if not {i, j} & {1, 7}}
    assert len(pairs) > 10


@pytest.mark.parametrize(
    "target_LL", [labels(6), labels(12, unresolved=tuple(range(12))), labels(7, (0, 6), unresolved=(6,))]
)
def test_a_batch_without_valid_pairs_counts_nothing_and_has_zero_gradients(target_LL: torch.Tensor) -> None:
    logits_LL = torch.randn(target_LL.shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = TASK.loss([logits_LL], [target_LL])
    found.sum.backward()
    assert (found.sum.item(), found.count.item()) == (0, 0)
    assert torch.equal(logits_LL.grad, torch.zeros_like(logits_LL))


def test_the_loss_takes_what_collate_makes(model: FineTuner) -> None:
    example = EXAMPLES["contact"]
    batch, targets = collate(TASK, [example])
    assert batch.record_ids == ("a",)
    assert targets[0].dtype == torch.int8
    cb_L3 = example.labels["cb"]
    distance = np.linalg.norm(cb_L3[3] - cb_L3[17])
    assert targets[0][3, 17] == (distance < 8)
    assert (targets[0][5] == -1).all(), "residue 5 is unresolved"
    assert float(TASK.loss(model(batch), targets).count) == 1


def test_head_and_trunk_get_gradients_and_frozen_parts_none(model: FineTuner) -> None:
    model.adapt(AdaptSettings(), 0)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    own = ("trunk.lm_head.", "trunk.contact_head.")
    assert frozen == {n for n, _ in model.named_parameters() if n.startswith(own)}
    assert len(frozen) == 7
    assert "trunk.embed_tokens.weight" in trainable
    assert model.trunk.lm_head.weight.requires_grad, "it is the embedding"

    batch = tokenise(sequences())[1]
    targets = [labels(n, (0, n - 1)) for n in LENGTHS]
    found = TASK.loss(model(batch), targets)
    (found.sum / found.count).backward()
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert parameter.grad is None, name
        else:
            assert parameter.grad.isfinite().all(), name
            # A bias on all keys moves no softmax, one before a norm moves nothing: zero but for rounding.
            assert parameter.grad.abs().max() > (0 if name.endswith(("k_proj.bias", "conv1.bias")) else 1e-7), name


# Baselines and predictions


def test_the_separation_prior_by_hand() -> None:
    train = [labels(8, (0, 6), (0, 7)).numpy(), labels(7, (0, 6)).numpy(), labels(8, (1, 7), unresolved=(0,)).numpy()]
    known = TASK.baselines(train)
    # Six apart: (0,6) (1,7) of the first, (0,6) of the second, (1,7) of the third; seven apart: (0,7) of the first.
    prior = [math.log(1 / 100)] * 6 + [math.log(4 / 104), math.log(2 / 101)]
    assert known == {"separation prior": pytest.approx(prior)}
    assert known["separation prior"][6] > known["separation prior"][7] > known["separation prior"][0]

    outputs = TASK.baseline_outputs(labels(10).numpy(), known)
    assert outputs["base rate"] is None
    scores_LL = outputs["separation prior"]
    assert scores_LL.shape == (10, 10)
    for i in range(10):
        for j in range(10):
            assert scores_LL[i, j] == pytest.approx(prior[min(abs(i - j), 7)])


def test_predictions_are_probabilities() -> None:
    found = TASK.predict(np.array([[0, math.log(3)], [-30, 60]], dtype=np.float32))
    assert found.dtype == np.float32
    assert found == pytest.approx(np.array([[0.5, 0.75], [math.exp(-30), 1]]), rel=1e-6)


# Every task


def walk(length: int) -> np.ndarray:
    """Cb coordinates of a random coil of 3.8 A steps, residue 5 unresolved."""
    steps = np.random.default_rng(0).normal(size=(length, 3))
    cb_L3 = np.cumsum(3.8 * steps / np.linalg.norm(steps, axis=1, keepdims=True), axis=0).astype(np.float32)
    cb_L3[5] = np.nan
    return cb_L3


EXAMPLES: dict[str, Example] = {
    "contact": Example("a", encode("ACDEFGHIKLMNPQRSTVWY" * 4), {"cb": walk(80)}),
}
"""A record with labels for each task."""


def test_every_task_has_an_example_and_a_name_in_recipes() -> None:
    assert len(TASKS) >= 1
    assert (
        TASKS.keys() == HEADS.keys() == EXAMPLES.keys() == set(get_args(TaskSettings.model_fields["name"].annotation))
    )


@pytest.mark.parametrize("name", TASKS)
def test_every_task_fulfils_the_protocol(name: str) -> None:
    task: Any = TASKS[name](TaskSettings(name=name))
    promised = [m for m in vars(Task) if not m.startswith("_")]
    assert len(promised) >= 10
    for method in promised:
        assert hasattr(task, method), method
        assert method == "columns" or callable(getattr(task, method))
    assert len(task.columns) >= 1
    assert len(set(task.columns)) == len(task.columns)

    head = task.head(TINY)
    perturb(head, deviation=0.3)
    torch.nn.init.normal_(head.out.weight, std=0.3)  # a new one is tiny, and all logits nearly equal
    batch, targets = collate(task, [EXAMPLES[name]])
    outputs = head(torch.randn(batch.bounds[-1], TINY.dim, generator=torch.Generator().manual_seed(0)), batch)
    found = task.loss(outputs, targets)
    found.sum.backward()
    assert float(found.count) > 0
    assert any(p.grad is not None and p.grad.any() for p in head.parameters())

    arrays = [o.detach().numpy() for o in outputs]
    known_targets = [t.numpy() for t in targets]
    (row,) = task.score(arrays, known_targets)
    assert set(task.columns) <= row.keys()
    assert math.isfinite(row[task.columns[0]])
    assert row.keys() == task.base_rate(known_targets[0]).keys()
    assert task.predict(arrays[0]).dtype == np.float32
    known = task.baselines(known_targets)
    for baseline in task.baseline_outputs(known_targets[0], known).values():
        if baseline is not None:
            assert set(task.columns) <= task.score([baseline], known_targets)[0].keys()


@pytest.mark.parametrize("name", TASKS)
def test_the_planner_knows_the_size_of_every_head(name: str) -> None:
    for settings in (TaskSettings(name=name), TaskSettings(name=name, channels=12, blocks=2)):  # type: ignore[arg-type]
        numbers = HEADS[name](settings)
        head = TASKS[name](settings).head(TINY)
        assert numbers.parameters(TINY.dim) == sum(p.numel() for p in head.parameters())
        assert all(p.requires_grad for p in head.parameters())
        batch = collate(TASKS[name](settings), [EXAMPLES[name]])[0]
        x_TD = torch.randn(batch.bounds[-1], TINY.dim)
        kept: dict[int, int] = {p.untyped_storage().data_ptr(): 0 for p in head.parameters()}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            outputs = head(x_TD, batch)
        assert outputs
        assert 0.6 < sum(kept.values()) / numbers.head_bytes(len(x_TD)) < 1.3
