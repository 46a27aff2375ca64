"""What a model says of sequences, array by array: packs of similar lengths, windows of long ones, and no crash for want
of memory.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from esmshard.batch import TokenBatch, pack
from esmshard.data.packing import by_length
from esmshard.infer.outputs import Dtype, Long, Output
from esmshard.model.contacts import ContactAccumulators
from esmshard.model.esm2 import ESM2
from esmshard.model.threads import packs_at_once
from esmshard.parallel.out_of_memory import is_out_of_memory

Tokens = npt.NDArray[np.uint8]
TORCH: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PACK = {"cpu": 2048}
"""Tokens that are computed at once. On the CPU smaller packs are slower and larger ones no faster."""
GPU_PACK = 16384
SMALLEST = 128
"""Residues below which a window that does not fit into memory is not cut again."""


@dataclass(frozen=True)
class Computed:
    """The arrays of one sequence."""

    values: dict[str, torch.Tensor]
    """By the names of the outputs, on the CPU, in the dtype asked for."""
    windowed: int = 0
    """Residues of the windows it was cut into for want of memory; 0 if it was taken as asked for."""


@dataclass(frozen=True)
class Failed:
    """A sequence without arrays."""

    reason: str
    """A clause for people."""


class Embedder:
    """Computes some outputs of any number of sequences with one model.

    The numbers of a sequence do not depend on what it is computed with but for rounding (1e-6 in fp32).

    Args:
        esm: in evaluation mode, in the precision of the arithmetic.
        outputs: at least one. Values are reduced in fp32.
        dtype: of the arrays.
        long: what becomes of long sequences.
        tokens: of a pack; a longer sequence goes alone.
        device: where the model wants its batches; by default where its weights are.
        workers: packs side by side; on a CPU one a core by default.
    """

    def __init__(
        self,
        esm: ESM2,
        outputs: Sequence[Output],
        *,
        dtype: Dtype = "fp32",
        long: Long = Long(),  # noqa: B008  # frozen
        tokens: int | None = None,
        device: torch.device | None = None,
        workers: int | None = None,
    ) -> None:
        self.esm, self.outputs, self.long, self._dtype = esm, tuple(outputs), long.check(), TORCH[dtype]
        self.device = device or next(esm.parameters()).device
        self._workers = workers or packs_at_once(self.device)
        self.tokens = tokens or PACK.get(self.device.type, GPU_PACK)
        self._layers = sorted({one.layer for one in outputs if one.layer is not None})
        pools = {one.pool for one in outputs}
        self._logits, self._contacts = "logits" in pools, "contacts" in pools

    def packs(self, lengths: Sequence[int]) -> list[list[int]]:
        """Places of the sequences that are computed together, given their residues; the longest first, so that at the
        end nobody waits for them.
        """
        whole = [n for n, length in enumerate(lengths) if len(self.long.starts(length)) == 1]
        kept = self.long.kept(np.array([lengths[n] for n in whole], dtype=np.int64)) + 2
        groups = by_length(kept.tolist(), self.tokens) if whole else iter(())
        packs = [[whole[k] for k in group] for group in groups]
        alone = sorted(set(range(len(lengths))) - set(whole), key=lambda n: lengths[n])
        return [*packs, *([n] for n in alone)][::-1]

    def compute(self, sequences: Sequence[Tokens]) -> Iterator[tuple[int, Computed | Failed]]:
        """Each sequence's place and what was found, in any order.

        Args:
            sequences: `<cls> ... <eos>`, uint8 [L + 2], as `esmshard.vocab.encode` gives them.
        """
        jobs = self.packs([len(tokens) - 2 for tokens in sequences])
        workers = self._workers

        def job(members: list[int]) -> list[Computed | Failed]:
            with torch.no_grad():  # it holds for one thread
                return self._pack([sequences[n] for n in members])

        if workers == 1 or len(jobs) < workers:  # all cores on one pack after the other
            for members in jobs:
                yield from zip(members, job(members), strict=True)
            return
        # On the CPU each core works on a pack of its own: 1.15 times as fast as all cores on one operation after the
        # other. Few packs wait at a time, so that memory does not grow with their number.
        waiting: deque[tuple[list[int], Future[list[Computed | Failed]]]] = deque()
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            try:
                for members in jobs:
                    waiting.append((members, pool.submit(job, members)))
                    if len(waiting) > workers + 1:
                        done, future = waiting.popleft()
                        yield from zip(done, future.result(), strict=True)
                for done, future in waiting:
                    yield from zip(done, future.result(), strict=True)
            finally:
                pool.shutdown(cancel_futures=True)

    def _pack(self, sequences: list[Tokens]) -> list[Computed | Failed]:
        """Whatever fits: all at once, the halves one after the other, windows of one, nothing."""
        try:
            return self._finish(self._values(sequences, self.long))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Outside the handler, whose traceback keeps the tensors alive.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(sequences) > 1:
            half = len(sequences) // 2
            return self._pack(sequences[:half]) + self._pack(sequences[half:])
        return [self._in_windows(sequences[0])]

    def _in_windows(self, tokens: Tokens) -> Computed | Failed:
        length = int(self.long.kept(np.array([len(tokens) - 2]))[0])
        window = min(length, self.long.window) if len(self.long.starts(length)) == 1 else self.long.window // 2
        if window == length:
            window = length // 2
        while window >= SMALLEST:
            long = replace(self.long, mode="window", window=window, overlap=min(self.long.overlap, window // 4))
            try:
                (found,) = self._finish([self._blend(_piece(tokens, 0, length), long, at_once=1)])
                return replace(found, windowed=window) if isinstance(found, Computed) else found
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            window //= 2
        return Failed(f"memory does not suffice for its {length:,} residues, nor for small windows of it")

    def _values(self, sequences: list[Tokens], long: Long) -> list[dict[str, torch.Tensor]]:
        """The outputs of each, fp32, on the device."""
        if len(sequences) == 1 and len(long.starts(len(sequences[0]) - 2)) > 1:
            return [self._blend(sequences[0], long, at_once=max(1, self.tokens // (long.window + 2)))]
        if long.mode == "truncate":
            sequences = [_piece(tokens, 0, long.window) for tokens in sequences]
        return [self._reduce(parts) for parts in self._forward(sequences)]

    def _forward(self, sequences: list[Tokens]) -> list[dict[str, torch.Tensor]]:
        """Per-residue values of each: `residue_K` [L, D], `cls_K` [D], `logits` [L, 33], `contacts` [L, L]."""
        batch = pack(sequences).to(self.device)
        regression = self.esm.contact_head.regression
        sums = ContactAccumulators(len(batch), regression.weight, regression.bias) if self._contacts else None
        logits_at = _residue_places(batch).to(self.device) if self._logits else None
        found = self.esm(
            batch, layers=self._layers, logits_at=logits_at, on_attention=None if sums is None else sums.add
        )
        parts: list[dict[str, torch.Tensor]] = [{} for _ in sequences]
        for layer in self._layers:
            x_TD = found.representations[layer]
            for part, start, x_LD in zip(parts, batch.bounds, batch.residues(x_TD), strict=False):
                part[f"residue_{layer}"], part[f"cls_{layer}"] = x_LD, x_TD[start]
        if found.logits_PV is not None:
            for part, x_LV in zip(parts, found.logits_PV.split(batch.lengths), strict=True):
                part["logits"] = x_LV
        if sums is not None:
            for part, logits_1LL in zip(parts, sums.logits(), strict=True):
                part["contacts"] = logits_1LL[0].sigmoid()
        return parts

    def _reduce(self, part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        values = {}
        for one in self.outputs:
            x = part[f"residue_{one.layer}" if one.pool in ("mean", "max", "residue") else one.name]
            if one.pool == "mean":
                x = x.float().mean(0)
            elif one.pool == "max":
                x = x.amax(0)
            values[one.name] = x
        return values

    def _blend(self, tokens: Tokens, long: Long, at_once: int) -> dict[str, torch.Tensor]:
        """The outputs of one sequence from overlapping windows, of which some are computed at once.

        At a residue that two windows see, each counts by how far it is from where that window was cut: a cross-fade
        over the overlap. Protein ends are no cuts. A pair counts by the product of both; one that no window sees is
        NaN. `cls` is the mean over the windows. Each window has `<cls>` and `<eos>`, as crops in training have.
        """
        length, starts = len(tokens) - 2, long.starts(len(tokens) - 2)
        sums: dict[str, torch.Tensor] = {}
        weight_L = torch.zeros(length, device=self.device)
        pair_LL = torch.zeros(length, length, device=self.device) if self._contacts else None
        for at in range(0, len(starts), at_once):
            some = starts[at : at + at_once]
            for start, part in zip(some, self._forward([_piece(tokens, s, long.window) for s in some]), strict=True):
                rows = slice(start, start + long.window)
                taper_W = _taper(start, long, length).to(self.device)
                weight_L[rows] += taper_W
                for name, x in part.items():
                    if name == "contacts":
                        assert pair_LL is not None
                        pair_WW = taper_W[:, None] * taper_W
                        pair_LL[rows, rows] += pair_WW
                        sums.setdefault(name, torch.zeros_like(pair_LL))[rows, rows] += x * pair_WW
                    elif name.startswith("cls"):
                        sums[name] = sums.get(name, 0) + x.float() / len(starts)
                    else:
                        whole = sums.setdefault(name, torch.zeros(length, x.shape[-1], device=self.device))
                        whole[rows] += x.float() * taper_W[:, None]
        for name, x in sums.items():
            if name == "contacts":
                assert pair_LL is not None
                sums[name] = x / pair_LL  # 0 / 0 is NaN
            elif not name.startswith("cls"):
                sums[name] = x / weight_L[:, None]
        return self._reduce(sums)

    def _finish(self, values: list[dict[str, torch.Tensor]]) -> list[Computed | Failed]:
        """To the CPU, in the dtype of the file: one copy an output, for each makes the host wait for the device."""
        done: list[dict[str, torch.Tensor]] = [{} for _ in values]
        reasons: dict[int, str] = {}
        for name in values[0]:
            arrays = [one[name] for one in values]
            flat = torch.cat([x.reshape(-1) for x in arrays]).to(self._dtype).cpu()
            # A sum shows a value that is not finite without a second array. Pairs that no window saw are NaN.
            finite = name == "contacts" or bool(flat.sum(dtype=torch.float32).isfinite())
            for n, (x, stored) in enumerate(zip(arrays, torch.split(flat, [x.numel() for x in arrays]), strict=True)):
                done[n][name] = stored.view(x.shape)
                if not finite and not bool(stored.isfinite().all()):
                    beyond = f"{name} has values beyond the range of {str(self._dtype).removeprefix('torch.')}"
                    reasons[n] = beyond if bool(x.isfinite().all()) else f"{name} has values that are not finite"
        return [Failed(reasons[n]) if n in reasons else Computed(arrays) for n, arrays in enumerate(done)]


def _piece(tokens: Tokens, start: int, length: int) -> Tokens:
    """At most `length` residues from `start` on, between `<cls>` and `<eos>`."""
    return np.concatenate((tokens[:1], tokens[1 + start : -1][:length], tokens[-1:]))


def _residue_places(batch: TokenBatch) -> torch.Tensor:
    """int64 [P]: the residues of all sequences in the pack."""
    inside_T = np.ones(batch.bounds[-1], dtype=np.bool_)
    ends = np.array(batch.bounds)
    inside_T[ends[:-1]] = inside_T[ends[1:] - 1] = False
    return torch.from_numpy(np.flatnonzero(inside_T))


def _taper(start: int, long: Long, length: int) -> torch.Tensor:
    """Weights of a window's residues, fp32 [W]: 1 in the middle, less towards a cut."""
    place_W = torch.arange(long.window, dtype=torch.float32)
    weight_W = torch.ones(long.window)
    width = long.overlap + 1
    if start > 0:
        weight_W = torch.minimum(weight_W, (place_W + 1) / width)
    if start + long.window < length:
        weight_W = torch.minimum(weight_W, (long.window - place_W) / width)
    return weight_W
