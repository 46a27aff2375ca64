"""Facts about training labels that are classes: the count of each class, and weights and baselines that follow from
it.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from esmshard.data.labels.protein_labels import ProteinLabels
from esmshard.data.store.token_store import TokenStore
from esmshard.data.tables import shown
from esmshard.errors import InputError, NotANumber


@contextmanager
def words_are_classes(kind: str) -> Iterator[None]:
    """Point from labels that are no numbers to the kind of task whose labels are names.

    Raises:
        NotANumber: with the sentence of one that was raised inside, and this.
    """
    try:
        yield
    except NotANumber as error:
        if kind != "number":
            raise
        raise NotANumber(f"{error}; if the labels are names of classes, set task.kind=class") from None


def known_classes(labels: ProteinLabels, known: Sequence[str], store: TokenStore, fasta: Path) -> ProteinLabels:
    """Return the same labels with the classes of the training split. For the training split itself, these are the
    classes of its records.

    A table may hold other proteins, whose classes do not matter.

    Raises:
        InputError: naming a record with another class.
    """
    classes_of = [
        labels.values[slice(*labels.spans_N2[n])] if labels.kind == "multilabel" else labels.values[n : n + 1]
        for n in range(len(store))
    ]
    used = np.unique(np.concatenate(classes_of))
    names = tuple(known) or tuple(labels.names[k] for k in used)
    for k in used:
        if labels.names[k] not in names:
            first = next(n for n, classes in enumerate(classes_of) if k in classes)
            raise InputError(
                f"{fasta}: record {shown(store.id(first))} has the class {shown(labels.names[k])}, which no training "
                "record has; fix the label, or leave the record out"
            )
    place = {name: number for number, name in enumerate(names)}
    number_of = np.array([place.get(name, -1) for name in labels.names])  # -1 for classes of other proteins alone
    return dataclasses.replace(labels, names=names, values=number_of[labels.values])


def check_counts(path: Path, names: Sequence[str], counts: npt.NDArray[np.int64], what: str) -> None:
    """Refuse training labels that nothing can be learned from.

    Args:
        path: of the training records.
        names: of the C classes.
        counts: how many training labels there are of each.
        what: has a class: `record` or `residue`.

    Raises:
        InputError: there are no labels, those of one class only, or none of a class that was named or that the other
            records of the file have.
    """
    found = np.flatnonzero(counts)
    if not len(found):
        raise InputError(f"{path}: no training {what} has a label; look at labels and masks")
    if len(found) == 1:
        raise InputError(
            f"{path}: every training {what} has the class {shown(names[found[0]])}; give labels of two classes or more"
        )
    without = [shown(name) for name, count in zip(names, counts, strict=True) if not count]
    if without:
        more = ", ..." if len(without) > 3 else ""
        raise InputError(
            f"{path}: no training {what} has the class {', '.join(without[:3])}{more}, so that it cannot be learned; "
            "divide the records in another way, join it with another class, or leave it out"
        )


def class_weights(counts: npt.NDArray[np.integer], balance: float) -> npt.NDArray[np.float64]:
    """Return the weight of each class, [C]: frequency to the power of -balance, of mean 1 over the training labels."""
    share_C = counts / counts.sum()
    weight_C = share_C**-balance
    return np.asarray(weight_C / (share_C * weight_C).sum())


def logits_of_shares(counts: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """Return the logits whose probabilities are the frequencies of the classes, [C]."""
    return np.asarray(np.log(counts / counts.sum()), dtype=np.float32)


def softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the probabilities of the classes, along the last dimension."""
    powers = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True), dtype=np.float32)
