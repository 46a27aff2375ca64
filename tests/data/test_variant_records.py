"""The sets of a table of variants, notices, and the part of the protein that the model sees."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structure_texts

from esmshard.data.batching.loader import Examples
from esmshard.data.mutations import WildType, parse_variant
from esmshard.data.splits.recipe_splits import in_tokens, open_split
from esmshard.data.splits.variant_records import (
    VariantRecords,
    count_folds,
    divide,
    open_variants,
    shares_positions,
    table_facts,
    table_of,
    table_text,
    wild_type_places,
)
from esmshard.errors import InputError, UsageError
from esmshard.recipe.sections import Recipe
from esmshard.tasks.metrics import draws
from esmshard.vocab import decode

WT = "MKTAYIAKQRQISFVKSHFSRQLE"
SINGLES = [f"{WT[n]}{n + 1}{letter}" for n in range(24) for letter in "ACDG" if letter != WT[n]]
DOUBLES = [f"{WT[n]}{n + 1}W:{WT[n + 1]}{n + 2}W" for n in range(0, 22, 2)]
TRIPLES = ["M1V:A4V:L23V", "K2V:Y5V:E24V"]
NAMES = ["WT", *SINGLES, *DOUBLES, *TRIPLES]
SETS = ("train", "valid", "test")


class Table:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "v.csv"
        self.fasta = directory / "wt.fasta"
        self.fasta.write_text(f">wt\n{WT}\n")
        self.write(NAMES)

    def write(self, names: Sequence[str], values: Sequence[object] = (), **columns: Sequence[str]) -> None:
        """Write a row for each name. By default, the values are 1, 2, ..."""
        rows = [["mutant", "score", *columns]]
        for n, name in enumerate(names):
            value = values[n] if values else 1 + n
            rows.append([name, str(value), *(cells[n] for cells in columns.values())])
        self.path.write_text("\n".join(map(",".join, rows)) + "\n")

    def recipe(self, seed: int = 0, pool: str = "sites", **given: Any) -> Recipe:
        fold = {"fold": 0} if given.get("folds") else {}
        data = {"table": str(self.path), "wild_type": str(self.fasta), **fold, **given}
        fixed = {"model": {"name": "nano"}, "batch": {"sequences": 10}, "out": "run"}
        task = {"name": "variant", "pool": pool}
        return Recipe.model_validate({"task": task, "data": data, "train": {"seed": seed}, **fixed})

    def split(self, **given: Any) -> dict[str, Examples]:
        return {name: open_variants(self.recipe(**given).data, name, alone=False) for name in SETS}


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def names(split: Examples) -> list[str]:
    return [split.id(n) for n in range(len(split))]


def positions(split: Examples) -> set[int]:
    return {m.position for name in names(split) for m in parse_variant(name)}


@pytest.mark.parametrize("split", ["position", "contiguous", "modulo"])
def test_no_position_is_in_two_sets(table: Table, split: str) -> None:
    tested: list[str] = []
    rounds = [table.split(split=split, folds=4, fold=fold) for fold in range(4)]
    for found, following in zip(rounds, [*rounds[1:], rounds[0]], strict=True):
        assert names(found["valid"]) == names(following["test"])
        seen = [positions(found[name]) for name in SETS]
        assert all(seen)
        assert sorted(place for places in seen for place in places) == list(range(24)), "no position is in two sets"
        tested += names(found["test"])
    assert len(tested) == len(set(tested)), "each variant is tested on once"
    assert {"WT", *SINGLES} <= set(tested)
    left = set(NAMES) - set(tested)
    notice = found["train"].notices[-1]
    assert f"left out {len(left)} variants that change positions of several sets (" in notice
    assert left >= set(TRIPLES)
    assert left <= {*DOUBLES, *TRIPLES}
    assert len(left) < len(DOUBLES) + len(TRIPLES) or split == "modulo", "pairs within a fold stay"


def test_sets_are_the_same_for_every_seed(table: Table) -> None:
    for split in ("position", "random", "mutations"):
        once, again = (names(open_split(table.recipe(seed, split=split), "test", None)) for seed in (0, 7))
        assert once == again
        assert once
        assert split == "mutations" or once == names(table.split(split=split, folds=5)["test"]), "the first of five"


def test_split_mutations_tests_on_more_changes_than_it_learns_from(table: Table) -> None:
    found = {name: names(split) for name, split in table.split(split="mutations").items()}
    assert {*found["train"], *found["valid"]} == {"WT", *SINGLES}
    assert found["test"] == [*DOUBLES, *TRIPLES]
    assert names(table.split(split="mutations", train_max=2)["test"]) == TRIPLES


def test_split_given_follows_the_column(table: Table) -> None:
    table.write([*SINGLES[:5], "M1*"], set=["train", "valid", "test", "train", "", "held out"])
    found = table.split(split="given", unusable="drop")
    wanted = {"train": [SINGLES[0], SINGLES[3]], "valid": [SINGLES[1]], "test": [SINGLES[2]]}
    assert {name: names(split) for name, split in found.items()} == wanted
    assert f"{table.path}: left out 1 variant without a set ({SINGLES[4]})" in found["train"].notices


def test_folds_of_a_column(table: Table) -> None:
    cells = [("10", "2", "30")[n % 3] for n in range(len(SINGLES))]
    table.write([*SINGLES, "WT"], fold=[*cells, "NA"])
    for fold, tested in enumerate(["2", "10", "30"]):
        found = table.split(folds="fold", fold=fold)
        assert names(found["test"]) == [name for name, cell in zip(SINGLES, cells, strict=True) if cell == tested]
        assert names(found["valid"]) == names(table.split(folds="fold", fold=(fold + 1) % 3)["test"])
    assert found["train"].notices == [f"{table.path}: left out 1 variant without a value in 'fold' (WT)"]
    data = table.recipe(folds="fold", fold=None).data
    assert (data.split, count_folds(data), shares_positions(data)) == (None, 3, True)
    assert shares_positions(table.recipe(split="random").data)
    assert not shares_positions(table.recipe().data)
    table.write(SINGLES, fold=[str(int(name[1:-1]) % 4) for name in SINGLES])
    assert not shares_positions(data), "positions count, not the name of the column"
    with pytest.raises(UsageError, match=r"data\.fold: is 4"):
        table.split(folds="fold", fold=4)
    for column, problem in ((["1", "2", "3", "2"], "line 5"), (["1", "2", "1", "2"], "has 2 folds")):
        table.write([*SINGLES[:3], SINGLES[0]], fold=column)
        with pytest.raises(InputError, match=problem):
            divide(data)
    with pytest.raises(InputError, match="did you mean 'fold'"):
        divide(table.recipe(folds="folds").data)


def test_smaller_shares_are_parts_of_larger_ones(table: Table) -> None:
    whole = table.split(split="random")
    shares = [table.split(split="random", train_share=share) for share in (1e-6, 0.25, 0.5, 1.0)]
    kept = [set(names(split["train"])) for split in shares]
    assert kept[0] < kept[1] < kept[2] < kept[3] == set(names(whole["train"]))
    assert [len(k) for k in kept] == [1, *(round(share * len(kept[3])) for share in (0.25, 0.5)), len(whole["train"])]
    assert all(names(split[name]) == names(whole[name]) for split in shares for name in ("valid", "test"))


def test_a_library_of_few_sites_is_told_what_suits_it(table: Table) -> None:
    table.write([f"A4{a}:Y5{b}:K8{b}:S13{a}" for a in "CDEFGHI" for b in "LNPRTVW"])
    _, (notice,) = divide(table.recipe(split="random").data)
    assert "; data.transform=rank suits it, with task.pool=sites, or with task.context=variant for" in notice
    assert divide(table.recipe(split="random", transform="rank").data)[1] == []
    table.write([f"{WT[n]}{n + 1}{letter}" for n in range(8) for letter in "CDGW" if letter != WT[n]])
    assert divide(table.recipe(split="random").data)[1] == [], "single mutants of few sites are no library"


def test_records_are_made_from_the_wild_type(table: Table) -> None:
    test = table.split(split="mutations")["test"]
    n = names(test).index("M1V:A4V:L23V")
    one = test.get(n)
    assert decode(one.tokens) == "VKTVYIAKQRQISFVKSHFSRQVE"
    assert one.labels["target"].tolist() == [1 + NAMES.index(one.id)]
    assert decode(test.whole(n)) == decode(one.tokens)
    assert (test.length(n), int(test.tokens[n]), test.beside) == (24, 26, 26)
    blocks = test.blocks()
    assert blocks is not None
    sites = [frozenset(m.position for m in parse_variant(name)) for name in names(test)]
    same = [[a == b for b in sites] for a in sites]
    assert (blocks[:, None] == blocks).tolist() == same, "a block is a set of sites"


def test_a_target_at_its_floor_is_told_once(table: Table) -> None:
    """92% or 88% of 24 values lie in the worst tenth of the range, unless the other end is the worst."""
    for best, given, warned in (
        *((2, {}, True), (3, {}, False)),
        *((2, {"lower_is_better": ["score"]}, False), (2, {"transform": "log"}, False)),
    ):
        table.write(SINGLES[:24], [10.0] * best + [0.01 * 2 ** (n % 6) for n in range(24 - best)])
        notices = [notice for split in table.split(**given).values() for notice in split.notices]
        assert ["92% of the values of 'score'" in notice for notice in notices] == [True] * warned


def test_of_the_wild_type_alone_a_variant_takes_little_room(table: Table) -> None:
    train = open_split(table.recipe(pool="wild_type"), "train", None)
    assert set(train.tokens.tolist()) == {3}
    assert train.beside == 26
    assert in_tokens(table.recipe(pool="wild_type"), train).batch.global_tokens == 30
    packed = open_split(table.recipe(pool="sites"), "train", None)
    found = in_tokens(table.recipe(pool="sites"), packed).batch
    assert (found.global_tokens, found.sequences) == (260, None)


def test_resamples_keep_a_position_together() -> None:
    block_N = np.array([3, -1, 3, 7, 7, 7, *range(10, 18)])  # ten positions and the wild type
    seen = set()
    for draw in draws(14, block_N):
        counts = np.bincount(draw, minlength=14)
        assert counts[0] == counts[2]
        assert counts[3] == counts[4] == counts[5]
        assert counts[0] + counts[1] + counts[3] + counts[6:].sum() == 11, "as many blocks as there are"
        seen.add(tuple(counts.tolist()))
    assert len(seen) > 1900, "hardly any two are alike"


def test_replicates_are_averaged_by_default(table: Table) -> None:
    table.write([*SINGLES, SINGLES[0]], [*range(len(SINGLES)), 10])
    (split,) = (split for split in table.split(split="random").values() if SINGLES[0] in names(split))
    assert split.get(names(split).index(SINGLES[0])).labels["target"].tolist() == [5]
    apart = [names(split).count(SINGLES[0]) for split in table.split(split="random", replicates="keep").values()]
    assert sorted(apart) == [0, 0, 2], "never on both sides"


def test_the_digest_names_the_variants() -> None:
    def digest(*variants: str, wild_type: str = WT, first: int = 0) -> str:
        part = {"": WildType(wild_type, first=first)}
        return VariantRecords(Path("v"), part, [parse_variant(name) for name in variants]).digest

    others = [digest("T3A", "K2A"), digest("K2A"), digest("K2A", "T3C")]
    others += [digest("K2A", "T3A", wild_type=WT[:-1]), digest("K2A", "T3A", first=1)]
    assert digest("K2A", "T3A") == digest("K2A", "T3A")
    assert len({digest("K2A", "T3A"), *others}) == 6


def test_notices_stand_on_the_training_set_only(table: Table) -> None:
    table.write([*NAMES, "A4*", SINGLES[0]])
    found = table.split()
    said = " ".join(found["train"].notices)
    assert f"left out 1 row with a stop codon (line {len(NAMES) + 2})" in said
    assert f"averaged 1 variant in several rows: '{SINGLES[0]}'" in said
    assert "that change positions of several sets" in said
    assert found["valid"].notices == found["test"].notices == []


def test_how_a_table_was_read_and_divided(table: Table) -> None:
    shifted = [":".join(f"{m.wild}{m.position + 11}{m.mutant}" for m in parse_variant(name)) or "WT" for name in NAMES]
    table.write([*shifted, "A14*", "M11*", shifted[1], "K12A"], other=["", *"1" * (len(NAMES) + 3)])
    both = {"target": ["score", "other"], "mutant": "mutant"}
    facts = table_facts(table.recipe(**both).data)
    assert facts["left_out"] == [f"2 rows with a stop codon (line {len(NAMES) + 2}, line {len(NAMES) + 3})"]
    assert facts["readings"] == [{"file": "v.csv", "kind": "mutations", "column": "mutant", "offset": -10}]
    assert facts["wild_types"] == [{"name": "wt", "residues": 24, "chains": 1}]
    assert facts["changes"] == {"none": 1, "one": len(SINGLES), "several": 13}
    assert (facts["positions"], facts["variants_averaged"]) == (24, 2)
    average = (2 + len(NAMES) + 3) / 2  # of the rows of the first single mutant
    assert facts["values"]["score"] == {"lowest": 1, "highest": len(NAMES), "variants": len(NAMES)}
    assert table_of(table.recipe(**both).data).target_NT[1, 0] == average
    assert facts["values"]["other"]["variants"] == len(NAMES) - 1
    fold_N = divide(table.recipe(**both).data)[0]
    assert facts["variants_of_each"] == [int((fold_N == fold).sum()) for fold in range(5)]
    assert sum(facts["variants_of_each"]) + facts["variants_in_no_set"] == len(NAMES)
    lines = dict(line.split(maxsplit=1) for line in table_text(facts))
    assert {line[9] for line in table_text(facts)} == {" "}
    assert "-10" in lines["numbering"]
    assert "data.offset" not in lines["numbering"]
    assert "data.offset" in "\n".join(table_text(table_facts(table.recipe(**both, offset=-10).data)))
    changed = table_facts(table.recipe(**both, split="mutations").data)
    assert changed["variants_of_each"][2] == 13
    assert divide(table.recipe(**both).data)[0] is divide(table.recipe(**both, folds=5).data)[0], "computed once"


def test_the_logarithm_of_nothing_is_refused(table: Table) -> None:
    for value in (0, -1.5):
        table.write(SINGLES, [value, *range(1, len(SINGLES))])
        with pytest.raises(InputError, match=r"no logarithm \(line 2\)"):
            table.split(transform="log")
    with pytest.raises(UsageError, match="lower_is_better: kd"):
        table.split(lower_is_better=["kd"])


def test_a_window_holds_all_mutated_residues(table: Table) -> None:
    middle = [name for name in SINGLES if 8 <= int(name[1:-1]) <= 15]
    table.write(middle)
    found = table.split(long="window", max_length=10, folds=3)
    for one in found.values():
        for n, name in enumerate(names(one)):
            example = one.get(n)
            (mutation,) = parse_variant(name)
            assert decode(example.tokens) == WT[6 : mutation.position] + name[-1] + WT[mutation.position + 1 : 16]
    assert found["train"].labels.records.wild_types[""] == WildType(WT[6:16], first=6)  # type: ignore[union-attr]
    assert found["train"].labels.wild_types[""].residues == WT  # type: ignore[union-attr]
    exact = table.split(long="window", max_length=8, folds=3)["train"]
    assert exact.labels.records.wild_types[""] == WildType(WT[7:15], first=7)  # type: ignore[union-attr]
    whole = table.split(max_length=8, folds=3)["train"]
    assert len(whole.get(0).tokens) == 26, "without long=window all of it"

    table.write([name for name in SINGLES if 8 <= int(name[1:-1]) <= 16])
    with pytest.raises(InputError, match="the mutated residues 8 to 16 do not fit into a window"):
        table.split(long="window", max_length=8, folds=3)


def test_a_structure_gives_places_to_residues(tmp_path: Path) -> None:
    """A chain with a tag, one substitution and a missing residue lies on the wild type where most letters are equal."""
    sequence = f"GSHM{WT[:9]}A{WT[10:20]}"
    lines = structure_texts.chain("GGGG", "B") + structure_texts.chain(sequence, "A", missing=[6])
    seqres = {"A": structure_texts.three(sequence), "B": structure_texts.three("GGGG")}
    path = structure_texts.write(tmp_path / "x.pdb", structure_texts.pdb(lines, seqres=seqres))
    place_L3, sentence = wild_type_places(path, WT)
    expected_L3 = structure_texts.expected_cb(24, missing=[6])[4:]
    np.testing.assert_allclose(place_L3[:20], expected_L3, atol=0.01)
    assert np.isnan(place_L3[20:]).all()
    assert "x_A" in sentence
    assert "19 of 24" in sentence
    assert "1 residue differ" in sentence
    with pytest.raises(InputError, match=r"x\.pdb: no chain"):
        wild_type_places(path, WT[::-1])
