"""Makes `tests/golden/esm3.safetensors` with Biohub's package `esm`. fair-esm has the same name.

pip install --target DIR --no-deps --ignore-requires-python esm==3.4.1.post1
pip install --target DIR --no-deps einops attrs biotite biotraj msgpack msgpack-numpy cloudpathlib httpx tenacity
PYTHONPATH=DIR python tests/parity/esm3_golden.py tests/golden/esm3.safetensors
"""

import json
import sys
import types
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIZES = {"d_model": 128, "n_heads": 2, "v_heads": 8, "n_layers": 2}
TOKENS = [[0, 20, 15, 32, 11, 5, 24, 2], [0, 19, 2]]
"""`<cls> M K <mask> T A X <eos>` and `<cls> Y <eos>`."""
TARGETS = [[0, 20, 15, 7, 11, 5, 24, 2], [0, 19, 2]]
"""The targets of the cross-entropy, which is a sum over all tokens."""
STRUCTURED = [[0, 20, 15, 32, 11, 5, 24, 7, 19, 4, 2], [0, 19, 6, 2], [0, 9, 12, 32, 5, 2]]
"""Proteins with coordinates and structure tokens (`structures`). Their tokens are the targets."""
UNKNOWN = 4096
"""The structure token of a residue with an unknown structure."""
PLACES = 24
"""How many numbers of each gradient are saved: the largest, and as many at equal distances."""


def weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Draw weights by name, which differ from initial values. NumPy never changes the numbers of `RandomState`."""
    found = {}
    for name, shape in shapes.items():
        numbers = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape))
        if len(shape) == 1:
            numbers = 0.2 * numbers + (not name.endswith("bias"))
        else:
            numbers = 0.3 * numbers / (shape[1] ** 0.5 if ".weight" in name and "embed" not in name else 1)
        found[name] = torch.from_numpy(numbers.astype(np.float32))
    return found


def places(gradient: torch.Tensor) -> torch.Tensor:
    """Return the indices of the saved numbers in a flat gradient, int32."""
    largest = gradient.abs().topk(min(PLACES, len(gradient))).indices
    spread = torch.linspace(0, len(gradient) - 1, PLACES, dtype=torch.float64).long()
    return torch.cat((largest, spread)).int()


def structures() -> list[dict[str, np.ndarray]]:
    """Return coordinates and structure tokens for STRUCTURED. The first protein lacks a residue, an atom and a token.
    The second has unknown values only. The third has another position.
    """
    numbers, found = np.random.RandomState(5), []
    for n, tokens in enumerate(STRUCTURED):
        alpha = 3.8 * numbers.standard_normal((len(tokens), 1, 3)).cumsum(0)
        coordinates = (alpha + 1.4 * numbers.standard_normal((len(tokens), 3, 3))).astype(np.float32) + 20 * n
        codes = numbers.randint(0, UNKNOWN, len(tokens)).astype(np.int64)
        coordinates[[0, -1]], codes[[0, -1]] = np.nan, UNKNOWN
        if n == 0:
            coordinates[3], coordinates[7, 0, 2], codes[5] = np.nan, np.nan, UNKNOWN
        if n == 1:
            coordinates[:], codes[:] = np.nan, UNKNOWN
        found.append({"coordinates": coordinates, "structure_tokens": codes})
    return found


def answers(model: Any, inputs: Sequence[dict[str, torch.Tensor]], targets: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return representations and logits of proteins, computed one by one, and all gradients of their loss."""
    hidden: list[torch.Tensor] = []
    handles = [model.transformer.blocks[0].register_forward_pre_hook(lambda block, inputs: hidden.append(inputs[0]))]
    for part in (*model.transformer.blocks[:-1], model.transformer.norm):
        handles.append(part.register_forward_hook(lambda part, inputs, output: hidden.append(output)))
    found: dict[str, list[torch.Tensor]] = {}
    loss = torch.zeros(())
    for protein, target in zip(inputs, targets, strict=True):
        hidden.clear()
        logits = model(**{name: values[None] for name, values in protein.items()}).sequence_logits[0]
        for n, x in enumerate(hidden):
            found.setdefault(f"layer.{n}", []).append((x[0] if isinstance(x, tuple) else x)[0].detach())
        found.setdefault("logits", []).append(logits.detach())
        loss = loss + torch.nn.functional.cross_entropy(logits, torch.tensor(target), reduction="sum")
    for handle in handles:
        handle.remove()
    model.zero_grad()
    loss.backward()
    stored: dict[str, Any] = {name: torch.cat(parts) for name, parts in found.items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            stored[f"gradient.{name}"] = parameter.grad.flatten()
    return stored


def main(out: Path) -> None:
    """Run the authors' model, and write its numbers."""
    from esm.models.esm3 import ESM3
    from safetensors.torch import save_file

    tokenizers = types.SimpleNamespace(sequence=types.SimpleNamespace(mask_token_id=32))
    nothing = dict.fromkeys(("structure_encoder_fn", "structure_decoder_fn", "function_decoder_fn"))
    model = ESM3(**SIZES, **nothing, tokenizers=tokenizers).eval()  # type: ignore[call-arg]
    model.load_state_dict(weights({name: tensor.shape for name, tensor in model.state_dict().items()}))
    stored = answers(model, [{"sequence_tokens": torch.tensor(tokens)} for tokens in TOKENS], TARGETS)
    inputs = []
    for tokens, one in zip(STRUCTURED, structures(), strict=True):
        known = {"structure_coords": one["coordinates"], "structure_tokens": one["structure_tokens"]}
        given = {name: torch.from_numpy(values) for name, values in known.items()}
        unknown = np.isnan(one["coordinates"]).all()
        inputs.append({"sequence_tokens": torch.tensor(tokens)} | ({} if unknown else given))
    structured = answers(model, inputs, STRUCTURED)
    stored |= {f"structures.{name}": tensor for name, tensor in structured.items()}
    for name in [name for name in stored if "gradient." in name]:
        at = places(stored[name])
        stored |= {name.replace("gradient.", "places."): at, name: stored[name][at.long()]}
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    save_file(stored, out, {"shapes": json.dumps(shapes)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
