"""Packages, driver and wheel. What a GPU machine would say is given as values."""

import sys
from pathlib import Path

import pytest

import esmshard
from esmshard.cluster.doctor import versions
from esmshard.cluster.doctor.findings import Finding

A100 = ("NVIDIA A100-SXM4-80GB", (8, 0))
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


def fits(**changed: object) -> dict[str, Finding]:
    given: dict[str, object] = {
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "driver": "580.95.05",
        "gpus": [A100],
        "architectures": CU130,
        "obstacle": "",
    }
    return {found.name: found for found in versions.driver_fits(**given | changed)}  # type: ignore[arg-type]


def test_driver_wheel_and_gpu_that_fit() -> None:
    found = fits()
    assert [one.level for one in found.values()] == ["ok"]
    assert found["driver"].found == "driver 580.95.05, CUDA 13.0"


def test_driver_too_old_for_the_wheel_names_the_wheel_to_install() -> None:
    found = fits(driver="535.104.05", obstacle="it is too old")["driver"]
    assert found.level == "error"
    assert "driver 535.104.05 is too old for CUDA 13.0" in found.found
    assert "it needs 580" in found.found
    assert "--index-url https://download.pytorch.org/whl/cu126" in found.fix


def test_driver_too_old_for_any_wheel() -> None:
    found = fits(driver="470.82.01", obstacle="it is too old")["driver"]
    assert found.level == "error"
    assert found.fix == "update the driver to 580 or later"


def test_minor_version_compatibility_is_well_and_said() -> None:
    found = fits(torch="2.11.0+cu128", cuda="12.8", driver="535.104.05")["driver"]
    assert found.level == "ok"
    assert "minor version compatibility" in found.found


def test_gpu_and_torch_without_cuda() -> None:
    found = fits(torch="2.13.0+cpu", cuda=None, architectures=[], obstacle="not compiled with CUDA")["driver"]
    assert found.level == "error"
    assert "1 x NVIDIA A100-SXM4-80GB, but torch 2.13.0+cpu is built without CUDA" in found.found
    assert "whl/cu130" in found.fix


def test_gpu_that_the_wheel_has_no_code_for() -> None:
    found = fits(gpus=[("Tesla V100-SXM2-16GB", (7, 0)), A100])
    assert found["driver"].level == "ok"
    assert found["architecture"].level == "error"
    assert "Tesla V100-SXM2-16GB has compute capability 7.0" in found["architecture"].found
    assert "whl/cu126" in found["architecture"].fix


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 9), ["sm_80", "sm_86"], True),
        ((12, 1), ["sm_90", "compute_120"], True),  # from PTX
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),  # `a` is for one GPU alone
        ((9, 0), ["sm_80"], False),
    ],
)
def test_architectures(capability: tuple[int, int], architectures: list[str], runs: bool) -> None:
    assert ("architecture" not in fits(gpus=[("GPU", capability)], architectures=architectures)) == runs


def test_torch_that_cannot_use_the_gpu_repeats_its_reason() -> None:
    found = fits(obstacle="No CUDA GPUs are available")["cuda"]
    assert found.level == "error"
    assert "No CUDA GPUs are available" in found.found


def test_no_driver() -> None:
    assert fits(driver=None, gpus=[], cuda=None)["driver"].level == "ok"
    found = fits(driver=None, gpus=[])["driver"]
    assert found.level == "note"
    assert "--gpus all" in found.fix


def test_packages_beside_the_floors_of_the_metadata() -> None:
    required = [
        "numpy>=1.26",
        "ruamel.yaml>=0.18",
        "typer>=0.15",
        "xopen[zstd]>=2.0",
        "h5py>=3.10; extra == 'h5'",
        "matplotlib>=3.8; extra == 'plots'",
        "jinja2>=3.1; extra == 'plots'",
        "transformers>=4.45; extra == 'hf'",
        "esmshard[h5,hf,plots]; extra == 'all'",
        "ruff>=0.12; extra == 'dev'",
    ]
    installed = {
        "numpy": "1.25.2",
        "ruamel-yaml": "0.18.6",
        "xopen": "2.0.1",
        "jinja2": "3.1.2",
        "transformers": "4.30.0",
    }
    installed["h5py"] = "3.11.0"
    found = {one.name: one for one in versions.packages(required, installed)}
    assert found["numpy"].level == "error"
    assert found["numpy"].found == "numpy 1.25.2 does not fit >=1.26"
    assert found["typer"].found == "typer is missing"
    assert found["typer"].fix == "pip install --upgrade 'typer>=0.15'"
    assert found["transformers"].level == "warning"
    (lacking,) = [one for one in versions.packages(["xopen[zstd]>=2.0"], {}) if one.name == "xopen"]
    assert lacking.fix == "pip install --upgrade 'xopen[zstd]>=2.0'"
    assert found["packages"].values == {"ruamel-yaml": "0.18.6", "xopen": "2.0.1"}
    assert found["extras"].values["missing"] == {"plots": ["matplotlib"]}
    assert found["extras"].values["installed"] == ["h5"]
    assert "pip install 'esmshard[plots]'" in found["extras"].fix
    assert "ruff" not in found


def test_requirements_for_another_python_are_passed_over() -> None:
    required = ["tomli>=2; python_version < '3'", "numpy>=1.26,<99; python_version > '3'"]
    found = {one.name: one for one in versions.packages(required, {"numpy": "99.1"})}
    assert "tomli" not in found
    assert found["numpy"].found == "numpy 99.1 does not fit <99,>=1.26"
    assert found["numpy"].fix == "pip install --upgrade 'numpy<99,>=1.26'"


def test_a_clone_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [one for one in versions.metadata.distributions() if one.name not in ("esmshard", "fair-esm")]
    monkeypatch.setattr(versions.metadata, "distributions", lambda: iter(kept))
    found = {one.name: one for one in versions.check(None, [], 2)}
    assert found["esmshard"].level == "note"
    assert "esmshard is not installed" in found["esmshard"].found
    assert found["esmshard"].fix == f"pip install -e {Path(esmshard.__file__).parents[1]}"
    assert "esm" not in found  # neither package of that name is installed


def _fake(folder: Path, package: str, marker: str) -> None:
    """An installed package that owns `esm`, as pip leaves it."""
    (folder / f"{package.replace('-', '_')}-3.1.0.dist-info").mkdir(parents=True)
    (folder / f"{package.replace('-', '_')}-3.1.0.dist-info" / "METADATA").write_text(
        f"Name: {package}\nVersion: 3.1.0\n"
    )
    (folder / "esm" / marker).parent.mkdir(parents=True)
    (folder / "esm" / "__init__.py").touch()
    (folder / "esm" / marker).touch()


def esm_as_seen() -> Finding:
    return next(one for one in versions.check(None, [], 2) if one.name == "esm")


def test_fair_esm_alone_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("esm")
    found = esm_as_seen()
    assert found.level == "ok"
    assert "fair-esm 2.0.0" in found.found


def test_both_packages_called_esm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("esm")
    _fake(tmp_path, "esm", "models/esm3.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "esm", raising=False)
    found = esm_as_seen()
    assert found.level == "warning"
    assert str(tmp_path / "esm") in found.found
    assert found.values["distributions"] == {"fair-esm": "2.0.0", "esm": "3.1.0"}
    assert "pip install fair-esm==2.0.0" in found.fix


def test_a_folder_that_happens_to_be_called_esm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "esm").mkdir()
    (tmp_path / "esm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "esm", raising=False)
    found = esm_as_seen()
    assert found.level == "warning"
    assert f"`import esm` takes {tmp_path / 'esm'}" in found.found


def test_esm_of_pypi_alone_is_no_trouble(tmp_path: Path) -> None:
    _fake(tmp_path, "esm", "models/esm3.py")
    found = versions.esm_package({"esm": "3.1.0"}, tmp_path / "esm")
    assert (found.level, found.found) == ("ok", "`import esm` takes esm 3.1.0")
    found = versions.esm_package({"fair-esm": "2.0.0"}, None)
    assert found.level == "warning"
    assert "`import esm` takes nothing" in found.found


def test_threads() -> None:
    assert versions.threads({}, 8).level == "ok"
    assert versions.threads({"OMP_NUM_THREADS": "4,2"}, 4).level == "ok"
    found = versions.threads({"OMP_NUM_THREADS": "64"}, 8)
    assert found.level == "warning"
    assert found.found == "OMP_NUM_THREADS=64, of 8 cores that this process may use"
    assert "unset OMP_NUM_THREADS" in found.fix


def test_nccl_that_is_not_the_one_of_the_wheel() -> None:
    assert versions.nccl("2.28.9", "2.28.9").level == "ok"
    found = versions.nccl("2.18.3", "2.28.9")
    assert found.level == "warning"
    assert found.found == "torch loaded NCCL 2.18.3, but came with 2.28.9"
    assert "LD_PRELOAD" in found.fix
