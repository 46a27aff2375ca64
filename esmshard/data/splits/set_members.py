"""Splits inside one file: `SET=` in its headers, or a column `set`, says to which split each record belongs."""

import shlex
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from esmshard.data.fasta.headers import attributes, split_of
from esmshard.data.fasta.sources import is_sequence_table
from esmshard.data.fasta.symbols import Edits
from esmshard.data.labels.label_fasta import read_label_fasta
from esmshard.data.labels.label_sources import label_source
from esmshard.data.splits.assignment import SETS
from esmshard.data.splits.given_splits import given_splits, has_set
from esmshard.data.store.token_store import TokenStore
from esmshard.data.tables import Table, counted
from esmshard.errors import InputError, UsageError
from esmshard.recipe.data_section import DataSettings
from esmshard.recipe.section_base import listed

_LOOKED_AT = 100
"""Records of a file that are searched for SET= in their headers, if the recipe names the file for one split only."""


def members(
    data: DataSettings, name: str, path: Path, fasta: Path, tokens: TokenStore
) -> tuple[npt.NDArray[np.bool_] | None, list[str]]:
    """Return which records of a file belong to a split, bool [N], and notices about it.

    Args:
        data: the data section of the recipe. A file that it names for one split only is that split, whatever its
            headers say.
        name: name of the split.
        path: the file as the recipe names it.
        fasta: the FASTA file of the records, which is another file if `path` is structures.
        tokens: the N records.

    Returns:
        None for the records if all of them belong to the split.

    Raises:
        InputError: some records have no split, or no record has this one, or the test set would be the training set.
        UsageError: `data.folds` divides the file too.
    """
    splits = SETS if data.folds is None else SETS[:2]  # With folds, the test set is a part of the training file.
    if name not in splits:
        return None, []
    if sum(getattr(data, other) == getattr(data, name) for other in splits) < 2:
        others = marked_otherwise(name, path, tokens)
        unused = (
            f"{marks(path)} is not used, as it is the file of {name} alone, and all its records are taken ({others}); "
            "name one file in data.train, data.valid and data.test to have it divided"
        )
        return None, [unused] if others else []
    source = label_source(fasta, data) if data.labels is not None else None
    if isinstance(source, Table):
        in_source = source.only_column(("set", "split"), "rename the one that is not") is not None
    else:
        in_source = source is not None and any(has_set(record.header, source) for record in read_label_fasta(source))
    in_headers = any(_says_set(tokens, n) and has_set(tokens.description(n), path) for n in range(len(tokens)))
    if not (in_source or in_headers):
        if data.folds is not None or data.train not in (data.valid, data.test):
            return None, []
        if data.test == data.train:
            divide = f"esmshard split {shlex.quote(str(path))} -o DIR"
            raise InputError(
                f"{path}: is the file of train and test, and nothing divides it (no SET= in headers, no column set), "
                f"so every test record would be a training record; `{divide}` writes three files, "
                "and --folds 5 tests on each fifth in turn"
            )
        undivided = (  # Without the directory, which is no one else's business: model cards repeat notices.
            f"is the file of data.train, too, and nothing divides it, so that {name} has the records of train; "
            f"`esmshard split {path.name} -o DIR` divides it"
        )
        return None, [undivided] if name == "valid" else []
    places = [marks(path)] if in_headers else []
    if in_source:
        places.append(str(source.path if isinstance(source, Table) else source))
    where = listed(places)
    if data.folds is not None:
        raise UsageError(
            f"data.folds: divides {path}, which {where} divides too; leave out folds, or give data.valid another file"
        )
    edits = Edits()
    number_N = given_splits(tokens, fasta, source if in_source else None, edits, id_column=data.id_column)
    members_N = number_N == SETS.index(name)
    if not members_N.any():
        others = listed([f"{(number_N == k).sum():,} of {SETS[k]}" for k in np.unique(number_N)])
        raise InputError(
            f"{path}: has no record of {name}, as {where} says ({others}); mark some, or give data.{name} another file"
        )
    notice = f"{where} divides it: {members_N.sum():,} of {counted(len(number_N), 'record')} are of {name}"
    return members_N, [notice, *edits.notices()]


def marked_otherwise(name: str, path: Path, tokens: TokenStore) -> str | None:
    """Count in a clause the records of a one-split file whose headers name another split; None if there are none."""
    if not any(_says_set(tokens, n) for n in range(min(_LOOKED_AT, len(tokens)))):
        return None
    others: Counter[str] = Counter()
    for n in range(len(tokens)):
        try:
            found = attributes(tokens.description(n), ("SET", "VALIDATION"), str(path))
            split = split_of(found["SET"], found.get("VALIDATION", ""), str(path)) if "SET" in found else name
        except InputError:  # The value is no split, whatever it means.
            continue
        others[split] += split != name
    return listed([f"{count:,} say {split}" for split, count in others.items() if count]) if others.total() else None


def marks(path: Path) -> str:
    """Return what names the split of each record. The column of a table is SET= in the headers of its records."""
    return "its column of sets" if is_sequence_table(path) else "SET= in its headers"


def _says_set(tokens: TokenStore, n: int) -> bool:
    """Return whether a header has `SET=` anywhere, even in DATASET= or OFFSET=. This is quicker than `has_set`."""
    return b"SET=" in tokens.header(n).upper()
