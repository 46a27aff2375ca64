"""DNA and RNA are not read as proteins, and proteins are not taken for them."""

from pathlib import Path

import numpy as np
import pytest

from esmshard.data.variants import protein_of
from esmshard.errors import InputError
from esmshard.io import store as ingestion
from esmshard.io.paths import shipped
from esmshard.io.sequences import read_fasta
from esmshard.io.store import cached, ingest
from esmshard.io.symbols import Rules, nucleotides
from esmshard.vocab import encode


def found(*sequences: str) -> bool:
    tokens = [encode(sequence.upper())[1:-1] for sequence in sequences]
    return nucleotides(tokens, f"{len(tokens)} records") is not None


def random(letters: str, length: int, shares: list[float] | None = None) -> str:
    return "".join(np.random.default_rng(0).choice(list(letters), length, p=shares))


def test_what_looks_like_nucleotides() -> None:
    for sequences in (
        [random("ACGT", 100)],
        [random("ACGU", 100)],
        [random("acgt", 25)] * 4,
        [random("ACGT", 50) + "N" * 200],  # masked repeats
        [random("ACGT", 1000, [0.4, 0.1, 0.1, 0.4])],  # rich in A and T, as Plasmodium
        [random("ACGT", 960) + random("RYKM", 40)],  # ambiguous bases
    ):
        assert found(*sequences), sequences
    for sequences in (
        [random("ACGT", 99)],  # too few letters to tell
        [random("ACGT", 900) + random("RYKM", 100)],
        ["ACGTGGTAC" * 5, "MKTAYIAKQRQISFVKSHFSRQLE" * 3],
        ["GAGAGS" * 100],  # silk
        ["AATAATAAT" * 30],  # an antifreeze protein: no C
        [random("AGTN", 500)],
        [random("ACGTN", 500) + random("DEFHIKLMPQRSVWY", 500)],
    ):
        assert not found(*sequences), sequences
    files = sorted(shipped("data").glob("*/*.fasta"))
    assert len(files) > 3
    for file in files:
        assert not any(found(record.sequence) for record in read_fasta(file)), file


def test_every_reader_refuses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))
    path = Path("x.fasta")
    path.write_text(f">a\n{random('ACGT', 90)}\n>b\n{random('ACGT', 30)}\n")
    for read in (lambda: ingest([path], Path("out")), lambda: cached(path)):  # `finetune` and `evaluate` use the cache
        with pytest.raises(InputError, match=r"x\.fasta: .* 2 records of DNA or RNA, .*--on-nucleotides keep"):
            read()
    assert [left.name for left in Path().iterdir() if left.name != "cache"] == ["x.fasta"]
    store = ingest([path], Path("x.store"), Rules(on_nucleotides="keep"))
    assert len(cached(store.path)) == 2
    path.write_text(f">bla\n{random('ACGT', 861)}\n")
    with pytest.raises(InputError, match=r"x\.fasta: .* 1 record of DNA or RNA, .*; give the protein"):
        protein_of(path)
    monkeypatch.setattr(ingestion, "_SAMPLE", 5)  # of many records a few, evenly spread, are looked at
    path.write_text("".join(f">r{k}\n{'MKV' * 40 if k % 5 else random('ACGT', 90)}\n" for k in range(21)))
    with pytest.raises(InputError, match="21 records of DNA"):
        cached(path)
