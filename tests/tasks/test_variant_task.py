"""The variant task: packs, pools, the zero-shot term, losses, scales, baselines, and the probe."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from label_files import recorded_fits
from scipy import stats
from torch import nn

from esmshard.batch import pack
from esmshard.data.batching.loader import Example, Examples
from esmshard.data.mutations import parse_variant
from esmshard.data.splits.variant_records import VariantLabels, VariantRecords
from esmshard.data.variants import read_variants
from esmshard.model import weights
from esmshard.model.families.esm2 import ESM2
from esmshard.model.families.family_registry import SIZES
from esmshard.model.finetuner import FineTuner
from esmshard.predict.zero_shot import score
from esmshard.recipe.sections import DataSettings
from esmshard.tasks.base import collate
from esmshard.tasks.variant_baselines import AUGMENTED, FROZEN, ONE_HOT, SCORE, frozen
from esmshard.tasks.variants import VariantSettings, VariantTask, fit_scale
from esmshard.vocab import LINKER, STANDARD, encode

WT = "MKTAYIAKQRQISFVKSHFSRQLE"
NANO = SIZES["nano"]
POOLS = ("wild_type", "sites", "difference", "mean")
LOSSES = ("mse", "huber", "ranking")
NAMES = ("K2A", "WT", "Q9C:S13W", "E24P", "M1A:T3V:L23D")
UNIT = {"kind": "none", "mean": 0.0, "deviation": 1.0}


def task(targets: Sequence[str] = ("y",), lower: Sequence[str] = (), **given: Any) -> VariantTask:
    facts = {"targets": list(targets), "lower_is_better": list(lower), "scales": [UNIT] * len(targets)}
    facts |= {"protein": WT, "first": 0, "length": len(WT), "breaks": [], "linker": LINKER}
    return VariantTask(VariantSettings(name="variant", **given), facts)


def mutant(name: str) -> str:
    residues = list(WT)
    for mutation in parse_variant(name):
        assert WT[mutation.position] == mutation.wild
        residues[mutation.position] = mutation.mutant
    return "".join(residues)


def example(name: str, *values: float) -> Example:
    return Example(name, encode(mutant(name)), {"target": np.array(values or (0.0,), np.float32)})


@pytest.fixture(scope="module")
def trunk() -> ESM2:
    """One whose LM head says different things everywhere."""
    found = weights.build(weights.fresh(NANO, 0), torch.device("cpu"))
    torch.manual_seed(0)
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.3)
    return found.eval()


def model(trunk: ESM2, made: VariantTask, seed: int = 0) -> FineTuner:
    torch.manual_seed(seed)
    head = made.head(NANO)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.5)
    return FineTuner(trunk, head).eval()


def say(found: FineTuner, made: VariantTask, *names: str) -> np.ndarray:
    return np.stack(found.outputs([made.question(example(name)) for name in names]))


def logits(trunk: ESM2) -> torch.Tensor:
    with torch.no_grad():
        found = trunk(pack([encode(WT)]), logits_at=torch.arange(1, len(WT) + 1)).logits_PV
    assert found is not None
    return found


def log_odds(trunk: ESM2, name: str) -> float:
    """Sum over the changes of log p(mutant) - log p(wild type), in the wild type."""
    log_p = logits(trunk).double().log_softmax(-1)
    pairs = [(m.position, encode(m.mutant)[1], encode(m.wild)[1]) for m in parse_variant(name)]
    return float(sum(log_p[at, int(new)] - log_p[at, int(old)] for at, new, old in pairs))


@pytest.mark.parametrize("pool", POOLS)
def test_a_pool(trunk: ESM2, pool: str) -> None:
    """A pack says what each variant says alone, the wild type is the bias, and gradients reach the trunk."""
    made = task(("y", "z"), pool=pool, hidden=8)
    found = model(trunk, made)
    together = say(found, made, *NAMES)
    alone = np.concatenate([say(found, made, name) for name in NAMES])
    assert np.abs(together - alone).max() <= 1e-5
    assert len(np.unique(together[:, 0].round(4))) == 5, "all say different things"
    if pool != "mean":
        bias = found.head.out.bias.detach().numpy()  # type: ignore[union-attr]
        assert np.array_equal([together[1], alone[1]], [bias, bias])
        wild, one, other, both = say(found, made, "WT", "Q9C", "S13W", "Q9C:S13W")[:, 0]
        adds = abs(float((both - wild) - (one - wild) - (other - wild))) <= 1e-5
        assert adds is (pool == "wild_type"), "the trunk sees changes together"
    found.zero_grad()
    batch, targets = collate(made, [example(name, n, n) for n, name in enumerate(NAMES)])
    made.loss(found(batch), targets).sum.backward()
    for name in ("embed_tokens.weight", "layers.1.self_attn.v_proj.weight", "lm_head.dense.weight"):
        gradient = found.trunk.get_parameter(name).grad
        assert gradient is not None
        assert gradient.any()
    found.zero_grad()


def test_pool_wild_type_by_hand(trunk: ESM2) -> None:
    made = task(pool="wild_type", hidden=8)
    found = model(trunk, made)
    p = {name: tensor.detach() for name, tensor in found.head.named_parameters()}
    with torch.no_grad():
        x_LD = trunk(pack([encode(WT)])).representations[2][1:-1]
    amino_acids = logits(trunk)[:, encode(STANDARD)[1:-1].tolist()].log_softmax(-1)
    total = torch.zeros(8)
    for mutation in parse_variant("Q9C:S13W"):
        x = x_LD[mutation.position]
        x = (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt() * p["norm.weight"] + p["norm.bias"]
        letters = torch.zeros(66)
        letters[int(encode(mutation.wild)[1])] = letters[33 + int(encode(mutation.mutant)[1])] = 1
        seen = torch.cat([x, letters, amino_acids[mutation.position]])
        total += F.gelu(p["hidden.weight"] @ seen + p["hidden.bias"])
    expected = p["out.weight"] @ total + p["out.bias"] + p["zero_shot"] * log_odds(trunk, "Q9C:S13W")
    assert say(found, made, "Q9C:S13W")[0] == pytest.approx(expected.numpy(), abs=1e-4)


def test_the_zero_shot_term_of_a_new_head(trunk: ESM2) -> None:
    """A tenth of the log odds in the wild type; turned round if less is better; letters beyond the 20 have none."""
    expected = np.array([0.1 * log_odds(trunk, name) for name in (*NAMES, "WT", "Q9C", "Q9C")])
    assert np.ptp(expected) > 0.1
    for pool in POOLS:
        made = task(("y", "kd"), ("kd",), pool=pool)
        head = made.head(NANO)
        nn.init.zeros_(head.out.weight)  # type: ignore[arg-type, union-attr]
        outputs = say(FineTuner(trunk, head).eval(), made, *NAMES, "K2U", "K2U:Q9C", "Q9C")
        assert outputs[:, 0] == pytest.approx(expected, abs=1e-5)
        assert outputs[:, 1] == pytest.approx(-expected, abs=1e-5)
    known = {"log_p": np.random.default_rng(0).normal(size=(len(WT), 25)), "score_scale": np.array([0.0, 1.0])}
    rare, both, one = made.baseline_outputs([example(n) for n in ("K2U", "K2U:Q9C", "Q9C")], known, None)[SCORE]
    assert not rare.any()
    assert np.array_equal(both, one)
    assert one.all()


def plain(loss: str, output: float, target: float) -> float:
    error = abs(output - target)
    if loss == "ranking":
        at = [float(stats.norm.ppf(k / 16)) for k in range(1, 16)]
        return float(np.mean([math.log1p(math.exp((-1 if target > q else 1) * 2 * (output - q))) for q in at]))
    return error**2 if loss == "mse" else error**2 / 2 if error <= 1 else error - 0.5


OUTPUTS = np.array([[0.3, -1.0], [2.5, 0.1], [-0.7, -0.2], [1.1, 0.9]], np.float32)
TARGETS = np.array([[0.1, 1.5], [-1.3, np.nan], [np.nan, np.nan], [0.9, 0.2]], np.float32)


def test_losses_are_the_plain_ones_over_known_targets() -> None:
    known = [(n, t) for n in range(4) for t in range(2) if not math.isnan(TARGETS[n, t])]
    for loss in LOSSES:
        made, outputs = task(("y", "z"), loss=loss), torch.tensor(OUTPUTS, requires_grad=True)
        expected = sum(plain(loss, float(OUTPUTS[at]), float(TARGETS[at])) for at in known)
        for values, total, pairs in ((TARGETS, expected, set(known)), (np.full_like(TARGETS, np.nan), 0, set())):
            outputs.grad = None
            targets = [torch.from_numpy(np.stack([y_T, y_T * 10])) for y_T in values]  # standardised and measured
            found = made.loss(list(outputs), targets)
            assert (float(found.count), found.sum.item()) == (len(pairs), pytest.approx(total, rel=1e-5))
            found.sum.backward()
            assert outputs.grad is not None
            assert {tuple(at) for at in outputs.grad.nonzero().tolist()} == pairs, "missing ones pull at nothing"
            assert outputs.grad.isfinite().all()


def train(directory: Path, values: dict[str, Sequence[float]], names: Sequence[str], **data: Any) -> Examples:
    rows = ["mutant," + ",".join(values)]
    for n, name in enumerate(names):
        rows.append(",".join([name, *("" if math.isnan(v[n]) else repr(float(v[n])) for v in values.values())]))
    path = directory / "v.csv"
    path.write_text("\n".join(rows) + "\n")
    read = read_variants(path, wild_type=WT, targets=tuple(values))
    records = VariantRecords(path, read.wild_types, read.mutations)
    labels = VariantLabels(read, records, DataSettings(**data))
    return Examples("train", path, records, labels)


def learn(split: Examples, **given: Any) -> VariantTask:
    return VariantTask(VariantSettings(name="variant", **given), {}).learn(split)


FIVE = ("K2A", "K2C", "T3V", "A4G", "Y5F")


def test_facts_are_of_the_training_labels(tmp_path: Path) -> None:
    split = train(tmp_path, {"y": [1, 2, 3, 4, 5], "kd": [7, 9, np.nan, 7, 9]}, FIVE, lower_is_better=("kd",))
    made = learn(split)
    assert made.columns == ("Spearman", "Pearson", "R2", "Spearman y", "Spearman kd")
    kept = {key: made.facts[key] for key in ("targets", "lower_is_better", "protein", "first", "length", "offset")}
    assert list(kept.values()) == [["y", "kd"], ["kd"], WT, 0, 24, 0]
    (y, kd) = made.facts["scales"]
    assert (y["mean"], y["deviation"], kd["mean"], kd["deviation"]) == (3, pytest.approx(2**0.5), 8, 1)
    target = made.inputs(split.get(2)).target
    assert target == pytest.approx(np.array([[0, np.nan], [3, np.nan]]), nan_ok=True)
    again = VariantTask(VariantSettings(name="variant"), json.loads(json.dumps(made.facts)))
    assert again.predict(np.array([1, -2], np.float32)) == pytest.approx([3 + 2**0.5, 6])
    rows = [again.score(np.array([z, -z], np.float32), made.inputs(split.get(z)).target) for z in range(5)]
    assert (rows[1]["prediction y"], rows[1]["target kd"]) == (pytest.approx(3 + 2**0.5), 9)
    found = again.summary(rows)
    assert found["Spearman y"] == pytest.approx(1)
    assert found["Spearman kd"] == pytest.approx(float(stats.spearmanr([8, 7, 5, 4], [7, 9, 7, 9]).statistic))
    assert found["Spearman"] == pytest.approx((1 + found["Spearman kd"]) / 2)


def test_the_ranking_loss_sees_the_order_only(tmp_path: Path) -> None:
    y, targets = [0.3, -2.0, 1.0, 4.0, 0.9], []
    for loss, values in (("ranking", y), ("ranking", np.exp(y)), ("mse", y), ("mse", np.exp(y))):
        split = train(tmp_path, {"y": values}, FIVE)
        made = learn(split, loss=loss)
        targets.append([made.inputs(split.get(n)).target[0, 0] for n in range(5)])
    assert targets[0] == pytest.approx(targets[1], abs=1e-6)
    assert targets[0] == pytest.approx(stats.norm.ppf([0.3, 0.1, 0.7, 0.9, 0.5]), abs=1e-6)
    assert targets[2] != pytest.approx(targets[3], abs=1e-6)


VALUES = np.array([0.5, 1.0, 2.0, 2.0, 9.0, 30.0])


def test_scales_go_there_and_back_and_are_as_by_hand() -> None:
    none, log, rank = scales = [fit_scale(VALUES, kind) for kind in ("none", "log", "rank")]
    values = sorted([*VALUES, 0.7, 12.5, 0.01, 0.1, 31.0, 33.0, 1000.0])
    for scale in scales:
        scores = [scale.to(value) for value in values]
        assert [scale.back(score) for score in scores] == pytest.approx(values, rel=1e-9, abs=1e-12)
        far = [scale.back(z) for z in (-4.0, -3.0, 3.0, 4.0, 5.0)]
        for ascending in (list(dict.fromkeys(scores)), far):
            assert all(a < b for a, b in itertools.pairwise(ascending)), "no ties, and none out of order"
        assert math.isnan(scale.to(math.nan))
    assert none.to(9.0) == pytest.approx((9 - 44.5 / 6) / VALUES.std())
    assert log.to(9.0) == pytest.approx((math.log(9) - np.log(VALUES).mean()) / np.log(VALUES).std())
    # Middles of the ranks out of 6; two share the places 3 and 4.
    expected = stats.norm.ppf([0.5 / 6, 1.5 / 6, 3 / 6, 3 / 6, 4.5 / 6, 5.5 / 6])
    assert [rank.to(value) for value in VALUES] == pytest.approx(expected, abs=1e-9)
    assert rank.to(30 + VALUES.std()) == pytest.approx(expected[-1] + 1), "beyond them a straight line"


SEEN = [f"{WT[n]}{n + 1}{letter}" for n in range(12) for letter in "ADGW" if letter != WT[n]]
UNSEEN = [f"{WT[n]}{n + 1}{letter}" for n in range(14, 23) for letter in "CHIP" if letter != WT[n]]


def test_baselines_on_positions_that_were_never_seen(trunk: ESM2) -> None:
    made = task(("y", "kd"), ("kd",))
    base = model(trunk, made)
    known_scores, new_scores = (score(trunk, WT, list(map(parse_variant, names))) for names in (SEEN, UNSEEN))
    y = known_scores + np.random.default_rng(0).normal(size=len(SEEN))
    examples = [example(name, v, -v) for name, v in zip(SEEN, y, strict=True)]
    known = made.baselines(examples, base)
    outputs: Any = made.baseline_outputs([example(name) for name in UNSEEN], known, base)
    assert set(outputs) == {ONE_HOT, SCORE, AUGMENTED, FROZEN}
    assert set(made.baseline_outputs(examples[:1], known, None)) == {ONE_HOT, SCORE, AUGMENTED}
    found = {method: np.stack(values) for method, values in outputs.items()}
    assert {(x_NT.dtype, x_NT.shape) for x_NT in found.values()} == {(np.dtype(np.float32), (len(UNSEEN), 2))}
    # One-hot letters know nothing there: all the same, and no correlation at all, which is not one of 0.
    assert np.ptp(found[ONE_HOT], axis=0).tolist() == [0, 0]
    targets = [made.inputs(example(name, n, -n)).target for n, name in enumerate(UNSEEN)]
    assert math.isnan(made.summary(list(map(made.score, found[ONE_HOT], targets)))["Spearman"])
    seen: Any = np.stack(made.baseline_outputs(examples, known, None)[ONE_HOT])  # type: ignore[arg-type]
    assert np.ptp(seen[:, 0]) > 0.1, "where they have seen letters they know something"
    # The zero-shot score is that of `esmshard score`, in deviations of those of the training variants.
    expected = (new_scores - known_scores.mean()) / known_scores.std()
    for sign, t in ((1, 0), (-1, 1)):  # of the second target, less is better
        assert found[SCORE][:, t] == pytest.approx(sign * expected, abs=1e-4)
        assert stats.spearmanr(found[AUGMENTED][:, t], sign * expected).statistic == pytest.approx(1)
    assert np.ptp(found[FROZEN][:, 0]) > 0.01


def test_frozen_features_by_hand(trunk: ESM2) -> None:
    with torch.no_grad():
        wild, own = (trunk(pack([encode(s)])).representations[2][1:-1].numpy() for s in (WT, mutant("S13W")))
    letters = np.zeros(66)
    letters[int(encode("S")[1])] = letters[33 + int(encode("W")[1])] = 1
    base, asked = FineTuner(trunk, nn.Identity()), [example(name) for name in ("S13W", "WT")]
    found = frozen(task(), asked, base)
    assert found[0] == pytest.approx(np.concatenate([own[12] - wild[12], wild[12], letters]), abs=1e-4)
    assert not found[1].any()
    assert frozen(task(pool="mean"), asked, base)[0] == pytest.approx(own.mean(0), abs=1e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ESM2, "forward", None)
        assert np.array_equal(frozen(task(), asked[::-1], base), found[::-1]), "computed once"


@pytest.mark.parametrize("pool", ["wild_type", "mean"])
def test_a_probe_is_what_scikit_learn_fitted(trunk: ESM2, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = task(("y", "z"), pool=pool, hidden=0)
    found = model(trunk, made)
    rng = np.random.default_rng(0)
    examples = [example(name, *rng.normal(size=2)) for name in SEEN]
    fits = recorded_fits(monkeypatch)
    made.probe(found.head, examples, found, seed=0)
    x = fits[0][1]
    assert x.shape[1] == found.head.out.in_features + 1  # type: ignore[union-attr]
    outputs = np.stack(found.outputs([made.inputs(one) for one in examples]))
    assert outputs == pytest.approx(np.column_stack([fitted.predict(x) for fitted, _ in fits]), abs=1e-3)
    assert np.ptp(outputs, axis=0).min() > 0.01
