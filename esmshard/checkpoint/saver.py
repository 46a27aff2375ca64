"""The checkpoints of a run, written while all ranks wait, or in the background while training continues."""

import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from esmshard.checkpoint import sharded

PATIENCE = 60.0
"""Seconds for which a run that ends with an error waits for a checkpoint being written; other ranks may be gone or
stuck.
"""


class Saver:
    """The writer of one run's checkpoints. Every rank creates one, and calls it at the same steps.

    Use it as `with saver:`, so that a checkpoint being written is finished first when an error ends the run.

    In the background mode, `save` copies this rank's shards to the host and returns. A thread writes them, and
    communicates with the other ranks over a group of its own, because messages of two threads over one group would be
    mixed up. There is one copy, which is created at the first save and used again, so a save waits for the save before
    it. The host needs room for the shards of its ranks once (weights and both moments: 12 bytes for each trained
    parameter). With GPUs it is up to twice that, because torch rounds each tensor of page-locked memory up to a power
    of two.

    Args:
        directory: `checkpoints` of the run.
        keep: the number of newest checkpoints to keep.
        background: write while training continues.
    """

    def __init__(self, directory: Path, keep: int, background: bool) -> None:
        self._directory, self._keep, self._background = directory, keep, background
        # Both modes use a group of their own, so they share their code, and no check of one rank costs a GPU a kernel.
        self._group: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._staged: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif self._thread is not None:
            self._thread.join(PATIENCE)

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], best: bool = False
    ) -> None:
        """Write a checkpoint, after the one before it; see `esmshard.checkpoint.sharded.write`.

        An error of the save before is raised here, too.
        """
        self.finish()
        if not self._background:
            self._write(step, tensors, state, best)
            return
        self._stage(tensors)
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(target=self._run, args=(step, state, best, gpu), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until nothing is being written. An error of the background thread is raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], best: bool) -> None:
        sharded.write(self._directory, step, tensors, state, keep=self._keep, best=best, group=self._group)

    def _run(self, step: int, state: Mapping[str, Any], best: bool, gpu: int | None) -> None:
        try:
            if gpu is not None:
                # DCP waits for the current GPU. In a new thread this is the machine's first GPU, on which each rank
                # would then take half a gigabyte.
                torch.cuda.set_device(gpu)
            self._write(step, self._staged, state, best)
        except BaseException as error:  # raised again in the main thread
            self._error = error

    def _stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy all shards into the host's buffers. From a GPU all copies start before the first one is awaited."""
        for name, tensor in tensors.items():
            shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            kept = self._staged.get(name)
            buffer = kept.to_local() if isinstance(kept, DTensor) else kept
            if buffer is None or buffer.shape != shard.shape or buffer.dtype != shard.dtype:
                buffer = torch.empty_like(shard, device="cpu", pin_memory=shard.is_cuda)
                # `from_local` is not used, since it would move the buffer to the mesh's device.
                self._staged[name] = buffer
                if isinstance(tensor, DTensor):
                    whole = DTensor(buffer, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
                    self._staged[name] = whole
            buffer.copy_(shard.detach(), non_blocking=True)
        for gone in self._staged.keys() - tensors.keys():
            del self._staged[gone]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
