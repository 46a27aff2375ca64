"""What an embedding store answers; status, merge; which rows of an earlier store are copied, and which are not."""

from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
import torch
from embed_runs import content
from model_files import TINY, fair_esm, write_transformers

import esmshard
from esmshard.embed.compute import Work, compute_part
from esmshard.embed.engines import embed, merge, status
from esmshard.embed.parts import EmbeddingStore, Reuse, begin, partial
from esmshard.embed.spec import Long, request
from esmshard.errors import InputError, UsageError
from esmshard.io.array_formats import FORMATS
from esmshard.vocab import RESIDUES, encode

RECORDS, PART = 40, 150
NAMES = ("mean_1", "mean_2", "residue_1", "residue_2")


class Given(NamedTuple):
    model: Path
    fasta: Path
    sequences: dict[str, str]
    store: Path


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    """Two layers, means and residues of 40 records; `r30` fails: tryptophan is beyond fp32."""
    directory = tmp_path_factory.mktemp("given")
    reference = fair_esm(TINY)
    rng = np.random.default_rng(4)
    letters = [letter for letter in RESIDUES if letter not in "WXBZUO"]
    sequences = {f"r{k}": "".join(rng.choice(letters, n)) for k, n in enumerate(rng.integers(8, 30, RECORDS))}
    for k in (9, 23, 31):
        sequences[f"r{k}"] = sequences["r3"]
    sequences["r30"] = sequences["r30"][:5] + "W" + sequences["r30"][6:]
    with torch.no_grad():
        reference.embed_tokens.weight[encode("W")[1]] = 3e38
        reference.lm_head.weight = reference.embed_tokens.weight
    model = write_transformers(directory / "model", reference, TINY)
    fasta = directory / "x.fasta"
    fasta.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in sequences.items()))
    return Given(model, fasta, sequences, make(model, fasta, directory / "store"))


def make(model: Path, fasta: Path, out: Path, **options: Any) -> Path:
    asked = request(str(model), out, **{"pools": ["mean", "residue"], "layers": [1, 2], **options})
    embed(asked, fasta, part_tokens=PART)
    return out


def test_status_before_while_and_after(given: Given, tmp_path: Path) -> None:
    out = tmp_path / "x"
    with pytest.raises(InputError, match=r"x: there is nothing; embed writes it$"):
        status(out)
    directory = partial(out)
    asked = request(str(given.model), out, pools=["mean", "residue"], layers=[1, 2])
    plan = begin(directory, given.fasta, asked, part_tokens=PART)
    work, parts = Work(directory, directory / "work" / "input", str(given.model), "cpu", None), len(plan["bounds"]) - 1
    for part in range(2):
        compute_part(work, part)
    lines = status(out).splitlines()
    assert lines[0] == f"{directory}: not finished"
    assert lines[1].startswith(f"holds      {', '.join(NAMES)} of 40 records (37 different sequences) by ")
    assert lines[2] == f"parts      2 of {parts}; {plan['bounds'][2]} of 37 sequences"
    with pytest.raises(InputError, match="is no finished directory"):
        EmbeddingStore(out)
    embed(asked, given.fasta)
    lines = status(out).splitlines()
    assert lines[0] == f"{out}: finished"
    assert lines[2:4] == [f"parts      {parts} of {parts}; 37 of 37 sequences", "failed     1"]


@pytest.mark.parametrize("name", [f"x.{fmt}" for fmt in FORMATS])
@pytest.mark.parametrize("several", [False, True])
def test_merge_writes_what_embed_writes(given: Given, tmp_path: Path, name: str, several: bool) -> None:
    how: dict[str, Any] = {"pools": ["mean"], "layers": [1, 2] if several else [2]}
    if several and not FORMATS[name.removeprefix("x.")].several:
        with pytest.raises(UsageError, match=r"none for residue_1|holds one output"):
            merge(given.store, tmp_path / name, None, overwrite=False)
        assert not any(tmp_path.iterdir())
        return
    for place in ("store", "direct", "merged"):
        (tmp_path / place).mkdir()
    store = make(given.model, given.fasta, tmp_path / "store" / "x", **how)
    make(given.model, given.fasta, tmp_path / "direct" / name, **how)
    before = content(store)
    if name == "x.biotrainer-h5":
        with pytest.raises(UsageError, match=r"has no sequences, .* --reuse \S+, which computes nothing again"):
            merge(store, tmp_path / "merged" / name, None, overwrite=False)
        assert not any((tmp_path / "merged").iterdir())
        return
    text = merge(store, tmp_path / "merged" / name, None, overwrite=False)
    assert text == f"{tmp_path / 'merged' / name}: 39 records"
    assert content(tmp_path / "merged" / name) == content(tmp_path / "direct" / name)
    assert content(store) == before
    with pytest.raises(UsageError, match="exists already"):
        merge(store, tmp_path / "merged" / name, None, overwrite=False)


def test_records_are_found_by_id(given: Given, tmp_path: Path) -> None:
    make(given.model, given.fasta, tmp_path / "x.h5", pools=["residue"], layers=[2])
    store = esmshard.open(given.store)
    assert list(store) == list(given.sequences)
    assert (len(store), "r30" in store, "r40" in store) == (40, True, False)
    with h5py.File(tmp_path / "x.h5") as file:
        for name, sequence in given.sequences.items():
            if name == "r30":
                continue
            values: Any = store[name]
            assert values.keys() == set(NAMES)
            assert values["residue_2"].shape == (len(sequence), TINY.dim)
            assert np.abs(values["residue_2"] - file[name][()]).max() < 1e-5
            for layer in (1, 2):
                assert np.abs(values[f"mean_{layer}"] - values[f"residue_{layer}"].mean(0)).max() < 1e-5
    some = store[["r23", "r3", "r0"]]
    assert some["mean_2"].shape == (3, TINY.dim)
    assert np.array_equal(some["mean_2"][0], some["mean_2"][1]), "they have one sequence"
    assert not np.array_equal(some["mean_2"][1], some["mean_2"][2])
    assert [len(values) for values in some["residue_1"]] == [len(given.sequences[name]) for name in ("r23", "r3", "r0")]
    with pytest.raises(KeyError, match="has no record 'nobody'"):
        store[["r1", "nobody"]]
    with pytest.raises(KeyError, match=r"'r30' has no values: .* not finite"):
        store["r30"]
    assert list(store.failed) == ["r30"]


def test_a_damaged_store_is_one_sentence(given: Given, tmp_path: Path) -> None:
    store = make(given.model, given.fasta, tmp_path / "x")
    part = sorted((store / "parts").iterdir())[1]
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(InputError, match=rf"{part.name}: is damaged"):
        merge(store, tmp_path / "x.h5", None, overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


A, B = "MKTAYIAKQRQISFVKSHFSRQ", "GQISFVKSHFSRQLEERLGL"
HOW: dict[str, dict[str, Any]] = {
    "as it is": {},
    "linker": {"join": "linker:3"},
    "gap": {"join": "linker:3,gap:512"},
    "fp16": {"dtype": "fp16"},
    "bf16": {"precision": "bf16"},
    "cut": {"long": Long("truncate", 30)},
    "windows": {"long": Long("window", 30, 8)},
    "layer": {"layers": [1]},
    "other model": {"model": "other"},
}


def test_rows_are_copied_where_everything_is_the_same_and_nowhere_else(given: Given, tmp_path: Path) -> None:
    """Each way of computing against each other one: equal rows, a refusal, or no copied row; never another's row."""
    other = write_transformers(tmp_path / "other", fair_esm(TINY, seed=1), TINY)
    (tmp_path / "x.fasta").write_text(f">ab\n{A}:{B}\n>joined\n{A}{'G' * 3}{B}\n>a\n{A}\n")
    (tmp_path / "one.fasta").write_text(f">joined\n{A}{'G' * 3}{B}\n>a\n{A}\n")
    values: dict[str, dict[str, Any]] = {}

    def run(name: str, out: str, **options: Any) -> Any:
        how = {"pools": ["mean"], "layers": [2], "model": str(given.model), **HOW[name]}
        how["model"] = str(other) if how["model"] == "other" else how["model"]
        # A chain is not cut away, so there is no record of two chains to truncate.
        fasta = tmp_path / ("one.fasta" if name == "cut" else "x.fasta")
        return embed(request(how.pop("model"), tmp_path / out, **how), fasta, **options)

    for name in HOW:
        run(name, name)
        store = EmbeddingStore(tmp_path / name)
        values[name] = {record: store[record] for record in store}
    for old in HOW:
        for new in HOW:
            out = f"{new} from {old}"
            if old != new:
                with pytest.raises(UsageError, match=r"--reuse .*: (was made with|holds) "):
                    run(new, out, reuse=tmp_path / old)
                continue
            report = run(new, out, reuse=tmp_path / old)
            assert (report.computed, report.reused) == (0, len(values[new]))
            copied = EmbeddingStore(tmp_path / out)
            for record, expected in values[new].items():
                assert np.array_equal(copied[record], expected), (out, record)
    keys = [EmbeddingStore(tmp_path / name).index.keys.tolist() for name in HOW if name != "layer"]
    assert len({key for some in keys for key in some}) == sum(map(len, keys)), "nothing else has the key of a row"


def test_of_a_store_with_more_outputs_those_that_are_asked_for_are_copied(given: Given, tmp_path: Path) -> None:
    half = tmp_path / "half.fasta"
    half.write_text("".join(f">new_{name}\n{text}\n" for name, text in [*given.sequences.items()][20:]) + ">x\nMKV\n")
    asked = request(str(given.model), tmp_path / "y", pools=["mean"], layers=[2])
    report = embed(asked, half, reuse=given.store)
    assert report is not None
    unique = len(set([*given.sequences.values()][20:]))
    assert (report.reused, report.computed) == (unique - 1, 2), "the failed one is tried again"
    old, new = EmbeddingStore(given.store), EmbeddingStore(tmp_path / "y")
    assert np.array_equal(new["new_r25"], old["r25"]["mean_2"])  # type: ignore[call-overload]
    assert Reuse(given.store, new.spec).rows(np.array([b"nothing".ljust(16)])).tolist() == [-1]
