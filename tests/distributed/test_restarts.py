"""The launcher brings real process groups back after a loss, and nobody else can connect to them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

RESTARTING = Path(__file__).parent / "restarting.py"
LAUNCH = """\
import sys
from esmshard.parallel.launch import run_local
sys.exit(run_local(sys.argv[1:], 2, max_restarts=2))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the tables of Linux")
def test_processes_meet_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCH, str(RESTARTING), str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    restarts = re.findall(r"^the process of rank (\d) was ended by SIGKILL .*; restart (\d) of 2$", done.stderr, re.M)
    assert restarts == [("1", "1")], done.stderr
    for rank in (0, 1):
        total, device, *addresses = (tmp_path / f"done-{rank}").read_text().split()
        assert total == "39", "19 and 20"
        assert device == "lo", "or gloo would take the address of the machine's name, whatever that is"
        assert len(addresses) >= 2, "the launcher's store, and gloo of this process"
        assert set(addresses) <= {"127.0.0.1", "::1"}
