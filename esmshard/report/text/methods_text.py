"""The methods of a cross-validated run of variants, in sentences for a paper that follow from the run's files alone."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from esmshard.files import is_hub_name
from esmshard.model.config import SHIPPED
from esmshard.model.families.family_registry import FAMILIES, RELEASED, released_name
from esmshard.recipe.sections import Recipe
from esmshard.report.read.run_directory import RunFiles
from esmshard.report.read.variant_run_directory import CrossValidated, Pooled
from esmshard.report.text.page_parts import count_text
from esmshard.tasks.base import MAIN
from esmshard.tasks.variants.variant_settings import VariantSettings
from esmshard.tasks.variants.variant_task import AUGMENTED, FROZEN, ONE_HOT, SCORE, THRESHOLDS, VariantTask

_PAPERS = (*(family.paper for family in FAMILIES.values()), *(one.paper for one in RELEASED.values()))
REFERENCES = {
    "Hu et al. 2021": "Hu et al. 2021 (LoRA), arXiv:2106.09685",
    **{paper.short: paper.line for paper in _PAPERS},
    "Meier et al. 2021": "Meier et al. 2021 (zero-shot scores), doi:10.1101/2021.07.09.450648",
    "Rennie and Srebro 2005": "Rennie and Srebro 2005, Loss functions for preference levels, IJCAI workshop on "
    "preference handling",
    "Hsu et al. 2022": "Hsu et al. 2022, Nat Biotechnol 40:1114 (augmented models), doi:10.1038/s41587-021-01146-5",
}
"""The references, by their citation in the text."""
_SPLITS = {
    "position": "at random, so that all variants of a position are in one fold",
    "contiguous": "by stretches of the sequence with as many changed positions each",
    "modulo": "by position, the i-th changed position going to fold i modulo the number of folds",
    "random": "at random, whatever positions they change, so that other variants of a tested position may have been in "
    "the training set",
}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def paragraph(found: CrossValidated, recipe: Recipe) -> tuple[str, str]:
    """Return the text, and the references that it cites."""
    text = " ".join([*_model(found, recipe), *_training(found, recipe), *_testing(found, recipe), _versions(found)])
    cited = [long for short, long in REFERENCES.items() if short in text]
    return text, "; ".join(cited)


def _model(found: CrossValidated, recipe: Recipe) -> Iterator[str]:
    """Yield sentences on the trained model."""
    task, name, adapt = recipe.task, recipe.model.name, recipe.adapt
    assert isinstance(task, VariantSettings)
    model = f"the protein language model {Path(name).name}"
    if known := released_name(name):
        model = f"a model of the shape of {known}"
        if recipe.init == "pretrained":
            model = f"{RELEASED[known].title} ({known}; {RELEASED[known].paper.short})"
    elif is_hub_name(name):
        model = f"the protein language model {name} of the Hugging Face hub"
    elif name in SHIPPED:
        model = f"the {name} model that comes with esmshard"
    weights = "" if recipe.init == "pretrained" else ", from random weights"
    protein = str(found.facts.get("protein", ""))
    of = f" of a protein of {count_text(len(protein), 'residue')}" if protein else ""
    verb = "fitting a linear head to" if adapt.method == "probe" else "fine-tuning"
    yield f"Measured values of variants{of} ({', '.join(found.targets)}) were predicted by {verb} {model}{weights}."
    if found.given is not None and found.given.offset:
        yield (
            f"Positions in the table were shifted by {found.given.offset:+d}, so that they count the residues of this "
            "protein from 1."
        )
    first, seen = found.facts.get("first", 0), found.facts.get("length", len(protein))
    if seen < len(protein):
        yield f"The model saw residues {first + 1:,} to {first + seen:,} of it."
    if recipe.data.tracks:
        titles = {track.name: track.title for family in FAMILIES.values() for track in family.tracks}
        read = _listed([titles.get(name, name) for name in recipe.data.tracks])
        yield f"Besides amino acids the model read {read} of the wild type, which were taken to hold for all variants."
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
    site = f"the final representation of the wild type, {letters}"
    seen = {"wild_type": site, "sites": f"{difference}, {site}", "difference": difference}
    hidden = f" through a hidden layer of {task.hidden:,} units (GELU)" if task.hidden else ""
    dropout = f", with a dropout of {task.dropout:g}" if task.dropout else ""
    if task.pool == "mean":
        head = f"maps the mean of the final representation over all residues of a variant{hidden} to the values"
    else:
        passed = f"passed{hidden}, " if hidden else ""
        head = (
            f"takes at each changed residue {seen[task.pool]}; these vectors are {passed}summed over the changes of a "
            "variant and mapped linearly to the values"
        )
    yield f"The head {head}{dropout}."
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
        f"{_steps(found, recipe)}."
    )
    known = _known(found)
    often = "after each pass" if recipe.train.eval_every == "epoch" else f"every {recipe.train.eval_every:,} steps"
    if stops:
        early = sum(_done(run) < (_planned(run) or 0) for run in known)
        yield (
            f"Spearman's correlation on the validation set was computed {often}; training was to end when "
            f"{count_text(recipe.train.early_stop or 0, 'validation')} in a row brought no better one, which "
            f"{early:,} of {count_text(len(known), 'run')} did, and the model of the best validation was taken"
            f"{_best_steps(known)}."
        )
    elif recipe.checkpoint.keep_best:
        yield (
            f"The model with the best Spearman's correlation on the validation set, computed {often}, was taken"
            f"{_best_steps(known)}."
        )


def _steps(found: CrossValidated, recipe: Recipe) -> str:
    """Describe the numbers of steps, training variants and epochs, as in metrics.jsonl."""
    known = [run for run in _known(found) if _done(run)]
    if not known:
        return "the steps of the recipe"
    done, planned = [_done(run) for run in known], [n for run in known if (n := _planned(run)) is not None]
    steps = _range(done) + (f" of the planned {_range(planned)}" if planned and planned != done else "")
    most = max(int(np.nanmax(run.steps["records"])) for run in known)
    passes = [np.nansum(run.steps["records"]) / trained for run in known if (trained := _trained(run))]
    often = f", {_range(passes)} passes over the training variants" if passes else ""
    return f"{steps} steps of up to {count_text(most, 'variant')}{often}"


def _done(run: RunFiles) -> int:
    """Return the number of optimizer steps of a run."""
    return int(np.nanmax(run.steps["step"])) if len(run.steps["step"]) else 0


def _planned(run: RunFiles) -> int | None:
    return run.recipe.train.steps if run.recipe is not None else None


def _best_steps(known: Sequence[RunFiles]) -> str:
    """Describe the steps from which the runs took their models."""
    steps = [int(run.evaluation.raw["step"]) for run in known if run.evaluation is not None]
    return f" (step {_range(steps)})" if steps else ""


def _range(values: Sequence[float]) -> str:
    """Format the only value, or the smallest and the greatest value.

    >>> _range([40, 1240]), _range([4.96, 5.0]), _range([2.26])
    ('40 to 1,240', '5', '2.3')
    """
    ends = [f"{value:,.1f}".removesuffix(".0") for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def _testing(found: CrossValidated, recipe: Recipe) -> Iterator[str]:
    data, folds, pooled = recipe.data, found.raw.get("folds"), found.pooled
    yield from _table(found, recipe)
    unplaced = found.given.variants_in_no_set if found.given is not None else None
    if folds and data.split in _SPLITS:
        left_out = f"; left out: {count_text(unplaced, 'variant')} with changes in several folds" if unplaced else ""
        count = f"{pooled.variants:,} variants" if pooled else "Variants"
        yield (
            f"{count} were divided into {_worded(folds)} folds {_SPLITS[data.split]}{left_out}. Each fold was the test "
            "set of one run, another one its validation set, and the others its training set."
        )
    else:
        by = f"up to {count_text(data.train_max or 1, 'change')}" if data.split == "mutations" else "the training set"
        trained = next(map(_trained, _known(found)), 0)
        size = f" ({trained:,} variants)" if trained else ""
        kept = "variants with " if data.split == "mutations" else "those that the table assigns to "
        test = f", and {pooled.variants:,} others were the test set" if pooled else ""
        apart = ", a part of which was kept for validation" if data.split == "mutations" else ""
        left_out = f"; left out: {count_text(unplaced, 'variant')} without a set" if unplaced else ""
        yield f"The model learned from {kept}{by}{size}{apart}{test}{left_out}."
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


def _table(found: CrossValidated, recipe: Recipe) -> Iterator[str]:
    """Yield sentences on the changes in the user's table."""
    given = found.given
    if given is None:
        return
    if given.rows_left_out:
        yield f"{given.rows_left_out:,} of {count_text(given.rows, 'row')} of the table could not be used."
    if given.variants_averaged and recipe.data.replicates == "mean":
        yield f"The values of {count_text(given.variants_averaged, 'variant')} in several rows were averaged."


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
    # Each sentence may have commas of its own.
    *others, last = said
    listed = f"{'; '.join(others)}; and {last}" if others else last
    fitted = any(method != SCORE for method in pooled.metrics if method != MAIN)
    most = VariantTask.baseline_records
    part = f"at most {most:,} of " if max(map(_trained, _known(found)), default=0) > most else ""
    yield f"Baselines were {listed}."
    if fitted:
        yield (
            f"Regressions were fitted to {part}the training variants of each run, their penalties chosen by "
            "leave-one-out error."
        )


def _statistics(pooled: Pooled, targets: int) -> Iterator[str]:
    averaged = ", averaged over the targets" if targets > 1 else ""
    intervals = (
        f"Intervals are 95% percentile intervals of a bootstrap of {pooled.resamples:,} resamples of positions, and "
        "those of differences are paired."
    )
    if math.isnan(pooled.metrics[MAIN].low):
        intervals = f"There are no intervals: {count_text(pooled.positions, 'position')} are too few for a bootstrap."
    yield (
        f"Methods were compared by Spearman's rank correlation over all {pooled.variants:,} test variants{averaged}, "
        f"each predicted by models that had not been trained on it. {intervals}"
    )


def _versions(found: CrossValidated) -> str:
    used = []
    for name, package in (("esmshard", "esmshard"), ("PyTorch", "torch"), ("Python", "python")):
        if versions := {str(run.versions[package]) for run in _known(found) if package in run.versions}:
            used.append(f"{name} {' and '.join(sorted(versions))}")
    return f"Computed with {_listed(used)}." if used else ""


def _known(found: CrossValidated) -> list[RunFiles]:
    """Return the runs whose directories exist."""
    return [run for run in found.runs.values() if run is not None]


def _trained(run: RunFiles) -> int:
    """Return the number of training variants of a run; 0 if unknown."""
    found = run.versions.get("data", {}).get("train", {}).get("records")
    return found if isinstance(found, int) else 0


def _listed(names: Sequence[str]) -> str:
    """Join names as in a sentence.

    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _worded(count: int) -> str:
    return _NUMBERS[count] if count < len(_NUMBERS) else f"{count:,}"
