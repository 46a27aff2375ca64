"""What is shipped, and what is imported."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import esmshard
from esmshard.model.config import SHIPPED

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_holds_all_and_works_in_an_empty_directory(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = map(Path, WheelBuilder(str(ROOT)).build(directory=str(tmp_path)))
    assert wheel.stat().st_size < 20_000_000
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(site)
    files = ["py.typed", "_shipped/recipes/schema.json", "cluster/templates/torchrun_wrapper.sh"]
    files += [f"_shipped/data/{name}/model/model.safetensors" for name in SHIPPED]
    assert {f"esmshard/{name}" for name in files} <= names
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)

    code = "import sys, esmshard; print(esmshard.__file__); sys.argv[1:] = ['finetune', 'contact', '--dry-run']; "
    code += "from esmshard.cli import app; app.main()"
    env = {**os.environ, "PYTHONPATH": str(site), "ESMSHARD_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], cwd=empty, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site)), "the test must not have run the clone's package"
    assert "train 776, valid 99, test 100" in done.stdout
    assert not list(empty.iterdir()), "a dry run writes nothing"


def test_public_names_are_there() -> None:
    assert len(esmshard.__all__) > 8
    for name in esmshard.__all__:
        assert getattr(esmshard, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = esmshard.nothing


IMPORT_ALL = """
import importlib, os, pkgutil, signal, sys
import esmshard

names = [m.name for m in pkgutil.walk_packages(esmshard.__path__, "esmshard.") if m.name != "esmshard.__main__"]
assert len(names) > 30
for name in names:  # what others need of this system, they may have; they are not imported again
    importlib.import_module(name)
for name in [name for name in sys.modules if name.partition(".")[0] == "esmshard"]:
    del sys.modules[name]
{without}
for name in names:
    importlib.import_module(name)
"""

NOT_ON_WINDOWS = """
for name in ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "readline"):
    sys.modules[name] = None
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGALRM", "SIGCHLD", "SIGSTOP", "alarm"):
    delattr(signal, name)
missing = "sched_getaffinity fork getuid geteuid getgid getpgid setsid killpg uname sysconf sysconf_names statvfs chown"
for name in [*missing.split(), "mkfifo", "getloadavg", "O_DIRECTORY", "O_CLOEXEC", "WNOHANG"]:
    delattr(os, name)
"""


def test_modules_import_without_what_other_systems_lack(tmp_path: Path) -> None:
    """Windows has no `fcntl`, and macOS no `sched_getaffinity`."""
    code = IMPORT_ALL.format(without=NOT_ON_WINDOWS)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
