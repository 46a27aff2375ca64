"""What a fine-tuned head says of every record of a FASTA file."""

import tempfile
from pathlib import Path

from esmshard.data.ingest import ingest
from esmshard.data.loader import Examples
from esmshard.data.store import TokenStore, is_store
from esmshard.errors import UsageError
from esmshard.infer.writers import CsvWriter, NpzWriter, check
from esmshard.progress import Progress, say
from esmshard.tasks.finetuner import load_finetuned
from esmshard.vocab import decode


def predict(model: str, fasta: Path, out: Path, *, overwrite: bool = False) -> int:
    """Write what the head says of each record to an `.npz` or a `.csv` file; the number of records.

    `.npz`: one array a record under its id: for contacts float32 [L, L], symmetric probabilities; for the other tasks
    see their `predict`. `.csv`: a line a protein, or a line a residue; not for contacts.

    Args:
        model: a directory that `consolidate` wrote.
        fasta: plain or compressed, `-` for the standard input, or a token store.
        out: the file to write.
        overwrite: replace `out`.
    """
    if out.suffix not in (".npz", ".csv"):
        raise UsageError(f"{out}: predictions are written as .npz or .csv; give the file that ending")
    check(out, overwrite=overwrite)
    with tempfile.TemporaryDirectory(prefix="esmshard-predict-") as scratch:
        store = TokenStore(fasta) if is_store(fasta) else ingest([fasta], Path(scratch) / "store")
        for notice in store.notices:
            say(f"{fasta}: {notice}")
        found = load_finetuned(model)
        task, examples = found.task, Examples("input", fasta, store, None)
        if out.suffix == ".csv" and not task.names:
            raise UsageError(f"{out}: pair maps do not fit into a table; give the file the ending .npz")
        writer: NpzWriter | CsvWriter = NpzWriter(out)
        if out.suffix == ".csv":
            writer = CsvWriter(out, task.names, per_residue=task.per_residue, choose=task.one_of_names)
        with writer, Progress("predict", len(store)) as progress:
            for n in range(len(store)):
                # One record at a time: the head works on each alone, and pair maps are what memory goes to.
                values = task.predict(found.model.outputs([task.question(examples.get(n))])[0])
                if isinstance(writer, CsvWriter):
                    writer.add(store.id(n), values, decode(store.residues(n)))
                else:
                    writer.add(store.id(n), values)
                progress.update(n + 1, f"{store.lengths[n]} residues")
        return len(store)
