"""The plan of an embedding store: the input is read, its records are indexed, and its rows are divided into parts.

Equal sequences share one row, which is computed once. Rows are in the order in which their sequences first occur.
"""

import copy
import errno
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from esmshard import __version__
from esmshard.data.tracks import RecordTracks, TrackFile, TrackStore, state_of, write_track
from esmshard.embed.spec import Spec
from esmshard.embed.store import CHAINS, FORMAT, VERSION, Reuse, digest, read_plan
from esmshard.errors import InputError, UsageError
from esmshard.io.array_formats import NUMPY
from esmshard.io.paths import replace_json
from esmshard.io.store import TokenStore, ingest, is_store
from esmshard.io.symbols import Rules
from esmshard.io.tables import counted
from esmshard.progress import say
from esmshard.vocab import Track, chain_spans

STDIN = Path("-")
FIRST_PART, PART, GPU_PART = 1 << 12, 1 << 16, 1 << 18
"""Tokens of the first part, of a usual one on a CPU with a model of size 8M (larger models have smaller ones), and of
one on a GPU. The first parts are small, so that results are soon there; each is twice as large as the one before. A
usual part takes seconds, so little is lost with a worker, and there are not too many files.
"""
PARTS_EACH = 16
"""The least number of parts for each of several processes, so that all processes end at about the same time."""
MOST_PARTS = 4096
"""The number of parts from which on parts become larger."""
PART_BYTES = 1 << 29
"""Bytes of values at which a part ends in any case, since they are in memory until it is written."""
COPIED = 64
"""Tokens of a row of an earlier store for which copying takes as long as computing one token, or less."""
_AT_ONCE = 1 << 14


def partial(out: Path) -> Path:
    """Return the path of the unfinished store of an output."""
    if out.name in ("", "..", "."):
        raise UsageError(f"{out}: give the output a name")
    return out.with_name(f"{out.name}.partial")


def begin(
    work: Path,
    fasta: Path,
    spec: Spec,
    facts: Mapping[str, Any],
    *,
    device: str,
    longest: int | None = None,
    workers: int = 1,
    part_tokens: int | None = None,
    reuse: Path | None = None,
    tracks: Sequence[TrackFile] = (),
) -> dict[str, Any]:
    """Write the plan of an embedding store, or read the existing plan.

    Args:
        work: `OUT.partial`.
        fasta: a FASTA file, `-` or a token store.
        spec: what is computed.
        facts: the model's name and architecture.
        device: the type of the device.
        longest: the number of residues for which the model has positions; None if there is no limit.
        workers: the number of processes that will compute, as far as known.
        part_tokens: tokens of a part; by default from the device and the size of the input.
        reuse: an earlier embedding store.
        tracks: what the model reads of the sequences besides amino acids; each with a path.

    Raises:
        UsageError: if the existing plan has another request, or a sequence is too long.
        InputError: if the input cannot be read.
    """
    planned = not (work / "plan.json").exists()
    if planned:
        work.parent.mkdir(parents=True, exist_ok=True)
        # The directory gets its name when its plan is complete. So it always has a plan, and if two commands begin at
        # the same time, one plan counts.
        with tempfile.TemporaryDirectory(prefix=f".planning-{work.name}-", dir=work.parent) as scratch:
            planning = Path(scratch) / work.name
            (planning / "work").mkdir(parents=True)
            (planning / "parts").mkdir()
            plan = _plan(planning, fasta, spec, facts, longest, tracks)
            per_part = part_tokens or _part_tokens(device, facts["architecture"], plan["tokens"], workers)
            plan["bounds"] = _bounds(planning / "index", spec, per_part, None if reuse is None else Reuse(reuse, spec))
            plan["reuse"] = None if reuse is None else str(reuse.resolve())
            plan["digest"] = digest(plan)
            replace_json(planning / "plan.json", plan)
            try:
                planning.rename(work)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    plan = read_plan(work)
    same_request(work, plan, spec, facts["model"], tracks, "was begun")
    if not planned:  # the standard input cannot be read twice
        same_input(work, plan, fasta)
    if reuse is not None and plan["reuse"] != str(reuse.resolve()):
        raise UsageError(
            f"--reuse {reuse}: {work} was begun {'with ' + plan['reuse'] if plan['reuse'] else 'without it'}; "
            "leave it out, or start over with --overwrite"
        )
    return plan


def same_request(
    place: Path | str, plan: Mapping[str, Any], spec: Spec, model: str, tracks: Sequence[TrackFile], verb: str
) -> None:
    """Raise `UsageError` if a store, or a file made from a store, was begun with another spec or other tracks."""
    if difference := spec.differs(Spec.of(plan), model, plan["facts"]["model"]):
        raise UsageError(f"{place}: {verb} {difference}; --overwrite starts over")
    known, now = plan["tracks"], state_of(tracks)
    if known != now:
        changed = " and ".join(name for name in {**known, **now} if known.get(name) != now.get(name))
        raise UsageError(
            f"{place}: {verb} with another --track {changed}, or without it; give what it was begun with, or start "
            "over with --overwrite"
        )


def same_input(place: Path | str, plan: Mapping[str, Any], fasta: Path) -> None:
    """Raise `UsageError` if the input is not the one with which a store, or a file made from a store, was begun."""
    if source_of(fasta) == plan["source"] and fasta != STDIN:
        return
    with tempfile.TemporaryDirectory(prefix="esmshard-embed-") as scratch:
        store = read_input(fasta, Path(scratch) / "store", Spec.of(plan).chains.tokens)
        if input_digest(store) != plan["input"]:
            raise UsageError(
                f"{fasta}: is not what {place} was begun with ({plan['source']['path']}, {plan['records']:,} records); "
                "--overwrite starts over"
            )


def source_of(fasta: Path) -> dict[str, Any]:
    """Return facts that show quickly whether an input file is unchanged."""
    if fasta == STDIN:
        return {"path": "-"}
    try:
        stat = (fasta / "manifest.json" if is_store(fasta) else fasta).stat()
    except OSError as error:
        raise InputError(f"{fasta}: {(error.strerror or 'cannot be read').lower()}") from None
    return {"path": fasta.name, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def input_digest(store: TokenStore) -> str:
    """Return a digest of the sequences, the ids and their order."""
    hashes = store.manifest["sha256"]
    text = "".join(f"{name}{hashes[name]}" for name in sorted(hashes) if name.startswith(("tokens", "headers")))
    return hashlib.sha256(text.encode()).hexdigest()


def read_input(fasta: Path, store: Path, linker: int) -> TokenStore:
    """Return the input as a token store: the input itself if it is one, else `store`, which is made if it does not
    exist. `InputError` if the chains of records are joined by another linker.
    """
    if is_store(fasta):
        given = TokenStore(fasta)
        given.check_linker(linker, fasta)
        return given
    if is_store(store):
        return TokenStore(store)
    made = ingest([fasta], store, Rules(linker=linker))
    for notice in made.notices:
        say(f"{fasta}: {notice}")
    return made


def store_of(work: Path, plan: Mapping[str, Any]) -> TokenStore:
    """Open the sequences of an unfinished store."""
    return TokenStore(Path(plan["store"]) if plan["store"] else work / "work" / "input")


def tracks_of(work: Path, plan: Mapping[str, Any], takes: Sequence[Track], store: TokenStore) -> RecordTracks | None:
    """Open the tracks of an unfinished store that the model takes; None if there is none."""
    chosen = [track for track in takes if track.name in plan["tracks"]]
    if not chosen:
        return None
    return RecordTracks([TrackStore(work / "work" / "tracks" / one.name, one, store) for one in chosen])


def _plan(
    work: Path, fasta: Path, spec: Spec, facts: Mapping[str, Any], longest: int | None, tracks: Sequence[TrackFile]
) -> dict[str, Any]:
    """Read the input, write the index, and return the plan without the bounds of the parts."""
    source, index, long = source_of(fasta), work / "index", spec.long
    store = read_input(fasta, work / "work" / "input", spec.chains.tokens)
    track_stores = []
    for one in tracks:
        assert one.path is not None
        track_stores.append(write_track(one.track, one.path, store, work / "work" / "tracks" / one.track.name))
    index.mkdir()
    unique, chained = write_index(index, store, spec, track_stores)
    length_N = store.lengths if chained else np.load(index / "lengths.npy", mmap_mode="r")  # with linkers
    most = int(length_N.max())
    if longest is not None and most > longest:
        record = int(length_N.argmax())
        raise UsageError(
            f"{fasta}: '{store.id(record)}' has {length_N[record]:,} residues, and {facts['model']} has positions for "
            f"{longest:,}; pass --long window or --long truncate"
        )
    if chained and long.mode == "truncate" and most > long.window:
        raise UsageError(
            f"{fasta}: --long truncate would cut away chains of records with several ({counted(chained, 'record')}); "
            "pass --long window or --long full"
        )
    notices = [*store.notices]
    if long.mode == "full" and (beyond := int((length_N > long.window).sum())):
        notices.append(
            f"{counted(beyond, 'record')} over {long.window:,} residues, the most that such models saw in training, "
            "computed whole; --long window computes windows of that length"
        )
    notices += RecordTracks(track_stores, tracks).notices(np.arange(len(store)))
    for notice in notices[len(store.notices) :]:
        say(notice)
    return {
        "format": FORMAT,
        "version": VERSION,
        "esmshard": __version__,
        "spec": spec.as_json(),
        "facts": dict(facts),
        "source": source,
        "input": input_digest(store),
        "notices": notices,
        "store": str(fasta.resolve()) if is_store(fasta) else None,
        "records": len(store),
        "tokens": int(store.offsets[-1]) + len(store),
        "chained": chained,
        "unique": unique,
        "tracks": state_of(tracks),
    }


def write_index(index: Path, store: TokenStore, spec: Spec, tracks: Sequence[TrackStore] = ()) -> tuple[int, int]:
    """Write the index of records and rows (see `esmshard.embed.store`).

    Memory: 60 bytes for each record.

    Args:
        index: an empty directory.
        store: the token store of the records.
        spec: what is computed; a part of the keys of rows.
        tracks: the tracks of the records.

    Returns:
        The number of rows, and of records with several chains.
    """
    n, chained = len(store), 0
    length_N, id_N, keys_N = np.empty(n, np.int32), np.zeros(n + 1, np.int64), np.empty(n, "S16")
    with open(index / "ids.txt", "wb") as ids, open(index / CHAINS, "w", encoding="utf-8", newline="\n") as chains:
        chains.write("id\tresidues\n")
        for start in range(0, n, _AT_ONCE):
            records = range(start, min(start + _AT_ONCE, n))
            store = copy.copy(store)  # maps the files again, because mapped pages count as memory
            tracks = [TrackStore(one.path, one.track, store) for one in tracks]
            names = [store.id(k).encode() + b"\n" for k in records]
            ids.write(b"".join(names))
            id_N[start + 1 : records.stop + 1] = id_N[start] + np.cumsum([len(name) for name in names])
            length_N[start : records.stop] = np.diff(store.offsets[start : records.stop + 1]) - 1
            for k in records if store.linker is not None else ():
                each = [end - begin for begin, end in chain_spans(store.residues(k))]
                length_N[k] = sum(each)
                if len(each) > 1:
                    chained += 1
                    chains.write(f"{store.id(k)}\t{','.join(map(str, each))}\n")
            keys_N[start : records.stop] = [
                spec.row_key(store.residues(k), {one.track.name: one[k].tobytes() for one in tracks if one.known_N[k]})
                for k in records
            ]
    if not chained:
        (index / CHAINS).unlink()
    _, first_S, group_N = np.unique(keys_N, return_index=True, return_inverse=True)  # S: rows in the order of keys
    order_U = np.argsort(first_S)  # rows in the order in which their sequences first occur
    row_S = np.empty_like(order_U)
    row_S[order_U] = np.arange(len(order_U))
    first_U = first_S[order_U]
    arrays = {"ids": id_N, "id_keys": store.keys, "id_rows": store.rows, "lengths": length_N, "rows": row_S[group_N]}
    arrays |= {"first": first_U, "keys": keys_N[first_U], "key_rows": row_S}
    for name, values in arrays.items():
        np.save(index / f"{name}.npy", values)
    return len(first_U), chained


def _part_tokens(device: str, architecture: Mapping[str, Any], tokens: int, workers: int) -> int:
    """Return the number of tokens of a usual part."""
    work = architecture["n_layers"] * architecture["dim"] ** 2 / (6 * 320**2)
    usual = GPU_PART if device == "cuda" else PART / max(1.0, work)
    if workers > 1:
        usual = min(usual, tokens / workers / PARTS_EACH)
    return int(max(FIRST_PART, usual, tokens / MOST_PARTS))


def _bounds(index: Path, spec: Spec, per_part: int, earlier: Reuse | None) -> list[int]:
    """Return the first row of each part, and the number of rows. Copied rows count little."""
    keys_U, first_U, length_N = (np.load(index / f"{name}.npy", mmap_mode="r") for name in ("keys", "first", "lengths"))
    itemsize, bounds, tokens, nbytes = np.dtype(NUMPY[spec.dtype]).itemsize, [0], 0, 0
    for start in range(0, len(first_U), _AT_ONCE):
        kept_U = spec.long.kept(length_N[first_U[start : start + _AT_ONCE]].astype(np.int64))
        token_U, bytes_U = kept_U + 2, spec.numbers(kept_U) * itemsize
        if earlier is not None:
            token_U = np.where(earlier.rows(keys_U[start : start + _AT_ONCE]) >= 0, token_U // COPIED, token_U)
        for row, (more_tokens, more_bytes) in enumerate(zip(token_U.tolist(), bytes_U.tolist(), strict=True), start):
            full = min(per_part, FIRST_PART << min(len(bounds) - 1, 40))
            if row > bounds[-1] and (tokens >= full or nbytes + more_bytes > PART_BYTES):
                bounds.append(row)
                tokens = nbytes = 0
            tokens, nbytes = tokens + more_tokens, nbytes + more_bytes
    return [*bounds, len(first_U)]
