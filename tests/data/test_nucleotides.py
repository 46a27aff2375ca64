"""DNA and RNA are not read as proteins, and proteins are not taken for them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from esmshard.data.variants import protein_of
from esmshard.errors import InputError
from esmshard.io import symbols
from esmshard.io.paths import shipped
from esmshard.io.sequences import read_fasta
from esmshard.io.store import TokenStore, cached, ingest
from esmshard.io.symbols import Rules
from esmshard.vocab import encode


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))


def found(*sequences: str) -> bool:
    tokens = [encode(one.upper())[1:-1] for one in sequences]
    return symbols.nucleotides(tokens, f"{len(tokens)} records") is not None


def random(letters: str, length: int, shares: list[float] | None = None) -> str:
    return "".join(np.random.default_rng(0).choice(list(letters), length, p=shares))


@pytest.mark.parametrize(
    ("sequences", "is_found"),
    [
        ([random("ACGT", 100)], True),
        ([random("ACGU", 100)], True),
        ([random("acgt", 25)] * 4, True),
        ([random("ACGT", 99)], False),  # too few letters to tell
        ([random("ACGT", 50) + "N" * 200], True),  # masked repeats
        ([random("ACGT", 1000, [0.4, 0.1, 0.1, 0.4])], True),  # rich in A and T, as Plasmodium
        ([random("ACGT", 960) + random("RYKM", 40)], True),  # ambiguous bases
        ([random("ACGT", 900) + random("RYKM", 100)], False),
        (["ACGTGGTAC" * 5, "MKTAYIAKQRQISFVKSHFSRQLE" * 3], False),
        (["GAGAGS" * 100], False),  # silk
        (["AATAATAAT" * 30], False),  # an antifreeze protein: no C
        ([random("AGTN", 500)], False),
        ([random("ACGTN", 500) + random("DEFHIKLMPQRSVWY", 500)], False),
    ],
)
def test_what_looks_like_nucleotides(sequences: list[str], is_found: bool) -> None:
    assert found(*sequences) == is_found


def test_no_protein_of_the_samples_looks_like_nucleotides() -> None:
    files = sorted(shipped("data").glob("*/*.fasta"))
    assert len(files) > 3
    for file in files:
        records = list(read_fasta(file))
        assert not any(found(record.sequence) for record in records), file


DNA = f">a\n{random('ACGT', 90)}\n>b\n{random('ACGT', 30)}\n"
SAYS = (
    r"x\.fasta: 2 records of DNA or RNA, as it seems \(100% of the letters are A, C, G, T, U or N\), where proteins "
    r"are expected; translate them, or type `esmshard ingest FILE -o NAME\.store --on-nucleotides keep`"
)


@pytest.mark.parametrize(
    "read",
    [
        lambda path: ingest([path], Path("out")),
        cached,  # as finetune and evaluate do
        lambda path: ingest([path], Path("out"), Rules(linker=25)),  # as embed does
    ],
)
def test_every_reader_refuses_them(read: Callable[[Path], TokenStore]) -> None:
    path = Path("x.fasta")
    path.write_text(DNA)
    with pytest.raises(InputError, match=SAYS):
        read(path)
    assert [left.name for left in Path().iterdir() if left.name != "cache"] == ["x.fasta"]
    store = ingest([path], Path("x.store"), Rules(on_nucleotides="keep"))
    assert len(read(store.path) if read is cached else store) == 2


def test_the_gene_of_a_wild_type_is_not_taken_for_it() -> None:
    Path("wt.fasta").write_text(f">bla\n{random('ACGT', 861)}\n")
    with pytest.raises(InputError, match=r"wt\.fasta: 1 record of DNA or RNA, .*; give the protein that it codes for"):
        protein_of(Path("wt.fasta"))


def test_of_many_records_some_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols, "LOOKED_AT", 5)
    assert symbols.some_of(21) == [0, 5, 10, 15, 20]
    assert symbols.some_of(3) == [0, 1, 2]
