"""Embedding by ranks that hold one model together: the product is that of one plain process."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from command import esmshard
from model_files import TINY, fair_esm, write_fair_esm
from ranks import run_ranks

from esmshard.embed.compute.outputs import Long, as_float
from esmshard.embed.job.embed_job import embed
from esmshard.embed.job.embed_request import request
from esmshard.embed.store import part_plan
from esmshard.embed.store.embedding_store import EmbeddingStore
from esmshard.errors import UsageError
from esmshard.model import weights
from esmshard.vocab import RESIDUES

EVERY = {"pools": ["mean", "max", "cls", "residue", "logits", "contacts", "attentions"]}
WINDOWS = Long("window", 100, 20)
LENGTHS = (31, 1, 250, 7, 120, 64, 2, 300, 18, 45, 9, 77, 5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_fair_esm(tmp_path_factory.mktemp("tiny") / "esm2_tiny.pt", fair_esm(TINY)))


def write_fasta(path: Path, lengths: tuple[int, ...]) -> Path:
    rng = np.random.default_rng(5)
    path.write_text("".join(f">r{k}\n{''.join(rng.choice(list(RESIDUES), n))}\n" for k, n in enumerate(lengths)))
    return path


def plain(model: str, fasta: Path, out: Path, how: dict[str, Any], part_tokens: int) -> Path:
    """By one process that holds the whole model."""
    embed(request(model, out, **how), fasta, nproc=1, tokens=128, part_tokens=part_tokens)
    return out


def assert_same(found: Path, expected: Path, most: float = 1e-6) -> None:
    one, other = EmbeddingStore(found), EmbeddingStore(expected)
    assert list(one) == list(other)
    assert len(one)
    for mine, theirs in zip(one.rows(), other.rows(), strict=True):
        assert mine.values.keys() == theirs.values.keys()
        for name, array in mine.values.items():
            a, b = (as_float(x, one.spec.dtype).astype(np.float64) for x in (array, theirs.values[name]))
            assert np.array_equal(np.isnan(a), np.isnan(b)), f"{mine.id} {name}"  # pairs that no window sees
            assert np.abs(np.nan_to_num(a - b)).max() <= most, f"{mine.id} {name}"


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "every": (EVERY, 150),
    "windows": (EVERY | {"long": WINDOWS}, 150),  # of which some take several passes
    "lower": ({"pools": ["residue", "cls"], "layers": [0, 1]}, 1 << 16),  # one part; the last layer is not needed
    "embedding": ({"layers": [0]}, 300),
    "halves": ({"pools": ["residue"], "precision": "bf16", "dtype": "bf16"}, 300),
}
"""Options, and tokens of a part."""


@pytest.mark.parametrize(
    ("name", "size"),
    [("every", 2), ("every", 3), ("windows", 2), ("windows", 3), ("lower", 2), ("embedding", 2), ("halves", 2)],
)
def test_the_product_is_that_of_one_process(tiny: str, tmp_path: Path, name: str, size: int) -> None:
    how, part_tokens = CASES[name]
    fasta, out = write_fasta(tmp_path / "x.fasta", LENGTHS), tmp_path / "x"
    expected = plain(tiny, fasta, tmp_path / "plain", how, part_tokens)
    parts = len(EmbeddingStore(expected).manifest["parts"])
    assert name != "every" or (parts == 5 and parts % size)
    said = run_ranks("sharded_embedding:embedded", size, tmp_path, tiny, str(fasta), str(out), how, part_tokens)
    assert said == [f"{out}: 13 records; 13 sequences computed, 0 duplicates, 0 reused"] * size
    assert_same(out, expected, 0.02 if name == "halves" else 1e-6)


@pytest.mark.parametrize(("name", "size"), [("every", 2), ("windows", 4), ("embedding", 2), ("halves", 4)])
def test_two_ranks_compute_each_layer_together(tiny: str, tmp_path: Path, name: str, size: int) -> None:
    """The second rank of each pair has no pack of its own; another order of sums gives other last digits."""
    how, part_tokens = CASES[name]
    fasta, out = write_fasta(tmp_path / "x.fasta", LENGTHS), tmp_path / "x"
    expected = plain(tiny, fasta, tmp_path / "plain", how, part_tokens)
    said = run_ranks("sharded_embedding:embedded", size, tmp_path, tiny, str(fasta), str(out), how, part_tokens, 2)
    assert said == [f"{out}: 13 records; 13 sequences computed, 0 duplicates, 0 reused"] * size
    assert_same(out, expected, 0.05 if name == "halves" else 2e-5)


def test_what_tensor_cannot_be(tiny: str, tmp_path: Path) -> None:
    fasta, asked = write_fasta(tmp_path / "x.fasta", (40,)), request(tiny, tmp_path / "x")
    with pytest.raises(UsageError, match="add --shard"):
        embed(asked, fasta, nproc=2, tensor=2)
    with pytest.raises(UsageError, match="groups of 3 processes do not divide the 2"):
        embed(asked, fasta, nproc=2, shard=True, tensor=3)
    with pytest.raises(
        UsageError, match="--tensor: 3 does not divide the 4 attention heads of this model; choose 2, 4"
    ):
        embed(asked, fasta, nproc=3, shard=True, tensor=3)


def test_more_ranks_than_sequences(tiny: str, tmp_path: Path) -> None:
    fasta = write_fasta(tmp_path / "x.fasta", (40,))
    run_ranks("sharded_embedding:embedded", 3, tmp_path, tiny, str(fasta), str(tmp_path / "x"), EVERY, 1)
    assert_same(tmp_path / "x", plain(tiny, fasta, tmp_path / "plain", EVERY, 1))


def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    config = weights.read("starter").config
    width = config.dim
    layer = 12 * width**2 + 13 * width  # three projections, output, two of 4 D; their biases; two LayerNorms
    rest = 33 * width + 2 * width + width**2 + width + 2 * width + 33  # embedding, last norm, LM head
    regression = 6 * 12 + 1
    layers = 6 * layer
    for found in run_ranks("sharded_embedding:held", 2, tmp_path, "starter"):
        assert found["groups"] == 7
        assert found["before"] == pytest.approx((layers + rest) / 2 + regression, abs=32 * width)  # uneven rows
        assert found["during"] <= layers / 2 + layer / 2 + rest + regression, "one layer is gathered"
        assert found["after"] <= layers / 2 + rest + regression, "the layers are in shards again"


def test_all_ranks_take_as_many_passes(tiny: str, tmp_path: Path) -> None:
    found = run_ranks("sharded_embedding:passes", 3, tmp_path, tiny)
    assert [one["values"] for one in found] == [0, 1, 2]
    assert [one["passes"] for one in found] == [2, 2, 2]


def test_who_lacks_memory_says_so_and_the_others_do_not_wait(tiny: str, tmp_path: Path) -> None:
    """A rank that waited would end after the time limit of `run_ranks`, which fails the test."""
    first, second = run_ranks("sharded_embedding:short_of_memory", 2, tmp_path, tiny)
    assert second["told"] == (
        "rank 1: memory of cpu does not suffice for one sequence of 2,000 residues at once; give --long window "
        "--window 1000 and --overwrite"
    )
    assert re.fullmatch(
        r"rank 0 has lost another one, which ended or is stuck \([^.]*Connection (closed|reset)[^()\n]*\); "
        "what is finished stays: go on with --resume",
        first["told"],
    )


def command(*arguments: str | Path) -> "subprocess.Popen[str]":
    line = [sys.executable, "-m", "esmshard", "embed", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def notes(directory: Path) -> dict[str, float]:
    """When the parts that are done were."""
    return {path.name: path.stat().st_mtime for path in (directory / "parts").glob("0*.json")}


def test_killed_ranks_go_on_where_they_were(tiny: str, tmp_path: Path) -> None:
    fasta, out = write_fasta(tmp_path / "x.fasta", tuple(range(20, 170))), tmp_path / "x"
    expected = plain(tiny, fasta, tmp_path / "plain", {"pools": ["residue"]}, 1)
    asked, directory = request(tiny, out, pools=["residue"]), part_plan.partial(out)
    # There are 150 parts, of one sequence each.
    part_plan.begin(directory, part_plan.PlanRequest(fasta, asked.spec, asked.facts, None, "cpu", part_tokens=1))
    again = (tiny, fasta, "-o", out, "--pool", "residue", "--shard", "--nproc", "2", "--resume")
    running = command(*again)
    while len(notes(directory)) < 5:
        assert running.poll() is None, running.communicate()[1]
        time.sleep(0.01)
    ranks = [json.loads(path.read_text()) for path in (directory / "work" / "workers").glob("*.json")]
    assert len({rank["pid"] for rank in ranks}) == 2
    os.kill(ranks[0]["pid"], signal.SIGKILL)
    _, said = running.communicate(timeout=600)
    assert running.returncode == 1
    assert "was ended by SIGKILL" in said
    assert said.endswith(
        f"error: {directory}: is not finished, as a rank has failed; fix that and go on with --resume\n"
    )
    assert "Traceback" not in said
    done = notes(directory)
    assert 5 <= len(done) < 150
    assert not out.exists()

    resumed = esmshard("embed", *again)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr.startswith(f"{directory}: going on; {len(done)} of 150 sequences are done\n")
    assert resumed.stdout == f"{out}: 150 records; 150 sequences computed, 0 duplicates, 0 reused\n"
    assert_same(out, expected)


def test_one_process_shares_with_nobody(tiny: str, tmp_path: Path) -> None:
    fasta = write_fasta(tmp_path / "x.fasta", (40, 12))
    with pytest.raises(UsageError, match="nobody to share a model with; give --nproc 2"):
        embed(request(tiny, tmp_path / "x"), fasta, nproc=1, shard=True)
    with pytest.raises(UsageError, match="leave --nproc and --shard out"):
        embed(request(tiny, tmp_path / "x"), fasta, nproc=2, shard=True, offload=True)
    told = run_ranks("sharded_embedding:with_nproc", 2, tmp_path, tiny, str(fasta), str(tmp_path / "x"))
    assert told == ["--nproc belongs to a single command; a launcher has started this process already"] * 2
    assert not (tmp_path / "x.partial").exists()
