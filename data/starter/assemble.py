"""Combine the training stages of a shipped model in one directory, `data/starter/model` or `data/demo/model`.

    python data/starter/assemble.py WORK OUT [STAGE]

WORK has the output of the recipes in `data/starter` or `data/demo` (see data/README.md). The trunk and its head are
from STAGE: `contact` (the default) or `mlm`. With `contact`, the head of the language model is from the stage
`lm_head`, and the regression over attention maps is from the stage `probe`. Both stages froze this trunk. The weights
are saved in fp16 to halve the file size. The model card is not part of the output; it was written by hand.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from esmshard.io.paths import sha256
from esmshard.model import weights

FROM = {
    "lm_head": ("lm_head.", "lm_head."),
    "probe": ("head.regression.", "esm.contact_head.regression."),
}
"""For each stage after `contact`: the prefix of its tensors in the stage, and in the output."""


def main(work: Path, out: Path, first: str = "contact") -> None:
    """Write `model.safetensors`, `esmshard.json` and the other model files to `out`."""
    main_stage, parts = work / first / "model", FROM if first == "contact" else {}
    found = load_file(main_stage / "model.safetensors")
    for name, (theirs, ours) in parts.items():
        stage = work / name / "model"
        given = load_file(stage / "model.safetensors")
        trunk = [key for key in given if key.startswith("esm.") and ".contact_head." not in key]
        if not trunk or not all(torch.equal(given[key], found[key]) for key in trunk):
            raise SystemExit(f"{stage}: is not of the trunk in {main_stage}; run its recipe again")
        new = {ours + key.removeprefix(theirs): given[key] for key in given if key.startswith(theirs)}
        if not new:
            raise SystemExit(f"{stage}: lacks {theirs}*; it is not what this recipe writes")
        found |= new

    out.mkdir(parents=True, exist_ok=True)
    halves = {key: tensor if key.endswith("inv_freq") else tensor.half() for key, tensor in found.items()}
    save_file(halves, out / "model.safetensors", {"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    for path in main_stage.iterdir():
        if path.name not in ("README.md", "esmshard.json", "model.safetensors"):
            shutil.copyfile(path, out / path.name)
    about = json.loads((main_stage / "esmshard.json").read_text())
    about["dtype"] = "fp16"
    about |= weights.record({"model.safetensors": sha256(out / "model.safetensors")})
    for split in about["data"].values():
        split["path"] = Path(split["path"]).name
    config = (out / "config.json").read_text()
    (out / "config.json").write_text(config.replace('"torch_dtype": "float32"', '"torch_dtype": "float16"'))
    # Paths in the file begin with WORK, or are relative to the model directory of the stage.
    text = json.dumps(about, indent=1).replace(f"{work}/", "").replace('"../../', '"')
    (out / "esmshard.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
