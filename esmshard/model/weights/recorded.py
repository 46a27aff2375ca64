"""The sha256 of weight files that the `esmshard.json` beside them records, and a check that the files still have it."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from esmshard.files import read_json, remembered_sha256

ABOUT = "esmshard.json"


def entries(digests: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries of `esmshard.json` about the weight files.

    Args:
        digests: sha256 of each file, by name, in the order in which the files were written.
    """
    return {"weights_sha256": _all_of(list(digests.values())), "files": dict(digests)}


def altered(files: Sequence[Path], digest: Callable[[Path], str] = remembered_sha256) -> str | None:
    """Describe in one sentence which weight file is not the recorded one; None if all files are.

    Files without a record beside them, such as released ones, are not checked.

    Args:
        files: files of one model; an adapter and its base lie in two directories.
        digest: returns the sha256 of a file. The default reads a file once and remembers its sha256 until the file
            changes.
    """
    for folder in dict.fromkeys(file.parent for file in files):
        here = [file for file in files if file.parent == folder]
        known = _recorded(folder)
        if not known:
            continue
        found = [digest(file) for file in here]
        if "files" in known:
            wrong = [file for file, own in zip(here, found, strict=True) if known["files"].get(file.name) != own]
        else:  # Earlier versions recorded one hash for all files, or that of the first.
            wrong = here[:1] if known["weights_sha256"] not in (_all_of(found), found[0]) else []
        if wrong:
            return (
                f"{wrong[0]}: is not the file that {folder / ABOUT} records (its sha256 is another), so that the model "
                "may say something else than it did; copy it again, or consolidate the run again"
            )
    return None


@contextmanager
def compared(files: Sequence[Path], warn: Callable[[str], object]) -> Iterator[None]:
    """Compare files while a `with` block reads them, and warn at its end if one is not the recorded file."""
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(altered, files)
        yield
        if sentence := found.result():
            warn(sentence)


def _recorded(folder: Path) -> dict[str, Any]:
    """Read what a directory records; empty if there is nothing. A damaged file is reported elsewhere, where it is
    needed.
    """
    try:
        about = read_json(folder / ABOUT)
    except (OSError, ValueError):
        return {}
    if not isinstance(about, dict):
        return {}
    if isinstance(about.get("files"), dict):
        return {"files": about["files"]}
    return {"weights_sha256": about["weights_sha256"]} if isinstance(about.get("weights_sha256"), str) else {}


def _all_of(digests: Sequence[str]) -> str:
    """Return one sha256 for several files."""
    try:
        return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()
    except ValueError:
        return ""
