"""Pseudo-perplexities of any sequences: how natural a language model finds each record of a FASTA file.

The score is from Salazar et al. 2020 (doi:10.18653/v1/2020.acl-main.240), and needs no labels and no training.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from esmshard.data.batching.loader import Examples
from esmshard.devices import DeviceName
from esmshard.errors import UsageError, writing
from esmshard.io.paths import without_directories
from esmshard.io.store import linker_of
from esmshard.io.tables import counted
from esmshard.io.writers import GROUP_ROWS, TableWriter, check, library
from esmshard.model.families.family_registry import FAMILIES, family_of
from esmshard.model.trunk import Trunk
from esmshard.predict import variant_tables
from esmshard.predict.language_models import LanguageModels, check_finite, mean_and_sd, read_models
from esmshard.predict.predictions import read_input
from esmshard.progress import say
from esmshard.tasks.finetuned import without_tracks
from esmshard.tasks.marginals import Protein, pseudo_log_likelihoods, scored_residues
from esmshard.vocab import is_residue, join_option

SequenceMethod = Literal["pseudo-perplexity", "one-pass", "both"]
MASKED, ONE_PASS, BOTH = get_args(SequenceMethod)
PREFIX = {MASKED: "", ONE_PASS: "one_pass_"}
"""What the names of the columns of a method begin with."""
MEAN = "mean_log_p"


def score_sequences(
    model: str,
    fasta: Path,
    out: Path,
    *,
    method: SequenceMethod = "pseudo-perplexity",
    ensemble: Sequence[str] = (),
    window: int | None = None,
    tracks: Mapping[str, str] | None = None,
    join: str | None = None,
    device: DeviceName = None,
    overwrite: bool = False,
) -> str:
    """Write a table with a row for each record, in input order. Return a message for the user.

    The columns are `id`; `length`; `not_scored`, the residues that are none of the 20 amino acids and are in no sum;
    `window`, the residues that the model saw at once, linkers between chains included; `pseudo_log_likelihood`, the sum
    of log p over the residues; `mean_log_p`, this sum divided by their number; and `pseudo_perplexity`,
    exp(-mean_log_p). The columns of `one-pass` begin with `one_pass_`. Several models give the means of the first two
    over the models, the pseudo-perplexity of this mean, and in `mean_log_p_sd` the standard deviation of `mean_log_p`
    over them. Numbers are missing if no residue is scored. A JSON file beside the table records how it was made.

    Args:
        model: see `weights.read`.
        fasta: see `predictions.predict`.
        out: a `.csv` or `.parquet` file.
        method: `pseudo-perplexity` masks each residue in turn, in a pass of its own; `one-pass` estimates the same from
            one pass for each window (`marginals.as_masked`); `both` writes both, and the message says how they differ.
        ensemble: further models.
        window: residues of a longer record that the model sees at once; by default as many as the models saw in
            training, the fewest of all.
        tracks: a path, or `inside`, by the name of each track of the records (docs/tracks.md).
        join: how the chains of a record are joined (docs/chains.md); by default as the model says.
        device: see `chosen_device`.
        overwrite: replace `out`.

    Raises:
        InputError: input or a model cannot be used.
        UsageError: an option does not fit, `out` exists already, or Parquet needs a package that is not installed.
    """
    methods = _methods(method)
    if out.suffix not in (".csv", ".parquet"):
        raise UsageError(f"{out}: scores of sequences are written as .csv or .parquet; give the file that ending")
    if out.suffix == ".parquet":
        library("pyarrow", "tables", out)
    check(out, variant_tables.facts_file(out), overwrite=overwrite)
    tracks = tracks or {}
    models = read_models(model, ensemble, window=window, tracks=tracks, device=device, chains=join_option(join))
    if ONE_PASS in methods:
        _check_one_pass(models, method)
    with tempfile.TemporaryDirectory(prefix="esmshard-score-") as scratch:
        # The whole input is read before it is scored, so that a bad record at the end costs seconds, not a night.
        chains = models.weights[0].config.chains
        examples, sentences = read_input(model, fasta, tracks, Path(scratch), chains)
        further = [notice for name in ensemble for notice in without_tracks(name, tracks)]
        for notice in further:
            say(notice)
        columns = _columns(models, examples, methods)
        facts: dict[str, Any] = models.facts() | {"sequences": str(fasta), "method": method, "window": models.window}
        facts |= {"tracks": dict(tracks)} if tracks else {}
        facts |= {} if linker_of(examples.store.manifest) is None else {"join": chains.text}
        compared = _compared(columns) if len(methods) > 1 else None
        notices = [*sentences, *further]
        if unscored := int((columns["length"] == columns["not_scored"]).sum()):
            notices.append(f"{counted(unscored, 'record')} without a score, as no residue is one of the 20 amino acids")
            say(notices[-1])
        facts |= {"records": len(examples), "notices": notices, "compared": compared}
        with writing(out, "make room, or choose another place with -o; the unfinished file was removed"):
            _write(out, examples, columns, facts)
    variant_tables.write_facts(out, facts)
    return f"{out}: {counted(len(examples), 'record')}" + (f"; {compared}" if compared else "")


def _methods(method: str) -> list[str]:
    if method not in get_args(SequenceMethod):
        raise UsageError(
            f"--method {method}: sequences without variants are scored by {MASKED}, {ONE_PASS} or {BOTH}; for variants "
            "of one protein give a table, or --all-singles"
        )
    return [MASKED, ONE_PASS] if method == BOTH else [method]


def _check_one_pass(models: LanguageModels, method: str) -> None:
    """Refuse models whose training does not say what they make of visible residues."""
    for name, weights in zip(models.names, models.weights, strict=True):
        family = family_of(weights.config)
        if family.corruption is None:
            known = ", ".join(one.title for one in FAMILIES.values() if one.corruption)
            raise UsageError(
                f"--method {method}: the estimate from one pass holds for the training of {known} only, and {name} is "
                f"of {family.title}, whose training was another or is not known; pass --method {MASKED}"
            )


def _columns(models: LanguageModels, examples: Examples, methods: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Compute all columns of numbers, int64 or float64 [N] each."""
    scored_N = np.array([len(scored_residues(examples.store.residues(n))) for n in range(len(examples))])
    seen_N = examples.store.lengths.astype(np.int64)
    length_N = seen_N
    if linker_of(examples.store.manifest) is not None:
        length_N = np.array([int(is_residue(examples.store.residues(n)).sum()) for n in range(len(examples))])

    def sums(model: Trunk, method: str) -> npt.NDArray[np.float64]:
        visible = family_of(model.config).corruption if method == ONE_PASS else None
        return pseudo_log_likelihoods(model, _proteins(examples), scored_N, window=models.window, visible=visible)

    sums_MKN = np.stack(models.each(lambda model: [sums(model, method) for method in methods]))
    check_finite(sums_MKN, ", ".join(models.names))
    columns: dict[str, npt.NDArray[Any]] = {
        "length": length_N,
        "not_scored": length_N - scored_N,
        "window": np.minimum(seen_N, models.window),
    }
    some_N = np.where(scored_N, 1.0, np.nan)
    for k, method in enumerate(methods):
        sum_MN, prefix = sums_MKN[:, k] * some_N, PREFIX[method]
        mean_N, sd_N = mean_and_sd(sum_MN / np.maximum(scored_N, 1))
        columns |= {f"{prefix}pseudo_log_likelihood": sum_MN.mean(0), f"{prefix}{MEAN}": mean_N}
        columns |= {} if sd_N is None else {f"{prefix}{MEAN}_sd": sd_N}
        columns[f"{prefix}pseudo_perplexity"] = np.exp(-mean_N)
    return columns


def _proteins(examples: Examples) -> Iterator[Protein]:
    for n in range(len(examples)):
        example = examples.get(n)
        yield example.tokens, example.tracks


def _compared(columns: Mapping[str, npt.NDArray[Any]]) -> str:
    """Say how the estimates from one pass differ from the scores of masked residues."""
    one_pass_N, masked_N = columns[PREFIX[ONE_PASS] + MEAN], columns[MEAN]
    known_N = ~np.isnan(masked_N)
    if not known_N.any():
        return "no record to compare the methods on"
    difference = np.abs(one_pass_N - masked_N)[known_N].mean()
    agreement = variant_tables.spearman(one_pass_N, masked_N, MEAN, "record")
    return f"{ONE_PASS}: mean absolute difference {difference:.3f} of {MEAN}, {agreement}"


def _write(out: Path, examples: Examples, columns: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, Any]) -> None:
    """Write the table, some rows at a time, since the ids of all records may not fit into memory."""
    about = {"facts": json.dumps(without_directories(facts)), "versions": json.dumps({"esmshard": version("esmshard")})}
    types = {"id": "string"} | {name: str(values_N.dtype) for name, values_N in columns.items()}
    with TableWriter(out, types, about) as writer:
        for start in range(0, len(examples), GROUP_ROWS):
            rows = range(start, min(start + GROUP_ROWS, len(examples)))
            numbers = {name: values_N[start : rows.stop].tolist() for name, values_N in columns.items()}
            writer.add({"id": [examples.id(n) for n in rows], **numbers})
