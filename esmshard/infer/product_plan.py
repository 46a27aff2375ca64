"""Beginning a product: what is computed, of which sequences, in which parts. No torch.

    OUT.partial/
      plan.json            what is asked for, the model's hash, the input's digest
      index/               see `esmshard.infer.product`
      work/input/          the sequences as a token store, unless the input is one
      work/claims  work/workers   see `esmshard.infer.claims`
      parts/               see `esmshard.infer.parts`

Sequences that are equal are one row, computed once. Rows are in the order in which they first come, and cut into parts
of about as many tokens each.
"""

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard import __version__
from esmshard.data.store import TokenStore, is_store
from esmshard.errors import InputError, UsageError
from esmshard.files import read_json
from esmshard.infer.claims import Worker, publish
from esmshard.infer.outputs import Dtype, Long, Output
from esmshard.infer.parts import Kind
from esmshard.infer.product_index import STDIN, read_and_index, read_input

FORMAT, VERSION = "esmshard-embeddings", 1
PART, SMALLEST_PART = 1 << 16, 1 << 13
GPU_PART = 1 << 18
"""Tokens of a part at least: seconds of work, so that little is lost with a worker, and files are not too many. On a
CPU PART holds for a model of the size of 8M, and larger ones have smaller parts."""
PARTS_EACH = 16
"""Parts for each of several processes at least, so that they end at about the same time."""
COPIED = 64
"""Tokens of a row of an earlier product that cost as much as one that is computed, or less."""
MOST_PARTS = 4096
"""From there on parts become larger."""
_LOOK = 0.2
"""Seconds between two looks whether another worker has planned."""
_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Spec:
    """What a product holds; two with the same one hold the same rows of the same sequences, but for rounding."""

    model_hash: str
    """sha256 over the weight files and what makes a model of them."""
    outputs: tuple[Output, ...]
    dim: int
    dtype: Dtype
    """Of the numbers as stored."""
    compute: Dtype
    """Of the arithmetic."""
    long: Long

    @property
    def kind(self) -> Kind:
        """What files of parts depend on."""
        return Kind(self.outputs, self.dim, self.dtype)

    def as_json(self) -> dict[str, Any]:
        """For `plan.json` and `manifest.json`."""
        return asdict(self) | {"outputs": [asdict(one) for one in self.outputs]}

    @classmethod
    def of(cls, plan: Mapping[str, Any]) -> "Spec":
        """Back from JSON."""
        spec = dict(plan["spec"])
        spec["outputs"] = tuple(Output(**one) for one in spec["outputs"])
        spec["long"] = Long(**spec["long"])
        return cls(**spec)

    def differs(self, other: "Spec", model: str, other_model: str) -> str | None:
        """In what another product is another one, in a clause; None if in nothing."""
        if self.model_hash != other.model_hash:
            same = f"other weights than now at {model}" if model == other_model else f"the model {other_model}"
            return f"with {same}"
        for what in ("outputs", "dtype", "compute", "long"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                return f"with {_said(what, theirs)}, and not with {_said(what, mine)}"
        return None


def _said(what: str, value: Any) -> str:
    if what == "outputs":
        return ", ".join(one.name for one in value)
    if what == "long":
        shared = f" --overlap {value.overlap}" if value.mode == "window" else ""
        return f"--long {value.mode}" + (f" --window {value.window}{shared}" if value.mode != "full" else "")
    return f"{'numbers stored' if what == 'dtype' else 'arithmetic'} in {value}"


def partial(out: Path) -> Path:
    """Where a product is made."""
    if out.name in ("", "..", "."):
        raise UsageError(f"{out}: give the output a name")
    return out.with_name(f"{out.name}.partial")


def source_of(fasta: Path) -> dict[str, Any]:
    """What tells at a glance that an input file is the same as before."""
    if fasta == STDIN:
        return {"path": "-"}
    try:
        stat = (fasta / "manifest.json" if is_store(fasta) else fasta).stat()
    except OSError as error:
        raise InputError(f"{fasta}: {(error.strerror or 'cannot be read').lower()}") from None
    return {"path": str(fasta.resolve()), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def begin(
    work: Path,
    fasta: Path,
    spec: Spec,
    facts: Mapping[str, Any],
    reuse: Path | None,
    part_tokens: int | None,
    device: str,
    longest: int | None,
    workers: int = 1,
) -> dict[str, Any]:
    """Write the plan of a product, or find the one that is there.

    Of several workers one plans and the others wait.

    Args:
        work: `OUT.partial`.
        fasta: the input, a FASTA file, `-` or a token store.
        spec: what is asked for.
        facts: more to write down: name and architecture of the model.
        reuse: an earlier product.
        part_tokens: of a part; by the device and the size of the input by default.
        device: its type.
        longest: residues that the model has positions for; None if it takes any number.
        workers: processes that will compute, as far as is known.

    Raises:
        UsageError: what is there was begun with something else, or a sequence is too long.
        InputError: the input cannot be read.
    """
    plan_file = work / "plan.json"
    work.mkdir(parents=True, exist_ok=True)
    planned = False
    if not plan_file.exists():
        with Worker(work / "work") as worker:
            while not plan_file.exists():
                if worker.claim("plan"):
                    if not plan_file.exists():
                        _plan(work, fasta, spec, facts, reuse, part_tokens, device, longest, workers)
                        planned = True
                    break
                if not worker.settle(lambda: [] if plan_file.exists() else ["plan"]):
                    time.sleep(_LOOK)  # whoever plans is alive
    plan = read_plan(work)
    difference = spec.differs(Spec.of(plan), facts["model"], plan["facts"]["model"])
    if difference:
        raise UsageError(f"{work}: was begun {difference}; --overwrite starts over")
    if not planned:  # the standard input cannot be read twice
        same_input(work, fasta, plan)
    return plan


def read_plan(work: Path) -> dict[str, Any]:
    """`plan.json` of a product that is being made."""
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
    """sha256 of a plan or a manifest, in which it stands itself."""
    known = {name: value for name, value in text.items() if name not in ("digest", "sha256")}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def same_input(work: Path, fasta: Path, plan: Mapping[str, Any]) -> None:
    """Raise `UsageError` if the input is not what a product, or a file made of one, was begun with."""
    if source_of(fasta) == plan["source"] and fasta != STDIN:
        return
    with tempfile.TemporaryDirectory(prefix="esmshard-embed-") as scratch:
        store = read_input(fasta, Path(scratch) / "store")
        if input_digest(store) != plan["input"]:
            raise UsageError(
                f"{fasta}: is not what {work} was begun with ({plan['source']['path']}, {plan['records']:,} records); "
                "--overwrite starts over"
            )


def input_digest(store: TokenStore) -> str:
    """Names sequences, ids and their order."""
    hashes = store.manifest["sha256"]
    text = "".join(f"{name}{hashes[name]}" for name in sorted(hashes) if name.startswith(("tokens", "headers")))
    return hashlib.sha256(text.encode()).hexdigest()


def _plan(
    work: Path,
    fasta: Path,
    spec: Spec,
    facts: Mapping[str, Any],
    reuse: Path | None,
    part_tokens: int | None,
    device: str,
    longest: int | None,
    workers: int,
) -> None:
    source = source_of(fasta)
    index, scratch = work / "index", work / "work" / "index"
    # Of an attempt that ended before its plan was written, or whose removal was interrupted: the input may be another
    # one since, and parts without their plan are anybody's.
    for left in (work / "work" / "input.partial", work / "work" / "input", index, scratch, work / "parts"):
        shutil.rmtree(left, ignore_errors=True)
    unique = read_and_index(fasta, work / "work" / "input", scratch)
    store = TokenStore(fasta) if is_store(fasta) else TokenStore(work / "work" / "input")
    length_N = np.load(scratch / "lengths.npy", mmap_mode="r")
    if longest is not None and int(length_N.max()) > longest:
        record = int(length_N.argmax())
        raise UsageError(
            f"{fasta}: '{store.id(record)}' has {length_N[record]:,} residues, and {facts['model']} has positions for "
            f"{longest:,}; pass --long window or --long truncate"
        )
    tokens = int(store.offsets[-1]) + len(store)
    least = part_tokens or max(_part_tokens(device, facts["architecture"], tokens, workers), tokens // MOST_PARTS)
    bounds = _bounds(scratch, spec, unique, least, reuse)
    np.save(scratch / "bounds.npy", bounds)
    (work / "parts").mkdir(exist_ok=True)
    scratch.rename(index)
    plan = {
        "format": FORMAT,
        "version": VERSION,
        "esmshard": __version__,
        "spec": spec.as_json(),
        "facts": dict(facts),
        "source": source,
        "input": input_digest(store),
        "notices": store.notices,
        "store": str(fasta.resolve()) if is_store(fasta) else None,
        "records": len(store),
        "residues": int(store.offsets[-1]) - len(store),
        "unique": unique,
        "parts": len(bounds) - 1,
        "reuse": str(reuse.resolve()) if reuse else None,
    }
    plan["digest"] = digest(plan)
    publish(work / "plan.json", json.dumps(plan, indent=1) + "\n")


def _part_tokens(device: str, architecture: Mapping[str, Any], tokens: int, workers: int) -> int:
    """Tokens of a part at least."""
    work = architecture["n_layers"] * architecture["dim"] ** 2 / (6 * 320**2)
    usual = PART / max(1.0, work) if device == "cpu" else GPU_PART
    return max(SMALLEST_PART, int(usual if workers == 1 else min(usual, tokens / workers / PARTS_EACH)))


def store_of(work: Path, plan: Mapping[str, Any]) -> TokenStore:
    """The sequences of a product that is being made. Opened for each part anew: pages of maps count as memory."""
    return TokenStore(Path(plan["store"]) if plan["store"] else work / "work" / "input")


def _bounds(index: Path, spec: Spec, unique: int, least: int, reuse: Path | None) -> npt.NDArray[np.int64]:
    """First row of each part, and the number of rows at the end, int64 [P + 1]. Rows that are copied hardly count."""
    from esmshard.infer.reuse import Reuse

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
