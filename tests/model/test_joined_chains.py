"""Every family reads a linker between chains as glycines, or as its chain-break token."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_files import write_fresh
from outputs import everything, perturbed, smallest

from esmshard.batch import pack
from esmshard.model import weights
from esmshard.model.families.family_registry import FAMILIES, SIZES, recorded_config
from esmshard.model.trunk import as_read
from esmshard.vocab import Chains, encode, read_chains

A, B, C = "MKTAYIAKQR", "GQISFVKSH", "MLW"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_linker_is_read_as_glycines_or_as_the_chain_break_of_models_that_have_it(name: str) -> None:
    config = smallest(FAMILIES[name])
    model = perturbed(config)
    joined = pack([encode(f"{A}:{B}:{C}", linker=7), encode(B)])
    plain = pack([encode(A + "G" * 7 + B + "G" * 7 + C), encode(B)])
    for ours, theirs in zip(everything(model, joined), everything(model, plain), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
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

    joined, plain = pack([encode(f"{A}:{B}", linker=3)]), pack([encode(A + "GGG" + B)])
    model = perturbed(replace(SIZES["nano"], chains=Chains(linker=3, gap=64)))
    behind = len(A) + 4
    moved = replace(plain, position_T=torch.cat((torch.arange(behind), torch.arange(behind, len(A + B) + 5) + 64)))
    for ours, theirs in zip(everything(model, joined), everything(model, moved), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert (everything(model, joined)[-2] - everything(model, plain)[-2]).abs().max() > 1e-3


def test_the_model_records_how_chains_are_joined(tmp_path: Path) -> None:
    for n, chains in enumerate((Chains(), Chains(10), Chains(25, 512), Chains("break"))):
        config = replace(SIZES["esmc_nano"], chains=chains)
        assert recorded_config(config.recorded()).chains == chains
        assert read_chains(chains.text) == chains
        assert weights.read(str(write_fresh(tmp_path / str(n), config))).config.chains == chains
    assert "chains" not in SIZES["esmc_nano"].recorded()
