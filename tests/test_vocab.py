"""The 33 tokens, compared with fair-esm's tokens."""

import esm
import pytest
from hypothesis import given, settings, strategies

from esmshard import vocab
from esmshard.vocab import RESIDUES, TOKENS, decode, encode, encode_residues


def test_the_order_is_that_of_fair_esm() -> None:
    alphabet = esm.data.Alphabet.from_architecture("ESM-1b")
    assert alphabet.all_toks == list(TOKENS)
    special = (alphabet.cls_idx, alphabet.padding_idx, alphabet.eos_idx, alphabet.unk_idx, alphabet.mask_idx)
    assert special == (vocab.CLS, vocab.PAD, vocab.EOS, vocab.UNK, vocab.MASK)

    assert sorted(RESIDUES) == sorted("LAGVSERTIDPKQNFYMHWCXBUZO")
    sequence = RESIDUES + vocab.GAPS
    assert alphabet.get_batch_converter()([("a", sequence)])[2][0].tolist() == encode(sequence).tolist()
    assert encode("MKTXBUZO.-").tolist() == [0, 20, 15, 11, 24, 25, 26, 27, 28, 29, 30, 2]
    assert encode("").tolist() == [0, 2]
    assert vocab.ALPHABET_HASH == "0b82cc0a7c7cf9e5", "which names the numbering in files"


@given(strategies.characters(exclude_characters=RESIDUES + vocab.GAPS + ":"))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_another_letter_is_named_with_its_position(letter: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        encode(f"MK{letter}T{letter}")
    assert str(error.value).startswith(f"'{letter}' at position 3 ")


@given(strategies.text(RESIDUES + vocab.GAPS, min_size=1))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_decoding_gives_the_sequence_back(sequence: str) -> None:
    assert decode(encode(sequence)) == decode(list(encode_residues(sequence))) == sequence
    assert decode([0, 20, 32, 3, 15, 2, 1, 1]) == "M<mask><unk>K", "without frame, with other special tokens"


def test_chains_are_divided_by_as_many_separators_as_the_linker_has_residues() -> None:
    tokens = encode("MK:T:G", linker=3)
    assert tokens.tolist() == [0, 20, 15, 31, 31, 31, 11, 31, 31, 31, 6, 2]
    assert encode_residues("M:K") == bytes([20, *[31] * 25, 15])
    assert decode(tokens) == decode(tokens.tolist()) == "MK:T:G"
    assert vocab.chain_spans(tokens) == [(1, 3), (6, 7), (10, 11)]
    assert vocab.chain_spans(tokens[1:-1]) == [(0, 2), (5, 6), (9, 10)]
    assert vocab.chain_spans(encode("MKT")) == [(1, 4)]
    assert vocab.is_residue(tokens).tolist() == [token not in (0, 2, 31) for token in tokens]
