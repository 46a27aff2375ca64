"""Reads `KEY=VALUE` attributes in FASTA headers, as FLIP and biotrainer write them.

    >Seq1 TARGET=0.1 SET=train VALIDATION=False        FLIP, biotrainer before 1.0
    >Seq1 TARGET=DVCD SET=val MASK=1101                biotrainer 1.0 and later

White space separates attributes, so a value is one word. Keys that the caller does not request, such as `OS=` in
UniProt headers, are ignored.
A lower-case key is read as upper case. (Format: `docs/data_standardization.md` of sacdallago/biotrainer.)
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Literal

from esmshard.errors import InputError
from esmshard.io.symbols import Edits
from esmshard.io.tables import MISSING, NUMBER, shown

Split = Literal["train", "valid", "test"]

_SPLITS: dict[str, Split] = {
    "train": "train", "val": "valid", "valid": "valid", "validation": "valid", "test": "test",
}  # fmt: skip
_WORD = re.compile(r"\S+", re.ASCII)  # The FASTA reader also splits ids only at ASCII white space.
TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""The truth value of each lower-case text that means yes or no."""
FLOAT32_MAX = 3.4028234663852886e38


def attributes(header: str, keys: Sequence[str], where: str, edits: Edits | None = None) -> dict[str, str]:
    """Return the values of the upper-case `keys` in a FASTA header, by key. Missing keys are left out.

    `where` is the file, or file and line, for messages. `edits` counts lower-case keys. Raise `InputError` with the id
    if a key occurs twice, has no value, or has no space before it.

    >>> attributes("Seq1 TARGET=0.1 SET=train", ("TARGET", "SET"), "x.fasta")
    {'TARGET': '0.1', 'SET': 'train'}
    """
    values: dict[str, str] = {}
    keyed = _keyed(tuple(keys))
    for place, word in enumerate(_WORD.findall(header) if keyed.search(header) else ()):
        for match in keyed.finditer(word) if "=" in word else ():
            before, written, value = word[: match.start()], match[1], word[match.end() :]
            key, last = written.upper(), before[-1:]
            # A space is missing in Seq1;SET=, trainSET= and TARGET=DSET=, but the key of DATASET=3 is not SET.
            glued = "=" in before or not (last.isalpha() or last == "_") or (written == key and last.islower())
            if before and not glued:
                continue
            record = f"{where}: record {shown(id_of(header))}"
            if before or not place or "=" in value:
                raise InputError(
                    f"{record} has {shown(word)} as one word; write a space after the id and after each attribute, as "
                    "in '>Seq1 TARGET=0.1 SET=train'"
                )
            if not value:
                raise InputError(f"{record} has no value after '{written}='; add a value, or remove '{written}='")
            if key in values:
                raise InputError(f"{record} has {key}= twice; remove one of the two")
            if written != key and edits is not None:
                edits.add("lower-case keys were read as upper case", id_of(header))
            values[key] = value
    return values


@functools.lru_cache
def _keyed(keys: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(f"({'|'.join(map(re.escape, keys))})=", re.IGNORECASE | re.ASCII)


def id_of(header: str) -> str:
    """Return the id, the first word of a FASTA header; '' for an empty header."""
    word = _WORD.search(header)
    return word[0] if word else ""


def split_of(set_value: str, validation: str, where: str) -> Split:
    """Return the split of a record from the values of SET and VALIDATION. `SET=train VALIDATION=True` gives `valid`.

    `validation` is '' for a record without VALIDATION. `where` is the file and record for messages. Raise `InputError`
    if a value is not valid, or if the two values contradict each other.
    """
    split = _SPLITS.get(set_value.lower())
    if split is None:
        raise InputError(f"{where}: SET is {shown(set_value)}; write train, val or test")
    if not validation:
        return split
    truth = TRUTH.get(validation.lower())
    if truth is None:
        raise InputError(f"{where}: VALIDATION is {shown(validation)}; write True or False")
    if truth and split == "test":
        raise InputError(
            f"{where}: SET is test and VALIDATION is {validation}; a test protein cannot also be used for validation, "
            "so write SET=train or VALIDATION=False"
        )
    if not truth and split == "valid":
        raise InputError(f"{where}: SET is {set_value}, but VALIDATION is {validation}; leave VALIDATION out")
    return "valid" if truth else split


def is_split(name: str) -> bool:
    """Return whether a text is the name of a split, such as `train` or `val`, in upper or lower case."""
    return name.lower() in _SPLITS


def number(text: str, where: Callable[[], str]) -> float:
    """Convert the value of an attribute to a number. A missing value (`tables.MISSING`), such as `nan`, becomes NaN.

    Raise `InputError` if float32 cannot store the value. `where` returns the record and the key for the message.
    """
    if text.lower() in MISSING:
        return float("nan")
    value = float(text) if NUMBER.fullmatch(text) else float("inf")
    if abs(value) > FLOAT32_MAX:
        raise InputError(
            f"{where()} is {shown(text)}, which is not a finite number; write a number such as 1.5, or nan for a "
            "missing value; if the values are class names, set task.kind=class"
        )
    return value
