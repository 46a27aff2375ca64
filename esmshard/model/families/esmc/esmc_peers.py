"""The ESM-C of `transformers` with our weights, for `esmshard verify`."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from esmshard.model.families.esmc.esmc_config import EsmcConfig
from esmshard.model.families.esmc.esmc_layouts import pieces, transformers_config
from esmshard.model.families.peer import (
    AbsentError,
    ModelWeights,
    NamedSequence,
    Outputs,
    Peer,
    blocks,
    fill,
    outputs_of,
    version,
)


def transformers(found: ModelWeights, device: torch.device) -> Peer:
    """Make `EsmcForMaskedLM` and `EsmcTokenizer`. It has no contact regression, so contacts are not compared."""
    if find_spec("transformers") is None:
        raise AbsentError("not installed", "pip install 'esmshard[hf]'")
    try:
        from transformers import EsmcConfig as TheirConfig
        from transformers import EsmcForMaskedLM, EsmcTokenizer
    except Exception as error:  # A dependency is missing, or this version has no ESM-C, as before 5.16.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise AbsentError(f"cannot be imported: {first}", "pip install -U 'transformers>=5.16'") from None
    config = found.config
    assert isinstance(config, EsmcConfig)
    with torch.random.fork_rng(devices=[]):
        model: Any = EsmcForMaskedLM(TheirConfig(**transformers_config(config)))
    fill(model, found, lambda key: tuple(piece.name for piece in pieces(key, config)), lacks=("contact_head.",))
    model, tokenizer = model.eval().to(device), EsmcTokenizer()

    def run(records: Sequence[NamedSequence]) -> Iterator[tuple[int, Outputs]]:
        for members in blocks([len(r.sequence) + 2 for r in records]):
            block = tokenizer([records[n].sequence for n in members], padding=True, return_tensors="pt")
            tokens = block["input_ids"]
            # Without the mask, this class attends to padding.
            said = model(
                tokens.to(device), attention_mask=block["attention_mask"].to(device), output_hidden_states=True
            )
            for row, n in enumerate(members):
                yield n, outputs_of(row, len(records[n].sequence), tokens, said.hidden_states, said.logits, None)

    return Peer(f"transformers {version('transformers')}", run)
