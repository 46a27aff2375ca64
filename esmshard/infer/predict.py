"""What a fine-tuned head says of every record of a FASTA file."""

import tempfile
from pathlib import Path

import torch

from esmshard.batch import pack
from esmshard.data.ingest import ingest
from esmshard.data.loader import Examples
from esmshard.data.store import TokenStore, is_store
from esmshard.errors import UsageError
from esmshard.infer.writers import NpzWriter, check
from esmshard.progress import Progress, say
from esmshard.tasks.finetuner import load_finetuned


def predict(model: str, fasta: Path, out: Path, *, overwrite: bool = False) -> int:
    """Write one array a record to an `.npz` file under the record's id; the number of records.

    For contacts each is float32 [L, L], symmetric probabilities.

    Args:
        model: a directory that `consolidate` wrote.
        fasta: plain or compressed, `-` for the standard input, or a token store.
        out: the file to write, ending in `.npz`.
        overwrite: replace `out`.
    """
    if out.suffix != ".npz":
        raise UsageError(f"{out}: predictions are written as .npz; give the file that ending")
    check(out, overwrite=overwrite)
    with tempfile.TemporaryDirectory(prefix="esmshard-predict-") as scratch:
        store = TokenStore(fasta) if is_store(fasta) else ingest([fasta], Path(scratch) / "store")
        for notice in store.notices:
            say(f"{fasta}: {notice}")
        found = load_finetuned(model)
        examples = Examples("input", fasta, store, None)
        device = next(found.model.parameters()).device
        with NpzWriter(out) as writer, Progress("predict", len(store)) as progress, torch.no_grad():
            for n in range(len(store)):
                # One record at a time: the head works on each alone, and pair maps are what memory goes to.
                output_LL = found.model(pack([examples.get(n).tokens]).to(device))[0]
                writer.add(store.id(n), found.task.predict(output_LL.cpu().numpy()))
                progress.update(n + 1, f"{store.lengths[n]} residues")
        return len(store)
