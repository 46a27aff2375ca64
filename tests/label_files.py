"""FASTA files of some records, and tasks that have read their labels."""

from pathlib import Path
from typing import Any

import pytest
from sklearn import linear_model

from esmshard.data.batching.loader import Examples
from esmshard.io.store import ingest
from esmshard.recipe.sections import DataSettings
from esmshard.tasks.base import Task


def data(**given: Any) -> DataSettings:
    return DataSettings(train="t", valid="v", test="e", **given)


class LabelFiles:
    """FASTA files. Records are given as lines of id and sequence."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def split(self, name: str, text: str) -> tuple[Path, Any]:
        fasta = self.directory / f"{name}.fasta"
        records = (line.rsplit(" ", 1) for line in text.splitlines())
        fasta.write_text("".join(f">{header}\n{sequence}\n" for header, sequence in records))
        return fasta, ingest([fasta], self.directory / name, overwrite=True)

    def learned(self, task: Task, text: str, **given: Any) -> tuple[Any, Examples]:
        """Return the task after it has read its training labels, and the training set."""
        fasta, store = self.split("train", text)
        train = Examples("train", fasta, store, task.labels(fasta, store, data(**given)))
        return task.learn(train), train


def recorded_fits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Return a list of the models that scikit-learn fits from now on, each with its features."""
    fits: list[tuple[Any, Any]] = []
    for kind in (linear_model.RidgeCV, linear_model.LogisticRegression):

        def fit(self: Any, x: Any, *rest: Any, old: Any = kind.fit, **more: Any) -> Any:
            fits.append((old(self, x, *rest, **more), x))
            return self

        monkeypatch.setattr(kind, "fit", fit)
    return fits
