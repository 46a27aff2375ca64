"""Golden values: written once, compared afterwards, and what must fail."""

import json
from pathlib import Path

import esmc_files
import pytest
import torch
from command import esmshard
from model_files import TINY, edit_tensors, fair_esm, tokenise, write_transformers

from esmshard.checkpoint.compare import UBIQUITIN
from esmshard.errors import InputError, UsageError
from esmshard.verify.certificate import Certificate, certify

STARTER = Path(__file__).parents[1] / "golden" / "starter.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its golden values."""
    model = write_transformers(tmp_path_factory.mktemp("golden") / "model", fair_esm(TINY), TINY)
    certify(str(model), None, golden=model.parent / "golden.json", peers={})
    return model, model.parent / "golden.json"


def against_golden(certificate: Certificate) -> dict[tuple[str, int | None], bool]:
    return {
        (one.what, one.layer): one.passed for one in certificate.comparisons if one.against.startswith("golden values")
    }


def test_values_are_those_of_another_library(written: tuple[Path, Path]) -> None:
    """Places of ubiquitin's 78 tokens are 0, 26, 51, 77. Channels of the width 32 are all."""
    found = json.loads(written[1].read_text())
    with torch.no_grad():
        said = fair_esm(TINY)(tokenise([UBIQUITIN])[0], repr_layers=[0, 1, 2], return_contacts=True)
    for layer in (0, 1, 2):
        rows = torch.tensor(found["values"][str(layer)]["ubiquitin"])
        assert torch.allclose(rows, said["representations"][layer][0, [0, 26, 51, 77]], atol=1e-5)
    assert torch.allclose(
        torch.tensor(found["values"]["logits"]["ubiquitin"]), said["logits"][0, [0, 26, 51, 77]], atol=1e-5
    )
    contacts = torch.tensor(found["values"]["contacts"]["ubiquitin"])
    assert contacts.shape == (32, 1)
    assert contacts[[0, -1], 0].tolist() == pytest.approx(said["contacts"][0][[0, -1], [0, -1]].tolist(), abs=1e-6)
    assert found["versions"]["torch"] == torch.__version__
    assert (found["device"], found["dtype"], found["revision"]) == ("cpu", "float32", None)
    assert set(found["model"]["files"]) == {"model.safetensors"}


def test_a_file_is_small(tmp_path: Path) -> None:
    """More layers, channels and heads than are kept."""
    golden = tmp_path / "golden.json"
    certify("starter", None, golden=golden, peers={})
    assert golden.stat().st_size < 100_000
    assert sorted(json.loads(golden.read_text())["values"]) == ["0", "2", "3", "4", "6", "contacts", "logits"]


def test_what_was_written_is_compared_and_not_replaced(written: tuple[Path, Path]) -> None:
    model, golden = written
    before = golden.read_bytes()
    again = certify(str(model), None, golden=golden, peers={})
    every = {("logits", None), ("contacts", None), ("embeddings", 0), ("embeddings", 1), ("embeddings", 2)}
    assert against_golden(again) == dict.fromkeys(every, True)
    assert golden.read_bytes() == before
    assert "tolerance 1e-05 and 0.0001: " in again.as_text()


@pytest.mark.parametrize("size", [1e-3, 1e-7])
def test_another_number_of_one_tensor_fails(written: tuple[Path, Path], tmp_path: Path, size: float) -> None:
    model = write_transformers(tmp_path / "model", fair_esm(TINY), TINY)

    def change(state: dict[str, torch.Tensor]) -> None:
        state["esm.encoder.layer.1.output.dense.bias"][0] += size

    edit_tensors(model, change)
    changed = certify(str(model), None, golden=written[1], peers={})
    failed = {what for what, passed in against_golden(changed).items() if not passed}
    if size == 1e-7:
        assert failed == set(), "rounding passes"
        return
    assert failed == {("embeddings", 2), ("logits", None)}
    verdict = str(changed.verdict())
    assert "comparisons are not within 0.0001; the worst are the " in verdict
    assert "against golden values, of other files, which differ by " in verdict


def test_another_layout_of_the_same_model_passes(tmp_path: Path) -> None:
    """Files of ESM-C by its authors and by `transformers`."""
    theirs, places = esmc_files.random_esmc(), {"c0ffee": "C", "other": "A"}
    first, second = (esmc_files.write(tmp_path / "snapshots" / name, layout, theirs) for name, layout in places.items())
    golden = tmp_path / "new" / "golden.json"
    certify(str(first), None, golden=golden, peers={})
    assert json.loads(golden.read_text())["revision"] == "c0ffee"
    found = certify(str(second), None, golden=golden, peers={})
    passed = {("logits", None), ("embeddings", 0), ("embeddings", 1), ("embeddings", 2)}
    assert against_golden(found) == dict.fromkeys(passed, True)
    assert {one.against for one in found.comparisons[-4:]} == {"golden values, of other files"}


def test_files_that_cannot_be_compared_are_named(written: tuple[Path, Path], tmp_path: Path) -> None:
    model, golden = written
    broken, content = tmp_path / "broken.json", json.loads(golden.read_text())

    def refused(text: str) -> str:
        broken.write_text(text)
        with pytest.raises(InputError) as error:
            certify(str(model), None, golden=broken, peers={})
        assert broken.read_text() == text, "nothing is replaced"
        return str(error.value)

    assert "not a file of golden values" in refused("{")
    assert "not a file of golden values (it is no file of format esmshard-golden, version 1)" in refused("[]")
    assert "(it lacks 'name')" in refused(json.dumps({**content, "model": {}}))
    assert "not a file of golden values" in refused(json.dumps({**content, "values": {"0": {"gfp": "much"}}}))
    assert "its values are no tables of finite numbers" in refused(json.dumps({**content, "values": {"0": {"a": [1]}}}))
    assert "its values are of other proteins or places" in refused(json.dumps({**content, "values": {"0": {}}}))
    with pytest.raises(InputError, match="a model of another architecture; name another file"):
        certify("starter", None, golden=golden, peers={})
    with pytest.raises(UsageError, match="golden values are those of the built-in proteins; leave --fasta out"):
        certify(str(model), None, golden=golden, fasta=tmp_path / "x.fasta")


def test_the_command_compares_the_starter_with_golden_values(tmp_path: Path) -> None:
    done = esmshard("verify", "starter", "--golden", STARTER)
    assert done.returncode == 0, done.stderr
    assert [line.split()[2] for line in done.stdout.splitlines() if line.startswith("golden values  ")] == [
        "embeddings",
        "contacts",
        "logits",
    ]
    content = json.loads(STARTER.read_text())
    content["values"]["logits"]["gfp"][0][4] += 0.1
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    failed = esmshard("verify", "starter", "--golden", other)
    assert failed.returncode == 1
    assert "the worst are the logits against golden values, which differ by 1.0e-01" in failed.stderr
