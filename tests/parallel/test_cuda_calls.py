"""What a run asks of CUDA, seen without a GPU: each call is replaced by a note of it."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from esmshard.checkpoint import sharded
from esmshard.checkpoint.sharded import Saver
from esmshard.devices import is_out_of_memory
from esmshard.model.convolutions import exact_convolutions
from esmshard.parallel.cuda_allocator import expandable_segments
from esmshard.planner import memory_model
from esmshard.tasks.base import on_device_of

GPU, CPU = torch.device("cuda", 1), torch.device("cpu")


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was told to the allocator."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("emptied"))
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return told


def test_segments_grow_during_a_run(switched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "empty", lambda size, **options: asked.append(options["device"]))
    with expandable_segments(GPU):
        assert switched == ["emptied", "expandable_segments:True"]
    assert switched == ["emptied", "expandable_segments:True", "expandable_segments:False"]
    assert asked == [GPU]


def test_they_stay_as_they_are_where_the_driver_takes_no_part(
    switched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*rest: Any, **options: Any) -> None:
        raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(torch, "empty", refused)
    with expandable_segments(GPU):
        assert switched == ["emptied", "expandable_segments:True", "expandable_segments:False"]


def test_the_allocator_of_who_has_configured_it_is_left_alone(
    switched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with expandable_segments(CPU):
        pass
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    with expandable_segments(GPU):
        pass
    assert switched == []


def test_what_the_process_itself_holds_for_nothing_is_free(
    switched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700 if switched else 100, 1000))
    assert memory_model.free_bytes(GPU, 1) == 700


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
    assert chosen == [("checkpoint", 3)]


def test_targets_lie_beside_the_output() -> None:
    targets = torch.tensor([1, 2])
    assert on_device_of(targets, torch.zeros(3)) is targets
    assert on_device_of(targets, torch.zeros(3, device="meta")).device.type == "meta"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_that_say_that_memory_does_not_suffice(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
