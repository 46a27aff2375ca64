"""Poolings with learned weights: values by hand, packs, dropout, gradients, memory, and the weights in files."""

import csv
import json
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import in_process
from model_files import TINY, fair_esm, ours, perturb
from scipy import special

from esmshard.batch import TokenBatch, pack
from esmshard.data.batching.loader import Example
from esmshard.model.finetuner import FineTuner
from esmshard.tasks.base import Task, collate
from esmshard.tasks.pooling import Attention, LightAttention
from esmshard.tasks.registry import new_task, settings_of
from esmshard.tasks.sequence import SequenceHead
from esmshard.vocab import chain_spans, encode

DIM = 6
POOLINGS = ("attention", "light_attention")
SEQUENCES = ["MKTAYIAKQRGLIS", "W", "MKTAYIAKQR:GQISFV:K"]
PAIRS = ["MKTAYIAKQR:WWC", "AC:DEFGHIKL", "GQISFVK:GQISFVK"]


def packed(sequences: list[str], linker: int = 2) -> tuple[TokenBatch, torch.Tensor]:
    """A batch, and representations that depend on token and position only."""
    batch = pack([encode(sequence, linker=linker) for sequence in sequences])
    phase_T1 = (batch.tokens_T * 31 + batch.position_T)[:, None]
    return batch, (phase_T1 * torch.linspace(0.1, 3, DIM)).sin()


def task(name: str, pooling: str, **given: Any) -> Task:
    facts = {"targets": ["y"], "mean": [0.0], "std": [1.0]}
    return new_task(settings_of({"name": name, "pooling": pooling, **given}), facts)


def chains_of(batch: TokenBatch, x_TD: torch.Tensor) -> list[list[np.ndarray]]:
    each = zip(batch.residues(batch.tokens_T), batch.residues(x_TD), strict=True)
    return [[x_LD[slice(*span)].double().numpy() for span in chain_spans(tokens.numpy())] for tokens, x_LD in each]


def normed(x_LD: np.ndarray) -> np.ndarray:
    return (x_LD - x_LD.mean(1, keepdims=True)) / np.sqrt(x_LD.var(1, keepdims=True) + 1e-5)


def test_attention_by_hand() -> None:
    batch, x_TD = packed(SEQUENCES)
    pooling = Attention(DIM)
    torch.nn.init.normal_(pooling.query.weight)
    vectors, weights = pooling(x_TD, batch)
    for chains, vector, weight_L in zip(chains_of(batch, x_TD), vectors, weights, strict=True):
        x_LD = np.concatenate(chains)
        expected_L = special.softmax(normed(x_LD) @ pooling.query.weight[0].detach().numpy())
        assert weight_L.numpy() == pytest.approx(expected_L, abs=1e-6)
        assert vector.detach().numpy() == pytest.approx(expected_L @ x_LD, abs=1e-6)


@pytest.mark.parametrize("linker", [1, 25])
def test_light_attention_by_hand(linker: int) -> None:
    """Convolutions end at the ends of chains, however short the linker is."""
    batch, x_TD = packed(SEQUENCES, linker)
    pooling = LightAttention(DIM, 0.5).eval()

    def convolved(x_LD: np.ndarray, layer: torch.nn.Conv1d) -> np.ndarray:
        weight_EDK = layer.weight.detach().double().numpy()
        padded = np.pad(normed(x_LD), ((4, 4), (0, 0)))
        found = np.stack([np.einsum("kd,edk->e", padded[n : n + 9], weight_EDK) for n in range(len(x_LD))])
        return found if layer.bias is None else found + layer.bias.detach().numpy()

    vectors, weights = pooling(x_TD, batch)
    for chains, vector, weight_L in zip(chains_of(batch, x_TD), vectors, weights, strict=True):
        value_LD, score_LD = (
            np.concatenate([convolved(chain, layer) for chain in chains]) for layer in (pooling.values, pooling.scores)
        )
        weight_LD = special.softmax(score_LD, axis=0)
        expected = [*(weight_LD * value_LD).sum(0), *value_LD.max(0)]
        assert vector.detach().numpy() == pytest.approx(expected, abs=1e-6)
        assert weight_L.numpy() == pytest.approx(weight_LD.mean(1), abs=1e-6)


def test_a_new_attention_is_the_mean() -> None:
    batch, x_TD = packed(SEQUENCES)
    head, mean = (SequenceHead(DIM, 4, 3, 0.0, pooling) for pooling in ("attention", "mean"))
    mean.load_state_dict({name: t for name, t in head.state_dict().items() if not name.startswith("pooling.")})
    for found, expected in zip(head(x_TD, batch), mean(x_TD, batch), strict=True):
        torch.testing.assert_close(found[:3], expected)
        torch.testing.assert_close(found[3:], torch.full_like(found[3:], 1 / (len(found) - 3)))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["sequence", "pair"])
def test_a_record_says_the_same_whatever_it_is_packed_with(name: str, pooling: str) -> None:
    """Also with dropout, and with the gradient of the trunk."""
    made = task(name, pooling, dropout=0.4, hidden=5)
    torch.manual_seed(0)
    model = FineTuner(ours(fair_esm(TINY), TINY), made.head(TINY)).train()
    perturb(model.head, deviation=0.3)
    examples = [
        Example(str(n), encode(sequence), {"target": np.ones(1, np.float32)}, draw="0:1")
        for n, sequence in enumerate(PAIRS if name == "pair" else SEQUENCES)
    ]

    def outputs(*numbers: int) -> list[torch.Tensor]:
        found: list[torch.Tensor] = model(collate(made, [examples[n] for n in numbers])[0])
        return found

    together = outputs(0, 1, 2)
    for numbers in ((2,), (1, 0), (2, 1, 0)):
        for n, output in zip(numbers, outputs(*numbers), strict=True):
            torch.testing.assert_close(output, together[n], rtol=1e-5, atol=1e-6)
    batch, _ = collate(made, examples)
    assert batch.draw_N is not None
    others = model(replace(batch, draw_N=batch.draw_N + 1))
    assert not torch.allclose(others[0][:1], together[0][:1], rtol=1e-3), "dropout is drawn"
    for output, example in zip(together, examples, strict=True):
        lengths = [end - start for start, end in chain_spans(example.tokens)]
        weights = output[1:].split(lengths if name == "pair" else [sum(lengths)])
        assert [weight_L.sum().item() for weight_L in weights] == pytest.approx([1.0] * len(weights), abs=1e-5)
    made.loss(together, [torch.ones(1)] * 3).sum.backward()
    grads = [p.grad for layer in (*model.layers, model.head) for p in layer.parameters()]
    assert all(grad is not None and grad.any() for grad in grads)


def test_memory_for_the_backward_pass_is_as_planned() -> None:
    batch, _ = packed(["MKTAYIAKQR" * 20] * 3)
    x_TD = torch.randn(len(batch.tokens_T), 64, requires_grad=True)
    for pooling in POOLINGS:
        made = settings_of({"name": "sequence", "pooling": pooling})
        head, kept = SequenceHead(64, 0, 1, 0.1, made.pooling), dict[int, torch.UntypedStorage]()  # type: ignore[attr-defined]

        def keep(tensor: torch.Tensor, kept: Any = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            head(x_TD, replace(batch, draw_N=torch.zeros(3, dtype=torch.int32)))
        for tensor in (x_TD, *head.parameters()):  # counted with the model
            kept.pop(tensor.untyped_storage().data_ptr(), None)
        share = sum(storage.nbytes() for storage in kept.values()) / made.head_bytes(len(x_TD), 33, 64)
        assert 0.7 < share < 1.2, pooling


RECIPE = """\
task: {name: sequence, kind: class, pooling: attention, hidden: 0, dropout: 0}
model: {name: starter}
data: {train: table.csv}
batch: {global_tokens: 600, tokens_per_rank: 600}
adapt: {method: head}
optim: {head_lr: 2.0e-2, warmup: 0.0}
train: {steps: 24, eval_every: 24}
parallel: {precision: fp32}
out: run
"""


def rows(path: str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_weights_are_at_the_motif_that_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a trained model: after random layers, every residue knows a little of all others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("esmshard.tasks.baselines.CS", (0.1,))
    draw, lines, records, places = random.Random(0), ["id,sequence,label,set"], list[str](), dict[str, int]()
    for n, split in enumerate(["train"] * 80 + ["valid"] * 20 + ["test"] * 20):
        letters = draw.choices("ADEFGHIKLMNPQRSTVY", k=draw.randint(15, 40))
        if n % 2:
            places[f"p{n}"] = draw.randint(0, len(letters) - 3)
            letters[places[f"p{n}"] : places[f"p{n}"] + 3] = "WCW"
        records.append("".join(letters))
        lines.append(f"p{n},{records[-1]},{'with' if n % 2 else 'without'},{split}")
    Path("table.csv").write_text("\n".join(lines) + "\n")
    Path("r.yaml").write_text(RECIPE)
    Path("in.fasta").write_text("".join(f">p{n}\n{records[n]}\n" for n in range(100, 120)))
    assert (done := in_process("finetune", "r.yaml")).returncode == 0, done.stderr
    for ending in ("csv", "npz"):
        done = in_process("predict", "run/model", "in.fasta", "-o", f"x.{ending}", "--weights", f"w.{ending}")
        assert done.returncode == 0, done.stderr
    assert list(rows("x.csv")[0]) == ["id", "prediction", "with", "without"]
    weights = defaultdict[str, list[float]](list)
    for row in rows("w.csv"):
        weights[row["id"]].append(float(row["weight"]))
        assert row["residue"] == records[int(row["id"][1:])][int(row["position"]) - 1]
    arrays, predicted = np.load("w.npz"), np.load("x.npz")
    for n, row in zip(range(100, 120), rows("x.csv"), strict=True):
        assert arrays[f"p{n}"] == pytest.approx(weights[f"p{n}"], rel=1e-4)
        assert predicted[f"p{n}"] == pytest.approx([float(row["with"]), float(row["without"])], rel=1e-4)
        if n % 2:
            assert int(np.argmax(weights[f"p{n}"])) - places[f"p{n}"] in (0, 1, 2)
            assert sum(weights[f"p{n}"][places[f"p{n}"] :][:3]) > 0.8
    drawn = json.loads(Path("run/evaluation.json").read_text())["weights"]
    assert sum((row["prediction"] == "with") == int(row["id"][1:]) % 2 for row in rows("x.csv")) >= 17
    assert [len(record["weights"]) for record in drawn] == [1, 1, 1]
    for record in drawn:
        assert record["chains"] == [records[int(record["id"][1:])]]
        assert record["weights"][0] == pytest.approx(weights[record["id"]], abs=1e-4)
    assert in_process("report", "run").returncode == 0
    assert Path("run/report.html").read_text().count("<figcaption>" + drawn[0]["id"]) == 1

    for out, given, token in (("y.csv", "y.csv", "-o"), ("y.csv", "y.txt", "endings"), ("y.csv", "w.csv", "exists")):
        refused = in_process("predict", "run/model", "in.fasta", "-o", out, "--weights", given)
        assert refused.returncode == 2
        assert token in refused.stderr


def test_a_pair_has_weights_for_each_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    pairs = [["".join(draw.choices("ACDEFGHIKLMNPQRSTVWY", k=draw.randint(3, 12))) for _ in "ab"] for _ in range(36)]
    sets = ["train"] * 24 + ["valid"] * 6 + ["test"] * 6
    lines = [f"q{n},{a},{b},{len(a)},{split}" for n, ((a, b), split) in enumerate(zip(pairs, sets, strict=True))]
    Path("table.csv").write_text("\n".join(["id,sequence_a,sequence_b,label,set", *lines]) + "\n")
    Path("r.yaml").write_text(RECIPE.replace("sequence, kind: class, pooling: attention", "pair"))
    options = ["train.steps=2", "train.eval_every=2", "model.name=nano", "init=random"]
    done = in_process("finetune", "r.yaml", "task.pooling=light_attention", *options)
    assert done.returncode == 0, done.stderr
    Path("in.fasta").write_text("".join(f">q{n}\n{a}:{b}\n" for n, (a, b) in enumerate(pairs)))
    done = in_process("predict", "run/model", "in.fasta", "-o", "x.parquet", "--weights", "w.csv")
    assert done.returncode == 0, done.stderr
    sums = defaultdict[tuple[str, str], float](float)
    for row in rows("w.csv"):
        sums[row["id"], row["chain"]] += float(row["weight"])
        assert row["residue"] == pairs[int(row["id"][1:])][int(row["chain"]) - 1][int(row["position"]) - 1]
    assert len(sums) == 72
    assert list(sums.values()) == pytest.approx([1.0] * 72, abs=1e-4)
    drawn = json.loads(Path("run/evaluation.json").read_text())["weights"]
    assert [record["chains"] for record in drawn] == [pairs[int(record["id"][1:])] for record in drawn]

    assert in_process("finetune", "r.yaml", *options, "out=mean").returncode == 0
    refused = in_process("predict", "mean/model", "in.fasta", "-o", "y.csv", "--weights", "v.csv")
    assert refused.returncode == 2
    assert "task.pooling" in refused.stderr
    assert not Path("y.csv").exists()
