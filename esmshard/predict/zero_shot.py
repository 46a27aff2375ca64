"""Scores of variants and of whole sequences by language models alone, without labels and without training.

Of variants: Meier et al. 2021 (doi:10.1101/2021.07.09.450648). Of sequences: the pseudo-perplexity of Salazar et al.
2020 (doi:10.18653/v1/2020.acl-main.240).
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from esmshard.data.batching.loader import Examples
from esmshard.data.tracks import protein_tracks, track_files, with_paths
from esmshard.data.variants import TARGET_COLUMNS, protein_of
from esmshard.devices import DeviceName, chosen_device
from esmshard.errors import InputError, UsageError, writing
from esmshard.io.paths import replace_json, without_directories
from esmshard.io.store import linker_of
from esmshard.io.tables import Table, counted
from esmshard.io.writers import GROUP_ROWS, TableWriter, check, facts_file, library, text
from esmshard.model import weights
from esmshard.model.families.family_registry import FAMILIES, family_of, window_of
from esmshard.model.trunk import Trunk
from esmshard.model.weights import Weights
from esmshard.predict.heads import read_input
from esmshard.predict.variants import (
    Variant,
    VariantRows,
    check_new,
    listed,
    not_of_the_20,
    read_rows,
    single_substitutions,
    spearman_sentence,
    write_table,
)
from esmshard.progress import say
from esmshard.tasks.finetuned import without_tracks
from esmshard.tasks.marginals import Tracks, log_probabilities, pseudo_log_likelihoods, scored_residues
from esmshard.tasks.metrics import variant_spearman
from esmshard.vocab import RESIDUES, TOKENS, Chains, encode, is_residue, join_option

Method = Literal["masked-marginals", "wild-type-marginals", "pseudo-perplexity"]
METHODS = get_args(Method)
SequenceMethod = Literal["pseudo-perplexity", "one-pass"]
MASKED, ONE_PASS = get_args(SequenceMethod)
NOT_SCORED = "not scored because"
"""The last column of a table of variants: why a row has no score."""

Array = npt.NDArray[np.float64]


def score(
    model: Trunk,
    wild_type: str,
    variants: Sequence[Variant],
    method: Method = "masked-marginals",
    window: int | None = None,
    tracks: Tracks | None = None,
) -> Array:
    """Score each variant, float64 [N]. A higher score means that the model finds the variant more natural.

    `masked-marginals` is the sum over the mutated sites of log p(mutant) - log p(wild type), where p is what the model
    expects at the masked site of the wild type. This takes one forward pass for each site, for any number of variants.
    `wild-type-marginals` is the same from one pass in which nothing is masked. `pseudo-perplexity` is the mean of log p
    over the residues of the variant that are among the 20, each masked in turn: minus the logarithm of the
    pseudo-perplexity. This takes a pass for each residue of each variant. (fair-esm's script for it reads the wrong
    site and skips the last.) The wild type's score is 0 with the first two methods. NaN: see `not_of_the_20`.

    Args:
        model: a model with a trained LM head.
        wild_type: residues of the wild type.
        variants: mutations of each variant; empty for the wild type.
        method: see above.
        window: residues of a longer protein that the model sees, with the site in their middle unless an end of the
            protein is near; by default as many as it saw in training. In a pass that masks nothing,
            each site is read where it is nearest to the middle of a window.
        tracks: of the wild type, [L + 2, ...] by name; the variants have them too.

    Raises:
        UsageError: the method is not known, or the window has less than one residue.
    """
    if method not in METHODS:
        raise UsageError(f"method is {method!r}; it is one of {', '.join(METHODS)}")
    window = window_of(model.config) if window is None else window
    if window < 1:
        raise UsageError(f"a window of {window} residues: give at least 1")
    score_N = np.full(len(variants), np.nan)
    known = [n for n, one in enumerate(variants) if not not_of_the_20(one)]
    if method == "pseudo-perplexity":
        tokens_KL = np.tile(encode(wild_type), (len(known), 1))
        for tokens_L, n in zip(tokens_KL, known, strict=True):
            for mutation in variants[n]:
                tokens_L[mutation.position + 1] = TOKENS.index(mutation.mutant)
        count_K = np.array([len(scored_residues(tokens_L)) for tokens_L in tokens_KL])
        proteins = ((tokens_L, tracks or {}) for tokens_L in tokens_KL)
        sum_K = pseudo_log_likelihoods(model, proteins, count_K, window=window)
        score_N[known] = sum_K / np.where(count_K, count_K, np.nan)
        return score_N
    sites = sorted({mutation.position for n in known for mutation in variants[n]})
    hidden = method == "masked-marginals"
    log_p_SA = log_probabilities(model, wild_type, sites, hidden=hidden, window=window, tracks=tracks).astype(
        np.float64
    )
    row, letter = {site: n for n, site in enumerate(sites)}, {aa: n for n, aa in enumerate(RESIDUES)}
    for n in known:
        effects = (
            log_p_SA[row[m.position], letter[m.mutant]] - log_p_SA[row[m.position], letter[m.wild]] for m in variants[n]
        )
        score_N[n] = sum(effects)
    return score_N


def score_table(
    model: str,
    wild_type: Path,
    table: Path | None,
    out: Path,
    *,
    method: Method = "masked-marginals",
    mutant: str | None = None,
    target: str | None = None,
    offset: int | Literal["auto"] = "auto",
    ensemble: Sequence[str] = (),
    window: int | None = None,
    tracks: Mapping[str, str] | None = None,
    device: DeviceName = None,
    overwrite: bool = False,
) -> str:
    """Write a CSV file: the columns of the table, the score in a column named after the method, and for each row
    without a score the reason (`not scored because`). Several models give their mean score, and in a further column,
    `METHOD_sd`, its standard deviation over them. Return a message for the user.

    Rows that cannot be scored (a stop codon, a blank cell, a residue that is none of the 20 amino acids) keep their
    place with an empty score. If the table has measured values, the message has Spearman's correlation with them over
    the variants that have one, and its interval, or why it is undefined. `OUT.json` records how the table was made:
    method, numbering, and what was left out.

    Args:
        model: see `weights.read`.
        wild_type: FASTA file with one protein.
        table: table of variants; None for all single substitutions.
        out: a `.csv` file.
        method: see `score`.
        mutant: see `read_variants`.
        target: column of measured values; by default the one with a usual name, if there is one.
        offset: see `read_variants`.
        ensemble: further models.
        window: see `score`; for several models by default that of the model that saw the fewest residues.
        tracks: a path, or `inside`, by the name of each track of the wild type, which its variants have too.
        device: see `chosen_device`.
        overwrite: replace `out`.
    """
    if out.suffix != ".csv":
        raise UsageError(f"{out}: scores are written as .csv; give the file that ending")
    check(out, facts_file(out), overwrite=overwrite)
    names, column, tracks = [model, *ensemble], method.replace("-", "_"), tracks or {}
    if table is None:
        protein = protein_of(wild_type)
        rows = listed(protein, single_substitutions(protein))
    else:
        rows = read_rows(table, wild_type, mutant, offset)
    rows.columns.pop(NOT_SCORED, None)  # A table may have the scores of another method already.
    check_new(out, rows.columns, [column, *([f"{column}_sd"] if ensemble else [])])
    rows = rows.leave_out(not_of_the_20, "not scored")
    measured = None if rows.table is None else _measured(rows.table, target)
    value_N = np.empty(0) if measured is None else rows.measured(measured)
    opened, window = _open(names, window, tracks)
    files = track_files(tracks, family_of(opened[0].config).tracks, model, "--track ")
    of_protein = protein_tracks(with_paths(wild_type, files), wild_type)
    missing = [notice for name in names for notice in without_tracks(name, tracks)]
    notices = [*rows.notices, *of_protein.notices(np.arange(1)), *missing]
    for notice in notices:
        say(notice)
    values = of_protein.get(0, slice(None))
    score_MN = _of_each(
        opened, chosen_device(device), lambda esm: score(esm, rows.protein, rows.mutations, method, window, values)
    )
    check_finite(score_MN, ", ".join(names))
    new = {column: _cells(rows, score_MN.mean(0))}
    if ensemble:
        new[f"{column}_sd"] = _cells(rows, score_MN.std(0, ddof=1))
    new[NOT_SCORED] = [rows.left_out.get(row, "") for row in range(len(new[column]))]
    message = None if measured is None else _agreement(rows, score_MN.mean(0), measured, value_N)
    facts: dict[str, Any] = {"model": model, "ensemble": list(ensemble), "device": str(chosen_device(device))}
    facts |= {"wild_type": str(wild_type), "table": None if table is None else str(table), "tracks": dict(tracks)}
    facts |= {"method": method, "window": window, "offset": rows.offset, "rows": len(new[column])}
    facts |= {"scored": len(rows.rows), "notices": notices, "compared": message}
    write_table(out, rows.columns, new, facts)
    variants = len(set(rows.mutations))
    rows_of = "" if len(rows.rows) == variants else f"{counted(len(rows.rows), 'row')} of "
    return f"{out}: {rows_of}{counted(variants, 'variant')}" + (f"; {message}" if message else "")


def _measured(table: Table, target: str | None) -> str | None:
    """Return the column of measured values: the only one with a usual name, if it has numbers, unless one is named."""
    usual = {name.lower() for name in TARGET_COLUMNS}
    names = [target] if target else [name for name in table.columns if name.lower() in usual]
    if len(names) != 1:
        return None
    try:
        table.numbers(names[0])
    except InputError:  # The column `effect` may also have `pathogenic`.
        if target:
            raise
        return None
    return names[0]


def _cells(rows: VariantRows, value_N: Array) -> list[str]:
    """Return a column with a value for each variant, and empty cells in the other rows."""
    cells = [""] * len(next(iter(rows.columns.values())))
    for row, value in zip(rows.rows, value_N.tolist(), strict=True):
        cells[row] = text(value)
    return cells


def _agreement(rows: VariantRows, score_N: Array, measured: str, value_N: Array) -> str:
    """Say how the scores of variants agree with their measured values. The values of a variant in several rows are
    averaged.
    """
    rows_of: dict[Variant, list[int]] = {}
    for n in np.flatnonzero(~np.isnan(value_N)).tolist():
        rows_of.setdefault(rows.mutations[n], []).append(n)
    score_V = np.array([score_N[members[0]] for members in rows_of.values()])
    value_V = np.array([value_N[members].mean() for members in rows_of.values()])
    rho, unit = variant_spearman(score_V, value_V, list(rows_of))
    return f"{spearman_sentence(rho, measured, unit)} over {counted(len(rows_of), 'variant')}"


# The language models


def _open(
    names: Sequence[str], window: int | None, tracks: Mapping[str, str], chains: Chains | None = None
) -> tuple[list[Weights], int]:
    """Find models, and check all of them before the first computes anything. Also return how many residues of a long
    protein each of them sees at once: by default as many as in training, the fewest of all. All get the same tracks,
    and join chains as the first model says by default.

    Raises:
        UsageError: a model is named twice, does not take a track, or has no positions for the window.
        InputError: a model cannot be read, or has no trained LM head.
    """
    if len(set(names)) < len(names):
        raise UsageError(f"--ensemble: a model is named twice ({', '.join(names)}); name each model once")
    opened = []
    for name in names:
        one = weights.joining(weights.read(name), chains, f"--join: {name}")
        chains = one.config.chains
        if "lm_head" in one.unlearned:
            raise InputError(f"{name}: has no trained LM head, which scores are read from; take another model")
        track_files(tracks, family_of(one.config).tracks, name, "--track ")
        most = one.config.most_tokens
        if window is not None and most is not None and window + 2 > most:
            raise UsageError(
                f"--window {window}: {name} has learned positions for {most - 2}; pass at most this number"
            )
        opened.append(one)
    return opened, min(window_of(one.config) for one in opened) if window is None else window


def _of_each(opened: Sequence[Weights], device: torch.device, compute: Callable[[Trunk], Any]) -> Array:
    """Return what `compute` makes of each model, [M, ...]. One model at a time is in memory."""
    values = []
    for one in opened:
        weights.report_altered(one.files)
        values.append(compute(weights.build(one, device).eval()))
    return np.stack(values)


def check_finite(score_XN: npt.NDArray[np.floating], model: str) -> None:
    """Refuse scores, [..., N], that are no finite numbers. `InputError` with their number."""
    if wrong := int((~np.isfinite(score_XN)).any(tuple(range(score_XN.ndim - 1))).sum()):
        raise InputError(
            f"{model}: {wrong:,} of {score_XN.shape[-1]:,} scores are no finite numbers: its weights are damaged, or "
            "so large that what it computes overflows; take another model or an earlier checkpoint"
        )


# Sequences


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
    over them. Numbers are missing if no residue is scored. `OUT.json` records how the table was made.

    Args:
        model: see `weights.read`.
        fasta: see `heads.predict`.
        out: a `.csv` or `.parquet` file.
        method: `pseudo-perplexity` masks each residue in turn, in a pass of its own; `one-pass` estimates the same from
            one pass for each window (`marginals.as_masked`).
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
    if method not in get_args(SequenceMethod):
        raise UsageError(
            f"--method {method}: sequences without variants are scored by {MASKED} or {ONE_PASS}; for variants of one "
            "protein give a table, or --all-singles"
        )
    if out.suffix not in (".csv", ".parquet"):
        raise UsageError(f"{out}: scores of sequences are written as .csv or .parquet; give the file that ending")
    if out.suffix == ".parquet":
        library("pyarrow", "tables", out)
    check(out, facts_file(out), overwrite=overwrite)
    names, tracks, computing = [model, *ensemble], tracks or {}, chosen_device(device)
    opened, window = _open(names, window, tracks, join_option(join))
    for name, one in zip(names, opened, strict=True) if method == ONE_PASS else ():
        if family_of(one.config).corruption is None:  # Its training does not say what it makes of visible residues.
            known = ", ".join(family.title for family in FAMILIES.values() if family.corruption)
            raise UsageError(
                f"--method {method}: the estimate from one pass holds for the training of {known} only, and {name} is "
                f"of {family_of(one.config).title}; pass --method {MASKED}"
            )
    with tempfile.TemporaryDirectory(prefix="esmshard-score-") as scratch:
        # The whole input is read before it is scored, so that a bad record at the end costs seconds, not a night.
        chains = opened[0].config.chains
        examples, notices = read_input(model, fasta, tracks, Path(scratch), chains)
        further = [notice for name in ensemble for notice in without_tracks(name, tracks)]
        for notice in further:
            say(notice)
        columns = _columns(opened, computing, examples, method, window)
        if nothing := int((columns["length"] == columns["not_scored"]).sum()):
            further.append(f"{counted(nothing, 'record')} without a score, as no residue is one of the 20 amino acids")
            say(further[-1])
        facts: dict[str, Any] = {"model": model, "ensemble": list(ensemble), "device": str(computing)}
        facts |= {"sequences": str(fasta), "method": method, "window": window, "tracks": dict(tracks)}
        facts |= {} if linker_of(examples.store.manifest) is None else {"join": chains.text}
        facts |= {"records": len(examples), "notices": [*notices, *further]}
        facts = without_directories(facts)
        about = {"facts": json.dumps(facts), "versions": json.dumps({"esmshard": version("esmshard")})}
        types = {"id": "string"} | {name: str(values_N.dtype) for name, values_N in columns.items()}
        fix = "make room, or choose another place with -o; the unfinished file was removed"
        with writing(out, fix), TableWriter(out, types, about) as writer:
            for start in range(0, len(examples), GROUP_ROWS):  # The ids of all records may not fit into memory.
                rows = range(start, min(start + GROUP_ROWS, len(examples)))
                numbers = {name: values_N[start : rows.stop] for name, values_N in columns.items()}
                writer.add({"id": [examples.id(n) for n in rows], **numbers})
            replace_json(facts_file(writer.work), facts)  # It gets its name together with the table.
    return f"{out}: {counted(len(examples), 'record')}"


def _columns(
    opened: Sequence[Weights], device: torch.device, examples: Examples, method: str, window: int
) -> dict[str, npt.NDArray[Any]]:
    """Compute all columns of numbers, int64 or float64 [N] each."""
    records = map(examples.store.residues, range(len(examples)))
    length_N, scored_N = np.array([(is_residue(one).sum(), len(scored_residues(one))) for one in records]).T

    def sums(esm: Trunk) -> Array:
        visible = family_of(esm.config).corruption if method == ONE_PASS else None
        proteins = ((one.tokens, one.tracks) for one in map(examples.get, range(len(examples))))
        return pseudo_log_likelihoods(esm, proteins, scored_N, window=window, visible=visible)

    sum_MN = _of_each(opened, device, sums)
    check_finite(sum_MN, ", ".join(one.source for one in opened))
    sum_MN = np.where(scored_N, sum_MN, np.nan)
    mean_MN, prefix = sum_MN / np.maximum(scored_N, 1), "one_pass_" if method == ONE_PASS else ""
    columns: dict[str, npt.NDArray[Any]] = {"length": length_N, "not_scored": length_N - scored_N}
    columns["window"] = np.minimum(examples.store.lengths, window).astype(np.int64)
    columns |= {f"{prefix}pseudo_log_likelihood": sum_MN.mean(0), f"{prefix}mean_log_p": mean_MN.mean(0)}
    if len(mean_MN) > 1:
        columns[f"{prefix}mean_log_p_sd"] = mean_MN.std(0, ddof=1)
    return columns | {f"{prefix}pseudo_perplexity": np.exp(-mean_MN.mean(0))}
