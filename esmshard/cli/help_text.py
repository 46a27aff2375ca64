"""Texts that help adds to the declarations of commands: examples, the groups of options, and the greeting."""

import inspect
import typing
from collections.abc import Callable, Iterator

import typer.models

WELCOME = """\
esmshard fine-tunes protein language models on your own proteins. Five things to do with it:

  Learn contacts from structures     esmshard finetune contact
  Learn from measured variants       esmshard finetune variants data.table=my.csv data.wild_type=wt.fasta out=runs/mine
  Predict with what was learned      esmshard predict runs/mine --propose 24 -o next.csv
  Embed any number of sequences      esmshard embed starter my.fasta -o my.h5
  See what fits on which GPUs        esmshard plan contact model.name=esm2_t36_3B_UR50D --gpus 8xA100-40GB

The first and the last need no data of yours. All commands: esmshard --help. Examples of one: esmshard embed --help.
"""
"""What `esmshard` alone prints."""

EXAMPLES = {
    "finetune": (
        "esmshard finetune contact --nproc 2",
        "esmshard finetune my.yaml optim.lr=1e-4 out=runs/mine --resume auto",
    ),
    "plan": (
        "esmshard plan my.yaml --gpus 8xA100-40GB",
        "esmshard plan contact model.name=esm2_t36_3B_UR50D --gpus 2xMine --memory 24",
    ),
    "status": ("esmshard status runs/mine", "esmshard status runs/mine --json"),
    "report": ("esmshard report runs/mine", "esmshard report runs/mine -o mine.html"),
    "embed": (
        "esmshard embed starter my.fasta -o my.npy",
        "esmshard embed runs/mine/model uniref50.store -o emb --dtype fp16 --nproc 8 --resume",
    ),
    "predict": (
        "esmshard predict runs/contact/model my.fasta -o my.npz --png maps",
        "esmshard predict runs/variants --propose 24 -o next.csv",
    ),
    "score": (
        "esmshard score starter wt.fasta variants.csv -o scores.csv",
        "esmshard score starter my.fasta -o naturalness.csv --method both",
    ),
    "evaluate": (
        "esmshard evaluate runs/contact/model sample:contact/test -o scores",
        "esmshard evaluate runs/mine/model test.fasta --labels test.csv -o scores",
    ),
    "ingest": (
        "esmshard ingest uniref50.fasta.gz -o uniref50.store --workers 8",
        "esmshard ingest a.fasta b.fasta -o both.store --on-duplicate first",
    ),
    "split": (
        "esmshard split all.fasta -o data --by cluster --clusters clusters.tsv",
        "esmshard split variants.csv -o folds --by position --wild-type wt.fasta --folds 5",
    ),
    "track": (
        "esmshard track structure_tokens structures --weights encoder.pth -o tokens.npz",
        "esmshard embed esm3_sm_open_v1 my.fasta --track structure_tokens=tokens.npz -o my.h5",
    ),
    "consolidate": (
        "esmshard consolidate runs/mine -o exported",
        "esmshard consolidate runs/mine -o esm2_mine --to fair-esm",
    ),
    "download": (
        "esmshard download esm2_t33_650M_UR50D",
        "esmshard download esm2_t33_650M_UR50D --to weights",
    ),
    "push": (
        "esmshard push runs/mine/model me/my-model",
        "esmshard push runs/mine/model me/my-model --private",
    ),
    "launch": (
        "esmshard launch my.yaml --target slurm --nodes 2 --gpus-per-node 4 --dry-run",
        "esmshard launch embed --target slurm --array 16 -- runs/mine/model uniref50.store -o emb",
    ),
    "doctor": ("esmshard doctor", "esmshard doctor my.yaml --nproc 8"),
}
"""Two examples of each command, which stand at the end of its help."""

GROUPS = {
    "Where the result goes": {"--out", "--format", "--dtype", "--png", "--report", "--overwrite"},
    "How fast": {
        *(
            "--device",
            "--precision",
            "--tokens",
            "--nproc",
            "--workers",
            "--offload",
            "--shard",
            "--tensor",
            "--reuse",
            "--profile",
        ),
    },
    "On many machines, and after a stop": {"--resume", "--stop-after", "--max-restarts", "--part", "--merge"},
}
"""The options that stand in a group of their own. All others say what is computed."""
MANY = 10
"""The number of options from which on a command has groups."""


def examples(command: Callable[..., None]) -> str:
    """Return the end of the help of a command; each example becomes a line."""
    return "\n\n".join(["Examples:", *(f"  {line}" for line in EXAMPLES[command.__name__])])


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Give the options of a command that has many of them their groups in its help."""
    options = [*_options(command)]
    if len(options) >= MANY:
        for option, names in options:
            option.rich_help_panel = next((group for group, members in GROUPS.items() if members & names), None)
    return command


def _options(command: Callable[..., None]) -> Iterator[tuple[typer.models.OptionInfo, set[str]]]:
    """Yield the declaration and the names of each option."""
    for name, parameter in inspect.signature(command).parameters.items():
        for part in typing.get_args(parameter.annotation):
            if isinstance(part, typer.models.OptionInfo):
                # Until typer has read the function, `default` holds the first name that was declared.
                yield part, {f"--{name.replace('_', '-')}", str(part.default), *(part.param_decls or ())}
