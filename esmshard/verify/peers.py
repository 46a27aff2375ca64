"""fair-esm's and `transformers`' models with our weights, for the comparisons of `esmshard.verify.certificate`.

Tensors are copied one by one into the other library's class. Tokens, padding, forward pass and contacts are those of
the other library. No other file imports either library.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from esmshard.data.fasta.fasta_reader import Record
from esmshard.model.config import EsmConfig
from esmshard.model.weights.key_maps import fair_esm_settings, from_transformers, transformers_config
from esmshard.model.weights.open_weights import Weights, shapes
from esmshard.vocab import TOKENS

BLOCK = 1024
"""The most tokens of a padded batch, with padding; a longer sequence is a batch of its own."""
MAP_BYTES = 8 << 30
"""The bytes of attention maps above which a peer computes no contacts, since it has maps of all layers at once."""
MAP_COPIES = 6
"""The copies of all maps that exist at the same time: computed, stacked, symmetrized, corrected. Measured: 6.1 in
fair-esm, 5.1 in `transformers`.
"""


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model for one sequence of L residues, fp32, on the CPU."""

    tokens: list[int]
    """The tokens of the sequence, L + 2."""
    layers: list[torch.Tensor]
    """The embeddings of each layer, [L + 2, D]; layer 0 is the input embedding."""
    means: list[torch.Tensor]
    """The mean over residues of each layer, [D]."""
    logits: torch.Tensor
    """The logits, [L + 2, 33]."""
    contacts: torch.Tensor | None
    """The contact probabilities, [L, L]; None if the maps would take more than MAP_BYTES."""


class AbsentError(Exception):
    """No comparison with a peer is possible. The error has the reason and the fix."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason, fix)
        self.reason, self.fix = reason, fix


@dataclass(frozen=True)
class Peer:
    """Another library's model with our weights."""

    name: str
    """The name of the library, with its version."""
    run: Callable[[Sequence[Record]], Iterator[tuple[int, Outputs]]]
    """A function that yields the number and the outputs of each record, each record once, in any order."""


def fair_esm(found: Weights, device: torch.device) -> Peer:
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
        from esm.model.esm2 import ESM2
    except Exception:  # A half-overwritten package may raise any exception.
        raise clash from None
    config, alphabet = found.config, Alphabet.from_architecture("ESM-1b")
    with torch.random.fork_rng(devices=[]):
        if config.rotary:
            model = ESM2(config.n_layers, config.dim, config.n_heads, alphabet, config.token_dropout)
        else:
            args = fair_esm_settings(config)["args"]
            settings = {key.removeprefix("encoder_"): value for key, value in vars(args).items()}
            vars(args).update(settings, emb_layer_norm_before=config.emb_layer_norm_before)
            model = ProteinBertModel(args, alphabet)
    _fill(model, found, lambda name: (name,))
    model = model.eval().to(device)
    layers = range(config.n_layers + 1)

    def run(records: Sequence[Record]) -> Iterator[tuple[int, Outputs]]:
        data = FastaBatchedDataset([r.id for r in records], [r.sequence for r in records])
        convert = alphabet.get_batch_converter()
        for members in data.get_batch_indices(BLOCK, extra_toks_per_seq=1):
            _, strings, tokens = convert([data[n] for n in members])
            contacts = maps_fit(config, tokens)
            said = model(tokens.to(device), repr_layers=list(layers), return_contacts=contacts)
            hidden = [said["representations"][layer] for layer in layers]
            maps = said["contacts"] if contacts else None
            for row, (n, text) in enumerate(zip(members, strings, strict=True)):
                yield n, _outputs(row, len(text), tokens, hidden, said["logits"], maps)

    return Peer(f"fair-esm {version('fair-esm') or 'of unknown version'}", run)


def transformers(found: Weights, device: torch.device) -> Peer:
    """Make `EsmForMaskedLM` with eager attention, which its contacts need, and `EsmTokenizer`."""
    if find_spec("transformers") is None:
        raise AbsentError("not installed", "pip install 'esmshard[hf]'")
    try:
        from transformers import EsmConfig as TheirConfig
        from transformers import EsmForMaskedLM, EsmTokenizer
    except Exception as error:  # A dependency is missing, or this version does not fit the torch here.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise AbsentError(f"cannot be imported: {first}", "pip install -U 'esmshard[hf]'") from None
    config = found.config
    with torch.random.fork_rng(devices=[]):
        model: Any = EsmForMaskedLM(TheirConfig(**transformers_config(config), attn_implementation="eager"))
    _fill(model, found, lambda key: from_transformers(key, config))
    model = model.eval().to(device)
    with TemporaryDirectory(prefix="esmshard-verify-") as scratch:
        (Path(scratch) / "vocab.txt").write_text("\n".join(TOKENS), encoding="utf-8")
        tokenizer = EsmTokenizer(str(Path(scratch) / "vocab.txt"))

    def run(records: Sequence[Record]) -> Iterator[tuple[int, Outputs]]:
        for members in _blocks([len(r.sequence) + 2 for r in records]):
            found = tokenizer([records[n].sequence for n in members], padding=True, return_tensors="pt")
            tokens, mask = found["input_ids"], found["attention_mask"]
            given = {"attention_mask": mask.to(device)}
            said = model(tokens.to(device), **given, output_hidden_states=True)
            maps = model.predict_contacts(tokens.to(device), **given) if maps_fit(config, tokens) else None
            for row, n in enumerate(members):
                yield n, _outputs(row, len(records[n].sequence), tokens, said.hidden_states, said.logits, maps)

    return Peer(f"transformers {version('transformers')}", run)


MakePeer = Callable[[Weights, torch.device], Peer]
"""A function that makes a peer, or raises `AbsentError` if no comparison with it is possible."""
PEERS: dict[str, MakePeer] = {"fair-esm": fair_esm, "transformers": transformers}


def maps_fit(config: EsmConfig, tokens_BT: torch.Tensor) -> bool:
    """Return whether a peer computes the contacts of this block. The tokens include padding."""
    rows, longest = tokens_BT.shape
    return 4 * MAP_COPIES * config.n_layers * config.n_heads * rows * longest**2 <= MAP_BYTES


def version(distribution: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _fill(module: nn.Module, found: Weights, ours: Callable[[str], tuple[str, ...]]) -> None:
    """Copy every tensor into a module of another library; `ours` returns our names of each of its tensors.

    Parameters and buffers are used instead of the state_dict, which lacks the rotary table in some versions of
    `transformers`.
    """
    wanted = shapes(found.config).keys()
    filled: set[str] = set()
    with torch.no_grad():
        for key, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
            names = ours(key)
            for name in names:
                if name != names[0] and not torch.equal(found[name], found[names[0]]):
                    raise AbsentError(f"holds one {key} where these weights have several", "this cannot be fixed")
            if names:
                tensor.copy_(found[names[0]])
            filled.update(names)
    if filled != wanted:
        raise AbsentError(f"has other tensors ({', '.join(sorted(filled ^ wanted)[:3])})", "install another version")


def _blocks(tokens: Sequence[int]) -> Iterator[list[int]]:
    """Yield places of sequences, shortest first, in blocks of at most BLOCK tokens with padding. A longer sequence is
    alone.
    """
    group: list[int] = []
    for n in sorted(range(len(tokens)), key=lambda n: tokens[n]):
        if group and tokens[n] * (len(group) + 1) > BLOCK:
            yield group
            group = []
        group.append(n)
    yield group


def _outputs(
    row: int,
    length: int,
    tokens_BT: torch.Tensor,
    layers: Sequence[torch.Tensor],
    logits: torch.Tensor,
    contacts: torch.Tensor | None,
) -> Outputs:
    """Return one row of a padded batch, without the padding."""
    own = [x[row, : length + 2] for x in layers]
    return Outputs(
        tokens_BT[row, : length + 2].tolist(),
        [x.cpu() for x in own],
        [x[1 : length + 1].mean(0).cpu() for x in own],
        logits[row, : length + 2].cpu(),
        None if contacts is None else contacts[row, :length, :length].cpu(),
    )
