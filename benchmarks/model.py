"""Measures the speed of the model, fair-esm and `transformers` in one run. `python benchmarks/model.py --help`."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

import measure
import peers
import torch
from measure import Table
from peers import Variant, flops, in_file_order, protein_lengths, sequences
from random_models import CONFIGS, SHORT

from esmshard.parallel.layout import Layout

WORK = ("embed", "mlm", "contacts", "fixed")
FIXED_LENGTH = 286
CONTACT_LENGTHS = (256, 512, 1000)
Variants = dict[str, Callable[[], Variant]]


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
        """The tokens of a batch; 4,096 is the default of fair-esm."""

    def padded(self, made: object, forward: Callable[..., torch.Tensor], tokens: list, groups: list) -> Variant:
        """Return the variant that embeds in padded batches with the model of a peer."""
        return peers.embed_padded(lambda block: forward(made, block), tokens, groups, self.device)

    def embed(self, name: str) -> Variants:
        """Return the variants that compute mean embeddings of `count` proteins."""
        tokens, device, dtype = sequences(protein_lengths(self.count)), self.device, self.dtype
        by_length = peers.by_length_padded(tokens, self.budget)

        def esmshard(compiled: bool = False) -> Variant:
            model = peers.ours(name, device, dtype)
            if compiled:
                model.compile_layers()
            return peers.embed_ours(model, tokens, self.budget, device)

        def transformers(groups: list[list[int]]) -> Variant:
            return self.padded(peers.transformers(name, device, dtype), peers.forward_transformers, tokens, groups)

        def fair_esm() -> Variant:
            return self.padded(peers.fair_esm(name, device), peers.forward_fair_esm, tokens, by_length)

        def faesm() -> Variant:
            return self.padded(peers.faesm(name, device, dtype), peers.forward_faesm, tokens, by_length)

        variants: Variants = {"esmshard": esmshard}
        if self.compiled:
            variants["esmshard, compiled"] = lambda: esmshard(compiled=True)
        if self.cuda and find_spec("faesm"):
            variants["FAESM, sorted"] = faesm
        if not self.cuda and CONFIGS[name].family == "esm2":  # fair-esm's rotary embedding does not work in bf16
            variants["fair-esm, extract.py"] = fair_esm
        variants["transformers SDPA, sorted"] = lambda: transformers(by_length)
        variants["transformers SDPA, file order"] = lambda: transformers(in_file_order(tokens))
        return variants

    def mlm(self, name: str) -> Variants:
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

        variants: Variants = {"esmshard": esmshard, "esmshard, checkpointing": lambda: esmshard(checkpointing=True)}
        if self.compiled:
            variants["esmshard, compiled"] = lambda: esmshard(compiled=True)
        variants["transformers SDPA, sorted"] = lambda: transformers(peers.by_length_padded(tokens, self.budget))
        variants["transformers SDPA, shuffled"] = lambda: transformers(in_file_order(tokens))
        return variants

    def contacts(self, name: str, length: int) -> Variants:
        """Return the variants that compute the contact map of one protein."""
        tokens = sequences([length])[0]
        return {
            "esmshard": lambda: peers.contacts_ours(peers.ours(name, self.device, self.dtype), tokens, self.device),
            "fair-esm": lambda: peers.contacts_fair_esm(peers.fair_esm(name, self.device), tokens, self.device),
        }

    def fixed(self, name: str) -> Variants:
        """Return the variants that compute mean embeddings of proteins of one length, which need no padding."""
        tokens, device, dtype = sequences([FIXED_LENGTH] * self.fixed_turn), self.device, self.dtype

        def transformers() -> Variant:
            groups = peers.by_length_padded(tokens, self.budget)
            return self.padded(peers.transformers(name, device, dtype), peers.forward_transformers, tokens, groups)

        return {
            "esmshard": lambda: peers.embed_ours(peers.ours(name, device, dtype), tokens, self.budget, device),
            "transformers SDPA": transformers,
        }


def tables_of(bench: Bench, work: str, name: str, model: str, rounds: int) -> list[Table]:
    """Measure one workload of one model, which is a key of CONFIGS with its title."""
    config, device, dtype = CONFIGS[name], bench.device, bench.dtype
    if work == "contacts":
        tables = []
        for length in bench.contact_lengths:
            table = Table(f"contact map, {model}, L = {length}", length, *flops(config, [length]))
            outputs = measure.take_turns(table, bench.contacts(name, length), rounds, device, dtype)
            tables.append(_noted(table, outputs))
        return tables
    if work == "fixed":
        turns = rounds if bench.cuda else min(8 * rounds, -(-2000 // bench.fixed_turn))
        lengths = [FIXED_LENGTH] * bench.fixed_turn
        table = Table(f"embed, {model}, proteins of {FIXED_LENGTH}", sum(lengths), *flops(config, lengths))
        outputs = measure.take_turns(table, bench.fixed(name), turns, device, dtype)
        table.notes.append(f"{bench.fixed_turn:,} proteins a turn, {turns} turns.")
        return [_noted(table, outputs)]
    lengths = protein_lengths(bench.count)
    gemm, attention = flops(config, lengths)
    if work == "embed":
        table = Table(f"embed, {model}, {bench.count} proteins", sum(lengths), gemm, attention)
        return [_noted(table, measure.take_turns(table, bench.embed(name), rounds, device, dtype))]
    table = Table(f"MLM training, {model}, {bench.count} proteins", sum(lengths), 3 * gemm, 3 * attention)
    # Five copies of a large model with its optimizer do not fit on a GPU. The clock of a GPU is steady.
    outputs = measure.take_turns(table, bench.mlm(name), rounds, device, dtype, together=not bench.cuda)
    losses = [torch.tensor(sum(each)) for each in outputs]
    return [_noted(table, [loss / losses[0] for loss in losses], ", relative")]


def _noted(table: Table, outputs: list[torch.Tensor], how: str = "") -> Table:
    worst = max(float((outputs[0].double() - other.double()).abs().max()) for other in outputs[1:])
    table.notes.append(f"Largest difference from ours{how}: {worst:.0e}.")
    return table


def main() -> None:
    """Parse, measure, print, and store."""
    parser = measure.parser(__doc__)
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--models", nargs="+", choices=SHORT, help="8M 35M on the CPU, 150M 650M 3B on a GPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, help="number of proteins; 100 on the CPU, 2000 on a GPU")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peaks, each of which needs a process")
    parser.add_argument("--cpu-seconds", action="store_true", help="count the seconds of the processor")
    args = parser.parse_args()
    device = torch.device(args.device)
    bench = Bench(device, args.count or (2000 if device.type == "cuda" else 100))
    if args.rank:  # the process that measures the memory of one variant
        work, name, variant, length = args.rank
        more = [length] if work == "contacts" else []
        print(json.dumps(measure.peak_above(getattr(bench, work)(name, *more)[variant])))
        return
    measure.CPU_SECONDS = args.cpu_seconds
    models = args.models or (["150M", "650M", "3B"] if device.type == "cuda" else ["8M", "35M"])
    tables: list[Table] = []
    for model in models:
        for work in args.work:
            if work == "mlm" and device.type == "cpu" and model not in ("8M", "ESM-C-6", "nano"):
                continue
            for k, table in enumerate(tables_of(bench, work, SHORT[model], model, args.rounds)):
                for row in table.rows if not (args.no_memory or bench.cuda or work == "fixed") else []:
                    one = json.dumps([work, SHORT[model], row.name, CONTACT_LENGTHS[k]])
                    command = [sys.executable, __file__, "--device", args.device, "--count", str(bench.count)]
                    done = subprocess.run([*command, "--rank", one], check=True, capture_output=True, text=True)
                    row.memory_bytes = int(done.stdout.split()[-1])
                tables.append(table)
    sheet = measure.half_flops(measure.facts(device))
    parts = [*models, *(args.work if args.work != list(WORK) else ())]
    lines = [line for table in tables for line in measure.speeds(table, sheet)]
    measure.store("-".join(["model", args.device, *parts]), lines, tables, args.out, device)


if __name__ == "__main__":
    main()
