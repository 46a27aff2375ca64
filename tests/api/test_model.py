"""`esmshard.load` against fair-esm and against the modules, and the inputs that it refuses."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from Bio.Seq import Seq
from Bio.SeqRecord import SeqRecord
from esm.model.esm2 import ESM2 as FairEsm
from model_files import (
    ALPHABET,
    SMALL,
    TINY,
    edit_tensors,
    fair_esm,
    ours,
    perturb,
    tokenise,
    write_fair_esm,
    write_transformers,
)
from pydantic import TypeAdapter
from torch import nn

import esmshard
from esmshard.api.model import Model, load
from esmshard.checkpoint.consolidate import FORMAT, VERSION
from esmshard.errors import InputError, UsageError
from esmshard.model.contacts import predict_contacts
from esmshard.model.finetuner import FineTuner
from esmshard.predict.heads import predict
from esmshard.recipe.sections import AnyTask
from esmshard.tasks.registry import new_task
from esmshard.tasks.variants import fit_scale
from esmshard.vocab import MASK, RESIDUES, STANDARD

LENGTHS = (31, 1, 120, 7, 64, 2)
WT = "MKTAYIAKQRQISFVKSHFSRQLE"
SEQUENCES = ["".join(np.random.default_rng(n).choice(list(RESIDUES), n)) for n in LENGTHS]


@pytest.fixture(scope="module")
def reference() -> FairEsm:
    return fair_esm(TINY)


@pytest.fixture(scope="module")
def model(reference: FairEsm, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_fair_esm(tmp_path_factory.mktemp("model") / "tiny.pt", reference))


def test_outputs_are_those_of_fair_esm(model: Model, reference: FairEsm) -> None:
    pools = ["mean", "max", "cls", "residue", "logits", "contacts"]
    computed = model.embed(SEQUENCES, pools, [1, 2])
    assert list(computed) == [f"{pool}_{layer}" for pool in pools[:4] for layer in (1, 2)] + pools[4:]
    for n, sequence in enumerate(SEQUENCES):
        with torch.no_grad():
            expected = reference(tokenise([sequence])[0], repr_layers=[1, 2], return_contacts=True)
        for layer in (1, 2):
            x_TD = expected["representations"][layer][0]
            x_LD = x_TD[1:-1]
            for pool, values in {"mean": x_LD.mean(0), "max": x_LD.amax(0), "cls": x_TD[0], "residue": x_LD}.items():
                assert np.abs(computed[f"{pool}_{layer}"][n] - values.numpy()).max() <= 1e-5
        assert np.abs(computed["logits"][n] - expected["logits"][0, 1:-1].numpy()).max() <= 1e-4
        assert np.abs(computed["contacts"][n] - expected["contacts"][0].numpy()).max() <= 1e-5
    assert computed["contacts"][0].std() > 0.01
    for pool in pools[:3]:
        assert (computed[f"{pool}_2"].dtype, computed[f"{pool}_2"].shape) == (np.float32, (len(LENGTHS), TINY.dim))
    assert np.array_equal(model.embed(SEQUENCES), computed["mean_2"])
    assert np.allclose(model.contacts(SEQUENCES[0]), computed["contacts"][0], atol=1e-6)
    assert list(model.embed(SEQUENCES, layers=[1])) == ["mean_1"], "a list with one layer is a list"
    assert list(model.embed("MKT", layers=np.arange(1, 3))) == ["mean_1", "mean_2"]


def test_sequences_may_be_a_dictionary_or_a_file_and_are_corrected(model: Model, tmp_path: Path) -> None:
    fasta = tmp_path / "x.fasta"
    fasta.write_text("".join(f">r{n} words\n{s}\n" for n, s in enumerate(SEQUENCES)))
    listed = model.embed(SEQUENCES)
    assert np.abs(np.stack([model.embed(sequence) for sequence in SEQUENCES]) - listed).max() <= 1e-6
    assert np.abs(model.embed(SEQUENCES, tokens=1) - listed).max() <= 1e-6
    assert np.array_equal(model.embed({f"r{n}": s for n, s in enumerate(SEQUENCES)}), listed)
    assert np.array_equal(model.embed(fasta), listed)
    assert np.array_equal(model.embed(s for s in SEQUENCES), listed)
    with pytest.warns(UserWarning, match="in 1 record") as warned:
        corrected = model.embed({"a": "mktay", "b": "MKTAY*", "c": "MK-TAY"})
    assert np.abs(corrected - model.embed("MKTAY")).max() <= 1e-6
    for warning, token in zip(sorted(warned, key=lambda w: str(w.message)), (r"'*' at", "gaps", "lower"), strict=True):
        assert token in str(warning.message)
        assert warning.filename == __file__, "the warning points at the caller"


def test_long_sequences_are_taken_as_asked(model: Model, tmp_path: Path) -> None:
    long = "".join(np.random.default_rng(0).choice(list(STANDARD), 1100))
    assert np.abs(model.embed(long, long="truncate") - model.embed(long[:1022])).max() <= 1e-6
    assert np.abs(model.embed(long) - model.embed(long[:1022])).max() > 1e-4
    assert model.embed(long, "residue", long="window").shape == (1100, TINY.dim)
    esm1b = load(write_fair_esm(tmp_path / "esm1b_tiny.pt", fair_esm(SMALL["ESM-1b"])))
    with pytest.raises(InputError, match=r"sequences\[1\] has 1,100 residues, and this model has positions for 1,022"):
        esm1b.embed(["MKT", long])
    assert esm1b.embed(["MKT", long], long="truncate").shape == (2, 64)


def test_scores_are_log_ratios_at_hidden_sites(model: Model, reference: FairEsm) -> None:
    def log_p(site: int) -> torch.Tensor:
        block, _ = tokenise([WT])
        block[0, site + 1] = MASK
        with torch.no_grad():
            return reference(block)["logits"][0, site + 1].log_softmax(-1)

    index = ALPHABET.get_idx
    one = log_p(3)[index("G")] - log_p(3)[index("A")]
    other = log_p(9)[index("K")] - log_p(9)[index("R")]
    with pytest.warns(UserWarning, match=r"lower-case .* \(the wild type\)") as told:
        found = model.score(WT.lower(), ["A4G", "WT", "p.Arg10Lys", "a4g:R10K", "A4A"])
    assert told[0].filename == __file__, "the warning points at the caller"
    assert found.dtype == np.float64
    assert found == pytest.approx([float(one), 0, float(other), float(one + other), 0], abs=1e-4)
    assert abs(found[0]) > 1e-3
    seen = model.score(WT, ["A4G"], method="wild-type-marginals")
    assert abs(seen[0] - found[0]) > 1e-5


def test_wrong_sequences_variants_and_options_are_named(model: Model) -> None:
    cases: list[tuple[Any, str]] = [
        (["MKT", "MK1T"], r"sequences\[1\] has '1' at position 3"),
        ({"P01308": "M*K"}, r"sequences\['P01308'\] has '\*' at position 2"),
        (["MKT", None], r"sequences\[1\] is of type NoneType"),
        ([], "there is no sequence"),
        ("my.fasta", r"pathlib\.Path"),
        (7, "not int"),
        (np.array([["a", "MKT"]]), "not ndarray"),
        (pd.DataFrame({"sequence": ["MKT"]}), "not DataFrame"),
        (SeqRecord(Seq("MKT"), "a"), "not SeqRecord"),
        ("ATGGCC" * 20, r"1 sequence of DNA or RNA, .* --on-nucleotides keep"),
    ]
    for sequences, token in cases:
        with pytest.raises(InputError, match=token) as caught:
            model.embed(sequences)
        assert "\n" not in str(caught.value)
    for variants, token in (
        (["A4G", "K4G"], r"variants\[1\]: K4G: residue 4"),
        (["E25K"], r"variants\[0\]: E25K: the wild type has residues 1 to 24"),
        (["A4*"], "is a stop codon"),
        (["A4G", "delta4"], r"variants\[1\]: 'delta4'"),
        ([4], r"variants\[0\] is of type int"),
        ("A4G", "a list of variants"),
    ):
        with pytest.raises(InputError, match=token):
            model.score(WT, variants)  # type: ignore[arg-type]
    for protein, token in ((["MKT"], "of type list"), ("MKT:MKV", "several chains")):
        with pytest.raises(InputError, match=token):
            model.score(protein, ["K2R"])  # type: ignore[arg-type]
    options: list[tuple[dict[str, Any], str]] = [
        ({"pool": "median"}, "mean, max, cls"),
        ({"pool": []}, "at least one"),
        ({"layers": 3}, "layers 0 to 2"),
        ({"long": "crop"}, "full, window or truncate"),
        ({"pool": "contacts", "layers": 1}, "no layer"),
        ({"tracks": {"3di": "ddd"}}, "takes no track"),
    ]
    for how, token in options:
        with pytest.raises(UsageError, match=token):
            model.embed(["MKT"], **how)
    options = [({"device": "gpu"}, "cpu, cuda"), ({"dtype": "fp8"}, "fp32"), ({"dtype": torch.float64}, "bf16")]
    for how, token in options:
        with pytest.raises(UsageError, match=token):
            load("starter", **how)


def test_parts_that_never_learned_are_not_asked(reference: FairEsm, tmp_path: Path) -> None:
    path = write_fair_esm(tmp_path / "tiny.pt", reference)
    path.with_name("tiny-contact-regression.pt").unlink()
    with_lm_head = load(path)
    for ask in (with_lm_head.contacts, lambda given: with_lm_head.embed(given, ["mean", "contacts"])):
        with pytest.raises(InputError, match="has no trained contact regression"):
            ask(["MKT"])
    assert with_lm_head.score("MKT", ["K2R"]).shape == (1,)
    bare = write_transformers(tmp_path / "bare", reference, TINY)
    edit_tensors(bare, lambda state: [state.pop(key) for key in list(state) if key.startswith("lm_head.")])
    without = load(bare)
    with pytest.raises(InputError, match="has no trained LM head"):
        without.score("MKT", ["K2R"])
    with pytest.raises(InputError, match="has no trained LM head"):
        without.embed(["MKT"], "logits")
    with pytest.raises(InputError, match="has no fine-tuned head"):
        without.predict(["MKT"])
    assert (without.task, without.names) == (None, ())


CLASSES = {"classes": ["x", "y", "z"], "counts": [6, 3, 1], "records": 10}
NUMBERS = {"targets": ["Tm", "pI"], "mean": [50.0, 7.0], "std": [4.0, 2.0]}
STATES = {"classes": ["HGI", "EB", "STC"], "counts": [3, 2, 1], "records": 3}
RESIDUES_NUMBERS = {"targets": ["value"], "mean": [1.0], "std": [2.0]}
VARIANT = {
    "targets": ["y", "kd"],
    "lower_is_better": ["kd"],
    "protein": WT,
    "first": 4,
    "length": 16,
    "breaks": [],
    "linker": 25,
}
HEADS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "contact": ({"name": "contact", "channels": 8, "blocks": 2}, {}, ()),
    "mlm": ({"name": "mlm"}, {}, tuple(STANDARD)),
    "residue": ({"name": "residue"}, STATES, ("HGI", "EB", "STC")),
    "residue numbers": ({"name": "residue", "kind": "number"}, RESIDUES_NUMBERS, ("value",)),
    "sequence": ({"name": "sequence"}, NUMBERS, ("Tm", "pI")),
    "sequence classes": ({"name": "sequence", "kind": "class"}, CLASSES, ("x", "y", "z")),
}


def consolidated(directory: Path, settings: dict[str, Any], facts: dict[str, Any]) -> tuple[Path, FineTuner]:
    """Write a fine-tuned model with a random head as `consolidate` does; return its directory and module."""
    task = new_task(TypeAdapter(AnyTask).validate_python(settings), facts)
    torch.manual_seed(1)
    head = task.head(TINY)
    perturb(head, deviation=0.3)
    for parameter in head.parameters():
        if parameter.ndim > 1 and parameter.abs().max() < 0.3:
            nn.init.normal_(parameter, std=0.3)
    model = FineTuner(ours(fair_esm(TINY), TINY), head).eval()
    write_transformers(directory, model.trunk, TINY, head.state_dict())
    about = {"format": FORMAT, "version": VERSION, "step": 7, "recipe": {"task": settings}, "facts": facts}
    (directory / "esmshard.json").write_text(json.dumps(about))
    return directory, model


def test_predictions_are_those_of_the_command(tmp_path: Path) -> None:
    fasta = tmp_path / "x.fasta"
    fasta.write_text("".join(f">r{n}\n{s}\n" for n, s in enumerate(SEQUENCES)))
    for kind, (settings, facts, names) in HEADS.items():
        (tmp_path / kind).mkdir()
        path, module = consolidated(tmp_path / kind / "model", settings, facts)
        found = load(path)
        assert (found.task, found.names) == (settings["name"], names)
        predict(str(path), fasta, tmp_path / kind / "x.npz")
        values = found.predict(SEQUENCES)
        with np.load(tmp_path / kind / "x.npz") as file:
            expected = [file[f"r{n}"] for n in range(len(SEQUENCES))]
        assert [v.shape for v in values] == [v.shape for v in expected]
        assert isinstance(values, np.ndarray) == (settings["name"] == "sequence")
        low = load(path, dtype="bf16").predict(SEQUENCES)
        for one, half, other in zip(values, low, expected, strict=True):
            assert np.abs(one - other).max() <= 1e-5
            assert np.abs(half - other).max() <= 0.05 * max(1.0, np.abs(other).max())
        assert np.abs(found.predict(SEQUENCES[0]) - expected[0]).max() <= 1e-5
        assert np.concatenate([v.ravel() for v in expected]).std() > 1e-3
        if kind == "contact":
            contacts, (_, batch) = found.contacts(SEQUENCES[0]), tokenise(SEQUENCES[:1])
            with torch.no_grad():
                assert np.abs(contacts - module(batch)[0].sigmoid().numpy()).max() <= 1e-6
                assert np.abs(contacts - predict_contacts(module.trunk, batch)[0].numpy()).max() > 0.01


def test_variants_of_the_protein_are_predicted(tmp_path: Path) -> None:
    scale = asdict(fit_scale(np.array([0.0, 1.0, 3.0]), "none"))
    facts = VARIANT | {"scales": [scale, scale]}
    path, _ = consolidated(tmp_path / "model", {"name": "variant"}, facts)
    found = load(path)
    names = ["Q9C", "WT", "Q9C:R10W"]
    values = found.predict(names)
    assert (values.shape, found.names) == ((3, 2), ("y", "kd"))
    assert np.abs(found.predict("Q9C") - values[0]).max() <= 1e-5
    assert values.std(0).min() > 1e-3
    with pytest.raises(InputError, match="K2C: the model reads only residues 5 to 20 of the protein"):
        found.predict(["Q9C", "K2C"])
    with pytest.raises(InputError, match=r"variants\[0\]: A9C: residue 9 of the wild type is Q"):
        found.predict(["A9C"])
    with pytest.raises(InputError, match="there is no variant"):
        found.predict([])
    with pytest.raises(UsageError, match="a list of variants is expected"):
        found.predict(tmp_path / "x.csv")
    assert found.embed([WT]).shape == (1, TINY.dim), "the trunk is there too"


def test_short_dtypes_are_near(model: Model) -> None:
    starter = esmshard.load("starter", device="cpu")
    assert repr(starter) == "Model('starter', task='contact', layers=6, dim=192, float32 on cpu)"
    dtypes: list[tuple[Any, float]] = [("bf16", 0.03), ("fp16", 0.003)]
    for dtype, most in dtypes:
        short = load(model.name, dtype=dtype)
        assert "float16 on" in repr(short)
        found, expected = short.embed(SEQUENCES), model.embed(SEQUENCES)
        assert found.dtype == np.float32
        assert 0 < np.abs(found - expected).max() <= most * np.abs(expected).max()
