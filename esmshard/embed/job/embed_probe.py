"""The process that times some packs of an embedding job, formed, computed and written as in the job.

`python -m esmshard.embed.job.embed_probe JSON` runs as many times at once as the job has processes, because two
processes on two cores are not twice as fast as one. `esmshard.embed.job.embed_time` starts the processes; see `main`.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esmshard.embed.compute.embedder import Computed, Embedder, Failed, Tokens
from esmshard.embed.compute.outputs import About, Long, Row
from esmshard.embed.formats.format_registry import FORMATS
from esmshard.embed.store.part_plan import Spec, read_plan, store_of
from esmshard.embed.store.parts import DONE, FAILED, KEY_BYTES, PartLayout, PartReader, PartWriter
from esmshard.embed.store.row_index import RowIndex
from esmshard.embed.workers.embed_worker import make_embedder
from esmshard.errors import InputError
from esmshard.vocab import CLS, EOS

PARTS_LOOKED_AT, PACKS_AT_MOST = 64, 4096
"""Parts whose packs are formed, and packs that may be timed. The rest is estimated from its lengths."""
LEAST_TIMED = 8
"""Packs that should be timed. Packs of a slow model are made smaller so that this number can be timed."""
WRITTEN, WRITTEN_BYTES = 2048, 1 << 26
"""Records, and bytes, that are written at most to measure the speed of a format."""
_GOLDEN = (5**0.5 - 1) / 2
_CLS, _EOS = (np.array([token], np.uint8) for token in (CLS, EOS))


def costs(length_U: npt.NDArray[np.int64], long: Long) -> npt.NDArray[np.float64]:
    """Return tokens, pairs of tokens and sequences that the model computes for each row, [n, 3]. Each window counts.

    The time of linear layers depends on tokens, that of attention and contact maps on pairs, and the time for handling
    a sequence on the number of sequences.
    """
    seen_U, count_U = long.kept(length_U), np.ones_like(length_U)
    if long.mode == "window":
        windows_U = -(-(length_U - long.overlap) // (long.window - long.overlap))
        count_U = np.where(length_U > long.window, windows_U, 1)
        seen_U = np.minimum(length_U, long.window)
    tokens_U = (seen_U + 2).astype(np.float64)
    return np.stack([count_U * tokens_U, count_U * tokens_U**2, count_U], 1)


def spread(n: int, seed: int) -> list[int]:
    """Return 0 to n - 1 in an order in which the first k numbers, for any k, are spread evenly."""
    start = float(np.random.default_rng(seed).random())
    order: list[int] = np.argsort((np.arange(n) * _GOLDEN + start) % 1, kind="stable").tolist()
    return order


class _Timed(Embedder):
    """An embedder that computes given packs in order, and records when each began and ended."""

    jobs: Sequence[list[int]] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.spans: list[tuple[float, float, list[int]]] = []
        """The beginning, the end, and the residues of the sequences of each pack."""
        self._thread = threading.local()

    @property
    def lanes(self) -> int:
        """Return the number of packs that are computed at the same time."""
        return self._workers

    def one_at_a_time(self) -> None:
        """Let all cores compute one pack at a time."""
        self._workers = 1

    def packs(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the given packs."""
        assert sum(map(len, self.jobs)) == len(lengths)
        return list(self.jobs)

    def _pack(self, sequences: list[Tokens]) -> list[Computed | Failed]:
        if getattr(self._thread, "busy", False):  # half of a pack that did not fit into memory
            return super()._pack(sequences)
        self._thread.busy, began = True, time.monotonic()
        found = super()._pack(sequences)
        self._thread.busy = False
        self.spans.append((began, time.monotonic(), [len(tokens) - 2 for tokens in sequences]))
        return found


class _Probe:
    """Some of the packs of a plan.

    Args:
        directory: the directory of the plan. Its `taken.npy` holds for each row whether it need not be computed.
        plan: the plan.
        timed: the model.
    """

    def __init__(self, directory: Path, plan: dict[str, Any], timed: _Timed) -> None:
        self.directory, self.spec, self.timed = directory, Spec.of(plan), timed
        self.plain = Embedder(timed.esm, self.spec.outputs, long=self.spec.long, tokens=timed.tokens)
        self._index, self._store = RowIndex(directory / "index"), store_of(directory, plan)
        taken_U = np.load(directory / "taken.npy", mmap_mode="r")
        self.parts: list[list[list[float]]] = []
        """The costs of the packs of each part that was read."""
        self.numbers = np.unique(np.linspace(0, plan["parts"] - 1, PARTS_LOOKED_AT).astype(int)).tolist()
        self._packs: list[list[tuple[int, int]]] = []
        for part in self.numbers:
            start, stop = self._index.bounds[part : part + 2]
            length_U, first_U = self._index.lengths_of(part), self._index.first[start:stop]
            todo = np.flatnonzero(~taken_U[start:stop])
            cost_U3 = costs(length_U[todo], self.spec.long)
            packs = self.plain.packs(length_U[todo].tolist())
            self.parts.append([cost_U3[members].sum(0).tolist() for members in packs])
            self._packs += [[(int(length_U[todo[n]]), int(first_U[todo[n]])) for n in members] for members in packs]
        if np.median([len(packs) for packs in self.parts]) < timed.lanes:  # most parts have too few packs for all lanes
            timed.one_at_a_time()
        self._packs.sort(key=lambda pack: sum(length for length, _ in pack) / len(pack))

    def choose(self, seconds: float, seed: int, number: int, processes: int) -> None:
        """Choose packs for this process, evenly from short to long, made smaller if the model is slow; then warm up."""
        order = [self._packs[k] for k in spread(len(self._packs), seed)[:PACKS_AT_MOST]]
        mine = order[number::processes] or order[:1]
        least = min((one for pack in mine for one in pack), default=None)
        if least is None:
            self._jobs: list[list[tuple[int, int]]] = []
            return
        self._time([[least]])
        began = time.monotonic()
        self._time([[least]])
        each = (time.monotonic() - began) / (least[0] + 2)
        most = seconds / LEAST_TIMED * self.timed.lanes / each
        self._jobs = [_thinned(pack, most) for pack in mine]
        self._time(self._jobs[:1])

    def _time(self, jobs: list[list[tuple[int, int]]]) -> None:
        for _ in self._compute(jobs):
            pass

    def _compute(self, jobs: list[list[tuple[int, int]]]) -> Iterator[tuple[int, Computed | Failed]]:
        rows = [first for pack in jobs for _, first in pack]
        ends = np.cumsum([len(pack) for pack in jobs]).tolist()
        self.timed.jobs = [list(range(end - len(pack), end)) for end, pack in zip(ends, jobs, strict=True)]
        self.timed.spans = []
        return self.timed.compute([np.concatenate((_CLS, self._store.residues(row), _EOS)) for row in rows])

    def run(self, name: str, seconds: float) -> tuple[dict[str, Any], PartReader | None]:
        """Compute and write until the time is over or no pack remains.

        Returns:
            `packs`: costs and seconds of each pack; `lanes`: packs computed at the same time; `busy`: share of the time
                in which a lane computes; `took_s`: the total time; `prep_s`: preparation time of a row; `sync_s` and
                `bytes` of the final flush to disk. The second value reads the rows that were written.
        """
        lanes = self.timed.lanes if len(self._jobs) >= self.timed.lanes else 1
        found: dict[str, Any] = {
            "packs": [],
            "lanes": lanes,
            "busy": 1.0,
            "prep_s": 0.0,
            "sync_s": 0.0,
            "bytes": 0,
            "took_s": 0.0,
        }
        if not self._jobs:
            return found, None
        lengths = np.array([length for pack in self._jobs for length, _ in pack], dtype=np.int64)
        layout = PartLayout(self.spec.kind, self.spec.long.kept(lengths))
        key_U16 = np.zeros((len(lengths), KEY_BYTES), np.uint8)
        writer = PartWriter(self.directory / name, layout, key_U16)
        written = 0
        began = time.monotonic()
        computing = self._compute(self._jobs)
        found["prep_s"] = (time.monotonic() - began) / len(lengths)
        began = time.monotonic()
        for place, one in computing:
            if isinstance(one, Computed):
                arrays = [one.values[output.name] for output in self.spec.outputs]
                buffers = [x.contiguous().view(-1).view(torch.uint8).numpy().data for x in arrays]
                writer.add(place, buffers, DONE)
                written += sum(len(data) for data in buffers)
            if time.monotonic() - began > seconds:
                break
        ended = time.monotonic()
        computing.close()  # type: ignore[attr-defined]  # closing the generator finishes the packs that have begun
        found["took_s"] = time.monotonic() - began
        spans = self.timed.spans
        if lanes > 1:  # the end, where some lanes have no pack left, does not count
            ended = min(ended, max(start for start, _, _ in spans))
        busy = sum(max(0.0, min(end, ended) - start) for start, end, _ in spans)
        found["busy"] = min(1.0, busy / lanes / max(ended - began, 1e-9)) or 1.0
        for start, end, residues in spans:
            cost = costs(np.array(residues, dtype=np.int64), self.spec.long).sum(0)
            found["packs"].append([*cost.tolist(), end - start])
        began = time.monotonic()
        note = writer.close()
        found |= {"sync_s": time.monotonic() - began, "bytes": written}
        return found, PartReader(writer.path, layout, note)


def write_s(spec: Spec, fmt: str, reader: PartReader, records: int, directory: Path) -> float:
    """Measure the seconds for copying a record from a part into a file of a format."""
    rows = np.flatnonzero(reader.status_U != FAILED).tolist()
    if not rows:
        return 0.0
    mean = spec.kind.bytes_of(reader.layout.kept_U[rows]) / len(rows)
    count = max(1, min(records, WRITTEN, int(WRITTEN_BYTES / mean)))
    chosen = [rows[k] for k in np.linspace(0, len(rows) - 1, count).astype(int).tolist()]
    out = directory / f"probe.{fmt}"
    FORMATS[fmt].require(out)  # importing the library takes a constant time
    with FORMATS[fmt](out, About(spec.outputs, spec.dim, spec.dtype, count, {})) as writer:
        began = time.monotonic()
        for n, at in enumerate(chosen):
            values = reader.values(at)
            assert values is not None
            writer.add(Row(f"record_{n}", int(reader.layout.kept_U[at]), values))
    return (time.monotonic() - began) / count


def _thinned(pack: list[tuple[int, int]], most: float) -> list[tuple[int, int]]:
    """Return as many sequences of a pack as have `most` tokens, at least one, evenly from short to long."""
    tokens = sum(length + 2 for length, _ in pack)
    count = max(1, min(len(pack), int(len(pack) * most / tokens)))
    return [pack[k] for k in (np.arange(count) * len(pack) // count).tolist()]


def main() -> None:
    """Print `{"imports_s", "make_s"}` when ready, wait for a byte, and print the results."""
    options, entered = json.loads(sys.argv[1]), time.time()
    directory, number = Path(options["directory"]), int(options["number"])
    try:
        plan = read_plan(directory)
        spec = Spec.of(plan)
        began = time.monotonic()
        made = make_embedder(plan, torch.device(options["device"]), options["tokens"])
        make_s = time.monotonic() - began
        timed = _Timed(made.esm, spec.outputs, dtype=spec.dtype, long=spec.long, tokens=made.tokens)
        probe = _Probe(directory, plan, timed)
        probe.choose(options["seconds"], options["seed"], number, options["processes"])
        _say({"imports_s": max(0.0, entered - options["started"]), "make_s": make_s})
        if not os.read(0, 1):  # the parent has ended
            return
        found, reader = probe.run(f"{number}-probe.safetensors", options["seconds"])
        if number == 0:
            found |= {"numbers": probe.numbers, "parts": probe.parts}
            if options["fmt"] in FORMATS and reader is not None:
                found["write_s"] = write_s(spec, options["fmt"], reader, plan["records"], directory)
        _say(found)
    except BrokenPipeError:
        raise SystemExit(1) from None
    except (InputError, OSError) as error:
        text = str(error) if isinstance(error, InputError) else f"{error.filename or directory}: {error.strerror}"
        _say({"error": text})
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
