"""What every family of the registry must fulfil: the rest of the package relies on it. Released sizes use no memory."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from outputs import everything, perturbed, smallest

from esmshard.batch import TokenBatch, pack
from esmshard.model import attention, weights
from esmshard.model.contacts import predict_contacts
from esmshard.model.families.family import Family, is_computed
from esmshard.model.families.family_registry import FAMILIES, SIZES, build, n_parameters, recorded_config
from esmshard.model.finetuner import FineTuner, LanguageModelHead
from esmshard.recipe.sections import AdaptSettings, OptimSettings
from esmshard.train.optim import adamw
from esmshard.vocab import CLS, EOS, MASK, RESIDUES, STANDARD, VOCAB_SIZE, Track, encode

TEXTS = ["MKTAYIAKQRQISFVKSHFSRQ", "M", RESIDUES * 2, STANDARD]
EVERY = [CLS, *(n for n in range(VOCAB_SIZE) if n not in (CLS, EOS)), EOS]


PUBLISHED = {
    "esmc_300m": 332_997_184,
    "esmc_600m": 575_036_992,
    "esmc_6b": 6_352_005_184,
    "esm3_sm_open_v1": 1_401_735_748,
    "saprot_35m_af2": 33_699_806,
    "saprot_650m_af2": 651_571_646,  # ESM-2's number, with 413 rows and biases more
    "saprot_650m_pdb": 651_571_646,
    "amplify_120m": 118_276_507,  # as the bytes of the file on the hub, without its header
    "amplify_350m": 354_008_667,
}
"""Parameters of released models, without those of the contact regression."""


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def test_names_of_families_sizes_and_released_models_are_their_own() -> None:
    assert {name: family.name for name, family in FAMILIES.items()} == {name: name for name in FAMILIES}
    sizes = [name for family in FAMILIES.values() for name in family.sizes]
    files = [*FAMILIES.values()]
    kinds = [(kind, one.vocab_size) for one in files for kind in one.model_types]
    assert len(set(sizes)) == len(sizes)
    assert len(set(kinds)) == len(kinds)
    shared = [kind for kind, _ in kinds if [other for other, _ in kinds].count(kind) > 1]
    assert not any((kind, None) in kinds for kind in shared), "the size of the vocabulary decides"


def test_sizes_belong_to_the_family_and_are_small_enough_to_test(family: Family) -> None:
    assert family.sizes.keys() >= family.released.keys()
    assert n_parameters(smallest(family)) < 3_000_000
    for config in family.sizes.values():
        assert config.family == family.name
        assert recorded_config(config.recorded()) == config


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_of_the_released_models(name: str) -> None:
    config = SIZES[name]
    assert n_parameters(config) - (config.n_maps + 1) == PUBLISHED[name]
    assert config.head_dim == (24 if name == "saprot_35m_af2" else 64)


def test_matrices_and_what_learns_are_those_of_the_model(family: Family) -> None:
    """LoRA, quantisation and the planner rely on them."""
    for config in {*family.sizes.values()}:
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


def test_names_of_files_and_back(family: Family) -> None:
    config = smallest(family)
    files, shapes = family, weights.shapes(config)
    for name in shapes:
        key = files.key(name)
        if key is None:
            assert is_computed(name), f"{name} is neither written nor computed"
            continue
        found = {piece.name: piece.rows for piece in files.pieces(key, config)}
        assert name in found
        if found[name] != slice(None):
            assert found[name].stop - found[name].start == shapes[name][0]
    assert all(files.read_config(files.write_config(size)) == size for size in family.sizes.values())
    assert [piece.name for piece in files.pieces("no.such.key", config)] in (["no.such.key"], ["esm.no.such.key"])


def test_a_new_model_is_finite_and_follows_from_its_seed(family: Family) -> None:
    config = smallest(family)
    one, same, other = (weights.fresh(config, seed) for seed in (0, 0, 1))
    drawn = [name for name in weights.shapes(config) if len(one.read[name].shape) > 1]
    assert all(torch.equal(one[name], same[name]) and one[name].isfinite().all() for name in drawn)
    assert not any(torch.equal(one[name], other[name]) for name in drawn)
    with torch.no_grad():
        model = weights.build(one, torch.device("cpu"))
        logits = model(pack([encode(STANDARD)]), logits_at=torch.arange(22)).logits_PV
    tokens = encode(STANDARD).astype(np.int64)[1:-1]
    assert F.cross_entropy(logits[1:-1], torch.from_numpy(tokens)) < math.log(config.n_logits) + 1


def test_a_pack_is_its_sequences_one_by_one(family: Family) -> None:
    model = perturbed(smallest(family))
    layers = range(model.config.n_layers + 1)
    batch = pack([encode(text) for text in TEXTS])
    with torch.no_grad():
        together = model(batch, layers=layers, logits_at=torch.arange(batch.bounds[-1]))
        assert together.logits_PV.shape == (batch.bounds[-1], model.config.n_logits)
        contacts = predict_contacts(model, batch)
        for n, text in enumerate(TEXTS):
            single, own = pack([encode(text)]), slice(batch.bounds[n], batch.bounds[n + 1])
            alone = model(single, layers=layers, logits_at=torch.arange(single.bounds[-1]))
            assert (together.logits_PV[own] - alone.logits_PV).abs().max() < 1e-5
            for layer in layers:
                other = alone.representations[layer]
                assert (together.representations[layer][own] - other).abs().max() < 1e-6 * max(10, other.abs().max())
            assert (contacts[n] - predict_contacts(model, single)[0]).abs().max() < 1e-5
    assert together.representations[0].std() > 0
    assert not torch.equal(together.representations[model.config.n_layers], together.representations[0])


def test_no_protein_sees_another(family: Family) -> None:
    """Bit for bit, if nothing but another protein of the pack changes; a matrix product rounds other rows otherwise."""
    model = perturbed(smallest(family))

    def parts(text: str) -> list[list[torch.Tensor]]:
        batch = pack([encode(one) for one in (TEXTS[0], text, TEXTS[3])])
        with torch.no_grad():
            contacts = predict_contacts(model, batch)
        rows = [x_TD.split(batch.token_counts) for x_TD in everything(model, batch)]
        return [[*(row[n] for row in rows), contacts[n]] for n in range(3)]

    before = parts("ACDEFG")
    for text in ("WYVKLL", "AC", "W" * 200):
        for n, (mine, other) in enumerate(zip(before, parts(text), strict=True)):
            for a, b in zip(mine, other, strict=True):
                if n != 1:
                    assert (a - b).abs().max() <= 1e-6 * max(1, a.abs().max())
                if len(text) == len("ACDEFG"):
                    assert torch.equal(a, b) is (n != 1)


def test_attention_in_a_padded_block_is_the_same(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = perturbed(smallest(family)), pack([encode(text) for text in TEXTS])
    expected, contacts = everything(model, batch)[-2], predict_contacts(model, batch)
    monkeypatch.setattr(attention, "kernel_name", lambda device, dtype: "padded")
    assert (everything(model, batch)[-2] - expected).abs().max() < 1e-5 * max(1, expected.abs().max())
    for mine, other in zip(predict_contacts(model, batch), contacts, strict=True):
        assert (mine - other).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(family: Family, dtype: torch.dtype) -> None:
    batch = pack([encode(text) for text in TEXTS])
    expected = everything(perturbed(smallest(family)), batch)[-2]
    half = everything(perturbed(smallest(family)).to(dtype), batch)[-2]
    assert half.dtype == dtype
    assert (half.float() - expected).square().mean().sqrt() < 0.03 * expected.square().mean().sqrt()


TRACKS = [(family.name, track) for family in FAMILIES.values() for track in family.tracks]


def entries(track: Track, residues: int, *, known: bool) -> np.ndarray:
    """A track of one sequence; what is known of its residues is drawn at random."""
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
    for n, one in enumerate(tokens):
        alone = rows(pack([one], tracks=[known[n]]))
        for mine, together in zip(alone, other, strict=True):
            assert (mine - together[bounds[n] : bounds[n + 1]]).abs().max() < 1e-6 * max(10, mine.abs().max())


def test_every_token_can_be_read_and_the_logits_are_finite_in_half_precision(family: Family) -> None:
    batch = pack([np.array(EVERY, dtype=np.uint8)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = perturbed(smallest(family)).to(dtype)
        with torch.no_grad():
            logits = model(batch, logits_at=torch.arange(len(EVERY))).logits_PV
        assert logits.dtype == dtype
        assert logits.isfinite().all()
        tokens = encode(STANDARD)[1:-1].astype(np.int64)
        known = logits[:, torch.from_numpy(tokens)]
        assert (known.float().std(1) > 0).all(), "the columns of the amino acids are told apart"


def test_a_mask_is_not_a_residue_and_residues_are_told_apart(family: Family) -> None:
    model = perturbed(smallest(family))
    with torch.no_grad():
        rows = model(pack([np.array(EVERY, dtype=np.uint8)]), layers=(0,)).representations[0]
    place = {token: n for n, token in enumerate(EVERY)}
    seen = [rows[place[token]] for token in (MASK, CLS, EOS, *encode(STANDARD)[1:-1].tolist())]
    assert all(not torch.equal(a, b) for n, a in enumerate(seen) for b in seen[:n])


def test_everything_learns_that_may_from_masked_residues(family: Family) -> None:
    """As FSDP needs it: a parameter without a gradient would stop a run."""
    model = FineTuner(perturbed(smallest(family)).train(), LanguageModelHead())
    batch = pack([encode(text) for text in TEXTS], logits_at=[np.arange(1, len(text) + 1) for text in TEXTS])
    logits = torch.cat(list(model(batch)))
    F.cross_entropy(logits, batch.tokens_T[batch.logits_at_P].clamp(4, 23)).backward()
    for name, parameter in model.trunk.named_parameters():
        if not name.startswith(model.trunk.never_learns):
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any() or name.endswith("k_proj.bias"), name


def test_norms_have_no_weight_decay_and_can_be_frozen(family: Family) -> None:
    model = FineTuner(perturbed(smallest(family)).train(), LanguageModelHead())
    model.adapt(AdaptSettings(method="full"), 0)
    groups = adamw(model, OptimSettings(lr=1e-4, weight_decay=0.1)).param_groups
    assert {p.ndim for group in groups if group["weight_decay"] for p in group["params"]} == {2}
    assert any(p.ndim == 1 for group in groups if not group["weight_decay"] for p in group["params"])
    model.adapt(AdaptSettings(method="full", freeze=("norms",)), 0)
    norms = {name: p for name, p in model.trunk.named_parameters() if "norm" in name}
    assert len(norms) >= 2 * model.trunk.config.n_layers + 1
    assert not any(parameter.requires_grad for parameter in norms.values())
    assert model.trunk.embed_tokens.weight.requires_grad
