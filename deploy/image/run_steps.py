"""Run the steps of the Dockerfile without Docker, then the container, and look at what the layers hold.

    python deploy/image/run_steps.py [--required] [--base DIR] [--build-arg NAME=VALUE] [--suite]

Needs root, overlayfs and a Debian mirror; Debian, made by debootstrap, and the running Python stand in for the base
image. Every instruction that changes files gets a layer of its own, as in Docker. Nothing outside a temporary
directory is written. Without what it needs it says SKIPPED and exits with 0, with `--required` with 1.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from layers import Build, Image, faults, files
from machine import READY, Machine, Unable, tail

UNSHARED = "ESMSHARD_STEPS_UNSHARED"
SMALL = "train.steps=2 train.eval_every=2 model.name=nano init=random data.max_length=64 batch.global_tokens=2000"
SMALL += " data.valid=few.fasta data.test=few.fasta"
SBOM = """
import json
found = {part["name"]: part["version"] for part in json.load(open("/opt/esmshard/sbom.cdx.json"))["components"]}
import esmshard, torch
assert found["torch"] == torch.__version__ and found["esmshard"] == esmshard.__version__, found
assert not {"hatchling", "cyclonedx-bom"} & found.keys(), "the tools of the build are not in the image"
print(len(found), "named")
"""
# Five chains of the shipped sample to validate and test on: a hundred take most of a minute.
FEW = """
import numpy as np
from esmshard.io.paths import shipped
with np.load(shipped("data") / "contact" / "test.npz") as file:
    names, seqs, dssp8, cb_dA, offsets = (file[key] for key in ("names", "seqs", "dssp8", "cb_dA", "offsets"))
with open("few.fasta", "w") as fasta:
    fasta.writelines(f">{name}\\n{seq}\\n" for name, seq in zip(names[:5], seqs[:5]))
np.savez("few.npz", names=names[:5], seqs=seqs[:5], dssp8=dssp8[:5], cb_dA=cb_dA[:offsets[5]], offsets=offsets[:6])
print("written")
"""
QUICK = ["tests/test_vocab.py", "tests/test_batch.py", "tests/recipe/test_recipe.py", "tests/data/test_fasta.py"]
QUICK += ["tests/model/test_config.py", "tests/tasks/test_metrics.py", "esmshard/vocab.py"]
NOT_PROVED = """\
This does NOT prove: the layers of the real base image (a plain Debian stood in for it); CUDA wheels, their
size; a GPU seen through NVIDIA's runtime; NVIDIA's PyTorch image as BASE; a push to a registry; what Docker itself adds
(seccomp and AppArmor profiles, cgroup limits, 64 MB of /dev/shm)."""


def contain(machine: Machine, image: Image, upper: Path | None) -> Path:
    """The root of a container with a fresh /tmp and /work; read-only besides these without `upper`."""
    root = machine.mount(image.layers, upper)
    for name in ("tmp", "work"):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", name, root / name], check=True)
    return root


def prove(machine: Machine, image: Image, suite: bool) -> int:
    """Run the image as users do; the number of things that were wrong."""
    wrong = 0

    def check(
        what: str, arguments: list[str], expected: str, user: str, entry: tuple[str, ...] = image.entrypoint
    ) -> None:
        nonlocal wrong
        began = time.monotonic()
        done = machine.inside(
            root, [*entry, *arguments], image.env, workdir=image.workdir, user=user, network=False, limit_s=3600
        )
        good = done.returncode == 0 and expected in done.stdout
        wrong += not good
        print(f"{time.monotonic() - began:6.1f} s  {'ok   ' if good else 'WRONG'}  {what}", flush=True)
        if not good:
            failures = done.stdout.partition("= FAILURES =")[2].partition("= warnings summary =")[0]  # pytest's
            said = f"{tail(failures, 300)}\n{tail(done.stdout)}" if failures else tail(done.stdout)
            print(f"exit code {done.returncode}, {expected!r} expected in:\n{said}")

    print("\nContainers: no network, no new privileges, root read-only besides /tmp and /work")
    anyone = "12345:0"
    root = contain(machine, image, None)
    check("the default command, as the image's user", list(image.command), "finetune", image.user)
    check("--help as uid 12345", ["--help"], "finetune", anyone)
    refused = "touch /opt/esmshard/x /etc/x 2>&1; exit 0"
    check("the root is read-only, even to root", ["-c", refused], "Read-only file system", "0:0", ("/bin/sh",))
    who = "import getpass, os; print(getpass.getuser(), os.path.expanduser('~'))"
    check("a user name and a home without /etc/passwd", ["-c", who], "esmshard /tmp", "12345:54321", ("python",))
    libraries = "import ctypes; [ctypes.CDLL(n) for n in ('libibverbs.so.1', 'librdmacm.so.1')]; print('loaded')"
    check("the verbs libraries load", ["-c", libraries], "loaded", anyone, ("python",))
    check("pip finds no conflict", ["-m", "pip", "check"], "No broken requirements", anyone, ("python",))
    check("the SBOM names torch and esmshard", ["-c", SBOM], "named", anyone, ("python",))
    check("five chains of the sample into /work", ["-c", FEW], "written", anyone, ("python",))
    tune = ["finetune", "contact", *SMALL.split()]
    check("finetune contact, two steps", tune, "", anyone)
    check("its model embeds", ["embed", "runs/contact/model", "few.fasta", "-o", "few.npy"], "", anyone)
    check("finetune contact in two processes", [*tune, "--nproc", "2", "out=two"], "", anyone)
    few = ["test", *QUICK]
    check("all tests" if suite else "a few tests", ["test"] if suite else few, " passed", "12345:54321")
    upper = machine.directory()
    root = contain(machine, image, upper)
    check("a few tests as root, on a root that takes writes", few, " passed", "0:0")
    for path in files(upper):
        wrong += 1
        print(f"        WRONG  the tests wrote into the image: /{path.relative_to(upper)}")
    return wrong


def main(arguments: list[str]) -> int:
    """Everything, in order; the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--required", action="store_true", help="not being able to is a failure")
    options.add_argument("--base", type=Path, help="keep the stand-in for the base image here, and take it again")
    options.add_argument("--suite", action="store_true", help="run all tests in the container, not a few")
    options.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    chosen = options.parse_args(arguments)
    os.environ["PATH"] = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # where chroot lies, and not every shell looks
    try:
        if os.geteuid() != 0:
            raise Unable("this needs root")
        if missing := [tool for tool in ("unshare", "chroot", "mount", "ip") if shutil.which(tool) is None]:
            raise Unable(f"{missing[0]} is not installed")
        if UNSHARED not in os.environ:
            command = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
            if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
                raise Unable("namespaces are refused")
            command += ["--mount-proc", sys.executable, __file__, *arguments]
            return subprocess.run(command, env={**os.environ, UNSHARED: "1"}, check=False).returncode
        return steps(chosen.base, dict(pair.split("=", 1) for pair in chosen.build_arg), chosen.suite)
    except Unable as reason:
        print(f"SKIPPED: the steps of the Dockerfile were not run and nothing is proved; {reason}.", file=sys.stderr)
        return 1 if chosen.required else 0


def steps(tree: Path | None, given: dict[str, str], suite: bool) -> int:
    """Build and prove, below a temporary directory that goes away with the mounts in it."""
    began = time.monotonic()
    state = Path(tempfile.mkdtemp(prefix="image-"))
    try:
        machine = Machine(state)
        try:
            subprocess.run(["umount", machine.mount([Path("/")], machine.directory())], check=True)
        except Unable:  # the directory may itself lie on an overlay, as in a container; memory does not
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", state], check=True)
            print("overlayfs does not take the temporary directory: the layers are in memory")
            subprocess.run(["umount", machine.mount([Path("/")], machine.directory())], check=True)
        tree = tree.absolute() if tree else machine.directory()
        if not (tree / READY).exists():
            tree.mkdir(parents=True, exist_ok=True)
            if any(tree.iterdir()):
                raise Unable(f"{tree} is neither empty nor a finished stand-in: remove it, or name another")
            print(f"the stand-in for the base image: {machine.base(tree)}")
        print(f"{time.monotonic() - began:6.1f} s the stand-in is ready", flush=True)
        base = Image((tree, machine.mount_points(tree)))
        image = Build(machine, base, given).run()
        added = image.layers[len(base.layers) :]
        wrong = faults(added)
        print(f"\n{len(added)} layers, {sum(f.lstat().st_size for layer in added for f in files(layer)) / 1e6:.0f} MB")
        print(*(f"        WRONG  {fault}" for fault in wrong), sep="\n" if wrong else "", end="\n" if wrong else "")
        count = len(wrong) + prove(machine, image, suite)
        verdict = f"{count} WRONG" if count else "all steps ran, nothing was wrong"
        print(f"\n{time.monotonic() - began:.0f} s: {verdict}.\n{NOT_PROVED}")
        return 1 if count else 0
    finally:
        os.chdir("/")
        with Path("/proc/self/mounts").open() as mounts:
            inside = [line.split()[1] for line in mounts if line.split()[1].startswith(str(state))]
        for place in sorted(inside, reverse=True):
            subprocess.run(["umount", "--lazy", place], capture_output=True, check=False)
        shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
