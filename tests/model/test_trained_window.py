"""The longest sequence in training, and training by diffusion, stay with a model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from model_files import write_fresh

from esmshard.checkpoint.consolidate import consolidate
from esmshard.embed.spec import Long, request
from esmshard.errors import UsageError
from esmshard.model import hub, weights
from esmshard.model.families.family_registry import SIZES, corruption_of, recorded_config, window_of
from esmshard.predict.zero_shot import score_sequences

BASE = "amplify_120m_base"


def test_models_of_a_first_stage_have_their_own() -> None:
    for size in ("120m", "350m"):
        assert [window_of(SIZES[f"amplify_{size}{stage}"]) for stage in ("", "_base")] == [2046, 510]
    assert window_of(SIZES["esm2_t6_8M_UR50D"]) == 1022
    assert SIZES[BASE] == SIZES["amplify_120m"]


def test_a_model_that_was_trained_by_diffusion_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DPLM's repositories name the class of the authors' code, and their contact regression is random."""
    assert [corruption_of(SIZES[name]) is None for name in ("dplm_650m", "esm2_t33_650M_UR50D")] == [True, False]
    tiny = replace(SIZES["nano"], diffusion=True)
    assert recorded_config(tiny.recorded()).diffusion
    there = write_fresh(tmp_path / "there", tiny)
    assert json.loads((there / "config.json").read_text())["architectures"] == ["EsmForDPLM"]
    assert (weights.read(str(there)).config.diffusion, weights.read(str(there)).absent) == (True, ())
    monkeypatch.setattr(hub, "fetch", lambda name: there)
    monkeypatch.setitem(SIZES, "dplm_150m", tiny)
    for name in ("dplm_150m", "airkingbd/dplm_150m"):
        found = weights.read(name)
        assert (found.config.diffusion, found.config.token_dropout, found.absent) == (True, True, ("contact_head",))
    with pytest.raises(UsageError, match="dplm_150m"):
        score_sequences("dplm_150m", tmp_path / "a.fasta", tmp_path / "x.csv", method="one-pass")


def test_what_is_made_from_a_model_keeps_it(tmp_path: Path) -> None:
    config = replace(SIZES["esmc_nano"], window=40)
    assert recorded_config(config.recorded()).window == 40, "as in a checkpoint"
    first = write_fresh(tmp_path / "first", config)
    assert json.loads((first / "config.json").read_text())["trained_window"] == 40
    again = consolidate(str(first), tmp_path / "again")
    found = weights.read(str(again))
    assert (found.config.window, found.config) == (40, config)
    assert request(str(again), tmp_path / "x.npy").spec.long == Long("full", 40)
    plain = write_fresh(tmp_path / "plain", replace(config, window=None))
    assert "trained_window" not in json.loads((plain / "config.json").read_text())
    known = weights.read(str(plain))
    weights.check(weights.identity(found, "a"), weights.identity(known, "b"), "here")
    assert weights.model_hash(found) == weights.model_hash(known), "the window changes no embedding"


def test_a_released_name_says_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository's `config.json` has no window."""
    tiny = SIZES["amplify_nano"]
    monkeypatch.setitem(SIZES, BASE, replace(tiny, window=510))
    there = write_fresh(tmp_path / "there", tiny)
    monkeypatch.setattr(hub, "fetch", lambda name: there)
    assert weights.read(BASE).config.window == 510
    assert weights.read("chandar-lab/AMPLIFY_120M_base").config.window == 510
    assert weights.read(str(there)).config.window is None
