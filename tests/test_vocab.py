"""The 33 tokens, written out by hand and compared with fair-esm's."""

import random

import esm
import pytest

from esmshard import vocab
from esmshard.vocab import RESIDUES, TOKENS, decode, encode, encode_residues

SPECIAL = {"<cls>": 0, "<pad>": 1, "<eos>": 2, "<unk>": 3, "<null_1>": 31, "<mask>": 32}
STANDARD = {
    "L": 4,
    "A": 5,
    "G": 6,
    "V": 7,
    "S": 8,
    "E": 9,
    "R": 10,
    "T": 11,
    "I": 12,
    "D": 13,
    "P": 14,
    "K": 15,
    "Q": 16,
    "N": 17,
    "F": 18,
    "Y": 19,
    "M": 20,
    "H": 21,
    "W": 22,
    "C": 23,
}
RARE = {"X": 24, "B": 25, "U": 26, "Z": 27, "O": 28}
GAPS = {".": 29, "-": 30}
TABLE = {**SPECIAL, **STANDARD, **RARE, **GAPS}


def test_every_token_has_its_number() -> None:
    assert {token: number for number, token in enumerate(TOKENS)} == TABLE
    assert len(TOKENS) == vocab.VOCAB_SIZE == 33
    assert (vocab.CLS, vocab.PAD, vocab.EOS, vocab.UNK, vocab.MASK) == (0, 1, 2, 3, 32)


def test_the_order_is_that_of_fair_esm() -> None:
    alphabet = esm.data.Alphabet.from_architecture("ESM-1b")
    assert alphabet.all_toks == list(TOKENS)
    special = (alphabet.cls_idx, alphabet.padding_idx, alphabet.eos_idx, alphabet.unk_idx, alphabet.mask_idx)
    assert special == (vocab.CLS, vocab.PAD, vocab.EOS, vocab.UNK, vocab.MASK)


def test_sequences_are_encoded_as_by_fair_esm() -> None:
    convert = esm.data.Alphabet.from_architecture("ESM-1b").get_batch_converter()
    sequence = "".join(TABLE.keys() - SPECIAL.keys())
    assert len(sequence) == 27
    assert convert([("a", sequence)])[2][0].tolist() == encode(sequence).tolist()


def test_residues_are_the_twenty_and_the_rare_five_but_no_gap() -> None:
    assert sorted(vocab.STANDARD) == sorted(STANDARD)
    assert set(vocab.RARE) == set(RARE)
    assert set(vocab.GAPS) == set(GAPS)
    assert sorted(RESIDUES) == sorted([*STANDARD, *RARE])


@pytest.mark.parametrize(("letter", "number"), [*STANDARD.items(), *RARE.items(), *GAPS.items()])
def test_a_letter_becomes_its_token_between_cls_and_eos(letter: str, number: int) -> None:
    tokens = encode(letter)
    assert tokens.tolist() == [0, number, 2]
    assert tokens.dtype == "uint8"
    assert encode_residues(letter * 2) == bytes([number, number])


def test_a_sequence_by_hand() -> None:
    assert encode("MKTXBUZO").tolist() == [0, 20, 15, 11, 24, 25, 26, 27, 28, 2]
    assert encode("").tolist() == [0, 2]


@pytest.mark.parametrize("letter", ["a", "J", "*", "1", " ", "\n", "?", "<", "\xe9", "\u0394", "\U0001f600"])
def test_another_letter_is_named_with_its_position(letter: str) -> None:
    with pytest.raises(ValueError, match="is not a residue") as error:
        encode(f"MK{letter}T{letter}")
    assert str(error.value).startswith(f"'{letter}' at position 3 ")


def test_decoding_gives_the_sequence_back() -> None:
    letters = random.Random(0)
    for length in (1, 25, 1000):
        sequence = "".join(letters.choices(RESIDUES + vocab.GAPS, k=length))
        assert decode(encode(sequence)) == sequence
        assert decode(list(encode_residues(sequence))) == sequence


def test_decoding_drops_the_frame_and_spells_other_special_tokens() -> None:
    assert decode([0, 20, 32, 3, 15, 2, 1, 1]) == "M<mask><unk>K"


def test_chains_are_divided_by_as_many_separators_as_the_linker_has_residues() -> None:
    tokens = encode("MK:T:G", linker=3)
    assert tokens.tolist() == [0, 20, 15, 31, 31, 31, 11, 31, 31, 31, 6, 2]
    assert encode_residues("M:K") == bytes([20, *[31] * 25, 15])
    assert decode(tokens) == decode(tokens.tolist()) == "MK:T:G"
    assert vocab.chain_spans(tokens) == [(1, 3), (6, 7), (10, 11)]
    assert vocab.chain_spans(tokens[1:-1]) == [(0, 2), (5, 6), (9, 10)]
    assert vocab.chain_spans(encode("MKT")) == [(1, 4)]
    assert vocab.is_residue(tokens).tolist() == [token not in (0, 2, 31) for token in tokens]


def test_the_hash_that_names_the_numbering_in_files_stays() -> None:
    assert vocab.ALPHABET_HASH == "0b82cc0a7c7cf9e5"
