"""The regression over frozen attention maps, fitted on 20 proteins: what goes in, what comes out, and the bounds."""

import warnings
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from esm.modules import apc, symmetrize
from model_files import TINY, fair_esm, ours
from sklearn.linear_model import LogisticRegression

from esmshard.batch import pack
from esmshard.data.batching.loader import Example
from esmshard.model.attention import attention_map
from esmshard.model.families.esm2 import ESM2
from esmshard.model.finetuner import FineTuner
from esmshard.tasks import contact
from esmshard.tasks.contact import ContactSettings, ContactTask
from esmshard.vocab import STANDARD, encode

N_MAPS = TINY.n_layers * TINY.n_heads


@pytest.fixture(scope="module")
def trunk() -> ESM2:
    return ours(fair_esm(TINY), TINY)


def maps_of(trunk: ESM2, tokens: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """fair-esm's features [L, L, C]: stacked, stripped, symmetrised, corrected."""
    layers: list[torch.Tensor] = []
    with torch.no_grad():
        trunk(pack([tokens]), on_attention=lambda layer, n, q, k: layers.append(attention_map(q, k)[:, 1:-1, 1:-1]))
        return apc(symmetrize(torch.cat(layers))).permute(1, 2, 0).numpy()


def examples(count: int, lengths: tuple[int, ...] = (30, 41, 36)) -> list[Example]:
    rng = np.random.default_rng(3)
    chosen = [lengths[n % len(lengths)] for n in range(count)]
    return [Example(str(n), encode("".join(rng.choice(list(STANDARD), k))), {}) for n, k in enumerate(chosen)]


def planted(trunk: ESM2, example: Example, rng: np.random.Generator) -> npt.NDArray[np.int8]:
    """Labels that follow from the maps of two heads, 2 and 5, and some noise; residue 4 is unresolved."""
    maps_LLC = maps_of(trunk, example.tokens)
    score_LL = maps_LLC[..., 2] / maps_LLC[..., 2].std() + 0.6 * maps_LLC[..., 5] / maps_LLC[..., 5].std()
    score_LL += 0.2 * rng.normal(size=score_LL.shape)
    labels_LL = (score_LL > np.quantile(score_LL, 0.95)).astype(np.int8)
    labels_LL = np.maximum(labels_LL, labels_LL.T)
    labels_LL[4] = labels_LL[:, 4] = -1
    return labels_LL


def test_the_fit_is_that_of_scikit_learn_on_all_valid_pairs_of_the_chosen(trunk: ESM2) -> None:
    data, rng = examples(24), np.random.default_rng(0)
    labels = [planted(trunk, example, rng) for example in data]
    chosen = contact.choose(labels, np.random.default_rng(5))
    assert len(chosen) == len(set(chosen)) == 20
    rows, hits = [], []
    for n in chosen:
        maps_LLC, size = maps_of(trunk, data[n].tokens), len(labels[n])
        pairs = [(i, j) for i in range(size) for j in range(i + 6, size) if labels[n][i, j] >= 0]
        rows += [maps_LLC[pair] for pair in pairs]
        hits += [labels[n][pair] for pair in pairs]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an option that scikit-learn is about to drop, or a fit that did not converge
        fitted = contact.fit_regression(trunk, data, labels, seed=5)
        warnings.simplefilter("ignore")  # of how L1 is spelled
        options = {"penalty": "l1", "C": 0.15, "max_iter": 3000, "tol": 1e-6}
        same = LogisticRegression(solver="liblinear", **options).fit(np.array(rows), hits)
    weight_C = fitted[:-1]
    assert weight_C == pytest.approx(same.coef_[0], rel=0.02, abs=0.05)
    assert fitted[-1] == pytest.approx(same.intercept_[0], abs=0.05)
    assert np.argmax(weight_C) == 2
    assert np.abs(weight_C).max() > 3
    assert (weight_C == 0).any(), "L1 leaves out maps that say nothing"
    assert np.array_equal(contact.fit_regression(trunk, data, labels, seed=5), fitted)


def test_pairs_beyond_the_bound_are_drawn_and_weigh_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    hits = np.zeros(1000, dtype=bool)
    hits[::50] = True
    for most, others in ((40_000_000, 980), (2700, 250), (10, 20)):  # at least as many others as contacts
        monkeypatch.setattr(contact, "MOST_NUMBERS", most)
        keep, weights = contact.thin(hits, 10, np.random.default_rng(0))
        assert (keep[hits].all(), (keep & ~hits).sum()) == (True, others)
        assert (weights[hits] == 1).all()
        assert weights[~hits] == pytest.approx(980 / others)
        assert keep[-300:].mean() == pytest.approx(keep.mean(), rel=0.6), "from everywhere"


@pytest.fixture(scope="module")
def labelled(trunk: ESM2) -> Iterator[list[Example]]:
    """Examples whose `cb` are the labels themselves, not coordinates."""
    rng = np.random.default_rng(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contact, "contact_labels", lambda labels_LL: labels_LL)
        yield [Example(e.id, e.tokens, {"cb": planted(trunk, e, rng)}) for e in examples(22)]


def test_the_probe_and_the_baseline_are_the_fit(trunk: ESM2, labelled: list[Example]) -> None:
    task = ContactTask(ContactSettings(name="contact", head="attention"), {})
    head, base = task.head(TINY), FineTuner(trunk, task.head(TINY)).eval()
    task.probe(head, labelled, base, 0)
    known = task.baselines(labelled, base)
    assert known.keys() == {"separation prior", "unsupervised head"}
    fitted = contact.fit_regression(trunk, labelled, [e.labels["cb"] for e in labelled], 0)
    assert np.array_equal(known["unsupervised head"], fitted)
    assert np.array_equal(head.regression.weight.detach().numpy()[0], fitted[:-1])
    assert head.regression.bias.item() == pytest.approx(fitted[-1])
    expected = maps_of(trunk, labelled[3].tokens) @ fitted[:-1] + fitted[-1]
    inputs = [task.inputs(labelled[3])]
    assert np.abs(FineTuner(trunk, head).outputs(inputs)[0] - expected).max() <= 1e-4
    found = {name: each[0] for name, each in task.baseline_outputs(labelled[3:4], known, base).items()}
    assert list(found) == ["base rate", "separation prior", "unsupervised head", "before fine-tuning"]
    assert np.abs(found["unsupervised head"] - expected).max() <= 1e-4
    assert np.array_equal(found["before fine-tuning"], base.outputs(inputs)[0])
    assert list(task.baseline_outputs(labelled[3:4], known, None)) == ["base rate", "separation prior"]
    # Without any contact to fit there is no such baseline, and the others stay.
    bare = [Example(e.id, e.tokens, {"cb": np.minimum(e.labels["cb"], 0)}) for e in labelled]
    assert task.baselines(bare, base).keys() == {"separation prior"}
