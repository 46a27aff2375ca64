"""The sections of a recipe: typed, frozen, every field explained. No torch.

`esmshard.recipe` reads them from files; `esmshard recipes schema` prints them.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from esmshard.task_settings import (
    ContactSettings,
    MlmSettings,
    ResidueSettings,
    SequenceSettings,
    Settings,
    TaskSettings,
    VariantSettings,
)


class ModelSettings(Settings):
    """The language model that is fine-tuned."""

    name: str
    """`starter` (a small model that comes with the package; not an ESM-2), a released name (`esm2_t6_8M_UR50D` ...
    `esm2_t48_15B_UR50D`), or the path of trained weights: a fair-esm `.pt` file, or a directory in the layout of
    `transformers`. With `init: random` any of them, and `mini`, names a shape."""


LoraTarget = Literal["q", "k", "v", "out", "fc1", "fc2"]
"""Linear layers of a block: query, key and value, attention's output, and the feed-forward pair."""
_LORA = {"rank": 4, "alpha": 1.0, "targets": ("q", "k", "v", "out", "fc1", "fc2"), "bias": "all"}


class AdaptSettings(Settings):
    """What of the language model learns (docs/adapt.md). The head always does. The defaults of `lora` are those of
    Schmirler et al. 2024 (doi:10.1038/s41467-024-51844-2), who train it with `optim.lr` 3e-4.
    """

    method: Literal["full", "lora", "head", "probe"] = "full"
    """`full`: every weight; `lora`: an adapter of low rank beside the matrices of each layer (Hu et al. 2021,
    arXiv:2106.09685), which are frozen; `head`: nothing, only the head learns; `probe`: a linear head fitted by
    scikit-learn on the frozen model, without any step."""
    freeze: tuple[str, ...] = Field((), strict=False)
    """Of `full`: parts that do not learn, such as [embedding, layers.0-10]: `embedding`, `norms`, `biases`, or layers
    from 0."""
    rank: int | None = Field(None, ge=1, le=1024, validate_default=True)
    """Of the adapter's matrices; 4 by default. For `lora` only, as the keys below."""
    alpha: float | None = Field(None, gt=0, validate_default=True)
    """What the adapter adds is scaled by alpha / rank; 1 by default."""
    targets: tuple[LoraTarget, ...] | None = Field(None, strict=False, validate_default=True)
    """Layers with an adapter, of q, k, v, out, fc1 and fc2; all by default. `transformers` calls the last three
    `dense`."""
    bias: Literal["none", "all"] | None = Field(None, validate_default=True)
    """`all` trains every bias of the language model too, those of LayerNorms included; the default."""

    @field_validator("freeze")
    @classmethod
    def _parts(cls, freeze: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        method = info.data.get("method")
        if freeze and method not in ("full", None):
            raise ValueError(f"is for adapt.method full, and the recipe has {method}; remove it, or change the method")
        for part in freeze:
            layers = re.fullmatch(r"layers\.([0-9]+)(?:-([0-9]+))?", part)
            if layers is None and part not in ("embedding", "norms", "biases"):
                raise ValueError(
                    f"'{part}' is no part of the model; name embedding, norms, biases, or layers as layers.0-10"
                )
            if layers is not None and layers[2] is not None and int(layers[2]) < int(layers[1]):
                raise ValueError(f"'{part}' ends before it begins; write the first layer first, from 0")
        return freeze

    @property
    def lora(self) -> tuple[int, float, tuple[LoraTarget, ...]]:
        """Rank, alpha and targets, of method `lora` only."""
        assert self.rank is not None
        assert self.alpha is not None
        assert self.targets is not None
        return self.rank, self.alpha, self.targets

    @field_validator(*_LORA, mode="before")
    @classmethod
    def _of_lora(cls, value: Any, info: ValidationInfo) -> Any:
        method = info.data.get("method")
        if method == "lora":
            return _LORA[str(info.field_name)] if value is None else value
        if value is not None and method is not None:
            raise ValueError(f"is for adapt.method lora, and the recipe has {method}; remove it, or change the method")
        return value

    @field_validator("targets")
    @classmethod
    def _each_once(cls, targets: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if targets == ():
            raise ValueError("names no layer; name some, or set adapt.method: head")
        if targets is not None and len(set(targets)) < len(targets):
            raise ValueError(f"names a layer twice ({', '.join(targets)}); name each once")
        return targets


class DataSettings(Settings):
    """The three splits. For contacts: a directory of PDB or mmCIF files (docs/structures.md), or a FASTA file or token
    store and beside it the coordinates as `.npz` (data/README.md). Task `variant` has `table` and `wild_type` instead.
    """

    train: str | None = None
    """Records to learn from: a path, or `sample:contact/train`."""
    valid: str | None = None
    """Records to watch while training. Never trained on."""
    test: str | None = None
    """Records for the final numbers. Never looked at before."""
    table: str | None = None
    """Measured variants of one protein, as CSV, TSV or Parquet (docs/variants.md). For task `variant`, as the next
    keys."""
    wild_type: str | None = None
    """FASTA file with that protein."""
    mutant: str | None = None
    """Column with the mutations; found by its name by default."""
    offset: int | Literal["auto"] | None = None
    """Added to the positions of the table; by default `auto`, which finds the shift that fits the wild type."""
    unusable: Literal["drop", "error"] | None = None
    """What becomes of rows that cannot be used: no substitution, a stop codon, a synonymous change, another residue
    than the wild type has. By default `drop`: they are left out and named; unreadable ones and misfits up to a tenth of
    the table each."""
    replicates: Literal["mean", "keep", "error"] | None = None
    """What becomes of a variant in several rows; `mean` by default."""
    transform: Literal["none", "log", "rank"] | None = None
    """Of the measured values before they are learned; predictions come back in their unit. `log` for ratios and
    affinities, `rank` for values with a skewed distribution; `none` by default."""
    lower_is_better: tuple[str, ...] | None = Field(None, strict=False)
    """Targets of which a lower value is the better one, as a dissociation constant; ranks and zero-shot scores turn
    round."""
    split: Literal["position", "contiguous", "modulo", "random", "mutations", "given"] | None = None
    """How `folds` divide variants. By default `position`: those of one position go together, so that every test is on
    positions that were never seen; `contiguous` and `modulo` are ProteinGym's; `random` flatters. `mutations` and
    `given` make one split of the table, without folds: up to `train_max` mutations to learn from and the rest to test
    on, or as its column `set` (or `split`) says."""
    train_max: int | None = Field(None, ge=1)
    """Most mutations of a variant to learn from, of split `mutations`; 1 by default."""
    train_share: float | None = Field(None, gt=0, le=1)
    """Share of the training variants that are learned from, for learning curves; a smaller share is a part of a larger
    one. All by default."""
    labels: str | None = None
    """Labels of all three splits in one file: a table, a label FASTA, or an `.npz` (docs/labels.md). By default they
    stand in the headers of the FASTA files, or in the `.npz` beside each."""
    target: tuple[str, ...] | None = Field(None, strict=False)
    """Columns of the table, keys of the headers, or the array of the `.npz` that are learned."""
    id_column: str | None = None
    """Column of the table with the ids; found by its name by default."""
    mask: str | None = None
    """FASTA file of 0 and 1: residues under a 0 have no label. For task `residue`."""
    folds: int | None = Field(None, ge=3)
    """Cross-validation: `train`, or `table`, is divided into so many parts, one of which is the test set; of a table,
    another one is the validation set. `--folds` sets it."""
    fold: int = Field(0, ge=0)
    """Which part that is, from 0."""
    clusters: str | None = None
    """MMseqs2's `_cluster.tsv` of the training records: `folds` keep its clusters together. Without it, equal sequences
    only."""
    long: Literal["crop", "window", "full", "skip", "error"] = "crop"
    """What to do with a training record over `max_length`: `crop` cuts a random window, another one each epoch;
    `window` makes as few windows as cover it, each an example; `full` takes it whole; `skip` leaves it out, counted;
    `error` refuses it. Validation, test and prediction always see whole chains. For task `sequence` `full` is the
    default, and `crop` is refused: it may cut away what the label comes from."""
    max_length: int = Field(1022, ge=8)
    """Residues of the longest training record."""

    @field_validator("fold")
    @classmethod
    def _of_folds(cls, fold: int, info: ValidationInfo) -> int:
        if "folds" not in info.data:  # refused itself
            return fold
        folds = info.data["folds"]
        if fold and folds is None:
            raise ValueError("is one of data.folds, and the recipe has none; add data.folds, or remove it")
        if folds is not None and fold >= folds:
            raise ValueError(f"is counted from 0, and of {folds} folds the last one is {folds - 1}, not {fold}")
        return fold


class BatchSettings(Settings):
    """How much goes into one optimizer step."""

    global_tokens: int = Field(16384, ge=3)
    """Most tokens of one optimizer step over all processes, and nearly what each step has: the same set of records
    whatever the number of processes."""
    sequences: int | None = Field(None, ge=1)
    """Records of a step, in place of `global_tokens`: so many of the longest training record."""
    tokens_per_rank: int | Literal["auto"] = "auto"
    """Most tokens that one process takes through the model at once; a larger share is cut into micro-batches whose
    gradients add up. `auto` estimates what the free memory allows and takes the least over all processes."""

    @field_validator("sequences")
    @classmethod
    def _or_tokens(cls, sequences: int | None, info: ValidationInfo) -> int | None:
        default = cls.model_fields["global_tokens"].default
        if sequences is not None and info.data.get("global_tokens", default) != default:
            raise ValueError(
                f"is another way to say batch.global_tokens, which is {info.data['global_tokens']}; give one"
            )
        return sequences


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimSettings(Settings):
    """AdamW and its schedule."""

    lr: float = Field(2.0e-5, gt=0)
    """Peak learning rate of the language model."""
    head_lr: float = Field(2.0e-4, gt=0)
    """Peak learning rate of the head."""
    betas: tuple[Decay, Decay] = Field((0.9, 0.98), strict=False)
    """Decay of the running means of gradient and squared gradient; ESM-2 was trained with these."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay. None on biases, LayerNorms and embeddings."""
    warmup: float = Field(0.05, ge=0, le=1)
    """Share of all steps during which the learning rate rises from 0."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls to 0 after the warm-up."""
    clip: float = Field(1.0, gt=0)
    """Longest allowed gradient: a longer one is scaled to this norm."""


class TrainSettings(Settings):
    """How long, from which seed, watched how often."""

    steps: int | None = Field(None, ge=1)
    """Optimizer steps; 400 if `epochs` is not given either."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the training records, in place of `steps`."""

    @field_validator("epochs")
    @classmethod
    def _or_steps(cls, epochs: float | None, info: ValidationInfo) -> float | None:
        steps = info.data.get("steps")
        if epochs is not None and steps is not None:
            raise ValueError(f"is another way to say train.steps, which is {steps}; give one of the two")
        return epochs

    seed: int = Field(0, ge=0)
    """Fixes the new weights, the order of the records and the crops."""
    eval_every: Annotated[int, Field(ge=1)] | Literal["epoch"] = 50
    """Steps between two validations, or `epoch`."""
    early_stop: int | None = Field(None, ge=1)
    """Stop after so many validations in a row without a better headline metric, and take the model of the best."""


After = Annotated[Literal["full_shard", "shard_grad_op"] | Annotated[int, Field(ge=2)] | None, Field()]


class ParallelSettings(Settings):
    """How the work is spread over processes. None of these changes what is computed (docs/sharding.md)."""

    strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"] = "full_shard"
    """`full_shard` frees each layer's gathered weights after use (ZeRO 3); `shard_grad_op` keeps them from the forward
    to the backward pass (ZeRO 2): less traffic, more memory; `hybrid_shard` shards within groups of processes and
    keeps a copy in each; `no_shard` keeps a copy in every process (DDP)."""
    group_size: int | None = Field(None, ge=2)
    """Processes that share one copy of the weights under `hybrid_shard`; those of one machine by default."""
    layers: After = None
    """What becomes of the layers' gathered weights after the forward pass, if not what the strategy says: `full_shard`
    frees them, `shard_grad_op` keeps them, a number N keeps them spread over groups of N processes (ZeRO++)."""
    last_layer: After = None
    """The same for the last layer, which the backward pass needs first. As `layers` by default."""
    root: After = None
    """The same for embedding, LM head and task head, which are one group. Kept by default."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of the arithmetic; weights, optimizer state and gradient sums stay fp32. `auto`: bf16 on NVIDIA GPUs from compute
    capability 8.0 on, fp16 with a loss scale from 7.0 on, else fp32."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """In which gradients are added up over processes. bf16 halves that traffic and loses digits."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """`full` keeps only the input of each layer and computes the rest again: a third more work, far less memory.
    `selective` keeps the outputs of matrix products and attention too: little work, about two thirds of the memory."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in the machine's memory, and gather each layer from there."""
    prefetch_forward: int = Field(0, ge=0, le=8)
    """Layers whose weights are asked for ahead of time in the forward pass, beyond what overlaps by itself."""
    prefetch_backward: int = Field(1, ge=1, le=8)
    """The same in the backward pass."""
    accumulate: Literal["sharded", "unsharded"] = "sharded"
    """Gradients between the micro-batches of a step: `sharded` adds them up over processes each time; `unsharded`
    keeps all of them in every process and does so once: less traffic, as much memory as the whole model."""
    compile: bool = False
    """Compile each layer, once for all lengths. A minute at the start; on a CPU it does not pay (docs/devices.md)."""
    start_timeout: int = Field(1800, ge=1)
    """Seconds that a process waits for the others until the first step is done, such as while weights are read."""
    step_timeout: int = Field(600, ge=1)
    """The same after that. Then the run ends and names the process that did not come."""


class CheckpointSettings(Settings):
    """Sharded checkpoints, from which a run goes on."""

    every: int = Field(100, ge=1)
    """Steps between two checkpoints. The last step always leaves one."""
    keep: int = Field(3, ge=1)
    """How many of the newest ones stay."""
    keep_best: bool = False
    """Save whenever a validation is the best so far, and keep that one too, for `esmshard consolidate --best`."""
    async_save: Literal["auto"] | bool = "auto"
    """Write in the background while training goes on, from a copy on the host: 12 bytes a trained parameter, over all
    processes together. `auto`: with GPUs."""


_LABELLED = ("residue", "sequence")
_VARIANT = {
    "table": None,
    "wild_type": None,
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
"""Keys of the data section for task `variant`, and what they are there by default."""
_OF_TASKS = {
    "labels": _LABELLED,
    "target": (*_LABELLED, "variant"),
    "id_column": _LABELLED,
    "mask": ("residue",),
    **dict.fromkeys(_VARIANT, ("variant",)),
}
"""Keys of the data section that only some tasks read."""


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


class Clash(ValueError):
    """A key of one section that does not go with another section."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key, self.reason = key, reason


class Recipe(Settings):
    """One fine-tuning run."""

    task: TaskSettings
    """What is learned, and the head that learns it (docs/tasks.md)."""
    model: ModelSettings
    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` reads the weights that `model.name` points to; `random` starts the same architecture from noise."""
    adapt: AdaptSettings = AdaptSettings()  # type: ignore[call-arg]  # the mypy plug-in is not worth a build dependency
    data: DataSettings
    batch: BatchSettings = BatchSettings()  # type: ignore[call-arg]
    optim: OptimSettings = OptimSettings()  # type: ignore[call-arg]
    train: TrainSettings = TrainSettings()  # type: ignore[call-arg]
    parallel: ParallelSettings = ParallelSettings()  # type: ignore[call-arg]
    checkpoint: CheckpointSettings = CheckpointSettings()  # type: ignore[call-arg]
    out: str
    """Directory of the run, relative to the working directory."""

    @field_validator("adapt")
    @classmethod
    def _fits_task(cls, adapt: AdaptSettings, info: ValidationInfo) -> AdaptSettings:
        task = info.data.get("task")
        if adapt.method != "probe" or task is None:
            return adapt
        if isinstance(task, MlmSettings):
            raise Clash("method", "probe has no meaning for task mlm, which has no labels; choose full, lora or head")
        if isinstance(task, ContactSettings) and task.head != "attention":
            raise Clash("method", "probe fits a regression over attention maps; set task.head: attention")
        if isinstance(task, ResidueSettings | SequenceSettings | VariantSettings) and task.hidden != 0:
            raise Clash("method", "probe fits a linear head; set task.hidden: 0")
        return adapt

    @field_validator("data")
    @classmethod
    def _suits_task(cls, data: DataSettings, info: ValidationInfo) -> DataSettings:
        if "task" not in info.data:
            return data
        task = info.data["task"].name
        for key, tasks in _OF_TASKS.items():
            if getattr(data, key) is not None and task not in tasks:
                raise Clash(key, f"is for task {listed(tasks)}, and the recipe has {task}; remove it")
        if task in ("sequence", "variant") and data.long == "crop":
            if "long" in data.model_fields_set:
                others = "full or skip" if task == "sequence" else "full or window"
                raise Clash("long", f"crop may cut away what the label of a protein comes from; choose {others}")
            data = data.model_copy(update={"long": "full"})
        if task != "variant":
            return _of_records(data)
        if info.data["task"].loss == "ranking" and data.transform == "log":
            raise Clash("transform", "log means nothing to task.loss ranking, which sees ranks; remove it")
        return _of_variants(data)


def _of_records(data: DataSettings) -> DataSettings:
    for key in ("train", "valid", "test"):
        if getattr(data, key) is None:
            raise Clash(key, "this key is required")
    return data


def _of_variants(data: DataSettings) -> DataSettings:
    """With the defaults of the keys that only task `variant` has."""
    for key in ("table", "wild_type"):
        if getattr(data, key) is None:
            raise Clash(key, "this key is required")
    for key in ("train", "valid", "test", "clusters"):
        if getattr(data, key) is not None:
            raise Clash(key, "is for the other tasks, and the recipe has variant, which divides data.table; remove it")
    if data.long not in ("full", "window"):
        raise Clash("long", f"{data.long} leaves variants out; choose full, or window for a part of a long protein")
    given = {key: value for key, value in _VARIANT.items() if getattr(data, key) is None}
    data = data.model_copy(update=given)
    whole = data.split in ("mutations", "given")
    if whole and data.folds is not None:
        raise Clash(
            "folds", f"divides the table, and data.split {data.split} does so in another way; remove one of them"
        )
    if data.split != "mutations" and data.train_max is not None:
        raise Clash("train_max", f"is for data.split mutations, and the recipe has {data.split}; remove it")
    if data.target and (foreign := set(data.lower_is_better or ()) - set(data.target)):
        raise Clash("lower_is_better", f"{min(foreign)} is no target; data.target names {', '.join(data.target)}")
    return data
