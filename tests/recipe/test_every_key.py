"""Every key of a recipe changes something. A new key without an entry in KEYS fails here, and so does one that nothing
reads: each entry says what can be seen to differ when the key has another value.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import structure_texts
import torch
from conftest import write_subset
from pydantic import BaseModel
from torch import nn

from esmshard.data.splits.recipe_splits import open_split
from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.families.esm2 import ESM2
from esmshard.model.families.family_registry import SIZES
from esmshard.model.finetuner import FineTuner, RecordDropout
from esmshard.model.lora import LoraLinear
from esmshard.parallel.layout import Layout
from esmshard.recipe.recipe_file import load
from esmshard.recipe.sections import Recipe
from esmshard.tasks.base import Task, collate
from esmshard.tasks.finetuned import initial_weights, new_head
from esmshard.tasks.registry import new_task, registered
from esmshard.train import finetune, loop
from esmshard.train import tracking as tracked
from esmshard.train.inputs import prepare
from esmshard.train.optim import adamw
from esmshard.train.step import StepResult

CPU = torch.device("cpu")
TEXT = """\
task: {name: contact, channels: 4, blocks: 1}
model: {name: nano}
init: random
data: {train: train.fasta, valid: valid.fasta, test: valid.fasta, max_length: 60}
batch: {global_tokens: 300, tokens_per_rank: 130}
optim: {lr: 3.0e-3, head_lr: 3.0e-3}
train: {steps: 4, eval_every: 2}
checkpoint: {every: 4, keep: 9}
out: run
"""
LABELS = "data.labels=labels.csv"
RESIDUE = ("task={name: residue}", LABELS, "data.target=[letters]")
SEQUENCE = ("task={name: sequence}", LABELS, "data.target=[y]")
PAIR = ("task={name: pair}", "data.train=pairs.fasta", LABELS, "data.target=[y]")
LORA = ("adapt.method=lora",)
CLASSES = ("task.kind=class", "data.target=[kind]")
REPEAT = "MKTAYIAKQR"
"""A table that fits its first part fits the second as well, ten residues further on."""
SCORED = ("task={name: variant}", "data={table: variants.csv, wild_type: repeat.fasta, folds: 3, fold: 0}")
VARIANT = (*SCORED, "task.zero_shot=false")
WHOLE = ("task={name: variant, zero_shot: false}", "data={table: variants.csv, wild_type: repeat.fasta}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve chains to learn from and eight to validate on, with labels of every kind in one table; and variants."""
    found = tmp_path_factory.mktemp("keys")
    rows = ["id,other_id,letters,y,z,kind"]
    masks, clusters = [], []
    for name, count in (("train", 12), ("valid", 8)):
        chains = [one.split() for one in write_subset(found, name, name, range(count)).read_text().split(">")[1:]]
        for n, (chain, sequence) in enumerate(chains):
            length = len(sequence)
            letters = ("H" * n + "EC" * length)[:length]
            y = 100 if n == 3 else n  # one far from the others
            rows.append(f"{chain},{chains[n - 1][0]},{letters},{y},{-n},{'rare' if n == 0 else 'common'}")
            masks.append(f">{chain}\n{('10' * length)[:length]}")
            if name == "train":
                clusters.append(f"{chains[n - n % 3][0]}\t{chain}")
    (found / "labels.csv").write_text("\n".join(rows) + "\n")
    (found / "others.csv").write_text("\n".join(rows).replace("ECEC", "ECCC") + "\n")
    (found / "mask.fasta").write_text("\n".join(masks) + "\n")
    (found / "clusters.tsv").write_text("\n".join(clusters) + "\n")
    (found / "recipe.yaml").write_text(TEXT)
    letters = (found / "train.fasta").read_text() + (found / "valid.fasta").read_text()  # amino acids will do
    (found / "letters.fasta").write_text(letters)
    pairs = [(n, "MKTAYIAKQR"[:n]) for n in range(3, 9)]
    lines = [f"r{n},{sequence},{sequence[::-1]}" for n, sequence in pairs]
    (found / "columns.csv").write_text("\n".join(["id,sequence,reversed", *lines]) + "\n")
    (found / "other.fasta").write_text("".join(f">{k}\n{'MKTAYIAKQR' * 3}\n" for k in "abc"))
    (found / "complexes.fasta").write_text(f">a\n{REPEAT}:{REPEAT}\n")
    halves = [(name, len(one) // 2, one) for name, one in (record.split() for record in letters.split(">")[1:13])]
    (found / "pairs.fasta").write_text("".join(f">{name}\n{one[:n]}:{one[n:]}\n" for name, n, one in halves))
    write_variants(found)
    (found / "dimers").mkdir()
    dimer = structure_texts.chain(structure_texts.SEQ, "A") + structure_texts.chain(structure_texts.OTHER, "B")
    (found / "dimers" / "1abc.pdb").write_text(structure_texts.pdb(dimer))
    return found


def write_variants(directory: Path) -> None:
    """Of a protein that repeats itself: one, two and three changes, one of them in two rows, one with a stop codon."""
    singles = [f"{letter}{n}{new}" for n, letter in enumerate(REPEAT, 1) for new in "DGW"]
    several = ["M1V:K2V", "T3V:A4V", "Y5V:I6V:A7V", "K8V:Q9V:R10V"]
    names = enumerate([*singles, *several])
    rows = [f"{name},{name.replace('W', 'F')},{100 if n == 3 else n + 1}" for n, name in names]
    tables = {"variants": rows, "fewer": rows[:20], "twice": [*rows, *rows[:2]], "stop": [*rows, "K2*,K2*,0"]}
    tables["lost"] = [*rows, "M1del,M1del,9"]
    tables["later"] = [f"{name},{name},{n + 50}" for n, name in enumerate(singles)]
    for table, lines in tables.items():
        (directory / f"{table}.csv").write_text("\n".join(["mutant,other,score", *lines]) + "\n")
    (directory / "repeat.pdb").write_text(structure_texts.pdb(structure_texts.chain(REPEAT * 2)))
    several = {"a": "MKTAYIAKQR", "b": "GGSVLLPAMW", "c": "QDNENHRKYF"}
    (directory / "names.fasta").write_text("".join(f">{name}\n{one}\n" for name, one in several.items()))
    of_each = [f"{name},{one[n]}{n + 1}C,{n}" for name, one in several.items() for n in range(5)]
    (directory / "names.csv").write_text("\n".join(["name,mutant,score", *of_each]) + "\n")
    (directory / "repeat.fasta").write_text(f">twice\n{REPEAT * 2}\n")
    (directory / "tail.fasta").write_text(f">tail\n{REPEAT}GGGGGGGGGG\n")


# What can be seen: each function takes a recipe and gives something to compare


def task_of(recipe: Recipe) -> Task:
    """The task, with what it knows of the training labels."""
    new = new_task(recipe.task, {})
    return new.learn(open_split(recipe, "train", new.labels))


def head(recipe: Recipe) -> dict[str, Any]:
    """Names and shapes of the parameters of a new head, and its dropouts."""
    with torch.device("meta"):
        made = task_of(recipe).head(SIZES["nano"])
    shapes = {name: t.shape for name, t in made.state_dict().items()}
    return shapes | {name: m.share for name, m in made.named_modules() if isinstance(m, RecordDropout)}


def columns(recipe: Recipe) -> tuple[str, ...]:
    return new_task(recipe.task, {"classes": ["a", "b", "c"], "targets": ["y"]}).columns


def examples(recipe: Recipe) -> tuple[Any, list[torch.Tensor]]:
    task, new = task_of(recipe), new_task(recipe.task, {})
    train = open_split(recipe, "train", new.labels)
    return collate(task, [train.get(n) for n in range(len(train))])


def targets_in_training(recipe: Recipe) -> list[Any]:
    task = new_task(recipe.task, {})
    train = open_split(recipe, "train", task.labels)
    return [task.inputs(train.get(n, 0)).target.tolist() for n in range(len(train))]


def targets(recipe: Recipe) -> list[Any]:
    return [t.tolist() for t in examples(recipe)[1]]


def loss(recipe: Recipe) -> float:
    """Of a new head on random representations."""
    batch, wanted = examples(recipe)
    torch.manual_seed(0)
    task = task_of(recipe)
    head = task.head(SIZES["nano"]).eval()
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    found = task.loss(head(torch.randn(len(batch.tokens_T), 32), batch), wanted)
    return (found.sum / found.count).item()


def read_tokens(recipe: Recipe) -> list[int]:
    found: list[int] = examples(recipe)[0].tokens_T.tolist()
    return found


def base(recipe: Recipe) -> str:
    try:
        found = initial_weights(recipe)
    except InputError as error:
        return str(error)
    return f"{found.config} {found.source}"


def adapted(recipe: Recipe) -> dict[str, Any]:
    """What learns and how it is kept, and the scales of LoRA."""
    with torch.device("meta"):
        model = FineTuner(ESM2(SIZES["nano"]), new_task(recipe.task, {}).head(SIZES["nano"]))
    model.adapt(recipe.adapt, 0, (), recipe.model.quantize)
    learning = {name: p.requires_grad for name, p in model.named_parameters()}
    scales = {name: m.scale for name, m in model.named_modules() if isinstance(m, LoraLinear)}
    return scales | {name: (t.dtype, t.shape, learning.get(name)) for name, t in model.state_dict().items()}


def data(recipe: Recipe) -> list[Any]:
    """Ids, tokens and labels of all records; or what is wrong with them."""
    labels = new_task(recipe.task, {}).labels if recipe.data.labels else None
    try:
        splits = [open_split(recipe, name, labels) for name in ("train", "valid", "test")]
    except InputError as error:
        return [str(error)]
    every = [(split.id(n), int(split.tokens[n]), split.get(n)) for split in splits for n in range(len(split))]
    return [(*known, r.tokens.tolist(), {k: v.tolist() for k, v in (r.labels or {}).items()}) for *known, r in every]


def weight_of_zero_shot(recipe: Recipe) -> list[float]:
    """In a new head."""
    found: list[float] = task_of(recipe).head(SIZES["nano"]).get_parameter("zero_shot").tolist()
    return found


def groups(recipe: Recipe) -> list[dict[str, Any]]:
    config = SIZES["nano"]
    model = FineTuner(weights.build(weights.fresh(config, 0), CPU), new_task(recipe.task, {}).head(config))
    return [{k: v for k, v in g.items() if k != "params"} for g in adamw(model, recipe.optim).param_groups]


def steps(recipe: Recipe) -> int:
    return prepare(recipe, 1, 1, CPU).steps


def first_weights(recipe: Recipe) -> list[float]:
    task, found = new_task(recipe.task, {}), initial_weights(recipe)
    ours = [t.sum().item() for t in new_head(recipe, task, found)[0].state_dict().values()]
    return [*ours, found["embed_tokens.weight"].sum().item()]


def laid_out(recipe: Recipe) -> Layout:
    return prepare(recipe, 8, 4, CPU).layout


class _EnoughSeenError(Exception):
    """Ends a run where its training ends."""


def stop(*_: object, **__: object) -> None:
    raise _EnoughSeenError


def run(recipe: Recipe) -> list[Any]:
    """What a run asks of its steps, validations and checkpoints, in order; none is carried out."""
    asked: list[Any] = []

    def step(
        model: nn.Module, task: Task, optimizer: Any, batches: Any, clip: float, *_: Any, watch: Any, **__: Any
    ) -> StepResult:
        tokens = [len(batch.tokens_T) for batch, _, _ in watch.data(batches)]
        watch.wait_for_device()
        asked.append(("step", tokens, clip, [group["lr"] for group in optimizer.param_groups]))
        return StepResult(1.0, 1.0, sum(tokens), skipped=False, ranks=[watch.numbers()], asked=0)

    def validate(model: nn.Module, task: Task, data: Any, *_: Any) -> tuple[float, list[Any]]:
        asked.append("validate")
        target = task.inputs(data.get(0)).target
        return 1.0, [task.score(np.zeros(target.shape, np.float32), target)]

    class Recorder:
        def __init__(self, directory: Path, keep: int, background: bool, *_: object) -> None:
            asked.append(("keep", keep, background))

        def __enter__(self) -> "Recorder":
            return self

        def __exit__(self, *_: object) -> None: ...

        def finish(self) -> None: ...

        def save(self, step: int, tensors: Any, state: Any, best: bool) -> None:
            asked.append(("save", step, best))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", step)
        patch.setattr(finetune.evaluate, "validate", validate)
        patch.setattr(loop, "Saver", Recorder)
        patch.setattr(finetune, "_evaluate", stop)
        with pytest.raises(_EnoughSeenError):
            finetune.run(recipe, overwrite=True)
    return asked


def goes_elsewhere(recipe: Recipe) -> bool:
    """Whether a run leaves something in that directory."""
    run(recipe)
    return (Path.cwd() / "elsewhere" / "metrics.jsonl").exists()


def known_residues(recipe: Recipe) -> int:
    """Of how many residues of the training records something besides the amino acid is known."""
    train = prepare(recipe, 1, 1, CPU).train
    return sum(int((values < 20).sum()) for n in range(len(train)) for values in train.get(n).tracks.values())


def timeouts(recipe: Recipe) -> list[dict[str, Any]]:
    """What watches over the processes gets to know."""
    found: list[dict[str, Any]] = []

    def watch(start_timeout: int, step_timeout: int, **_: object) -> None:
        found.append({"start": start_timeout, "step": step_timeout})
        stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "world", watch)
        with pytest.raises(_EnoughSeenError):
            finetune.run(recipe, overwrite=True)
    return found


def fed(recipe: Recipe) -> list[str]:
    """Trackers that a run feeds."""
    found: list[str] = []

    def begin(tracking: tracked.Tracking, done: int, lost: int) -> None:
        found.extend(tracking._names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracked.Tracking, "begin", begin)
        run(recipe)
    return found


class Key(NamedTuple):
    """What differs when the key has another value, this value, and overrides under which the key means something."""

    seen: Callable[[Recipe], Any]
    value: str
    base: tuple[str, ...] = ()


KEYS = {
    "task.name": Key(columns, "mlm", ("task={name: residue}",)),
    "contact.head": Key(head, "both"),
    "contact.channels": Key(head, "8"),
    "contact.blocks": Key(head, "2"),
    "mlm.mask": Key(targets, "0.3", ("task={name: mlm}",)),
    "mlm.masking": Key(targets_in_training, "diffusion", ("task={name: mlm}",)),
    "residue.kind": Key(columns, "number", RESIDUE),
    "residue.classes": Key(head, "[HE, C]", RESIDUE),
    "residue.balance": Key(loss, "1.0", RESIDUE),
    "residue.hidden": Key(head, "8", RESIDUE),
    "residue.dropout": Key(head, "0.3", RESIDUE),
    "sequence.kind": Key(columns, "class", SEQUENCE),
    "sequence.pooling": Key(head, "attention", SEQUENCE),
    "sequence.loss": Key(loss, "huber", SEQUENCE),
    "sequence.balance": Key(loss, "1.0", (*SEQUENCE, *CLASSES)),
    "sequence.hidden": Key(head, "8", SEQUENCE),
    "sequence.dropout": Key(head, "0.3", SEQUENCE),
    "pair.kind": Key(columns, "class", PAIR),
    "pair.pooling": Key(head, "light_attention", PAIR),
    "pair.loss": Key(loss, "huber", PAIR),
    "pair.balance": Key(loss, "1.0", (*PAIR, *CLASSES)),
    "pair.hidden": Key(head, "8", PAIR),
    "pair.dropout": Key(head, "0.3", PAIR),
    "variant.head": Key(head, "likelihood", SCORED),
    "variant.context": Key(read_tokens, "masked", (*SCORED, "task.head=likelihood")),
    "variant.pool": Key(head, "sites", VARIANT),
    "variant.zero_shot": Key(head, "false", SCORED),
    "variant.loss": Key(loss, "huber", VARIANT),
    "variant.hidden": Key(head, "8", VARIANT),
    "variant.dropout": Key(head, "0.3", VARIANT),
    "model.name": Key(base, "mini"),
    "model.quantize": Key(adapted, "nf4", LORA),
    "init": Key(base, "pretrained"),
    "adapt.method": Key(adapted, "head"),
    "adapt.freeze": Key(adapted, "[layers.0]"),
    "adapt.rank": Key(adapted, "2", LORA),
    "adapt.alpha": Key(adapted, "2", LORA),
    "adapt.targets": Key(adapted, "[q, v]", LORA),
    "adapt.bias": Key(adapted, "none", LORA),
    "data.train": Key(data, "other.fasta"),
    "data.valid": Key(data, "other.fasta"),
    "data.test": Key(data, "other.fasta"),
    "data.table": Key(data, "fewer.csv", VARIANT),
    "data.align": Key(data, "none", (*VARIANT, "data.table=[variants.csv, later.csv]")),
    "data.wild_type": Key(data, "tail.fasta", VARIANT),
    "data.structure": Key(head, "repeat.pdb", (*SCORED, "task.head=gp")),
    "data.mutant": Key(data, "other", VARIANT),
    "data.offset": Key(data, "10", VARIANT),
    "data.unusable": Key(data, "error", (*VARIANT, "data.table=stop.csv")),
    "data.replicates": Key(data, "keep", (*VARIANT, "data.table=twice.csv")),
    "data.transform": Key(targets, "log", VARIANT),
    "data.lower_is_better": Key(weight_of_zero_shot, "[score]", SCORED),
    "data.split": Key(data, "contiguous", VARIANT),
    "data.protein": Key(data, "name", (*VARIANT, "data.table=names.csv", "data.wild_type=names.fasta")),
    "data.indels": Key(
        data, "drop", (*SCORED, "task={name: variant, head: likelihood, context: sequence}", "data.table=lost.csv")
    ),
    "data.train_max": Key(data, "2", (*WHOLE, "data.split=mutations")),
    "data.train_share": Key(data, "0.5", VARIANT),
    "data.labels": Key(data, "others.csv", RESIDUE),
    "data.target": Key(data, "[z]", SEQUENCE),
    "data.sequence_column": Key(data, "reversed", ("task={name: mlm}", "data.train=columns.csv")),
    "data.id_column": Key(data, "other_id", SEQUENCE),
    "data.mask": Key(targets, "mask.fasta", RESIDUE),
    "data.complexes": Key(data, "all", ("data.train=dimers", "data.valid=dimers")),
    "data.join.linker": Key(data, "5", ("data={train: complexes.fasta, valid: valid.fasta, test: valid.fasta}",)),
    "data.join.gap": Key(base, "512"),
    "data.tracks": Key(known_residues, "{3di: letters.fasta}", ("model.name=saprot_nano",)),
    "data.folds": Key(data, "3", ("data.fold=0",)),
    "data.fold": Key(data, "1", ("data.folds=3", "data.fold=0")),
    "data.clusters": Key(data, "clusters.tsv", ("data.folds=3", "data.fold=0")),
    "data.long": Key(data, "window"),
    "data.max_length": Key(data, "50"),
    "batch.global_tokens": Key(run, "150"),
    "batch.sequences": Key(run, "2", ("batch.global_tokens=16384",)),
    "batch.tokens_per_rank": Key(run, "70"),
    "optim.lr": Key(groups, "1e-5"),
    "optim.head_lr": Key(groups, "1e-5"),
    "optim.betas": Key(groups, "[0.5, 0.6]"),
    "optim.weight_decay": Key(groups, "0.5"),
    "optim.warmup": Key(run, "1.0"),
    "optim.schedule": Key(run, "constant"),
    "optim.clip": Key(run, "1e-6"),
    "train.steps": Key(steps, "3"),
    "train.epochs": Key(steps, "5", ("train.steps=null",)),
    "train.seed": Key(first_weights, "1"),
    "train.eval_every": Key(run, "epoch"),
    "train.early_stop": Key(run, "1", ("optim.lr=1e-9", "optim.head_lr=1e-9", "train.eval_every=1")),
    "parallel.strategy": Key(laid_out, "no_shard"),
    "parallel.group_size": Key(laid_out, "2", ("parallel.strategy=hybrid_shard",)),
    "parallel.tensor": Key(laid_out, "2"),
    "parallel.context": Key(laid_out, "2"),
    "parallel.precision": Key(laid_out, "bf16"),
    "parallel.reduce_dtype": Key(laid_out, "bf16"),
    "parallel.activation_checkpointing": Key(laid_out, "full"),
    "parallel.cpu_offload": Key(laid_out, "true"),
    "parallel.accumulate": Key(laid_out, "unsharded"),
    "parallel.compile": Key(laid_out, "true"),
    "parallel.start_timeout": Key(timeouts, "77"),
    "parallel.step_timeout": Key(timeouts, "77"),
    "checkpoint.every": Key(run, "3"),
    "checkpoint.keep": Key(run, "1", ("checkpoint.every=1",)),
    "checkpoint.keep_best": Key(run, "true"),
    "checkpoint.async_save": Key(run, "true"),
    "track": Key(fed, "[tensorboard]"),
    "out": Key(goes_elsewhere, "elsewhere"),
}


def leaves(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key that is no section."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_key_has_an_entry() -> None:
    of_tasks = {
        f"{task}.{key}" for task, section in registered().settings.items() for key in leaves(section) if key != "name"
    }
    assert KEYS.keys() == {"task.name"} | of_tasks | (set(leaves(Recipe)) - {"task"})


SECTIONS = sorted({key.partition(".")[0] for key in KEYS})


@pytest.mark.parametrize("section", SECTIONS)
def test_keys_change_something(section: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    known: dict[Any, Any] = {}  # what was seen with the base of some entries
    for key, entry in KEYS.items():
        if key.partition(".")[0] != section:
            continue
        written = f"task.{key.partition('.')[2]}" if section in registered().settings else key
        after = load(directory / "recipe.yaml", [*entry.base, f"{written}={entry.value}"])
        if (place := (entry.seen, entry.base)) not in known:
            before = load(directory / "recipe.yaml", entry.base)
            known[place] = entry.seen(before)
            assert known[place] == entry.seen(before), f"{key}: not the same twice"
        assert known[place] != entry.seen(after), f"{key} changes nothing"
