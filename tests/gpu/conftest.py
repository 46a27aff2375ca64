"""Tests that need an NVIDIA GPU. With `ESMSHARD_REHEARSAL=1` the same code runs on the CPU with tiny sizes."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

REHEARSAL = os.environ.get("ESMSHARD_REHEARSAL") == "1"
if REHEARSAL:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything asks for a GPU; processes see none either

import pytest  # noqa: E402
import torch  # noqa: E402


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Rehearse the first and the last case of each test: the others differ in sizes and options, and not in code."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items if REHEARSAL else ():
        if item.path.parent == Path(__file__).parent:
            cases.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    left_out = {case for several in cases.values() for case in several[1:-1]}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU in a rehearsal."""
    if REHEARSAL:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; ESMSHARD_REHEARSAL=1 rehearses on the CPU")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session", autouse=True)
def _cores() -> Iterator[None]:
    """Let the references on the CPU use more than one core: whoever has a GPU has some."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if REHEARSAL else min(16, os.cpu_count() or 1))
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    """Give the memory of a test back to the GPU, and reset what was counted."""
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@pytest.fixture
def varlen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed attention as a GPU has it. In a rehearsal an implementation of the same operator stands in for the kernel,
    so that everything around it is the same: its place in autograd, in checkpointing and in compiled graphs.
    """
    if device.type == "cpu":
        from stand_in import varlen_on_the_cpu

        varlen_on_the_cpu(monkeypatch)


@cache
def _conftest_of_all_tests() -> ModuleType:
    path = Path(__file__).parent.parent / "conftest.py"
    spec = importlib.util.spec_from_file_location("conftest_of_all_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def __getattr__(name: str) -> object:
    """What other tests import from `conftest`: pytest gives that name to the file that it has read last, this one."""
    return getattr(_conftest_of_all_tests(), name)
