"""Texts that help adds to the declarations of commands: examples, and the greeting."""

from collections.abc import Callable

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
        "esmshard embed runs/mine/model uniref50.store -o emb --dtype fp16 --nproc 8",
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


def examples(command: Callable[..., None]) -> str:
    """Return the end of the help of a command; each example becomes a line."""
    return "\n\n".join(["Examples:", *(f"  {line}" for line in EXAMPLES[command.__name__])])
