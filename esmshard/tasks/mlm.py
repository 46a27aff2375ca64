"""Task `mlm`: masked-language-model training on unlabelled sequences, with the LM head of the language model."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field
from scipy.special import log_softmax, softmax
from torch import nn

from esmshard.batch import Inputs
from esmshard.data.batching.loader import FIXED, Example
from esmshard.model.config import ModelConfig
from esmshard.model.finetuner import FineTuner, LanguageModelHead
from esmshard.recipe.sections import TaskSettings
from esmshard.tasks.base import BEFORE, LossSum, Outputs, Task, on_device_of
from esmshard.tasks.metrics import Row
from esmshard.vocab import MASK, STANDARD, VOCAB_SIZE, encode_residues

AMINO_ACIDS: npt.NDArray[np.uint8] = np.frombuffer(encode_residues(STANDARD), np.uint8)
"""The tokens of the 20 standard amino acids, in the order of `vocab.STANDARD`."""
_IS_AMINO_ACID = np.isin(np.arange(256), AMINO_ACIDS)
STEPS = 500
"""The number of time steps of the diffusion, as in DPLM."""
NEVER = -100.0  # the logit of tokens other than the 20 amino acids in the baseline `amino-acid frequencies`


def corrupt(
    tokens: npt.NDArray[np.uint8], share: float, key: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Choose random residues of a protein that the model has to predict, and mask or replace most of them.

    Of the chosen residues 80% become `<mask>`, 10% become a random amino acid, and 10% stay unchanged (Devlin et al.
    2019, as in ESM). Only the 20 standard amino acids are chosen: X is an unknown residue, and B, U, Z and O are too
    rare to learn.

    The number of chosen residues is rounded up or down at random, so that its mean is exact, as in fairseq, with which
    ESM was trained. At least one residue is chosen, so that a short peptide has a score.

    Args:
        tokens: `<cls> ... <eos>`, uint8 [L + 2].
        share: the share of the standard amino acids in the protein to choose.
        key: the random seed, as a text.

    Returns:
        The tokens for the model, and the indices of the chosen tokens, ascending, int64 [P].
    """
    eligible = np.flatnonzero(_IS_AMINO_ACID[tokens])
    n = len(eligible)
    if not n:
        return tokens, eligible
    # SHAKE-128 is faster than seeding a generator, and independent of NumPy's version.
    words = np.frombuffer(hashlib.shake_128(key.encode()).digest(4 * (2 * n + 1)), "<u4")
    count = max(1, int(share * n + words[-1] / 2**32))
    chosen_P = np.sort(eligible[np.argpartition(words[:n], count - 1)[:count]])
    die_P = words[n : n + count] % 200  # below 160 `<mask>`, below 180 an amino acid, else unchanged
    corrupted = tokens.copy()
    corrupted[chosen_P[die_P < 160]] = MASK
    at_random_P = (die_P >= 160) & (die_P < 180)
    corrupted[chosen_P[at_random_P]] = AMINO_ACIDS[die_P[at_random_P] - 160]
    return corrupted, chosen_P


def diffuse(tokens: npt.NDArray[np.uint8], key: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], int]:
    """Mask residues as in absorbing-state diffusion (DPLM, Wang et al. 2024, arXiv:2402.18567).

    A time step t from 1 to STEPS is drawn uniformly, and each of the 20 standard amino acids becomes `<mask>` with
    probability t / STEPS. In a short peptide no residue may be chosen. `corrupt` explains the arguments.

    Returns:
        The tokens for the model, the indices of the `<mask>` tokens, ascending, int64 [P], and the weight of their
        losses, STEPS - t + 1. This is the linear weight of the authors' code (`weight: linear`), times STEPS.
    """
    eligible = np.flatnonzero(_IS_AMINO_ACID[tokens])
    words = np.frombuffer(hashlib.shake_128(key.encode()).digest(4 * (len(eligible) + 1)), "<u4")
    step = 1 + int(words[-1]) % STEPS
    chosen_P = eligible[words[:-1] < step / STEPS * 2**32]
    corrupted = tokens.copy()
    corrupted[chosen_P] = MASK
    return corrupted, chosen_P, STEPS - step + 1


class MlmSettings(TaskSettings):
    """Masked-language-model training on unlabelled sequences, such as members of a protein family (docs/tasks.md)."""

    name: Literal["mlm"]

    may_crop: ClassVar[bool] = True
    trains_lm_head: ClassVar[bool] = True
    data_keys: ClassVar[tuple[str, ...]] = ("sequence_column",)

    mask: float = Field(0.15, gt=0, le=0.5)
    """The share of residues that the model predicts. 80% of them are replaced by `<mask>`, 10% by a random one of the
    20 amino acids, and 10% stay unchanged."""
    masking: Literal["bert", "diffusion"] = "bert"
    """How training hides residues. `bert`: as `task.mask` describes. `diffusion`: as in the training of DPLM, each
    residue becomes `<mask>` with a probability t, which is drawn from 0 to 1 for each sequence and epoch, and each loss
    has the weight 1 - t. Evaluations always hide residues as with `bert`, so their results can be compared."""

    def head_bytes(self, tokens: int, n_logits: int, dim: int) -> int:
        """Return the size in bytes of three arrays at the predicted residues: logits, log-softmax and its gradient. By
        diffusion, all residues may be predicted.
        """
        return round(4 * 3 * n_logits * (self.mask if self.masking == "bert" else 1) * tokens)


class MlmTask(Task):
    """Predicts the amino acids at masked or replaced residues. Outputs: logits over all tokens, [P, V]."""

    Settings = MlmSettings
    settings: MlmSettings
    columns = ("perplexity", "accuracy")
    lower_is_better = True
    names = tuple(STANDARD)
    per_residue = True
    one_of_names = True
    of_base = (BEFORE,)

    def head(self, config: ModelConfig) -> nn.Module:
        """Return a head without parameters, since the LM head is a part of the trunk."""
        return LanguageModelHead()

    def inputs(self, example: Example) -> Inputs:
        """Choose and mask residues (see `corrupt`). The target has the true tokens of these residues, int64 [P]. The
        choice differs between epochs. Evaluations always choose the same residues, whatever the recipe's seed is.

        In training by diffusion (see `diffuse`), the target has two columns: the true tokens, and the weights of the
        losses times STEPS, int64 [P, 2].
        """
        if self.settings.masking == "diffusion" and example.draw != FIXED:
            tokens, chosen_P, weight = diffuse(example.tokens, f"diffuse:{example.draw}:{example.id}")
            target_P2 = np.stack([example.tokens[chosen_P], np.full(len(chosen_P), weight)], 1, dtype=np.int64)
            return Inputs(tokens, target_P2, chosen_P, tracks=example.tracks)
        tokens, chosen_P = corrupt(example.tokens, self.settings.mask, f"mask:{example.draw}:{example.id}")
        return Inputs(tokens, example.tokens[chosen_P].astype(np.int64), chosen_P, tracks=example.tracks)

    def question(self, example: Example) -> Inputs:
        """Return the whole sequence without masks, and ask for logits at every residue."""
        places_P = np.arange(1, len(example.tokens) - 1)
        return Inputs(example.tokens, np.empty(0, np.int64), places_P, tracks=example.tracks)

    def loss(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> LossSum:
        logits_PV = torch.cat(list(outputs))
        target = on_device_of(torch.cat(list(targets)), logits_PV)
        count = torch.full((), float(len(target)), device=logits_PV.device)
        if target.ndim == 1:
            return LossSum(F.cross_entropy(logits_PV, target, reduction="sum"), count)
        token_P, weight_P = target.unbind(1)
        return LossSum((F.cross_entropy(logits_PV, token_P, reduction="none") * weight_P).sum() / STEPS, count)

    def score(self, output: npt.NDArray[np.float32], target: npt.NDArray[np.int64]) -> Row:
        nll_P = -log_softmax(output.astype(np.float64), axis=1)[np.arange(len(target)), target]
        sums = {"nll": float(nll_P.sum()), "masked": len(target), "correct": int((output.argmax(1) == target).sum())}
        return {**_metrics(**sums), **sums}

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """Compute the metrics over the chosen residues of all records. Perplexity is exp(mean loss of a residue)."""
        sums_N3 = np.array([[row[key] for key in ("nll", "masked", "correct")] for row in rows], dtype=np.float64)
        return _metrics(*sums_N3.sum(0).tolist())

    def predict(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the probabilities of the 20 amino acids in `vocab.STANDARD` at each residue, float32 [L, 20].

        Each row adds up to 1. Nothing is masked: these are the "wild-type marginals" of Meier et al. 2021
        (doi:10.1101/2021.07.09.450648).
        """
        return np.asarray(softmax(output[:, AMINO_ACIDS].astype(np.float64), axis=1), dtype=np.float32)

    def baselines(self, train: Sequence[Example], base: FineTuner) -> dict[str, npt.NDArray[Any]]:
        """Compute the logarithms of the frequencies of the 20 amino acids in training. Each count is increased by 1."""
        tokens = np.concatenate([example.tokens for example in train])
        counts = np.bincount(tokens, minlength=VOCAB_SIZE)[AMINO_ACIDS] + 1
        logits_V = np.full(VOCAB_SIZE, NEVER, np.float32)
        logits_V[AMINO_ACIDS] = np.log(counts / counts.sum())
        return {"amino-acid frequencies": logits_V}

    def baseline_outputs(
        self, examples: Sequence[Example], known: Mapping[str, npt.NDArray[Any]], base: FineTuner | None
    ) -> Outputs:
        """Return the outputs of two baselines. `amino-acid frequencies` has the same logits for every residue. `before
        fine-tuning` is the model before training, with the same masked sequences.
        """
        inputs = [self.inputs(example) for example in examples]
        outputs: Outputs = {
            name: [np.tile(logits_V, (len(record.target), 1)) for record in inputs] for name, logits_V in known.items()
        }
        return outputs if base is None else outputs | {BEFORE: base.outputs(inputs)}


def _metrics(nll: float, masked: float, correct: float) -> dict[str, float]:
    return {
        "perplexity": float(np.exp(nll / masked)) if masked else np.nan,
        "accuracy": correct / masked if masked else np.nan,
    }
