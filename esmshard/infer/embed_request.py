"""What `embed` is asked for: checked before the input is read."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from esmshard.errors import UsageError
from esmshard.infer.formats import DEFAULT_POOL, FORMATS, bytes_of, check_place, suits
from esmshard.infer.model_hash import model_hash
from esmshard.infer.outputs import DTYPES, Dtype, Long, choose
from esmshard.infer.product_index import Index
from esmshard.infer.product_plan import Spec
from esmshard.model import weights
from esmshard.model.weights import Weights
from esmshard.parallel.mesh import precision_on

PARTS = "parts"
"""The format that is a directory, the product itself."""


@dataclass(frozen=True)
class Request:
    """What is to be computed and where it goes, checked as far as it can be without reading the input."""

    model: str
    out: Path
    fmt: str
    spec: Spec
    found: Weights
    device: torch.device

    @property
    def facts(self) -> dict[str, Any]:
        """What is written down besides."""
        return {"model": self.model, "architecture": asdict(self.found.config), "notices": self.found.notices}


def request(
    model: str,
    out: Path,
    *,
    fmt: str | None = None,
    pools: Sequence[str] = (),
    layers: Sequence[int] = (),
    dtype: str = "fp32",
    precision: str = "auto",
    long: Long = Long(),  # noqa: B008  # frozen
) -> Request:
    """Check what is asked for, and find the model.

    Args:
        model: see `esmshard.model.weights.read`.
        out: file or directory to write.
        fmt: a key of FORMATS, or `parts`; by default the ending of `out`, and `parts` without one.
        pools: see `Output`; by default what the format holds mostly.
        layers: 0 (embedding) to the number of layers; the last, normed one by default.
        dtype: of the numbers in the file.
        precision: of the arithmetic: fp32, bf16, fp16 or `auto`, which takes what the device is fast in.
        long: what becomes of long sequences.

    Raises:
        UsageError: what cannot be computed or written.
        InputError: the model cannot be read.
    """
    fmt = fmt or out.suffix.removeprefix(".") or PARTS
    if fmt not in (*FORMATS, PARTS):
        known = ", ".join([*FORMATS, f"{PARTS} (a directory)"])
        raise UsageError(f"{out}: no format '{fmt}'; there are {known} (by ending, or --format)")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: one of {', '.join(DTYPES)} is expected")
    found = weights.read(model)
    outputs = choose(list(pools) or [DEFAULT_POOL.get(fmt, "mean")], list(layers), found.config.n_layers, model)
    for pool, part in (("logits", "lm_head"), ("contacts", "contact_head")):
        if any(one.pool == pool for one in outputs) and part in found.unlearned:
            raise UsageError(f"--pool {pool}: {model} has no trained {part}, which they come from; take another model")
    if fmt != PARTS:
        suits(fmt, outputs, dtype, out)  # type: ignore[arg-type]
    device = weights.default_device()
    if precision not in ("auto", *DTYPES):
        raise UsageError(f"--precision {precision}: auto, {', '.join(DTYPES)} are expected")
    compute: Dtype = precision_on(device, precision)  # type: ignore[arg-type]
    longest = found.config.max_positions
    if longest is not None and long.mode != "full" and long.window > longest - 2:
        raise UsageError(f"--window {long.window}: {model} has positions for {longest - 2} residues")
    spec = Spec(model_hash(found), outputs, found.config.dim, dtype, compute, long.check())  # type: ignore[arg-type]
    return Request(model, out, fmt, spec, found, device)


def check_output(asked: Request, *, overwrite: bool) -> None:
    """Refuse to replace what is at the output, unless told to."""
    out = asked.out
    if asked.fmt != PARTS:
        check_place(asked.fmt, out, overwrite=overwrite)
    elif out.exists():
        if not overwrite:
            raise UsageError(f"{out}: exists already; choose another name or pass --overwrite")
        if not (out / "manifest.json").is_file():
            raise UsageError(f"{out}: is no directory of embeddings, so it is not replaced; choose another name")


def file_bytes(asked: Request, index: Index, records: int, fmt: str | None = None) -> int:
    """Bytes of the file that is made of a product."""
    total = 0
    for start in range(0, records, 1 << 16):
        stop = min(start + (1 << 16), records)
        kept = asked.spec.long.kept(index.lengths[start:stop].astype("int64"))
        text = index.ids[start : stop + 1]
        ids = int(text[-1] - text[0])
        total += bytes_of(fmt or asked.fmt, asked.spec.outputs, asked.spec.dtype, asked.spec.dim, kept, ids)
    return total
