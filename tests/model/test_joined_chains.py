"""Several chains in one sequence: every family reads the linker as glycines, or as its own token of a chain break."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from outputs import everything, perturbed, smallest

from esmshard.batch import pack
from esmshard.model import weights
from esmshard.model.config import ModelConfig
from esmshard.model.export import write_transformers
from esmshard.model.families.esm2 import EsmConfig
from esmshard.model.families.esmc import EsmcConfig
from esmshard.model.families.family_registry import FAMILIES, build, recorded_config, transformers_config
from esmshard.model.trunk import as_read
from esmshard.vocab import Chains, encode, read_chains

TINY = EsmConfig(n_layers=2, dim=32, n_heads=4)
A, B, C = "MKTAYIAKQR", "GQISFVKSH", "MLW"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_linker_is_read_as_glycines_or_as_the_chain_break_of_models_that_have_it(name: str) -> None:
    config = smallest(FAMILIES[name])
    model = perturbed(config)
    joined = pack([encode(f"{A}:{B}:{C}", linker=7), encode(B)])
    plain = pack([encode(A + "G" * 7 + B + "G" * 7 + C), encode(B)])
    for ours, theirs in zip(everything(model, joined), everything(model, plain), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert (joined.tokens_T == 31).sum() == 14, "heads and losses see where the linkers are"
    if not config.chain_break:
        with pytest.raises(ValueError, match="linker:break"):
            replace(config, chains=Chains("break"))
        return
    joined = pack([encode(f"{A}:{B}", linker=1)])
    assert as_read(joined, Chains("break")).tokens_T.tolist() == [*encode(A)[:-1], 31, *encode(B)[1:]]
    breaks = perturbed(replace(config, chains=Chains("break")))
    assert (everything(breaks, joined)[-2] - everything(model, joined)[-2]).abs().max() > 1e-3


def test_a_gap_moves_the_positions_of_every_later_chain() -> None:
    batch = as_read(pack([encode("MK:T:G", linker=2), encode("MK"), encode("M:K", linker=1)]), Chains(gap=100))
    assert batch.position_T.tolist() == [
        *(0, 1, 2, 3, 4, 105, 106, 107, 208, 209),  # <cls> M K . . T . . G <eos>
        *(0, 1, 2, 3),
        *(0, 1, 2, 103, 104),
    ]
    assert batch.tokens_T.tolist()[:10] == [0, 20, 15, 6, 6, 11, 6, 6, 6, 2]


def test_a_gap_gives_what_these_positions_give() -> None:
    model = perturbed(replace(TINY, chains=Chains(linker=3, gap=64)))
    plain = pack([encode(A + "GGG" + B)])
    behind = len(A) + 4
    moved = replace(plain, position_T=torch.cat((torch.arange(behind), torch.arange(behind, len(A + B) + 5) + 64)))
    found = everything(model, pack([encode(f"{A}:{B}", linker=3)]))
    for ours, theirs in zip(found, everything(model, moved), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert (found[-2] - everything(model, plain)[-2]).abs().max() > 1e-3


def test_the_model_records_how_chains_are_joined(tmp_path: Path) -> None:
    for chains in (Chains(), Chains(10), Chains(25, 512), Chains("break")):
        config: ModelConfig = EsmcConfig(n_layers=2, dim=64, n_heads=2, chains=chains)
        assert recorded_config(config.recorded()).chains == chains
        assert read_chains(chains.text) == chains
    assert "chains" not in EsmcConfig(n_layers=2, dim=64, n_heads=2).recorded()
    config = replace(TINY, chains=Chains(25, 512))
    model = build(config)
    write_transformers(
        tmp_path,
        config,
        {name: tensor.shape for name, tensor in model.state_dict().items()},
        model.state_dict().__getitem__,
    )
    assert weights.read(str(tmp_path)).config.chains == Chains(25, 512)
    assert transformers_config({**FAMILIES["esm2"].write_config(TINY), "joined_chains": "linker:3"}).chains == Chains(3)
