"""Tiny wheels that pip installs."""

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path


def write_wheel(
    directory: Path, name: str, version: str, files: Mapping[str, str], *, metadata: str = "", tag: str = "py3-none-any"
) -> Path:
    """Write a wheel.

    Args:
        directory: to write into.
        name: of the package; the wheel's name has `_` for `-` and `.`.
        version: of the package.
        files: text of each, by its path in the wheel; `*.dist-info/` stands for the directory of the wheel's metadata.
        metadata: more lines for METADATA.
        tag: of Python, ABI and platform.

    Returns:
        Path of the wheel. Its bytes depend on the arguments alone.
    """
    stem = f"{name.replace('-', '_').replace('.', '_')}-{version}"
    info = f"{stem}.dist-info"
    content = {path.replace("*.dist-info", info): text for path, text in files.items()}
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}"
    content[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tag}\n"
    record = ""
    for path, text in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text.encode())}\n"
    wheel = directory / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in {**content, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(zipfile.ZipInfo(path), text, zipfile.ZIP_DEFLATED)
    return wheel
