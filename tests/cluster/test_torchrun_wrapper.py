"""torchrun_wrapper.sh, executed around small programs that behave like torchrun, all side by side from one shell."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import esmshard

WRAPPER = Path(esmshard.__file__).parent / "cluster" / "templates" / "torchrun_wrapper.sh"

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
# Starts `command` in each folder, and writes its process id and its exit code.
ALL = """
for folder in */; do (
    cd "$folder" || exit
    . ./variables
    sh command 2> errors &
    echo $! > new && mv new pid
    wait $!
    echo $? > new && mv new code
) & done
wait
"""
EXITS: dict[tuple[str, str | None], int] = {
    ("exit 0", "done"): 0,
    ("exit 0", "preempted"): 75,
    ("exit 0", "running"): 75,
    ("exit 0", "failed"): 1,
    ("exit 0", None): 75,
    ("exit 1", "preempted"): 1,
    ("exit 1", "done"): 1,
    ("exit 137", "running"): 137,
    ("kill -KILL $$", None): 137,
}
"""By what torchrun does and the state in status.json."""
BEGUN: dict[str, tuple[str | None, str, str, str, int]] = {
    "asked": (None, "preempted", TORCHRUN, "sh", 75),
    "asked, busybox": (None, "preempted", TORCHRUN, "busybox sh" if shutil.which("busybox") else "bash", 75),
    "ends as it is asked": ("preempted", "done", TORCHRUN, "sh", 0),
    "done before": ("done", "preempted", TORCHRUN, "sh", 75),
    # Ranks that are started again end with torchrun.
    "again": (None, "running", TORCHRUN + "sh rank.sh 2 & ranks=$!\nwait\n", "sh", 143),
    # Ranks that were lost to the others have left with 0, so that torchrun waits for the other machines, in vain.
    "waits": (None, "running", TORCHRUN + "while :; do :; done", "sh", 143),
}
"""The state of an earlier start, that after this one, the program, the shell, and the exit code."""


def _status(state: str, step: int = 3) -> str:
    return json.dumps({"state": state, "step": step, "message": 'it said "state": "done"'}, indent=1) + "\n"


def _written(folder: Path, program: str, *, shell: str = "sh", status: str = "status.json", **variables: str) -> Path:
    folder.mkdir()
    (folder / "rank.sh").write_text(RANK)
    (folder / "torchrun.sh").write_text(program)
    (folder / "wrapper.sh").write_text(WRAPPER.read_text().replace("-lt 120", "-lt 2"))
    (folder / "variables").write_text("".join(f"export {name}={value}\n" for name, value in variables.items()))
    words = f'exec {shell} -c "$(cat wrapper.sh)" {WRAPPER.name} "{status}" sh torchrun.sh\n'
    (folder / "command").write_text(words)
    return folder


def _wait_for(condition: Callable[[], object], folder: Path) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, folder
        time.sleep(0.02)


def _read(folder: Path, name: str) -> list[str]:
    file = folder / name
    return file.read_text().split() if file.exists() else []


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Start all wrappers that are written in folders of `tmp_path`; at the end none is left."""
    shells: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        shells.append(subprocess.Popen(["bash", "-c", ALL], cwd=tmp_path, start_new_session=True))

    yield start
    for shell in shells:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def test_exit_codes_signals_and_the_host_of_the_rendezvous(tmp_path: Path, start: Callable[[], None]) -> None:
    exits = []
    for n, ((program, state), code) in enumerate(EXITS.items()):
        folder = _written(tmp_path / f"exit {n}", program)
        if state is not None:
            (folder / "status.json").write_text(_status(state))
        exits.append((folder, code))
    for n in (0, 1):  # a command without a status keeps its code
        exits.append((_written(tmp_path / f"no status {n}", f"exit {n}", status=""), n))
    for index in ("0", "10"):
        variables = {"PET_RDZV_CONF": "read_timeout=9", "JOB_COMPLETION_INDEX": index}
        exits.append((_written(tmp_path / index, 'echo "conf:$PET_RDZV_CONF" > seen', status="", **variables), 0))

    begun = {name: tmp_path / name for name in BEGUN}
    for name, (before, ended, program, shell, _) in BEGUN.items():
        _written(begun[name], program, shell=shell)
        if before is not None:
            (begun[name] / "status.json").write_text(_status(before))
        (begun[name] / "begun.json").write_text(_status("running", step=4))
        (begun[name] / "ended.json").write_text(_status(ended, step=5))
    # A rank that left alone before training would have torchrun close the rendezvous to the pod that comes next.
    begun["before training"] = _written(tmp_path / "before training", TORCHRUN)
    (begun["before training"] / "status.json").write_text(_status("done"))

    start()
    for folder in begun.values():
        _wait_for(lambda folder=folder: _read(folder, "rank-0") and _read(folder, "rank-1"), folder)
        os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
    for name in ("asked", "asked, busybox"):
        _wait_for(lambda name=name: "asked" in _read(begun[name], "rank-0"), begun[name])
        with suppress(ProcessLookupError):
            os.kill(int((begun[name] / "pid").read_text()), signal.SIGTERM)  # a second time changes nothing
    exits += [(folder, BEGUN[name][-1] if name in BEGUN else 143) for name, folder in begun.items()]
    for folder, code in exits:
        _wait_for((folder / "code").exists, folder)
        assert (int((folder / "code").read_text()), (folder / "errors").read_text()) == (code, ""), folder
    for name in ("asked", "asked, busybox"):
        assert _read(begun[name], "rank-0") == _read(begun[name], "rank-1") == ["started", "asked"]
        assert _read(begun[name], "torchrun") == []
    for name in ("before training", "again", "waits"):
        assert _read(begun[name], "torchrun") == ["asked"], name
    assert _read(begun["again"], "rank-0") == ["started", "asked"]
    for index, host in (("0", 1), ("10", 0)):
        assert _read(tmp_path / index, "seen") == [f"conf:read_timeout=9,is_host={host}"]
