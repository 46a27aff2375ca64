"""Compares methods that rank variants of one protein by the number of measured variants, on random draws.

    few_labels.py --table data/variants/landscape.csv --wild-type data/variants/wild_type.fasta --model starter

Each draw takes n variants for training, at most TESTED others for the test, and prints mean and standard error of
Spearman over the draws. `chosen` is the method that `esmshard.train.cross_validation.choose` takes after five folds of
the n variants. Differences to the best baseline are paired: the same draws.
"""

import argparse
import datetime
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from measure import RESULTS
from safetensors.torch import load_file
from scipy.stats import spearmanr

from esmshard.data.batching.loader import Example, Examples
from esmshard.data.splits.variant_records import VariantRecords
from esmshard.data.variants import read_variants
from esmshard.model import weights
from esmshard.model.finetuner import FineTuner
from esmshard.parallel.layout import Layout
from esmshard.recipe import recipe_file
from esmshard.tasks.base import collate
from esmshard.tasks.metrics import PREDICTIVE, coverage, variant_units
from esmshard.tasks.variants import VariantSettings, VariantTask, fit_scale
from esmshard.train.cross_validation import HEADS, choose
from esmshard.train.evaluate import ALONE
from esmshard.train.optim import adamw, schedule, set_learning_rate
from esmshard.train.step import train_step
from esmshard.vocab import LINKER

TESTED, FOLDS = 600, 5
GP, LIKELIHOOD = HEADS["gp"], HEADS["likelihood"]
BASELINES = ("zero-shot", "one-hot ridge", "one-hot + zero-shot ridge", "frozen embedding ridge")
Predicted = dict[str, np.ndarray]


class Laboratory:
    """The variants of one table, and a frozen model."""

    def __init__(self, table: Path, wild_type: Path, model: str, lm_head: Path | None) -> None:
        read = read_variants(table, wild_type=wild_type, unusable="drop", replicates="mean")
        kept = [n for n, variant in enumerate(read.mutations) if variant]
        self.mutations = [read.mutations[n] for n in kept]
        self.y_N, self.protein = read.target_NT[kept, 0].astype(np.float64), read.wild_type
        records = VariantRecords(table, read.wild_types, self.mutations)
        self.examples = Examples("input", table, records, None)
        self.opened = weights.read(model)
        self.lm_head = None if lm_head is None else load_file(lm_head)
        self.base = FineTuner(self.trunk(), torch.nn.Identity()).eval()

    def trunk(self) -> torch.nn.Module:
        """Return a new copy of the language model."""
        trunk = weights.build(self.opened, torch.device("cpu"))
        if self.lm_head is not None:
            trunk.lm_head.load_state_dict(self.lm_head)
        return trunk

    def labelled(self, numbers: Sequence[int]) -> list[Example]:
        """Return examples with their measured values."""
        return [replace(self.examples.get(n), labels={"target": self.y_N[[n]].astype(np.float32)}) for n in numbers]

    def task(self, head: str, train: Sequence[int]) -> VariantTask:
        """Return the task after it has seen the training values."""
        facts = {"targets": ["y"], "lower_is_better": [], "protein": self.protein, "first": 0, "offset": 0}
        scale = fit_scale(self.y_N[list(train)], "rank" if head == "likelihood" else "none")
        facts |= {"length": len(self.protein), "scales": [asdict(scale)], "breaks": [], "linker": LINKER}
        facts["fitted"] = {"variants": len(train), "changes": sum(len(self.mutations[n]) for n in train)}
        return VariantTask(VariantSettings(name="variant", head=head), facts)

    def predict(self, train: Sequence[int], test: Sequence[int], likelihood: bool) -> Predicted:
        """Return the predictions of every method for the test variants."""
        task, examples, asked = self.task("network", train), self.labelled(train), self.labelled(test)
        known = task.baselines(examples, self.base)
        outputs = task.baseline_outputs(asked, known, self.base)
        predicted = {name: np.array(values)[:, 0].astype(np.float64) for name, values in outputs.items()}
        task = self.task("gp", train)
        model = FineTuner(self.base.trunk, task.head(self.opened.config)).eval()
        with torch.no_grad():
            task.probe(model.head, examples, model, 0)
        rows = [task.with_deviations(output) for output in model.outputs([task.question(e) for e in asked])]
        predicted |= {GP: np.array(rows)[:, 0], PREDICTIVE: np.array(rows)[:, 2]}
        return predicted | ({LIKELIHOOD: self.likelihood(train, asked)} if likelihood else {})

    def likelihood(self, train: Sequence[int], asked: Sequence[Example]) -> np.ndarray:
        """Train the language model as the recipe `variants-few` does, without a validation set."""
        recipe, task = recipe_file.load(recipe_file.resolve("variants-few")), self.task("likelihood", train)
        model = FineTuner(self.trunk(), task.head(self.opened.config))
        model.adapt(recipe.adapt, 0)
        optimizer, steps = adamw(model.train(), recipe.optim), recipe.train.steps or 40
        for step in range(steps):
            set_learning_rate(optimizer, schedule(step, steps, recipe.optim.warmup, recipe.optim.schedule))
            batch = (*collate(task, self.labelled(train)), False)
            train_step(model, task, optimizer, [batch], recipe.optim.clip, ALONE, Layout())
        return np.array(model.eval().outputs([task.question(e) for e in asked]))[:, 0].astype(np.float64)

    def chosen(self, train: Sequence[int], seed: int, likelihood: bool) -> str:
        """Return the method that five folds of the training variants choose. Equal sites are in one fold."""
        block_N, _ = variant_units([self.mutations[n] for n in train])
        fold_of = np.random.default_rng(seed).permutation(block_N.max() + 2) % FOLDS
        fold_N, x = fold_of[block_N], defaultdict[str, np.ndarray](lambda: np.full((len(train), 1), np.nan))
        for fold in range(FOLDS):
            of_fold = fold_N == fold
            rest, held = np.array(train)[~of_fold].tolist(), np.array(train)[of_fold].tolist()
            for name, values in self.predict(rest, held, likelihood).items() if held else ():
                x[name][of_fold, 0] = values
        everything = np.ones(len(train), dtype=bool)
        return choose(x, self.y_N[list(train)][:, None], fold_N, block_N, everything)


def main() -> None:
    """Print the table, and write it to `results`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--wild-type", type=Path, required=True)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--lm-head", type=Path, help="the LM head of a model without LM head, a .safetensors file")
    parser.add_argument("--sizes", type=int, nargs="+", default=[24, 48, 96, 384])
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--pool", type=int, default=1000, help="the number of variants from which all draws are taken")
    parser.add_argument("--likelihood", action="store_true", help="also train the head likelihood (hours)")
    parser.add_argument("--name", required=True, help="the name of the results")
    given = parser.parse_args()
    laboratory = Laboratory(given.table, given.wild_type, given.model, given.lm_head)
    pool = np.random.default_rng(0).permutation(len(laboratory.mutations))[: given.pool]
    results, lines = {}, []
    for n in given.sizes:
        rho, shares = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        chosen = []
        for seed in range(given.draws):
            drawn = np.random.default_rng(seed).permutation(pool)
            train, test = drawn[:n].tolist(), drawn[n : n + TESTED].tolist()
            predicted, y_N = laboratory.predict(train, test, given.likelihood), laboratory.y_N[test]
            for level in (0.5, 0.8, 0.95):
                shares[f"{level:.0%}"].append(coverage(predicted[GP] - y_N, predicted[PREDICTIVE], level))
            del predicted[PREDICTIVE]
            chosen.append(laboratory.chosen(train, seed, given.likelihood))
            for name, x_N in predicted.items():
                rho[name].append(float(spearmanr(x_N, y_N).statistic) if np.ptp(x_N) else math.nan)
            rho["chosen"].append(rho[chosen[-1]][-1])
        best = max(BASELINES, key=lambda name: -np.inf if np.isnan(np.nanmean(rho[name])) else np.nanmean(rho[name]))
        results[n] = {"spearman": dict(rho), "chosen": chosen, "coverage": dict(shares), "best baseline": best}
        for name, values in rho.items():
            gain = np.array(values) - np.array(rho[best])
            error = 1.96 * gain.std(ddof=1) / math.sqrt(len(gain))
            mean, spread = np.nanmean(values), np.nanstd(values, ddof=1) / math.sqrt(len(values))
            lines.append(f"| {n} | {name} | {mean:.3f} ± {spread:.3f} | {gain.mean():+.3f} ± {error:.3f} |")
        held = ", ".join(f"{level}: {np.mean(values):.0%}" for level, values in shares.items())
        lines.append(f"| {n} | coverage of the Gaussian process | {held} | |")
        print("\n".join(lines[-len(rho) - 1 :]), flush=True)
    head = "| variants | method | Spearman, mean ± standard error | minus the best baseline, ± 1.96 standard errors |"
    out = RESULTS / f"{datetime.date.today()}-few-labels-{given.name}"
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    text = f"# Few labels: {given.name}, {given.draws} draws\n\n{head}\n|---|---|---|---|\n" + "\n".join(lines) + "\n"
    out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
