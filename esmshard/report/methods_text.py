"""How a cross-validated run of variants was made, in sentences for a paper. Only what follows from what it left."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from esmshard.model.config import STARTER
from esmshard.model.hub import RELEASED
from esmshard.report.left import Left
from esmshard.report.page import count_text
from esmshard.report.variants_left import CrossValidated, Pooled
from esmshard.settings import Recipe
from esmshard.task_settings import VariantSettings
from esmshard.tasks.variant import AUGMENTED, FROZEN, ONE_HOT, SCORE, THRESHOLDS, VariantTask
from esmshard.train.metrics import MOST_ROWS, RESAMPLES
from esmshard.train.verdict import MAIN

REFERENCES = {
    "Lin et al. 2023": "Lin et al. 2023, Science 379:1123 (ESM-2), doi:10.1126/science.ade2574",
    "Hu et al. 2021": "Hu et al. 2021 (LoRA), arXiv:2106.09685",
    "Meier et al. 2021": "Meier et al. 2021 (zero-shot scores), doi:10.1101/2021.07.09.450648",
    "Rennie and Srebro 2005": "Rennie and Srebro 2005, Loss functions for preference levels, IJCAI workshop on "
    "preference handling",
    "Hsu et al. 2022": "Hsu et al. 2022, Nat Biotechnol 40:1114 (augmented models), doi:10.1038/s41587-021-01146-5",
}
"""By how the text cites them."""
_SPLITS = {
    "position": "at random, so that all variants of a position are in one fold",
    "contiguous": "by stretches of the sequence with as many changed positions each",
    "modulo": "by position, the i-th changed position going to fold i modulo the number of folds",
    "random": "at random, whatever positions they change, so that other variants of a tested position may have been in "
    "the training set",
}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def paragraph(found: CrossValidated, recipe: Recipe) -> tuple[str, str]:
    """The text, and the references that it cites."""
    text = " ".join([*_model(found, recipe), *_training(found, recipe), *_testing(found, recipe), _versions(found)])
    cited = [long for short, long in REFERENCES.items() if short in text]
    return text, "; ".join(cited)


def _model(found: CrossValidated, recipe: Recipe) -> Iterator[str]:
    """What was trained."""
    task, name, adapt = recipe.task, recipe.model.name, recipe.adapt
    assert isinstance(task, VariantSettings)
    if name in RELEASED:
        model = f"ESM-2 ({name}; Lin et al. 2023)" if recipe.init == "pretrained" else f"a model of the shape of {name}"
    else:
        model = (
            "the starter model that comes with esmshard"
            if name == STARTER
            else f"the protein language model {Path(name).name}"
        )
    weights = "" if recipe.init == "pretrained" else ", from random weights"
    protein = str(found.facts.get("protein", ""))
    of = f" of a protein of {count_text(len(protein), 'residue')}" if protein else ""
    verb = "fitting a linear head to" if adapt.method == "probe" else "fine-tuning"
    yield f"Measured values of variants{of} ({', '.join(found.targets)}) were predicted by {verb} {model}{weights}."
    first, seen = found.facts.get("first", 0), found.facts.get("length", len(protein))
    if seen < len(protein):
        yield f"The model saw residues {first + 1:,} to {first + seen:,} of it."
    if adapt.method == "full":
        part = f" but those of {_listed(adapt.freeze)}" if adapt.freeze else ""
        yield f"All weights of the language model{part} were trained."
    elif adapt.method == "lora":
        rank, alpha, targets = adapt.lora
        biases = ", and all biases were trained" if adapt.bias == "all" else ""
        yield (
            f"The language model was adapted by LoRA (Hu et al. 2021) of rank {rank} and alpha {alpha:g} in the layers "
            f"{_listed(targets)} of each block, its other weights being frozen{biases}."
        )
    else:
        yield "The language model itself was frozen."
    yield from _head(task)


def _head(task: VariantSettings) -> Iterator[str]:
    letters = "the wild-type and the mutant letter"
    if task.zero_shot:
        letters += " and the probabilities that the language model gives the 20 amino acids there"
    difference = "the difference between the final representations of variant and wild type"
    site = "the final representation of the wild type"
    seen = {
        "wild_type": f"{site}, {letters}",
        "sites": f"{difference}, {site}, {letters}",
        "difference": difference,
    }
    hidden = f"a hidden layer of {task.hidden:,} units (GELU)" if task.hidden else ""
    dropout = f", with a dropout of {task.dropout:g}" if task.dropout else ""
    if task.pool == "mean":
        through = f" through {hidden}" if hidden else ""
        head = (
            f"The head maps the mean of the final representation over all residues of a variant{through} to the values"
        )
    else:
        through = f"passed through {hidden}, " if hidden else ""
        head = (
            f"At each changed residue the head takes {seen[task.pool]}; these vectors are {through}summed over the "
            "changes of a variant and mapped linearly to the values"
        )
    yield f"{head}{dropout}."
    if task.zero_shot:
        yield (
            "With a weight that is learned, it adds the log odds of the mutant against the wild-type residues that the "
            "language model gives when it sees the wild type (Meier et al. 2021)."
        )


def _training(found: CrossValidated, recipe: Recipe) -> Iterator[str]:
    task, data, optim = recipe.task, recipe.data, recipe.optim
    assert isinstance(task, VariantSettings)
    if task.loss == "ranking" or data.transform == "rank":
        scale = "replaced by the normal scores of their ranks"
    else:
        scale = f"{'log-transformed and ' if data.transform == 'log' else ''}standardised"
    yield f"Values were {scale} over the training variants."
    if recipe.adapt.method == "probe":
        yield "The head was fitted by ridge regression, its penalty chosen by leave-one-out error."
        return
    loss = {
        "mse": "the mean squared error",
        "huber": "the Huber loss, linear beyond one standard deviation",
        "ranking": f"an all-threshold ordinal loss with {THRESHOLDS} thresholds (Rennie and Srebro 2005)",
    }[task.loss]
    rates = f"a peak learning rate of {optim.head_lr:g}"
    if recipe.adapt.method != "head":
        rates = f"peak learning rates of {optim.lr:g} (language model) and {optim.head_lr:g} (head)"
    warmup = f", {optim.warmup:.0%} of the steps as linear warm-up" if optim.warmup else ""
    falls = "a constant rate" if optim.schedule == "constant" else f"{optim.schedule} decay"
    stops = recipe.train.early_stop is not None
    yield (
        f"AdamW (betas {optim.betas[0]:g} and {optim.betas[1]:g}, weight decay {optim.weight_decay:g}) minimised "
        f"{loss} with {rates}{warmup}, then {falls}, gradients clipped to a norm of {optim.clip:g}, in "
        f"{'at most ' if stops else ''}{_steps(found, recipe)}."
    )
    often = "after each pass" if recipe.train.eval_every == "epoch" else f"every {recipe.train.eval_every:,} steps"
    if stops:
        yield (
            f"Spearman's correlation on the validation set was computed {often}; training ended when "
            f"{count_text(recipe.train.early_stop or 0, 'validation')} in a row brought no better one, and the model "
            "of the best validation was taken."
        )
    elif recipe.checkpoint.keep_best:
        yield f"The model with the best Spearman's correlation on the validation set, computed {often}, was taken."


def _steps(found: CrossValidated, recipe: Recipe) -> str:
    """How many, of how many variants, and how often that is all of them."""
    known = [run for run in found.runs.values() if run is not None]
    each = sorted({n for run in known if run.recipe and (n := run.recipe.train.steps) is not None})
    if not each:
        return "the steps of the recipe"
    steps = f"{each[0]:,}" + (f" to {each[-1]:,}" if len(each) > 1 else "")
    tokens = recipe.batch.global_tokens
    if not (isinstance(recipe.task, VariantSettings) and recipe.task.pool == "wild_type"):
        return f"{steps} steps of up to {tokens:,} tokens"
    size = max(1, tokens // 3)  # only the changed residue takes room: the wild type goes through the model once
    passes = [
        run.recipe.train.steps / -(-trained // size)
        for run in known
        if run.recipe and run.recipe.train.steps and (trained := _trained(run))
    ]
    often = f", about {sum(passes) / len(passes):.0f} passes over the training variants" if passes else ""
    return f"{steps} steps of up to {count_text(size, 'variant')}{often}"


def _testing(found: CrossValidated, recipe: Recipe) -> Iterator[str]:
    data, folds, pooled = recipe.data, found.raw.get("folds"), found.pooled
    known = [run for run in found.runs.values() if run is not None]
    tested = found.tested
    if tested is not None and data.replicates == "mean" and tested.rows_tested > len(tested.mutations):
        yield "Values of a variant that was measured several times were averaged."
    if folds and data.split in _SPLITS:
        left = "" if data.split == "random" else "; those that change positions of several folds were left out"
        count = f"{pooled.variants:,} variants" if pooled else "Variants"
        yield (
            f"{count} were divided into {_worded(folds)} folds {_SPLITS[data.split]}{left}. Each fold was the test set "
            "of one run, another one its validation set, and the others its training set."
        )
    else:
        by = f"up to {count_text(data.train_max or 1, 'change')}" if data.split == "mutations" else "the training set"
        trained = [_trained(run) for run in known]
        size = f" ({trained[0]:,} variants)" if trained and trained[0] else ""
        kept = "variants with " if data.split == "mutations" else "those that the table assigns to "
        test = f", and {pooled.variants:,} others were the test set" if pooled else ""
        apart = ", a part of which was kept for validation" if data.split == "mutations" else ""
        yield f"The model learned from {kept}{by}{size}{apart}{test}."
    if pooled is None:
        return
    if len(pooled.seeds) > 1:
        seeds = _listed([str(seed) for seed in pooled.seeds])
        count = _worded(len(pooled.seeds))
        yield f"This was repeated from {count} random seeds ({seeds}), over which predictions were averaged."
    elif pooled.seeds:
        yield f"The random seed was {pooled.seeds[0]}."
    yield from _baselines(found, recipe, pooled)
    yield from _statistics(pooled, len(found.targets))


def _baselines(found: CrossValidated, recipe: Recipe, pooled: Pooled) -> Iterator[str]:
    assert isinstance(recipe.task, VariantSettings)
    features = "its difference to that of the wild type at the changed residues, the latter, and both letters"
    if recipe.task.pool == "mean":
        features = "the mean over its residues"
    known = {
        ONE_HOT: "ridge regression on one-hot encoded sequences",
        SCORE: "the language model's zero-shot score before fine-tuning (masked marginals; Meier et al. 2021)",
        AUGMENTED: "ridge regression on one-hot encoded sequences and that score (Hsu et al. 2022)",
        FROZEN: f"ridge regression on the representation of a variant by the model before fine-tuning ({features})",
    }
    said = [known[method] for method in known if method in pooled.metrics]
    if not said:
        return
    # Each may have commas of its own.
    *others, last = said
    listed = f"{'; '.join(others)}; and {last}" if others else last
    fitted = any(method != SCORE for method in pooled.metrics if method != MAIN)
    trained = [_trained(run) for run in found.runs.values() if run]
    most = VariantTask.baseline_records
    part = f"at most {most:,} of " if max(trained, default=0) > most else ""
    yield f"Baselines were {listed}."
    if fitted:
        yield (
            f"Regressions were fitted to {part}the training variants of each run, their penalties chosen by "
            "leave-one-out error."
        )


def _statistics(pooled: Pooled, targets: int) -> Iterator[str]:
    draws = min(RESAMPLES, max(200, MOST_ROWS // max(pooled.positions, 1)))
    averaged = ", averaged over the targets" if targets > 1 else ""
    intervals = (
        f"Intervals are 95% percentile intervals of a bootstrap of {draws:,} resamples of positions, and those of "
        "differences are paired."
    )
    if math.isnan(pooled.metrics[MAIN].low):
        intervals = f"There are no intervals: {count_text(pooled.positions, 'position')} are too few for a bootstrap."
    yield (
        f"Methods were compared by Spearman's rank correlation over all {pooled.variants:,} test variants{averaged}, "
        f"each predicted by models that had not been trained on it. {intervals}"
    )


def _versions(found: CrossValidated) -> str:
    def of(package: str) -> str:
        known = {str(v) for run in found.runs.values() if run and (v := run.versions.get(package)) is not None}
        return " and ".join(sorted(known))

    named = (("esmshard", "esmshard"), ("PyTorch", "torch"), ("Python", "python"))
    used = [f"{name} {version}" for name, package in named if (version := of(package))]
    return f"Computed with {_listed(used)}." if used else ""


def _trained(run: Left) -> int:
    """Training variants of a run; 0 if nothing says how many."""
    found = run.versions.get("data", {}).get("train", {}).get("records")
    return found if isinstance(found, int) else 0


def _listed(names: Sequence[str]) -> str:
    """As a sentence has them.

    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _worded(count: int) -> str:
    return _NUMBERS[count] if count < len(_NUMBERS) else f"{count:,}"
