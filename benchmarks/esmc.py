"""Measures ESM-C beside `transformers`, in CPU seconds: embeddings, and a training step. `benchmarks/esmc.py --help`.

Six layers of the shape of ESM-C 300M have the same work in each layer as the whole model, in a fifth of the time.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import measure
import peers
import torch
from peers import Variant

from esmshard.model import weights
from esmshard.model.families.esmc import FAMILY, EsmcConfig
from esmshard.model.trunk import Trunk
from esmshard.parallel.layout import Layout

CPU = torch.device("cpu")
CONFIG = EsmcConfig(n_layers=6, dim=960, n_heads=15)
THEIRS = "transformers SDPA, sorted"


def ours() -> Trunk:
    """Make the model with random weights, in evaluation mode."""
    return weights.build(weights.fresh(CONFIG, 0), CPU).eval()


def transformers() -> Any:
    """Make `EsmcForMaskedLM` with the same weights, in evaluation mode."""
    from transformers import EsmcConfig as TheirConfig
    from transformers import EsmcForMaskedLM

    model = EsmcForMaskedLM(TheirConfig(**FAMILY.write_config(CONFIG), attn_implementation="sdpa"))
    found = weights.fresh(CONFIG, 0)
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            for piece in FAMILY.pieces(key, CONFIG)[:1]:
                tensor.copy_(found[piece.name])
    return model.eval()


def embedding(tokens: Sequence[peers.Tokens], budget: int) -> dict[str, Variant]:
    """Return the variants that compute mean embeddings of all proteins."""
    theirs = transformers()

    def forward(block: torch.Tensor) -> torch.Tensor:
        mask = (block != peers.PAD).long()  # Without it, this class attends to padding.
        return theirs.esmc(input_ids=block, attention_mask=mask).last_hidden_state

    groups = peers.by_length_padded(tokens, budget)
    return {
        "esmshard": peers.embed_ours(ours(), tokens, budget, CPU),
        THEIRS: peers.embed_padded(forward, tokens, groups, CPU),
    }


def training(tokens: Sequence[peers.Tokens], budget: int) -> dict[str, Variant]:
    """Return the variants that train one step on the proteins of the middle one of the batches sorted by length."""
    groups = peers.by_length_padded(tokens, budget)
    batch = [tokens[n] for n in groups[len(groups) // 2]]
    layout = Layout(precision="fp32")
    return {
        "esmshard": peers.train_ours(ours(), batch, budget, CPU, layout),
        THEIRS: peers.train_transformers(transformers(), batch, [range(len(batch))], CPU),
    }


def take_turns(variants: Mapping[str, Variant], rounds: int) -> tuple[dict[str, list[float]], float]:
    """Run each variant once to warm up, then all in turns.

    Returns:
        The CPU seconds of each run of each variant; and the largest difference of the results of the warm-up runs,
        relative to the largest number.
    """
    mine, theirs = (torch.as_tensor(run()).double() for run in variants.values())
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            gc.collect()
            began = time.process_time()
            run()
            seconds[name].append(time.process_time() - began)
    return seconds, float((mine - theirs).abs().max() / theirs.abs().max())


def main() -> None:
    """Parse, measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs="+", choices=("embed", "train"), default=["embed", "train"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=100, help="number of proteins; the step has those of one batch")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a batch, with padding if there is any")
    parser.add_argument("--out", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    tokens = peers.sequences(peers.protein_lengths(args.count))
    about = measure.facts(CPU)
    lines = [
        "| work | CPU seconds, esmshard | CPU seconds, transformers | ratio, median [min, max] |",
        "|---|---|---|---|",
    ]
    raw: dict[str, Any] = {}
    for work in args.work:
        seconds, off = take_turns({"embed": embedding, "train": training}[work](tokens, args.budget), args.rounds)
        mine, theirs = seconds.values()
        ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
        cells = [f"{statistics.median(one):.2f}" for one in (mine, theirs, ratios)]
        lines.append(f"| {work} | {cells[0]} | {cells[1]} | {cells[2]} [{min(ratios):.2f}, {max(ratios):.2f}] |")
        raw[work] = {"seconds": seconds, "relative_difference": off}
        print(f"{work}: largest relative difference of the results {off:.0e}", file=sys.stderr)
    command = " ".join(["python benchmarks/esmc.py", *sys.argv[1:]])
    text = "\n".join([f"`{command}`", "", ", ".join(f"{key} {value}" for key, value in about.items()), "", *lines, ""])
    print(text)
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"{about['date']}-{'-'.join(['esmc-cpu', *args.work])}"
    stem.with_suffix(".md").write_text(f"# ESM-C, {about['date']}\n\n{text}", encoding="utf-8")
    stem.with_suffix(".json").write_text(
        json.dumps({"command": command, "about": about, "work": raw}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
