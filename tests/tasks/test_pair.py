"""The pair task: chains apart, symmetry, labels, blocks, groups, baselines and the probe."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from label_files import LabelFiles
from model_files import TINY, fair_esm, ours, perturb

from esmshard.batch import Inputs
from esmshard.data.batching.loader import Example, Examples
from esmshard.data.splits.leakage import ComparedRecords, pair_notices
from esmshard.errors import InputError
from esmshard.model.families.esm2 import ESM2
from esmshard.model.finetuner import FineTuner
from esmshard.tasks.base import collate
from esmshard.tasks.pair import MEMORY, SINGLE, PairSettings, PairTask
from esmshard.vocab import STANDARD, encode

NUMBERS = {"targets": ["Kd"], "mean": [50.0], "std": [4.0]}
TWO = {"classes": ["apart", "bound"], "counts": [3, 1], "records": 4}


def task(facts: dict[str, Any] = NUMBERS, **given: Any) -> PairTask:
    return PairTask(PairSettings(name="pair", **given), facts)


@pytest.fixture
def files(tmp_path: Path) -> LabelFiles:
    return LabelFiles(tmp_path)


@pytest.fixture(scope="module")
def trunk() -> ESM2:
    return ours(fair_esm(TINY), TINY)


def model(trunk: ESM2, made: PairTask) -> FineTuner:
    torch.manual_seed(0)
    head = made.head(TINY)
    perturb(head, deviation=0.3)
    torch.nn.init.normal_(head.out.weight)
    return FineTuner(trunk, head).eval()


def outputs(found: FineTuner, made: PairTask, *pairs: str) -> list[np.ndarray]:
    return found.outputs([made.question(Example(str(k), encode(pair), {})) for k, pair in enumerate(pairs)])


def test_each_chain_is_a_sequence_of_its_own_and_their_order_does_not_matter(trunk: ESM2) -> None:
    """The head sees what the model says of each chain alone, in every batch."""
    made = task(hidden=0)
    found = model(trunk, made)
    example = Example("a", encode("MKTAYIAK:WWC"), {})
    batch, _ = collate(made, [replace(example, labels={"target": np.zeros(1, np.float32)})])
    assert (batch.token_counts, batch.record_ids) == ([10, 5], ("a", "a"))
    one, other = (found.representations([Inputs(encode(chain))])[0].mean(0) for chain in ("MKTAYIAK", "WWC"))
    assert made.represented(example, found) == pytest.approx(np.stack([one, other]), abs=1e-6)
    a_D, b_D = (found.head.norm(torch.from_numpy(mean_D)) for mean_D in (one, other))
    combined_F = torch.cat([a_D + b_D, a_D * b_D, (a_D - b_D).abs()])
    expected = (combined_F @ found.head.out.weight[0] + found.head.out.bias[0]).detach()
    for pairs, place in ((["MKTAYIAK:WWC"], 0), (["ACDEF:GHIKL", "WWC:MKTAYIAK", "W:C"], 1)):
        assert outputs(found, made, *pairs)[place] == pytest.approx(float(expected), abs=1e-5)


def test_tracks_go_with_their_chains() -> None:
    example = Example("a", encode("MKT:WC", linker=2), {}, tracks={"3di": np.arange(9, dtype=np.uint8)})
    inputs = task().question(example)
    assert inputs.partner is not None
    assert [each.tracks["3di"].tolist() for each in (inputs, inputs.partner)] == [[0, 1, 2, 3, 8], [0, 6, 7, 8]]
    assert inputs.longest == 5


def test_tokens_are_those_of_both_chains_and_max_length_is_of_each(files: LabelFiles) -> None:
    fasta, store = files.split("train", "a MKTAYIAKQR:MK\nb MKTAYIAK:MKTAYIAK")
    whole = Examples("train", fasta, store, None, apart=True)
    assert whole.tokens.tolist() == [10 + 2 + 2 + 2, 8 + 2 + 8 + 2]
    assert whole.notices == [], "no chains are joined"
    short = Examples("train", fasta, store, None, long="skip", max_length=8, apart=True)
    assert [short.id(n) for n in range(len(short))] == ["b"]
    assert short.tokens.tolist() == [20]
    with pytest.raises(InputError, match=r"record 'a' has 10 residues, data.max_length is 8"):
        Examples("train", fasta, store, None, long="error", max_length=8, apart=True)


def pairs(n: int, seed: int = 0) -> list[Example]:
    """Pairs of random proteins, labelled by whether both or neither are rich in tryptophan: each alone says nothing."""
    rng, found = np.random.default_rng(seed), []
    for k in range(n):
        rich = rng.integers(0, 2, 2)
        bias = np.where(np.array(list(STANDARD)) == "W", [[12] if one else [0.1] for one in rich], 1)
        chains = ["".join(rng.choice(list(STANDARD), 30, p=bias_A / bias_A.sum())) for bias_A in bias]
        found.append(Example(str(k), encode(":".join(chains)), {"target": np.array(int(rich[0] == rich[1]))}))
    return found


def test_what_sees_single_sequences_does_not_see_what_belongs_together(
    trunk: ESM2, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esmshard.tasks.baselines.CS", (0.1,))
    train, test = pairs(160), pairs(60, seed=1)
    counts = np.bincount([int(e.labels["target"]) for e in train])
    made = task({"classes": ["apart", "bound"], "counts": counts.tolist(), "records": 160}, kind="class", hidden=0)
    base = model(trunk, made)
    known = made.baselines(train, base)
    assert made.baseline_outputs(test, known, None).keys() == {"majority", "length", "composition", MEMORY}
    made.probe(base.head, train, base, 0)
    outputs: Any = made.baseline_outputs(test, known, base)
    outputs["probe"] = base.outputs([made.question(example) for example in test])
    truth_N = [int(example.labels["target"]) for example in test]
    right = {name: float((np.argmax(each, axis=1) == truth_N).mean()) for name, each in outputs.items()}
    assert right.keys() == {"majority", "length", "composition", "frozen embedding", SINGLE, MEMORY, "probe"}
    assert right["composition"] > 0.9
    assert min(right["frozen embedding"], right["probe"]) > 0.7
    assert max(right[SINGLE], right["length"]) < 0.7


def test_the_labels_of_a_sequence_s_training_pairs_are_remembered(trunk: ESM2, files: LabelFiles) -> None:
    made = task(TWO, kind="class", hidden=0)
    pairs = {"MKT:ACD": 1, "GGG:MKT": 1, "GGG:WWC": 0, "LLL:WWC": 0}
    train = [Example(pair, encode(pair), {"target": np.array(target)}) for pair, target in pairs.items()]
    known = made.baselines(train, model(trunk, made))
    # MKT has the label 1 twice, and once the prior of a quarter; WWC the same with 0; PPP is unknown.
    share = {"MKT": (2 + 0.25) / 3, "WWC": 0.25 / 3, "PPP": 0.25}
    for pair, group in (("MKT:WWC", "C1"), ("WWC:PPP", "C2"), ("PPP:PPP", "C3")):
        asked = Example("q", encode(pair), {})
        found = made.predict(np.asarray(made.baseline_outputs([asked], known, None)[MEMORY][0]))
        assert found[1] == pytest.approx(sum(share[chain] for chain in pair.split(":")) / 2, rel=1e-5)
        data = Examples("test", *files.split("test", f"q {pair}"), None)
        assert (made.groups(data, known), made.groups(data, {})) == ([group], [])


def test_leakage_counts_training_pairs_in_either_order() -> None:
    def compared(*pairs: str) -> ComparedRecords:
        tokens = [encode(pair)[1:-1] for pair in pairs]
        return ComparedRecords(len(tokens), lambda n: tokens[n], lambda n: f"p{n}")

    rng = np.random.default_rng(0)
    a, b, c, d, e = ("".join(rng.choice(list(STANDARD), int(n))) for n in (50, 60, 70, 80, 90))
    test = compared(f"{b}:{a}", f"{a}:{c}", f"{a}:{d}", f"{d}:{e}")
    first, second = pair_notices(compared(f"{a}:{b}", f"{c}:{c}"), {"test": test})
    assert "of 4 test pairs 1 are training pairs" in first
    assert "2 have both sequences in training pairs (C1), 1 one of them (C2) and 1 none (C3)" in first
    assert "of 5 test sequences 3 are identical" in second
