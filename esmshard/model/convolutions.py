"""Convolutions of fp32 numbers that are computed in fp32 on GPUs too."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch


@contextmanager
def exact_convolutions(device: torch.device) -> Iterator[None]:
    """Keep cuDNN from rounding the inputs of fp32 convolutions during a `with` block.

    From Ampere on, cuDNN uses TF32 by default, with 10 bits of mantissa, while torch computes matrix products of fp32
    numbers in fp32. The contact map of a model would differ by 1e-3 between a GPU and a CPU. The heads have few
    convolutions, so that fp32 costs little; bf16 and fp16 do not change.

    Args:
        device: device of the weights. Only for CUDA is anything changed: the setting holds for the whole process.
    """
    if device.type != "cuda":
        yield
        return
    # torch has an old and a new name for this setting. Once the new one has been used, reading the old one raises an
    # error for every library in the process. So the old one is used, unless the user has used the new one already.
    settings: Any = torch.backends.cudnn
    name, exact = "allow_tf32", cast(Any, False)
    try:
        before = settings.allow_tf32
    except RuntimeError:
        settings, name, exact = settings.conv, "fp32_precision", "ieee"
        before = settings.fp32_precision
    setattr(settings, name, exact)
    try:
        yield
    finally:
        setattr(settings, name, before)
