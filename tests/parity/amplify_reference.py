"""Makes `tests/golden/amplify.safetensors` with the authors' code.

    git clone https://github.com/chandar-lab/AMPLIFY       # commit 2fd2c08
    pip install --no-deps --target DIR xformers             # for its SwiGLU
    PYTHONPATH=DIR python tests/parity/amplify_reference.py AMPLIFY/src OUT

Every parameter differs from its initial value, because norms of 1 and biases of 0 would hide swapped names.
"""

import importlib
import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

SETTINGS = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
SEQUENCES = ("MKTAYIAKQRQISFVKSHFSRQ", "M", "MXBUZO<mask>KT", "ACDEFGHIKLMNPQRSTVWY" * 3)
VOCABULARY = ("<pad>", "<unk>", "<mask>", "<bos>", "<eos>", "|", *"LAGVSERTIDPKQNFYMHWCB")


def authors_model(source: Path) -> tuple[type, type, type]:
    """The classes of model, configuration and tokenizer, without the rest of the package, which trains and plots."""
    package = types.ModuleType("amplify")
    package.__path__ = [str(source / "amplify")]
    sys.modules["amplify"] = package
    model = importlib.import_module("amplify.model.amplify")
    return model.AMPLIFY, model.AMPLIFYConfig, importlib.import_module("amplify.tokenizer").ProteinTokenizer


def main(source: Path, out: Path) -> None:
    """Write the file."""
    model_class, config_class, tokenizer_class = authors_model(source)
    vocabulary = source.parent / "conf" / "tokenizer" / "amplify_vocab.txt"
    assert vocabulary.read_text().split() == [*VOCABULARY]
    tokenizer = tokenizer_class(
        str(vocabulary),
        **{f"{role}_token_id": VOCABULARY.index(f"<{role}>") for role in ("pad", "mask", "bos", "eos", "unk")},
        other_special_token_ids=None,
    )
    rows = [tokenizer.encode([*text.replace("<mask>", "-")]) for text in SEQUENCES]
    for row, text in zip(rows, SEQUENCES, strict=True):
        if "<mask>" in text:
            row[1 + text.index("<mask>")] = VOCABULARY.index("<mask>")

    torch.manual_seed(0)
    model = model_class(config_class(**SETTINGS)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.3 * noise if parameter.ndim == 1 else noise / parameter.shape[1] ** 0.5)
    block = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    kept = block != 0
    mask = torch.zeros(block.shape).masked_fill(~kept, float("-inf"))
    found = {f"weights.{name}": tensor for name, tensor in model.state_dict().items()}
    said = model(block, mask, output_hidden_states=True, output_attentions=True)
    F.cross_entropy(said.logits[kept], block[kept]).backward()
    found |= {f"gradients.{name}": parameter.grad for name, parameter in model.named_parameters()}
    found |= {"tokens": block, "logits": said.logits[kept]}
    found |= {f"layers.{n}": x[kept] for n, x in enumerate([model.encoder(block), *said.hidden_states])}
    found["normed"] = model.layer_norm_2(said.hidden_states[-1])[kept]
    found["attention.0"] = said.attentions[0][0, :, : len(rows[0]), : len(rows[0])]
    with torch.no_grad():
        found |= {f"alone.{n}": model(row[None]).logits[0] for n, row in enumerate(rows)}
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in found.items()}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
