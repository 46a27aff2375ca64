"""The labels of whole chains that are shipped, and how `data/rebuild.py` makes them."""

import importlib.util
from pathlib import Path

import numpy as np

from esmshard.io.paths import shipped

CONTACT = shipped("data") / "contact"


def label_table(*files: Path) -> str:
    spec = importlib.util.spec_from_file_location("rebuild", shipped("data") / "rebuild.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.label_table(files)


def test_shipped_labels_are_those_of_the_shipped_chains() -> None:
    text = (CONTACT / "labels.csv").read_text()
    assert text == label_table(*(CONTACT / f"{split}.npz" for split in ("train", "valid", "test")))
    assert len(text.splitlines()) == 1 + 975


def test_folds_follow_from_the_shares_of_helix_and_strand(tmp_path: Path) -> None:
    lines = {
        "HGIC": "0.7500,0.0000,alpha",
        "EBCC": "0.0000,0.5000,beta",
        "HECC": "0.2500,0.2500,mixed",
        "HECCC": "0.2000,0.2000,irregular",
    }
    np.savez(tmp_path / "x.npz", names=list("dcba"), dssp8=list(lines)[::-1])
    rows = [f"{name},{line}\n" for name, line in zip("abcd", lines.values(), strict=True)]
    assert label_table(tmp_path / "x.npz") == "".join(["id,helix,strand,fold\n", *rows])
