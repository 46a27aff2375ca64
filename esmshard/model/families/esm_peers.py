"""The model of `transformers` that it calls `esm` with our weights, for `esmshard verify`."""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from esmshard.model.families.esm_layouts import from_transformers, transformers_config, write_tokenizer
from esmshard.model.families.esm_shapes import EsmShape
from esmshard.model.families.peer import (
    AbsentError,
    ModelWeights,
    NamedSequence,
    Outputs,
    Peer,
    blocks,
    fill,
    maps_fit,
    outputs_of,
    version,
)


def transformers(found: ModelWeights, device: torch.device, text: Callable[[str], str] = str) -> Peer:
    """Make `EsmForMaskedLM` with eager attention, which its contacts need, and `EsmTokenizer`.

    `text` returns the text of a sequence in the vocabulary of the family, whose tokens and logits come out.
    """
    if find_spec("transformers") is None:
        raise AbsentError("not installed", "pip install 'esmshard[hf]'")
    try:
        from transformers import EsmConfig as TheirConfig
        from transformers import EsmForMaskedLM, EsmTokenizer
    except Exception as error:  # A dependency is missing, or this version does not fit the torch here.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise AbsentError(f"cannot be imported: {first}", "pip install -U 'esmshard[hf]'") from None
    config = found.config
    assert isinstance(config, EsmShape)
    with torch.random.fork_rng(devices=[]):
        model: Any = EsmForMaskedLM(TheirConfig(**transformers_config(config), attn_implementation="eager"))
    fill(model, found, lambda key: tuple(piece.name for piece in from_transformers(key, config)))
    model = model.eval().to(device)
    with TemporaryDirectory(prefix="esmshard-verify-") as scratch:
        write_tokenizer(config.vocabulary, Path(scratch))
        tokenizer = EsmTokenizer(str(Path(scratch) / "vocab.txt"))

    def run(records: Sequence[NamedSequence]) -> Iterator[tuple[int, Outputs]]:
        for members in blocks([len(r.sequence) + 2 for r in records]):
            found = tokenizer([text(records[n].sequence) for n in members], padding=True, return_tensors="pt")
            tokens, mask = found["input_ids"], found["attention_mask"]
            given = {"attention_mask": mask.to(device)}
            said = model(tokens.to(device), **given, output_hidden_states=True)
            maps = model.predict_contacts(tokens.to(device), **given) if maps_fit(config, tokens) else None
            for row, n in enumerate(members):
                yield n, outputs_of(row, len(records[n].sequence), tokens, said.hidden_states, said.logits, maps)

    return Peer(f"transformers {version('transformers')}", run)
