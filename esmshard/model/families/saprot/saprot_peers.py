"""The SaProt of `transformers` with our weights, for `esmshard verify`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from esmshard.model.families import esm_peers
from esmshard.model.families.peer import ModelWeights, NamedSequence, Outputs, Peer
from esmshard.model.families.saprot.saprot_config import UNKNOWN, VOCABULARY
from esmshard.model.families.saprot.saprot_model import logits_of_tokens
from esmshard.vocab import STANDARD, encode


def transformers(found: ModelWeights, device: torch.device) -> Peer:
    """Make `EsmForMaskedLM` and `EsmTokenizer`. No structure is known. Logits are summed over structure letters."""
    theirs = esm_peers.transformers(found, device, lambda sequence: "".join(_pairs(sequence)))

    def run(records: Sequence[NamedSequence]) -> Iterator[tuple[int, Outputs]]:
        for n, outputs in theirs.run(records):
            sequence = records[n].sequence
            expected = [VOCABULARY.index(token) for token in ("<cls>", *_pairs(sequence), "<eos>")]
            tokens = encode(sequence).tolist() if outputs.tokens == expected else outputs.tokens
            yield n, replace(outputs, tokens=tokens, logits=logits_of_tokens(outputs.logits))

    return Peer(theirs.name, run)


def _pairs(sequence: str) -> list[str]:
    return [(letter if letter in STANDARD else UNKNOWN) + UNKNOWN for letter in sequence]
