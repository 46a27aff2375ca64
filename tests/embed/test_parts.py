"""Stores of embeddings, reuse of rows, records with several chains, and tracks."""

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
import torch
from command import in_process
from embed_runs import content, embed, limit_memory
from embed_runs import write_model as write_plain_model
from model_files import TINY, fair_esm, write_transformers
from outputs import perturbed
from tracked_model import CONFIG, last_layer, random_pairs, write_model, write_pairs

import esmshard
from esmshard.batch import TokenBatch
from esmshard.embed.compute import Computed, Embedder, Work, compute_part
from esmshard.embed.engines import merge, status
from esmshard.embed.parts import EmbeddingStore, begin, partial
from esmshard.embed.spec import Long, request
from esmshard.errors import InputError, UsageError
from esmshard.io.array_formats import FORMATS, Output
from esmshard.io.store import ingest
from esmshard.io.symbols import Rules
from esmshard.model import weights
from esmshard.model.trunk import Trunk
from esmshard.vocab import CLS, EOS, RESIDUES, encode

RECORDS, PART = 40, 150
NAMES = ("mean_1", "mean_2", "residue_1", "residue_2")


class Given(NamedTuple):
    model: Path
    fasta: Path
    sequences: dict[str, str]
    store: Path


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    """Embed 40 records with two layers. `r30` fails, because the values of tryptophan are beyond fp32."""
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
    embed(model, out, fasta, part_tokens=PART, **{"pools": ["mean", "residue"], "layers": [1, 2], **options})
    return out


def test_status_before_while_and_after(given: Given, tmp_path: Path) -> None:
    out = tmp_path / "x"
    with pytest.raises(InputError, match="does not exist yet"):
        status(out)
    directory = partial(out)
    asked = request(str(given.model), out, pools=["mean", "residue"], layers=[1, 2])
    plan = begin(directory, given.fasta, asked, part_tokens=PART)
    work, parts = Work(directory, directory / "work" / "input", str(given.model), "cpu", None), len(plan["bounds"]) - 1
    for part in range(2):
        compute_part(work, part)
    lines = status(out).splitlines()
    assert lines[0] == f"{directory}: not finished, 2 of {parts} parts"
    assert lines[1].startswith(f"{', '.join(NAMES)} of 40 records (37 different sequences) by ")
    with pytest.raises(InputError, match="is no finished directory"):
        EmbeddingStore(out)
    make(given.model, given.fasta, out)
    assert status(out).splitlines()[0] == f"{out}: finished, {parts} of {parts} parts"


def test_merge_writes_what_embed_writes(given: Given, tmp_path: Path) -> None:
    store = make(given.model, given.fasta, tmp_path / "store" / "x", pools=["mean"], layers=[2])
    before = content(store)
    for fmt, writer in FORMATS.items():
        direct, merged = (tmp_path / place / fmt / f"x.{fmt}" for place in ("direct", "merged"))
        for path in (direct, merged):
            path.parent.mkdir(parents=True)
        if not writer.several:
            with pytest.raises(UsageError, match=r"residue_1|one output"):
                merge(given.store, merged, None, overwrite=False)
        if writer.by_sequence:
            with pytest.raises(UsageError, match="--reuse"):
                merge(store, merged, None, overwrite=False)
            assert not any(merged.parent.iterdir())
            continue
        make(given.model, given.fasta, direct, pools=["mean"], layers=[2])
        assert merge(store, merged, None, overwrite=False) == f"{merged}: 39 records"
        assert content(merged) == content(direct)
        with pytest.raises(UsageError, match="exists already"):
            merge(store, merged, None, overwrite=False)
    assert content(store) == before


def test_records_are_found_by_id(given: Given) -> None:
    store = esmshard.open(given.store)
    assert list(store) == list(given.sequences)
    assert (len(store), "r30" in store, "r40" in store) == (40, True, False)
    model = esmshard.load(given.model)
    for name, sequence in given.sequences.items():
        if name == "r30":
            continue
        values: Any = store[name]
        assert values.keys() == set(NAMES)
        assert values["residue_2"].shape == (len(sequence), TINY.dim)
        for layer in (1, 2):
            assert np.abs(values[f"mean_{layer}"] - values[f"residue_{layer}"].mean(0)).max() < 1e-5
    assert np.abs(values["residue_2"] - model.embed(sequence, "residue")).max() < 1e-5
    several = store[["r23", "r3", "r0"]]
    assert several["mean_2"].shape == (3, TINY.dim)
    assert np.array_equal(several["mean_2"][0], several["mean_2"][1]), "they have one sequence"
    assert not np.array_equal(several["mean_2"][1], several["mean_2"][2])
    assert [len(values) for values in several["residue_1"]] == [len(given.sequences[n]) for n in ("r23", "r3", "r0")]
    with pytest.raises(KeyError, match="has no record 'nobody'"):
        store[["r1", "nobody"]]
    with pytest.raises(KeyError, match=r"'r30' has no values: .* not finite"):
        store["r30"]
    assert list(store.failed) == ["r30"]


A, B, C = "MKTAYIAKQRQISFVKSHFSRQ", "GQISFVKSHFSRQLEERLGL", "MLW"
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
    "maps": {"pools": ["attentions"], "heads": [0, 3]},
    "other maps": {"pools": ["attentions"], "heads": [3, 0]},
}


def test_rows_are_copied_where_everything_is_the_same_and_nowhere_else(given: Given, tmp_path: Path) -> None:
    """Compare all pairs of settings: rows are copied only for equal settings."""
    other = write_transformers(tmp_path / "other", fair_esm(TINY, seed=1), TINY)
    (tmp_path / "x.fasta").write_text(f">ab\n{A}:{B}\n>joined\n{A}{'G' * 3}{B}\n>a\n{A}\n")
    (tmp_path / "one.fasta").write_text(f">joined\n{A}{'G' * 3}{B}\n>a\n{A}\n")
    values: dict[str, dict[str, Any]] = {}

    def run(name: str, out: str, **options: Any) -> Any:
        how = {"pools": ["mean"], "layers": [2], **HOW[name], **options}
        model = other if how.pop("model", None) else given.model
        # Records with two chains cannot be truncated.
        return embed(model, tmp_path / out, tmp_path / ("one.fasta" if name == "cut" else "x.fasta"), **how)

    for name in HOW:
        run(name, name)
        store = EmbeddingStore(tmp_path / name)
        values[name] = {record: store[record] for record in store}
        report = run(name, f"{name} again", reuse=tmp_path / name)
        assert (report["computed"], report["reused"]) == (0, len(values[name]))
        copied = EmbeddingStore(tmp_path / f"{name} again")
        assert all(np.array_equal(copied[record], expected) for record, expected in values[name].items()), name
    for old, new in itertools.permutations(HOW, 2):
        with pytest.raises(UsageError, match=r"was made with|contains"):
            EmbeddingStore(tmp_path / old).check_reuse(EmbeddingStore(tmp_path / new).spec)
    of_means = [name for name, how in HOW.items() if not how.keys() & {"layers", "pools"}]
    keys = [EmbeddingStore(tmp_path / name).index.keys.tolist() for name in of_means]
    assert len({key for some in keys for key in some}) == sum(map(len, keys)), "nothing else has the key of a row"


def test_of_a_store_with_more_outputs_those_that_are_asked_for_are_copied(given: Given, tmp_path: Path) -> None:
    half = tmp_path / "half.fasta"
    half.write_text("".join(f">new_{name}\n{text}\n" for name, text in [*given.sequences.items()][20:]) + ">x\nMKV\n")
    report = embed(given.model, tmp_path / "y", half, pools=["mean"], layers=[2], reuse=given.store)
    unique = len(set([*given.sequences.values()][20:]))
    assert (report["reused"], report["computed"]) == (unique - 1, 2), "the failed one is tried again"
    old, new = EmbeddingStore(given.store), EmbeddingStore(tmp_path / "y")
    assert np.array_equal(new["new_r25"], old["r25"]["mean_2"])  # type: ignore[call-overload]
    assert old.rows_to_reuse(np.array([b"nothing".ljust(16)])).tolist() == [-1]


POOLS = ["residue", "mean", "max", "cls", "contacts", "logits", "attentions"]
ROWS = np.r_[0 : len(A), len(A) + 25 : len(A) + 25 + len(B)]
"""The residues of both chains in the joined sequence."""


class Written(NamedTuple):
    model: str
    directory: Path


@pytest.fixture(scope="module")
def _written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    found = tmp_path_factory.mktemp("chains")
    (found / "x.fasta").write_text(f">ab\n{A}:{B}\n>a\n{A}\n>abc\n{A}:{B}:{C}\n>again\n{A}:{B}\n")
    (found / "plain.fasta").write_text(f">ab\n{A}{'G' * 25}{B}\n>a\n{A}\n")
    return Written(str(write_plain_model(found / "model")), found)


@pytest.fixture
def written(_written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    monkeypatch.chdir(tmp_path)
    return _written


def run(written: Written, fasta: str, out: str, **how: Any) -> Path:
    embed(written.model, Path(out), written.directory / fasta, **how)
    return Path(out)


def cut(pool: str, plain: np.ndarray) -> np.ndarray:
    """Remove the linker from an array of the joined sequence."""
    if pool in ("contacts", "attentions"):
        return plain[..., ROWS[:, None], ROWS]
    return plain if pool == "cls" else plain[ROWS]


def test_every_output_is_that_of_the_joined_sequence_without_the_linker(written: Written) -> None:
    with (
        h5py.File(run(written, "x.fasta", "x.h5", pools=POOLS)) as ours,
        h5py.File(run(written, "plain.fasta", "plain.h5", pools=POOLS)) as plain,
    ):
        for name, group in ours.items():
            whole, pool = plain[name], name.split("_")[0]
            np.testing.assert_allclose(group["a"][()], whole["a"][()], atol=1e-6, err_msg=name)
            np.testing.assert_array_equal(group["ab"][()], group["again"][()])
            assert group["ab"].attrs["chain_lengths"].tolist() == [len(A), len(B)]
            assert "chain_lengths" not in group["a"].attrs
            if pool not in ("mean", "max"):
                np.testing.assert_allclose(group["ab"][()], cut(pool, whole["ab"][()]), atol=1e-6, err_msg=name)
        rows = plain["residue_2"]["ab"][()][ROWS]
        np.testing.assert_allclose(ours["mean_2"]["ab"][()], rows.mean(0), atol=1e-6)
        np.testing.assert_allclose(ours["max_2"]["ab"][()], rows.max(0), atol=1e-6)
        assert ours["residue_2"]["abc"].shape[0] == len(A + B + C)
        assert ours.attrs["join"] == "linker:25"
        assert "join" not in plain.attrs
    assert Path("x.h5.chains.tsv").read_text().splitlines() == [
        "id\tresidues\tjoin",
        f"ab\t{len(A)},{len(B)}\tlinker:25",
        f"abc\t{len(A)},{len(B)},3\tlinker:25",
        f"again\t{len(A)},{len(B)}\tlinker:25",
    ]
    assert not Path("plain.h5.chains.tsv").exists()
    notices = json.loads(Path("x.h5.json").read_text())["notices"]
    assert notices == ["chains were joined by a linker of 25 in 3 records (ab, abc, again)"]


def test_parts_know_where_chains_begin(written: Written) -> None:
    with_gap = EmbeddingStore(run(written, "x.fasta", "gap", pools=["residue"], join="linker:3,gap:512"))
    two = [len(A), len(B)]
    assert with_gap.chains == {"ab": two, "abc": [*two, len(C)], "again": two}
    assert with_gap.attributes["join"] == "linker:3,gap:512"
    assert with_gap.index.lengths.sum() == 3 * len(A + B) + len(A) + len(C)
    model = esmshard.load(written.model, join="linker:3,gap:512")
    np.testing.assert_allclose(with_gap["ab"], model.embed(f"{A}:{B}", "residue"), atol=1e-6)
    np.testing.assert_allclose(with_gap["a"], esmshard.load(written.model).embed(A, "residue"), atol=1e-6)
    usual = esmshard.load(written.model).embed([f"{A}:{B}"], "residue")[0]
    assert usual.shape == with_gap["ab"].shape
    assert np.abs(usual - with_gap["ab"]).max() > 1e-3
    with pytest.raises(UsageError, match=r"was made with another --join .linker:3,gap:512, and now linker:25"):
        run(written, "x.fasta", "gap", pools=["residue"])


def test_windows_are_of_the_joined_sequence(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = (Output("residue", 2), Output("mean", 2), Output("contacts", None))
    tokens = [encode(f"{A}:{B}"), encode(A + "G" * 25 + B)]
    monkeypatch.setattr("esmshard.embed.compute.SMALLEST", 8)
    for long, memory in ((Long("window", 40, 10), 1000), (Long(overlap=10), 50)):
        model = weights.load_model(written.model).eval()
        limit_memory(model, memory, monkeypatch)
        ours, plain = (result.values for result in Embedder(model, outputs, long=long).compute(tokens))  # type: ignore[union-attr]
        rows = torch.from_numpy(ROWS)
        torch.testing.assert_close(ours["residue_2"], plain["residue_2"][rows], atol=1e-5, rtol=0)
        torch.testing.assert_close(ours["mean_2"], plain["residue_2"][rows].mean(0), atol=1e-5, rtol=0)
        contacts = plain["contacts"][rows[:, None], rows]
        torch.testing.assert_close(ours["contacts"], contacts, atol=1e-5, rtol=0, equal_nan=True)


def test_what_does_not_go_together_is_refused(written: Written) -> None:
    fasta = written.directory / "x.fasta"
    ingest([fasta], Path("x.store"), Rules(linker=3))
    with pytest.raises(InputError, match=r"x\.store: .* linker of 3"):
        embed(written.model, Path("x.npy"), Path("x.store"))
    with pytest.raises(InputError, match="linker of 3"):
        esmshard.load(written.model).embed(Path("x.store"))
    for join in ("linker:break", "25"):
        with pytest.raises(UsageError, match="--join"):
            request(written.model, Path("x.npy"), join=join)
    with pytest.raises(UsageError, match="--long truncate"):
        run(written, "x.fasta", "x.npy", long=Long("truncate", 30))
    with pytest.raises(InputError, match="chain 2 of 2"):
        esmshard.load(written.model).embed([A, f"{A}:"])


LENGTHS = {"a": 31, "b": 4, "c": 120, "d": 64, "e": 300, "f": 18}


def letter_of(token: int) -> int:
    return 20 if token in (CLS, EOS) else token * 7 % 20


def test_every_part_of_a_sequence_has_its_part_of_the_track(monkeypatch: pytest.MonkeyPatch) -> None:
    model = perturbed(CONFIG)
    tokens = [encode(sequence) for sequence, _ in random_pairs(LENGTHS).values()]
    tracks = [{"3di": np.array([letter_of(token) for token in sequence.tolist()], np.uint8)} for sequence in tokens]
    forward = model.forward

    def checked(batch: TokenBatch, *args: Any, **kwargs: Any) -> Any:
        assert batch.tracks["3di"].tolist() == [letter_of(token) for token in batch.tokens_T.tolist()]
        return forward(batch, *args, **kwargs)

    monkeypatch.setattr(model, "forward", checked)
    for long, most in ((Long("window", 100, 30), None), (Long("truncate", 90), None), (Long(), 160)):
        with monkeypatch.context() as patch:
            passes = [] if most is None else limit_memory(model, most, patch)
            results = Embedder(model, [Output("residue", CONFIG.n_layers)], long=long).compute(tokens, tracks)
        windowed = [n for n, result in enumerate(results) if isinstance(result, Computed) and result.windowed]
        assert all(isinstance(result, Computed) for result in results)
        assert windowed == ([] if most is None else [4])
        assert most is None or len(passes) > 1


class Tracked(NamedTuple):
    name: str
    model: Trunk
    fasta: Path
    letters: Path
    pairs: dict[str, tuple[str, str]]
    directory: Path

    def embed(self, out: str, track: Path | str | None, **how: Any) -> dict[str, Any]:
        tracks = {} if track is None else {"3di": str(track)}
        return embed(self.name, self.directory / out, self.fasta, pools=["residue"], tracks=tracks, **how)

    def check(self, out: str) -> None:
        store = EmbeddingStore(self.directory / out)
        for name, (sequence, letters) in self.pairs.items():
            np.testing.assert_allclose(store[name], last_layer(self.model, sequence, letters), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Trunk]:
    return write_model(tmp_path_factory.mktemp("tracked") / "model")


@pytest.fixture
def tracked(trained: tuple[str, Trunk], tmp_path: Path) -> Tracked:
    """Write records with equal sequences and equal or other letters, and a record without letters."""
    pairs = random_pairs(LENGTHS)
    pairs["again"] = pairs["a"]
    pairs["other"] = (pairs["a"][0], pairs["a"][1][::-1])
    pairs["part"] = (pairs["b"][0], "p#ny"[:4])
    pairs["bare"] = (pairs["b"][0], "")
    return Tracked(*trained, *write_pairs(tmp_path, pairs), pairs, tmp_path)


def test_values_are_those_of_each_protein_with_its_letters_also_if_reused(tracked: Tracked) -> None:
    report = tracked.embed("out", tracked.letters)
    tracked.check("out")
    assert (report["records"], report["unique"], report["computed"]) == (10, 9, 9)
    manifest = json.loads((tracked.directory / "out" / "plan.json").read_text())
    known = sum(len(letters.replace("#", "")) for _, letters in tracked.pairs.values())
    total = sum(len(sequence) for sequence, _ in tracked.pairs.values())
    counts = f"9 of 10 records, and {known:,} of {total:,} residues, from {tracked.letters.name}"
    assert f"structure letters (3Di) of {counts}" in manifest["notices"]
    assert manifest["tracks"]["3di"]["path"] == tracked.letters.name
    for name, letters, reused, computed in (("second", tracked.letters, 9, 0), ("bare", None, 1, 5)):
        report = tracked.embed(name, letters, reuse=tracked.directory / "out")
        assert (report["reused"], report["computed"]) == (reused, computed)
    tracked.check("second")


def test_an_output_goes_on_with_the_tracks_that_it_was_begun_with(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Embedder, "each", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tracked.embed("out", tracked.letters)
    other = tracked.directory / "other.fasta"
    other.write_text(tracked.letters.read_text().replace("V", "L"))
    for place in ("partial: was begun", "out: was made"):
        for track in (None, other):
            with pytest.raises(UsageError, match=f"{place} with another --track 3di"):
                tracked.embed("out", track)
        tracked.embed("out", tracked.letters)
        tracked.check("out")


def test_wrong_tracks_are_refused_and_a_missing_one_is_reported(tracked: Tracked) -> None:
    for options, token in (
        (("--track", "3di"), "NAME=PATH"),
        (("--track", "3di=a", "--track", "3di=b"), "twice"),
        (("--track", "ss=a"), "no such track"),
        (("--track", "3di=nowhere.fasta"), "nowhere.fasta: no such file"),
    ):
        done = in_process("embed", tracked.name, tracked.fasta, "-o", tracked.directory / "x.h5", *options)
        assert done.returncode in (1, 2)
        assert token in done.stderr
        assert not list(tracked.directory.glob("x.h5*"))
    about = Path(tracked.name) / "esmshard.json"
    about.write_text(json.dumps({"recipe": {"data": {"tracks": {"3di": "letters.fasta"}}}}))
    try:
        notices = tracked.embed("out", None)["notices"]
    finally:
        about.unlink()
    assert any("was fine-tuned with the track 3di" in notice for notice in notices)
