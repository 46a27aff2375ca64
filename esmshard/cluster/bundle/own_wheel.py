"""The wheel of the running esmshard, built from a clone or from the installed files."""

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import tempfile
import zipfile
from pathlib import Path

import esmshard
from esmshard.cluster.bundle.wheelhouse import last_words, run_pip
from esmshard.errors import InputError


def own_wheel(into: Path) -> Path:
    """Make the wheel of the running esmshard in a directory: built in a clone, else packed from the installed files.

    Raises:
        InputError: if the wheel cannot be built, or installed files were changed.
    """
    top = Path(esmshard.__file__).parent.parent
    if (top / "pyproject.toml").is_file() and (top / "recipes").is_dir():
        with tempfile.TemporaryDirectory(dir=into) as work:
            command = ["wheel", "--no-deps", "--wheel-dir", work, str(top)]
            if importlib.util.find_spec("hatchling"):
                command.insert(1, "--no-build-isolation")
            done = run_pip(command)
            built = list(Path(work).glob("*.whl"))
            if done.returncode or len(built) != 1:
                raise InputError(f"{top}: pip could not build the wheel of this clone: {last_words(done)}")
            return _moved(built[0], into)
    try:
        found = importlib.metadata.distribution("esmshard")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is None or found.version != esmshard.__version__:
        raise InputError(
            f"{top}: esmshard {esmshard.__version__} runs from neither a clone nor an installed package, so there is "
            "no wheel of it; install it with pip, or run the bundle command in a clone"
        )
    return _packed(found, into)


def _packed(found: importlib.metadata.Distribution, into: Path) -> Path:
    """Pack a wheel from an installed package, and compare each file with the sha256 of its installation."""
    info = f"esmshard-{found.version}.dist-info/"
    of_installation = {f"{info}{name}" for name in ("INSTALLER", "REQUESTED", "direct_url.json", "RECORD")}
    rows = [
        row
        for row in csv.reader((found.read_text("RECORD") or "").splitlines())
        if row[0].startswith(("esmshard/", info)) and not row[0].endswith(".pyc") and row[0] not in of_installation
    ]
    if not rows:
        raise InputError(f"{found.locate_file(info)}: has no RECORD of installed files; install esmshard with pip")
    work = into / ".packing.whl"
    with zipfile.ZipFile(work, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, announced, _ in rows:
            path = Path(str(found.locate_file(name)))
            content = path.read_bytes() if path.is_file() else b""
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            if announced != f"sha256={digest}":
                raise InputError(
                    f"{path}: is not the file that was installed, so no wheel can be made of it; install esmshard again"
                )
            archive.writestr(_entry(name), content)
        record = "".join(f"{','.join(row)}\n" for row in [*rows, [f"{info}RECORD", "", ""]])
        archive.writestr(_entry(f"{info}RECORD"), record)
    return _moved(work, into, f"esmshard-{found.version}-py3-none-any.whl")


def _entry(name: str) -> zipfile.ZipInfo:
    """Return an archive entry without the time, so that the same files make the same wheel."""
    entry = zipfile.ZipInfo(name, (2020, 2, 2, 0, 0, 0))
    entry.external_attr = 0o644 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def _moved(wheel: Path, into: Path, name: str | None = None) -> Path:
    return wheel.replace(into / (name or wheel.name))
