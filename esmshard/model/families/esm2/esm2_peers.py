"""fair-esm's models of the family ESM-2 with our weights, for `esmshard verify`."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import torch

from esmshard.model.families.esm2.esm2_config import EsmConfig
from esmshard.model.families.esm2.esm2_layouts import fair_esm_settings
from esmshard.model.families.peer import (
    BLOCK,
    AbsentError,
    ModelWeights,
    NamedSequence,
    Outputs,
    Peer,
    fill,
    maps_fit,
    outputs_of,
    version,
)


def fair_esm(found: ModelWeights, device: torch.device) -> Peer:
    """Make fair-esm's `ESM2`, or `ProteinBertModel` for learned positions, with the batches of its
    `scripts/extract.py`.
    """
    clash = AbsentError(
        "the package `esm` here is not fair-esm's",
        "PyPI's esm puts its own in the same place; pip uninstall esm fair-esm, then pip install fair-esm==2.0.0",
    )
    if find_spec("esm") is None:
        raise AbsentError("not installed", "pip install fair-esm==2.0.0")
    if version("esm") is not None:
        raise clash
    try:
        from esm.data import Alphabet, FastaBatchedDataset
        from esm.model.esm1 import ProteinBertModel
        from esm.model.esm2 import ESM2 as TheirESM2
    except Exception:  # A half-overwritten package may raise any exception.
        raise clash from None
    config, alphabet = _config(found), Alphabet.from_architecture("ESM-1b")
    with torch.random.fork_rng(devices=[]):
        if config.rotary:
            model = TheirESM2(config.n_layers, config.dim, config.n_heads, alphabet, config.token_dropout)
        else:
            args = fair_esm_settings(config)["args"]
            settings = {key.removeprefix("encoder_"): value for key, value in vars(args).items()}
            vars(args).update(settings, emb_layer_norm_before=config.emb_layer_norm_before)
            model = ProteinBertModel(args, alphabet)
    fill(model, found, lambda name: (name,))
    model = model.eval().to(device)
    layers = range(config.n_layers + 1)

    def run(records: Sequence[NamedSequence]) -> Iterator[tuple[int, Outputs]]:
        data = FastaBatchedDataset([r.id for r in records], [r.sequence for r in records])
        convert = alphabet.get_batch_converter()
        for members in data.get_batch_indices(BLOCK, extra_toks_per_seq=1):
            _, strings, tokens = convert([data[n] for n in members])
            contacts = maps_fit(config, tokens)
            said = model(tokens.to(device), repr_layers=list(layers), return_contacts=contacts)
            hidden = [said["representations"][layer] for layer in layers]
            maps = said["contacts"] if contacts else None
            for row, (n, text) in enumerate(zip(members, strings, strict=True)):
                yield n, outputs_of(row, len(text), tokens, hidden, said["logits"], maps)

    return Peer(f"fair-esm {version('fair-esm') or 'of unknown version'}", run)


def _config(found: ModelWeights) -> EsmConfig:
    assert isinstance(found.config, EsmConfig)
    return found.config
