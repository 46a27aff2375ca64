"""Stage `speed`: embedding, training and contact maps beside `transformers` (and fair-esm), in one run each."""

import functools
import statistics
from dataclasses import asdict

import measure
import model

from esmshard.model.families.family_registry import SIZES, n_parameters
from gpu_stages.stage import Context, Figure, Found, Part, Stage

ROUNDS = 3

# The proteins of a turn: esmshard needs about three seconds on an H200, except for the smallest model.
COUNTS = {"8M": 8000, "150M": 4000, "650M": 1600, "3B": 400}
TARGETS = {("650M", "embed"): 0.50, ("650M", "mlm"): 0.45, ("3B", "mlm"): 0.45}
"""The target of the model FLOPs utilisation, as a share of the measured matrix product."""


def _measured(context: Context, short: str, work: str) -> Found:
    """Return the tables of one workload of one model, and their summary."""
    count = context.amount(COUNTS[short] // (3 if work == "mlm" else 1), 4)
    lengths = (24,) if context.rehearsal else (512, 1000)
    bench = model.Bench(context.device, count, fixed=context.amount(2000, 2), contact_lengths=lengths)
    bench.compiled = True
    tables = model.tables_of(bench, work, context.model(short), short, context.amount(ROUNDS, 1))
    sheet = measure.half_flops(measure.facts(context.device))
    figures: dict[str, Figure] = {}
    for table in tables:
        figures |= _figures(table, TARGETS.get((short, work)), sheet)
    text = "\n".join(line for table in tables for line in measure.speeds(table, sheet))
    return Found(text, figures, [asdict(table) for table in tables])


def _figures(table: measure.Table, target: float | None, sheet: float | None) -> dict[str, Figure]:
    """Return speed, utilisation and memory of esmshard, and the ratios of the others."""
    ours, contacts = table.rows[0], "contact map" in table.title
    figures: dict[str, Figure] = {}
    for row in table.rows:
        who, ratio = row.name, statistics.median(table.ratios(row))
        if not who.startswith("esmshard"):
            least = 3.0 if "file order" in who or "shuffled" in who else 1.3 if "sorted" in who else None
            figures[f"{table.title}: time of {who} / ours"] = Figure(ratio, "x", least=least)
            if row.memory_bytes and ours.memory_bytes:
                memory = row.memory_bytes / ours.memory_bytes
                figures[f"{table.title}: memory of {who} / ours"] = Figure(memory, "x")
            continue
        speed = table.residues / statistics.median(row.seconds)
        figures[f"{table.title}: {who}"] = Figure(speed, "residues/s")
        if contacts:
            continue
        share = table.share(row)
        figures[f"{table.title}: {who}, share of the matrix product"] = Figure(
            share, "%", least=target if row is ours else None
        )
        if sheet:
            figures[f"{table.title}: {who}, MFU of the data sheet"] = Figure(share * table.speed() / sheet, "%")
        if row.memory_bytes:
            figures[f"{table.title}: {who}, peak above the model"] = Figure(row.memory_bytes / 2**30, "GiB")
    return figures


def _part(short: str, work: str, words: str, seconds: float) -> Part:
    parameters = n_parameters(SIZES[model.SHORT[short]])
    # Embedding has four copies in half precision; training has one in fp32 with gradients and both moments.
    memory = parameters * (16 if work == "mlm" else 10) + 8 * 2**30
    run = functools.partial(_measured, short=short, work=work)
    return Part(f"{words}, {short}", seconds, run, memory=memory, when="always" if short == "650M" else "gpu")


STAGE = Stage(
    "speed",
    "embedding, training and contact maps beside transformers and fair-esm, compiled and not",
    (
        _part("650M", "embed", "embedding", 60),
        _part("650M", "mlm", "masked-language-model training", 90),
        _part("3B", "mlm", "masked-language-model training", 100),
        _part("3B", "embed", "embedding", 70),
        _part("650M", "fixed", "embedding of one length", 30),
        _part("650M", "contacts", "contact maps", 25),
        _part("150M", "embed", "embedding", 35),
        _part("150M", "mlm", "masked-language-model training", 50),
        _part("8M", "embed", "embedding", 30),
        _part("8M", "mlm", "masked-language-model training", 40),
    ),
)
