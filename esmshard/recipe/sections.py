"""The sections of a recipe, with types and a description of every key. This module does not import torch.

The settings of a task are in the module of the task, in `esmshard/tasks/` or in another package. These modules import
torch, so `esmshard.tasks.registry` imports them only when a recipe is read.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    field_validator,
)
from pydantic_core import CoreSchema, core_schema

from esmshard.tasks import registry
from esmshard.vocab import LONGEST_LINKER, WIDEST_GAP, Chains


class Settings(BaseModel):
    """The base class of all recipe sections. Values cannot be changed. Unknown keys and wrong types are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def as_list(value: Any) -> Any:
    """Return a tuple for a single name, and any other value unchanged."""
    return (value,) if isinstance(value, str) else value


def each_once(names: Any) -> Any:
    """Return a list of names unchanged. Raises `ValueError` if a name occurs twice."""
    if len(set(names)) < len(names):
        raise ValueError(f"has a name twice ({', '.join(names)}); write each once")
    return names


Names = Annotated[tuple[str, ...], BeforeValidator(as_list, json_schema_input_type=str | list[str])]
"""The type of a recipe key that accepts a list of names, or a single name."""


class Clash(ValueError):
    """The error for a recipe key that is missing, or that contradicts another key or section."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key, self.reason = key, reason


def listed(names: Sequence[str]) -> str:
    """Return names as part of a sentence: `a`, `a and b`, or `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


OPTIONAL = (
    *("labels", "target", "sequence_column", "id_column", "mask"),
    *("table", "wild_type", "mutant", "offset", "unusable", "replicates", "transform", "lower_is_better"),
    *("split", "train_max", "train_share", "protein", "indels"),
)
"""The keys of the section `data` that only some tasks read. `TaskSettings.data_keys` has those of a task."""

INSIDE = "inside"
"""The value of a key of `data.tracks`, instead of a path, if the track is in the same files as the sequences."""
EVERY = "all"
"""The value of `data.complexes` that makes one record from all chains of a structure file."""


class JoinSettings(Settings):
    """How the chains of a record `A:B` become one sequence for the model (docs/chains.md). By default, they
    are joined as in the fine-tuning of the model. For a model without fine-tuning, the default is 25 glycines, no gap.
    """

    linker: Annotated[int, Field(ge=1, le=LONGEST_LINKER)] | Literal["break"] | None = None
    """The number of glycines between two chains, or `break` for the single chain-break token of ESM-C and ESM3."""
    gap: int | None = Field(None, ge=0, le=WIDEST_GAP)
    """The number to add to the positions of all residues after each linker. For models with rotary positions only."""

    def over(self, usual: Chains) -> Chains:
        """Return the way to join chains: the keys that are set, and the values of `usual` for the other keys."""
        return Chains(usual.linker if self.linker is None else self.linker, usual.gap if self.gap is None else self.gap)


class DataSettings(Settings):
    """The training, validation and test records: FASTA files, token stores, or tables with sequences and labels
    (docs/labels.md). Task `contact` reads directories of PDB or mmCIF files (docs/structures.md), or FASTA files or
    token stores with coordinates in `.npz` files (data/README.md). Task `variant` reads `table` and `wild_type`.
    """

    train: str | None = None
    """The training records: a path, or `sample:contact/train`. `train`, `valid` and `test` may name the same file. Then
    `SET=` in the FASTA headers, or the column `set` of the table or labels, divides the file (docs/labels.md)."""
    valid: str | None = None
    """The validation records, on which the model is tested during training. By default, the same file as `train`."""
    test: str | None = None
    """The test records, on which the model is tested once after training. By default, the same file as `train`."""
    table: str | Annotated[tuple[str, ...], Field(min_length=1, strict=False)] | None = None
    """For task `variant`: a table of measured variants, as CSV, TSV or Parquet (docs/variants.md). A list of tables, in
    the order of their measurement, is read as one table."""
    protein: str | None = None
    """For a table of several proteins: the column of `table` with the name of each row's protein. `wild_type` has a
    record with this name for each protein. Only head `network` learns several proteins."""
    align: Literal["shift", "none"] | None = None
    """For a list of tables: how to align their values. `shift`, the default, shifts each later table by the median
    difference of the variants that earlier tables contain too, such as the wild type. With `transform` log, the values
    are multiplied by the median ratio. `none` uses the values as they are."""
    wild_type: str | None = None
    """For task `variant`: the FASTA file with the wild type of the protein in `table`, or ProteinGym's reference file
    (`DMS_id`, `target_seq`). By default, the columns `mutant` and `mutated_sequence` of `table` tell the wild type."""
    structure: str | None = None
    """For task `variant` with head `gp`: a PDB or mmCIF file of the wild type. Effects of mutations at near residues
    are then expected to be similar."""
    mutant: str | None = None
    """The column of `table` with the mutations. By default, a column with a usual name, such as `mutant`."""
    offset: Annotated[int, Field(ge=-(10**6), le=10**6)] | Literal["auto"] | None = None
    """The number to add to the positions in `table`. `auto`, the default, chooses the number with which the positions
    fit the wild type. In a table of several proteins, positions are not shifted by default."""
    indels: Literal["keep", "drop"] | None = None
    """What to do with rows of `table` whose variants have insertions or deletions. `keep`, the default for head
    `likelihood` with `task.context: sequence`, is only for this head. Otherwise these rows are unusable."""
    unusable: Literal["drop", "error"] | None = None
    """What to do with unusable rows of `table`: rows without a substitution, with a stop codon, with a synonymous
    change, or with a residue that the wild type does not have. `drop`, the default, leaves these rows out and reports
    them. Even then, the run stops if over a tenth of the rows have no valid mutation, or if over a tenth do not fit the
    wild type."""
    replicates: Literal["mean", "keep", "error"] | None = None
    """What to do with several rows of `table` for the same variant. `mean`, the default, averages the measured values.
    `keep` uses all rows, and `error` stops the run."""
    transform: Literal["none", "log", "rank"] | None = None
    """How to transform the measured values before training; `none` is the default. Use `log` for ratios and affinities,
    and `rank` for skewed distributions. Predictions are converted back to the unit of the table."""
    lower_is_better: Names | None = Field(None, strict=False)
    """The targets for which lower values are better, such as a dissociation constant. The ranking and the zero-shot
    scores are reversed for these targets."""
    split: Literal["position", "contiguous", "modulo", "random", "mutations", "given", "protein"] | None = None
    """How to divide variants into folds. `position`, the default, keeps all variants of a position in the same fold, so
    that test positions never occur in training. `protein`, the default for several proteins, keeps all variants of
    similar proteins (or of a cluster in `clusters`) in the same fold. `contiguous` and `modulo` are the methods of
    ProteinGym. `random` gives scores that are too high. `mutations` makes no folds: it trains on variants with up
    to `train_max` mutations, and tests on variants with more mutations. `given` uses the column `set` (or `split`)
    of the table."""
    train_max: int | None = Field(None, ge=1, le=10**6)
    """For split `mutations`: the maximum number of mutations in a training variant; 1 by default."""
    train_share: float | None = Field(None, gt=0, le=1)
    """The share of training variants to use (0 to 1), for learning curves; 1 by default. A larger share contains all
    variants of a smaller share."""
    labels: str | None = None
    """One file with the labels for training, validation and test: a table, a label FASTA, or an `.npz` file
    (docs/labels.md). By default, the labels are in the table of sequences, in FASTA headers, or in `.npz` files."""
    target: Names | None = Field(None, strict=False)
    """The names of the labels: columns of a table, keys in FASTA headers, or the array in an `.npz` file."""
    sequence_column: str | None = None
    """The column with the sequences, if `train` is a table. By default, a column with a usual name (docs/ingest.md)."""
    id_column: str | None = None
    """The column with the record ids in the table `labels`, or in the table `train` if `labels` is not set. By default,
    a column with a usual name, such as `id`."""
    mask: str | None = None
    """For task `residue`: a FASTA file with 0 or 1 for each residue. Labels of residues with 0 are ignored."""
    complexes: str | None = None
    """Which chains of a structure file become one record (docs/structures.md). By default, each chain is a record. With
    `all`, the protein chains of a file are one record, in the order of the file. Any other value is the path of a text
    file with a record on each line: `1abc_A:B` means chain A followed by chain B of the file `1abc.cif`."""
    join: JoinSettings = JoinSettings()  # type: ignore[call-arg]  # see Recipe
    tracks: dict[str, str] | None = None
    """Tracks are inputs for each residue that some models, such as ESM3, read in addition to the amino acid
    (docs/tracks.md). Write the name and the path of each track, such as {3di: letters.fasta}. If the data are
    structures, write {coordinates: inside}."""
    folds: Annotated[int, Field(ge=3, le=10**4)] | Annotated[str, Field(min_length=1)] | None = None
    """For cross-validation: the number of parts into which `train`, or `table`, is divided. One part is the test set.
    For a table, or if `valid` names the same file as `train`, the next part is the validation set. The option `--folds`
    sets this key and `fold` for each run. To train a single run, set both keys yourself. For task `variant`, `folds`
    may also be a column of `table` with the part of each row, such as `fold_random_5` of ProteinGym."""
    fold: int | None = Field(None, ge=0)
    """Which part is the test set, from 0 to `folds` - 1. With a column of parts, the default is a run for each part."""
    clusters: str | None = None
    """The `_cluster.tsv` file of MMseqs2 for the training records. All records of a cluster are then in the same part
    of `folds`. By default, only equal sequences are kept in the same part. For split `protein` of task `variant`: the
    clusters of the proteins."""
    long: Literal["crop", "window", "full", "skip", "error"] = "crop"
    """What to do with a training record of more than `max_length` residues. `crop` uses a new random window of the
    protein in each epoch. `window` divides the record into as few windows as possible, and uses each as an example.
    `full` uses the complete record. `skip` leaves such records out and reports their number. `error` stops the run.
    Validation, test and prediction always use complete chains. Tasks `sequence`, `pair` and `variant` have the default
    `full`. For them `crop` is an error, because it may cut off the cause of the label."""
    max_length: int = Field(1022, ge=8, le=10**6)
    """The maximum number of residues in a training record. The key `long` says what to do with longer records."""

    @property
    def tables(self) -> tuple[str, ...]:
        """The paths in `table`."""
        return (self.table,) if isinstance(self.table, str) else self.table or ()

    @field_validator("fold")
    @classmethod
    def _of_folds(cls, fold: int | None, info: ValidationInfo) -> int | None:
        if "folds" not in info.data or isinstance(info.data["folds"], str):  # refused, or the table has the number
            return fold
        folds = info.data["folds"]
        if fold and folds is None:
            raise ValueError("needs data.folds, which the recipe does not have; add data.folds, or remove data.fold")
        if folds is not None and fold is not None and fold >= folds:
            raise ValueError(f"is {fold}, but data.folds is {folds}; set data.fold from 0 to {folds - 1}")
        return fold


class TaskSettings(Settings):
    """The base class of the task sections of a recipe. The class variables describe the task."""

    name: str

    data_keys: ClassVar[tuple[str, ...]] = ()
    """The data keys in `OPTIONAL` that this task reads. A recipe with this task may not set the others."""
    may_crop: ClassVar[bool] = False
    """Whether the label of a protein is also correct for a random part of the protein. If not, `data.long` may not be
    `crop`, and is `full` by default."""
    instead_of_crop: ClassVar[str] = "full or skip"
    """The values of `data.long` that the error about `crop` recommends."""
    reads_table: ClassVar[bool] = False
    """Whether the data are one table of measured variants (`data.table`). Only for subclasses of `VariantSettings`."""
    trains_lm_head: ClassVar[bool] = False
    """Whether the task trains the LM head (the output layer of the language model) and has no head of another kind."""
    pairs: ClassVar[bool] = False
    """Whether a record has two chains `A:B`, which the model reads as two sequences."""
    predicts_contacts: ClassVar[bool] = False
    """Whether predictions are maps of contact probabilities. A report then shows predicted and true contacts."""

    @property
    def wild_type_alone(self) -> bool:
        """Whether the model reads only the wild type, once for all variants of a table."""
        return False

    @property
    def whole_steps(self) -> bool:
        """Whether the loss compares the records of a step with each other, so that each step is one micro-batch."""
        return False

    @property
    def only_probe(self) -> bool:
        """Whether `adapt.method` must be `probe`, which is then also the default."""
        return False

    @property
    def starts_useful(self) -> bool:
        """Whether the model has useful predictions before the first step, so that the best model may be the start."""
        return False

    def no_probe(self) -> str | None:
        """Return why `adapt.method: probe` is impossible with these settings, or None if it is possible."""
        return f"probe is not offered by task {self.name}; choose full, lora or head"

    def suit(self, data: DataSettings) -> DataSettings:
        """Return the data section with the defaults of this task. Raises `Clash` if a key is missing or not allowed."""
        if data.train is None:
            raise Clash("train", "this key is required")
        return data.model_copy(update={key: data.train for key in ("valid", "test") if getattr(data, key) is None})

    def head_bytes(self, tokens: int, n_logits: int, dim: int) -> int:
        """Estimate the bytes of memory that the head needs for the backward pass of one record, in fp32.

        Args:
            tokens: the number of tokens in the record.
            n_logits: the number of logits that the language model returns for each token.
            dim: the width of the language model.
        """
        return 0


def suiting(data: DataSettings, task: TaskSettings) -> DataSettings:
    """Return the data section with the defaults of a task. Raises `Clash` if a key is missing or not for this task."""
    for key in OPTIONAL:
        if getattr(data, key) is not None and key not in task.data_keys:
            owners = [name for name, settings in sections().items() if key in settings.data_keys]
            raise Clash(key, f"is for task {listed(owners)}, but the recipe has task {task.name}; remove this key")
    if not task.may_crop and data.long == "crop":
        if "long" in data.model_fields_set:
            reason = f"crop may cut off the cause of a protein's label; choose {task.instead_of_crop}"
            raise Clash("long", reason)
        data = data.model_copy(update={"long": "full"})
    if task.reads_table and data.wild_type is None:
        data = data.model_copy(update={"wild_type": next(iter(data.tables), None)})
    if data.align is not None and len(data.tables) < 2:
        raise Clash("align", "is for a list of tables in data.table; remove it, or write data.table=[a.csv, b.csv]")
    if len(data.tables) > 1 and data.align is None:
        data = data.model_copy(update={"align": "shift"})
    if isinstance(data.folds, str):
        if not task.reads_table:
            raise Clash("folds", f"{data.folds} is no number, and only data.table has columns of folds; write a number")
        if data.split is not None:
            reason = f"{data.split} divides the table, but so does the column {data.folds} of data.folds"
            raise Clash("split", f"{reason}; remove one of them")
        return task.suit(data).model_copy(update={"split": None})
    data = task.suit(data)
    if isinstance(data.folds, int) and data.fold is None:
        raise Clash(
            "folds",
            f"makes {data.folds} parts, but data.fold does not say which part is the test set; set data.fold from 0 to "
            f"{data.folds - 1} for one run; or remove data.folds, and pass --folds {data.folds} for {data.folds} runs",
        )
    return data


def sections() -> Mapping[str, type[TaskSettings]]:
    """Return the name and the settings class of each registered task that can be used."""
    return registry.registered().settings


class _AnyRegistered:
    """Tells pydantic to choose the settings class of a task section by the key `name`, from all registered tasks."""

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        every = tuple(sections().values())
        choice = handler.generate_schema(Annotated[Union[every], Field(discriminator="name")])  # noqa: UP007
        return core_schema.no_info_before_validator_function(_usable, choice)


def _usable(section: Any) -> Any:
    """Return a task section unchanged. Raises `Clash` if its task is in another package that cannot be imported."""
    name = section.get("name") if isinstance(section, dict) else None
    if isinstance(name, str) and name in registry.registered().unusable:
        raise Clash("name", registry.registered().unusable[name])
    return section


AnyTask = Annotated[TaskSettings, _AnyRegistered()]
"""The type of a task section: the settings of any registered task."""


MOST_STEPS, MOST_TOKENS, MOST_PROCESSES, MOST_SECONDS = 10**8, 10**9, 10**6, 10**8
"""Limits far above the numbers of a real run. A number with a few digits too many is then an error."""


class ModelSettings(Settings):
    """The language model that is fine-tuned."""

    name: str
    """The name or path of the model. Names are `starter` or `demo` (small models in this package, not ESM-2), a
    released name (`esm2_t6_8M_UR50D` ... `esm2_t48_15B_UR50D`), or OWNER/NAME for a repository of the Hugging Face hub.
    A path is a fair-esm `.pt` file, or a model directory in the layout of `transformers`. With `init: random`, the name
    only defines the architecture, and may also be `mini`."""
    quantize: Literal["nf4", "int8"] | None = None
    """The format of the frozen matrices in the memory of an NVIDIA GPU, with the library bitsandbytes: 4 bits for each
    number (`nf4`, QLoRA, Dettmers et al. 2023, arXiv:2305.14314) or 8 bits (`int8`). The default is 32 bits. For
    `adapt.method` lora, head and probe. The consolidated model contains the original weights."""


LoraTarget = Literal["q", "k", "v", "out", "fc1", "fc2"]
"""The linear layers in a transformer layer: query, key, value and output of attention, and both feed-forward layers."""
Targets = Annotated[
    tuple[LoraTarget, ...],
    BeforeValidator(as_list, json_schema_input_type=LoraTarget | list[LoraTarget]),
    AfterValidator(each_once),
]
Tracker = Literal["tensorboard", "wandb"]
Trackers = Annotated[
    tuple[Tracker, ...],
    BeforeValidator(as_list, json_schema_input_type=Tracker | list[Tracker]),
    AfterValidator(each_once),
]
_LORA = {"rank": 4, "alpha": 1.0, "targets": ("q", "k", "v", "out", "fc1", "fc2"), "bias": "all"}


class AdaptSettings(Settings):
    """Which weights of the language model are trained (docs/adapt.md). The head is always trained. The defaults for
    `lora` come from Schmirler et al. 2024 (doi:10.1038/s41467-024-51844-2), who used `optim.lr` 3e-4.
    """

    method: Literal["full", "lora", "head", "probe"] = "full"
    """`full` trains every weight. `lora` trains low-rank matrices that are added to the frozen matrices of each layer
    (Hu et al. 2021, arXiv:2106.09685). `head` trains only the head. `probe` fits a linear head with scikit-learn on the
    frozen model, without optimizer steps."""
    freeze: Names = Field((), strict=False)
    """For method `full`: parts of the language model that are not trained, such as [embedding, layers.0-10]. Parts are
    `embedding`, `norms`, `biases`, layers counted from 0, `layers.all-but-1` (all layers but the last one; any other
    number of last layers too), and `tracks` (ESM3: geometric attention and the embedding of structure tokens)."""
    rank: int | None = Field(None, ge=1, le=1024, validate_default=True)
    """For method `lora`: the rank of the LoRA matrices; 4 by default."""
    alpha: float | None = Field(None, gt=0, le=1e6, validate_default=True)
    """For method `lora`: the product of the LoRA matrices is multiplied by alpha / rank. The default is 1."""
    targets: Targets | None = Field(None, strict=False, validate_default=True)
    """For method `lora`: the linear layers that get LoRA matrices: q, k, v, out, fc1, fc2; by default all six.
    `transformers` calls out, fc1 and fc2 `dense`."""
    bias: Literal["none", "all"] | None = Field(None, validate_default=True)
    """For method `lora`: `all`, the default, also trains every bias of the language model; `none` trains no bias."""

    @field_validator("freeze")
    @classmethod
    def _parts(cls, freeze: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        method = info.data.get("method")
        if freeze and method not in ("full", None):
            raise ValueError(
                f"is for adapt.method full, but the recipe has {method}; remove it, or set adapt.method: full"
            )
        for part in freeze:
            layers = re.fullmatch(r"layers\.([0-9]{1,4})(?:-([0-9]{1,4}))?", part)
            if layers is None and re.fullmatch(r"layers\.all-but-[1-9][0-9]{0,3}", part):
                continue
            if layers is None and part not in ("embedding", "norms", "biases", "tracks"):
                raise ValueError(
                    f"'{part}' is no part of the model; name embedding, norms, biases, tracks, or layers, such as "
                    "layers.0-10"
                )
            if layers is not None and layers[2] is not None and int(layers[2]) < int(layers[1]):
                raise ValueError(f"'{part}' ends before it begins; write layers.{layers[2]}-{layers[1]}")
        return freeze

    @property
    def lora(self) -> tuple[int, float, tuple[LoraTarget, ...]]:
        """The values of `rank`, `alpha` and `targets`. Only for method `lora`."""
        assert self.rank is not None
        assert self.alpha is not None
        assert self.targets is not None
        return self.rank, self.alpha, self.targets

    @field_validator(*_LORA, mode="before")
    @classmethod
    def _of_lora(cls, value: Any, info: ValidationInfo) -> Any:
        method = info.data.get("method")
        if info.field_name == "targets" and value in ([], ()):
            raise ValueError("has no layer; name a layer, or set adapt.method: head")
        if method == "lora":
            return _LORA[str(info.field_name)] if value is None else value
        if value is not None and method is not None:
            raise ValueError(
                f"is for adapt.method lora, but the recipe has {method}; remove it, or set adapt.method: lora"
            )
        return value


class BatchSettings(Settings):
    """The size of an optimizer step, and how many tokens a process computes at once."""

    global_tokens: int = Field(16384, ge=3, le=MOST_TOKENS)
    """The maximum number of tokens in one optimizer step, over all processes together. Nearly every step has about this
    number of tokens. The records of a step do not depend on the number of processes."""
    sequences: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """The number of records in one optimizer step. Set this key or `global_tokens`, not both. With this key,
    `global_tokens` becomes this number times the number of tokens in the longest training record."""
    tokens_per_rank: Annotated[int, Field(ge=3, le=MOST_TOKENS)] | Literal["auto"] = "auto"
    """The maximum number of tokens that one process computes at once. A process divides a larger share of a step into
    micro-batches, and adds their gradients. `auto` chooses a number of tokens that fits into the free memory."""

    @field_validator("sequences")
    @classmethod
    def _or_tokens(cls, sequences: int | None, info: ValidationInfo) -> int | None:
        default = cls.model_fields["global_tokens"].default
        if sequences is not None and info.data.get("global_tokens", default) != default:
            raise ValueError(
                f"and batch.global_tokens={info.data['global_tokens']} are two sizes of a step; remove one of them"
            )
        return sequences


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimSettings(Settings):
    """The settings of the optimizer AdamW and the learning rate."""

    lr: float = Field(2.0e-5, gt=0, le=10)
    """The highest learning rate of the language model, after the warm-up."""
    head_lr: float = Field(2.0e-4, gt=0, le=10)
    """The highest learning rate of the head, after the warm-up."""
    betas: tuple[Decay, Decay] = Field((0.9, 0.98), strict=False)
    """The decay rates of AdamW for the means of gradient and squared gradient. ESM-2 was trained with the default."""
    weight_decay: float = Field(0.01, ge=0, le=100)
    """The decoupled weight decay of AdamW. Biases, LayerNorms and embeddings have no weight decay."""
    warmup: float = Field(0.05, ge=0, le=1)
    """The share of all steps in which the learning rate rises from 0 to its peak."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up. `cosine` and `linear` would reach 0 one step after the last
    step, so the last step still changes the weights. With `constant` the rate does not fall."""
    clip: float = Field(1.0, gt=0, le=10**9)
    """The maximum norm of the gradient over all trained weights. A larger gradient is scaled down to this norm."""


class TrainSettings(Settings):
    """How long the run trains, with which seed, and how often it is validated."""

    steps: int | None = Field(None, ge=1, le=MOST_STEPS)
    """The number of optimizer steps. The default is 400, unless `epochs` is set."""
    epochs: float | None = Field(None, gt=0, le=1e6)
    """The number of passes over the training records. A recipe sets this key or `steps`, not both."""

    @field_validator("epochs")
    @classmethod
    def _or_steps(cls, epochs: float | None, info: ValidationInfo) -> float | None:
        steps = info.data.get("steps")
        if epochs is not None and steps is not None:
            raise ValueError(f"and train.steps={steps} are two lengths of the run; remove one of them")
        return epochs

    seed: int = Field(0, ge=0, lt=2**32)
    """The random seed for new weights, the order of records, crops and all other random choices in training."""
    eval_every: Annotated[int, Field(ge=1, le=MOST_STEPS)] | Literal["epoch"] = 50
    """The number of optimizer steps between two validations, or `epoch` for a validation after each epoch."""
    early_stop: int | None = Field(None, ge=1, le=MOST_STEPS)
    """The run stops if this number of validations in a row do not improve the headline metric. The result is the model
    of the best validation. By default, the run never stops early."""


class ParallelSettings(Settings):
    """How to divide the work over processes (docs/sharding.md). These keys change speed, memory and rounding errors."""

    strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"] = "full_shard"
    """How to divide weights over processes. `full_shard` gathers the weights of a layer before each use, and frees them
    after it (ZeRO 3). `shard_grad_op` keeps gathered weights from the forward to the backward pass (ZeRO 2): less
    traffic, more memory. `hybrid_shard` keeps a copy in each group of processes, divided over the group. `no_shard`
    keeps a copy in every process (DDP)."""
    group_size: int | None = Field(None, ge=2, le=MOST_PROCESSES)
    """For strategy `hybrid_shard`: the number of processes that divide one copy of the weights. The default is all
    processes of a machine."""
    tensor: int = Field(1, ge=1, le=MOST_PROCESSES)
    """The number N of neighbouring processes on a machine that compute each layer together (tensor parallelism). Each
    process computes 1/N of the attention heads and feed-forward columns, for the same records, and stores 1/N of the
    layers' weights and activations. The key `strategy` says how to divide this 1/N over the other processes."""
    context: int = Field(1, ge=1, le=MOST_PROCESSES)
    """The number of neighbouring processes on a machine that divide the tokens of each micro-batch (context
    parallelism), for proteins that are too long for one GPU. This key does not divide the weights."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """The precision of the arithmetic. Weights, optimizer state and gradient sums are always fp32. `auto` means bf16 on
    NVIDIA GPUs from compute capability 8.0 on, fp16 with a loss scale from 7.0 on, and fp32 otherwise."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """The precision for the sum of gradients over processes. bf16 halves the traffic, but loses digits."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Which activations stay in memory for the backward pass, while the others are computed again. `none` keeps all
    activations. `full` keeps only the input of each layer: a third more work, far less memory. `selective` also keeps
    the outputs of matrix products and attention: slightly more work than `none`, about two thirds of its memory."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory, and copy each layer to the GPU when it is used."""
    accumulate: Literal["sharded", "unsharded"] = "sharded"
    """When to sum gradients over processes. `sharded` sums them after each micro-batch. `unsharded` keeps all gradients
    in every process, and sums them once in each step: less traffic, more memory."""
    compile: bool = False
    """Compile the layers of the model, once for records of all lengths. This takes a minute at the start, and does not
    make training on a CPU faster (docs/devices.md)."""
    start_timeout: int = Field(1800, ge=1, le=MOST_SECONDS)
    """How many seconds a process waits for other processes while weights are read, and until the first step ends."""
    step_timeout: int = Field(600, ge=1, le=MOST_SECONDS)
    """How many seconds a process waits for another process in each step after the first. If this is not enough, the run
    stops with an error that names the other process."""


class CheckpointSettings(Settings):
    """The settings of checkpoints, from which a run can resume."""

    every: int = Field(100, ge=1, le=MOST_STEPS)
    """The number of optimizer steps between two checkpoints. A checkpoint is always written after the last step."""
    keep: int = Field(3, ge=1, le=MOST_STEPS)
    """How many of the newest checkpoints to keep. Older checkpoints are deleted."""
    keep_best: bool = False
    """Save a checkpoint after each validation that is the best so far. The result of the run is the best checkpoint."""
    async_save: Literal["auto"] | bool = "auto"
    """Write checkpoints in the background while training continues. This needs 12 bytes of CPU memory for each trained
    parameter, over all processes together. `auto` means true with GPUs, and false without."""


class Recipe(Settings):
    """A recipe: all settings of one fine-tuning run."""

    model_config = ConfigDict(defer_build=True)  # tasks of other packages are imported only when a recipe is read

    task: AnyTask
    """The task, its head and its options (docs/tasks.md)."""
    model: ModelSettings
    init: Literal["pretrained", "random"] = "pretrained"
    """The weights at the start. `pretrained` reads the weights of `model.name`. `random` draws random weights for the
    same architecture."""
    # The mypy plug-in is not worth a build dependency.
    adapt: AdaptSettings = Field(AdaptSettings(), validate_default=True)  # type: ignore[call-arg,call-overload]
    data: DataSettings
    batch: BatchSettings = BatchSettings()  # type: ignore[call-arg]
    optim: OptimSettings = OptimSettings()  # type: ignore[call-arg]
    train: TrainSettings = TrainSettings()  # type: ignore[call-arg]
    parallel: ParallelSettings = ParallelSettings()  # type: ignore[call-arg]
    checkpoint: CheckpointSettings = CheckpointSettings()  # type: ignore[call-arg]
    track: Trackers = Field((), strict=False)
    """The programs that get the metrics of the run: `tensorboard` (files in `out`/tensorboard) or `wandb` (Weights &
    Biases, with its environment variables). The metrics are always in metrics.jsonl, too. See docs/watching.md."""
    out: str
    """The directory of the run, relative to the working directory."""

    @field_validator("out")
    @classmethod
    def _no_device(cls, out: str) -> str:
        if re.match(r"/(dev(?!/shm/.)|proc|sys)(/|$)", out):
            raise ValueError(f"{out} belongs to the operating system; write out: runs/NAME, or another directory")
        return out

    @field_validator("adapt")
    @classmethod
    def _fits_task(cls, adapt: AdaptSettings, info: ValidationInfo) -> AdaptSettings:
        task, model = info.data.get("task"), info.data.get("model")
        if adapt.method == "full" and model is not None and model.quantize is not None:
            raise Clash(
                "method",
                f"full cannot train the weights that model.quantize={model.quantize} freezes; set adapt.method=lora "
                "or model.quantize=null",
            )
        if task is not None and task.only_probe and "method" not in adapt.model_fields_set:
            # No weight is trained, so no other key of the section is read.
            adapt = AdaptSettings.model_validate({"method": "probe"})
        if task is not None and task.only_probe and adapt.method != "probe":
            raise Clash(
                "method", f"{adapt.method} trains weights, and this head is fitted to frozen ones; choose probe"
            )
        if adapt.method == "probe" and task is not None and (reason := task.no_probe()):
            raise Clash("method", reason)
        return adapt

    @field_validator("parallel")
    @classmethod
    def _fits_quantization(cls, parallel: ParallelSettings, info: ValidationInfo) -> ParallelSettings:
        model = info.data.get("model")
        if parallel.compile and model is not None and model.quantize is not None:
            raise Clash("compile", "does not work with model.quantize; pass parallel.compile=false")
        return parallel

    @field_validator("data")
    @classmethod
    def _suits_task(cls, data: DataSettings, info: ValidationInfo) -> DataSettings:
        return suiting(data, info.data["task"]) if "task" in info.data else data

    @property
    def keeps_best(self) -> bool:
        """Whether the result of the run is the model of the best validation, and not the model after the last step."""
        return self.checkpoint.keep_best or self.train.early_stop is not None

    @property
    def divides_table(self) -> bool:
        """Whether `finetune` itself makes all runs on a table of variants. With `data.fold` the recipe is one run."""
        return self.task.reads_table and (self.data.folds is None or self.data.fold is None)
