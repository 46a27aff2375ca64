"""Labels of two proteins together, such as whether or how strongly they bind: numbers, one class, or several labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from esmshard.batch import Inputs, piece
from esmshard.data.batching.loader import Example, Examples
from esmshard.data.labels.protein_labels import ProteinLabels
from esmshard.data.splits.leakage import CLASSES, key, two_chains
from esmshard.io.store import TokenStore
from esmshard.model.finetuner import FineTuner
from esmshard.recipe.data_section import DataSettings, JoinSettings
from esmshard.recipe.section_base import Clash
from esmshard.tasks.classes import sigmoid, softmax
from esmshard.tasks.metrics import Row
from esmshard.tasks.sequence import SequenceHead, SequenceSettings, SequenceTask, digest

SINGLE, MEMORY = "single sequences", "labels of each sequence"
"""Names of baselines. Neither can know which two sequences belong together: they add up what is known of each."""
MOST_PAIRS = 1_000_000
"""The most training pairs whose sequences are kept, as hashes, with the model."""

_Vectors = TypeVar("_Vectors", torch.Tensor, npt.NDArray[np.float64])


@dataclass(frozen=True)
class PairLabels(ProteinLabels):
    """Labels of N pairs."""

    block_N: npt.NDArray[np.int64]
    """For each pair, the number of that one of its sequences that is in most pairs of the file, int64 [N]."""


class PairSettings(SequenceSettings):
    """Numbers, a class or several classes for two proteins together, whatever their order."""

    name: Literal["pair"]  # type: ignore[assignment]  # a task has one name

    pairs: ClassVar[bool] = True

    def suit(self, data: DataSettings) -> DataSettings:
        """Refuse windows, which would be of one chain or of both, and linkers, as the chains are not joined."""
        if data.join != JoinSettings():  # type: ignore[call-arg]  # all keys have defaults
            raise Clash("join", "makes the chains of a record one sequence, and those of a pair stay two; remove it")
        if data.long == "window":
            raise Clash("long", "window cuts a record, and a pair has two chains; choose full, skip or error")
        return super().suit(data)


class PairHead(SequenceHead):
    """The mean over the residues of each chain and LayerNorm; sum, product and difference of the two, which do not
    depend on their order; dropout, and one or two linear layers.
    """

    parts = 3

    def combined(self, mean_SD: torch.Tensor) -> torch.Tensor:
        """Convert the means of 2N chains, those of a pair beside each other, to one vector for each pair, [N, 3D]."""
        normed_SD = super().combined(mean_SD)
        return torch.cat(_symmetric(normed_SD[0::2], normed_SD[1::2]), -1)


class PairTask(SequenceTask):
    """The numbers, class or labels of two proteins. Outputs and facts are those of `SequenceTask`.

    A record is two chains, `A:B`. The model reads each as a sequence of its own: nothing of one is seen by the other
    before the head.
    """

    Settings = PairSettings
    settings: PairSettings
    of_base = ("frozen embedding", SINGLE)
    fitted = ("length", "composition", *of_base)
    head_class: ClassVar[type[SequenceHead]] = PairHead
    baseline_records = MOST_PAIRS

    def labels(self, fasta: Path, store: TokenStore, data: DataSettings) -> PairLabels:
        """Read labels as `SequenceTask` does, of records that all have two chains."""
        found = super().labels(fasta, store, data)
        key_N2 = np.empty((len(store), 2), dtype=np.uint64)
        for n in range(len(store)):
            residues = store.residues(n)
            key_N2[n] = [key(residues[slice(*span)]) for span in two_chains(residues, store.id(n), fasta)]
        _, number_2N, count = np.unique(key_N2.T, return_inverse=True, return_counts=True)
        number_N2 = number_2N.reshape(2, -1).T.astype(np.int64)
        more_N = count[number_N2].argmax(1)
        block_N = number_N2[np.arange(len(store)), more_N]
        return PairLabels(**{one.name: getattr(found, one.name) for one in fields(found)}, block_N=block_N)

    def units(self, data: Examples) -> tuple[npt.NDArray[np.int64] | None, str]:
        """Resample the pairs of one sequence together."""
        return data.blocks(), "sequence"

    def inputs(self, example: Example) -> Inputs:
        """Return both chains, and the target of `SequenceTask.inputs`."""
        return self._chains(example, super().inputs(example).target)

    def question(self, example: Example) -> Inputs:
        """Return both chains of a record without labels."""
        return self._chains(example, super().question(example).target)

    def means(self, example: Example, base: FineTuner) -> npt.NDArray[np.float64]:
        """Return the mean representation of each chain, [2, D]. They are kept: a protein may be in many pairs."""
        means = [SequenceTask.means(self, chain, base) for chain in chains_of(example)]
        for chain, mean_1D in zip(chains_of(example), means, strict=True):
            base.remembered["means"][digest(chain)] = mean_1D
        return np.concatenate(means)

    def features(self, name: str, example: Example, base: FineTuner | None) -> npt.NDArray[np.float64]:
        """Return what a baseline sees of both chains: what a linear head would see, or, of `SINGLE`, their sum."""
        if name in self.of_base:
            assert base is not None
            one, other = self.means(example, base)
            return one + other if name == SINGLE else np.concatenate(_symmetric(one, other))
        one, other = (SequenceTask.features(self, name, chain, base) for chain in chains_of(example))
        return np.concatenate(_symmetric(one, other))

    def baselines(self, train: Sequence[Example], base: FineTuner) -> dict[str, npt.NDArray[Any]]:
        """Fit linear models to some pairs, and keep the mean label of the pairs of each training sequence."""
        found = super().baselines(train[:: _step(train)], base)
        prior_O = self._shares(self.prior())
        sums: dict[np.uint64, npt.NDArray[np.float64]] = {}
        for example in train:
            target = SequenceTask.inputs(self, example).target
            share_O = np.eye(len(prior_O))[target] if self.settings.kind == "class" else target
            known_O = ~np.isnan(share_O)
            for one in _keys(example):
                # One pair more, with the prior as label, so that one pair alone does not decide.
                sum_2O = sums.setdefault(one, np.stack([prior_O, np.ones(len(prior_O))]))
                sum_2O += np.where(known_O, [np.nan_to_num(share_O), known_O], 0)
        keys = sorted(sums)
        label_SO = np.stack([sums[one][0] / sums[one][1] for one in keys]).astype(np.float32)
        return found | {f"{MEMORY}.key": np.array(keys, np.uint64), f"{MEMORY}.share": label_SO}

    def look_ahead_to_fit(self, train: Sequence[Example], mine: Sequence[int], base: FineTuner) -> None:
        """Keep the mean representations of the pairs that the linear models are fitted to."""
        for n in mine:
            if n % _step(train) == 0:
                self.means(train[n], base)

    def baseline_outputs(
        self, example: Example, known: Mapping[str, npt.NDArray[Any]], base: FineTuner | None
    ) -> Mapping[str, npt.NDArray[np.float32] | Row]:
        """Those of `SequenceTask`; `SINGLE`, a linear model of the sum of both frozen embeddings; and `MEMORY`, the
        mean over both sequences of the labels of their training pairs.
        """
        found = super().baseline_outputs(example, known, base)
        if f"{MEMORY}.key" not in known:
            return found
        prior_O, places = self._shares(self.prior()), _places(example, known)
        share_O = np.mean([prior_O if at is None else known[f"{MEMORY}.share"][at] for at in places], axis=0)
        if self.settings.kind == "number":
            output = share_O
        elif self.settings.kind == "class":
            output = np.log(share_O)
        else:
            output = np.log(share_O / (1 - share_O))
        return {**found, MEMORY: output.astype(np.float32)}

    def group(self, example: Example, known: Mapping[str, npt.NDArray[Any]]) -> str:
        """Return the class of a pair by its sequences that training pairs have (`leakage.CLASSES`)."""
        if f"{MEMORY}.key" not in known:
            return ""
        return CLASSES[sum(at is not None for at in _places(example, known))]

    def _chains(self, example: Example, target: npt.NDArray[Any]) -> Inputs:
        one, other = chains_of(example)
        return Inputs(one.tokens, target, tracks=one.tracks, partner=Inputs(other.tokens, target, tracks=other.tracks))

    def _shares(self, output_O: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Return an output as shares of labels, which can be averaged; of numbers as it is."""
        if self.settings.kind == "number":
            return output_O.astype(np.float64)
        return (softmax if self.settings.kind == "class" else sigmoid)(output_O).astype(np.float64)


def _step(train: Sequence[Example]) -> int:
    """Return which of the training pairs the linear models are fitted to: every N-th."""
    return -(-len(train) // SequenceTask.baseline_records)


def chains_of(example: Example) -> tuple[Example, Example]:
    """Return the two chains of a record, each as `<cls> ... <eos>` with its part of the tracks.

    Raises:
        InputError: the record has one chain, or more than two.
    """
    one, other = (
        replace(
            example,
            tokens=piece(example.tokens, start, end - start),
            labels={},
            tracks={name: piece(values, start, end - start) for name, values in example.tracks.items()},
        )
        for start, end in two_chains(example.tokens[1:-1], example.id)
    )
    return one, other


def _symmetric(one: _Vectors, other: _Vectors) -> tuple[_Vectors, _Vectors, _Vectors]:
    """Return three functions of two vectors that are the same, bit for bit, for the vectors in the other order."""
    return one + other, one * other, abs(one - other)


def _keys(example: Example) -> list[np.uint64]:
    return [key(chain.tokens[1:-1]) for chain in chains_of(example)]


def _places(example: Example, known: Mapping[str, npt.NDArray[Any]]) -> list[int | None]:
    """Return the place of each chain among the sequences of the training pairs; None if it is none of them."""
    keys_S: npt.NDArray[np.uint64] = known[f"{MEMORY}.key"]
    places = [(int(np.searchsorted(keys_S, one)), one) for one in _keys(example)]
    return [at if at < len(keys_S) and keys_S[at] == one else None for at, one in places]
