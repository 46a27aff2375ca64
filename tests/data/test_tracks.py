"""Tracks: files of letters, codes and coordinates, matched to records and cut with their tokens."""

import re
from pathlib import Path

import numpy as np
import pytest
from in_memory import InMemory
from structure_texts import OTHER, SEQ, backbone, chain, cif, pdb, three

from esmshard.data import tracks as track_reader
from esmshard.data.batching.loader import Examples, Long
from esmshard.data.tracks import TrackFile, record_tracks, values_of
from esmshard.errors import InputError, UsageError
from esmshard.io.store import TokenStore, cached
from esmshard.io.symbols import Edits
from esmshard.vocab import Track, decode

LETTERS = Track("turns", "letters of turns", "letters", unknown=3, letters="hec")
CODES = Track("words", "words of structure", "codes", unknown=500, n_codes=500)
PLACES = Track("atoms", "coordinates", "coordinates", unknown=float("nan"))


def refusal(*parts: str) -> str:
    return ".*".join(map(re.escape, parts))


def read(track: Track, source: Path, *records: str, edits: Edits | None = None) -> dict[int, np.ndarray]:
    return dict(track_reader.entries(track, source, InMemory(*records), edits or Edits()))


def test_letters_are_numbered_in_either_case_and_codes_are_arrays_by_id(tmp_path: Path) -> None:
    source = tmp_path / "x.fasta"
    source.write_text(">b one of b\nHE\n#c\n>other\nhhhhhhhhh\n>a\nCEH\n")  # other proteins are passed over
    found = read(LETTERS, source, ">a MKT", ">b MKTV")
    assert {n: values.tolist() for n, values in found.items()} == {0: [2, 1, 0], 1: [0, 1, 3, 2]}
    np.savez(tmp_path / "x.npz", a=np.array([0, 499, 500], np.int16), other=np.array([1.5]))
    assert read(CODES, tmp_path / "x.npz", ">a MKT", ">b M")[0].tolist() == [0, 499, 500]
    with pytest.raises(InputError, match=refusal("x.csv: words of structure are read from an .npz file")):
        read(CODES, tmp_path / "x.csv", ">a MKT")


def test_wrong_letters_and_codes_are_refused(tmp_path: Path) -> None:
    for given, parts in (
        (">b\nh\n>a\nhxc\n", ("x.fasta:3: record 'a' has 'x' at position 2", "(hec)", "#")),
        (">a\nhh\n", ("x.fasta:1: record 'a' has letters of turns of 2 residues", "3 residues", "#")),
        (">a\nhhh\n>a\nhhh\n", ("x.fasta:3: record 'a'", "x.fasta:1 too")),
        ("hhh\n", ("x.fasta:1: text before the first '>'",)),
        (np.array([0, 501, 2]), ("x.npz: record 'a' has 501 at position 2", "0 to 499, and 500")),
        (np.array([0.0, 1.0, 2.0]), ("x.npz: record 'a' is float64 [3]", "whole numbers")),
        (np.array([[0, 1, 2]]), ("is int64 [1, 3]",)),
        (np.array([0, 1]), ("words of structure of 2 residues", "3 residues", "500")),
    ):
        track, source = (LETTERS, tmp_path / "x.fasta") if isinstance(given, str) else (CODES, tmp_path / "x.npz")
        if isinstance(given, str):
            source.write_text(given)
        else:
            np.savez(source, a=given)
        with pytest.raises(InputError, match=refusal(*parts)):
            read(track, source, ">a MKT")
    for value in (np.zeros((3, 3)), np.array([["a"]])):
        with pytest.raises(InputError, match=refusal("[residues, 3, 3]")):
            values_of(PLACES, value, "x")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "structures"
    out.mkdir()
    lines = [*chain(SEQ, "A", missing=[2]), *chain(OTHER, "B")]
    (out / "1ABC.cif").write_text(cif(lines, {"A": three(SEQ), "B": three(OTHER)}))
    (out / "P12345.pdb").write_text(pdb(chain(SEQ[:5], "A", shift=5.0)))
    (out / "broken.pdb").write_text("ATOM  what?\n")
    return out


def test_a_record_has_the_chain_of_its_name_or_of_its_sequence(folder: Path) -> None:
    expected_L33 = backbone(len(SEQ))[:, :3].astype(np.float32)
    expected_L33[2] = np.nan
    for name in ("1abc_A", "1ABC_A", "1abc", "sp|1ABC|SOME"):
        (values_L33,) = read(PLACES, folder, f">{name} {SEQ}").values()
        assert values_L33.dtype == np.float32
        np.testing.assert_allclose(values_L33, expected_L33, atol=1e-5)


def test_chains_that_fit_no_record_are_refused_and_other_residues_are_counted(folder: Path) -> None:
    found = read(PLACES, folder, f">1abc_B {OTHER}", ">unknown MKT", f">P12345 {SEQ[:5]}", f">1abc_C {SEQ}")
    assert sorted(found) == [0, 2], "other records have no coordinates"
    np.testing.assert_allclose(found[2], backbone(5)[:, :3] + 5.0, atol=1e-3)
    edits = Edits()
    assert len(read(PLACES, folder, f">1abc_B A{OTHER[1:]}", edits=edits)) == 1
    assert "the structure has other residues than the sequence in 1 record (1abc_B)" in edits.notices()
    (folder / "2abc_A.pdb").write_text(pdb(chain(SEQ, "A")))
    (folder / "2ABC.pdb").write_text(pdb(chain(SEQ, "A")))
    for record, parts in (
        (">1abc_B MKT", ("1ABC.cif: chain '1abc_B' of record '1abc_B' has coordinates of 12 residues", "SEQRES")),
        (">1abc MKT", ("1ABC.cif: has 2 protein chains", "'1abc'", "1abc_CHAIN")),
        (f">2abc_A {SEQ}", ("record '2abc_A'", "too")),
    ):
        with pytest.raises(InputError, match=refusal(*parts)):
            read(PLACES, folder, record)


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    fasta = tmp_path / "records.fasta"
    fasta.write_text(">a\nMKTAYIAKQR\n>b\nGGLV\n>c\nMKTAYIAKQRGGLVMKTAYIAKQRGGLV\n")
    return cached(fasta)


@pytest.mark.parametrize("long", ["crop", "window"])
def test_crops_and_windows_keep_a_track_with_its_residues(long: Long, store: TokenStore, tmp_path: Path) -> None:
    """The letter of a residue depends on the residue, so that a shifted track is seen."""
    text = "".join(f">{store.id(n)}\n{''.join('hec'[k % 3] for k in store.residues(n))}\n" for n in (2, 0))
    (tmp_path / "turns.fasta").write_text(text)
    np.savez(tmp_path / "words.npz", b=np.array([7, 500, 300, 0]))
    files = [TrackFile(LETTERS, tmp_path / "turns.fasta"), TrackFile(CODES, tmp_path / "words.npz")]
    tracks = record_tracks(files, store)
    split = Examples("train", Path("x"), store, None, long=long, max_length=11)
    before = split.digest
    split.add_tracks(tracks)
    assert split.digest != before
    firsts = set()
    for epoch in range(6):
        for n in range(len(split)):
            example = split.get(n, epoch)
            turns, words = example.tracks["turns"], example.tracks["words"]
            assert (turns.dtype, words.dtype, len(words)) == (np.uint8, np.int64, len(example.tokens))
            if example.id == "b":
                assert (turns.tolist(), words.tolist()) == ([3] * 6, [500, 7, 500, 300, 0, 500])
            else:
                assert turns.tolist() == [3, *(example.tokens[1:-1] % 3), 3]
                assert set(words.tolist()) == {500}
                firsts.add(decode(example.tokens)[:4])
    assert len(firsts) > 1, "the parts begin at several places"
    split = Examples("train", Path("x"), store, None, members_N=np.array([False, True, True]))
    split.add_tracks(tracks)
    turns, words = split.notices
    assert turns.startswith("letters of turns of 1 of 2 records, and 28 of 32 residues, from ")
    assert words.startswith("words of structure of 1 of 2 records, and 3 of 32 residues, from ")


def test_an_altered_copy_and_a_changed_source_are_read_again(store: TokenStore, tmp_path: Path) -> None:
    source = tmp_path / "letters.fasta"
    source.write_text("".join(f">{store.id(n)}\n{'h' * int(store.lengths[n])}\n" for n in range(len(store))))
    for name in ("values.npy", "known.npy", "manifest.json"):
        path = track_reader.cached_track(LETTERS, source, store).path / name
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
        again = track_reader.cached_track(LETTERS, source, store)
        assert set(again[len(store) - 1].tolist()) == {0}
        assert again.known_N.tolist() == store.lengths.tolist()
    before = record_tracks([TrackFile(LETTERS, source)], store)
    source.write_text(source.read_text().replace("h", "e"))
    changed = record_tracks([TrackFile(LETTERS, source)], store)
    assert changed.digest != before.digest
    assert [set(tracks.get(0, slice(None))["turns"].tolist()) for tracks in (before, changed)] == [{0, 3}, {1, 3}]


def test_a_source_that_does_not_fit_the_records_is_refused(store: TokenStore, tmp_path: Path) -> None:
    (tmp_path / "x.fasta").write_text(">other\nhh\n")
    (tmp_path / "complex.fasta").write_text(">other\nMK:TA\n")
    for source, records, token in (
        ("x.fasta", store, "x.fasta: has no letters of turns for any of 3 records (a, b, c)"),
        ("nowhere.fasta", store, "nowhere.fasta: no such file"),
        ("x.fasta", cached(tmp_path / "complex.fasta"), "several chains"),
    ):
        with pytest.raises(InputError, match=refusal(token)):
            record_tracks([TrackFile(LETTERS, tmp_path / source)], records)


def test_the_tracks_of_one_protein_are_those_of_its_id(tmp_path: Path) -> None:
    (tmp_path / "wt.fasta").write_text(">wt\nMKTV\n")
    (tmp_path / "turns.fasta").write_text(">other\nh\n>wt\nhecc\n")
    found = track_reader.protein_tracks([TrackFile(LETTERS, tmp_path / "turns.fasta")], tmp_path / "wt.fasta")
    assert found.get(17, slice(1, 3))["turns"].tolist() == [3, 1, 2, 3]
    (notice,) = found.notices(np.arange(9))
    assert notice.startswith("letters of turns of 4 of 4 residues of the wild type, from ")


def test_a_track_that_the_model_does_not_take_is_refused() -> None:
    named = {"turns": "inside", "atoms": "/x", "words": "~/x.npz"}
    found = track_reader.track_files(named, [LETTERS, PLACES, CODES], "m", "--track ")
    assert [file.path for file in found] == [Path("inside"), Path("/x"), Path.home() / "x.npz"]
    assert [file.track for file in found] == [LETTERS, PLACES, CODES]
    with pytest.raises(UsageError, match=refusal("--track trns: m takes no such track", "turns (letters of turns)")):
        track_reader.track_files({"trns": "x"}, [LETTERS, PLACES], "m", "--track ")
    with pytest.raises(UsageError, match=refusal("data.tracks.turns: m reads the sequence alone")):
        track_reader.track_files({"turns": "x"}, [], "m", "data.tracks.")
    assert track_reader.named_tracks(["a=x=y", "b=inside"]) == {"a": "x=y", "b": "inside"}
    for options in (["a"], ["=x"], ["a="], ["a=x", "a=y"]):
        with pytest.raises(UsageError, match="--track"):
            track_reader.named_tracks(options)


def test_tracks_inside_the_data(tmp_path: Path, folder: Path) -> None:
    given = [TrackFile(PLACES, Path("inside")), TrackFile(CODES, Path("words.npz"))]
    assert track_reader.with_paths(folder, given) == [TrackFile(PLACES, folder), TrackFile(CODES, Path("words.npz"))]
    for path, track, said in (
        (tmp_path / "x.fasta", PLACES, "x.fasta: has no coordinates inside"),
        (folder, LETTERS, "structures: has no letters of turns inside"),
    ):
        with pytest.raises(InputError, match=refusal(said)):
            track_reader.with_paths(path, [TrackFile(track, Path("inside"))])
