"""Packages, driver and wheel. What a GPU machine would say is given as values."""

import re
import sys
from pathlib import Path

import pytest

import esmshard
from esmshard.cluster import versions
from esmshard.cluster.findings import Finding

A100 = ("NVIDIA A100-SXM4-80GB", (8, 0))
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


def fits(**changed: object) -> dict[str, Finding]:
    given: dict[str, object] = {
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "driver": "580.95.05",
        "gpus": [A100],
        "architectures": CU130,
        "usable": True,
    }
    return {found.name: found for found in versions.driver_fits(**given | changed)}  # type: ignore[arg-type]


def test_driver_wheel_and_gpu_that_fit() -> None:
    found = fits()
    assert [one.level for one in found.values()] == ["ok"]
    assert found["driver"].found == "driver 580.95.05, CUDA 13.0"


def test_driver_too_old_for_the_wheel_names_the_wheel_to_install() -> None:
    found = fits(driver="535.104.05", usable=False)["driver"]
    assert found.level == "error"
    assert "driver 535.104.05 is too old for CUDA 13.0" in found.found
    assert "580 is the least" in found.found
    assert "--index-url https://download.pytorch.org/whl/cu126" in found.mend


def test_driver_too_old_for_any_wheel() -> None:
    found = fits(driver="470.82.01", usable=False)["driver"]
    assert found.level == "error"
    assert found.mend == "update the driver to 580 or later"


def test_minor_version_compatibility_is_well_and_said() -> None:
    found = fits(torch="2.11.0+cu128", cuda="12.8", driver="535.104.05")["driver"]
    assert found.level == "ok"
    assert "minor version compatibility" in found.found


def test_gpu_and_torch_without_cuda() -> None:
    found = fits(torch="2.13.0+cpu", cuda=None, architectures=[], usable=False)["driver"]
    assert found.level == "error"
    assert "1 x NVIDIA A100-SXM4-80GB, but torch 2.13.0+cpu is built without CUDA" in found.found
    assert "whl/cu130" in found.mend


def test_gpu_that_the_wheel_has_no_code_for() -> None:
    found = fits(gpus=[("Tesla V100-SXM2-16GB", (7, 0)), A100])
    assert found["driver"].level == "ok"
    assert found["architecture"].level == "error"
    assert "Tesla V100-SXM2-16GB has compute capability 7.0" in found["architecture"].found
    assert "whl/cu126" in found["architecture"].mend


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
    found = fits(usable=False, reason="No CUDA GPUs are available")["cuda"]
    assert found.level == "error"
    assert "No CUDA GPUs are available" in found.found


def test_no_driver() -> None:
    assert fits(driver=None, gpus=[], cuda=None)["driver"].level == "ok"
    found = fits(driver=None, gpus=[])["driver"]
    assert found.level == "note"
    assert "--gpus all" in found.mend


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
    assert found["numpy"].found == "numpy 1.25.2 is older than the least version, 1.26"
    assert found["typer"].found == "typer is missing"
    assert found["typer"].mend == "pip install --upgrade 'typer>=0.15'"
    assert found["transformers"].level == "warning"
    (lacking,) = [one for one in versions.packages(["xopen[zstd]>=2.0"], {}) if one.name == "xopen"]
    assert lacking.mend == "pip install --upgrade 'xopen[zstd]>=2.0'"
    assert found["packages"].values == {"ruamel-yaml": "0.18.6", "xopen": "2.0.1"}
    assert found["extras"].values["missing"] == {"plots": ["matplotlib"]}
    assert found["extras"].values["installed"] == ["h5"]
    assert "pip install 'esmshard[plots]'" in found["extras"].mend
    assert "ruff" not in found


def test_a_clone_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requirements are those of its pyproject.toml."""
    installed = versions.metadata.requires("esmshard") or []

    def requires(name: str) -> list[str]:
        raise versions.metadata.PackageNotFoundError(name)

    kept = [one for one in versions.metadata.distributions() if one.name != "esmshard"]
    monkeypatch.setattr(versions.metadata, "distributions", lambda: iter(kept))
    monkeypatch.setattr(versions.metadata, "requires", requires)
    found = {one.name: one for one in versions.look(None, [], 2)}
    assert found["esmshard"].level == "note"
    assert "(not installed, " in found["esmshard"].found
    assert found["esmshard"].mend.endswith(f"pip install -e {Path(esmshard.__file__).parents[1]}")
    assert found["packages"].level == "ok"
    assert "numpy" in found["packages"].values
    clone = versions.clone_of(Path(esmshard.__file__))
    assert clone is not None
    of_clone, of_wheel = (
        {versions.normal(re.split(r"[^\w.-]", one)[0]) for one in some} - {"esmshard"}  # which names extras of its own
        for some in (versions._required(clone), installed)
    )
    assert of_clone == of_wheel


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
    return next(one for one in versions.look(None, [], 2) if one.name == "esm")


def test_fair_esm_alone_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("esm")
    found = esm_as_seen()
    assert found.level == "ok"
    assert "fair-esm's" in found.found


def test_both_packages_called_esm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("esm")
    _fake(tmp_path, "esm", "models/esm3.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "esm", raising=False)
    found = esm_as_seen()
    assert found.level == "warning"
    assert f"that of PyPI's esm (ESM3, ESM C), in {tmp_path / 'esm'}" in found.found
    assert found.values["distributions"] == {"fair-esm": "2.0.0", "esm": "3.1.0"}
    assert "pip install fair-esm==2.0.0" in found.mend


def test_a_folder_that_happens_to_be_called_esm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "esm").mkdir()
    (tmp_path / "esm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "esm", raising=False)
    found = esm_as_seen()
    assert found.level == "warning"
    assert "neither fair-esm's nor PyPI's esm" in found.found


def test_esm_of_pypi_alone_is_no_trouble(tmp_path: Path) -> None:
    _fake(tmp_path, "esm", "models/esm3.py")
    (found,) = versions.esm_package({"esm": "3.1.0"}, tmp_path / "esm")
    assert found.level == "note"
    (found,) = versions.esm_package({"esm": "3.1.0"}, None)
    assert found.level == "warning"
    (tmp_path / "esm" / "model").mkdir()
    (tmp_path / "esm" / "model" / "esm2.py").touch()
    (found,) = versions.esm_package({"esm": "3.1.0"}, tmp_path / "esm")  # fair-esm was installed over it, and removed
    assert found.level == "warning"
    assert "files of both packages, mixed" in found.found
    assert not list(versions.esm_package({}, None))


def test_threads() -> None:
    assert next(versions.threads({}, 8)).level == "ok"
    assert next(versions.threads({"OMP_NUM_THREADS": "4,2"}, 4)).level == "ok"
    found = next(versions.threads({"OMP_NUM_THREADS": "64"}, 8))
    assert found.level == "warning"
    assert "OMP_NUM_THREADS=64, more than the 8 cores" in found.found
    assert "unset OMP_NUM_THREADS" in found.mend


def test_nccl_beside_others(tmp_path: Path) -> None:
    assert not list(versions.nccl(None, None, {}))
    assert next(versions.nccl("2.28.9", "2.28.9", {})).level == "ok"
    (tmp_path / "libnccl.so.2.18.3").touch()
    (tmp_path / "libnccl.so.2").symlink_to("libnccl.so.2.18.3")
    found = next(versions.nccl("2.28.9", "2.28.9", {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}))
    assert found.level == "warning"
    assert str(tmp_path / "libnccl.so.2.18.3") in found.found
    found = next(versions.nccl("2.18.3", "2.28.9", {"LD_PRELOAD": str(tmp_path / "libnccl.so.2")}))
    assert found.level == "warning"
    assert "loaded NCCL 2.18.3, but came with 2.28.9" in found.found
