"""A worker of an embedding store: it claims and computes parts until none remains.

A worker can be a separate process, `python -m esmshard.embed.workers.embed_worker JSON`; see `main`.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esmshard import __version__
from esmshard.embed.compute.embedder import TORCH, Embedder, Failed
from esmshard.embed.store import part_plan
from esmshard.embed.store.embedding_store import note_file
from esmshard.embed.store.part_plan import Spec, read_plan, store_of
from esmshard.embed.store.parts import DONE, WINDOWED, PartLayout, PartWriter
from esmshard.embed.store.remote_store import RemoteStore
from esmshard.embed.store.reuse import Reuse
from esmshard.embed.store.row_index import RowIndex
from esmshard.embed.workers.claims import Worker, publish
from esmshard.embed.workers.remote_claims import worker_of
from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.attention import kernel_name
from esmshard.model.families.family_registry import family_of
from esmshard.model.weights import Weights, model_hash
from esmshard.progress import say
from esmshard.vocab import CLS, EOS

_CLS, _EOS = (np.array([token], np.uint8) for token in (CLS, EOS))

OFFLOADED_PACK = 16384
"""Tokens of a pack where layers are copied for each pack."""

Progressed = Callable[[int, int], None]
"""A function that is called with the number of finished rows and residues."""


def work(directory: Path, plan: Mapping[str, Any], embedder: Embedder, worker: Worker, progressed: Progressed) -> None:
    """Compute parts until each is finished or claimed by a worker that is alive.

    Args:
        directory: `OUT.partial`.
        plan: its plan.
        embedder: the embedder of the plan's spec.
        worker: the worker, which has been entered.
        progressed: called with progress.
    """
    spec = Spec.of(plan)
    reuse = Reuse(Path(plan["reuse"]), spec) if plan["reuse"] else None

    remote = RemoteStore.of(directory)

    def missing() -> list[int]:
        if remote is not None:
            remote.pull()
            if remote.is_over:
                return []
        return [k for k in range(plan["parts"]) if not note_file(directory, k).exists()]

    while True:
        for k in missing():
            if note_file(directory, k).exists() or not worker.claim(f"{k:06d}"):
                continue
            # the part may have been finished between the two checks
            if not note_file(directory, k).exists() and not (remote is not None and remote.is_done(k)):
                compute_part(directory, plan, spec, k, embedder, worker, reuse, progressed)
        if not worker.settle(lambda: [f"{k:06d}" for k in missing()]):
            return


def compute_part(
    directory: Path,
    plan: Mapping[str, Any],
    spec: Spec,
    part: int,
    embedder: Embedder,
    worker: Worker,
    reuse: Reuse | None,
    progressed: Progressed,
) -> None:
    """Compute one part and write it with its note. Arguments as for `work`, with the number of the part."""
    began = time.monotonic()
    index, store = RowIndex(directory / "index"), store_of(directory, plan)
    rows = slice(index.bounds[part], index.bounds[part + 1])
    first_U, content_U16, length_U = index.first[rows].tolist(), index.content[rows], index.lengths_of(part)
    layout = PartLayout(spec.kind, spec.long.kept(length_U))
    writer = PartWriter(directory / "parts" / f"{part:06d}-{worker.name}.safetensors", layout, content_U16)
    failed: list[tuple[int, str]] = []
    windowed: list[tuple[int, int]] = []
    try:
        taken = set()
        old_U = reuse.rows(content_U16) if reuse is not None else np.full(len(layout), -1, np.int64)
        for row in np.flatnonzero(old_U >= 0).tolist():
            assert reuse is not None
            values = reuse.get(int(old_U[row]), content_U16[row])
            if values is not None:
                writer.add(row, values)
                taken.add(row)
        if reuse is not None and reuse.damaged:
            say(f"{plan['reuse']}: {reuse.damaged} of its rows are damaged, and are computed again")
            reuse.damaged = 0
        progressed(len(taken), 0)
        todo = [row for row in range(len(layout)) if row not in taken]
        tokens = [with_ends(store.residues(first_U[row])) for row in todo]
        read = part_plan.tracks_of(directory, plan, family_of(embedder.esm.config).tracks)
        tracks = None if read is None else [read.get(first_U[row], slice(None)) for row in todo]
        for place, found in embedder.compute(tokens, tracks):
            row = todo[place]
            if isinstance(found, Failed):
                failed.append((row, found.reason))
            else:
                arrays = [found.values[one.name] for one in spec.outputs]
                buffers = [x.contiguous().view(-1).view(torch.uint8).numpy().data for x in arrays]
                writer.add(row, buffers, WINDOWED if found.windowed else DONE)
                if found.windowed:
                    windowed.append((row, found.windowed))
            progressed(1, int(length_U[row]))
        note = {
            "part": part,
            **writer.close(),
            "failed": sorted(failed),
            "windowed": sorted(windowed),
            "reused": len(taken),
            "dtype": spec.dtype,
            "compute": spec.compute,
            "kernel": kernel_name(embedder.device, TORCH[spec.compute]),
            "device": _device_name(embedder.device),
            "versions": {"esmshard": __version__, "torch": torch.__version__},
            "seconds": round(time.monotonic() - began, 3),
        }
        if (remote := RemoteStore.of(directory)) is not None:
            if not remote.publish(part, note, writer.path):
                writer.discard()
        elif not publish(note_file(directory, part), json.dumps(note, indent=1) + "\n"):
            writer.discard()  # this worker was suspended, and another worker was given the part and finished it first
        elif worker.succeeds(f"{part:06d}"):
            for path in writer.path.parent.glob(f"{part:06d}-*"):  # files of killed workers
                if path != writer.path:
                    path.unlink(missing_ok=True)
    except BaseException:
        if not note_file(directory, part).exists():
            writer.discard()
        raise


def with_ends(residues: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the residues between `<cls>` and `<eos>`, as the embedder expects them."""
    return np.concatenate((_CLS, residues, _EOS))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def make_embedder(
    plan: Mapping[str, Any], device: torch.device, tokens: int | None, offload: Path | None = None
) -> Embedder:
    """Open the model of a plan on a device. `InputError` if it is not the model that the plan was made for.

    Args:
        plan: the plan of the store.
        device: the computing device.
        tokens: tokens of a pack.
        offload: a directory for layers that fit neither on the device nor into memory. Each pass reads them.
    """
    spec, found = Spec.of(plan), checked_model(plan)
    dtype = TORCH[spec.compute]
    if offload is None:
        esm = weights.build(found, device, dtype).eval()
        return Embedder(esm, spec.outputs, dtype=spec.dtype, long=spec.long, tokens=tokens)
    from esmshard.embed.compute.offload import offloaded

    esm = offloaded(found, offload, dtype, device)
    # A pass copies the layers once, whatever its number of tokens. Packs at the same time would wait for each other.
    tokens = tokens or OFFLOADED_PACK
    return Embedder(esm, spec.outputs, dtype=spec.dtype, long=spec.long, tokens=tokens, device=device, workers=1)


def checked_model(plan: Mapping[str, Any]) -> Weights:
    """Open the weights of a plan's model. `InputError` if they are not those that the plan was made for."""
    found = weights.read(plan["facts"]["model"])
    spec = Spec.of(plan)
    if model_hash(found) != spec.model_hash:
        raise InputError(f"{found.source}: its weights were changed since; --overwrite starts over")
    return weights.joining(found, spec.chains, "--join")


def main() -> None:
    """Run a worker that a parent process started. It ends with the parent, and prints an error as JSON."""
    options = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    directory = Path(options["directory"])
    try:
        plan = read_plan(directory)
        embedder = make_embedder(plan, torch.device(options["device"]), options["tokens"])
        with worker_of(directory, options["beat"]) as worker:
            work(directory, plan, embedder, worker, worker.count)
    except (InputError, OSError) as error:
        text = str(error) if isinstance(error, InputError) else f"{error.filename or directory}: {error.strerror}"
        sys.stdout.write(json.dumps({"error": text, "errno": getattr(error, "errno", None)}))
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _end_with_parent() -> None:
    """End this process when its parent ends: the standard input is a pipe from the parent, which then closes."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
