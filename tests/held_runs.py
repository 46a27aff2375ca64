"""Runs that wait after some steps until a test lets them go on, so that the test acts in the middle of a run."""

import os
import time
from collections.abc import Callable
from pathlib import Path

HOOK = '''\
"""Imported by each Python that has this directory in PYTHONPATH: the first rank waits before it writes a line."""
import os, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))

def wanted():
    try:
        with open(os.path.join(HERE, "steps")) as file:
            return int(file.read())
    except FileNotFoundError:
        return None

def leave(name):
    open(os.path.join(HERE, name), "w").close()

def stand_still(event, arguments):
    if event != "open" or not str(arguments[0]).endswith("metrics.jsonl") or arguments[1] != "a":
        return
    with open(arguments[0]) as file:
        done = file.read().count('"lr"')
    while (steps := wanted()) is not None and done >= steps:
        leave(f"reached-{steps}")
        preemption = sys.modules["esmshard.parallel.preemption"]
        if any(one._asked for one in preemption._installed):
            leave("asked")
        time.sleep(0.02)

sys.addaudithook(stand_still)
'''
QUICK = Path(__file__).parent / "site" / "sitecustomize.py"
"""The other module with this name. A process imports only one of them, so both texts are joined."""
PAUSE = 2.0
"""A run that waits for a signal takes one more step after this number of seconds."""


class Hold:
    """A new folder that tells the processes of a run to wait after `steps` lines of steps in metrics.jsonl.

    The processes need `environment`.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        folder.mkdir()
        self._folder = folder
        (folder / "sitecustomize.py").write_text(HOOK + QUICK.read_text())
        self.at(steps)
        others = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        self.environment = {"PYTHONPATH": os.pathsep.join([str(folder), *others])}

    def at(self, steps: int) -> None:
        self._steps = steps
        (self._folder / "asked").unlink(missing_ok=True)  # a process that still waits writes it again
        work = self._folder / "work"
        work.write_text(str(steps))
        work.replace(self._folder / "steps")

    def reached(self) -> bool:
        return (self._folder / f"reached-{self._steps}").exists()

    def asked(self) -> bool:
        """Whether the waiting rank has got a signal."""
        return (self._folder / "asked").exists()

    def go(self) -> None:
        (self._folder / "steps").unlink()

    def wait(self, is_over: Callable[[], object]) -> None:
        end = time.monotonic() + 900
        while not self.reached():
            assert not is_over(), "the run has ended"
            assert time.monotonic() < end
            time.sleep(0.02)

    def go_when_asked(self, is_over: Callable[[], object]) -> None:
        """Let the run go on after a signal. A rank that waits for the first rank gets its signal in the next step."""
        while not (is_over() or self.asked()):
            end = time.monotonic() + PAUSE
            while time.monotonic() < end and not (is_over() or self.asked()):
                time.sleep(0.02)
            self.at(self._steps + 1)
        self.go()
