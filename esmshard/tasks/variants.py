"""Task `variant`: measured values of variants of a protein, or of several proteins."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, ValidationInfo, field_validator
from scipy.special import ndtri
from torch import nn

from esmshard.batch import Context, Inputs, batch_of
from esmshard.data.batching.loader import Example, Examples
from esmshard.data.mutations import WildType, parse_variant, wild_type_of
from esmshard.data.splits.variant_records import VariantLabels
from esmshard.errors import InputError, UsageError
from esmshard.io.store import TokenStore
from esmshard.io.tables import shown
from esmshard.model.config import ModelConfig
from esmshard.model.families.family_registry import corruption_of
from esmshard.model.finetuner import FineTuner
from esmshard.recipe.sections import Clash, DataSettings, TaskSettings
from esmshard.tasks import metrics, variant_baselines
from esmshard.tasks.base import Facts, LossSum, Outputs, Task, on_device_of, regression_loss, require_two_values
from esmshard.tasks.baselines import copy_to, fit_numbers
from esmshard.tasks.gaussian_process import MOST, Features, GaussianProcessHead
from esmshard.tasks.likelihood import LOSSES, LikelihoodHead, fit_line, log_odds
from esmshard.tasks.metrics import Row
from esmshard.tasks.variant_baselines import FROZEN, PACKED
from esmshard.tasks.variant_head import Pool, VariantHead, ordinal_loss
from esmshard.vocab import encode

KNOTS = 200  # the maximum number of pairs (value, normal score) that a rank scale saves, and interpolates between
FAR = 1000.0
"""How many standard deviations a rank scale extends beyond the lowest and the highest training value."""
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
    "protein": None,
    "indels": "drop",
}
"""The keys of the data section that only this task reads, with their defaults."""


class VariantSettings(TaskSettings):
    """Settings of the task for variants of one or several proteins (docs/variants.md)."""

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
    variant itself, so that its other changes count too. `sequence`: all residues of the variant are predicted from the
    variant, and the score is the difference to the wild type, so variants may have insertions and deletions. The last
    three need a forward pass for each variant."""
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
    def reads_whole(self) -> bool:
        """Whether a score depends on all residues of a variant, which may have insertions and deletions."""
        return self.head == "likelihood" and self.context == "sequence"

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
        data = self._divided(data)
        if data.indels == "keep" and not self.reads_whole:
            reason = "keep is for task.head likelihood with task.context sequence; set both, or remove data.indels"
            raise Clash("indels", reason)
        if data.tracks and self.reads_whole:
            reason = "have a value for each residue of the wild type, and task.context sequence reads other lengths too"
            raise Clash("tracks", f"{reason}; remove them, or set task.context: variant")
        if data.indels is None and self.reads_whole:
            data = data.model_copy(update={"indels": "keep"})
        if data.structure is not None and self.head not in ("gp", "auto"):
            raise Clash("structure", f"is read by task.head gp, and the recipe has {self.head}; remove it")
        for key in ("table", "wild_type"):
            if getattr(data, key) is None:
                raise Clash(key, "this key is required")
        for key in ("train", "valid", "test", "clusters"):
            if getattr(data, key) is not None and (key != "clusters" or data.split != "protein"):
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

    def _divided(self, data: DataSettings) -> DataSettings:
        """Return the data section with the default split for several proteins. Raises `Clash` if a key is for one
        protein, or only for several.
        """
        if data.protein is not None:
            if self.head != "network":
                reason = f"is for task.head network, and {self.head} learns one protein; choose network, or remove it"
                raise Clash("protein", reason)
            others = {"tracks": data.tracks, "align": data.align, "train_max": data.train_max}
            if data.long == "window":
                raise Clash("long", "window is for one protein, and data.protein names several; choose full")
            for key in (key for key, value in others.items() if value is not None):
                raise Clash(key, "is for variants of one protein, and data.protein names several; remove it")
            if data.split not in (None, "protein", "random", "given"):
                reason = f"{data.split} is for one protein; choose protein, random or given, or name a column in folds"
                raise Clash("split", reason)
            return data.model_copy(update={"split": data.split or "protein"})
        if data.split == "protein":
            raise Clash("split", "protein divides several proteins; name their column in data.protein")
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


class VariantTask(Task):
    """Predicts measured values of variants. Outputs: T standardised numbers, one for each target [T].

    Facts: `targets` (names), `lower_is_better` (names of targets), `scales` (arguments of `Scale`), `linker` (the
    number of tokens between two chains) and `protein` (the residues of the wild type). `breaks`, `first` and `length`
    describe the part of the protein that the model reads (see `WildType`), and `tracks`, if any, belong to this part.
    For several proteins, `proteins` has their sequences by name instead, with `:` between chains. `offset` is the
    number that was added to the positions of the table. `line` has the slope and the intercept that convert a score of
    the head `likelihood` to a standardised number. `fitted` has the numbers of training variants, and of their changes,
    that the head `gp` stores; the output of this head is described there. `places` has the coordinates of the residues
    that the model reads, or null for unknown ones.
    """

    Settings = VariantSettings
    settings: VariantSettings
    baseline_records = 10_000
    of_base = (FROZEN,)

    def __init__(self, settings: VariantSettings, facts: Facts) -> None:
        super().__init__(settings, facts)
        self._sign_T = np.ones(1, dtype=np.float32)
        if facts:
            first, linker = facts.get("first", 0), facts["linker"]
            if "proteins" in facts:
                self.wild_types = {name: wild_type_of(text) for name, text in facts["proteins"].items()}
            else:
                part = facts["protein"][first : first + facts["length"]]
                self.wild_types = {"": WildType(part, tuple(facts["breaks"]), first)}
            self.tokens: dict[str, npt.NDArray[np.uint8]] = {
                name: encode(each.mutated(()), linker) for name, each in self.wild_types.items()
            }
            self._number = {name: n for n, name in enumerate(self.tokens)}
            self._scales = [Scale(**scale) for scale in facts["scales"]]
            lower = set(facts["lower_is_better"])
            self.tracks = {
                name: np.array(track["values"], dtype=track["dtype"]) for name, track in facts.get("tracks", {}).items()
            }
            self._sign_T = np.array([-1 if name in lower else 1 for name in facts["targets"]], dtype=np.float32)

    @property
    def columns(self) -> tuple[str, ...]:
        return metrics.number_columns(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.facts.get("targets", ()))

    @property
    def several(self) -> bool:
        """Whether the variants are of several proteins. Metrics are then means over proteins."""
        return "proteins" in self.facts

    @property
    def averages_units(self) -> bool:
        return self.several

    @property
    def reads_whole(self) -> bool:
        """See `VariantSettings.reads_whole`."""
        return self.settings.reads_whole

    def protein(self, example: Example) -> str:
        """Return the name of a variant's protein."""
        return example.id.rpartition("/")[0] if self.several else ""

    def wild_type(self, example: Example) -> npt.NDArray[np.uint8]:
        """Return the tokens of a variant's wild type, `<cls> ... <eos>`."""
        return self.tokens[self.protein(example)]

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
            "offset": labels.offset,
            "linker": labels.records.linker,
        }
        if labels.several:
            facts["proteins"] = {name: each.mutated(()) for name, each in labels.wild_types.items()}
        else:
            part = labels.records.wild_types[""]
            facts |= {"protein": labels.wild_types[""].residues, "first": part.first, "length": len(part.residues)}
            facts["breaks"] = list(part.breaks)
        if tracks := train.get(0).tracks:  # all variants have the same tracks
            facts["tracks"] = {name: _as_json(values) for name, values in tracks.items()}
        if self.settings.head == "gp":
            wild_type = encode(part.mutated(()), labels.records.linker)
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
            visible = corruption_of(config) if s.reads_whole else None
            if s.reads_whole and visible is None:
                raise UsageError(
                    "task.context: sequence needs a model that was trained to predict visible residues too, as ESM-2; "
                    "choose another model, or task.context=variant, which reads substitutions"
                )
            return LikelihoodHead(float(self._sign_T[0]), visible)
        if s.head == "gp":
            sizes, differences = self.facts["fitted"], s.pool == "sites"
            sign, zero_shot = float(self._sign_T[0]), s.zero_shot
            places = self.facts.get("places")
            return GaussianProcessHead(
                config.dim, sizes, sign, differences=differences, zero_shot=zero_shot, places=places
            )
        return VariantHead(config.dim, s.hidden, self._sign_T, s.pool, s.dropout, zero_shot=s.zero_shot)

    def inputs(self, example: Example) -> Inputs:
        """Return the variant and the wild type as input. The target [2, T] has standardised and measured values. For
        several proteins, it has a third row with the number of the protein.
        """
        y_T = example.labels["target"].astype(np.float64)
        scaled = [scale.to(y) for scale, y in zip(self._scales, y_T, strict=True)]
        rows = [scaled, y_T]
        if self.several:
            rows.append(np.full_like(y_T, self._number[self.protein(example)]))
        return self._with_wild_type(example, np.array(rows, dtype=np.float32))

    def question(self, example: Example) -> Inputs:
        length = len(self.wild_type(example))
        if len(example.tokens) != length and not self.reads_whole:
            raise InputError(
                f"record {shown(example.id)} has {len(example.tokens) - 2:,} residues, but the wild type of the model "
                f"has {length - 2:,}; give variants that differ from the wild type only by substitutions"
            )
        return self._with_wild_type(example, np.empty(0, np.float32))

    def _with_wild_type(self, example: Example, target: npt.NDArray[np.float32]) -> Inputs:
        s = self.settings
        return Inputs(
            example.tokens,
            target,
            wild_type=self.wild_type(example) if s.zero_shot or s.pool != "mean" else None,
            logits_from=s.context if s.zero_shot else None,
            wild_type_alone=s.wild_type_alone,
            tracks=example.tracks or self.tracks,
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
        return LossSum((ordinal_loss(output, target) * known).sum(), known.sum())

    def score(self, output: npt.NDArray[np.float32], target: npt.NDArray[np.float32]) -> Row:
        row: Row = metrics.number_row(self.predict(output), target[1], self.names)
        if self.several:
            return {**row, "protein": target[2, :1]}
        if self.settings.head == "likelihood":
            return {**row, "score": float(output[0])}
        return (
            {**row, metrics.PREDICTIVE: float(self.with_deviations(output)[2])}
            if len(output) > len(self.names)
            else row
        )

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        if not self.several:
            return metrics.number_summary(rows, self.names)
        of_protein = defaultdict[int, list[Row]](list)
        for row in rows:
            of_protein[int(np.asarray(row["protein"])[0])].append(row)
        each = [metrics.number_summary(part, self.names) for part in of_protein.values()]
        return metrics.means(each, list(each[0]))

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
        return variant_baselines.fit(self, train, base, only)

    def baseline_outputs(
        self, examples: Sequence[Example], known: Mapping[str, npt.NDArray[Any]], base: FineTuner | None
    ) -> Outputs:
        return variant_baselines.outputs(self, examples, known, base, self._sign_T)

    def units(self, data: Examples) -> tuple[npt.NDArray[np.int64] | None, str]:
        """Return the unit of each variant for the bootstrap: its protein if there are several, otherwise its sites or
        the variant (see `metrics.variant_units`).
        """
        if self.several:
            return data.blocks(), "protein"
        return metrics.variant_units([parse_variant(data.id(n)) for n in range(len(data))])

    def look_ahead(self, train: Sequence[Example], mine: Sequence[int], base: FineTuner) -> None:
        if mine:
            variant_baselines.frozen(self, [train[n] for n in mine], base)

    @torch.no_grad()
    def probe(self, head: nn.Module, train: Sequence[Example], base: FineTuner, seed: int) -> None:
        """Fit the head `gp`, or a linear head by ridge regression to its inputs and the zero-shot score."""
        inputs = [record for example in train if not np.isnan((record := self.inputs(example)).target[0]).all()]
        each, described = max(1, PACKED // max(map(len, self.tokens.values()))), list[Any]()
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


def _as_json(values: npt.NDArray[Any]) -> dict[str, Any]:
    """Convert the values of a track to JSON, with null for NaN. NumPy converts null to NaN when the JSON is read."""
    nullable = values.astype(object)
    if values.dtype.kind == "f":
        nullable[np.isnan(values)] = None
    return {"dtype": str(values.dtype), "values": nullable.tolist()}
