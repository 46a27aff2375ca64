"""Makes `tests/golden/esm3.safetensors`: what the authors' ESM3 says of two proteins, each alone, with weights by name.

Run it where the package `esm` is Biohub's (3.4.1.post1 made the file), and not fair-esm, which has the same name:

    pip install --target DIR --no-deps --ignore-requires-python esm==3.4.1.post1
    pip install --target DIR --no-deps einops attrs biotite biotraj msgpack msgpack-numpy cloudpathlib httpx tenacity
    PYTHONPATH=DIR python tests/parity/esm3_golden.py tests/golden/esm3.safetensors

`--whole` stores all numbers of the gradients and the weights, some megabytes; the test that compares them runs where
`ESMSHARD_TEST_ESM3` names DIR.
"""

import json
import sys
import types
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

SIZES = {"d_model": 128, "n_heads": 2, "v_heads": 8, "n_layers": 2}
"""Those of esm3_nano."""
TOKENS = [[0, 20, 15, 32, 11, 5, 24, 2], [0, 19, 2]]
"""`<cls> M K <mask> T A X <eos>` and `<cls> Y <eos>`."""
TARGETS = [[0, 20, 15, 7, 11, 5, 24, 2], [0, 19, 2]]
"""What the cross-entropy, summed over all tokens of both, asks for."""
PLACES = 24
"""Numbers of each gradient that are kept: those that are largest, and as many at equal distances."""


def weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Draw weights by name, none at its usual initial value. NumPy keeps the numbers of `RandomState` for ever."""
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
    """Return the places of the kept numbers of a flat gradient, int32."""
    largest = gradient.abs().topk(min(PLACES, len(gradient))).indices
    spread = torch.linspace(0, len(gradient) - 1, PLACES, dtype=torch.float64).long()
    return torch.cat((largest, spread)).int()


def main(out: Path, whole: bool) -> None:
    """Run the authors' model, and write its numbers."""
    from esm.models.esm3 import ESM3
    from safetensors.torch import save_file

    tokenizers = types.SimpleNamespace(sequence=types.SimpleNamespace(mask_token_id=32))
    nothing = dict.fromkeys(("structure_encoder_fn", "structure_decoder_fn", "function_decoder_fn"))
    model = ESM3(**SIZES, **nothing, tokenizers=tokenizers).eval()  # type: ignore[call-arg]
    model.load_state_dict(weights({name: tensor.shape for name, tensor in model.state_dict().items()}))
    hidden: list[torch.Tensor] = []
    model.transformer.blocks[0].register_forward_pre_hook(lambda block, inputs: hidden.append(inputs[0]))
    for block in model.transformer.blocks[:-1]:
        block.register_forward_hook(lambda block, inputs, output: hidden.append(output))
    model.transformer.norm.register_forward_hook(lambda norm, inputs, output: hidden.append(output))
    found: dict[str, list[torch.Tensor]] = {}
    loss = torch.zeros(())
    for tokens, targets in zip(TOKENS, TARGETS, strict=True):
        hidden.clear()
        logits = model(sequence_tokens=torch.tensor([tokens])).sequence_logits[0]
        for n, x in enumerate(hidden):
            found.setdefault(f"layer.{n}", []).append((x[0] if isinstance(x, tuple) else x)[0].detach())
        found.setdefault("logits", []).append(logits.detach())
        loss = loss + torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="sum")
    loss.backward()
    stored = {name: torch.cat(parts) for name, parts in found.items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            flat = parameter.grad.flatten()
            at = torch.arange(len(flat), dtype=torch.int32) if whole else places(flat)
            stored |= {f"places.{name}": at, f"gradient.{name}": flat[at.long()]}
    if whole:
        stored |= {f"state.{name}": tensor for name, tensor in model.state_dict().items()}
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    save_file(stored, out, {"shapes": json.dumps(shapes)})


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--whole" in sys.argv)
