"""Scores variants and whole sequences with language models, without labels and without training.

The scores of variants follow Meier et al. 2021 (doi:10.1101/2021.07.09.450648). The score of a sequence is the
pseudo-perplexity of Salazar et al. 2020 (doi:10.18653/v1/2020.acl-main.240).
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from esmshard.io.paths import replace_json, replacing, without_directories
from esmshard.io.store import linker_of
from esmshard.io.tables import Table, counted
from esmshard.io.writers import GROUP_ROWS, TableWriter, check, facts_file, library, text
from esmshard.model import weights
from esmshard.model.families.family_registry import FAMILIES, corruption_of, family_of, window_of
from esmshard.model.trunk import Trunk
from esmshard.model.weights import Weights
from esmshard.predict import proposals
from esmshard.predict.heads import read_input
from esmshard.predict.pictures import draw_substitutions, matplotlib_figure
from esmshard.predict.variant_tables import (
    Variant,
    VariantRows,
    check_new,
    listed,
    not_of_the_20,
    positions,
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
"""The last column in a table of scored variants. The column says why a row has no score."""

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

    - `masked-marginals`: the sum over the mutated sites of log p(mutant) - log p(wild type), where p is the model's
      probability at the masked site of the wild type. Each site needs one forward pass, for any number of variants.
    - `wild-type-marginals`: the same sum from one pass in which nothing is masked.
    - `pseudo-perplexity`: the mean of log p over the residues of the variant, each masked in turn, which is the
      negative logarithm of the pseudo-perplexity. Each residue of each variant needs a pass. Only the 20 amino acids
      count. (The values differ from those of fair-esm's script, which reads wrong sites and skips the last site.)

    With the first two methods the score of the wild type is 0. The score is NaN for a variant that cannot be scored;
    see `not_of_the_20`.

    Args:
        model: a model with a trained LM head.
        wild_type: the residues of the wild type.
        variants: the mutations of each variant; no mutation for the wild type.
        method: one of the three methods above.
        window: the maximum number of residues that the model reads at once; by default as many as in its training.
        tracks: the values of each track of the wild type, by name, [L + 2, ...]. All variants have the same tracks.
    """
    if method not in METHODS:
        raise UsageError(f"method is {method!r}; it is one of {', '.join(METHODS)}")
    window = window_of(model.config) if window is None else window
    if window < 1:
        raise UsageError(f"a window of {window} residues: give at least 1")
    score_N = np.full(len(variants), np.nan)
    known = [n for n, variant in enumerate(variants) if not not_of_the_20(variant)]
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
    sites, hidden = sorted({m.position for n in known for m in variants[n]}), method == "masked-marginals"
    log_p_SA = log_probabilities(model, encode(wild_type), sites, hidden=hidden, window=window, tracks=tracks)
    log_p_of = dict(zip(sites, log_p_SA.astype(np.float64), strict=True))
    for n in known:
        score_N[n] = sum(
            log_p_of[m.position][RESIDUES.index(m.mutant)] - log_p_of[m.position][RESIDUES.index(m.wild)]
            for m in variants[n]
        )
    return score_N


def score_table(
    model: str,
    wild_type: Path,
    table: Path | None,
    out: Path,
    *,
    method: Method = "masked-marginals",
    propose: int | None = None,
    sites: str | None = None,
    png: Path | None = None,
    mutant: str | None = None,
    target: str | None = None,
    offset: int | Literal["auto"] = "auto",
    ensemble: Sequence[str] = (),
    window: int | None = None,
    tracks: Mapping[str, str] | None = None,
    device: DeviceName = None,
    overwrite: bool = False,
) -> str:
    """Score the variants of a table, write a CSV file, and return a message for the user.

    The file has the columns of the table, a column with the scores, which is named after the method, and a column `not
    scored because`. With several models the score is the mean over the models, and the column `METHOD_sd` has the
    standard deviation. A row that cannot be scored, such as a stop codon, stays in the file and has an empty score.

    With `propose`, the file has only the wild type and the chosen single substitutions: a first plate to measure, with
    a column `well` (`proposals.wells`), which `finetune` reads after a column of measured values was added.

    If the table has measured values, the message has Spearman's correlation with its interval, or the reason why the
    correlation is undefined. The file `OUT.json` records the method, the offset of the numbering, and notices.

    Args:
        model: the name or path of a language model; see `weights.read`.
        wild_type: a FASTA file with one protein.
        table: the table of variants; None for all single substitutions.
        out: the `.csv` file to write.
        method: the name of a method; see `score`.
        propose: how many single substitutions to choose, without a table; see `proposals.choose`.
        sites: the positions that chosen substitutions may change, divided by commas; by default all.
        png: a PNG file to write, with a map of all scored single substitutions; without a table.
        mutant: the column with the mutations; see `read_variants`.
        target: the column of measured values; by default the only column with a name in TARGET_COLUMNS.
        offset: the number that is added to the positions of the table; see `read_variants`.
        ensemble: the names or paths of models whose scores are averaged with those of `model`.
        window: the window in residues; see `score`. For several models the default is the smallest default window.
        tracks: the path of each track of the wild type, by the name of the track (docs/tracks.md).
        device: the name of the device; see `chosen_device`.
        overwrite: replace `out`.
    """
    if out.suffix != ".csv":
        raise UsageError(f"{out}: scores are written as .csv; give the file that ending")
    check(out, facts_file(out), *([] if png is None else [png]), overwrite=overwrite)
    if png is not None:
        matplotlib_figure()
    names, column, tracks = [model, *ensemble], method.replace("-", "_"), tracks or {}
    if table is not None:
        rows = read_rows(table, wild_type, mutant, offset)
    else:
        protein = protein_of(wild_type)
        allowed = range(len(protein)) if sites is None else positions(sites, len(protein))
        singles = [variant for variant in single_substitutions(protein) if variant[0].position in allowed]
        rows = listed(protein, [*([()] if propose else []), *singles])
    rows.columns.pop(NOT_SCORED, None)  # a table may already have the scores of another method
    check_new(out, rows.columns, [column, *([f"{column}_sd"] if ensemble else [])])
    rows = rows.leave_out(not_of_the_20, "not scored")
    if propose and propose >= len(rows.mutations):
        raise UsageError(
            f"--propose {propose}: only {len(rows.mutations) - 1:,} substitutions can be scored; pass fewer"
        )
    measured = None if rows.table is None else _measured(rows.table, target)
    value_N = np.empty(0) if measured is None else rows.measured(measured)
    opened, window = _open(names, window, tracks)
    files = track_files(tracks, family_of(opened[0].config).tracks_of(opened[0].config), model, "--track ")
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
    facts: dict[str, Any] = {}
    single_N = [n for n, variant in enumerate(rows.mutations) if variant]
    picture = (rows.protein, [rows.mutations[n][0] for n in single_N], score_MN.mean(0)[single_N])
    if propose:
        how: dict[str, Any] = {"count": propose, "kappa": proposals.KAPPA, "diversity": proposals.DIVERSITY}
        chosen = proposals.choose(values_MN=score_MN[:, 1:], variants=rows.mutations[1:], **how)
        facts["proposed"] = how | {"candidates": len(rows.mutations) - 1, "sites": sites or "all"}
        order = [0, *(n + 1 for n in chosen)]
        rows = replace(listed(rows.protein, [rows.mutations[n] for n in order]), notices=rows.notices)
        score_MN = score_MN[:, order]
    new = {column: _cells(rows, score_MN.mean(0))}
    if ensemble:
        new[f"{column}_sd"] = _cells(rows, score_MN.std(0, ddof=1))
    reasons = {NOT_SCORED: [rows.left_out.get(row, "") for row in range(len(new[column]))]}
    new |= proposals.wells(len(rows.rows), rows.columns) if propose else reasons
    message = None if measured is None else _agreement(rows, score_MN.mean(0), measured, value_N)
    facts |= {"model": model, "ensemble": list(ensemble), "device": str(chosen_device(device))}
    facts |= {"wild_type": str(wild_type), "table": None if table is None else str(table), "tracks": dict(tracks)}
    facts |= {"method": method, "window": window, "offset": rows.offset, "rows": len(new[column])}
    facts |= {"scored": len(rows.rows), "notices": notices, "compared": message}
    write_table(out, rows.columns, new, facts)
    if png is not None:
        marked = {variant[0] for variant in rows.mutations if variant} if propose else ()
        with writing(png), replacing(png, binary=True) as file:
            file.write(draw_substitutions(*picture, marked, column))
    if propose:
        return f"{out}: the wild type and {propose:,} of {counted(len(single_N), 'single substitution')}"
    variants = len(set(rows.mutations))
    rows_of = "" if len(rows.rows) == variants else f"{counted(len(rows.rows), 'row')} of "
    return f"{out}: {rows_of}{counted(variants, 'variant')}" + (f"; {message}" if message else "")


def _measured(table: Table, target: str | None) -> str | None:
    """Return the column of measured values: `target`, or the only column with a name in TARGET_COLUMNS. Return None if
    no or several columns have such a name, or if the only one has words. Raises `InputError` if `target` has words.
    """
    usual = {name.lower() for name in TARGET_COLUMNS}
    names = [target] if target else [name for name in table.columns if name.lower() in usual]
    if len(names) != 1:
        return None
    try:
        table.numbers(names[0])
    except InputError:  # the column may have words, such as `pathogenic`
        if target:
            raise
        return None
    return names[0]


def _cells(rows: VariantRows, value_N: Array) -> list[str]:
    """Return the cells of a new column, with the value of each variant. Rows without a variant have empty cells."""
    cells = [""] * len(next(iter(rows.columns.values())))
    for row, value in zip(rows.rows, value_N.tolist(), strict=True):
        cells[row] = text(value)
    return cells


def _agreement(rows: VariantRows, score_N: Array, measured: str, value_N: Array) -> str:
    """Return a sentence about the correlation of scores with measured values. Values of equal variants are averaged."""
    rows_of = defaultdict[Variant, list[int]](list)
    for n in np.flatnonzero(~np.isnan(value_N)).tolist():
        rows_of[rows.mutations[n]].append(n)
    score_V = np.array([score_N[members[0]] for members in rows_of.values()])
    value_V = np.array([value_N[members].mean() for members in rows_of.values()])
    rho, unit = variant_spearman(score_V, value_V, list(rows_of))
    return f"{spearman_sentence(rho, measured, unit)} over {counted(len(rows_of), 'variant')}"


# The language models


def _open(
    names: Sequence[str], window: int | None, tracks: Mapping[str, str], chains: Chains | None = None
) -> tuple[list[Weights], int]:
    """Open all models, and check every model before the first model computes. Also return the window in residues.

    The default window is the smallest with which the models were trained. All models get the same tracks. By default
    every model joins chains as the first model does.
    """
    if len(set(names)) < len(names):
        raise UsageError(f"--ensemble: a model is named twice ({', '.join(names)}); name each model once")
    opened = []
    for name in names:
        language_model = weights.joining(weights.read(name), chains, f"--join: {name}")
        chains = language_model.config.chains
        if "lm_head" in language_model.unlearned:
            raise InputError(f"{name}: has no trained LM head, which computes the scores; use another model")
        track_files(tracks, family_of(language_model.config).tracks_of(language_model.config), name, "--track ")
        most = language_model.config.most_tokens
        if window is not None and most is not None and window + 2 > most:
            raise UsageError(
                f"--window {window}: {name} has position embeddings for only {most - 2} residues; pass this number or "
                "less"
            )
        opened.append(language_model)
    return opened, min(window_of(language_model.config) for language_model in opened) if window is None else window


def _of_each(opened: Sequence[Weights], device: torch.device, compute: Callable[[Trunk], Any]) -> Array:
    """Return the result of `compute` for each of M models, [M, ...]. Only one model at a time is in memory."""
    values = []
    for language_model in opened:
        weights.report_altered(language_model.files)
        values.append(compute(weights.build(language_model, device).eval()))
    return np.stack(values)


def check_finite(score_MN: npt.NDArray[np.floating], model: str) -> None:
    """Refuse the scores of M models for N variants or records, [M, N], if a score is NaN or infinite."""
    if wrong := int((~np.isfinite(score_MN)).any(0).sum()):
        raise InputError(
            f"{model}: {wrong:,} of {score_MN.shape[-1]:,} scores are NaN or infinite: the weights are damaged, or "
            "numbers overflow; use another model or an earlier checkpoint"
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
    """Score whole sequences, and write a table with a row for each record. Return a message for the user.

    The columns are `id`, `length` and:
    - `not_scored`: the number of residues that are none of the 20 amino acids, and therefore not in the sum;
    - `window`: how many residues the model read at once, including linkers between chains;
    - `pseudo_log_likelihood`: the sum of log p over the scored residues;
    - `mean_log_p`: this sum divided by the number of scored residues;
    - `pseudo_perplexity`: exp(-mean_log_p).
    The last three names begin with `one_pass_` for the method `one-pass`. With several models the sum and `mean_log_p`
    are means over the models, and `mean_log_p_sd` is the standard deviation over the models. If no residue of a record
    is scored, the columns after `window` have no numbers for it. The file `OUT.json` records how the table was made.

    Args:
        model: the name or path of a language model; see `weights.read`.
        fasta: the input file or directory; see `heads.predict`.
        out: the `.csv` or `.parquet` file to write.
        method: `pseudo-perplexity` masks each residue in turn, with one forward pass for each residue. `one-pass`
            estimates the same numbers from one pass for each window (see `marginals.as_masked`).
        ensemble: the names or paths of models whose scores are averaged with those of `model`.
        window: the maximum number of residues that the models read at once; see `score_table`.
        tracks: the path of each track, by its name (docs/tracks.md). If `fasta` has structures, `inside` in place of a
            path means their coordinates.
        join: how the chains of a record are joined (docs/chains.md); by default as the model joins chains.
        device: the name of the device; see `chosen_device`.
        overwrite: replace `out`.
    """
    if method not in get_args(SequenceMethod):
        raise UsageError(f"--method {method}: is for a table or --all-singles; choose {MASKED} or {ONE_PASS}")
    if out.suffix not in (".csv", ".parquet"):
        raise UsageError(f"{out}: scores of sequences are written as .csv or .parquet; use one of these endings")
    if out.suffix == ".parquet":
        library("pyarrow", "tables", out)
    check(out, facts_file(out), overwrite=overwrite)
    names, tracks, computing = [model, *ensemble], tracks or {}, chosen_device(device)
    opened, window = _open(names, window, tracks, join_option(join))
    for name, language_model in zip(names, opened, strict=True) if method == ONE_PASS else ():
        if corruption_of(config := language_model.config) is None:
            known = ", ".join(other.title for other in FAMILIES.values() if other.corruption)
            raise UsageError(
                f"--method {method}: needs a model that was trained to predict visible residues too, as {known}, and "
                f"{name} ({family_of(config).title}) was not; pass --method {MASKED}"
            )
    with tempfile.TemporaryDirectory(prefix="esmshard-score-") as scratch:
        # The input is read to its end before the first record is scored, so a bad record costs only seconds.
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
            replace_json(facts_file(writer.work), facts)
    return f"{out}: {counted(len(examples), 'record')}"


def _columns(
    opened: Sequence[Weights], device: torch.device, examples: Examples, method: str, window: int
) -> dict[str, npt.NDArray[Any]]:
    """Compute all columns of the table except the ids. Each column has a number for each of N records, [N]."""
    records = map(examples.store.residues, range(len(examples)))
    length_N, scored_N = np.array([(is_residue(tokens).sum(), len(scored_residues(tokens))) for tokens in records]).T

    def sums(esm: Trunk) -> Array:
        visible = corruption_of(esm.config) if method == ONE_PASS else None
        proteins = ((example.tokens, example.tracks) for example in map(examples.get, range(len(examples))))
        return pseudo_log_likelihoods(esm, proteins, scored_N, window=window, visible=visible)

    sum_MN = _of_each(opened, device, sums)
    check_finite(sum_MN, ", ".join(language_model.source for language_model in opened))
    sum_MN = np.where(scored_N, sum_MN, np.nan)
    mean_MN, prefix = sum_MN / np.maximum(scored_N, 1), "one_pass_" if method == ONE_PASS else ""
    columns: dict[str, npt.NDArray[Any]] = {"length": length_N, "not_scored": length_N - scored_N}
    columns["window"] = np.minimum(examples.store.lengths, window).astype(np.int64)
    columns |= {f"{prefix}pseudo_log_likelihood": sum_MN.mean(0), f"{prefix}mean_log_p": mean_MN.mean(0)}
    if len(mean_MN) > 1:
        columns[f"{prefix}mean_log_p_sd"] = mean_MN.std(0, ddof=1)
    return columns | {f"{prefix}pseudo_perplexity": np.exp(-mean_MN.mean(0))}
