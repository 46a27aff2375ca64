"""Predictions of a fine-tuned head for every record of a FASTA file, in input order, in one process."""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from esmshard.batch import Inputs
from esmshard.data.batching.loader import Examples, Store
from esmshard.data.batching.packing import by_length
from esmshard.data.structures.structure_folder import cached_split, holds_structures, notices, require_structures
from esmshard.data.tracks import TrackFile, record_tracks, track_files, with_paths
from esmshard.devices import DeviceName, chosen_device, is_out_of_memory, packs_at_once, side_by_side
from esmshard.errors import InputError, UsageError, writing
from esmshard.io.array_formats import FORMATS, About, FormatWriter, Output, Pool, Row
from esmshard.io.paths import replace_json, replacing, without_directories
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
)
from esmshard.model import weights
from esmshard.model.families.family_registry import family_of
from esmshard.predict import contact_pictures
from esmshard.progress import Progress, rate, say
from esmshard.tasks.base import Task, of_residues
from esmshard.tasks.finetuned import FineTuned, load_finetuned, without_tracks
from esmshard.tasks.registry import traits
from esmshard.vocab import BETWEEN, Chains, chain_spans, decode

Array = npt.NDArray[np.float32]

TOKENS, GPU_TOKENS = 4096, 16_384
"""The default tokens computed at once: TOKENS for pair maps on every device, and on the CPU; GPU_TOKENS for other tasks
on a GPU.
"""
LEAST = 1024
"""The tokens of a pack below which smaller packs are only slower."""
WINDOW, PACKS = 512, 64
"""The most records that are sorted by length together, and most packs that they make. Their predictions stay in memory
until the window is done. 64 packs of pair maps are at most 256 MiB, unless single records are longer than a pack.
"""
PAIR = 256
"""The tokens of a record from which on the pair map uses more memory than the trunk. A pack of 4,096 tokens of shorter
proteins is equivalent to a pack of at most 2^20 pairs of longer ones: one of 1,024 tokens, or four of 512.
"""
FORMAT, VERSION = "esmshard-predictions", "1"
PREDICTION = "prediction"
ARRAYS, TABLES = ("npz", "h5", "zarr", "safetensors"), ("csv", "parquet")
"""The formats with an array for each record, and those with a line for each protein or residue."""


@dataclass(frozen=True)
class Prediction(Output):
    """The array of predictions of a record: [C] of a protein, [L, C] of its residues, or [L, L] if C is 0."""

    pool: Pool = "residue"
    layer: int | None = None
    per_residue: bool = field(default=False, kw_only=True)
    n_names: int = field(default=0, kw_only=True)
    """C"""

    @property
    def name(self) -> str:
        """Return the name that files use."""
        return PREDICTION

    @property
    def pooled(self) -> bool:
        """Whether each record has one vector."""
        return self.n_names > 0 and not self.per_residue

    @property
    def paired(self) -> bool:
        """Whether each pair of residues has a value."""
        return self.n_names == 0


class Failure(NamedTuple):
    """A record that is missing in the output."""

    id: str
    length: int
    """The number of residues."""
    reason: str
    """The reason of the failure, as a clause for users."""


class Predicted(NamedTuple):
    """The result of a prediction run."""

    records: int
    """The number of records in the output."""
    failures: tuple[Failure, ...]
    """The records that are not in the output, but in `OUT.failed.tsv`."""


def predict(
    model: str,
    fasta: Path,
    out: Path,
    *,
    png: Path | None = None,
    tokens: int | None = None,
    tracks: Mapping[str, str] | None = None,
    complexes: str | None = None,
    device: DeviceName = None,
    overwrite: bool = False,
) -> Predicted:
    """Write the head's predictions for each record.

    An `.npz`, `.h5`, `.zarr` or `.safetensors` file has one array for each record under its id, as `embed` writes it:
    for contacts float32 [L, L], symmetric probabilities; for other tasks see their `predict`. A `.csv` or `.parquet`
    has a line for each protein, or for each residue; contacts cannot be written so.

    Linkers between the chains of a record are cut out: its residues are those of one chain after the other, a table
    counts them in each chain, and `OUT.chains.tsv` lists the residues of each chain and how they were joined.

    A record that does not fit into memory, or is too long for a model with learned positions, is left out of the output
    and listed in `OUT.failed.tsv`; see `write_failures`. `OUT.json` says how the output was made, and what
    was changed in the records or left out of them.

    Args:
        model: a directory that `consolidate` wrote.
        fasta: plain or compressed FASTA file, `-` for standard input, a token store, or structures whose sequences are
            read: a PDB or mmCIF file, or a directory of them.
        out: the file to write.
        png: directory for a picture of each pair map; see `esmshard.predict.contact_pictures`.
        tokens: most tokens computed at once: in one pack on a GPU, in one pack on each core of the CPU, and for pair
            maps always in one pack. A longer record is computed alone. By default 4,096, on a GPU 16,384 except for
            pair maps. The number changes results by rounding only.
        tracks: a path, or `inside`, by the name of each track of the records (docs/tracks.md).
        complexes: see `recipe.DataSettings.complexes`.
        device: see `chosen_device`.
        overwrite: replace `out`, and pictures of the same names.

    Raises:
        InputError: input or model cannot be used, or no record fits into memory.
        UsageError: `out` or `png` does not fit the task, exists already, or needs a package that is not installed.
    """
    _check_out(out, png, overwrite)
    computing = chosen_device(device)
    with tempfile.TemporaryDirectory(prefix="esmshard-predict-") as scratch:
        # The whole input is read before the model, so that a bad record at the end costs seconds, not a night.
        examples, sentences = read_input(model, fasta, tracks or {}, Path(scratch), complexes=complexes)
        store, found = examples.store, load_finetuned(model, computing)
        if png is not None and found.task.names:
            raise UsageError(f"--png {png}: is for pair maps, and {model} predicts none; leave --png out")
        facts = _facts(model, found, examples, tracks or {}, sentences)
        failed, chains, began, residues = list[Failure](), dict[str, list[int]](), time.monotonic(), 0
        with (
            writing(out, "make room, or choose another place with -o; the unfinished file was removed"),
            _removed_with(out),
            _writer(out, found, facts, store) as writer,
            nullcontext() if png is None else contact_pictures.MapFolder(png) as pictures,
            Progress("predict", len(store)) as progress,
        ):
            for n, values in enumerate(_predictions(found, examples, tokens)):
                record_id, sequence = store.id(n), store.residues(n)
                each = [end - start for start, end in chain_spans(sequence)]
                chains |= {record_id: each} if len(each) > 1 else {}
                reason = values if isinstance(values, str) else "" if np.isfinite(values).all() else _NOT_FINITE
                if reason:
                    failed.append(Failure(record_id, sum(each), reason))
                elif not isinstance(values, str):
                    _add(writer, found.task, pictures, record_id, values, sequence)
                residues += sum(each)
                progress.update(n + 1, f"{rate(residues / (time.monotonic() - began))} residues/s")
            # The lists come first: an output is never there without them.
            write_failures(out, failed)
            write_chains(out, chains, found.model.trunk.config.chains.text)
            if len(failed) == len(store):
                raise InputError(
                    f"{fasta}: no record could be predicted, see {failures_file(out)}; the first: {failed[0].reason}"
                )
            facts |= {"records": len(store) - len(failed), "failed": len(failed)}
            replace_json(facts_file(out), facts)  # An output is never there without it, either.
        return Predicted(len(store) - len(failed), tuple(failed))


def write_failures(out: Path, failures: Sequence[Failure]) -> None:
    """Write `OUT.failed.tsv`, in the order of the input. If nothing failed, remove the file of an earlier run."""
    path = failures_file(out)
    if not failures:
        path.unlink(missing_ok=True)
        return
    # Ids have no white space; reasons come from libraries, and may have any.
    rows = [("id", "length", "reason"), *((one.id, str(one.length), " ".join(one.reason.split())) for one in failures)]
    with replacing(path) as file:
        file.writelines("\t".join(row) + "\n" for row in rows)


_NOT_FINITE = "the predictions are no finite numbers: the weights are damaged, or overflow"


@contextmanager
def _removed_with(out: Path) -> Iterator[None]:
    """Remove the files that are written beside an output, and before it, if the output cannot be written."""
    try:
        yield
    except OSError:
        for path in (chains_file(out), facts_file(out)):
            path.unlink(missing_ok=True)
        raise


def _check_out(out: Path, png: Path | None, overwrite: bool) -> None:
    """Refuse outputs that cannot be written, or are there already."""
    form = out.suffix.removeprefix(".")
    if form not in (*ARRAYS, *TABLES):
        raise UsageError(
            f"{out}: predictions are written as .{', .'.join((*ARRAYS, *TABLES[:-1]))} or .{TABLES[-1]}; give the file "
            "that ending"
        )
    if form == "parquet":
        library("pyarrow", "tables", out)
    if form in ARRAYS:
        FORMATS[form].require(out)
        FORMATS[form].check_place(out, overwrite=overwrite)
    else:
        check(out, overwrite=overwrite)
    check(failures_file(out), chains_file(out), facts_file(out), overwrite=overwrite)
    if png is not None:
        contact_pictures.check(png, overwrite=overwrite)


def _add(
    writer: FormatWriter | TableWriter,
    task: Task,
    pictures: contact_pictures.MapFolder | None,
    record_id: str,
    values: Array,
    sequence: npt.NDArray[np.uint8],
) -> None:
    """Write the predictions of one record, and draw them if they are a map and pictures are wanted."""
    if isinstance(writer, TableWriter):
        writer.add(rows_of(task, record_id, values, decode(sequence)))
        return
    chains = tuple(end - start for start, end in chain_spans(sequence))
    several = chains if len(chains) > 1 else ()
    writer.add(Row(record_id, sum(chains), {PREDICTION: np.asarray(values, np.float32)}, chains=several))
    if pictures is not None:
        pictures.add(record_id, values, list(chains))


def read_input(
    model: str,
    fasta: Path,
    tracks: Mapping[str, str],
    scratch: Path,
    chains: Chains | None = None,
    complexes: str | None = None,
) -> tuple[Examples, list[str]]:
    """Return the records of an input with their tracks, and sentences on what was changed or left out, all of which
    are printed.

    Args:
        model: the model that takes the tracks.
        fasta: see `predict`.
        tracks: see `predict`.
        scratch: directory for a token store of the records.
        chains: how the chains of a record are joined; by default as the model says.
        complexes: see `predict`.

    Raises:
        InputError: the input or a track cannot be read.
        UsageError: the model does not take such a track, or `complexes` is given for sequences.
    """
    structures = holds_structures(fasta)
    require_structures(fasta, complexes)
    files = list[TrackFile]()
    if tracks:
        takes = family_of(weights.read(model).config).tracks
        files = with_paths(fasta, track_files(tracks, takes, model, "--track "))
    with writing(scratch, "make room there, or set TMPDIR to a directory that has room"):
        read = cached_split(fasta, complexes) if structures else fasta
        found = weights.read(model)
        linker = (chains or found.config.chains).tokens
        store = TokenStore(read) if is_store(read) else ingest([read], scratch / "store", Rules(linker=linker))
        store.check_linker(linker, read)
    about = weights.task_of(found.files)
    examples = Examples("input", fasta, store, None, apart=about is not None and traits(about[0]).pairs)
    of_store = len(examples.notices)
    of_records = [*(notices(read) if structures else ()), *examples.notices]
    for notice in of_records:
        say(f"{fasta}: {notice}")
    if files:
        examples.add_tracks(record_tracks(files, store))
    about_tracks = [*examples.notices[of_store:], *without_tracks(model, tracks)]
    for notice in about_tracks:
        say(notice)
    return examples, [*of_records, *about_tracks]


def _facts(
    model: str, found: FineTuned, examples: Examples, tracks: Mapping[str, str], sentences: Sequence[str]
) -> dict[str, Any]:
    """Return what `OUT.json` says of an output, apart from its numbers of records."""
    facts: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "weights_sha256": found.about.get("weights_sha256"),
        "task": found.about["recipe"]["task"],
        "test": found.about.get("test"),
        "input": str(examples.path),
        "tracks": dict(tracks),
        "device": str(found.model.device),
        "versions": {name: version(name) for name in ("esmshard", "torch", "numpy")},
        "notices": list(sentences),
    }
    shared: dict[str, Any] = without_directories(facts)
    return shared


def _writer(out: Path, found: FineTuned, facts: Mapping[str, Any], store: Store) -> FormatWriter | TableWriter:
    task, form = found.task, out.suffix.removeprefix(".")
    about: dict[str, str] = {name: facts[name] for name in ("format", "version", "model")}
    about |= {name: json.dumps(facts[name]) for name in ("task", "notices")}
    if form in ARRAYS:
        output = Prediction(per_residue=task.per_residue, n_names=len(task.names))
        return FORMATS[form](out, About((output,), len(task.names), "fp32", None, about))
    if not task.names:
        raise UsageError(f"{out}: pair maps do not fit into a table; give the file the ending .npz")
    columns = columns_of(task, chains=task.per_residue and linker_of(store.manifest) is not None)
    about["versions"] = json.dumps({**facts["versions"], "pyarrow": version("pyarrow")}) if form == "parquet" else ""
    return TableWriter(out, columns, about, quoted=any("\r" in name for name in task.names))


def columns_of(task: Task, *, chains: bool) -> dict[str, str]:
    """Return the columns of a table of predictions and their types: those that identify a row, then the numbers.

    A target with the name of one of the first columns becomes `NAME (predicted)`.

    Args:
        task: the task.
        chains: whether a record has several chains, so that the rows of residues need the number of the chain.
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
    """Return the cells of a record: one row, or one for each residue with its place in its chain, counted from 1.

    Args:
        task: the task.
        record_id: the id of the record.
        values: [C], or [L, C] for the L letters of `residues`.
        residues: the letters, with `:` between chains.
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


def _predictions(found: FineTuned, examples: Examples, tokens: int | None) -> Iterator[Array | str]:
    """Yield one array for each record in order, or the reason why there is none. Within a window records are packed by
    length, so that packs are evenly full.
    """
    task, device, limit = found.task, found.model.device, found.model.trunk.config.most_tokens
    pairs = not task.names
    most = tokens or (GPU_TOKENS if device.type == "cuda" and not pairs else TOKENS)
    if not pairs:  # Of pair maps, one pack at a time is computed on all cores, since the maps fill the memory.
        most = max(most // packs_at_once(device), LEAST)

    def values(inputs: Sequence[Inputs]) -> list[Array] | str:
        try:
            outputs = zip(found.model.outputs(inputs), inputs, strict=True)
            return [of_residues(task, task.predict(output), one.tokens[1:-1]) for output, one in outputs]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return f"memory does not suffice: {error}"[:300]

    def cost(n: int) -> int:
        return _cost(int(examples.tokens[n]), pairs)

    for window in _windows(examples, most, pairs=pairs):
        done: dict[int, Array | str] = {}
        inputs_of: dict[int, Inputs] = {}
        for n in window:
            asked = task.question(examples.get(n))
            if limit is not None and asked.longest > limit:
                done[n] = f"the model has learned positions for {limit - 2} residues"
            else:
                inputs_of[n] = asked
        places = list(inputs_of)
        groups = by_length([cost(n) for n in places], most) if places else iter(())
        packs = [[places[k] for k in group] for group in groups]
        inputs = [[inputs_of[n] for n in members] for members in packs]
        results = [values(one) for one in inputs] if pairs else side_by_side(values, inputs, device)
        for members, arrays in zip(packs, results, strict=True):
            if not isinstance(arrays, str):
                done |= zip(members, arrays, strict=True)
                continue
            if len(members) > 1:  # Packs of the next window would be too large too.
                most = max(LEAST, min(most, sum(map(cost, members)) // 2))
            for n in members:  # Each record is computed alone, while nothing else is computed.
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                alone = values([inputs_of[n]])
                done[n] = alone if isinstance(alone, str) else alone[0]
        for n in window:
            yield done.pop(n)


def _cost(tokens: int, pairs: bool) -> int:
    """Return the tokens of a pack that a record uses."""
    return max(tokens, tokens**2 // PAIR) if pairs else tokens


def _windows(examples: Examples, most: int, *, pairs: bool) -> Iterator[range]:
    """Yield all records in order, WINDOW of them at a time, or as many as make PACKS packs of `most` tokens; at least
    one.
    """
    first = total = 0
    for n, count in enumerate(examples.tokens.tolist()):
        cost = _cost(count, pairs)
        if n > first and (n - first == WINDOW or total + cost > PACKS * most):
            yield range(first, n)
            first, total = n, 0
        total += cost
    yield range(first, len(examples))
