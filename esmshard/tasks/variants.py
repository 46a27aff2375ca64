"""Task `variant`: measured values of variants of one protein. Each variant has one or several substitutions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field, ValidationInfo, field_validator
from scipy.special import ndtri
from torch import nn

from esmshard.batch import Context, Inputs, TokenBatch, batch_of, pack_variants
from esmshard.data.batching.loader import Example, Examples
from esmshard.data.splits.variant_records import VariantLabels
from esmshard.data.variants import parse_variant
from esmshard.devices import packs_at_once, side_by_side
from esmshard.errors import InputError
from esmshard.io.store import TokenStore
from esmshard.io.tables import shown
from esmshard.model.config import ModelConfig
from esmshard.model.finetuner import FineTuner, of_changes
from esmshard.model.weights import Weights
from esmshard.progress import Progress
from esmshard.recipe.sections import Clash, DataSettings, TaskSettings
from esmshard.tasks import metrics
from esmshard.tasks.base import Facts, LossSum, Outputs, Task, on_device_of, regression_loss, require_two_values
from esmshard.tasks.baselines import apply, copy_to, fit_numbers
from esmshard.tasks.gaussian_process import MOST, Features, GaussianProcessHead
from esmshard.tasks.labels import LabelHead
from esmshard.tasks.likelihood import AMINO_ACIDS, LOSSES, LikelihoodHead, fit_line, log_odds, require_lm_head
from esmshard.tasks.marginals import log_probabilities
from esmshard.tasks.metrics import Row
from esmshard.vocab import RESIDUES, STANDARD, VOCAB_SIZE, decode, encode

Pool = Literal["wild_type", "sites", "difference", "mean"]

KNOTS = 200  # the maximum number of pairs (value, normal score) that a rank scale saves, and interpolates between
FAR = 1000.0
"""How many standard deviations a rank scale extends beyond the lowest and the highest training value."""
THRESHOLDS, SHARPNESS = 15, 2.0
"""The ranking loss asks whether a value is above each of THRESHOLDS quantiles, with a logistic of slope SHARPNESS."""
ONE_HOT, SCORE, AUGMENTED, FROZEN = "one-hot ridge", "zero-shot", "one-hot + zero-shot ridge", "frozen embedding ridge"
"""The names of the four baselines of this task in reports."""
SHORT = {"one-hot": ONE_HOT, "zero-shot": SCORE, "augmented": AUGMENTED, "embedding": FROZEN}
"""The full name of each baseline, by its short name for the command-line option `--with`."""
LIGHT = 10.0
"""The factor by which the baseline AUGMENTED scales the zero-shot score. The ridge penalty then hardly affects the
score, as in Hsu et al. 2022."""
PACKED, LONG = 4096, 64
"""The maximum number of tokens in a forward pass, and the minimum number of variants for a progress bar."""
ZERO_SHOT = 0.1
"""The weight of the zero-shot score in a new head, in standard deviations of the target per unit of the score. The
standard deviation of the score is 2 to 4 for single substitutions, so a new head ranks variants nearly by the score."""
DEFAULTS: dict[str, Any] = {
    "table": None,
    "wild_type": None,
    "structure": None,
    "mutant": None,
    "offset": "auto",
    "unusable": "drop",
    "replicates": "mean",
    "transform": "none",
    "lower_is_better": (),
    "split": "position",
    "train_max": None,
    "train_share": 1.0,
}
"""The keys of the data section that only this task reads, with their defaults."""


class VariantSettings(TaskSettings):
    """Settings of the task for variants of one protein, with one or several substitutions each (docs/variants.md)."""

    name: Literal["variant"]

    data_keys: ClassVar[tuple[str, ...]] = ("target", *DEFAULTS)
    instead_of_crop: ClassVar[str] = "full or window"
    reads_table: ClassVar[bool] = True

    head: Literal["network", "likelihood", "gp", "auto"] = "network"
    """How a prediction is computed. `network` is a new network that reads the model's representations. `likelihood` is
    the zero-shot score of the language model, which is fine-tuned. This head adds no parameters. `gp` is a Gaussian
    process on the frozen model's representations, with the zero-shot score as its mean; `adapt.method` is then `probe`.
    These two suit one target with up to some hundred measurements. `auto` trains all three heads in each fold of a
    cross-validation, and chooses among them and the baselines."""
    pool: Pool = "wild_type"
    """The input of the heads `network` and `gp`. `wild_type`: the wild type's representation at each mutated residue,
    and the old and new amino acids. One forward pass of the wild type serves all variants of a step. `sites`: as
    `wild_type`, and also the difference between the representations of variant and wild type at each mutated residue.
    This needs a forward pass for each variant. `difference`: only this difference. `mean`: the mean representation over
    all residues of the variant."""
    zero_shot: bool = True
    """For the heads `network` and `gp`: add the language model's zero-shot score to the output, with a fitted weight.
    The score is the sum of log p(mutant) - log p(wild type) at the mutated residues (Meier et al. 2021).
    Pools `wild_type` and `sites` also read all 20 probabilities at these residues. This needs a model with a trained LM
    head."""
    hidden: int = Field(64, ge=0, le=8192)
    """The width of the hidden layer of the head `network`. 0 makes a linear head."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """The share of the inputs of the head `network` and of its hidden layer that dropout sets to 0 in training."""
    context: Context = "wild_type"
    """The sequence from which the head `likelihood` predicts the changed residues. `wild_type`: one forward pass of the
    wild type serves all variants of a step. `masked`: the variant with masks in place of its changes. `variant`: the
    variant itself, so that its other changes count too. The last two need a forward pass for each variant."""
    loss: Literal["mse", "huber", "ranking", "listmle"] | None = Field(None, validate_default=True)
    """The loss of the measured values. The head `network` has `mse` (squared error, the default), `huber` (errors above
    one standard deviation count linearly) and `ranking` (only the order of the values, by quantiles). The head
    `likelihood` has `ranking` (all pairs of variants in a step, the default), `listmle` (the order of all variants in a
    step) and `mse` (squared error of standardised scores)."""

    @field_validator("pool", "zero_shot", "hidden", "dropout", "context")
    @classmethod
    def _of_its_head(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        heads = {"pool": ("network", "gp", "auto"), "zero_shot": ("network", "gp", "auto"), "context": ("likelihood",)}
        owners, default = heads.get(name, ("network",)), cls.model_fields[name].default
        if (head := info.data.get("head", owners[0])) not in owners and value != default:
            raise ValueError(f"is for task.head {' or '.join(owners)}, and the recipe has {head}; remove it")
        if head in ("gp", "auto") and value in ("difference", "mean"):
            raise ValueError(f"{value} is not offered by task.head {head}; choose wild_type or sites")
        return value  # the file that records a recipe has the defaults of all keys

    @field_validator("loss")
    @classmethod
    def _loss_of_its_head(cls, loss: str | None, info: ValidationInfo) -> str | None:
        offered = {"network": ("mse", "huber", "ranking"), "likelihood": ("ranking", "listmle", "mse"), "gp": ("mse",)}
        offered["auto"] = ("mse",)  # each head has its own default
        head = info.data.get("head", "network")
        if loss is not None and loss not in offered[head]:
            raise ValueError(f"{loss} is not offered by task.head {head}; choose {', '.join(offered[head])}")
        return loss or offered[head][0]

    def no_probe(self) -> str | None:
        if self.head == "likelihood":
            return "probe fits a linear head, and task.head likelihood has no parameters; choose full or lora"
        return None if self.hidden == 0 or self.head == "gp" else "probe fits a linear head; set task.hidden: 0"

    @property
    def only_probe(self) -> bool:
        return self.head == "gp"

    @property
    def whole_steps(self) -> bool:
        return self.head == "likelihood"

    @property
    def starts_useful(self) -> bool:
        return self.head == "likelihood"  # the zero-shot ranking

    @property
    def wild_type_alone(self) -> bool:
        return self.context == "wild_type" if self.head == "likelihood" else self.pool == "wild_type"

    def suit(self, data: DataSettings) -> DataSettings:
        """Return the data section with the defaults of the keys that only this task reads."""
        if self.loss in ("ranking", "listmle") and data.transform == "log":
            raise Clash("transform", f"log has no effect on task.loss {self.loss}, which uses ranks; remove it")
        if self.head == "auto" and data.fold is not None:
            raise Clash(
                "fold", "is one fold, and task.head auto compares heads over all folds; remove it, or name a head"
            )
        if self.head == "auto" and data.split in ("mutations", "given"):
            raise Clash("split", f"{data.split} makes no folds, in which task.head auto compares heads; name a head")
        if data.structure is not None and self.head not in ("gp", "auto"):
            raise Clash("structure", f"is read by task.head gp, and the recipe has {self.head}; remove it")
        for key in ("table", "wild_type"):
            if getattr(data, key) is None:
                raise Clash(key, "this key is required")
        for key in ("train", "valid", "test", "clusters"):
            if getattr(data, key) is not None:
                reason = "is for the other tasks; task variant divides data.table instead; remove it"
                raise Clash(key, reason)
        if data.long not in ("full", "window"):
            reason = f"{data.long} leaves variants out; choose full, or window for a part of a long protein"
            raise Clash("long", reason)
        data = data.model_copy(update={key: value for key, value in DEFAULTS.items() if getattr(data, key) is None})
        if data.split in ("mutations", "given") and data.folds is not None:
            reason = f"divides the table, but so does data.split {data.split}; remove one of them"
            raise Clash("folds", reason)
        if data.split != "mutations" and data.train_max is not None:
            raise Clash("train_max", f"is for data.split mutations, and the recipe has {data.split}; remove it")
        if data.target and (foreign := set(data.lower_is_better or ()) - set(data.target)):
            raise Clash("lower_is_better", f"{min(foreign)} is no target; data.target names {', '.join(data.target)}")
        return data


@dataclass(frozen=True)
class Scale:
    """A conversion between values of a target and standardised numbers.

    Kind `none` scales the training values to mean 0 and standard deviation 1, and kind `log` scales their logarithms.
    Kind `rank` maps ranks of training values to normal scores. It continues as a straight line beyond these values.
    """

    kind: str
    mean: float
    deviation: float
    values: tuple[float, ...] = ()
    """For kind `rank`: at most KNOTS training values in ascending order, between a far lower and a far higher value."""
    scores: tuple[float, ...] = ()  # for kind `rank`: the normal scores of `values`

    @cached_property
    def _knots_2K(self) -> npt.NDArray[np.float64]:
        return np.array([self.values, self.scores])  # `np.interp` would convert the tuples for each value

    def to(self, value: float) -> float:
        """Convert a value in the unit of the table to a standardised number. NaN stays NaN."""
        if self.kind == "rank":
            return float(np.interp(value, *self._knots_2K))
        return (float(np.log(value) if self.kind == "log" else value) - self.mean) / self.deviation

    def back(self, score: float) -> float:
        """Convert a standardised number to a value in the unit of the table."""
        if self.kind == "rank":
            return float(np.interp(score, *self._knots_2K[::-1]))
        value = float(score) * self.deviation + self.mean
        return float(np.exp(value)) if self.kind == "log" else value


def fit_scale(values: npt.NDArray[np.float64], kind: str) -> Scale:
    """Fit a `Scale` to training values without NaN. At least two training values must differ.

    >>> fit_scale(np.array([1.0, 3.0]), "none").to(5.0)
    3.0
    """
    x = np.log(values) if kind == "log" else values
    mean, deviation = float(x.mean()), float(x.std())
    if kind != "rank":
        return Scale(kind, mean, deviation)
    distinct, counts = np.unique(values, return_counts=True)
    scores = ndtri((np.cumsum(counts) - counts / 2) / len(values))
    at = np.unique(np.linspace(0, len(distinct) - 1, KNOTS).round().astype(np.int64))
    far = np.array([-FAR, FAR])
    return Scale(kind, mean, deviation, *(
        (float(x_K[0] + low), *x_K[at].tolist(), float(x_K[-1] + high))
        for x_K, (low, high) in ((distinct, far * deviation), (scores, far))
    ))  # fmt: skip


class VariantHead(LabelHead):
    """A head that computes a vector for each changed residue, and adds up the vectors of a variant.

    A hidden layer is applied to each vector, and the last layer to the sum, which is zero for the wild type. With pool
    `wild_type` the vector of a change does not depend on other changes, so the effects of changes add up. The vector
    depends on the argument `pool`:

    - `wild_type`: LayerNorm of the wild type's representation at the site; old and new letter; and with `zero_shot` the
      log probabilities of the 20 amino acids at the site.
    - `difference`: the difference of the variant's and the wild type's representations at the site.
    - `sites`: both of the above.
    - `mean`: one vector for the variant instead, the mean representation over all residues of the variant.

    `zero_shot` also adds the language model's score of the changes, from the wild type's logits. `sign_T` is 1 for each
    target, or -1 if lower values of the target are better.
    """

    def __init__(
        self, dim: int, hidden: int, sign_T: npt.NDArray[np.float32], pool: Pool, dropout: float, *, zero_shot: bool
    ) -> None:
        width = dim
        if pool in ("wild_type", "sites"):
            width = dim * (1 if pool == "wild_type" else 2) + 2 * VOCAB_SIZE + (len(STANDARD) if zero_shot else 0)
        super().__init__(dim, width, hidden, len(sign_T), dropout)
        self.pool, self.reads_logits = pool, zero_shot
        self.zero_shot = nn.Parameter(ZERO_SHOT * torch.from_numpy(sign_T)) if zero_shot else None

    def start(self, weights: Weights) -> None:
        """Refuse a model without a trained LM head if this head reads the zero-shot score."""
        if self.reads_logits:
            require_lm_head(weights, "set task.zero_shot=false, or ")

    def forward(
        self, x_TD: torch.Tensor, batch: TokenBatch, logits_MV: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return the T outputs of each variant, [T]."""
        draw_M = batch.draw_N if self.pool == "mean" else of_changes(batch)
        h_NF = self.features(self.norm(x_TD), batch, logits_MV, partial(self._hidden, draw_M=draw_M))
        out_NT = self.out(self.hidden_dropout(h_NF, batch.draw_N))
        if self.zero_shot is not None:
            assert logits_MV is not None
            out_NT = out_NT.float() + log_odds(logits_MV, batch)[:, None] * self.zero_shot
        return list(out_NT)

    def _hidden(self, x_MF: torch.Tensor, draw_M: torch.Tensor | None) -> torch.Tensor:
        return x_MF if self.hidden is None else F.gelu(self.hidden(self.dropout(x_MF, draw_M)))

    def features(
        self,
        x_TD: torch.Tensor,
        batch: TokenBatch,
        logits_MV: torch.Tensor | None,
        each: Callable[[torch.Tensor], torch.Tensor] = lambda x_MF: x_MF,
    ) -> torch.Tensor:
        """Return F features of each of N variants, [N, F]. The function `each` is applied to vectors before the sum."""
        if self.pool == "mean":
            residues = batch.residues(x_TD)[: batch.n_records]
            return each(torch.stack([x_LD.mean(0) for x_LD in residues]))
        assert batch.changes_4M is not None
        record_M, letter_M, mutant_M, wild_M = batch.changes_4M
        parts = [] if self.pool == "wild_type" else [x_TD[mutant_M] - x_TD[wild_M]]
        if self.pool != "difference":
            letters = [F.one_hot(at_M, VOCAB_SIZE).to(x_TD) for at_M in (batch.tokens_T[wild_M], letter_M)]
            parts += [x_TD[wild_M], *letters]
            if self.reads_logits:
                assert logits_MV is not None
                parts.append(logits_MV[:, AMINO_ACIDS].float().log_softmax(-1).to(x_TD))
        change_MF = each(torch.cat(parts, 1))
        return change_MF.new_zeros(batch.n_records, change_MF.shape[1]).index_add(0, record_M, change_MF)


def frozen(
    base: FineTuner,
    wild_type: npt.NDArray[np.uint8],
    variants: Sequence[npt.NDArray[np.uint8]],
    pool: Pool,
    tracks: Mapping[str, npt.NDArray[Any]] | None = None,
) -> npt.NDArray[np.float32]:
    """Compute the features of N variants with the frozen model, float32 [N, F].

    Features are results of `VariantHead.features` for pool `sites` or `mean`, without LayerNorm and probabilities. They
    are cached in `base.remembered`, by pool and tokens (`<cls> ... <eos>`). All variants have the same `tracks`.
    """
    known, alone = _remembered(base, pool, wild_type, tracks), base.trunk.shared_on is None
    names = [variant.tobytes() for variant in variants]
    new = [n for n, name in enumerate(names) if name not in known]
    head = VariantHead(base.trunk.config.dim, 0, np.ones(1, np.float32), pool, 0.0, zero_shot=False)
    each = max(1, PACKED // len(wild_type))
    parts = [new[n : n + each] for n in range(0, len(new), each)]

    def compute(part: list[int]) -> npt.NDArray[np.float32]:
        batch = pack_variants([variants[n] for n in part], wild_type, tracks=tracks).to(base.device)
        x_TD = base.trunk(batch).representations[base.trunk.config.n_layers].float()
        x_NF: npt.NDArray[np.float32] = head.features(x_TD, batch, None).cpu().numpy()
        return x_NF

    at_once = max(1, 4 * packs_at_once(base.device))
    with Progress("frozen model", len(new), show=alone and len(new) >= LONG) as progress:
        for first in range(0, len(parts), at_once):
            group = parts[first : first + at_once]
            for part, x_NF in zip(group, side_by_side(compute, group, base.device, threads=alone), strict=True):
                known |= {names[n]: x_F for n, x_F in zip(part, x_NF, strict=True)}
            progress.update(min(len(new), (first + at_once) * each), "")
    return np.stack([known[name] for name in names])


_KEPT: dict[tuple[str | None, str, bytes], dict[Any, Any]] = {}
"""Outputs of a frozen model, for later folds in this process. The keys are `FineTuner.origin`, kind and wild type."""


def _remembered(
    base: FineTuner, kind: str, wild_type: npt.NDArray[np.uint8], tracks: Mapping[str, npt.NDArray[Any]] | None
) -> dict[Any, Any]:
    if base.origin is not None and not tracks and kind not in base.remembered:
        if any(key[0] != base.origin for key in _KEPT):  # another model would only take memory
            _KEPT.clear()
        base.remembered[kind] = _KEPT.setdefault((base.origin, kind, wild_type.tobytes()), {})
    return base.remembered[kind]


class VariantTask(Task):
    """Predicts measured values of variants. Outputs: T standardised numbers, one for each target [T].

    Facts: `targets` (names), `lower_is_better` (names of targets), `scales` (arguments of `Scale`) and `protein` (the
    wild type). `first` and `length` describe the part of the protein that the model reads, and `tracks`, if any, belong
    to this part. `offset` is the number that was added to the positions of the table. `line` has the slope and the
    intercept that convert a score of the head `likelihood` to a standardised number. `fitted` has the numbers of
    training variants, and of their changes, that the head `gp` stores; the output of this head is described there.
    `places` has the coordinates of the residues that the model reads, or null for unknown ones.
    """

    Settings = VariantSettings
    settings: VariantSettings
    baseline_records = 10_000
    of_base = (FROZEN,)

    def __init__(self, settings: VariantSettings, facts: Facts) -> None:
        super().__init__(settings, facts)
        self._sign_T = np.ones(1, dtype=np.float32)
        if facts:
            self.wild_type = str(facts["protein"])[facts["first"] : facts["first"] + facts["length"]]
            self._tokens: npt.NDArray[np.uint8] = encode(self.wild_type)
            self._scales = [Scale(**scale) for scale in facts["scales"]]
            lower = set(facts["lower_is_better"])
            self._tracks = {
                name: np.array(track["values"], dtype=track["dtype"]) for name, track in facts.get("tracks", {}).items()
            }
            self._sign_T = np.array([-1 if name in lower else 1 for name in facts["targets"]], dtype=np.float32)

    @property
    def columns(self) -> tuple[str, ...]:
        return metrics.number_columns(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.facts.get("targets", ()))

    def labels(self, fasta: Path, _store: TokenStore, _data: DataSettings) -> VariantLabels:
        raise InputError(
            f"{fasta}: a model of task variant reads a table of variants, not sequences; run `esmshard predict MODEL "
            "TABLE`; finetune itself tests on folds of its table"
        )

    def learn(self, train: Examples) -> Self:
        assert isinstance(train.labels, VariantLabels)
        labels = train.labels
        y_NT = np.stack([train.get(n).labels["target"] for n in range(len(train))]).astype(np.float64)
        kind = "rank" if self.settings.loss in ("ranking", "listmle") else labels.transform
        if self.settings.head != "network" and len(labels.names) > 1:
            raise InputError(
                f"{train.path}: task.head {self.settings.head} learns one target, and the recipe has "
                f"{len(labels.names)}; set data.target=[{labels.names[0]}]"
            )
        scales = []
        for name, y_N in zip(labels.names, y_NT.T, strict=True):
            known = y_N[~np.isnan(y_N)]
            require_two_values(train.path, f"the target {shown(name)}", known)
            scales.append(fit_scale(known, kind))
        facts = {
            "targets": list(labels.names),
            "lower_is_better": list(labels.lower_is_better),
            "scales": [asdict(scale) for scale in scales],
            "protein": labels.protein,
            "first": labels.first,
            "length": labels.length,
            "offset": labels.offset,
        }
        if tracks := train.get(0).tracks:  # all variants have the same tracks
            facts["tracks"] = {name: _as_json(values) for name, values in tracks.items()}
        if self.settings.head == "gp":
            wild_type = encode(labels.protein[labels.first : labels.first + labels.length])
            count = len(used := [n for n, y_T in enumerate(y_NT) if not np.isnan(y_T[0])])
            if count > MOST:
                raise InputError(
                    f"{train.path}: task.head gp learns from {MOST:,} variants at most, and training has {count:,}; "
                    f"set task.head=network, or data.train_share={MOST / count:.2f}"
                )
            changes = sum(int((train.get(n).tokens != wild_type).sum()) for n in used)
            facts["fitted"] = {"variants": count, "changes": changes}
            if labels.place_L3 is not None:
                facts["places"] = [None if np.isnan(xyz).any() else xyz.round(2).tolist() for xyz in labels.place_L3]
        return type(self)(self.settings, facts)

    def head(self, config: ModelConfig) -> nn.Module:
        s = self.settings
        if s.head == "likelihood":
            return LikelihoodHead(float(self._sign_T[0]))
        if s.head == "gp":
            sizes, differences = self.facts["fitted"], s.pool == "sites"
            sign, zero_shot = float(self._sign_T[0]), s.zero_shot
            places = self.facts.get("places")
            return GaussianProcessHead(
                config.dim, sizes, sign, differences=differences, zero_shot=zero_shot, places=places
            )
        return VariantHead(config.dim, s.hidden, self._sign_T, s.pool, s.dropout, zero_shot=s.zero_shot)

    def inputs(self, example: Example) -> Inputs:
        """Return the variant and the wild type as input. The target [2, T] has standardised and measured values."""
        y_T = example.labels["target"].astype(np.float64)
        scaled = [scale.to(y) for scale, y in zip(self._scales, y_T, strict=True)]
        return self._with_wild_type(example, np.array([scaled, y_T], dtype=np.float32))

    def question(self, example: Example) -> Inputs:
        if len(example.tokens) != len(self._tokens):
            raise InputError(
                f"record {shown(example.id)} has {len(example.tokens) - 2:,} residues, but the wild type of the model "
                f"has {len(self.wild_type):,}; give variants that differ from the wild type only by substitutions"
            )
        return self._with_wild_type(example, np.empty(0, np.float32))

    def _with_wild_type(self, example: Example, target: npt.NDArray[np.float32]) -> Inputs:
        s = self.settings
        return Inputs(
            example.tokens,
            target,
            wild_type=self._tokens if s.zero_shot or s.pool != "mean" else None,
            logits_from=s.context if s.zero_shot else None,
            wild_type_alone=s.wild_type_alone,
            tracks=example.tracks or self._tracks,
        )

    def loss(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> LossSum:
        output = torch.stack(list(outputs))
        target = on_device_of(torch.stack([target_2T[0] for target_2T in targets]), output)
        kind = self.settings.loss or ""
        if self.settings.head == "gp":
            output = output[:, :1]
        if self.settings.head == "likelihood":
            known_N = ~target[:, 0].isnan()
            return LOSSES[kind](output[known_N, 0], target[known_N, 0])
        if kind != "ranking":
            return regression_loss(output, target, kind)
        known = ~target.isnan()
        return LossSum((_ordinal(output, target) * known).sum(), known.sum())

    def score(self, output: npt.NDArray[np.float32], target: npt.NDArray[np.float32]) -> Row:
        row: Row = metrics.number_row(self.predict(output), target[1], self.names)
        if self.settings.head == "likelihood":
            return {**row, "score": float(output[0])}
        return (
            {**row, metrics.PREDICTIVE: float(self.with_deviations(output)[2])}
            if len(output) > len(self.names)
            else row
        )

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        return metrics.number_summary(rows, self.names)

    def calibrate(self, rows: Sequence[Row]) -> dict[str, Any]:
        if self.settings.head != "likelihood":
            return {}
        target_N = np.array([self._scales[0].to(float(row["target"])) for row in rows])
        return {"line": fit_line(np.array([float(row["score"]) for row in rows]), target_N)}

    def uncalibrated(self) -> Self:
        return type(self)(self.settings, {**self.facts, "line": (1.0, 0.0)})  # baselines predict standardised numbers

    def predict(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if self.settings.head == "likelihood":
            if "line" not in self.facts:  # in training, when only the order of the predictions counts
                return output
            slope, intercept = self.facts["line"]
            output = slope * output + intercept
        return np.array([scale.back(z) for scale, z in zip(self._scales, output, strict=False)], dtype=np.float32)

    def with_deviations(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Convert the output of the head `gp` to the unit of the table: the mean, its standard deviation, and that of a
        measurement, float32 [3]. For curved scales, a deviation is half the difference between mean + sd and mean - sd.
        """
        scale, (mean, *deviations) = self._scales[0], map(float, output)
        return np.array(
            [scale.back(mean), *((scale.back(mean + sd) - scale.back(mean - sd)) / 2 for sd in deviations)], np.float32
        )

    def baselines(
        self, train: Sequence[Example], base: FineTuner | None, only: str | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Fit ridge regressions, and compute the base model's probabilities at every residue of the wild type. `only`
        names the only baseline to fit; by default all are fitted. If `base` is None, only ONE_HOT is fitted.
        """
        wanted = set(SHORT.values()) if only is None else {only}
        scaled_NT = np.stack([self.inputs(example).target[0] for example in train])
        tokens_NL = np.stack([example.tokens for example in train])
        letters_F2 = _varied_letters(tokens_NL)
        one_hot_NF = np.stack([_one_hot(tokens_L, letters_F2) for tokens_L in tokens_NL])
        fitted: dict[str, npt.NDArray[Any]] = {f"{ONE_HOT}.letters": letters_F2}
        if ONE_HOT in wanted:
            fitted[ONE_HOT] = fit_numbers(one_hot_NF, scaled_NT)
        if base is None:
            return fitted
        if self.settings.zero_shot and wanted & {SCORE, AUGMENTED}:
            tracks = train[0].tracks or self._tracks
            if not (kept := _remembered(base, SCORE, self._tokens, tracks)):
                sites = [n for n, letter in enumerate(self.wild_type) if letter in RESIDUES]
                kept["log_p"] = np.zeros((len(self.wild_type), len(RESIDUES)), np.float32)
                kept["log_p"][sites] = log_probabilities(base.trunk, self.wild_type, sites, tracks=tracks)
            log_p_LA = kept["log_p"]
            score_N = np.array([self._zero_shot(example, log_p_LA) for example in train])
            scale = np.array([score_N.mean(), score_N.std() or 1.0])
            fitted |= {f"{SCORE}.log_p": log_p_LA, f"{SCORE}.scale": scale}
            if AUGMENTED in wanted:
                both_NF = np.column_stack([one_hot_NF, (score_N - scale[0]) / scale[1]])
                light_F = np.where(np.arange(both_NF.shape[1]) < one_hot_NF.shape[1], 1.0, LIGHT)
                fitted[AUGMENTED] = fit_numbers(both_NF, scaled_NT, light_F)
        if FROZEN in wanted:
            fitted[FROZEN] = fit_numbers(self._frozen(train, base), scaled_NT)
        return fitted

    def baseline_outputs(
        self, examples: Sequence[Example], known: Mapping[str, npt.NDArray[Any]], base: FineTuner | None
    ) -> Outputs:
        """Return the outputs of the fitted baselines for each variant. The zero-shot score is standardised over the
        training variants. Its sign is reversed for a target whose lower values are better.
        """
        outputs: Outputs = {}
        score_N = np.full(len(examples), np.nan)
        if f"{SCORE}.log_p" in known:
            mean, deviation = known[f"{SCORE}.scale"]
            raw_N = np.array([self._zero_shot(example, known[f"{SCORE}.log_p"]) for example in examples])
            score_N = (raw_N - mean) / deviation
            outputs[SCORE] = list((score_N[:, None] * self._sign_T).astype(np.float32))
        if (letters := known.get(f"{ONE_HOT}.letters")) is not None:
            one_hot_NF = np.stack([_one_hot(example.tokens, letters) for example in examples])
            for name, x_NF in ((ONE_HOT, one_hot_NF), (AUGMENTED, np.column_stack([one_hot_NF, score_N]))):
                if name in known:
                    outputs[name] = list(apply(known[name], x_NF))
        if base is not None and FROZEN in known:
            outputs[FROZEN] = list(apply(known[FROZEN], self._frozen(examples, base)))
        return outputs

    def units(self, data: Examples) -> tuple[npt.NDArray[np.int64] | None, str]:
        """Return the unit of each variant for the bootstrap: its sites or the variant; see `metrics.variant_units`."""
        return metrics.variant_units([parse_variant(data.id(n)) for n in range(len(data))])

    def look_ahead(self, train: Sequence[Example], mine: Sequence[int], base: FineTuner) -> None:
        if mine:
            self._frozen([train[n] for n in mine], base)

    @torch.no_grad()
    def probe(self, head: nn.Module, train: Sequence[Example], base: FineTuner, seed: int) -> None:
        """Fit the head `gp`, or a linear head by ridge regression to its inputs and the zero-shot score."""
        inputs = [record for example in train if not np.isnan((record := self.inputs(example)).target[0]).all()]
        each, described = max(1, PACKED // len(self._tokens)), list[Any]()
        for n in range(0, len(inputs), each):
            batch = batch_of(inputs[n : n + each]).to(base.device)
            output = base.trunk(batch, logits_at=batch.logits_at_P)
            x_TD = output.representations[base.trunk.config.n_layers].float()
            if isinstance(head, GaussianProcessHead):
                described.append(head.features(x_TD, batch, output.logits_PV))
                continue
            assert isinstance(head, VariantHead)
            x_NF = head.features(head.norm(x_TD), batch, output.logits_PV)
            score = () if output.logits_PV is None else (log_odds(output.logits_PV, batch)[:, None],)
            described.append(torch.cat([x_NF, *score], 1).cpu().numpy())
        y_NT = np.stack([record.target[0] for record in inputs])
        if isinstance(head, GaussianProcessHead):
            head.fit(Features.joined(described), torch.from_numpy(y_NT[:, 0]))
            return
        assert isinstance(head, VariantHead)
        model, width = fit_numbers(np.concatenate(described), y_NT), head.out.in_features
        copy_to(head.out, np.column_stack([model[:, :width], model[:, -1]]))
        if head.zero_shot is not None:
            head.zero_shot.copy_(torch.from_numpy(model[:, width]))

    def _zero_shot(self, example: Example, log_p_LA: npt.NDArray[np.float32]) -> float:
        mutant, wild = decode(example.tokens[1:-1]), self.wild_type
        changed = (np.flatnonzero(example.tokens != self._tokens) - 1).tolist()
        sites = [s for s in changed if mutant[s] in STANDARD and wild[s] in STANDARD]
        return float(sum(log_p_LA[s, RESIDUES.index(mutant[s])] - log_p_LA[s, RESIDUES.index(wild[s])] for s in sites))

    def _frozen(self, examples: Sequence[Example], base: FineTuner) -> npt.NDArray[np.float32]:
        """Return the features of N variants from `frozen`, [N, F]. All pools except `mean` use the pool `sites`."""
        pool: Pool = "mean" if self.settings.pool == "mean" else "sites"
        tokens, tracks = [example.tokens for example in examples], examples[0].tracks or self._tracks
        return frozen(base, self._tokens, tokens, pool, tracks)


def _as_json(values: npt.NDArray[Any]) -> dict[str, Any]:
    """Convert the values of a track to JSON, with null for NaN. NumPy converts null to NaN when the JSON is read."""
    nullable = values.astype(object)
    if values.dtype.kind == "f":
        nullable[np.isnan(values)] = None
    return {"dtype": str(values.dtype), "values": nullable.tolist()}


def _varied_letters(tokens_NL: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Return all F pairs (index, token) that occur at the indices where the variants differ, int64 [F, 2]."""
    places = np.flatnonzero((tokens_NL != tokens_NL[0]).any(0))
    pairs = [(place, token) for place in places.tolist() for token in np.unique(tokens_NL[:, place]).tolist()]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _one_hot(tokens_L: npt.NDArray[np.uint8], letters_F2: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return 1 for each of F pairs (index, token) that a variant has, and 0 for the others, float32 [F]."""
    return np.asarray(tokens_L[letters_F2[:, 0]] == letters_F2[:, 1], dtype=np.float32)


def _ordinal(output_NT: torch.Tensor, target_NT: torch.Tensor) -> torch.Tensor:
    """Compute the all-threshold loss of ordinal regression (Rennie and Srebro 2005), [N, T].

    The loss is the mean of the logistic losses of predicting whether a value is above each of THRESHOLDS quantiles. It
    depends only on the order of the values. Losses over pairs of records (Bradley-Terry, RankNet) do so too, but also
    depend on which records share a micro-batch, and therefore on the number of processes.

    Args:
        output_NT: predicted normal scores of N variants for T targets.
        target_NT: normal scores of the ranks of the measured values.
    """
    shares = torch.arange(1, THRESHOLDS + 1, device=output_NT.device) / (THRESHOLDS + 1)
    at_K = torch.special.ndtri(shares.float())
    side_NTK = torch.where(target_NT[..., None] > at_K, 1.0, -1.0)
    return F.softplus(-side_NTK * SHARPNESS * (output_NT[..., None] - at_K)).mean(-1)
