"""The sections of a recipe: typed, frozen, with a description of every field. No torch.

`esmshard.recipe.recipe_file` reads them from files; `esmshard recipes schema` prints them.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from esmshard.recipe.data_section import DataSettings
from esmshard.recipe.section_base import Clash, Names, Settings, as_list
from esmshard.recipe.task_section import AnyTask, suiting

MOST_STEPS, MOST_TOKENS, MOST_PROCESSES, MOST_SECONDS = 10**8, 10**9, 10**6, 10**8
"""Limits far above any run. A number with a few digits too many is refused here instead of after days, or when memory
is full.
"""


class ModelSettings(Settings):
    """The language model that is fine-tuned."""

    name: str
    """`starter` or `demo` (small models that come with the package; no ESM-2), a released name (`esm2_t6_8M_UR50D` ...
    `esm2_t48_15B_UR50D`), OWNER/NAME for a repository of the Hugging Face hub, or the path of trained weights: a
    fair-esm `.pt` file, or a directory in the layout of `transformers`. With `init: random`, any of these names, and
    `mini`, gives the shape only.
    """
    quantize: Literal["nf4", "int8"] | None = None
    """How the frozen matrices of the layers are kept in the memory of an NVIDIA GPU, for `adapt.method` lora, head and
    probe: in 4 bits (QLoRA, Dettmers et al. 2023, arXiv:2305.14314) or in 8 bits a number, by bitsandbytes. By default
    in 32 bits. The consolidated model is made of the weights of `name` as they are.
    """


LoraTarget = Literal["q", "k", "v", "out", "fc1", "fc2"]
"""Linear layers of a block: query, key and value, attention's output, and the feed-forward pair."""
Targets = Annotated[
    tuple[LoraTarget, ...], BeforeValidator(as_list, json_schema_input_type=LoraTarget | list[LoraTarget])
]
Tracker = Literal["tensorboard", "wandb"]
Trackers = Annotated[tuple[Tracker, ...], BeforeValidator(as_list, json_schema_input_type=Tracker | list[Tracker])]
_LORA = {"rank": 4, "alpha": 1.0, "targets": ("q", "k", "v", "out", "fc1", "fc2"), "bias": "all"}


class AdaptSettings(Settings):
    """The weights of the language model that are trained (docs/adapt.md). The head is always trained. The defaults of
    `lora` are those of Schmirler et al. 2024 (doi:10.1038/s41467-024-51844-2), who train it with `optim.lr` 3e-4.
    """

    method: Literal["full", "lora", "head", "probe"] = "full"
    """`full`: every weight; `lora`: low-rank matrices beside the frozen matrices of each layer (Hu et al. 2021,
    arXiv:2106.09685); `head`: only the head; `probe`: a linear head fitted by scikit-learn on the frozen model, without
    optimizer steps.
    """
    freeze: Names = Field((), strict=False)
    """For `full`: parts that are not trained, such as [embedding, layers.0-10]: `embedding`, `norms`, `biases`, layers
    counted from 0, or `tracks`, the parts of ESM3 that read tracks: geometric attention and the table of structure
    tokens.
    """
    rank: int | None = Field(None, ge=1, le=1024, validate_default=True)
    """Rank of the LoRA matrices; 4 by default. For `lora` only, like the keys below."""
    alpha: float | None = Field(None, gt=0, le=1e6, validate_default=True)
    """The LoRA is scaled by alpha / rank; 1 by default."""
    targets: Targets | None = Field(None, strict=False, validate_default=True)
    """Layers with a LoRA, of q, k, v, out, fc1 and fc2; all by default. `transformers` calls the last three `dense`."""
    bias: Literal["none", "all"] | None = Field(None, validate_default=True)
    """`all`, the default, also trains every bias of the language model, including the biases of LayerNorms."""

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
        """Rank, alpha and targets; for method `lora` only."""
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


class BatchSettings(Settings):
    """The size of one optimizer step."""

    global_tokens: int = Field(16384, ge=3, le=MOST_TOKENS)
    """Most tokens of one optimizer step over all processes. Nearly every step has this size, with the same records for
    any number of processes.
    """
    sequences: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Records of a step. Sets `global_tokens` to this number times the tokens of the longest training record."""
    tokens_per_rank: Annotated[int, Field(ge=3, le=MOST_TOKENS)] | Literal["auto"] = "auto"
    """Most tokens that one process computes at once; a larger share is divided into micro-batches whose gradients are
    added. `auto` estimates what the free memory allows and takes the least over all processes.
    """

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
    """The optimizer AdamW and its schedule."""

    lr: float = Field(2.0e-5, gt=0, le=10)
    """Peak learning rate of the language model."""
    head_lr: float = Field(2.0e-4, gt=0, le=10)
    """Peak learning rate of the head."""
    betas: tuple[Decay, Decay] = Field((0.9, 0.98), strict=False)
    """Decay of the running means of gradient and squared gradient. ESM-2 was trained with these values."""
    weight_decay: float = Field(0.01, ge=0, le=100)
    """Decoupled weight decay. Biases, LayerNorms and embeddings have none."""
    warmup: float = Field(0.05, ge=0, le=1)
    """Share of all steps during which the learning rate rises from 0."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up. It would reach 0 one step after the last."""
    clip: float = Field(1.0, gt=0, le=10**9)
    """Largest norm of the gradient; a larger gradient is scaled to this norm."""


class TrainSettings(Settings):
    """How long the run trains, from which seed, and how often it is validated."""

    steps: int | None = Field(None, ge=1, le=MOST_STEPS)
    """Number of optimizer steps; 400 if `epochs` is not set either."""
    epochs: float | None = Field(None, gt=0, le=1e6)
    """Passes over the training records, instead of `steps`."""

    @field_validator("epochs")
    @classmethod
    def _or_steps(cls, epochs: float | None, info: ValidationInfo) -> float | None:
        steps = info.data.get("steps")
        if epochs is not None and steps is not None:
            raise ValueError(f"is another way to say train.steps, which is {steps}; give one of the two")
        return epochs

    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the new weights, the order of the records and the crops."""
    eval_every: Annotated[int, Field(ge=1, le=MOST_STEPS)] | Literal["epoch"] = 50
    """Steps between two validations, or `epoch`."""
    early_stop: int | None = Field(None, ge=1, le=MOST_STEPS)
    """Stop after so many successive validations without a better headline metric, and keep the
    model of the best one.
    """


class ParallelSettings(Settings):
    """How the work is divided over processes. No key here changes what is computed (docs/sharding.md)."""

    strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"] = "full_shard"
    """`full_shard` frees each layer's gathered weights after use (ZeRO 3). `shard_grad_op` keeps them from the forward
    to the backward pass (ZeRO 2): less traffic, more memory. `hybrid_shard` shards within groups of processes and keeps
    a copy in each group. `no_shard` keeps a copy in every process (DDP).
    """
    group_size: int | None = Field(None, ge=2, le=MOST_PROCESSES)
    """Processes that share one copy of the weights under `hybrid_shard`; by default those of one machine."""
    tensor: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Neighbouring processes of one machine that compute each layer together: they share the attention heads and the
    columns of the feed-forward part, see the same records, and hold 1/N of the layers' weights and activations. The
    strategy divides what is left over the other processes.
    """
    context: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Neighbouring processes of one machine that divide the tokens of each micro-batch, attention included, for single
    proteins that are too long for one GPU. Weights are divided by the strategy alone.
    """
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of the arithmetic; weights, optimizer state and gradient sums stay fp32. `auto`: bf16 on NVIDIA GPUs
    from compute capability 8.0 on, fp16 with a loss scale from 7.0 on, else fp32.
    """
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are added over processes. bf16 halves this traffic and loses digits."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """`full` keeps only the input of each layer and computes the rest again: a third more work, far less memory.
    `selective` also keeps the outputs of matrix products and attention: little more work, about two thirds of the
    memory.
    """
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in the machine's memory, and gather each layer from there."""
    accumulate: Literal["sharded", "unsharded"] = "sharded"
    """Gradients between the micro-batches of a step. `sharded` adds them over processes after each micro-batch;
    `unsharded` keeps all of them in every process and adds them once: less traffic, as much memory as the whole model.
    """
    compile: bool = False
    """Compile each layer, once for all lengths. This takes a minute at the start, and does not make a CPU faster
    (docs/devices.md).
    """
    start_timeout: int = Field(1800, ge=1, le=MOST_SECONDS)
    """Seconds that a process waits for the others until the first step is done, for example while weights are read."""
    step_timeout: int = Field(600, ge=1, le=MOST_SECONDS)
    """Seconds that a process waits for the others in later steps. Then the run ends and names the process that did not
    respond.
    """


class CheckpointSettings(Settings):
    """Sharded checkpoints, from which a run can resume."""

    every: int = Field(100, ge=1, le=MOST_STEPS)
    """Steps between two checkpoints. The last step always writes one."""
    keep: int = Field(3, ge=1, le=MOST_STEPS)
    """Number of newest checkpoints that are kept."""
    keep_best: bool = False
    """Save a checkpoint after every validation that is the best so far, and keep it for `esmshard
    consolidate --best`.
    """
    async_save: Literal["auto"] | bool = "auto"
    """Write in the background while training continues, from a copy in host memory: 12 bytes for each trained
    parameter, over all processes together. `auto`: with GPUs.
    """


class Recipe(Settings):
    """One fine-tuning run."""

    model_config = ConfigDict(defer_build=True)  # tasks of other packages are looked for when a recipe is read

    task: AnyTask
    """The task, its head and its options (docs/tasks.md)."""
    model: ModelSettings
    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` reads the weights of `model.name`; `random` starts the same architecture from random weights."""
    # The mypy plug-in is not worth a build dependency.
    adapt: AdaptSettings = Field(AdaptSettings(), validate_default=True)  # type: ignore[call-arg,call-overload]
    data: DataSettings
    batch: BatchSettings = BatchSettings()  # type: ignore[call-arg]
    optim: OptimSettings = OptimSettings()  # type: ignore[call-arg]
    train: TrainSettings = TrainSettings()  # type: ignore[call-arg]
    parallel: ParallelSettings = ParallelSettings()  # type: ignore[call-arg]
    checkpoint: CheckpointSettings = CheckpointSettings()  # type: ignore[call-arg]
    track: Trackers = Field((), strict=False)
    """The trackers that show metrics in addition to metrics.jsonl: `tensorboard` (files in `out`/tensorboard), `wandb`
    (Weights & Biases, configured by its own environment variables). See docs/watching.md.
    """
    out: str
    """Directory of the run, relative to the working directory."""

    @field_validator("out")
    @classmethod
    def _no_device(cls, out: str) -> str:
        if re.match(r"/(dev(?!/shm/.)|proc|sys)(/|$)", out):
            raise ValueError(
                f"{out} belongs to the system and is no place for a run; write out: runs/NAME, or another "
                "directory of yours"
            )
        return out

    @field_validator("track")
    @classmethod
    def _trackers_once(cls, track: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(track)) < len(track):
            raise ValueError(f"names a tracker twice ({', '.join(track)}); name each once")
        return track

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
        if adapt.method != "probe" or task is None:
            return adapt
        if reason := task.no_probe():
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
        """Whether the checkpoint of the best validation is kept, and is the result of the run."""
        return self.checkpoint.keep_best or self.train.early_stop is not None

    @property
    def divides_table(self) -> bool:
        """Whether a single command divides a table of variants, into folds or into one split."""
        return self.task.reads_table and self.data.folds is None
