"""Predicts with a fine-tuned model for every record of an input, in the order of the input, in one process."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esmshard.batch import Inputs
from esmshard.data.batching.loader import Examples, Store
from esmshard.data.batching.packing import by_length
from esmshard.data.structures.structure_folder import cached_split, holds_structures, notices, require_structures
from esmshard.data.tracks import record_tracks, track_files, with_paths
from esmshard.devices import DeviceName, chosen_device, is_out_of_memory, packs_at_once, side_by_side
from esmshard.errors import InputError, UsageError, reading, writing
from esmshard.io.array_formats import FORMATS, About, FormatWriter, Output, Pool, Row
from esmshard.io.paths import replace_json, without_directories
from esmshard.io.store import TokenStore, ingest, is_store, linker_of
from esmshard.io.symbols import Rules
from esmshard.io.writers import (
    TableWriter,
    chains_file,
    check,
    facts_file,
    failures_file,
    library,
    write_chains,
    write_failures,
)
from esmshard.model import weights
from esmshard.model.families.family_registry import family_of
from esmshard.predict import pictures
from esmshard.progress import Progress, rate, say
from esmshard.tasks.base import Task, of_residues
from esmshard.tasks.finetuned import FineTuned, load_finetuned, without_tracks
from esmshard.tasks.registry import traits
from esmshard.tasks.residue import ResidueSettings, ResidueTask
from esmshard.vocab import BETWEEN, Chains, chain_spans, decode

Array = npt.NDArray[np.float32]

TOKENS, GPU_TOKENS = 4096, 16_384
"""The maximum number of tokens in a batch: TOKENS on the CPU and for maps of residue pairs, otherwise GPU_TOKENS.
Batches that CPU cores compute at the same time share this number. A record with more tokens has its own batch."""
LEAST = 1024
"""The maximum number of tokens in a batch is never reduced below this number, since small batches are slow."""
WINDOW, WINDOW_TOKENS = 2048, 1 << 18
"""The maximum numbers of records and tokens in a window of successive records. The records of a window are sorted by
length, and their predictions stay in memory together: up to 256 MiB of pair maps, or one larger map."""
PAIR = 256
"""For a record with more tokens than this, the map of residue pairs needs more memory than the model's layers. The
record then counts as tokens^2 / PAIR tokens, so a batch of 4,096 tokens has up to 2^20 pairs."""
FORMAT, VERSION = "esmshard-predictions", "1"
PREDICTION = "prediction"
NOT_FINITE = "the predictions are NaN or infinite: the weights are damaged, or numbers overflow"
ARRAYS, TABLES = ("npz", "h5", "zarr", "safetensors"), ("csv", "parquet")
"""The formats with one array for each record, and the formats of tables with a row for each protein or residue."""


class Prediction(Output):
    """The prediction for a record: an array [C] for pool `mean`, [L, C] for `residue`, or [L, L] for `contacts`."""

    @property
    def name(self) -> str:
        """The name that the prediction has in output files."""
        return PREDICTION


def predict(
    model: str,
    fasta: Path,
    out: Path,
    *,
    png: Path | None = None,
    weights_out: Path | None = None,
    tracks: Mapping[str, str] | None = None,
    complexes: str | None = None,
    device: DeviceName = None,
    overwrite: bool = False,
) -> tuple[int, list[tuple[str, int, str]]]:
    """Write the model's predictions for each record to the file `out`, and return the number of records in this file.

    Also return the id, the number of residues and the reason for each record that failed. A record fails if it does not
    fit into memory, is too long for the model's position embeddings, or gets predictions that are NaN or infinite.
    The file `OUT.failed.tsv` lists these records. The file `OUT.json` says how `out` was made and how records were
    changed.

    An `.npz`, `.h5`, `.zarr` or `.safetensors` file has one array for each record under the record's id, as the command
    `embed` writes it. For contacts the array is a symmetric matrix of probabilities, float32 [L, L]; for other tasks
    see `Task.predict`. A `.csv` or `.parquet` file has a row for each protein or residue, and cannot hold contacts.

    Linkers between the chains of a record are removed. A table counts the residues of each chain from 1. The file
    `OUT.chains.tsv` lists the chain lengths and how the chains were joined.

    Args:
        model: a directory that `consolidate` wrote.
        fasta: a FASTA file, `-` for standard input, a token store, a PDB or mmCIF file, or a directory of structures.
        out: the file to write.
        png: a directory for pictures of maps of residue pairs; see `esmshard.predict.pictures`.
        weights_out: a file for the weights with which the head pools the residues (`task.pooling`), in the formats of
            `out`: a row for each residue, or an array [L] for each record. The weights of each pooled chain sum to 1.
        tracks: the path of each track, by its name (docs/tracks.md). If `fasta` has structures, `inside` in place of a
            path means their coordinates.
        complexes: which chains of a structure file become one record; see the key `data.complexes` of a recipe.
        device: the name of the device; see `chosen_device`.
        overwrite: replace `out`, `weights_out`, and pictures with the same names.

    Raises:
        InputError: the input or the model cannot be used, or no record could be predicted.
        UsageError: `out`, `png` or `weights_out` does not fit the task, exists already, or needs a package that is not
            installed.
    """
    _check_out(out, png, overwrite)
    if weights_out is not None:
        _check_out(weights_out, None, overwrite)
        if weights_out.resolve() == out.resolve():
            raise UsageError(f"--weights {weights_out}: is also the file of -o; give the weights another file")
    computing = chosen_device(device)
    with tempfile.TemporaryDirectory(prefix="esmshard-predict-") as scratch:
        # The input is read to its end before the model is opened, so a bad record costs only seconds.
        examples, sentences = read_input(model, fasta, tracks or {}, Path(scratch), complexes=complexes)
        store, finetuned = examples.store, load_finetuned(model, computing)
        task, failed, chains = finetuned.task, list[tuple[str, int, str]](), dict[str, list[int]]()
        if png is not None and task.names:
            raise UsageError(f"--png {png}: is for pair maps, and {model} predicts none; leave --png out")
        if weights_out is not None and task.residue_weights(np.empty(0, np.float32)) is None:
            raise UsageError(
                f"--weights {weights_out}: {model} has no weights of residues, which only task.pooling=attention and "
                "light_attention learn; leave --weights out"
            )
        about = finetuned.about
        facts = {"format": FORMAT, "version": VERSION, "model": model, "weights_sha256": about.get("weights_sha256")}
        facts |= {"task": about["recipe"]["task"], "test": about.get("test"), "input": str(fasta)}
        facts |= {"tracks": dict(tracks or {}), "device": str(computing), "notices": sentences}
        facts["versions"] = {name: version(name) for name in ("esmshard", "torch", "numpy")}
        facts = without_directories(facts)
        began, residues = time.monotonic(), 0
        with (
            writing(out, "make room, or choose another place with -o; the unfinished file was removed"),
            nullcontext() if png is None else pictures.collected(png) as add_picture,
            _writer(out, task, facts, store) as writer,
            nullcontext() if weights_out is None else _writer(weights_out, _WEIGHTS, facts, store) as weights_writer,
            Progress("predict", len(store)) as progress,
        ):
            convert = None if weights_writer is None else np.asarray  # the outputs with the weights stay as they are
            results = predictions(finetuned, examples.tokens, lambda n: task.question(examples.get(n)), convert=convert)
            for n, output in enumerate(results):
                record_id, sequence = store.id(n), store.residues(n)
                lengths = [end - start for start, end in chain_spans(sequence)]
                chains |= {record_id: lengths} if len(lengths) > 1 else {}
                if isinstance(output, str):
                    failed.append((record_id, sum(lengths), output))
                else:
                    values = output if weights_writer is None else task.predict(output)
                    _add(writer, task, record_id, values, sequence)
                    if weights_writer is not None and (weight_L := task.residue_weights(output)) is not None:
                        _add(weights_writer, _WEIGHTS, record_id, weight_L, sequence)
                    if add_picture is not None:
                        add_picture(record_id, pictures.draw(values, record_id, chains=lengths))
                residues += sum(lengths)
                progress.update(n + 1, f"{rate(residues / (time.monotonic() - began))} residues/s")
            if len(failed) == len(store):
                write_failures(failures_file(out), failed)
                raise InputError(
                    f"{fasta}: no record could be predicted, see {failures_file(out)}; the first: {failed[0][2]}"
                )
            # These three files get their final names together with the output file.
            facts |= {"records": len(store) - len(failed), "failed": len(failed)}
            more = {} if weights_writer is None else {weights_writer.work: {"weights_of": out.name}}
            for work, of_weights in {writer.work: {}, **more}.items():
                write_failures(failures_file(work), failed)
                write_chains(work, chains, finetuned.model.trunk.config.chains.text)
                replace_json(facts_file(work), facts | of_weights)
        return len(store) - len(failed), failed


class _Weights(ResidueTask):
    """Describes a file of weights: a number for each residue, in the column `weight`."""

    names = ("weight",)


_WEIGHTS = _Weights(ResidueSettings.model_validate({"name": "residue", "kind": "number"}), {})


def _add(
    writer: FormatWriter | TableWriter, task: Task, record_id: str, values: Array, sequence: npt.NDArray[np.uint8]
) -> None:
    """Write the values of a record, whose tokens without `<cls>` and `<eos>` are `sequence`."""
    if isinstance(writer, TableWriter):
        writer.add(rows_of(task, record_id, values, decode(sequence)))
        return
    lengths = [end - start for start, end in chain_spans(sequence)]
    several = tuple(lengths) if len(lengths) > 1 else ()
    writer.add(Row(record_id, sum(lengths), {PREDICTION: values}, chains=several))


def _check_out(out: Path, png: Path | None, overwrite: bool) -> None:
    """Refuse output paths whose format cannot be written, or whose files exist and may not be replaced."""
    form, known = out.suffix.removeprefix("."), (*ARRAYS, *TABLES)
    if form not in known:
        raise UsageError(f"{out}: predictions are written as .{', .'.join(known)}; give the file one of these endings")
    if form == "parquet":
        library("pyarrow", "tables", out)
    if form in ARRAYS:
        FORMATS[form].require(out)
        FORMATS[form].check_place(out, overwrite=overwrite)
    else:
        check(out, overwrite=overwrite)
    check(failures_file(out), chains_file(out), facts_file(out), overwrite=overwrite)
    if png is not None:
        pictures.check(png, overwrite=overwrite)


def read_input(
    model: str,
    fasta: Path,
    tracks: Mapping[str, str],
    scratch: Path,
    chains: Chains | None = None,
    complexes: str | None = None,
) -> tuple[Examples, list[str]]:
    """Read the records of an input and their tracks. Print and return sentences about changes to records.

    `scratch` is a directory for a token store of the records. `chains` says how the chains of a record are joined. The
    default is in the model's configuration. The other arguments and the errors are as for the function `predict`.
    """
    structures = holds_structures(fasta)
    require_structures(fasta, complexes)
    opened = weights.read(model)
    files = with_paths(fasta, track_files(tracks, family_of(opened.config).tracks_of(opened.config), model, "--track "))
    with writing(scratch, "make room there, or set TMPDIR to a directory that has room"):
        read = cached_split(fasta, complexes) if structures else fasta
        linker = (chains or opened.config.chains).tokens
        store = TokenStore(read) if is_store(read) else ingest([read], scratch / "store", Rules(linker=linker))
        store.check_linker(linker, read)
    with reading(f"{model}/{weights.ABOUT}", "consolidate the run again"):
        about = weights.record_of(opened.files)
        apart = bool(about) and traits(about["recipe"]["task"]["name"]).pairs
    examples = Examples("input", fasta, store, None, apart=apart)
    sentences = [f"{fasta}: {notice}" for notice in (*(notices(read) if structures else ()), *examples.notices)]
    if files:
        of_store = len(examples.notices)
        examples.add_tracks(record_tracks(files, store))
        sentences += examples.notices[of_store:]
    sentences += without_tracks(model, tracks)
    for sentence in sentences:
        say(sentence)
    return examples, sentences


def _writer(out: Path, task: Task, facts: Mapping[str, Any], store: Store) -> FormatWriter | TableWriter:
    form = out.suffix.removeprefix(".")
    about: dict[str, str] = {name: facts[name] for name in ("format", "version", "model")}
    about |= {name: json.dumps(facts[name]) for name in ("task", "notices", "versions")}
    if form in ARRAYS:
        pool: Pool = "contacts" if not task.names else "residue" if task.per_residue else "mean"
        return FORMATS[form](out, About((Prediction(pool, None),), len(task.names), "fp32", None, about))
    if not task.names:
        raise UsageError(f"{out}: pair maps do not fit into a table; give the file the ending .npz")
    columns = columns_of(task, chains=task.per_residue and linker_of(store.manifest) is not None)
    return TableWriter(out, columns, about, quoted=any("\r" in name for name in task.names))


def columns_of(task: Task, *, chains: bool) -> dict[str, str]:
    """Return the names and types of the columns of a table of predictions.

    Columns that identify a row come first, such as `id`, and `chain` if `chains` is set. Then come the predictions. A
    target with the name of an earlier column gets the column `NAME (predicted)`.
    """
    first = {"id": "string"}
    if task.per_residue:
        first |= {"chain": "int32"} if chains else {}
        first |= {"position": "int32", "residue": "string"}
    elif task.settings.pairs:
        first |= {"length_a": "int32", "length_b": "int32"}
    first |= {"prediction": "string"} if task.one_of_names else {}
    return first | {f"{name} (predicted)" if name in first else name: "float32" for name in task.names}


def rows_of(task: Task, record_id: str, values: Array, residues: str) -> dict[str, Sequence[Any]]:
    """Return a record's cells in a table of predictions, by column: one row, or one row for each residue.

    Residues are counted from 1 in each chain. `values` are the predictions, [C] for a record or [L, C] for L residues.
    The text `residues` has `:` between chains.
    """
    values_RC, chains = values.reshape(-1, len(task.names)), residues.split(BETWEEN)
    cells: dict[str, Sequence[Any]] = {"id": [record_id] * len(values_RC)}
    if task.per_residue:
        cells["chain"] = [k for k, chain in enumerate(chains, 1) for _ in chain]
        cells["position"] = [place for chain in chains for place in range(1, len(chain) + 1)]
        cells["residue"] = "".join(chains)
    elif task.settings.pairs:
        cells |= {name: [len(chain)] for name, chain in zip(("length_a", "length_b"), chains, strict=True)}
    if task.one_of_names:
        cells["prediction"] = [task.names[k] for k in values_RC.argmax(1).tolist()]
    named = [name for name in columns_of(task, chains=True) if name not in cells]
    return cells | dict(zip(named, values_RC.T.tolist(), strict=True))


def predictions(
    finetuned: FineTuned,
    tokens_N: npt.NDArray[np.integer[Any]],
    question: Callable[[int], Inputs],
    least: int | None = None,
    convert: Callable[[Array], Array] | None = None,
) -> Iterator[Array | str]:
    """Yield the prediction for each record in order, or the reason why the prediction failed.

    Args:
        finetuned: the model with its task.
        tokens_N: the number of tokens of each record.
        question: a function that returns the model's input for the index of a record (see `Task.question`).
        least: each batch may have at least this many tokens, even if CPU cores share TOKENS; by default LEAST.
        convert: the function that converts the head's output for a record; by default `Task.predict`.
    """
    task, device, limit = finetuned.task, finetuned.model.device, finetuned.model.trunk.config.most_tokens
    pairs, convert = not task.names, convert or task.predict
    most = GPU_TOKENS if device.type == "cuda" and not pairs else TOKENS
    if not pairs:  # Maps need much memory, so all cores compute one batch of maps together.
        most = max(most // packs_at_once(device), least or LEAST)
    cost_N = tokens_N.astype(np.int64)
    cost_N = np.maximum(cost_N, cost_N**2 // PAIR) if pairs else cost_N

    def values(inputs: Sequence[Inputs]) -> list[Array] | str:
        try:
            outputs = zip(finetuned.model.outputs(inputs), inputs, strict=True)
            return [of_residues(task, convert(output), record.tokens[1:-1]) for output, record in outputs]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return f"out of memory: {error}"[:300]

    for window in windows(cost_N):
        inputs_of = {n: question(n) for n in window}
        short = [n for n in window if limit is None or inputs_of[n].longest <= limit]
        too_long = f"too long: the model has position embeddings for only {(limit or 0) - 2} residues"
        done: dict[int, Array | str] = dict.fromkeys(window, too_long)
        packs = [[short[k] for k in group] for group in by_length(cost_N[short].tolist(), most)] if short else []
        inputs = [[inputs_of[n] for n in members] for members in packs]
        results = map(values, inputs) if pairs else side_by_side(values, inputs, device)
        for members, arrays in zip(packs, results, strict=True):
            if not isinstance(arrays, str):
                done |= zip(members, arrays, strict=True)
                continue
            if len(members) > 1:  # later batches of this size would not fit into memory either
                most = max(LEAST, min(most, int(cost_N[members].sum()) // 2))
            for n in members:  # one record at a time
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                alone = values([inputs_of[n]])
                done[n] = alone if isinstance(alone, str) else alone[0]
        for n in window:
            array = done.pop(n)
            yield array if isinstance(array, str) or np.isfinite(array).all() else NOT_FINITE


def windows(cost_N: npt.NDArray[np.int64]) -> Iterator[range]:
    """Yield successive ranges of record indices: up to WINDOW records with WINDOW_TOKENS tokens, or one long record."""
    first = total = 0
    for n, cost in enumerate(cost_N.tolist()):
        if n > first and (n - first == WINDOW or total + cost > WINDOW_TOKENS):
            yield range(first, n)
            first, total = n, 0
        total += cost
    yield range(first, len(cost_N))
