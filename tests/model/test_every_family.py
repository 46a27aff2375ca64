"""Every model family has the properties that the rest of the package needs."""

import copy
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from outputs import everything, head_of, learned, maps, perturbed, smallest

from esmshard.batch import TokenBatch, pack
from esmshard.errors import UsageError
from esmshard.model import attention, weights
from esmshard.model.families.family import Family, is_computed
from esmshard.model.families.family_registry import FAMILIES, SIZES, build, n_parameters, recorded_config
from esmshard.model.finetuner import FineTuner
from esmshard.model.trunk import Trunk
from esmshard.recipe.sections import AdaptSettings, OptimSettings
from esmshard.train.optim import adamw
from esmshard.vocab import CLS, EOS, MASK, RESIDUES, STANDARD, VOCAB_SIZE, Track, encode

TEXTS = ["MKTAYIAKQRQISFVKSHFSRQ", "M", RESIDUES * 2, STANDARD]
EVERY = [CLS, *(n for n in range(VOCAB_SIZE) if n not in (CLS, EOS)), EOS]


PUBLISHED = {
    "esm2_t6_8M_UR50D": 7_512_353,
    "esm2_t12_35M_UR50D": 33_501_153,
    "esm2_t30_150M_UR50D": 148_139_553,
    "esm2_t33_650M_UR50D": 651_042_593,
    "esm2_t36_3B_UR50D": 2_839_004_193,
    "esm2_t48_15B_UR50D": 15_129_098_273,
    "esm1b_t33_650M_UR50S": 652_358_433,
    **{f"esm1v_t33_650M_UR90S_{n}": 652_355_873 for n in range(1, 6)},
    "esmc_300m": 332_997_184,
    "esmc_600m": 575_036_992,
    "esmc_6b": 6_352_005_184,
    "esm3_sm_open_v1": 1_401_735_748,
    "saprot_35m_af2": 33_699_806,
    "saprot_650m_af2": 651_571_646,  # ESM-2's number, with 413 rows and biases more
    "saprot_650m_pdb": 651_571_646,
    "amplify_120m": 118_276_507,  # as the bytes of the file on the hub, without its header
    "amplify_350m": 354_008_667,
    # As `BertForMaskedLM` of `transformers` counts them in the shape of the hub's config.json.
    **dict.fromkeys(("prot_bert", "prot_bert_bfd", "igbert", "igbert_unpaired"), 419_933_214),
    "dplm_150m": 148_139_553,
    "dplm_650m": 651_042_593,
    "dplm_3b": 2_839_004_193,
    "prot_t5_xl": 1_208_141_824,
    "prost_t5": 1_208_164_352,  # ProtT5's number, with 22 rows more
    "ankh_base": 453_170_688,
    "ankh_large": 1_151_707_648,
}
"""Parameters of released models, without those of the contact regression."""


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def model(family: Family) -> Trunk:
    return perturbed(smallest(family))


def test_names_sizes_and_matrices_are_those_of_the_models() -> None:
    kinds = [(kind, family.vocab_size) for family in FAMILIES.values() for kind in family.model_types]
    assert len(set(kinds)) == len(kinds)
    assert len(SIZES) == sum(len(family.sizes) for family in FAMILIES.values())
    shared = [kind for kind, _ in kinds if [other for other, _ in kinds].count(kind) > 1]
    assert not any((kind, None) in kinds for kind in shared), "the size of the vocabulary decides"
    for name, count in PUBLISHED.items():
        has_contacts = not SIZES[name].only_represents
        assert n_parameters(SIZES[name]) - has_contacts * (SIZES[name].n_maps + 1) == count
        widths = {"_8M_": 16, "_35M_": 24, "_150M": 32, "_15B_": 128, "_T5": 128}
        assert SIZES[name].head_dim == next((width for part, width in widths.items() if part in name.upper()), 64)
    for family in FAMILIES.values():
        assert family.sizes.keys() >= family.released.keys()
        for config in family.sizes.values():
            assert config.family == family.name
            assert recorded_config(config.recorded()) == config
            assert family.read_config(family.write_config(config)) == config
        config = smallest(family)
        with torch.device("meta"):
            model = build(config)
        names = [name for name, _ in model.named_parameters()]
        for start in [*model.never_learns, *(start for starts in model.learns_with.values() for start in starts)]:
            assert any(name.startswith(start) for name in names)
        for track, starts in model.learns_with.items():
            assert track in {track.name for track in family.tracks}
            assert all(start.startswith(model.never_learns) for start in starts)
        for matrix in config.matrices:
            linear = model.layers[0].get_submodule(matrix.path)
            assert (linear.out_features, linear.in_features) == (matrix.rows, matrix.columns)
        assert {matrix.target for matrix in config.matrices} == {"q", "k", "v", "out", "fc1", "fc2"}
        wide = [matrix.rows for matrix in config.matrices if matrix.target == "fc1"]
        assert wide == [config.ffn_width] * (2 if config.gated else 1)


def test_names_of_files_and_back() -> None:
    for family in FAMILIES.values():
        config = smallest(family)
        shapes = weights.shapes(config)
        for name in shapes:
            key = family.key(name)
            if key is None:
                assert is_computed(name), f"{name} is neither written nor computed"
                continue
            rows = {piece.name: piece.rows for piece in family.pieces(key, config)}
            if rows[name] != slice(None):
                assert rows[name].stop - rows[name].start == shapes[name][0]
        names = [piece.name for piece in family.pieces("no.such.key", config)]
        assert names in (["no.such.key"], [f"{family.prefix}no.such.key"])


def test_a_new_model_is_finite_and_follows_from_its_seed() -> None:
    for family in FAMILIES.values():
        config = smallest(family)
        first, same, other = (weights.fresh(config, seed) for seed in (0, 0, 1))
        drawn = [name for name in weights.shapes(config) if len(first.read[name].shape) > 1]
        assert all(torch.equal(first[name], same[name]) and first[name].isfinite().all() for name in drawn)
        assert not any(torch.equal(first[name], other[name]) for name in drawn)
        logits = everything(weights.build(first, torch.device("cpu")), pack([encode(STANDARD)]))[-1]
        assert logits.isfinite().all()
        if config.only_represents:
            continue
        tokens = encode(STANDARD).astype(np.int64)[1:-1]
        assert F.cross_entropy(logits[1:-1], torch.from_numpy(tokens)) < math.log(config.n_logits) + 1


def test_a_pack_is_its_sequences_one_by_one_and_a_padded_block(model: Trunk, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack([encode(text) for text in TEXTS])
    together = everything(model, batch)
    assert together[-1].shape == (batch.bounds[-1], model.config.n_logits or model.config.dim)
    assert together[0].std() > 0
    with torch.no_grad():
        contacts = maps(model, batch)
        for n, text in enumerate(TEXTS):
            single, part = pack([encode(text)]), slice(batch.bounds[n], batch.bounds[n + 1])
            for mine, other in zip(together, everything(model, single), strict=True):
                assert (mine[part] - other).abs().max() < 1e-6 * max(10, other.abs().max())
            assert (contacts[n] - maps(model, single)[0]).abs().max() < 1e-5
        monkeypatch.setattr(attention, "kernel_name", lambda device, dtype: "padded")
        padded = everything(model, batch)[-2]
        assert not torch.equal(padded, together[-2])
        assert (padded - together[-2]).abs().max() < 1e-5 * max(1, padded.abs().max())
        for mine, other in zip(maps(model, batch), contacts, strict=True):
            assert (mine - other).abs().max() < 1e-5


def test_no_protein_sees_another(model: Trunk) -> None:
    """A change in one protein changes no bit of the others. The lengths are equal, because rounding depends on them."""

    def parts(text: str) -> list[list[torch.Tensor]]:
        batch = pack([encode(each) for each in (TEXTS[0], text, TEXTS[3])])
        contacts = maps(model, batch)
        rows = [x_TD.split(batch.token_counts) for x_TD in everything(model, batch)]
        return [[*(row[n] for row in rows), contacts[n]] for n in range(3)]

    for n, (mine, other) in enumerate(zip(parts("ACDEFG"), parts("WYVKLL"), strict=True)):
        assert all(torch.equal(a, b) is (n != 1) for a, b in zip(mine, other, strict=True))


def test_half_precision_is_near_and_reads_every_token(model: Trunk) -> None:
    batch, every = pack([encode(text) for text in TEXTS]), pack([np.array(EVERY, dtype=np.uint8)])
    expected = everything(model, batch)[-2]
    residues = torch.from_numpy(encode(STANDARD)[1:-1].astype(np.int64))
    rows = dict(zip(EVERY, everything(model, every)[0], strict=True))
    seen = [rows[token] for token in (MASK, CLS, EOS, *residues.tolist())]
    assert all(not torch.equal(a, b) for n, a in enumerate(seen) for b in seen[:n]), "each token has its own embedding"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        half = copy.deepcopy(model).to(dtype)
        found = everything(half, batch)[-2]
        assert found.dtype == dtype
        assert (found.float() - expected).square().mean().sqrt() < 0.03 * expected.square().mean().sqrt()
        logits = everything(half, every)[-1]
        assert logits.dtype == dtype
        assert logits.isfinite().all()
        assert (logits[1:, residues].float().std(1) > 0).all()


TRACKS = [(family.name, track) for family in FAMILIES.values() for track in family.tracks]


def entries(track: Track, residues: int, *, known: bool) -> np.ndarray:
    """A track of one sequence, with random values or with unknown values only."""
    shape, draw = ((residues + 2, 3, 3) if track.kind == "coordinates" else (residues + 2,)), np.random.default_rng(0)
    kind = {"letters": np.uint8, "coordinates": np.float32, "codes": np.int64}[track.kind]
    found = np.full(shape, track.unknown, dtype=kind)
    if known and track.kind == "coordinates":
        found[1:-1] = 5 * draw.standard_normal((residues, 3, 3))
    elif known:
        found[1:-1] = draw.integers(0, track.n_codes or len(track.letters), residues)
    return found


@pytest.mark.parametrize(("name", "track"), TRACKS, ids=lambda one: getattr(one, "name", one))
def test_a_track_is_read_and_its_absence_is_that_nothing_is_known(name: str, track: Track) -> None:
    model = perturbed(smallest(FAMILIES[name]))
    if track.kind == "letters":
        assert len(set(track.letters)) == len(track.letters) <= track.unknown < 256

    def rows(batch: TokenBatch) -> list[torch.Tensor]:
        with torch.no_grad():
            out = model(batch, range(model.config.n_layers + 1), torch.arange(batch.bounds[-1]))
        return [*out.representations.values(), out.logits_PV]

    tokens = [encode(text) for text in TEXTS]
    known, unknown = ([{track.name: entries(track, len(text), known=k)} for text in TEXTS] for k in (True, False))
    absent, same, other = rows(pack(tokens)), rows(pack(tokens, tracks=unknown)), rows(pack(tokens, tracks=known))
    assert all(torch.equal(a, b) for a, b in zip(absent, same, strict=True))
    assert (absent[-1] - other[-1]).abs().max() > 1e-3
    bounds = pack(tokens).bounds
    for n, single in enumerate(tokens):
        for mine, together in zip(rows(pack([single], tracks=[known[n]])), other, strict=True):
            assert (mine - together[bounds[n] : bounds[n + 1]]).abs().max() < 1e-6 * max(10, mine.abs().max())


def test_everything_learns_that_may_and_norms_have_no_weight_decay(model: Trunk) -> None:
    """A parameter without a gradient would stop a run with FSDP."""
    tuner = FineTuner(model.train(), head_of(model.config))
    learned(tuner, TEXTS)
    for name, parameter in model.named_parameters():
        if not name.startswith(model.never_learns):
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any() or name.endswith("k_proj.bias"), name

    tuner.adapt(AdaptSettings(method="full"), 0)
    groups = adamw(tuner, OptimSettings(lr=1e-4, weight_decay=0.1)).param_groups
    assert {p.ndim for group in groups if group["weight_decay"] for p in group["params"]} == {2}
    assert any(p.ndim == 1 for group in groups if not group["weight_decay"] for p in group["params"])
    tuner.adapt(AdaptSettings(method="full", freeze=("norms",)), 0)
    norms = {name: p for name, p in model.named_parameters() if "norm" in name}
    assert len(norms) >= 2 * model.config.n_layers + 1
    assert not any(parameter.requires_grad for parameter in norms.values())
    assert model.embed_tokens.weight.requires_grad
    for freeze, pattern in (
        ("biases", r".*bias"),
        ("layers.all-but-1", r"layers\.0\..*"),
        ("layers.1", r"layers\.1\..*"),
        ("embedding", r"embed_.*"),
    ):
        tuner.adapt(AdaptSettings(method="full", freeze=(freeze,)), 0)
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        expected = {name for name, _ in model.named_parameters() if re.fullmatch(pattern, name)}
        assert {name for name in frozen ^ expected if not name.startswith(model.never_learns)} == set()
    with pytest.raises(UsageError, match=r"layers\.9"):
        tuner.adapt(AdaptSettings(method="full", freeze=("layers.9",)), 0)
