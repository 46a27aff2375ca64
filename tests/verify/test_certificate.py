"""Certificates: what passes, what must fail, and that nothing is left out without a word."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from command import esmshard
from model_files import SMALL, TINY, edit_tensors, fair_esm, write_fair_esm, write_transformers

from esmshard.batch import TokenBatch
from esmshard.cli import app
from esmshard.errors import InputError, UsageError
from esmshard.model.families import family_registry
from esmshard.model.families import peer as peers
from esmshard.model.weight_reader import tensors
from esmshard.model.weights.open_weights import Weights
from esmshard.verify import certificate as certificates
from esmshard.verify.certificate import Certificate, certify
from esmshard.verify.comparison import difference

FASTA = ">one\nM\n>rare\nMKBUZOXTAYIAKQRQISFVKSHFSRQ\n>plain\nGSHMLEDPVDAFKLWQRNTC\n>long\n" + 4 * (
    "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG\n"
)
ITSELF = ["itself, all in one pack", "itself, longest first, packs of two", "itself, padded attention"]
PEERS = ["fair-esm 2.0.0", f"transformers {peers.version('transformers')}"]
WHAT = ["logits", "embeddings", "mean embeddings", "contacts"]


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "few.fasta"
    path.write_text(FASTA)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_transformers(tmp_path_factory.mktemp("tiny") / "model", fair_esm(TINY), TINY)


def rows(certificate: Certificate) -> set[tuple[str, str, int | None]]:
    return {(one.against, one.what, one.layer) for one in certificate.comparisons}


def failed(certificate: Certificate) -> set[tuple[str, str, int | None]]:
    return {(one.against, one.what, one.layer) for one in certificate.failures}


def everything(n_layers: int) -> set[tuple[str, str, int | None]]:
    layered = {"embeddings", "mean embeddings"}
    return {
        (against, what, layer)
        for against in ITSELF + PEERS
        for what in WHAT
        for layer in (range(n_layers + 1) if what in layered else [None])
    }


@pytest.mark.parametrize("layout", ["fair-esm", "transformers"])
@pytest.mark.parametrize("family", SMALL)
def test_every_family_and_layout_passes(family: str, layout: str, fasta: Path, tmp_path: Path) -> None:
    reference, out = fair_esm(SMALL[family]), tmp_path / "x" / "certificate.json"
    if layout == "fair-esm":
        path = write_fair_esm(tmp_path / "model.pt", reference)
        weight_file = path
    else:
        path = write_transformers(tmp_path / "model", reference, SMALL[family])
        weight_file = path / "model.safetensors"
    certificate = certify(str(path), out, fasta=fasta)
    assert rows(certificate) == everything(3)
    assert certificate.failures == []
    assert certificate.verdict() is None
    assert certificate.not_compared == ["half precision: all arithmetic is fp32"]
    assert max(one.absolute for one in certificate.comparisons) > 0, "the same computation twice compares nothing"

    written = json.loads(out.read_text())
    assert (written["format"], written["version"], written["passed"]) == ("esmshard-certificate", 1, True)
    assert written["model"]["files"][weight_file.name]["sha256"] == hashlib.sha256(weight_file.read_bytes()).hexdigest()
    assert written["model"]["architecture"]["n_layers"] == 3
    assert (written["dtype"], written["device"], written["kernel"]) == ("float32", "cpu", "slices")
    assert written["versions"]["fair-esm"] == "2.0.0"
    assert written["sequences"] == {"one": 1, "rare": 27, "plain": 20, "long": 304}
    assert len(written["comparisons"]) == len(everything(3))
    assert all(row["passed"] for row in written["comparisons"])


CHANGES = {
    "lm_head.bias": {("logits", None)},
    "contact_head.regression.bias": {("contacts", None)},
    "layers.1.fc2.bias": {
        *(("logits", None), ("embeddings", 2), ("mean embeddings", 2)),
    },
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("peer", ["fair-esm", "transformers"])
def test_a_peer_with_another_tensor_fails(peer: str, name: str, tiny: Path, fasta: Path) -> None:
    """One number of one tensor, by 1e-3; what does not depend on it passes."""
    certificate = certify(str(tiny), None, fasta=fasta, peers={peer: with_another(peer, name)})
    against = PEERS[["fair-esm", "transformers"].index(peer)]
    assert failed(certificate) == {(against, what, layer) for what, layer in CHANGES[name]}
    verdict = certificate.verdict()
    assert verdict is not None
    assert f"{len(CHANGES[name])} of {len(certificate.comparisons)} comparisons" in verdict
    assert f"against {against}" in verdict
    assert "\n" not in verdict
    assert certificate.as_text().count("FAIL") == len(CHANGES[name])


def with_another(peer: str, name: str) -> peers.MakePeer:
    """Makes that peer of the same weights but for the first number of a tensor."""

    def make(found: Weights, device: torch.device) -> peers.Peer:
        changed = found[name].clone()
        changed.view(-1)[0] += 1e-3
        return family_registry.peers_of(found.config)[peer](
            replace(found, read={**found.read, **tensors({name: changed})}), device
        )

    return make


def test_a_kernel_that_sees_the_padding_fails(tiny: Path, fasta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, attn_mask=None: sdpa(q, k, v))
    certificate = certify(str(tiny), None, fasta=fasta, peers={})
    assert {against for against, _, _ in failed(certificate)} == {ITSELF[2]}


def test_a_kernel_that_sees_other_sequences_fails(tiny: Path, fasta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1)

    monkeypatch.setattr("esmshard.model.attention._attend_slices", whole)
    certificate = certify(str(tiny), None, fasta=fasta, peers={})
    assert {against for against, _, _ in failed(certificate)} == set(ITSELF[:2])


def test_each_channel_is_measured_by_itself() -> None:
    """A difference of 5e-5 is nothing in a channel of 100, and too much in one of 1."""
    theirs = torch.tensor([[100.0, 1.0, 2.0], [-50.0, -0.5, 0.0]], dtype=torch.float64)
    large, small = theirs.clone(), theirs.clone()
    large[1, 0] += 5e-5
    small[1, 1] += 5e-5
    passing = difference("x", "logits", None, [("a", theirs, theirs), ("b", large, theirs)])
    assert (passing.absolute, passing.relative) == pytest.approx((5e-5, 5e-7))
    assert (passing.magnitude, passing.record, passing.passed) == (100, "b", True)
    failing = difference("x", "logits", None, [("a", theirs, theirs), ("b", small, theirs)])
    # The median channel reaches 2, and is the measure of the one that reaches 1.
    assert (failing.absolute, failing.relative) == pytest.approx((5e-5, 2.5e-5))
    assert not failing.passed


def test_means_are_measured_by_what_they_are_means_of() -> None:
    theirs, off = torch.full((1, 3), 0.1), torch.full((1, 3), 0.1 + 5e-6)
    residues = torch.tensor([[4.0, -4.0, 4.0], [-3.8, 4.2, -3.8]])
    assert not difference("x", "mean embeddings", 1, [("a", off, theirs)]).passed
    row = difference("x", "mean embeddings", 1, [("a", off, theirs)], [residues])
    assert row.passed
    assert row.relative == pytest.approx(5e-6 / 4.0, rel=0.02)


def test_zeros_pass_and_what_is_no_number_fails() -> None:
    zero = torch.zeros(2, 3)
    assert difference("x", "embeddings", 0, [("a", zero, zero)]).passed
    assert not difference("x", "embeddings", 0, [("a", zero + 1e-9, zero)]).passed
    broken = zero.clone()
    broken[1, 2] = torch.nan
    row = difference("x", "embeddings", 1, [("a", zero + 1, zero + 1), ("b", broken, zero + 1)])
    assert not row.passed
    assert row.record == "b"
    facts = {"model": {"name": "m"}}
    certificate = Certificate(facts, [row])
    assert json.loads(json.dumps(certificate.as_json(), allow_nan=False))["comparisons"][0]["relative"] == "nan"
    assert "m: 1 of 1 comparisons" in str(certificate.verdict())


def test_contacts_are_measured_in_probability() -> None:
    theirs = torch.full((4, 1), 1e-6, dtype=torch.float64)
    assert difference("x", "contacts", None, [("a", 2 * theirs, theirs)]).passed
    assert not difference("x", "contacts", None, [("a", theirs + 1.1e-5, theirs)]).passed


def test_a_peer_that_is_not_there_is_named(tiny: Path, fasta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "esm", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    certificate = certify(str(tiny), None, fasta=fasta)
    assert {against for against, _, _ in rows(certificate)} == set(ITSELF)
    assert certificate.verdict() is None
    for line in (
        "fair-esm: not installed; not compared (pip install fair-esm==2.0.0)",
        "transformers: not installed; not compared (pip install 'esmshard[hf]')",
    ):
        assert line in certificate.not_compared
        assert line in certificate.as_text()


def test_another_package_in_the_place_of_fair_esm_is_named(tiny: Path, fasta: Path, tmp_path: Path) -> None:
    """As PyPI's `esm` leaves it: an `esm` without fair-esm's modules."""
    (tmp_path / "there" / "esm").mkdir(parents=True)
    (tmp_path / "there" / "esm" / "__init__.py").write_text("__version__ = '3.2.0'\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "there")}
    command = [sys.executable, "-m", "esmshard", "verify", str(tiny), "--fasta", str(fasta)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fair-esm: the package `esm` here is not fair-esm's; not compared" in done.stdout
    assert PEERS[1] in done.stdout
    assert PEERS[0] + " " * 10 not in done.stdout


def test_what_never_learned_is_not_certified(tmp_path: Path, fasta: Path) -> None:
    path = write_transformers(tmp_path / "model", fair_esm(TINY), TINY)

    def bare(state: dict[str, torch.Tensor]) -> None:
        for key in [key for key in state if "contact_head" in key or key.startswith("lm_head")]:
            del state[key]

    edit_tensors(path, bare)
    certificate = certify(str(path), None, fasta=fasta)
    assert {what for _, what, _ in rows(certificate)} == {"embeddings", "mean embeddings"}
    assert certificate.not_compared[:2] == [
        "logits: the model has no trained lm_head",
        "contacts: the model has no trained contact_head",
    ]


def test_the_built_in_proteins_as_far_as_the_model_takes_them(tiny: Path, tmp_path: Path) -> None:
    whole = certify(str(tiny), None)
    assert sorted(whole.facts["sequences"].values()) == [1, 30, 76, 76, 129, 238, 1124]
    assert failed(whole) == set()
    old = certify(str(write_fair_esm(tmp_path / "model.pt", fair_esm(SMALL["ESM-1v"]))), None)
    assert sorted(old.facts["sequences"].values()) == [1, 30, 76, 76, 129, 238]
    assert old.not_compared[0] == "fusion (1124 residues): 1022 residues is the longest that this model takes"
    assert failed(old) == set()


def test_contacts_that_need_too_much_memory_are_named(tiny: Path, fasta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAP_BYTES", 4 * 6 * 2 * 4 * 250**2)
    certificate = certify(str(tiny), None, fasta=fasta)
    for peer in PEERS:
        assert (peer, "contacts", None) in rows(certificate)
        assert f"contacts of long: {peer} would need too much memory for its maps" in certificate.not_compared


def test_a_fasta_file_gives_its_first_eight(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.fasta"
    path.write_text("".join(f">r{n}\n{'MKTAYIAKQR'[: n + 1]}\n" for n in range(10)))
    certificate = certify(str(tiny), None, fasta=path, peers={})
    assert certificate.facts["sequences"] == {f"r{n}": n + 1 for n in range(8)}
    path.write_text(">a\n" + "M" * 2047 + "\n")
    with pytest.raises(InputError, match="each of its first 1 records has more than 2046 residues; give shorter ones"):
        certify(str(tiny), None, fasta=path)


def test_a_file_is_not_replaced_unasked(tiny: Path, fasta: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    out.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        certify(str(tiny), out, fasta=fasta)
    assert out.read_text() == "mine"
    certify(str(tiny), out, fasta=fasta, overwrite=True, peers={})
    assert json.loads(out.read_text())["passed"] is True


# The command


def test_the_starter_passes(fasta: Path, tmp_path: Path) -> None:
    out = tmp_path / "starter.json"
    done = esmshard("verify", "starter", "--fasta", fasta, "-o", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  pass\n") == 5 * 4
    assert "FAIL" not in done.stdout
    assert "not compared: the fine-tuned head: it is esmshard's own, and neither library has it" in done.stdout
    written = json.loads(out.read_text())
    assert written["passed"] is True
    inner = [row for row in written["comparisons"] if (row["what"], row["layer"]) == ("embeddings", 5)]
    assert all(row["magnitude"] > 100 for row in inner), "numbers for which a difference of 1e-5 is rounding"
    again = esmshard("verify", "starter", "--fasta", fasta, "-o", out)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == f"error: {out}: exists already; choose another name or pass --overwrite\n"


def test_a_difference_is_one_sentence_and_exit_code_1(
    tiny: Path,
    fasta: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = family_registry.peers_of(TINY)
    theirs = known | {"fair-esm": _other_bias(known["fair-esm"])}
    monkeypatch.setattr(certificates, "peers_of", lambda config: theirs)
    out = tmp_path / "c.json"
    monkeypatch.setattr(sys, "argv", ["esmshard", "verify", str(tiny), "--fasta", str(fasta), "-o", str(out)])
    with pytest.raises(SystemExit) as left:
        app.main()
    said = capsys.readouterr()
    assert left.value.code == 1
    assert said.out.count("FAIL") == 1
    assert said.err.startswith(f"error: {tiny}: 1 of ")
    assert said.err.count("\n") == 1
    assert json.loads(out.read_text())["passed"] is False


def _other_bias(make: peers.MakePeer) -> Callable[[Weights, torch.device], peers.Peer]:
    def other(found: Weights, device: torch.device) -> peers.Peer:
        name = "lm_head.bias"
        return make(replace(found, read={**found.read, **tensors({name: found[name] + 1e-3})}), device)

    return other
