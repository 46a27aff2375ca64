"""Measures a training step of the head `likelihood`, beside one forward and backward pass of the wild type."""

import tempfile
from pathlib import Path

import measure
import peers
import torch
import torch.nn.functional as F
from peers import CPU, Variant

from esmshard.batch import pack
from esmshard.data.splits.variant_records import open_variants
from esmshard.model.finetuner import FineTuner
from esmshard.parallel.layout import Layout
from esmshard.parallel.process_group import World
from esmshard.recipe.sections import AdaptSettings, DataSettings, OptimSettings
from esmshard.tasks.base import collate
from esmshard.tasks.variants import VariantSettings, VariantTask
from esmshard.train.optim import adamw
from esmshard.train.step import train_step
from esmshard.vocab import decode

MODEL, LENGTH, VARIANTS = "esm2_t6_8M_UR50D", 300, 384


def step(wild_type: str, directory: Path, *freeze: str) -> Variant:
    """Return the step of the training loop, with reading and collating of the variants, clipping and AdamW. `freeze`
    are the entries of `adapt.freeze`.
    """
    changes = [(n, letter) for n in range(LENGTH) for letter in "AC" if letter != wild_type[n]]
    sets = ["train"] * VARIANTS + ["valid", "test"]
    rows = [
        f"{wild_type[n]}{n + 1}{letter},{n * 7 % 97},{name}" for (n, letter), name in zip(changes, sets, strict=False)
    ]
    (directory / "v.csv").write_text("\n".join(["mutant,y,set", *rows]))
    (directory / "wt.fasta").write_text(f">wt\n{wild_type}\n")
    settings = VariantSettings(name="variant", head="likelihood")
    paths = {"table": str(directory / "v.csv"), "wild_type": str(directory / "wt.fasta")}
    data = open_variants(settings.suit(DataSettings(**paths, split="given", long="full")), "train", alone=True)
    task = VariantTask(settings, {}).learn(data)
    trunk = peers.ours(MODEL, CPU, torch.float32)
    model = FineTuner(trunk, task.head(trunk.config))
    model.adapt(AdaptSettings(freeze=freeze), 0)
    optimizer = adamw(model, OptimSettings())  # its learning rate is 0 until the loop sets it

    def run() -> float:
        batch, targets = collate(task, [data.get(n, 0) for n in range(VARIANTS)])
        world = World(0, 1, CPU, None)
        return train_step(model, task, optimizer, [(batch, targets, False)], 1.0, world, Layout()).loss

    return run


def forward_and_backward(wild_type: str) -> Variant:
    """Return a forward pass with the logits of all residues, cross entropy and a backward pass."""
    trunk, tokens = peers.ours(MODEL, CPU, torch.float32), peers.sequences([LENGTH])[0]
    assert decode(tokens[1:-1]) == wild_type
    batch, at_P = pack([tokens]), torch.arange(1, LENGTH + 1)

    def run() -> float:
        trunk.zero_grad(set_to_none=True)
        logits_PV = trunk(batch, layers=(), logits_at=at_P).logits_PV
        loss = F.cross_entropy(logits_PV.float(), batch.tokens_T[at_P])
        loss.backward()
        return loss.item()

    return run


def main() -> None:
    """Parse, measure, print, and store."""
    parser = measure.parser(__doc__, rounds=15)
    parser.add_argument("--cpu-seconds", action="store_true", help="count the seconds of the processor")
    args = parser.parse_args()
    measure.CPU_SECONDS = args.cpu_seconds
    wild_type = decode(peers.sequences([LENGTH])[0][1:-1])
    gemm, attention = peers.flops(peers.CONFIGS[MODEL], [LENGTH])
    table = measure.Table(
        f"training step, 8M, {VARIANTS} variants of {LENGTH} residues", LENGTH, 3 * gemm, 3 * attention
    )
    with tempfile.TemporaryDirectory() as directory:
        variants = {
            "head likelihood": lambda: step(wild_type, Path(directory)),
            "head likelihood, freeze [layers.0-4]": lambda: step(wild_type, Path(directory), "layers.0-4"),
            "wild type, forward and backward": lambda: forward_and_backward(wild_type),
        }
        measure.take_turns(table, variants, args.rounds, CPU, torch.float32)
    for row in table.rows[:-1]:
        ratio = measure.spread(measure.over(row.seconds, table.rows[-1].seconds))
        table.notes.append(f"{row.name}: {ratio} times the time of the wild type, forward and backward.")
    measure.store("likelihood-cpu-8M", measure.speeds(table), table, args.out)


if __name__ == "__main__":
    main()
