"""The sections of a recipe: typed and frozen, with a description of every key. This module does not import torch.

`esmshard.recipe.recipe_file` reads recipes from files, and `esmshard recipes schema` prints all keys. The settings of a
task are in the module of the task, in `esmshard/tasks/` or in another package. These modules import torch, so
`esmshard.tasks.registry` imports them only when a recipe is read.
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
    """The base class of all sections of a recipe. Sections are frozen, refuse unknown keys, and convert no values."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def as_list(value: Any) -> Any:
    """Convert a single name to a tuple with this name. Return other values unchanged."""
    return (value,) if isinstance(value, str) else value


def each_once(names: Any) -> Any:
    """Return a list of names unchanged. Raise an error if a name occurs twice."""
    if len(set(names)) < len(names):
        raise ValueError(f"has a name twice ({', '.join(names)}); write each once")
    return names


Names = Annotated[tuple[str, ...], BeforeValidator(as_list, json_schema_input_type=str | list[str])]
"""The type of a key whose value is a list of names, or a single name."""


class Clash(ValueError):
    """The error that is raised if a key of a section is missing, or contradicts another key or section."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key, self.reason = key, reason


def listed(names: Sequence[str]) -> str:
    """Join names to a text for a sentence: `a`, `a and b`, or `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


OPTIONAL = (
    *("labels", "target", "sequence_column", "id_column", "mask"),
    *("table", "wild_type", "mutant", "offset", "unusable", "replicates", "transform", "lower_is_better"),
    *("split", "train_max", "train_share"),
)
"""The keys of the data section that only some tasks read. `TaskSettings.data_keys` names the keys that a task reads."""

INSIDE = "inside"
"""The value that a recipe has instead of the path of a track, if the track is in the same file as the sequences."""
EVERY = "all"
"""The value of the key `data.complexes` with which all chains of a structure file become one record."""


class JoinSettings(Settings):
    """How the chains of a record `A:B` become one sequence for the model (docs/chains.md). By default the chains are
    joined as in the model's training, or by a linker of 25 glycines without a gap.
    """

    linker: Annotated[int, Field(ge=1, le=LONGEST_LINKER)] | Literal["break"] | None = None
    """The number of glycines between two chains, or `break` for the single chain-break token of ESM-C and ESM3."""
    gap: int | None = Field(None, ge=0, le=WIDEST_GAP)
    """The number that is added to the positions of all residues after each linker. For models with rotary positions."""

    def over(self, usual: Chains) -> Chains:
        """Return how a model joins chains: the values of `usual`, replaced by the keys that this section sets."""
        return Chains(usual.linker if self.linker is None else self.linker, usual.gap if self.gap is None else self.gap)


class DataSettings(Settings):
    """The training, validation and test records: FASTA files, token stores, or tables with sequences and labels
    (docs/labels.md). Task `contact` takes directories of PDB or mmCIF files (docs/structures.md), or FASTA files or
    token stores with coordinates in `.npz` files (data/README.md). Task `variant` has `table` and `wild_type` instead.
    """

    train: str | None = None
    """The training records: a path, or `sample:contact/train`. If several splits name the same file, the file is
    divided by `SET=` in its headers, or by the column `set` of the table or of the labels (docs/labels.md)."""
    valid: str | None = None
    """The validation records, which are scored during training. By default these records are in the file of `train`."""
    test: str | None = None
    """The test records, which are scored once after training. By default these records are in the file of `train`."""
    table: str | None = None
    """A table of measured variants of one protein, as CSV, TSV or Parquet (docs/variants.md). This key and the
    following ones up to `train_share` are for task `variant`."""
    wild_type: str | None = None
    """The FASTA file with the wild type of the protein in `table`."""
    mutant: str | None = None
    """The column of `table` with the mutations. By default it is the column with a usual name, such as `mutant`."""
    offset: Annotated[int, Field(ge=-(10**6), le=10**6)] | Literal["auto"] | None = None
    """The number that is added to the positions in `table`. `auto`, the default, finds the number with which the
    positions fit the wild type."""
    unusable: Literal["drop", "error"] | None = None
    """How unusable rows of `table` are treated: rows without a substitution, with a stop codon, with a synonymous
    change, or with a residue that the wild type does not have. `drop`, the default, leaves these rows out and reports
    them. At most a tenth of the rows may be unreadable, and at most a tenth may not fit the wild type."""
    replicates: Literal["mean", "keep", "error"] | None = None
    """How several rows of `table` with the same variant are treated. `mean`, the default, averages the measured values.
    `keep` keeps all rows, and `error` refuses them."""
    transform: Literal["none", "log", "rank"] | None = None
    """How the measured values are transformed before training; `none` is the default. `log` suits ratios and
    affinities. `rank` suits skewed distributions. Predictions are converted back to the unit of the table."""
    lower_is_better: Names | None = Field(None, strict=False)
    """The targets for which lower values are better, such as a dissociation constant. Ranks and zero-shot scores of
    these targets are reversed."""
    split: Literal["position", "contiguous", "modulo", "random", "mutations", "given"] | None = None
    """How variants are divided into folds. `position`, the default, keeps the variants of one position together, so
    that test positions never occur in training. `contiguous` and `modulo` are the schemes of ProteinGym. `random`
    gives scores that are too high. `mutations` and `given` make one split of the table instead of folds. `mutations`
    trains on variants with up to `train_max` mutations, and tests on variants with more mutations. `given` follows the
    column `set` (or `split`) of the table."""
    train_max: int | None = Field(None, ge=1, le=10**6)
    """For split `mutations`, the maximum number of mutations in a training variant; 1 by default."""
    train_share: float | None = Field(None, gt=0, le=1)
    """The share of the training variants that is used, for learning curves; 1 by default. Every larger share also
    contains the variants of each smaller share."""
    labels: str | None = None
    """One file with the labels of all three splits: a table, a label FASTA, or an `.npz` file (docs/labels.md). By
    default the labels are in the table of the sequences, or in the headers or `.npz` files of the FASTA files."""
    target: Names | None = Field(None, strict=False)
    """The names of the labels: one or several columns of a table or keys of headers, or the array of an `.npz` file."""
    sequence_column: str | None = None
    """The column with the sequences, if `train` is a table. The default is a usual name, see docs/ingest.md."""
    id_column: str | None = None
    """The column with the ids of records, in the table `labels`, or else in the table `train`. The default is a usual
    name, such as `id`."""
    mask: str | None = None
    """For task `residue`, a FASTA file with 0 or 1 for each residue. The labels of residues with 0 are ignored."""
    complexes: str | None = None
    """Which chains of a structure file become one record (docs/structures.md). By default each chain is a record. With
    `all`, all protein chains of a file are one record, in the order of the file. The third choice is the path of a text
    file with a record on each line, such as `1abc_A:B` for chain A followed by chain B of the file `1abc.cif`."""
    join: JoinSettings = JoinSettings()  # type: ignore[call-arg]  # see Recipe
    tracks: dict[str, str] | None = None
    """Further inputs for each residue (tracks), which some model families, such as ESM3, read in addition to the amino
    acid (docs/tracks.md). For the name of each track, give a path, such as {3di: letters.fasta}. For coordinates give
    `inside` if the data are structures."""
    folds: int | None = Field(None, ge=3, le=10**4)
    """The number of parts into which `train`, or `table`, is divided for cross-validation. One part is the test set.
    For a table, or if `valid` names the same file as `train`, the next part is the validation set. The option `--folds`
    sets this key and `fold` for each run. To train one run without `--folds`, set both keys."""
    fold: int = Field(0, ge=0)
    """The number of the part that is the test set, counted from 0. This number must be lower than `folds`."""
    clusters: str | None = None
    """The `_cluster.tsv` file of MMseqs2 for the training records. The parts of `folds` then keep the records of a
    cluster together. By default the parts keep only equal sequences together."""
    long: Literal["crop", "window", "full", "skip", "error"] = "crop"
    """How a training record with more than `max_length` residues is treated. `crop` cuts a new random window of the
    protein in each epoch. `window` covers the record with as few windows as possible, each of which is an example.
    `full` uses the whole record. `skip` leaves the record out and reports how many. `error` stops the run. Validation,
    test and prediction always use whole chains. Tasks `sequence`, `pair` and `variant` have the default `full` and
    refuse `crop`, which may cut off the cause of the label."""
    max_length: int = Field(1022, ge=8, le=10**6)
    """The maximum number of residues of a training record. The key `long` says what happens to longer records."""

    @field_validator("fold")
    @classmethod
    def _of_folds(cls, fold: int, info: ValidationInfo) -> int:
        if "folds" not in info.data:  # the value of `folds` has been refused
            return fold
        folds = info.data["folds"]
        if fold and folds is None:
            raise ValueError("is one of data.folds, and the recipe has none; add data.folds, or remove it")
        if folds is not None and fold >= folds:
            raise ValueError(f"is counted from 0, so the last of {folds} folds is {folds - 1}, not {fold}")
        return fold


class TaskSettings(Settings):
    """The base class of the task sections of a recipe. The class variables say what the task needs from the program."""

    name: str

    data_keys: ClassVar[tuple[str, ...]] = ()
    """The keys of the data section in `OPTIONAL` that this task reads. A recipe of this task may not set any other key
    of `OPTIONAL`."""
    may_crop: ClassVar[bool] = False
    """Whether the label of a protein is also correct for a random part of the protein. If not, `data.long: crop` is
    refused, and `full` is the default."""
    instead_of_crop: ClassVar[str] = "full or skip"
    """The values of `data.long` that the message about a refused `crop` proposes."""
    reads_table: ClassVar[bool] = False
    """Whether the data are one table of measured variants of one protein (`data.table`). The command divides this table
    unless `data.folds` is set. For `VariantSettings` and its subclasses only."""
    trains_lm_head: ClassVar[bool] = False
    """Whether the task trains and uses the LM head of the language model, and has no additional head."""
    pairs: ClassVar[bool] = False
    """Whether a record has two chains, `A:B`, which the model reads as two separate sequences."""
    predicts_contacts: ClassVar[bool] = False
    """Whether predictions are maps of contact probabilities. A report then shows these maps with the true contacts."""

    @property
    def wild_type_alone(self) -> bool:
        """Whether one forward pass of the wild type serves all variants of a table."""
        return False

    @property
    def whole_steps(self) -> bool:
        """Whether the loss compares the records of a step with each other, so that each step is one micro-batch."""
        return False

    def no_probe(self) -> str | None:
        """Return the reason why `adapt.method: probe` cannot be used with these settings, or None if it can be used."""
        return f"probe is not offered by task {self.name}; choose full, lora or head"

    def suit(self, data: DataSettings) -> DataSettings:
        """Return the data section with the defaults of this task. Raises `Clash` if a key is missing or is refused."""
        if data.train is None:
            raise Clash("train", "this key is required")
        return data.model_copy(update={key: data.train for key in ("valid", "test") if getattr(data, key) is None})

    def head_bytes(self, tokens: int, n_logits: int) -> int:
        """Estimate how many bytes the head keeps for the backward pass of a record, in fp32.

        Args:
            tokens: the number of tokens of the record.
            n_logits: the number of logits of the language model for each token. A head may keep these logits.
        """
        return 0


def suiting(data: DataSettings, task: TaskSettings) -> DataSettings:
    """Return the data section with the defaults of a task. Raises `Clash` if a key is missing or does not fit it."""
    for key in OPTIONAL:
        if getattr(data, key) is not None and key not in task.data_keys:
            owners = [name for name, settings in sections().items() if key in settings.data_keys]
            raise Clash(key, f"is for task {listed(owners)}, and the recipe has {task.name}; remove it")
    if not task.may_crop and data.long == "crop":
        if "long" in data.model_fields_set:
            reason = f"crop may remove the cause of the label of a protein; choose {task.instead_of_crop}"
            raise Clash("long", reason)
        data = data.model_copy(update={"long": "full"})
    data = task.suit(data)
    if data.folds is not None and "fold" not in data.model_fields_set:
        raise Clash(
            "folds",
            f"makes {data.folds} parts, and a run is tested on one of them; to train all {data.folds} runs, remove it "
            f"and pass --folds {data.folds}; to train one run, add data.fold, from 0 to {data.folds - 1}",
        )
    return data


def sections() -> Mapping[str, type[TaskSettings]]:
    """Return the settings class of each registered task that can be used, by the name of the task."""
    return registry.registered().settings


class _AnyRegistered:
    """Makes pydantic choose the settings class of a task section by the key `name`, among all registered tasks."""

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        every = tuple(sections().values())
        choice = handler.generate_schema(Annotated[Union[every], Field(discriminator="name")])  # noqa: UP007
        return core_schema.no_info_before_validator_function(_usable, choice)


def _usable(section: Any) -> Any:
    """Return a task section unchanged. Raise `Clash` with the reason if its task is registered but cannot be used."""
    name = section.get("name") if isinstance(section, dict) else None
    if isinstance(name, str) and name in registry.registered().unusable:
        raise Clash("name", registry.registered().unusable[name])
    return section


AnyTask = Annotated[TaskSettings, _AnyRegistered()]
"""The type of a task section: the settings of one of the registered tasks."""


MOST_STEPS, MOST_TOKENS, MOST_PROCESSES, MOST_SECONDS = 10**8, 10**9, 10**6, 10**8
"""Limits far above the numbers of any real run. With these limits, a number with too many digits is refused early."""


class ModelSettings(Settings):
    """The language model that is fine-tuned."""

    name: str
    """The name or path of the model. Names are `starter` or `demo` (small models in this package, not ESM-2), a
    released name (`esm2_t6_8M_UR50D` ... `esm2_t48_15B_UR50D`), or OWNER/NAME for a repository of the Hugging Face hub.
    A path leads to trained weights: a fair-esm `.pt` file, or a directory in the layout of `transformers`. With
    `init: random`, the name (also `mini`) only defines the architecture."""
    quantize: Literal["nf4", "int8"] | None = None
    """How the library bitsandbytes stores the frozen matrices of the layers in the memory of an NVIDIA GPU: each number
    has 4 bits (`nf4`, QLoRA, Dettmers et al. 2023, arXiv:2305.14314) or 8 bits (`int8`), and by default 32 bits. For
    `adapt.method` lora, head and probe. The consolidated model has the unchanged weights of `name`."""


LoraTarget = Literal["q", "k", "v", "out", "fc1", "fc2"]
"""The linear layers of one layer of a model: query, key, value, output of attention, and both feed-forward layers."""
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
    `lora` come from Schmirler et al. 2024 (doi:10.1038/s41467-024-51844-2), who train with `optim.lr` 3e-4.
    """

    method: Literal["full", "lora", "head", "probe"] = "full"
    """How training is done. `full` trains every weight. `lora` trains low-rank matrices that are added to the frozen
    matrices of each layer (Hu et al. 2021, arXiv:2106.09685). `head` trains only the head. `probe` fits a linear head
    with scikit-learn on the frozen model, without optimizer steps."""
    freeze: Names = Field((), strict=False)
    """For method `full`: parts of the language model that are not trained, such as [embedding, layers.0-10]. Parts are
    `embedding`, `norms`, `biases`, layers counted from 0, and `tracks` (in ESM3: geometric attention, and the table of
    structure tokens)."""
    rank: int | None = Field(None, ge=1, le=1024, validate_default=True)
    """The rank of the LoRA matrices; 4 by default. This key and the keys below are only for method `lora`."""
    alpha: float | None = Field(None, gt=0, le=1e6, validate_default=True)
    """The scale of LoRA: the product of the LoRA matrices is multiplied by alpha / rank. The default of alpha is 1."""
    targets: Targets | None = Field(None, strict=False, validate_default=True)
    """The linear layers that get LoRA matrices: q, k, v, out, fc1, fc2; by default all six. `transformers` calls out,
    fc1 and fc2 `dense`."""
    bias: Literal["none", "all"] | None = Field(None, validate_default=True)
    """Which biases are trained. `all`, the default, trains every bias of the language model, also in LayerNorms."""

    @field_validator("freeze")
    @classmethod
    def _parts(cls, freeze: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        method = info.data.get("method")
        if freeze and method not in ("full", None):
            raise ValueError(f"is for adapt.method full, and the recipe has {method}; remove it, or change the method")
        for part in freeze:
            layers = re.fullmatch(r"layers\.([0-9]{1,4})(?:-([0-9]{1,4}))?", part)
            if layers is None and part not in ("embedding", "norms", "biases", "tracks"):
                raise ValueError(
                    f"'{part}' is no part of the model; name embedding, norms, biases, tracks, or layers as layers.0-10"
                )
            if layers is not None and layers[2] is not None and int(layers[2]) < int(layers[1]):
                raise ValueError(f"'{part}' ends before it begins; write the first layer first, from 0")
        return freeze

    @property
    def lora(self) -> tuple[int, float, tuple[LoraTarget, ...]]:
        """The keys `rank`, `alpha` and `targets` of this section. Only for method `lora`."""
        assert self.rank is not None
        assert self.alpha is not None
        assert self.targets is not None
        return self.rank, self.alpha, self.targets

    @field_validator(*_LORA, mode="before")
    @classmethod
    def _of_lora(cls, value: Any, info: ValidationInfo) -> Any:
        method = info.data.get("method")
        if info.field_name == "targets" and value in ([], ()):
            raise ValueError("names no layer; name some, or set adapt.method: head")
        if method == "lora":
            return _LORA[str(info.field_name)] if value is None else value
        if value is not None and method is not None:
            raise ValueError(f"is for adapt.method lora, and the recipe has {method}; remove it, or change the method")
        return value


class BatchSettings(Settings):
    """How many tokens or records one optimizer step has, and how many tokens a process computes at once."""

    global_tokens: int = Field(16384, ge=3, le=MOST_TOKENS)
    """The maximum number of tokens in one optimizer step, over all processes together. Nearly every step has about this
    many tokens. A step has the same records for any number of processes."""
    sequences: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """The number of records in one optimizer step, which may be set instead of `global_tokens`. `global_tokens` then is
    this number times the length in tokens of the longest training record."""
    tokens_per_rank: Annotated[int, Field(ge=3, le=MOST_TOKENS)] | Literal["auto"] = "auto"
    """The maximum number of tokens that one process computes at once. If the share of a process in a step is larger, it
    is divided into micro-batches, whose gradients are added. `auto` estimates the number that free memory allows."""

    @field_validator("sequences")
    @classmethod
    def _or_tokens(cls, sequences: int | None, info: ValidationInfo) -> int | None:
        default = cls.model_fields["global_tokens"].default
        if sequences is not None and info.data.get("global_tokens", default) != default:
            raise ValueError(
                f"is another way to say batch.global_tokens, which is {info.data['global_tokens']}; give one of the two"
            )
        return sequences


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimSettings(Settings):
    """The settings of the optimizer AdamW and of the learning rate."""

    lr: float = Field(2.0e-5, gt=0, le=10)
    """The highest learning rate of the language model, after the warm-up."""
    head_lr: float = Field(2.0e-4, gt=0, le=10)
    """The highest learning rate of the head, after the warm-up."""
    betas: tuple[Decay, Decay] = Field((0.9, 0.98), strict=False)
    """The decay rates of AdamW's running means of gradient and squared gradient. ESM-2 was trained with the default."""
    weight_decay: float = Field(0.01, ge=0, le=100)
    """The decoupled weight decay of AdamW. Biases, LayerNorms and embeddings have no weight decay."""
    warmup: float = Field(0.05, ge=0, le=1)
    """The share of all steps in which the learning rate rises from 0 to its peak."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up. With `cosine` and `linear` the rate would be 0 one step after the
    last step. With `constant` the rate does not fall."""
    clip: float = Field(1.0, gt=0, le=10**9)
    """The maximum norm of the gradient of all trained weights. A larger gradient is scaled down to this norm."""


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
            raise ValueError(f"is another way to say train.steps, which is {steps}; give one of the two")
        return epochs

    seed: int = Field(0, ge=0, lt=2**32)
    """The random seed of new weights, of the order of records, of crops and of all other random choices in training."""
    eval_every: Annotated[int, Field(ge=1, le=MOST_STEPS)] | Literal["epoch"] = 50
    """The number of optimizer steps between two validations, or `epoch` for a validation after each epoch."""
    early_stop: int | None = Field(None, ge=1, le=MOST_STEPS)
    """The run stops if this many validations in a row have not improved the headline metric. The result is the best
    model. By default the run never stops early."""


class ParallelSettings(Settings):
    """How the work is divided over processes (docs/sharding.md). The keys change speed, memory, and rounding errors."""

    strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"] = "full_shard"
    """How weights are divided over processes. `full_shard` frees each layer's gathered weights after use (ZeRO 3).
    `shard_grad_op` keeps gathered weights from the forward to the backward pass (ZeRO 2), with less traffic and more
    memory. With `hybrid_shard` each group of processes divides its own copy. `no_shard` keeps a copy in every process
    (DDP)."""
    group_size: int | None = Field(None, ge=2, le=MOST_PROCESSES)
    """For strategy `hybrid_shard`, the number of processes that divide one copy of the weights; by default all of the
    processes on a machine."""
    tensor: int = Field(1, ge=1, le=MOST_PROCESSES)
    """The number N of neighbouring processes of a machine that compute each layer together. They divide the attention
    heads and the columns of the feed-forward part, read the same records, and each hold 1/N of the layers' weights and
    activations. The key `strategy` says how each of these N parts is divided over further processes."""
    context: int = Field(1, ge=1, le=MOST_PROCESSES)
    """The number of neighbouring processes of a machine that divide the tokens of each micro-batch, also in attention.
    This key is for proteins that are too long for one GPU. Only `strategy` divides the weights."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """The precision of the arithmetic. Weights, optimizer state and gradient sums stay fp32. `auto` means bf16 on
    NVIDIA GPUs from compute capability 8.0 on, fp16 with a loss scale from 7.0 on, and fp32 otherwise."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """The precision in which gradients are summed over processes. bf16 halves the traffic of the sum, but loses digits.
    """
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Which activations the layers keep for the backward pass. `none` keeps all. `full` keeps only the input of each
    layer and computes the rest again: a third more work, far less memory. `selective` also keeps the outputs of matrix
    products and attention: slightly more work than `none`, about two thirds of the memory."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, and copy each layer to the GPU when it is used."""
    accumulate: Literal["sharded", "unsharded"] = "sharded"
    """How the gradients of a step's micro-batches are added. `sharded` sums them over processes after each micro-batch.
    `unsharded` keeps all gradients in every process and sums them once in a step: less traffic, more memory."""
    compile: bool = False
    """Compile the layers of the model, once for all lengths of records. Compiling takes a minute at the start, and does
    not make training on a CPU faster (docs/devices.md)."""
    start_timeout: int = Field(1800, ge=1, le=MOST_SECONDS)
    """How many seconds a process waits for other processes until the first step is done, as while weights are read."""
    step_timeout: int = Field(600, ge=1, le=MOST_SECONDS)
    """How many seconds a process waits for other processes in later steps. After this time the run stops and names the
    silent process."""


class CheckpointSettings(Settings):
    """The settings of the sharded checkpoints, from which a run can resume."""

    every: int = Field(100, ge=1, le=MOST_STEPS)
    """The number of optimizer steps between two checkpoints. A checkpoint is always written after the last step."""
    keep: int = Field(3, ge=1, le=MOST_STEPS)
    """The number of newest checkpoints that are kept. Older checkpoints are deleted."""
    keep_best: bool = False
    """Save a checkpoint after each validation with the best result so far. The best model is the result of the run."""
    async_save: Literal["auto"] | bool = "auto"
    """Write checkpoints in the background while training continues. This needs a copy in host memory: 12 bytes for each
    trained parameter, over all processes together. `auto` writes in the background only with GPUs."""


class Recipe(Settings):
    """A recipe: all settings of one fine-tuning run."""

    model_config = ConfigDict(defer_build=True)  # tasks of other packages are imported only when a recipe is read

    task: AnyTask
    """The task, its head and its options (docs/tasks.md)."""
    model: ModelSettings
    init: Literal["pretrained", "random"] = "pretrained"
    """The weights at the start. `pretrained` reads the weights of `model.name`. `random` gives a model of the same
    architecture random weights."""
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
    Biases, configured by its environment variables). The metrics are also in metrics.jsonl. See docs/watching.md."""
    out: str
    """The directory of the run, relative to the working directory."""

    @field_validator("out")
    @classmethod
    def _no_device(cls, out: str) -> str:
        if re.match(r"/(dev(?!/shm/.)|proc|sys)(/|$)", out):
            raise ValueError(
                f"{out} belongs to the system and is no place for a run; write out: runs/NAME, or another directory"
            )
        return out

    @field_validator("adapt")
    @classmethod
    def _fits_task(cls, adapt: AdaptSettings, info: ValidationInfo) -> AdaptSettings:
        task, model = info.data.get("task"), info.data.get("model")
        if adapt.method == "full" and model is not None and model.quantize is not None:
            raise Clash(
                "method",
                f"full trains the weights that model.quantize={model.quantize} freezes; set adapt.method=lora, or pass "
                "model.quantize=null",
            )
        if adapt.method == "probe" and task is not None and (reason := task.no_probe()):
            raise Clash("method", reason)
        return adapt

    @field_validator("parallel")
    @classmethod
    def _fits_quantization(cls, parallel: ParallelSettings, info: ValidationInfo) -> ParallelSettings:
        model = info.data.get("model")
        if parallel.compile and model is not None and model.quantize is not None:
            raise Clash("compile", "cannot compile the unpacking of model.quantize; pass parallel.compile=false")
        return parallel

    @field_validator("data")
    @classmethod
    def _suits_task(cls, data: DataSettings, info: ValidationInfo) -> DataSettings:
        return suiting(data, info.data["task"]) if "task" in info.data else data

    @property
    def keeps_best(self) -> bool:
        """Whether the result of the run is the checkpoint with the best validation."""
        return self.checkpoint.keep_best or self.train.early_stop is not None

    @property
    def divides_table(self) -> bool:
        """Whether the table of variants is divided by the command, and not by the keys `data.folds` and `data.fold`."""
        return self.task.reads_table and self.data.folds is None
