"""torchrun_wrapper.sh, executed around small programs that behave like torchrun."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import esmshard

WRAPPER = Path(esmshard.__file__).parent / "cluster" / "templates" / "torchrun_wrapper.sh"

SHELLS = [name for name in ("sh", "bash", "busybox") if shutil.which(name)]

RANK = """
trap 'echo asked >> rank-$1; exit 0' TERM
echo started >> rank-$1
while :; do sleep 0.1; done
"""

# Ends with 0 when its two ranks have ended, as torchrun does. A rank writes the status when training begins. At the end
# no other process is started: the wrapper would take it for a rank.
TORCHRUN = """
trap 'echo asked >> torchrun; kill $ranks 2>/dev/null; exit 1' TERM
[ ! -e begun.json ] || { mv begun.json status.json; ended=$(cat ended.json); }
sh rank.sh 0 &
ranks=$!
sh rank.sh 1 &
ranks="$ranks $!"
wait
[ -z "$ended" ] || echo "$ended" > status.json
"""


def _status(state: str, step: int = 3) -> str:
    return json.dumps({"state": state, "step": step, "message": 'it said "state": "done"'}, indent=1) + "\n"


class Wrapper:
    """The wrapper around a shell program, in a directory of its own."""

    def __init__(
        self,
        directory: Path,
        program: str,
        shell: str = "sh",
        status: str = "status.json",
        patience: str = "120",
        **extra: str,
    ) -> None:
        (directory / "rank.sh").write_text(RANK)
        (directory / "torchrun.sh").write_text(program)
        words = [*(["busybox", "sh"] if shell == "busybox" else [shell]), "-c"]
        words += [WRAPPER.read_text().replace("-lt 120", f"-lt {patience}"), WRAPPER.name, status]
        self._directory = directory
        self.process = subprocess.Popen(
            [*words, "sh", "torchrun.sh"],
            cwd=directory,
            env={**os.environ, **extra},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def read(self, name: str) -> list[str]:
        file = self._directory / name
        return file.read_text().split() if file.exists() else []

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 600
        while True:
            is_over = self.process.poll() is not None
            if condition():
                return
            assert not is_over, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.02)

    def end(self) -> int:
        try:
            _, errors = self.process.communicate(timeout=600)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        assert errors == ""
        return self.process.returncode


def test_shellcheck_is_content() -> None:
    shellcheck = shutil.which("shellcheck") or str(Path(sys.executable).with_name("shellcheck"))
    checked = subprocess.run([shellcheck, "--shell=sh", WRAPPER], check=False, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.parametrize(
    ("code", "state", "expected"),
    [
        (0, "done", 0),
        (0, "preempted", 75),
        (0, "running", 75),
        (0, "failed", 1),
        (0, None, 75),
        (1, "preempted", 1),
        (1, "done", 1),
        (137, "running", 137),
    ],
)
def test_exit_codes(tmp_path: Path, code: int, state: str | None, expected: int) -> None:
    if state is not None:
        (tmp_path / "status.json").write_text(_status(state))
    assert Wrapper(tmp_path, f"exit {code}").end() == expected


def test_a_command_without_a_status_keeps_its_code(tmp_path: Path) -> None:
    assert Wrapper(tmp_path, "exit 0", status="").end() == 0
    assert Wrapper(tmp_path, "exit 1", status="").end() == 1
    assert Wrapper(tmp_path, "kill -KILL $$").end() == 128 + signal.SIGKILL


def _begun(directory: Path, before: str | None, ended: str, program: str = TORCHRUN, **options: str) -> Wrapper:
    """Training has begun in two ranks. `before` is the state of an earlier start."""
    if before is not None:
        (directory / "status.json").write_text(_status(before))
    (directory / "begun.json").write_text(_status("running", step=4))
    (directory / "ended.json").write_text(_status(ended, step=5))
    wrapper = Wrapper(directory, program, **options)
    wrapper.wait_for(lambda: bool(wrapper.read("rank-0") and wrapper.read("rank-1")))
    return wrapper


@pytest.mark.parametrize("shell", SHELLS)
def test_ranks_are_asked_once_and_torchrun_is_not(tmp_path: Path, shell: str) -> None:
    wrapper = _begun(tmp_path, None, "preempted", shell=shell)
    wrapper.process.terminate()
    wrapper.wait_for(lambda: "asked" in wrapper.read("rank-0"))
    wrapper.process.terminate()  # a second time changes nothing
    assert wrapper.end() == 75
    assert wrapper.read("rank-0") == wrapper.read("rank-1") == ["started", "asked"]
    assert wrapper.read("torchrun") == []


@pytest.mark.parametrize(("before", "ended", "expected"), [("preempted", "done", 0), ("done", "preempted", 75)])
def test_the_status_of_this_start_counts(tmp_path: Path, before: str, ended: str, expected: int) -> None:
    wrapper = _begun(tmp_path, before, ended)
    wrapper.process.terminate()
    assert wrapper.end() == expected


def test_before_training_begins_torchrun_ends(tmp_path: Path) -> None:
    """A rank that left alone would have torchrun close the rendezvous to the pod that comes next."""
    (tmp_path / "status.json").write_text(_status("done"))
    wrapper = Wrapper(tmp_path, TORCHRUN)
    wrapper.wait_for(lambda: bool(wrapper.read("rank-0") and wrapper.read("rank-1")))
    wrapper.process.terminate()
    assert wrapper.end() == 143
    assert wrapper.read("torchrun") == ["asked"]


def test_ranks_that_are_started_again_end_with_torchrun(tmp_path: Path) -> None:
    again = "sh rank.sh 2 & ranks=$!\nwait\n"
    wrapper = _begun(tmp_path, None, "running", TORCHRUN + again)
    wrapper.process.terminate()
    assert wrapper.end() == 143
    assert wrapper.read("rank-0") == ["started", "asked"]
    assert wrapper.read("torchrun") == ["asked"]


def test_a_torchrun_that_waits_in_vain_for_the_others_is_ended(tmp_path: Path) -> None:
    """Ranks that were lost to the others, and have left with 0, so that torchrun waits for the other machines."""
    wrapper = _begun(tmp_path, None, "running", TORCHRUN + "while :; do :; done", patience="2")
    wrapper.process.terminate()
    assert wrapper.end() == 143
    assert wrapper.read("torchrun") == ["asked"]


def test_the_first_pod_hosts_the_rendezvous(tmp_path: Path) -> None:
    for index, host in (("0", 1), ("10", 0)):
        variables = {"PET_RDZV_CONF": "read_timeout=9", "JOB_COMPLETION_INDEX": index}
        wrapper = Wrapper(tmp_path, 'echo "conf:$PET_RDZV_CONF" > seen', status="", **variables)
        assert wrapper.end() == 0
        assert wrapper.read("seen") == [f"conf:read_timeout=9,is_host={host}"]
