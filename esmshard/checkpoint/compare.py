"""Whether a model that was written is the one that was to be written: tensor by tensor, and by what it computes."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from esmshard.batch import TokenBatch, pack, pack_variants
from esmshard.errors import InputError
from esmshard.model.config import ModelConfig
from esmshard.model.contacts import ContactAccumulators
from esmshard.model.trunk import ABSENT
from esmshard.model.weights import export
from esmshard.model.weights.export import Source
from esmshard.model.weights.streamed import streamed
from esmshard.tasks.base import attention_reader, head_outputs
from esmshard.vocab import CLS, EOS, MASK, SEPARATOR, VOCAB_SIZE, encode

TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest difference of an output, root mean square over that of the output itself, by the precision of the weights.

Rounding every weight to bf16 moves the outputs of ESM-2's shapes by about 1%, to fp16 by an eighth of that. A model
that it moves much further is a bad one to keep in that precision.
"""


class ComparedModel(NamedTuple):
    """Tensors to be compared."""

    source: Source
    """Reads a tensor for every name of the trunk, also of a part that the model lacks and no comparison uses."""
    names: frozenset[str]
    """The names of all tensors of the model, a tied tensor once."""
    head: Callable[[], nn.Module] | None
    """Makes the module that the tensors under `head.` belong to, if it is known."""


def compare(
    config: ModelConfig, given: ComparedModel, written: Source, where: str, dtype: torch.dtype
) -> dict[str, float]:
    """Compare a model with what was read back of it.

    One layer of one of them is in memory at a time. All arithmetic is fp32, so what differs comes from the weights.

    Args:
        config: of both.
        given: what was to be written.
        written: reads what was written, by the same names.
        where: it lies, for messages.
        dtype: in which it was written.

    Returns:
        For each output (`representations`, `logits`, `contacts`, `head`, as far as the model has them) the root mean
        square of its difference over that of the output. Zero for fp32.

    Raises:
        InputError: if a tensor differs by a bit, or an output by more than `TOLERANCE` or is not finite.
    """
    expected: dict[str, str] = {}

    def remember(name: str, tensor: torch.Tensor) -> None:
        expected[name] = export.digest(export.cast(name, tensor, dtype))

    def check(name: str, tensor: torch.Tensor) -> None:
        if export.digest(tensor) != expected[name]:
            raise InputError(f"{where}: {name} does not read back as it was written; check the disk, and try again")

    outputs = _outputs(config, given, remember)
    assert expected.keys() == given.names, "every tensor is looked at"
    found = _outputs(config, given._replace(source=written), check)
    differences: dict[str, float] = {}
    for name, output in outputs.items():
        if not output.isfinite().all():
            raise InputError(
                f"{where}: its {name} are no finite numbers: the model diverged when it was trained; take an earlier "
                "checkpoint, or train it again with a lower optim.lr"
            )
        spread = float(output.square().mean().sqrt())
        off = float((found[name] - output).square().mean().sqrt())
        differences[name] = off / spread if off else 0.0
        if not differences[name] <= TOLERANCE[dtype]:
            raise InputError(
                f"{where}: its {name} differ from the given model's by {differences[name]:.2g} of their size, more "
                f"than the {TOLERANCE[dtype]:g} that rounding to {str(dtype).removeprefix('torch.')} explains; "
                + ("check the disk, and try again" if dtype == torch.float32 else "write it as fp32")
            )
    return differences


def _outputs(
    config: ModelConfig, model: ComparedModel, seen: Callable[[str, torch.Tensor], None]
) -> dict[str, torch.Tensor]:
    """Return the outputs of a model for two fixed proteins."""
    with torch.no_grad():
        trunk = streamed(config, model.source, lambda name, tensor: seen(name, tensor) if name in model.names else None)
        head = _head(model, seen)
        of_variants = hasattr(head, "reads_logits")
        batch = _variants() if of_variants else _proteins()
        has = {part: any(name.startswith(f"{part}.") for name in model.names) for part in ("lm_head", "contact_head")}
        regression, listeners = trunk.contact_head.regression, []
        sums = ContactAccumulators(len(batch), regression.weight, regression.bias)
        if has["contact_head"]:
            listeners.append(sums.add)
        attention = attention_reader(head, batch)
        if attention is not None:
            listeners.append(attention.add)

        def on_attention(layer: int, sequence: int, q_THK: torch.Tensor, k_THK: torch.Tensor) -> None:
            for add in listeners:
                add(layer, sequence, q_THK, k_THK)

        x_TD, logits_PV = trunk(
            batch,
            logits_at=torch.arange(batch.bounds[-1]) if has["lm_head"] else None,
            on_attention=on_attention if listeners else None,
        )
        x_TD = x_TD[config.n_layers]
        found = {"representations": x_TD}
        if logits_PV is not None:
            # Columns of tokens that the family lacks are left out: beside their size, no difference would count.
            found["logits"] = logits_PV[:, (logits_PV != ABSENT).any(0)]
        if has["contact_head"]:
            found["contacts"] = torch.cat([logits_1LL.flatten() for logits_1LL in sums.logits()])
        if head is not None:
            changed_MV = logits_PV[batch.logits_at_P] if of_variants and logits_PV is not None else None
            outputs = head_outputs(head, x_TD, batch, attention, changed_MV)
            found["head"] = torch.cat([output.flatten() for output in outputs])
    return found


def _head(model: ComparedModel, seen: Callable[[str, torch.Tensor], None]) -> nn.Module | None:
    """The task head with its tensors, if there is one and it is known what it computes."""
    own = sorted(name for name in model.names if name.startswith("head."))
    tensors = dict(model.source(own)) if own else {}
    for name, tensor in tensors.items():
        seen(name, tensor)
    if not own or model.head is None:
        return None
    head = model.head()
    head.load_state_dict({name.removeprefix("head."): tensor.float() for name, tensor in tensors.items()})
    return head.eval()


UBIQUITIN = "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"


def _variants() -> TokenBatch:
    """Two variants of ubiquitin, one of them with two changes, and itself."""
    variants = [UBIQUITIN.replace("GIPP", "GIAP"), UBIQUITIN.replace("RLRGG", "RLKGA")]
    return pack_variants([encode(one) for one in variants], encode(UBIQUITIN), logits=True)


def _proteins() -> TokenBatch:
    """Every token that a model reads as it stands but the two ends, in order; and ubiquitin with a residue masked."""
    every = [token for token in range(VOCAB_SIZE) if token not in (CLS, EOS, SEPARATOR)]
    second = encode(UBIQUITIN).copy()
    second[40] = MASK
    return pack([np.array([CLS, *every, EOS], dtype=np.uint8), second], ["alphabet", "ubiquitin"])
