"""Build an image's layers from a Dockerfile, and look at what is in them."""

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import dockerfile
from machine import Machine, tail

ROOT = Path(__file__).parent.parent.parent
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMPILERS = {"cc", "c++", "gcc", "g++", "cpp", "clang", "ld", "as", "make", "cmake", "ninja", "cargo", "rustc", "nvcc"}
LEFTOVERS = ["src", "dist", "build", "opt/tools", "root/.cache", "root/.config", "etc/pip.conf", "tmp/*", "var/tmp/*"]
LEFTOVERS += ["var/lib/apt/lists/*", "var/cache/apt/archives/*.deb", "opt/esmshard/bin/pip*", "**/*.whl", "**/.git"]


@dataclass(frozen=True)
class Image:
    """Layers, lowest first, and the settings that go with them. `variables` are ARG and ENV, for expansion."""

    layers: tuple[Path, ...]
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        """What `$NAME` may mean: ENV wins over ARG."""
        return {**self.arguments, **self.env}


def copy(sources: list[Path], target: Path, into: bool, mode: int | None) -> None:
    """COPY: files into a directory or under a name, directories by their contents; owned by root."""
    for source in sources:
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        else:
            place = target / source.name if into else target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)
            if mode is not None:
                place.chmod(mode)


class Build:
    """The stages of one Dockerfile, built in order."""

    def __init__(self, machine: Machine, base: Image, given: dict[str, str]) -> None:
        self.machine = machine
        self.base = base
        self.file = dockerfile.parse((ROOT / "Dockerfile").read_text())
        self.given = given
        self.images: dict[str, Image] = {}
        self.context = machine.directory()
        for name in dockerfile.context(ROOT, (ROOT / ".dockerignore").read_text()):
            place = self.context / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place)

    def run(self) -> Image:
        """Build all stages; the last one's image."""
        known = {key: self.given.get(key, value or "") for key, value in self.file.arguments.items()}
        image = self.base
        for stage in self.file.stages:
            name = dockerfile.expand(stage.base, known)
            image = self.images.get(name) or self.base
            print(f"\nFROM {name}{'' if name in self.images else '   (the stand-in)'}  {stage.name}", flush=True)
            image = replace(image, arguments={})
            for step in stage.steps:
                image = self.step(image, step, known)
            self.images[stage.name] = image
        return image

    def step(self, image: Image, step: dockerfile.Instruction, known: dict[str, str]) -> Image:
        """One instruction."""
        if step.name == "ARG":
            ((key, default),) = dockerfile.pairs(step)
            default = dockerfile.expand(default, image.variables) if "=" in step.text else known.get(key, "")
            return replace(image, arguments={**image.arguments, key: self.given.get(key, default)})
        if step.name == "ENV":
            found = {key: dockerfile.expand(value, image.variables) for key, value in dockerfile.pairs(step)}
            return replace(image, env={**image.env, **found})
        if step.name == "USER":
            return replace(image, user=dockerfile.expand(step.text, image.variables))
        if step.name == "ENTRYPOINT":
            return replace(image, entrypoint=tuple(dockerfile.command(step)), command=())
        if step.name == "CMD":
            return replace(image, command=tuple(dockerfile.command(step)))
        if step.name == "LABEL":
            return image
        began = time.monotonic()
        upper = self.machine.directory()
        root = self.machine.mount(image.layers, upper)
        if step.name == "WORKDIR":
            workdir = os.path.join(image.workdir, dockerfile.expand(step.text, image.variables))  # noqa: PTH118
            (root / workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
            image = replace(image, workdir=workdir)
        elif step.name == "COPY":
            self.copy(image, step, root)
        else:
            self.execute(image, step, root)
        subprocess.run(["umount", root], check=True)
        size = sum(entry.lstat().st_size for entry in files(upper))
        print(f"{time.monotonic() - began:6.1f} s {size / 1e6:8.1f} MB  {step.name} {step.text[:88]}", flush=True)
        return replace(image, layers=(*image.layers, upper))

    def copy(self, image: Image, step: dockerfile.Instruction, root: Path) -> None:
        """A COPY instruction, from the context or a stage."""
        flags = dict(step.flags)
        if unknown := flags.keys() - {"from", "chmod"}:
            raise dockerfile.DockerfileError(f"line {step.line}: COPY --{unknown.pop()} is not known here")
        *names, target = (dockerfile.expand(word, image.variables) for word in dockerfile.command(step))
        origin = self.machine.mount(self.images[flags["from"]].layers, None) if "from" in flags else self.context
        sources = [origin / name.lstrip("/") for name in names]
        if missing := [source.name for source in sources if not source.exists()]:
            raise dockerfile.DockerfileError(f"line {step.line}: {missing[0]} is not in the build context")
        place = root / os.path.join(image.workdir, target).lstrip("/")  # noqa: PTH118
        mode = int(flags["chmod"], 8) if "chmod" in flags else None
        copy(sources, place, into=target.endswith(("/", ".")) or len(names) > 1, mode=mode)

    def execute(self, image: Image, step: dockerfile.Instruction, root: Path) -> None:
        """A RUN instruction: its mounts, this machine's package index, and the shell."""
        binds = [(path, str(path)) for path in [*self.machine.pip_paths, *self.machine.network]]
        made: list[Path] = []
        for name, value in step.flags:
            options = dict(part.split("=", 1) for part in value.split(","))
            if name != "mount" or options.pop("type") != "bind" or options.keys() - {"from", "source", "target"}:
                raise dockerfile.DockerfileError(f"line {step.line}: --{name}={value} is not known here")
            layers = self.images[options["from"]].layers if "from" in options else ()
            origin = self.machine.mount(layers, None) if layers else self.context
            source, place = origin / options["source"].lstrip("/"), root / options["target"].lstrip("/")
            made += [parent for parent in [place, *place.parents] if not parent.exists()]
            place.parent.mkdir(parents=True, exist_ok=True)
            place.mkdir(exist_ok=True) if source.is_dir() else place.touch()
            binds.append((source, options["target"]))
        # What Docker hands to a RUN, and how to reach this machine's index; the latter is in no layer.
        env = {**self.machine.pip, "HOME": "/root", **image.arguments, **image.env}
        words = ["/bin/sh", "-c", step.text]
        done = self.machine.inside(root, words, env, workdir=image.workdir, user=image.user, binds=binds)
        if done.returncode:
            raise SystemExit(f"line {step.line}: RUN ended with {done.returncode}\n{step.text}\n{tail(done.stdout)}")
        for place in sorted(made, reverse=True):  # what is inside first
            place.rmdir() if place.is_dir() else place.unlink()


def files(layer: Path) -> Iterator[Path]:
    """All regular files of a layer."""
    for directory, _, names in os.walk(layer):
        for name in names:
            path = Path(directory) / name
            if stat.S_ISREG(path.lstat().st_mode):
                yield path


def faults(layers: Iterable[Path]) -> list[str]:
    """What must not be in the layers of an image: compilers, leftovers of the build, setuid, what anyone may change."""
    found = []
    for layer in layers:
        for pattern in LEFTOVERS:
            found += [f"left over: /{path.relative_to(layer)}" for path in layer.glob(pattern) if not whiteout(path)]
        for path in files(layer):
            mode, name = path.lstat().st_mode, path.relative_to(layer)
            if mode & (stat.S_ISUID | stat.S_ISGID):
                found.append(f"setuid or setgid: /{name}")
            if mode & stat.S_IWOTH:
                found.append(f"anyone may write: /{name}")
            if mode & stat.S_IXUSR and path.parent.name in {"bin", "sbin"} and path.name in COMPILERS:
                found.append(f"compiler: /{name}")
            if name.parts[0] == "opt" and not mode & stat.S_IROTH:
                found.append(f"only its owner may read: /{name}")
    return found


def whiteout(path: Path) -> bool:
    """Whether a layer's entry says that a lower one's is gone."""
    return stat.S_ISCHR(path.lstat().st_mode)
