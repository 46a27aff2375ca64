"""Measures the speed of the model, fair-esm and `transformers` in one run. `python benchmarks/model.py --help`."""

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import measure
import peers
import torch
from measure import Table
from peers import Variant, flops, in_file_order, protein_lengths, sequences
from random_models import SHORT

from esmshard.model.families.family_registry import SIZES
from esmshard.parallel.layout import Layout
from esmshard.tasks.variants import Pool
from esmshard.vocab import encode

WORK = ("embed", "mlm", "contacts", "fixed", "variants")
FIXED_LENGTH = 286
VARIANTS_EACH = 14
"""The variants of a step: 4,032 tokens."""
CONTACT_LENGTHS = (256, 512, 1000)


class Bench:
    """The variants of every workload on one device. Each is made when it is requested."""

    def __init__(
        self, device: torch.device, count: int, fixed: int = 0, contact_lengths: tuple[int, ...] = CONTACT_LENGTHS
    ) -> None:
        self.device, self.count, self.contact_lengths = device, count, contact_lengths
        self.cuda = device.type == "cuda"
        self.compiled = self.cuda
        """Whether to measure the compiled model, too. On the CPU, compilation gives no speed."""
        self.fixed_turn = fixed or (2000 if self.cuda else 56)
        """The proteins of one length in a turn."""
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.budget = 16384 if self.cuda else 4096
        """The tokens of a batch; 4,096 is fair-esm's default."""

    def embed(self, name: str) -> dict[str, Callable[[], Variant]]:
        """Return the variants that compute mean embeddings of `count` proteins."""
        tokens, device, dtype = sequences(protein_lengths(self.count)), self.device, self.dtype

        def esmshard(compiled: bool = False) -> Variant:
            model = peers.ours(name, device, dtype)
            if compiled:
                model.compile_layers()
            return peers.embed_ours(model, tokens, self.budget, device)

        def fair_esm() -> Variant:
            model = peers.fair_esm(name, device)
            groups = peers.by_length_padded(tokens, self.budget)
            return peers.embed_padded(lambda block: peers.forward_fair_esm(model, block), tokens, groups, device)

        def transformers(groups: list[list[int]]) -> Variant:
            model = peers.transformers(name, device, dtype)
            return peers.embed_padded(lambda block: peers.forward_transformers(model, block), tokens, groups, device)

        def faesm() -> Variant:
            model = peers.faesm(name, device, dtype)
            groups = peers.by_length_padded(tokens, self.budget)
            return peers.embed_padded(lambda block: peers.forward_faesm(model, block), tokens, groups, device)

        found: dict[str, Callable[[], Variant]] = {"esmshard": esmshard}
        if self.compiled:
            found["esmshard, compiled"] = lambda: esmshard(compiled=True)
        if self.cuda:
            if find_spec("faesm"):
                found["FAESM, sorted"] = faesm
        else:  # fair-esm's rotary embedding does not work in bf16
            found["fair-esm, extract.py"] = fair_esm
        found["transformers SDPA, sorted"] = lambda: transformers(peers.by_length_padded(tokens, self.budget))
        found["transformers SDPA, file order"] = lambda: transformers(in_file_order(tokens))
        return found

    def mlm(self, name: str) -> dict[str, Callable[[], Variant]]:
        """Return the variants that train once on `count` proteins, with an AdamW step for each batch."""
        tokens, device = sequences(protein_lengths(self.count)), self.device

        def esmshard(*, checkpointing: bool = False, compiled: bool = False) -> Variant:
            how = Layout(
                precision="bf16" if self.cuda else "fp32",
                activation_checkpointing="full" if checkpointing else "none",
                compile=compiled,
            )
            return peers.train_ours(peers.ours(name, device, torch.float32), tokens, self.budget, device, how)

        def transformers(groups: list[list[int]]) -> Variant:
            model = peers.transformers(name, device, torch.float32)
            return peers.train_transformers(model, tokens, groups, device, autocast=self.cuda)

        found: dict[str, Callable[[], Variant]] = {"esmshard": esmshard}
        found["esmshard, checkpointing"] = lambda: esmshard(checkpointing=True)
        if self.compiled:
            found["esmshard, compiled"] = lambda: esmshard(compiled=True)
        found["transformers SDPA, sorted"] = lambda: transformers(peers.by_length_padded(tokens, self.budget))
        found["transformers SDPA, shuffled"] = lambda: transformers(in_file_order(tokens))
        return found

    def contacts(self, name: str, length: int) -> dict[str, Callable[[], Variant]]:
        """Return the variants that compute the contact map of one protein."""
        tokens = sequences([length])[0]
        return {
            "esmshard": lambda: peers.contacts_ours(peers.ours(name, self.device, self.dtype), tokens, self.device),
            "fair-esm": lambda: peers.contacts_fair_esm(peers.fair_esm(name, self.device), tokens, self.device),
        }

    def fixed(self, name: str) -> dict[str, Callable[[], Variant]]:
        """Return the variants that compute mean embeddings of proteins of one length, which need no padding."""
        tokens, device, dtype = sequences([FIXED_LENGTH] * self.fixed_turn), self.device, self.dtype

        def transformers() -> Variant:
            model, groups = peers.transformers(name, device, dtype), peers.by_length_padded(tokens, self.budget)
            return peers.embed_padded(lambda block: peers.forward_transformers(model, block), tokens, groups, device)

        return {
            "esmshard": lambda: peers.embed_ours(peers.ours(name, device, dtype), tokens, self.budget, device),
            "transformers SDPA": transformers,
        }

    def variants(self, name: str) -> dict[str, Callable[[], Variant]]:
        """Return the variants that train on variants of one protein, with an AdamW step for VARIANTS_EACH of them."""
        device, wild_type = self.device, sequences([FIXED_LENGTH])[0]
        tokens = []
        for n in range(2 * VARIANTS_EACH):
            variant = wild_type.copy()
            variant[1 + n * 9] = encode("W" if wild_type[1 + n * 9] != encode("W")[1] else "A")[1]
            tokens.append(variant)

        def esmshard(pool: Pool) -> Variant:
            model = peers.ours(name, device, torch.float32)
            return peers.train_variants_ours(model, tokens, wild_type, VARIANTS_EACH, device, pool)

        def transformers() -> Variant:
            model = peers.transformers(name, device, torch.float32)
            return peers.train_variants_transformers(model, tokens, VARIANTS_EACH, device)

        return {
            "esmshard, mean": lambda: esmshard("mean"),
            "esmshard, sites": lambda: esmshard("sites"),
            "esmshard, wild_type": lambda: esmshard("wild_type"),
            "transformers SDPA, mean": transformers,
        }


def tables_of(bench: Bench, work: str, name: str, model: str, rounds: int) -> list[Table]:
    """Measure one workload of one model, which is a key of SIZES with its title."""
    config = SIZES[name]
    if work == "contacts":
        tables = []
        for length in bench.contact_lengths:
            table = Table(f"contact map, {model}, L = {length}", length, *flops(config, [length]), rows=[])
            outputs = measure.take_turns(table, bench.contacts(name, length), rounds, bench.device, bench.dtype)
            table.notes.append(f"Largest difference from ours: {_worst(outputs):.0e}.")
            tables.append(table)
        return tables
    if work == "fixed":
        turns = rounds if bench.cuda else -(-2000 // bench.fixed_turn) if bench.fixed_turn == 56 else 1
        lengths = [FIXED_LENGTH] * bench.fixed_turn
        table = Table(f"embed, {model}, proteins of {FIXED_LENGTH}", sum(lengths), *flops(config, lengths), rows=[])
        outputs = measure.take_turns(table, bench.fixed(name), turns, bench.device, bench.dtype)
        table.notes.append(f"{bench.fixed_turn:,} proteins a turn, {turns} turns.")
    elif work == "variants":
        lengths = [FIXED_LENGTH] * (2 * VARIANTS_EACH)
        gemm, attention = flops(config, lengths)
        table = Table(f"variants, {model}, 286 residues", sum(lengths), 3 * gemm, 3 * attention, rows=[])
        outputs = measure.take_turns(table, bench.variants(name), rounds, bench.device, torch.float32)
        same = abs(sum(outputs[0]) - sum(outputs[-1])) / abs(sum(outputs[-1]))
        table.notes.append(f"{len(lengths)} variants a turn; an epoch of 2,000 is {2000 / len(lengths):.0f} turns.")
        table.notes.append(f"Relative difference of the losses of pool `mean` and `transformers`: {same:.0e}.")
        table.notes.append(
            "`wild_type` sends the protein through the model once a step, in place of 14 variants, whose arithmetic "
            "its share of the matrix product counts all the same."
        )
        return [table]
    elif work == "embed":
        lengths = protein_lengths(bench.count)
        title = f"embed, {model}, {bench.count} proteins"
        table = Table(title, sum(lengths), *flops(config, lengths), rows=[])
        outputs = measure.take_turns(table, bench.embed(name), rounds, bench.device, bench.dtype)
    else:
        lengths = protein_lengths(bench.count)
        gemm, attention = flops(config, lengths)
        title = f"MLM training, {model}, {bench.count} proteins"
        table = Table(title, sum(lengths), 3 * gemm, 3 * attention, rows=[])
        # Five copies of a large model with its optimizer do not fit on a GPU. The clock of a GPU is steady.
        outputs = measure.take_turns(table, bench.mlm(name), rounds, bench.device, bench.dtype, together=not bench.cuda)
        outputs = [torch.tensor(sum(losses)) for losses in outputs]
        outputs = [loss / outputs[0] for loss in outputs]
    table.notes.append(f"Largest difference from ours{', relative' if work == 'mlm' else ''}: {_worst(outputs):.0e}.")
    return [table]


def _worst(outputs: list[torch.Tensor]) -> float:
    return max(float((outputs[0].double() - other.double()).abs().max()) for other in outputs[1:])


def peak(bench: Bench, work: str, model: str, variant: str, length: int) -> int:
    """Return the peak memory of one variant in this process. A small first call lets libraries finish their loading."""
    name = SHORT[model]

    def prepare() -> Variant:
        if work == "contacts":
            return bench.contacts(name, length)[variant]()
        return getattr(bench, work)(name)[variant]()

    return measure.peak_above(prepare)


def main() -> None:
    """Parse, measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--models", nargs="+", choices=SHORT, help="8M 35M on the CPU, 150M 650M 3B on a GPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5, help="number of turns of each workload")
    parser.add_argument("--count", type=int, help="number of proteins; 100 on the CPU, 2000 on a GPU")
    parser.add_argument(
        "--no-memory", action="store_true", help="leave out the memory peaks, each of which needs a process"
    )
    parser.add_argument("--out", type=Path, default=measure.RESULTS)
    parser.add_argument("--peak", nargs=2, metavar=("VARIANT", "LENGTH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device(args.device)
    bench = Bench(device, args.count or (2000 if device.type == "cuda" else 100))
    models = args.models or (["150M", "650M", "3B"] if device.type == "cuda" else ["8M", "35M"])
    if args.peak:
        print(peak(bench, args.work[0], models[0], args.peak[0], int(args.peak[1])))
        return
    tables: list[Table] = []
    for model in models:
        for work in args.work:
            if work == "mlm" and device.type == "cpu" and model != "8M":
                continue
            for k, table in enumerate(tables_of(bench, work, SHORT[model], model, args.rounds)):
                for row in table.rows:
                    if args.no_memory or bench.cuda or work in ("fixed", "variants"):
                        break
                    own = ["--work", work, "--models", model, "--device", args.device, "--count", str(bench.count)]
                    row.memory_bytes = measure.memory_in_own_process(
                        [*own, "--peak", row.name, str(CONTACT_LENGTHS[k])]
                    )
                tables.append(table)
                print(measure.markdown([table], measure.facts(device), ""), file=sys.stderr)
    parts = [*models, *(args.work if args.work != list(WORK) else ())]
    measure.store(tables, measure.facts(device), "-".join(["model", args.device, *parts]), args.out)


if __name__ == "__main__":
    main()
