"""Makes `tests/golden/esm3_structure_encoder.safetensors` with the authors' code (see `esm3_golden.py`).

PYTHONPATH=DIR python tests/parity/esm3_encoder_golden.py tests/golden/esm3_structure_encoder.safetensors
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from esm3_golden import weights

SIZES = {"d_model": 64, "n_heads": 1, "v_heads": 8, "n_layers": 2, "d_out": 16, "n_codes": 128}
LENGTHS = {"long": 90, "short": 9, "none": 4}


def proteins() -> dict[str, np.ndarray]:
    """Return coordinates [L, 3, 3] of a protein with more residues than positions and with unknown residues, of a
    protein with fewer residues than neighbours, and of a protein without a structure.
    """
    numbers, found = np.random.RandomState(7), {}
    for name, length in LENGTHS.items():
        alpha = 2.2 * numbers.standard_normal((length, 1, 3)).cumsum(0)
        coordinates = (alpha + 1.4 * numbers.standard_normal((length, 3, 3))).astype(np.float32)
        unknown = {"long": [0, 30, 31, 32, 33, 34, 89], "short": [4], "none": range(length)}[name]
        coordinates[list(unknown)] = np.nan
        found[name] = coordinates
    found["long"][50, 2, 1] = np.nan
    return found


def main(out: Path) -> None:
    """Run the authors' encoder, and write its numbers."""
    from esm.models.vqvae import StructureTokenEncoder
    from safetensors.torch import save_file

    encoder = StructureTokenEncoder(**SIZES).eval()
    shapes = {name: list(tensor.shape) for name, tensor in encoder.state_dict().items()}
    encoder.load_state_dict(weights(shapes))
    described: list[torch.Tensor] = []
    encoder.pre_vq_proj.register_forward_hook(lambda module, inputs, output: described.append(output[0]))
    stored: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        # The codes lie near vectors of residues. Otherwise a few codes would be the nearest to all residues.
        encoder.encode(torch.from_numpy(proteins()["long"])[None])
        around, spread = described[0].repeat(2, 1)[: SIZES["n_codes"]], 0.02 * encoder.codebook.embeddings
        stored["codes"] = encoder.codebook.embeddings.copy_(around + spread)
        for name, coordinates in proteins().items():
            _, tokens = encoder.encode(torch.from_numpy(coordinates)[None])
            stored |= {f"{name}.tokens": tokens[0], f"{name}.described": described[-1]}
    save_file(stored, out, {"shapes": json.dumps(shapes)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
