"""What a run asks of CUDA, seen without a GPU: each call is replaced by a note of it."""

import threading
from pathlib import Path

import pytest
import torch

from esmshard import planner
from esmshard.checkpoint import sharded
from esmshard.checkpoint.sharded import Saver
from esmshard.devices import exact_convolutions, is_out_of_memory

GPU, CPU = torch.device("cuda", 1), torch.device("cpu")


def test_what_the_process_itself_holds_for_nothing_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700 if emptied else 100, 1000))
    assert planner.free_bytes(GPU, 1) == 700


def test_convolutions_are_exact_on_a_gpu_and_afterwards_as_before() -> None:
    settings = torch.backends.cudnn.conv
    before = settings.fp32_precision
    assert before == "tf32", "the default, in which they are not"
    with exact_convolutions(CPU):
        assert settings.fp32_precision == before
    for user in (before, "ieee"):  # who has used the newer name of the setting cannot ask by the older one any more
        settings.fp32_precision = user
        with exact_convolutions(GPU):
            assert settings.fp32_precision in ("ieee", "none")
        assert settings.fp32_precision == user
    settings.fp32_precision = before
    assert torch.backends.cudnn.allow_tf32 is True


def test_a_thread_that_writes_a_checkpoint_works_on_the_gpu_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    with Saver(tmp_path, 1, background=True) as saver:
        monkeypatch.setattr(sharded, "write", lambda *rest, **options: None)
        saver.save(1, {"x": torch.zeros(2)}, {})
    assert chosen == [("checkpoint_0", 3)]


def test_errors_that_say_that_memory_does_not_suffice() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    for text in ("DefaultCPUAllocator: can't allocate memory: ...", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when ..."):
        assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
