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
    together = hashlib.sha256(b"".join(map(bytes.fromhex, digests.values()))).hexdigest()
    return {"weights_sha256": together, "files": dict(digests)}


def altered(files: Sequence[Path]) -> str | None:
    """Describe in one sentence which weight file is not the recorded one; None if all files are.

    Files without a record beside them, such as released ones, are not checked.

    Args:
        files: files of one model; an adapter and its base lie in two directories.
    """
    for folder in dict.fromkeys(file.parent for file in files):
        here = [file for file in files if file.parent == folder]
        known = _recorded(folder)
        if isinstance(known.get("files"), dict):
            wrong = [file for file in here if known["files"].get(file.name) != remembered_sha256(file)]
        elif isinstance(known.get("weights_sha256"), str):  # A shipped model's record has the hash of its only file.
            wrong = here[:1] if known["weights_sha256"] != remembered_sha256(here[0]) else []
        else:
            continue
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


def is_finetuned(folder: Path) -> bool:
    """Whether a model directory records a recipe, and not only the sha256 of a model that was converted. A damaged
    record counts as one of a fine-tuned model, whose reader then says what is wrong.
    """
    try:
        return "recipe" in read_json(folder / ABOUT)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError, TypeError):
        return True


def task_of(files: Sequence[Path]) -> tuple[str, dict[str, Any]] | None:
    """Return the name of the task that weight files with a head were trained for, and the facts of its labels.

    None if no `esmshard.json` beside the files says it, as for weights that another program wrote.
    """
    for folder in dict.fromkeys(file.parent for file in files):
        known = _recorded(folder)
        task = known["recipe"].get("task") if isinstance(known.get("recipe"), dict) else None
        if isinstance(task, dict) and isinstance(task.get("name"), str):
            facts = known.get("facts")
            return task["name"], facts if isinstance(facts, dict) else {}
    return None


def data_of(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return what the `esmshard.json` beside weight files says of the data of each split; empty if there is nothing."""
    for folder in dict.fromkeys(file.parent for file in files):
        data = _recorded(folder).get("data")
        if isinstance(data, dict):
            return {split: facts for split, facts in data.items() if isinstance(facts, dict)}
    return {}


def _recorded(folder: Path) -> dict[str, Any]:
    """Read what a directory records; empty if there is nothing. A damaged file is reported elsewhere, where it is
    needed.
    """
    try:
        about = read_json(folder / ABOUT)
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}
