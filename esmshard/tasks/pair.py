"""Task `pair`: labels of pairs of proteins, such as how strongly two proteins bind. Labels are numbers or classes."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from esmshard.recipe.sections import Clash, DataSettings, JoinSettings
from esmshard.tasks.base import Outputs
from esmshard.tasks.labels import FROZEN
from esmshard.tasks.sequence import SequenceHead, SequenceSettings, SequenceTask
from esmshard.vocab import chain_spans

SINGLE, MEMORY = "single sequences", "labels of each sequence"
"""The names of two baselines that score each sequence separately and ignore which two sequences form a pair."""
TRAINED_CHAINS = f"{MEMORY}.key"  # the saved array with the sorted hashes of all sequences in training pairs
MOST_PAIRS = 1_000_000  # the maximum number of training pairs whose sequence hashes are saved

_Vectors = TypeVar("_Vectors", torch.Tensor, npt.NDArray[np.floating])


@dataclass(frozen=True)
class PairLabels(ProteinLabels):
    """The labels of N pairs of proteins."""

    block_N: npt.NDArray[np.int64]
    """The block of each pair, int64 [N]: the index of whichever of its two sequences occurs in more pairs."""


class PairSettings(SequenceSettings):
    """Settings of the task for pairs of proteins. The order of the two proteins in a pair does not matter."""

    name: Literal["pair"]  # type: ignore[assignment]  # a task has one name

    pairs: ClassVar[bool] = True

    def suit(self, data: DataSettings) -> DataSettings:
        """Refuse `data.long: window` and settings of `data.join`, since a model reads the two chains separately."""
        if data.join != JoinSettings():  # type: ignore[call-arg]  # all keys have defaults
            raise Clash("join", "joins the chains of a record, but the chains of a pair stay separate; remove it")
        if data.long == "window":
            raise Clash("long", "window cuts a record, and a pair has two chains; choose full, skip or error")
        return super().suit(data)


class PairHead(SequenceHead):
    """A head that averages the residues of each chain, or pools them in another way, and applies LayerNorm to the two
    vectors. Their sum, product and absolute difference do not depend on the order of the chains. Dropout and one or two
    linear layers follow.
    """

    parts = 3

    def combined(self, x_SD: torch.Tensor) -> torch.Tensor:
        """Convert the vectors of 2N chains [2N, D] to N vectors [N, 3D]. Chains 2n and 2n + 1 are the n-th pair."""
        normed_SD = super().combined(x_SD)
        return torch.cat(_symmetric(normed_SD[0::2], normed_SD[1::2]), -1)


class PairTask(SequenceTask):
    """Predicts numbers, a class or several classes of a pair of proteins. The model reads each chain of a record `A:B`
    as a separate sequence, and the head combines both. Outputs and facts are as in `SequenceTask`.
    """

    Settings = PairSettings
    settings: PairSettings
    of_base = (FROZEN, SINGLE)
    fitted = ("length", "composition", *of_base)
    head_class = PairHead
    baseline_records = MOST_PAIRS

    def labels(self, fasta: Path, store: TokenStore, data: DataSettings) -> PairLabels:
        labels = super().labels(fasta, store, data)
        key_N2 = np.empty((len(store), 2), dtype=np.uint64)
        for n in range(len(store)):
            residues = store.residues(n)
            key_N2[n] = [key(residues[slice(*span)]) for span in two_chains(residues, store.id(n), fasta)]
        _, number_2N, count = np.unique(key_N2.T, return_inverse=True, return_counts=True)
        number_N2 = number_2N.reshape(2, -1).T.astype(np.int64)
        more_N = count[number_N2].argmax(1)
        return PairLabels(**vars(labels), block_N=number_N2[np.arange(len(store)), more_N])

    def inputs(self, example: Example) -> Inputs:
        return self._chains(example, super().inputs(example).target)

    def question(self, example: Example) -> Inputs:
        return self._chains(example, super().question(example).target)

    def represented(self, example: Example, base: FineTuner) -> npt.NDArray[np.float64]:
        """Return the mean representation of each chain, [2, D]. Means are cached, as a protein may be in many pairs."""
        kept = base.remembered["chains"]
        for chain in (chains := chains_of(example)):
            if (name := _digest(chain)) not in kept:
                kept[name] = super().represented(chain, base)
        return np.concatenate([kept[_digest(chain)] for chain in chains])

    def features(self, name: str, example: Example, base: FineTuner | None) -> npt.NDArray[np.floating]:
        """Return the features of both chains, combined as in `PairHead`, or added up for the baseline SINGLE."""
        if name in self.of_base:
            assert base is not None
            both_2F: npt.NDArray[np.floating] = self.represented(example, base)
        else:
            each = [super(PairTask, self).features(name, chain, base) for chain in chains_of(example)]
            both_2F = np.concatenate(each)
        first, second = np.split(both_2F, 2)
        return first + second if name == SINGLE else np.concatenate(_symmetric(first, second), axis=1)

    def units(self, data: Examples) -> tuple[npt.NDArray[np.int64] | None, str]:
        return data.blocks(), "sequence"

    def groups(self, data: Examples, known: Mapping[str, npt.NDArray[Any]]) -> list[str]:
        """Return the class of each pair: C3 if none of its sequences is in a training pair, C2 if one, C1 if both."""
        if (trained := known.get(TRAINED_CHAINS)) is None:
            return []
        whole = map(data.whole, range(len(data)))
        key_N2 = [[key(residues[slice(*span)]) for span in chain_spans(residues)] for residues in whole]
        return [CLASSES[count] for count in np.isin(key_N2, trained).sum(1)]

    def look_ahead(self, train: Sequence[Example], mine: Sequence[int], base: FineTuner) -> None:
        for n in mine:
            if n % _step(train) == 0:
                self.represented(train[n], base)

    def baselines(self, train: Sequence[Example], base: FineTuner) -> dict[str, npt.NDArray[Any]]:
        """Fit linear models to a part of the pairs (see `_step`), and compute each sequence's mean training label."""
        models = super().baselines(train[:: _step(train)], base)
        prior_O = self._averaged(self.prior())
        sums: dict[np.uint64, npt.NDArray[np.float64]] = {}
        for example in train:
            target = SequenceTask.inputs(self, example).target
            share_O = np.eye(len(prior_O))[target] if self.settings.kind == "class" else target
            known_O = ~np.isnan(share_O)
            for chain_key in _keys(example):
                # The mean label of a sequence includes one additional pair, whose label is the mean of all labels.
                sum_2O = sums.setdefault(chain_key, np.stack([prior_O, np.ones(len(prior_O))]))
                sum_2O += np.where(known_O, [np.nan_to_num(share_O), known_O], 0)
        keys = sorted(sums)
        label_SO = np.stack([sums[chain_key][0] / sums[chain_key][1] for chain_key in keys]).astype(np.float32)
        return models | {TRAINED_CHAINS: np.array(keys, np.uint64), f"{MEMORY}.share": label_SO}

    def baseline_outputs(
        self, examples: Sequence[Example], known: Mapping[str, npt.NDArray[Any]], base: FineTuner | None
    ) -> Outputs:
        """Return the outputs of `SequenceTask`, and of MEMORY: the average of both sequences' mean training labels."""
        outputs = super().baseline_outputs(examples, known, base)
        if TRAINED_CHAINS in known:
            outputs[MEMORY] = [self._remembered(example, known) for example in examples]
        return outputs

    def _remembered(self, example: Example, known: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        keys_S, keys_2 = known[TRAINED_CHAINS], np.array(_keys(example))
        at_2 = np.minimum(np.searchsorted(keys_S, keys_2), len(keys_S) - 1)
        in_training_21 = (keys_S[at_2] == keys_2)[:, None]
        share_2O = np.where(in_training_21, known[f"{MEMORY}.share"][at_2], self._averaged(self.prior()))
        share_O = share_2O.mean(0)
        if self.settings.kind == "multilabel":
            share_O = share_O / (1 - share_O)
        return np.asarray(share_O if self.settings.kind == "number" else np.log(share_O), dtype=np.float32)

    def _chains(self, example: Example, target: npt.NDArray[Any]) -> Inputs:
        first, second = chains_of(example)
        return Inputs(
            first.tokens, target, tracks=first.tracks, partner=Inputs(second.tokens, target, tracks=second.tracks)
        )

    def _averaged(self, output_O: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Convert logits to probabilities, which can be averaged. For kind `number`, return the numbers unchanged."""
        return (output_O if self.settings.kind == "number" else self.probabilities(output_O)).astype(np.float64)


def _step(train: Sequence[Example]) -> int:
    """Return the step n: linear models are fitted to every n-th training pair."""
    return -(-len(train) // SequenceTask.baseline_records)


def chains_of(example: Example) -> tuple[Example, Example]:
    """Return the two chains of a record as examples, each with tokens `<cls> ... <eos>` and its part of the tracks.
    Raises `InputError` for a record of one chain, or of more than two.
    """
    first, second = (
        replace(
            example,
            tokens=piece(example.tokens, start, end - start),
            labels={},
            tracks={name: piece(values, start, end - start) for name, values in example.tracks.items()},
        )
        for start, end in two_chains(example.tokens[1:-1], example.id)
    )
    return first, second


def _symmetric(a: _Vectors, b: _Vectors) -> tuple[_Vectors, _Vectors, _Vectors]:
    return a + b, a * b, abs(a - b)


def _keys(example: Example) -> list[np.uint64]:
    return [key(chain.tokens[1:-1]) for chain in chains_of(example)]


def _digest(chain: Example) -> str:
    digest = hashlib.sha256(chain.tokens.tobytes())
    for name, values in chain.tracks.items():
        digest.update(name.encode() + values.tobytes())
    return digest.hexdigest()
