"""Tables of variants: cells, columns, numbering, replicates and unusable rows."""

import re
from pathlib import Path

import numpy as np
import pytest

from esmshard.data.mutations import Mutation, RefusedVariant, parse_name, parse_variant
from esmshard.data.variants import Variants, read_variants
from esmshard.errors import InputError, UsageError

#             10        20        30        40        50
WT = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQ"
PAGE = Path(__file__).parents[2] / "docs" / "variants.md"


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str, **options: object) -> Variants:
    Path("v.csv").write_text(text, newline="")
    options.setdefault("wild_type", WT)
    return read_variants(Path("v.csv"), **options)  # type: ignore[arg-type]


def refused(text: str, kind: type[InputError] = InputError, **options: object) -> str:
    with pytest.raises(InputError) as error:
        read(text, **options)
    assert isinstance(error.value, UsageError) is (kind is UsageError)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def scored(*cells: str) -> str:
    """A table of mutation cells with the scores 1, 2, ..."""
    return "mutant,score\n" + "".join(f'"{cell}",{k}\n' for k, cell in enumerate(cells, 1))


A4G, T3V, K2S = Mutation(3, "A", "G"), Mutation(2, "T", "V"), Mutation(1, "K", "S")


CELLS: dict[tuple[Mutation, ...], list[str]] = {
    (A4G,): [
        *("A4G", " a4g ", "p.A4G", "p.Ala4Gly", "P.ALA4GLY", "ala4gly", "Ala4G", "p.(Ala4Gly)", "p.[Ala4Gly]"),
        *("NP_000509.1:p.Ala4Gly", "NP_000509:p.A4G", "ENSP00000269305.4:p.(Ala4Gly)", "P62593.1:p.Ala4Gly"),
    ],
    (T3V, A4G): [
        *("A4G:T3V", "A4G;T3V", "A4G,T3V", "A4G/T3V", "A4G + T3V", "A4G  T3V", "A4G:p.T3V", "p.Ala4Gly p.Thr3Val"),
        *("p.[Ala4Gly;Thr3Val]", "p.[(Ala4Gly;Thr3Val)]", "p.[(Ala4Gly);(Thr3Val)]", "p.Ala4Gly;p.Thr3Val"),
    ],
    (K2S, T3V, A4G): ["A4G, T3V,\tK2S"],
    (Mutation(8, "A", "G"), Mutation(9, "K", "R")): ["K10R:A9G"],  # by number, not by text
    (Mutation(3, "A", "*"),): ["p.Ala4Ter", "A4*", "p.Ala4*"],
    (Mutation(3, "A", "A"),): ["A4A", "p.Ala4=", "p.(Ala4=)"],
    (Mutation(3, "X", "X"),): ["X4X"],
    (Mutation(3, "B", "B"),): ["Asx4="],
    (Mutation(3, "U", "O"),): ["Sec4Pyl"],
    (Mutation(3, "X", "A"),): ["X4A", "Xaa4Ala"],
    (Mutation(-1, "A", "G"),): ["A0G"],  # numberings that count from 0 or over a signal peptide
    (Mutation(-4, "A", "G"),): ["A-3G"],
    (Mutation(123455, "A", "G"),): ["A123456G"],
    (): ["WT", "wt", "_wt", "Wild-Type", "wildtype", "wild type", "p.=", "p.(=)", "="],
}


def test_cells() -> None:
    for mutations, cells in CELLS.items():
        for cell in cells:
            assert parse_variant(cell) == mutations, cell
    wrong = """
        |A4|4G|A4G:|A4G::T3V|A4G/V|A4GT3V|WT:A4G|model|A1234567G|A\u0664G|ACD4G|Ala4Foo|A4FGH|J4A|*4A|Ter4Ala|p.?
        |p.[Ala4Gly];[Thr3Val]|p.[Ala4Gly(;)Thr3Val]|A4X|p.Ala4X|p.Ala4Xaa|A4B|A4Z|A4J|T3V:A4-|\u0394A4
        |A4\u2206|p.Ala4_Val30insGly|p.Ala4_Lys9dup|A4_T3insG|A4_T3dup|A4_T3del|A4delG|A4ins|A4delinsGJ|p.Ala4delinsGl|p.Ala4GlyfsTer12|A4fs|p.Met1ext-5
        |c.76A>C|_sy|A4G:T3V:A4V|A4G:A4G"""
    for cell in ["a\nb4", *wrong.split("|")]:
        with pytest.raises(RefusedVariant):
            parse_variant(cell)


def test_insertions_and_deletions() -> None:
    deleted = (Mutation(3, "A", ""), Mutation(4, "", ""), Mutation(5, "I", ""))
    for mutations, cells in {
        (Mutation(3, "A", ""),): ["A4del", "p.Ala4del", "p.(Ala4del)"],
        deleted: ["A4_I6del", "p.Ala4_Ile6del"],
        (Mutation(3, "A", "GV"), *deleted[1:]): ["A4_I6delinsGV", "p.Ala4_Ile6delinsGlyVal"],
        (Mutation(3, "A", "AGV"),): ["A4insGV", "A4_Y5insGV", "p.Ala4_Tyr5insGlyVal"],
        (Mutation(3, "A", "AA"),): ["A4dup", "p.Ala4dup"],
        (Mutation(4, "Y", "YAY"),): ["A4_Y5dup"],
        (Mutation(0, "M", "GM"), T3V): ["T3V:M1delinsGM"],
    }.items():
        for cell in cells:
            assert parse_variant(cell) == mutations, cell
    text = "mutant,score\nA4_I6del,1\nA4insGV:K2A,2\nM1delinsGM,3\nA4G,4\n"
    variants = read(text, indels=True)
    assert variants.sequences() == [WT[:3] + WT[6:], f"MATAGV{WT[4:]}", f"G{WT}", f"MKTG{WT[4:]}"]
    assert variants.names() == ["A4del:Y5del:I6del", "K2A:A4insGV", "M1delinsGM", "A4G"]
    assert [parse_variant(name) for name in variants.names()] == variants.mutations
    # A column of sequences tells the same, as one replaced part, which is as far right as possible (as in HGVS).
    by_sequence = read("sequence,score\n" + "".join(f"{s},1\n" for s in variants.sequences()), indels=True)
    assert by_sequence.names() == ["Y5del:I6del:A7del", "K2delinsATAGV:T3del:A4del", "M1delinsGM", "A4G"]
    assert by_sequence.sequences() == variants.sequences()
    assert "task.context=sequence" in refused(text)
    assert "1 of 7 mutations do not fit" in refused(text.replace("A4_I6del", "A4_Y6del"), indels=True)


def test_several_proteins(tmp_path: Path) -> None:
    fasta = tmp_path / "wt.fasta"
    fasta.write_text(f">a\n{WT}\n>b with words\nMKVL:GGA\n>unused\nMM\n")
    text = "protein,mutant,score\na,K2R,1\nb,K2R,2\nb,wt,3\na,WT,4\nb,K2R,4\nb,A7G,5\n"
    variants = read(text, wild_type=fasta, protein="protein", replicates="mean")
    assert variants.names() == ["a/K2R", "b/K2R", "b/WT", "a/WT", "b/A7G"]
    assert variants.target_NT[:, 0].tolist() == [1, 3, 3, 4, 5]
    assert variants.sequences()[1:3] == ["MRVL:GGA", "MKVL:GGA"]
    assert variants.sequences()[4] == "MKVL:GGG", "positions count through all chains"
    assert [parse_name(name) for name in variants.names()] == list(
        zip(variants.proteins, variants.mutations, strict=True)
    )
    assert "has no record 'c'" in refused(f"{text}c,K2R,1\n", wild_type=fasta, protein="protein")
    assert "1 of 5 mutations do not fit" in refused(f"{text}b,M2R,1\n", wild_type=fasta, protein="protein")
    assert "name the column of proteins in data.protein" in refused(text, wild_type=fasta)
    # The wild types follow from mutations and sequences.
    whole = "WT_name,mut_type,aa_seq,ddG\na,K2R,MRVL,1\nb,wt,MAA,2\na,wt,MKVL,0\n"
    path = tmp_path / "whole.csv"
    path.write_text(whole)
    found = read_variants(path, wild_type=path, protein="WT_name")
    assert {name: wild_type.residues for name, wild_type in found.wild_types.items()} == {"a": "MKVL", "b": "MAA"}
    path.write_text(whole.replace("wt,MKVL", "wt,MKVA"))
    with pytest.raises(InputError, match="rows of 'a' have different wild types"):
        read_variants(path, wild_type=path, protein="WT_name")


def test_a_table() -> None:
    variants = read("mutant,score,note\nA4G,0.5,x\n\nWT,1,y\nK53E:T3V,-2,z\n")
    assert variants.names() == ["A4G", "WT", "T3V:K53E"]
    assert variants.mutations == [(A4G,), (), (T3V, Mutation(52, "K", "E"))]
    assert variants.sequences() == [f"MKTG{WT[4:]}", WT, f"MKV{WT[3:52]}E{WT[53:]}"]
    assert variants.positions() == [frozenset({3}), frozenset(), frozenset({2, 52})]
    assert variants.target_names == ("score",)
    assert variants.target_NT.tolist() == [[0.5], [1.0], [-2.0]]
    assert variants.rows == [(0,), (1,), (2,)]
    assert variants.table.column("note") == ["x", "y", "z"]
    assert variants.table.lines == [2, 4, 5]
    assert variants.notices == []


def test_usual_columns() -> None:
    for mutant in ["mutant", "mutation", "mutations", "variant", "hgvs_pro", "hgvs_p", "mut", "Mutation"]:
        assert read(f"{mutant},sequence,score\nA4G,x,1\n").names() == ["A4G"]
    for score in ["DMS_score", "score", "fitness", "target", "effect", "Fitness", "activity", "ddg"]:
        variants = read(f"mutant,{score},other\nA4G,7,8\n")
        assert (variants.target_names, variants.target_NT.tolist()) == ((score,), [[7.0]])


def test_columns_by_name() -> None:
    text = "mutant,mutation,score,fitness\nA4G,T3V,1,2\n"
    assert "--mutant" in refused(text)
    assert "--target" in refused(text, mutant="mutation")
    variants = read(text, mutant="mutation", targets=["fitness", "score"])
    assert (variants.names(), variants.target_names) == (["T3V"], ("fitness", "score"))
    assert variants.target_NT.tolist() == [[2.0, 1.0]]
    without = read(text, mutant="mutant", targets=None)
    assert (without.names(), without.target_names, without.target_NT.shape) == (["A4G"], (), (1, 0))
    assert "its columns are 'name', 'score'" in refused("name,score\nA4G,1\n")
    assert "'mutant', 'kd'" in refused("mutant,kd\nA4G,1\n")
    assert "twice" in refused(text, UsageError, mutant="mutant", targets=["score", "score"])
    variants = read("mutant;score\nA4G;1,5\nT3V;2\nK2S;0,5\n")
    assert variants.target_NT.tolist() == [[1.5], [2.0], [0.5]]
    assert "decimal comma (line 2, line 4)" in variants.notices[0]


def test_wild_type_from_a_fasta_file() -> None:
    Path("wt.fasta").write_text(f">tem1 a protein\n{WT[:30]}\n{WT[30:].lower()}\n")
    variants = read(scored("A4G"), wild_type=Path("wt.fasta"))
    assert variants.wild_type == WT
    assert variants.notices == ["wt.fasta: lower-case letters were read as upper case in 1 record (tem1)"]
    Path("wt.fasta").write_text(">a\nMK\n>b\nMKT\n>c\nMT\n>d\nMMM\n")
    assert "4 records (a, b, c, ...)" in refused(scored("A4G"), wild_type=Path("wt.fasta"))
    assert "none.fasta" in refused(scored("A4G"), wild_type=Path("none.fasta"))
    for sequence in ("MKT:MKV", "ACGTACGTACGTACGTACGT"):
        Path("wt.fasta").write_text(f">a\n{sequence}\n")
        assert "wt.fasta" in refused(scored("A4G"), wild_type=Path("wt.fasta"))


def test_wild_type_from_a_table() -> None:
    """ProteinGym's reference file names it, and its assays tell it by their mutations and mutated sequences."""
    rows = ["mutant,mutated_sequence,DMS_score", f"A4G:M1V,V{WT[1:3]}G{WT[4:]},1", f"K2S,M{'s'}{WT[2:]},2"]
    table = "\n".join(rows) + "\n"
    assert read(table, wild_type=Path("v.csv")).wild_type == WT
    Path("reference.csv").write_text(f"DMS_id,DMS_filename,target_seq\nother,other.csv,MKV\nv,v.csv,{WT}\n")
    variants = read(scored("A4G"), wild_type=Path("reference.csv"))
    assert (variants.wild_type, variants.names()) == (WT, ["A4G"])
    assert variants.notices == ["reference.csv: the wild type is 'target_seq' of v (line 3)"]
    Path("reference.csv").write_text("DMS_id,target_seq\nother,MKV\n")
    assert "data.wild_type=" in refused(scored("A4G"), wild_type=Path("reference.csv"))
    for wrong, place in ((table.replace("K2S", "K3S"), "v.csv:3"), (table.replace("K2S", "R2S"), "line 2, line 3")):
        assert place in refused(wrong, wild_type=Path("v.csv"))
    assert "data.wild_type=" in refused(scored("A4G"), wild_type=Path("v.csv"))


def every_site(shift: int, sequence: str = WT) -> list[str]:
    return [f"{letter}{place - shift}W" for place, letter in enumerate(sequence, 1)]


def test_a_mutation_that_does_not_fit() -> None:
    message = refused(scored("A4G", "A5G", "T3V:K9R", "Q57A", "M0K", "V2L"))
    assert "5 of 7 mutations" in message
    assert "line 3 A5G (the wild type has Y), line 4 K9R (the wild type has Q), line 5 Q57A (the wild" in message
    assert "line 3 M0K (the wild type has no such position)" in refused(scored("A4G", "M0K"))
    variants = read(scored("A1G:T0V", "Q53A"), offset=3)
    assert variants.names() == ["T3V:A4G", "Q56A"]
    assert "1 of 2 mutations shifted by +3 do not fit" in refused(scored("A4G", "A5G"), offset=3)


def test_an_offset_is_proposed() -> None:
    Path("wt.fasta").write_text(f">wt\n{WT}\n")
    # counted from residue 24; Q22, V32 and Q33 fit as numbered too
    cells = every_site(23)[23:]
    message = refused(scored(*cells), wild_type=Path("wt.fasta"))
    assert message.startswith("v.csv: 3 of 33 mutations fit wt.fasta as numbered, 33 fit when shifted by +23; set data")
    assert read(scored(*cells), offset=23).names()[:2] == ["E24W", "E25W"]
    assert "with offset=-2, 33 fit when shifted by +23; set data.offset=23" in refused(scored(*cells), offset=-2)
    assert "4 of 35 mutations fit the wild type as numbered, 35 fit" in refused(scored(*cells, cells[0], "Q22A"))
    wrong = scored(*cells[:20], "W21A", "W22A", "W23A", "W24A")
    for offset in (0, "auto"):
        assert "20 fit when shifted by +23; set data.offset=23" in refused(wrong, offset=offset)


def test_an_offset_is_found() -> None:
    cells = every_site(23)[23:]
    variants = read(scored(*cells), offset="auto")
    assert variants.names()[0] == "E24W"
    assert variants.notices == [
        "v.csv: 3 of 33 mutations fit the wild type as numbered, 33 fit when shifted by +23, which was done"
    ]
    nearly = [f"{letter}{place - 23}{to}" for place, letter in enumerate(WT, 1) for to in "GP" if letter not in "GP"]
    assert "1 of 103 mutations shifted by +23 do not fit" in refused(scored(*nearly, "W5A"), offset="auto")
    as_numbered = read(scored("A4G"), offset="auto")
    assert (as_numbered.names(), as_numbered.notices) == (["A4G"], [])


def test_few_sites_are_told_their_shift_and_not_shifted() -> None:
    # two sites: letters of any protein fit some shift by chance
    assert "do not fit" in refused(scored("F1W", "V2W"), offset="auto")
    assert read(scored("F1W", "V2W", "K3W", "S4W", "H5W"), offset="auto").names()[0] == "F14W"
    many = [f"F1{to}:K3{to}" for to in "ACDE"] + [f"V2{to}:S4{to}" for to in "ACDE"]
    for offset in ("auto", 0, -2):
        message = refused(scored(*many), offset=offset)
        assert "0 of 16 mutations" in message
        assert "16 fit when shifted by +13; set data.offset=13" in message
    assert read(scored(*many), offset=13).names()[0] == "F14A:K16A"


def test_a_repeat_fits_several_offsets() -> None:
    sequence = "MKTAYIAKQR" * 3
    assert read(scored(*every_site(0, sequence[:10])), wild_type=sequence, offset="auto").names()[0] == "M1W"
    shifted = scored(*every_site(-100, sequence[:10]))
    for offset in ("auto", 0):
        message = refused(shifted, wild_type=sequence, offset=offset)
        assert message.startswith("v.csv: 10 of 10 mutations do not fit the wild type with 30 residues")
        assert "--offset" not in message


def test_stop_codons_and_synonymous_changes() -> None:
    text = scored("A4G", "T3*", "K2S:A4*", "p.Ile6Ter", "Q9*")
    assert "a stop codon in 4 of 5 variants: line 3 'T3*', line 4 'K2S:A4*', line 5 'I6*', ...; " in refused(text)
    variants = read(text, unusable="drop")
    assert variants.notices == ["v.csv: left out 4 rows with a stop codon (line 3, line 4, line 5, ...)"]
    assert "Q3*" in refused(scored("Q3*"), unusable="drop")  # dropped or not, it must fit
    text = scored("A4A", "T3V", "K2K:I6L")
    assert "a synonymous change in 2 of 3 variants: line 2 'A4A', line 4 'K2K:I6L'; " in refused(text)
    dropped = read(text, unusable="drop")
    assert (dropped.names(), dropped.rows, len(dropped.notices)) == (["T3V"], [(1,)], 1)
    kept = read(text, keep_synonymous=True)
    assert (kept.names(), kept.sequences()[0]) == (["A4A", "T3V", "K2K:I6L"], WT)
    assert "no variant is left of 1 row" in refused(scored("A4A"), unusable="drop")


def test_missing_values() -> None:
    text = "mutant,a,b\nA4G,1,\nnonsense,,NA\nK2S,nan,3\nI6L,4,5\nT3V,-,\n"
    variants = read(text, targets=["a", "b"])
    assert variants.names() == ["A4G", "K2S", "I6L"]
    np.testing.assert_array_equal(variants.target_NT, [[1, np.nan], [np.nan, 3], [4, 5]])
    assert variants.rows == [(0,), (2,), (3,)]
    assert [notice.split("(")[1] for notice in variants.notices] == ["line 2, line 4)", "line 3, line 6)"]
    assert "no variant is left of 2 rows" in refused("mutant,score\nA4G,\nK2S,\n")


@pytest.mark.filterwarnings("error")
def test_replicates() -> None:
    text = "mutant,a,b\nA4G:T3V,1,10\nWT,5,6\nK2S,7,\nT3V;A4G,2,\nwt,7,8\np.[Thr3Val;Ala4Gly],6,\n"
    how: dict[str, object] = {"targets": ["a", "b"]}
    found = "2 variants in several rows: 'T3V:A4G' in line 2, line 5, line 7, 'WT' in line 3, line 6"
    assert found in refused(text, **how)
    mean = read(text, replicates="mean", **how)
    assert mean.names() == ["T3V:A4G", "WT", "K2S"]
    np.testing.assert_array_equal(mean.target_NT, [[3, 10], [6, 7], [7, np.nan]])
    assert mean.rows == [(0, 3, 5), (1, 4), (2,)]
    assert mean.notices[-1] == f"v.csv: averaged {found}"
    kept = read(text, replicates="keep", **how)
    assert kept.names() == ["T3V:A4G", "WT", "K2S", "T3V:A4G", "WT", "T3V:A4G"]
    assert kept.target_NT[:, 0].tolist() == [1, 5, 7, 2, 7, 6]
    assert kept.notices[-1] == f"v.csv: kept apart {found}"


def test_mutations_from_sequences() -> None:
    one, two = WT.replace("MKTA", "MKTG"), WT.replace("MKTA", "MVTA")[:-1] + "C"
    text = f"mutated_sequence,DMS_score\n{one},1\n{WT},2\n{two.lower()},3\n{one[:10]} {one[10:]}*,4\n"
    variants = read(text, replicates="mean")
    assert variants.names() == ["A4G", "WT", "K2V:Q56C"]
    assert variants.target_NT.tolist() == [[2.5], [2.0], [3.0]]
    assert variants.sequences() == [one, WT, two]
    assert read(f"Sequence,score\n{one},1\n").names() == ["A4G"]
    assert "offset shifts numbered" in refused(f"sequence,score\n{one},1\n", UsageError, offset=3)
    assert "may both be meant" in refused(f"sequence,mutated_sequence,score\n{one},{one},1\n")


def test_sequences_that_cannot_be_compared() -> None:
    for cell in ("MKT", f"MKTA-{WT[5:]}", f"MKTX{WT[4:]}", f"MKT?{WT[4:]}", f"MKT\u00e4{WT[4:]}", ""):
        assert "line 3 " in refused(f"sequence,score\n{WT},1\n{cell},2\n")
    text = f"sequence,score\n{WT},1\nMKT*{WT[4:]},2\n"
    assert "a stop codon in 1 of 2 variants: line 3 'A4*'" in refused(text)
    assert read(text, unusable="drop").names() == ["WT"]
    assert "line 2 'Q56*'" in refused(f"sequence,score\n{WT[:-1]}*,1\n")


GOOD = [f"{WT[n]}{n + 1}{letter}" for n in range(20) for letter in "CG"]


def mixed(*cells: str, good: int = 36, shift: int = 0) -> str:
    """A table of good cells, numbered from `shift` + 1, and then other cells."""
    return scored(*(f"{cell[0]}{int(cell[1:-1]) + shift}{cell[-1]}" for cell in GOOD[:good]), *cells)


def test_cells_that_name_no_substitution_are_left_out_and_named() -> None:
    found = read(mixed("K2del", "hello", "K2del", "A4fs"), unusable="drop")
    assert found.names() == GOOD[:36]
    assert "left out 4 rows whose 'mutant' names no substitutions: line 38 'K2del' is no" in found.notices[0]
    rows = [f"{WT[:n]}W{WT[n + 1 :]},{n}\n" for n in range(10)]
    found = read("".join(["sequence,score\n", *rows, f"{WT[:-1]},0\n"]), unusable="drop")
    assert found.names() == [f"{WT[n]}{n + 1}W" for n in range(10)]
    assert found.notices[0].startswith("v.csv: left out 1 row whose 'sequence' names no substitutions: line 12 ")


def test_another_residue_than_the_wild_type_has_is_left_out_and_named() -> None:
    found = read(mixed("A2G", "K2W:A3G", "K99A", "K2W"), unusable="drop", offset="auto")  # a good numbering stays
    assert found.names() == [*GOOD[:36], "K2W"]
    (notice,) = found.notices
    assert "line 39 A3G (the wild type has T), line 40 K99A (the wild type has no such position)" in notice


def test_more_than_a_tenth_is_an_error() -> None:
    for cell, what in (("K2del", "cells"), ("A2G", "mutations")):
        for good, bad in ((36, 4), (27, 3), (40, 1)):
            assert len(read(mixed(*[cell] * bad, good=good), unusable="drop")) == good
        for good, bad, unusable in ((35, 4, "drop"), (26, 3, "drop"), (40, 1, "error")):
            message = refused(mixed(*[cell] * bad, good=good), unusable=unusable)
            assert message.startswith(f"v.csv: {bad} of {good + bad} {what} ")
    # Rows are counted, not mutations.
    assert len(read(mixed("A1G:A2G:A3G", *GOOD[37:40]), unusable="drop")) == 39
    assert len(read(mixed("A1G:A2G:A3G", "A5G:A6G", "A9G:A10G", "C1G:C2G"), unusable="drop")) == 36


def test_the_shift_is_found_although_rows_do_not_fit() -> None:
    how: dict[str, object] = {"wild_type": WT[:40], "unusable": "drop"}
    found = read(mixed("A27G", "K2del", "W28A", shift=25, good=38), offset="auto", **how)
    assert (found.names(), found.offset) == (GOOD[:38], -25)
    assert found.notices[0].startswith("v.csv: left out 1 row whose 'mutant' names no substitutions: line 41 'K2del'")
    assert found.notices[1] == (
        "v.csv: 4 of 40 mutations fit the wild type as numbered, 38 fit when shifted by -25, which was done"
    )
    assert found.left_out == {
        38: "A27G (the wild type has K)",
        39: "'K2del' is no substitution",
        40: "W28A (the wild type has T)",
    }
    text = mixed(*["W28A"] * 5, shift=25)
    assert "36 fit when shifted by -25; set data.offset=-25" in refused(text, offset="auto", **how)
    # By hand, what misfits in too many rows is refused under the given shift too.
    assert "5 of 41 mutations shifted by -25 do not fit" in refused(text, offset=-25, **how)


def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = re.findall(r"```(?:python|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)[:2]
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == printed
