"""Layers, mounts and processes with which the steps of a Dockerfile run without Docker."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

DEBIAN = ["bookworm", "http://deb.debian.org/debian"]
READY = "etc/stand-in"
"""Written last, so that a tree of which the making was interrupted is not taken again."""
SLIM = "ca-certificates,netbase,tzdata,libbz2-1.0,libexpat1,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0"
SLIM += ",libssl3,libuuid1,zlib1g"
"""What Python's own slim images have of Debian besides its smallest installation."""
DEBIANS_PYTHON = ",python3,python3-venv,python3-pip,python-is-python3"


class Unable(Exception):
    """This machine cannot run the steps; why."""


class Machine:
    """Mounts and processes below one directory `state`, in a mount namespace of this process's own."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.count = 0
        self.pip, self.pip_paths = pip_settings()
        self.network = [Path(name) for name in ("/etc/resolv.conf", "/etc/hosts") if Path(name).exists()]

    def directory(self) -> Path:
        """A new directory with a short name: all layers of a mount have to fit into one page of options."""
        self.count += 1
        (made := self.state / str(self.count)).mkdir()
        return made

    def mount(self, layers: Iterable[Path], upper: Path | None) -> Path:
        """Mount layers, lowest first, and return where; read-only without `upper`. Raises Unable."""
        root = self.directory()
        options = "lowerdir=" + ":".join(os.path.relpath(layer, self.state) for layer in reversed(list(layers)))
        if upper is not None:
            options += f",upperdir={upper.name},workdir={self.directory().name}"
        done = subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", options, root],
            cwd=self.state,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Unable(f"overlayfs is refused: {done.stderr.strip()}")
        return root

    def inside(
        self,
        root: Path,
        words: list[str],
        env: dict[str, str],
        *,
        workdir: str = "/",
        user: str = "0:0",
        network: bool = True,
        binds: Iterable[tuple[Path, str]] = (),
        limit_s: float = 900,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command below `root` as process 1 of its own namespaces, with /proc, /dev and /sys; output together."""
        uid, _, gid = user.partition(":")
        script = [
            'mount -t proc proc "$1/proc"; mount --rbind -o ro /sys "$1/sys"; mount -t tmpfs -o mode=755 dev "$1/dev"',
            'mkdir "$1/dev/shm" "$1/dev/pts"; mount -t tmpfs -o mode=1777 shm "$1/dev/shm"',
            'for n in null zero full random urandom tty; do touch "$1/dev/$n"; mount --bind /dev/$n "$1/dev/$n"; done',
            'ln -s /proc/self/fd "$1/dev/fd"; ip link set lo up',
        ]
        for source, target in binds:
            script.append(f"mount --bind {source} {root}{target}; mount -o remount,bind,ro {root}{target} || exit 1")
        script.append('root=$1; shift; exec chroot "$root" "$@"')
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *([] if network else ["--net"])]
        command += ["sh", "-c", "\n".join(script), "sh", str(root)]
        command += ["env", "-i", f"--chdir={workdir}", *(f"{key}={value}" for key, value in env.items())]
        if uid != "0":
            command += ["setpriv", f"--reuid={uid}", f"--regid={gid or 0}", "--clear-groups", "--no-new-privs"]
        return subprocess.run(
            [*command, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def base(self, tree: Path) -> str:
        """Make the stand-in for the base image, and say what it is: Debian, and this Python in /usr/local, as in
        Python's own images; Debian's Python where that is this one. debootstrap goes into a layer over this machine's
        root, and away with it.
        """
        debians = sys.base_prefix == "/usr"
        upper = self.directory()
        root = self.mount([Path("/")], upper)
        (root / "mnt" / "base").mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", tree, root / "mnt" / "base"], check=True)
        packages = SLIM + (DEBIANS_PYTHON if debians else "")
        lines = [
            "command -v debootstrap >/dev/null",
            "|| { apt-get update; apt-get install --yes --no-install-recommends debootstrap; }",
            f"&& debootstrap --variant=minbase --include={packages} {DEBIAN[0]} /mnt/base {DEBIAN[1]}",
        ]
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        done = self.inside(root, ["sh", "-c", " ".join(lines)], env)
        if done.returncode:
            raise Unable(f"debootstrap failed:\n{tail(done.stdout)}")
        subprocess.run(["umount", root / "mnt" / "base", root], check=True)
        for archive in (tree / "var/cache/apt/archives").glob("*.deb"):
            archive.unlink()
        if not debians:
            copy_python(tree / "usr" / "local")
        lines = ["ldconfig", "PATH=/usr/local/bin:$PATH", "export PATH"]
        lines += [] if debians else ["python -m ensurepip --default-pip"]
        lines += ["python -c 'import bz2, ctypes, lzma, readline, sqlite3, ssl, uuid, zlib'", "python -m pip --version"]
        done = self.inside(tree, ["sh", "-ec", "; ".join(lines)], {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
        if done.returncode:
            raise Unable(f"the Python of {sys.base_prefix} does not run on {DEBIAN[0]}:\n{tail(done.stdout)}")
        what = f"Debian {DEBIAN[0]} and {'its' if debians else 'this'} Python"
        (tree / READY).write_text(what + "\n")
        return what

    def mount_points(self, tree: Path) -> Path:
        """A layer with the places, as far as `tree` has none, where this machine's index and name service are mounted
        during a RUN.
        """
        layer = self.directory()
        for path in [*self.pip_paths, *self.network]:
            place = layer / path.relative_to("/")
            if (tree / path.relative_to("/")).exists():  # such as the authorities that pip is to trust
                continue
            if path.is_dir():
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
        hosts = layer / "etc" / "hosts"  # as Docker writes it for a container without network
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.write_text("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n")
        return layer


def copy_python(target: Path) -> None:
    """The running Python's own files, without what was installed into it, below `target`, an empty prefix."""
    source = Path(sys.base_prefix)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    without = shutil.ignore_patterns("site-packages", "test", "idlelib", "tkinter", "__pycache__", "config-*", "*.a")
    shutil.copytree(source / "lib" / name, target / "lib" / name, ignore=without, symlinks=True)
    (target / "lib" / name / "site-packages").mkdir()
    for library in (source / "lib").glob("libpython*.so*"):
        shutil.copy2(library, target / "lib", follow_symlinks=False)
    (target / "bin").mkdir(exist_ok=True)
    shutil.copy2(source / "bin" / name, target / "bin" / name)
    for link in ("python3", "python"):
        (target / "bin" / link).symlink_to(name)


def pip_settings() -> tuple[dict[str, str], list[Path]]:
    """This machine's pip configuration as PIP_* variables, and the local files and directories that it names."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings: dict[str, str] = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in {"global", "install", ":env:"} and option != "require-virtualenv":
            settings[f"PIP_{option.upper().replace('-', '_')}"] = str(ast.literal_eval(value))
    paths = set()
    for option, value in settings.items():
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():  # an index's pages point to files beside it
                paths.add(path.parent if option.endswith("INDEX_URL") else path)
    return settings, sorted(paths)


def tail(text: str, lines: int = 30) -> str:
    """The last lines of an output."""
    return "\n".join(text.splitlines()[-lines:])
