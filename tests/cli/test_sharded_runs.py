"""`finetune` under the options of `parallel`: refused before any weight is read, and profiled."""

import gzip
import json
from pathlib import Path

import pytest
from command import esmshard, in_process


def test_what_cannot_be_is_one_sentence_before_any_weight_is_read(
    tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esmshard.train.inputs.initial_weights", None)
    for processes, options, code, token in (
        (4, ["strategy=hybrid_shard", "group_size=3"], 2, "parallel.group_size"),
        (1, ["precision=fp16"], 2, "parallel.precision"),
        (2, ["cpu_offload=true", "accumulate=unsharded"], 2, "parallel.accumulate"),
        (6, [], 1, "5 records, fewer than the 6 processes"),
    ):
        overrides = [f"parallel.{option}" for option in ("precision=fp32", *options)]
        done = in_process("finetune", tiny_recipe, *overrides, "--nproc", str(processes))
        assert (done.returncode, len(done.stderr.splitlines())) == (code, 1), done.stderr
        assert token in done.stderr
        assert not (tiny_recipe.parent / "run").exists()


def test_a_run_tells_how_each_rank_fares_and_where_time_goes(tiny_recipe: Path) -> None:
    run = tiny_recipe.parent / "run"
    done = esmshard("finetune", tiny_recipe, "--nproc", "2", "--profile", "2")
    assert done.returncode == 0, done.stderr
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in every if "loss" in line and "split" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    for line in steps:
        ranks = line["ranks"]
        assert all(len(values) == 2 for values in ranks.values())
        assert sum(ranks["residues_per_s"]) == pytest.approx(line["residues_per_s"], rel=1e-2)
        assert line["residues_per_s"] * line["step_s"] == pytest.approx(line["residues"], rel=1e-2)
        assert max(ranks["peak_memory_bytes"]) == line["peak_memory_bytes"]
        assert line["mfu"] is None, "a CPU has no data sheet"
    assert done.stderr.count("Self CPU %") == 1, "the table of the first rank"
    for rank in (0, 1):
        with gzip.open(run / "profile" / f"rank_{rank}.json.gz", "rt") as file:
            assert len(json.load(file)["traceEvents"]) > 100
