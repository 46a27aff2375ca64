"""Embeddings with tracks: what the model gets, and the values, against the model on each protein alone."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
from command import esmshard as esmshard_command
from tracked_model import CONFIG, last_layer, random_pairs, rough_model, write_model, write_pairs

from esmshard.batch import TokenBatch
from esmshard.embed.compute import Computed, Embedder
from esmshard.embed.engines import EmbedReport, embed
from esmshard.embed.parts import EmbeddingStore
from esmshard.embed.spec import Long, request
from esmshard.errors import UsageError
from esmshard.io.array_formats import Output
from esmshard.model.trunk import Trunk
from esmshard.vocab import CLS, EOS, encode

LENGTHS = {"a": 31, "b": 4, "c": 120, "d": 64, "e": 300, "f": 18}


# What the model gets


def letter_of(token: int) -> int:
    return 20 if token in (CLS, EOS) else token * 7 % 20


def watched(model: Trunk, most: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Check every batch, in which the letter of a residue follows from the residue; memory is for `most` tokens."""
    passes: list[int] = []
    forward = model.forward

    def looked_at(batch: TokenBatch, *args: Any, **kwargs: Any) -> Any:
        if batch.bounds[-1] > most:
            raise MemoryError
        assert batch.tracks["3di"].tolist() == [letter_of(token) for token in batch.tokens_T.tolist()]
        passes.append(len(batch))
        return forward(batch, *args, **kwargs)

    monkeypatch.setattr(model, "forward", looked_at)
    return passes


@pytest.mark.parametrize(
    ("long", "most"),
    [(Long(), 10_000), (Long("window", 100, 30), 10_000), (Long("truncate", 90), 10_000), (Long(), 160)],
)
def test_every_part_of_a_sequence_has_its_part_of_the_track(
    long: Long, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In packs, windows and cut sequences; in halves of a pack, and in windows for lack of memory."""
    model = rough_model()
    tokens = [encode(sequence) for sequence, _ in random_pairs(LENGTHS).values()]
    tracks = [{"3di": np.array([letter_of(token) for token in one.tolist()], np.uint8)} for one in tokens]
    passes = watched(model, most, monkeypatch)
    outputs = [Output("residue", CONFIG.n_layers)]
    found = dict(Embedder(model, outputs, long=long, workers=1).compute(tokens, tracks))
    assert all(isinstance(one, Computed) for one in found.values())
    assert len(passes) > (1 if most < 1000 or long.mode == "window" else 0)
    windowed = [n for n, one in found.items() if isinstance(one, Computed) and one.windowed]
    assert windowed == ([4] if most < 1000 else [])


# Whole jobs


class Given(NamedTuple):
    name: str
    model: Trunk
    fasta: Path
    letters: Path
    pairs: dict[str, tuple[str, str]]
    directory: Path

    def embed(self, out: str, track: Path | str | None, fasta: Path | None = None, **how: Any) -> EmbedReport:
        tracks = {} if track is None else {"3di": str(track)}
        asked = request(self.name, self.directory / out, pools=["residue"], tracks=tracks)
        return embed(asked, fasta or self.fasta, **how)

    def check(self, out: str) -> None:
        """Compare each record with the model on it alone."""
        store = EmbeddingStore(self.directory / out)
        for name, (sequence, letters) in self.pairs.items():
            np.testing.assert_allclose(store[name], last_layer(self.model, sequence, letters), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Trunk]:
    return write_model(tmp_path_factory.mktemp("tracked") / "model")


@pytest.fixture
def given(trained: tuple[str, Trunk], tmp_path: Path) -> Given:
    """Two records of one sequence with other letters, two of one sequence and one set of letters, one without."""
    pairs = random_pairs(LENGTHS)
    pairs["again"] = pairs["a"]
    pairs["other"] = (pairs["a"][0], pairs["a"][1][::-1])
    pairs["part"] = (pairs["b"][0], "p#ny"[:4])
    pairs["bare"] = (pairs["b"][0], "")
    return Given(*trained, *write_pairs(tmp_path, pairs), pairs, tmp_path)


def test_values_are_those_of_each_protein_with_its_letters(given: Given) -> None:
    report = given.embed("out", given.letters)
    given.check("out")
    assert (report.records, report.duplicates, report.computed) == (10, 1, 9)
    manifest = json.loads((given.directory / "out" / "plan.json").read_text())
    known = sum(len(letters.replace("#", "")) for _, letters in given.pairs.values())
    total = sum(len(sequence) for sequence, _ in given.pairs.values())
    said = f"structure letters (3Di) of 9 of 10 records, and {known:,} of {total:,} residues, from {given.letters.name}"
    assert said in manifest["notices"]
    assert manifest["tracks"]["3di"]["path"] == given.letters.name


def test_one_file_and_two_processes_hold_the_same(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [given.name, given.fasta, "--track", f"3di={given.letters}", "--pool", "residue"]
    done = esmshard_command("embed", *options, "-o", given.directory / "x.h5", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    with h5py.File(given.directory / "x.h5") as file:
        for name, (sequence, letters) in given.pairs.items():
            found = file[name] if name in file else file["residue_2"][name]
            np.testing.assert_allclose(found[()], last_layer(given.model, sequence, letters), rtol=0, atol=1e-4)
    about = json.loads((given.directory / "x.h5.json").read_text())
    assert about["tracks"]["3di"]["path"] == given.letters.name
    assert any("9 of 10 records" in notice for notice in about["notices"])


def test_rows_of_the_same_letters_are_reused_and_others_are_not(given: Given) -> None:
    given.embed("first", given.letters)
    report = given.embed("second", given.letters, reuse=given.directory / "first")
    assert (report.reused, report.computed) == (9, 0)
    given.check("second")
    report = given.embed("bare", None, reuse=given.directory / "first")
    assert (report.reused, report.computed) == (1, 5), "what has no letters is alike without them"


def test_an_output_goes_on_with_the_tracks_that_it_was_begun_with(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Embedder, "compute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        given.embed("out", given.letters)
    monkeypatch.undo()
    other = given.directory / "other.fasta"
    other.write_text(given.letters.read_text().replace("V", "L"))
    for track in (None, other):
        with pytest.raises(UsageError, match="partial: was begun with another --track 3di"):
            given.embed("out", track)
    given.embed("out", given.letters)
    given.check("out")
    with pytest.raises(UsageError, match="out: was made with another --track 3di"):
        given.embed("out", other)
    given.embed("out", given.letters)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--track", "3di"), "--track 3di: NAME=PATH is expected"),
        (("--track", "3di=a", "--track", "3di=b"), "--track 3di: is given twice"),
        (("--track", "ss=a"), "takes no such track; it takes 3di (structure letters (3Di))"),
        (("--track", "3di=nowhere.fasta"), "nowhere.fasta: no such file"),
    ],
)
def test_what_is_refused(given: Given, options: tuple[str, ...], said: str) -> None:
    done = esmshard_command("embed", given.name, given.fasta, "-o", given.directory / "x.h5", *options)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(given.directory.glob("x.h5*"))


def test_a_model_that_was_fine_tuned_with_a_track_says_that_it_gets_none(given: Given) -> None:
    about = Path(given.name) / "esmshard.json"
    about.write_text(json.dumps({"recipe": {"data": {"tracks": {"3di": "letters.fasta"}}}}))
    try:
        given.embed("out", None)
        told = json.loads((given.directory / "out" / "plan.json").read_text())["notices"]
        assert any("was fine-tuned with the track 3di" in sentence for sentence in told)
    finally:
        about.unlink()
