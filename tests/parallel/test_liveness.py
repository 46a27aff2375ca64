"""Whether a process still runs, by its id and its start."""

import os
import signal
import time

import pytest

from esmshard.parallel import liveness
from esmshard.parallel.liveness import process_lives, process_start


def test_processes_are_distinguished_by_their_start() -> None:
    time.sleep(0.05)  # more than a tick
    child = os.fork()
    if not child:
        signal.pause()
    try:
        assert int(process_start(child) or 0) > int(process_start(os.getpid()) or 0) > 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_process_of_another_user_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(pid: int, number: int) -> None:
        raise PermissionError

    start = process_start(os.getpid())
    monkeypatch.setattr(os, "kill", forbidden)
    assert process_lives(os.getpid(), start) is True
    assert process_lives(os.getpid(), "1") is False


def test_without_a_start_time_nobody_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_lives(os.getpid(), None) is None
    start = process_start(os.getpid())
    monkeypatch.setattr(liveness, "process_start", lambda pid: None)
    assert process_lives(os.getpid(), start) is None
    assert process_lives(2**40, None) is False
    monkeypatch.setattr(os, "name", "nt")
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("ends a process on Windows"))
    assert process_lives(2**22, None) is None
