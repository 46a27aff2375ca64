"""The plan of an embedding store: what is computed, of which sequences, in which parts. No torch.

    OUT.partial/
        plan.json            the request, the model's hash, the input's digest
      index/               see `esmshard.embed.store.embedding_store`
      work/input/          the sequences as a token store, unless the input is one
      parts/               see `esmshard.embed.store.parts`

Equal sequences share one row, which is computed once. Rows are in the order in which their sequences first occur, and
are divided into parts of about equally many tokens.
"""

import errno
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard import __version__
from esmshard.data.store.token_store import TokenStore, is_store
from esmshard.data.tables import counted
from esmshard.data.tracks.track_files import RecordTracks, TrackFile, state_of
from esmshard.data.tracks.track_store import TrackStore
from esmshard.embed.compute.outputs import Dtype, Long, Output
from esmshard.embed.store.parts import Kind
from esmshard.embed.store.row_index import STDIN, chain_lengths, read_and_index, read_input, track_directory
from esmshard.errors import InputError, UsageError
from esmshard.files import read_json, replace_json
from esmshard.joined_chains import Chains
from esmshard.progress import say
from esmshard.vocab import Track

FORMAT, VERSION = "esmshard-embeddings", 1
PART, SMALLEST_PART = 1 << 16, 1 << 13
GPU_PART = 1 << 18
"""The least number of tokens of a part on a GPU: seconds of work, so that little is lost with a worker, and there are
not too many files. On a CPU, PART holds for a model of size 8M, and larger models have smaller parts.
"""
PARTS_EACH = 16
"""The least number of parts for each of several processes, so that all processes end at about the same time."""
COPIED = 64
"""Tokens of a row of an earlier store for which copying takes as long as computing one token, or less."""
MOST_PARTS = 4096
"""The number of parts from which on parts become larger."""
_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Spec:
    """The specification of an embedding store. Stores of the same spec and sequences hold the same rows, except for
    rounding.
    """

    model_hash: str
    """The sha256 over the weight files and the architecture."""
    outputs: tuple[Output, ...]
    dim: int
    dtype: Dtype
    """The dtype of the stored numbers."""
    compute: Dtype
    """The dtype of the arithmetic."""
    long: Long
    chains: Chains
    """How several chains of a record are joined."""

    @property
    def kind(self) -> Kind:
        """Return the properties that all part files share."""
        return Kind(self.outputs, self.dim, self.dtype)

    def as_json(self) -> dict[str, Any]:
        """Return the fields for `plan.json` and `manifest.json`."""
        return asdict(self) | {"outputs": [asdict(one) for one in self.outputs]}

    @classmethod
    def of(cls, plan: Mapping[str, Any]) -> "Spec":
        """Read a spec back from JSON."""
        spec = dict(plan["spec"])
        spec["outputs"] = tuple(Output(**{**one, "heads": tuple(one["heads"])}) for one in spec["outputs"])
        spec["long"], spec["chains"] = Long(**spec["long"]), Chains(**spec["chains"])
        return cls(**spec)

    def differs(self, other: "Spec", model: str, other_model: str) -> str | None:
        """Return, as a clause, how another store differs; None if it does not."""
        if self.model_hash != other.model_hash:
            same = f"other weights than now at {model}" if model == other_model else f"the model {other_model}"
            return f"with {same}"
        for what in ("outputs", "dtype", "compute", "long", "chains"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                return f"with {_said(what, theirs)}, and not with {_said(what, mine)}"
        return None


def _said(what: str, value: Any) -> str:
    if what == "outputs":
        return ", ".join(one.title for one in value)
    if what == "long":
        shared = f" --overlap {value.overlap}" if value.mode == "window" else ""
        return f"--long {value.mode}" + (f" --window {value.window}{shared}" if value.mode != "full" else "")
    if what == "chains":
        return f"--join {value.text}"
    return f"{'numbers stored' if what == 'dtype' else 'arithmetic'} in {value}"


def partial(out: Path) -> Path:
    """Return the path of the unfinished store of an output."""
    if out.name in ("", "..", "."):
        raise UsageError(f"{out}: give the output a name")
    return out.with_name(f"{out.name}.partial")


def source_of(fasta: Path) -> dict[str, Any]:
    """Return facts that show quickly whether an input file is unchanged."""
    if fasta == STDIN:
        return {"path": "-"}
    try:
        stat = (fasta / "manifest.json" if is_store(fasta) else fasta).stat()
    except OSError as error:
        raise InputError(f"{fasta}: {(error.strerror or 'cannot be read').lower()}") from None
    return {"path": fasta.name, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


@dataclass(frozen=True)
class PlanRequest:
    """The input and the settings from which a plan is made."""

    fasta: Path
    """A FASTA file, `-` or a token store."""
    spec: Spec
    facts: Mapping[str, Any]
    """Further facts for the plan: name and architecture of the model."""
    longest: int | None
    """The number of residues for which the model has positions; None if there is no limit."""
    device: str
    """The type of the device."""
    part_tokens: int | None = None
    """Tokens of a part; by default from the device and the size of the input."""
    reuse: Path | None = None
    """An earlier embedding store."""
    workers: int = 1
    """The number of processes that will compute, as far as known."""
    tracks: Sequence[TrackFile] = ()
    """What the model reads of the sequences besides amino acids; each with a path."""


def begin(work: Path, asked: PlanRequest) -> dict[str, Any]:
    """Write the plan of an embedding store, or read the existing plan.

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
            planning.mkdir()
            _plan(planning, asked)
            try:
                planning.rename(work)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    plan = read_plan(work)
    difference = asked.spec.differs(Spec.of(plan), asked.facts["model"], plan["facts"]["model"])
    if difference:
        raise UsageError(f"{work}: was begun {difference}; --overwrite starts over")
    same_tracks(work, asked.tracks, plan)
    if not planned:  # the standard input cannot be read twice
        same_input(work, asked.fasta, plan)
    return plan


def read_plan(work: Path) -> dict[str, Any]:
    """Read `plan.json` of an unfinished store."""
    try:
        plan: dict[str, Any] = read_json(work / "plan.json")
        if (plan["format"], plan["version"]) != (FORMAT, VERSION):
            raise UsageError(f"{work}: was begun by another version of esmshard; --overwrite starts over")
        if plan["digest"] != digest(plan):
            raise ValueError("its text was changed")
        Spec.of(plan)
    except UsageError:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{work}/plan.json: cannot be read, or was changed; --overwrite starts over") from None
    return plan


def digest(text: Mapping[str, Any]) -> str:
    """Return the sha256 of a plan or a manifest, computed without its own entry."""
    known = {name: value for name, value in text.items() if name not in ("digest", "sha256")}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def same_input(work: Path | str, fasta: Path, plan: Mapping[str, Any]) -> None:
    """Raise `UsageError` if the input is not the one with which a store, or a file made from a store, was begun."""
    if source_of(fasta) == plan["source"] and fasta != STDIN:
        return
    with tempfile.TemporaryDirectory(prefix="esmshard-embed-") as scratch:
        store = read_input(fasta, Path(scratch) / "store", Spec.of(plan).chains.tokens)
        if input_digest(store) != plan["input"]:
            raise UsageError(
                f"{fasta}: is not what {work} was begun with ({plan['source']['path']}, {plan['records']:,} records); "
                "--overwrite starts over"
            )


def same_tracks(work: Path | str, tracks: Sequence[TrackFile], plan: Mapping[str, Any]) -> None:
    """Raise `UsageError` if the tracks are not those with which a store, or a file made from a store, was begun."""
    known, now = plan.get("tracks", {}), state_of(tracks)
    if known != now:
        changed = " and ".join(name for name in {**known, **now} if known.get(name) != now.get(name))
        raise UsageError(
            f"{work}: was begun with another --track {changed}, or without it; give what it was begun with, or start "
            "over with --overwrite"
        )


def tracks_of(work: Path, plan: Mapping[str, Any], takes: Sequence[Track]) -> RecordTracks | None:
    """Open the tracks of an unfinished store; None if it has none.

    Args:
        work: `OUT.partial`.
        plan: its plan.
        takes: the tracks that the model takes.
    """
    if not plan.get("tracks"):
        return None
    store = store_of(work, plan)
    chosen = [track for track in takes if track.name in plan["tracks"]]
    return RecordTracks([TrackStore(track_directory(work / "work", one.name), one, store) for one in chosen])


def input_digest(store: TokenStore) -> str:
    """Return a digest of the sequences, the ids and their order."""
    hashes = store.manifest["sha256"]
    text = "".join(f"{name}{hashes[name]}" for name in sorted(hashes) if name.startswith(("tokens", "headers")))
    return hashlib.sha256(text.encode()).hexdigest()


def _plan(work: Path, asked: PlanRequest) -> None:
    fasta, facts, longest, reuse = asked.fasta, asked.facts, asked.longest, asked.reuse
    source = source_of(fasta)
    index = work / "index"
    (work / "work").mkdir()
    unique = read_and_index(fasta, work / "work" / "input", index, asked.tracks, asked.spec.chains.tokens)
    store = TokenStore(fasta) if is_store(fasta) else TokenStore(work / "work" / "input")
    chained = sum(1 for _ in chain_lengths(index))
    length_N = store.lengths if chained else np.load(index / "lengths.npy", mmap_mode="r")  # with linkers
    if longest is not None and int(length_N.max()) > longest:
        record = int(length_N.argmax())
        raise UsageError(
            f"{fasta}: '{store.id(record)}' has {length_N[record]:,} residues, and {facts['model']} has positions for "
            f"{longest:,}; pass --long window or --long truncate"
        )
    if chained and asked.spec.long.mode == "truncate" and int(length_N.max()) > asked.spec.long.window:
        raise UsageError(
            f"{fasta}: --long truncate would cut away chains of records with several ({counted(chained, 'record')}); "
            "pass --long window or --long full"
        )
    tokens = int(store.offsets[-1]) + len(store)
    usual = _part_tokens(asked.device, facts["architecture"], tokens, asked.workers)
    bounds = _bounds(index, asked.spec, unique, asked.part_tokens or max(usual, tokens // MOST_PARTS), reuse)
    np.save(index / "bounds.npy", bounds)
    (work / "parts").mkdir()
    plan = {
        "format": FORMAT,
        "version": VERSION,
        "esmshard": __version__,
        "spec": asked.spec.as_json(),
        "facts": dict(facts),
        "source": source,
        "input": input_digest(store),
        "notices": [*store.notices, *_beyond_training(length_N, asked.spec.long), *_known(work, asked.tracks, store)],
        "store": str(fasta.resolve()) if is_store(fasta) else None,
        "records": len(store),
        "residues": int(np.load(index / "lengths.npy", mmap_mode="r").sum(dtype=np.int64)),
        "chained": chained,
        "unique": unique,
        "parts": len(bounds) - 1,
        "reuse": str(reuse.resolve()) if reuse else None,
        "tracks": state_of(asked.tracks),
    }
    plan["digest"] = digest(plan)
    replace_json(work / "plan.json", plan)


def _beyond_training(length_N: npt.NDArray[np.signedinteger[Any]], long: Long) -> list[str]:
    """Return a sentence, and print it, if proteins are computed whole that are longer than those of training."""
    beyond = int((length_N > long.window).sum()) if long.mode == "full" else 0
    if not beyond:
        return []
    notice = (
        f"{counted(beyond, 'record')} over {long.window:,} residues, the most that such models saw in training, "
        "computed whole; --long window computes windows of that length"
    )
    say(notice)
    return [notice]


def _known(work: Path, tracks: Sequence[TrackFile], store: TokenStore) -> list[str]:
    """Return sentences, and print them, on what is known of the sequences besides amino acids."""
    stores = [TrackStore(track_directory(work / "work", one.track.name), one.track, store) for one in tracks]
    notices = RecordTracks(stores, tracks).notices(np.arange(len(store)))
    for notice in notices:
        say(notice)
    return notices


def _part_tokens(device: str, architecture: Mapping[str, Any], tokens: int, workers: int) -> int:
    """Return the least number of tokens of a part."""
    work = architecture["n_layers"] * architecture["dim"] ** 2 / (6 * 320**2)
    usual = PART / max(1.0, work) if device == "cpu" else GPU_PART
    return max(SMALLEST_PART, int(usual if workers == 1 else min(usual, tokens / workers / PARTS_EACH)))


def store_of(work: Path, plan: Mapping[str, Any]) -> TokenStore:
    """Open the sequences of an unfinished store. Open them for each part, because mapped pages count as memory."""
    return TokenStore(Path(plan["store"]) if plan["store"] else work / "work" / "input")


def _bounds(index: Path, spec: Spec, unique: int, least: int, reuse: Path | None) -> npt.NDArray[np.int64]:
    """Return the first row of each part, and the number of rows, int64 [P + 1]. Copied rows count little."""
    from esmshard.embed.store.reuse import Reuse

    earlier = None if reuse is None else Reuse(reuse, spec)
    content_U16 = np.load(index / "content.npy", mmap_mode="r")
    first_U = np.load(index / "first.npy", mmap_mode="r")
    length_N = np.load(index / "lengths.npy", mmap_mode="r")
    bounds, total = [0], 0
    for start in range(0, unique, _AT_ONCE):
        tokens = spec.long.kept(length_N[first_U[start : start + _AT_ONCE]].astype(np.int64)) + 2
        if earlier is not None:
            copied = earlier.rows(content_U16[start : start + _AT_ONCE]) >= 0
            tokens = np.where(copied, tokens // COPIED, tokens)
        for k, count in enumerate(tokens.tolist(), start):
            if total >= least:
                bounds.append(k)
                total = 0
            total += count
    return np.array([*bounds, unique], dtype=np.int64)
