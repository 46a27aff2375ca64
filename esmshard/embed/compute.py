"""The computation of arrays for sequences, in packs of similar length and in windows, and of the parts of a job.

A pack that does not fit into memory is computed in smaller pieces, so the program does not end for lack of memory. A
model that does not fit is spread over GPUs, memory and disk.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esmshard.batch import TokenBatch, pack, piece
from esmshard.data.batching.packing import by_length
from esmshard.data.tracks import RecordTracks, TrackStore
from esmshard.devices import halving, side_by_side
from esmshard.embed.parts import EmbeddingStore, Parts, RowPlaces, read_plan
from esmshard.embed.spec import TORCH, Long, Spec
from esmshard.errors import InputError, UsageError
from esmshard.io.array_formats import Dtype, Output
from esmshard.io.remote import RemoteDirectory
from esmshard.io.store import TokenStore
from esmshard.model import weights
from esmshard.model.attention import OnAttention, attention_map, kernel_name
from esmshard.model.contacts import MAP_NUMBERS, ContactAccumulators
from esmshard.model.families.family_registry import family_of
from esmshard.model.trunk import Trunk, TrunkOutput
from esmshard.model.weights import Weights, model_hash
from esmshard.progress import say
from esmshard.vocab import CLS, EOS, VOCAB_SIZE, is_residue

Tokens = npt.NDArray[np.uint8]
Tracks = Mapping[str, npt.NDArray[Any]]
"""What a model reads of each token besides, [L + 2, ...] by the name of the track."""
PACK, GPU_PACK = 2048, 16384
"""Tokens of a pack on the CPU, where smaller packs are slower and larger packs are no faster, and on a GPU."""
PACK_MAPS = 1 << 26
"""Numbers of the attention maps of a pack, 256 MiB. They stay in memory until the whole pack is computed."""
SMALLEST = 128
"""Residues below which a window that does not fit into memory is not divided again."""
SHARE = 0.8
"""The share of free memory that the layers of a spread model may take. The rest is for activations."""


@dataclass(frozen=True)
class Seen:
    """A sequence, or a part of it, as the model gets it."""

    tokens: Tokens
    tracks: Tracks

    def piece(self, start: int, length: int) -> "Seen":
        """Return at most `length` residues from `start` on, between `<cls>` and `<eos>`."""
        tracks = {name: piece(values, start, length) for name, values in self.tracks.items()}
        return Seen(piece(self.tokens, start, length), tracks)


@dataclass(frozen=True)
class Computed:
    """The arrays of one sequence."""

    values: dict[str, torch.Tensor]
    """The arrays by output name, on the CPU, in the requested dtype."""
    windowed: int = 0
    """Residues of the windows into which the sequence was divided for lack of memory; 0 if it was computed as
    requested.
    """


@dataclass(frozen=True)
class Failed:
    """A sequence without arrays."""

    reason: str
    """The reason, as a clause."""


class Embedder:
    """The computation of some outputs with one model, for any number of sequences.

    The values of a sequence depend on the other sequences of its pack only by rounding (1e-6 in fp32).

    Args:
        esm: the model in evaluation mode, in the precision of the arithmetic.
        outputs: at least one output. Values are reduced in fp32.
        dtype: dtype of the arrays.
        long: the treatment of long sequences.
        tokens: tokens of a pack. A longer sequence is computed alone.
        device: the device to which batches are sent; by default the device of the weights.
        threads: whether each core of a CPU may compute a pack of its own.
    """

    def __init__(
        self,
        esm: Trunk,
        outputs: Sequence[Output],
        *,
        dtype: Dtype = "fp32",
        long: Long = Long(),  # noqa: B008  # frozen
        tokens: int | None = None,
        device: torch.device | None = None,
        threads: bool = True,
    ) -> None:
        self.esm, self.outputs, self.long, self._dtype = esm, tuple(outputs), long.for_model(esm.config), TORCH[dtype]
        self.device, self._threads = device or next(esm.parameters()).device, threads
        self.tokens = tokens or (PACK if self.device.type == "cpu" else GPU_PACK)
        self._layers = sorted({one.layer for one in outputs if one.layer is not None and one.pool != "attentions"})
        pools = {one.pool for one in outputs}
        self._logits, self._contacts = "logits" in pools, "contacts" in pools
        self._paired = {one.name for one in outputs if one.paired}
        self._maps = sum(len(one.heads) for one in outputs)
        # The blocks after the last one here are not run.
        of_maps = {one.layer for one in outputs if one.pool == "attentions" and one.layer is not None}
        self._trunk_layers = sorted({*self._layers, *of_maps, *([esm.config.n_layers] if self._contacts else [])})

    def packs(self, lengths: Sequence[int]) -> list[list[int]]:
        """Group the sequences that are computed together, by their residues. Returns positions in `lengths`, the
        longest sequences last.
        """
        whole = [n for n, length in enumerate(lengths) if len(self.long.starts(length)) == 1]
        kept = self.long.kept(np.array([lengths[n] for n in whole], dtype=np.int64))
        groups = by_length(self._cost(kept).tolist(), self.tokens) if whole else iter(())
        alone = sorted(set(range(len(lengths))) - set(whole), key=lambda n: lengths[n])
        return [*([whole[k] for k in group] for group in groups), *([n] for n in alone)]

    def _cost(self, kept: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the tokens of sequences of these residues. They are more where attention maps fill a pack sooner."""
        cost: npt.NDArray[np.int64] = np.maximum(kept + 2, kept * kept * self._maps * self.tokens // PACK_MAPS)
        return cost

    def compute(self, sequences: Sequence[Tokens], tracks: Sequence[Tracks] | None = None) -> list[Computed | Failed]:
        """Return the arrays of each sequence; see `each`."""
        results: dict[int, Computed | Failed] = {}
        self.each(sequences, tracks, results.__setitem__)
        return [results[n] for n in range(len(sequences))]

    def each(
        self,
        sequences: Sequence[Tokens],
        tracks: Sequence[Tracks] | None,
        take: Callable[[int, Computed | Failed], None],
    ) -> None:
        """Compute the arrays of each sequence, which are not kept.

        Args:
            sequences: `<cls> ... <eos>`, uint8 [L + 2], as from `esmshard.vocab.encode`.
            tracks: of each sequence, the same ones of all; see `TokenBatch.tracks`.
            take: called with the place of each sequence and its arrays, pack by pack, in any order and by several
                threads.
        """

        def compute(members: Sequence[int]) -> None:
            seen = [Seen(sequences[n], {} if tracks is None else tracks[n]) for n in members]
            for n, result in zip(members, self._pack(seen), strict=True):
                take(n, result)

        packs = self.packs([len(tokens) - 2 for tokens in sequences])
        side_by_side(compute, packs, self.device, threads=self._threads)

    def _pack(self, sequences: Sequence[Seen]) -> list[Computed | Failed]:
        """Compute as much as fits: all sequences at once, each half, windows of one sequence, or nothing."""
        results = halving(lambda some: self._finish(self._values(some, self.long)), sequences, self.device)
        return [
            self._in_windows(seen) if result is None else result
            for seen, result in zip(sequences, results, strict=True)
        ]

    def _in_windows(self, seen: Seen) -> Computed | Failed:
        """Compute a sequence that does not fit into memory in smaller and smaller windows."""
        length = int(self.long.kept(np.array([len(seen.tokens) - 2]))[0])
        seen, window = seen.piece(0, length), min(length, self.long.window)
        if window == length or len(self.long.starts(length)) > 1:
            window //= 2

        def in_windows(some: Sequence[Seen], window: int) -> list[Computed | Failed]:
            long = replace(self.long, mode="window", window=window, overlap=min(self.long.overlap, window // 4))
            return self._finish([self._blend(one, long, at_once=1) for one in some])

        while window >= SMALLEST:
            (result,) = halving(functools.partial(in_windows, window=window), [seen], self.device)
            if result is not None:
                return replace(result, windowed=window) if isinstance(result, Computed) else result
            window //= 2
        return Failed(f"memory does not suffice for its {length:,} residues, nor for small windows of it")

    def _values(self, sequences: Sequence[Seen], long: Long) -> list[dict[str, torch.Tensor]]:
        """Compute the outputs of each sequence, fp32, on the device."""
        if len(sequences) == 1 and len(long.starts(len(sequences[0].tokens) - 2)) > 1:
            (cost,) = self._cost(np.array([long.window])).tolist()
            return [self._blend(sequences[0], long, at_once=max(1, self.tokens // cost))]
        if long.mode == "truncate":
            sequences = [seen.piece(0, long.window) for seen in sequences]
        found = self._forward(sequences)
        return [self._reduce(parts, seen) for parts, seen in zip(found, sequences, strict=True)]

    def _forward(self, sequences: Sequence[Seen]) -> list[dict[str, torch.Tensor]]:
        """Compute values of each sequence: `residue_K` [L, D], `cls_K` [D], `logits` [L, 33], `contacts` [L, L],
        `attentions_K` [H, L, L] on the CPU.
        """
        tokens, tracks = [seen.tokens for seen in sequences], [seen.tracks for seen in sequences]
        batch = pack(tokens, tracks=tracks).to(self.device)
        regression = self.esm.contact_head.regression
        sums = ContactAccumulators(len(batch), regression.weight, regression.bias) if self._contacts else None
        maps = AttentionMaps(self.outputs, len(batch)) if self._maps else None
        listeners = [one.add for one in (sums, maps) if one is not None]

        def on_attention(layer: int, sequence: int, q_THK: torch.Tensor, k_THK: torch.Tensor) -> None:
            for add in listeners:
                add(layer, sequence, q_THK, k_THK)

        logits_at = torch.cat(batch.residues(torch.arange(batch.bounds[-1]))).to(self.device) if self._logits else None
        hear = on_attention if listeners else None
        found = self.esm(batch, layers=self._trunk_layers, logits_at=logits_at, on_attention=hear)
        parts: list[dict[str, torch.Tensor]] = [{} for _ in sequences] if maps is None else maps.found
        for layer in self._layers:
            x_TD = found.representations[layer]
            for part, start, x_LD in zip(parts, batch.bounds, batch.residues(x_TD), strict=False):
                part[f"residue_{layer}"], part[f"cls_{layer}"] = x_LD, x_TD[start]
        if found.logits_PV is not None:
            for part, x_LV in zip(parts, found.logits_PV.split(batch.lengths), strict=True):
                part["logits"] = x_LV[:, :VOCAB_SIZE]  # ESM-C has more columns, which mean nothing.
        if sums is not None:
            for part, logits_1LL in zip(parts, sums.logits(), strict=True):
                part["contacts"] = logits_1LL[0].sigmoid()
        return parts

    def _reduce(self, part: dict[str, torch.Tensor], seen: Seen) -> dict[str, torch.Tensor]:
        """Cut the linkers between chains out, and pool."""
        part, values = self._of_residues(part, seen), {}
        for one in self.outputs:
            x = part[f"residue_{one.layer}" if one.pool in ("mean", "max", "residue") else one.name]
            if one.pool == "mean":
                x = x.float().mean(0)
            elif one.pool == "max":
                x = x.amax(0)
            values[one.name] = x
        return values

    def _of_residues(self, part: dict[str, torch.Tensor], seen: Seen) -> dict[str, torch.Tensor]:
        """Return the values of the residues of all chains, one chain after the other, without those of linkers."""
        kept_L = is_residue(seen.tokens[1:-1])
        if kept_L.all():
            return part
        rows = torch.from_numpy(np.flatnonzero(kept_L))

        def kept(name: str, x: torch.Tensor) -> torch.Tensor:
            at = rows.to(x.device)
            if name in self._paired:
                return x[..., at[:, None], at]
            return x if name.startswith("cls") else x[at]

        return {name: kept(name, x) for name, x in part.items()}

    def _blend(self, seen: Seen, long: Long, at_once: int) -> dict[str, torch.Tensor]:
        """Compute the outputs of one sequence from overlapping windows, `at_once` windows at a time.

        Where two windows overlap, the weight of a window falls towards its cut, which gives a cross-fade. The ends of a
        protein are no cuts. The weight of a pair is the product of both residues' weights. A pair that no window
        contains is NaN. `cls` is the mean over the windows. Each window has `<cls>` and `<eos>`, as crops in training
        have.
        """
        length = len(seen.tokens) - 2
        starts = long.starts(length)
        sums: dict[str, torch.Tensor] = {}
        weight_L = torch.zeros(length, device=self.device)
        pair_LL = torch.zeros(length if self._paired else 0, length, device=self.device)
        for at in range(0, len(starts), at_once):
            some = starts[at : at + at_once]
            for start, part in zip(some, self._forward([seen.piece(s, long.window) for s in some]), strict=True):
                rows = slice(start, start + long.window)
                taper_W = _taper(start, long, length).to(self.device)
                weight_L[rows] += taper_W
                pair_WW = taper_W[:, None] * taper_W
                if self._paired:
                    pair_LL[rows, rows] += pair_WW
                for name, x in part.items():
                    if name in self._paired:
                        if name not in sums:
                            sums[name] = torch.zeros(*x.shape[:-2], length, length, device=x.device)
                        sums[name][..., rows, rows] += x * pair_WW.to(x.device)
                    elif name.startswith("cls"):
                        sums[name] = sums.get(name, 0) + x.float() / len(starts)
                    else:
                        whole = sums.setdefault(name, torch.zeros(length, x.shape[-1], device=self.device))
                        whole[rows] += x.float() * taper_W[:, None]
        for name, x in sums.items():
            if name in self._paired:
                sums[name] = x.div_(pair_LL.to(x.device))  # 0 / 0 is NaN
            elif not name.startswith("cls"):
                sums[name] = x / weight_L[:, None]
        return self._reduce(sums, seen)

    def _finish(self, values: list[dict[str, torch.Tensor]]) -> list[Computed | Failed]:
        """Move values to the CPU, in the dtype of the file. One copy for each output, since each copy makes the host
        wait.
        """
        done: list[dict[str, torch.Tensor]] = [{} for _ in values]
        reasons: dict[int, str] = {}
        for name in values[0]:
            arrays = [one[name] for one in values]
            flat = torch.cat([x.reshape(-1) for x in arrays]).to(self._dtype).cpu()
            # A sum shows a value that is not finite without a second array. Pairs outside all windows are NaN.
            finite = name in self._paired or bool(flat.sum(dtype=torch.float32).isfinite())
            for n, (x, stored) in enumerate(zip(arrays, torch.split(flat, [x.numel() for x in arrays]), strict=True)):
                done[n][name] = stored.view(x.shape)
                if not finite and not bool(stored.isfinite().all()):
                    beyond = f"{name} has values beyond the range of {str(self._dtype).removeprefix('torch.')}"
                    reasons[n] = beyond if bool(x.isfinite().all()) else f"{name} has values that are not finite"
        return [Failed(reasons[n]) if n in reasons else Computed(arrays) for n, arrays in enumerate(done)]


def _taper(start: int, long: Long, length: int) -> torch.Tensor:
    """Return weights of a window's residues, fp32 [W]: 1 in the middle, less towards a cut."""
    place_W = torch.arange(long.window, dtype=torch.float32)
    weight_W = torch.ones(long.window)
    width = long.overlap + 1
    if start > 0:
        weight_W = torch.minimum(weight_W, (place_W + 1) / width)
    if start + long.window < length:
        weight_W = torch.minimum(weight_W, (long.window - place_W) / width)
    return weight_W


class AttentionMaps:
    """The requested maps of each of N sequences. `Trunk.forward` takes `add` as its `on_attention`.

    The softmax is over all tokens. The rows and columns of `<cls>` and `<eos>` are removed afterwards, without
    normalising again. Outputs of other pools are ignored.
    """

    def __init__(self, outputs: Sequence[Output], n_sequences: int) -> None:
        self._of_layer = {one.layer: one for one in outputs if one.pool == "attentions"}
        self.found: list[dict[str, torch.Tensor]] = [{} for _ in range(n_sequences)]
        """The maps of each sequence by output name, fp32 [H, L, L] on the CPU, since those of many layers and heads are
        larger than a GPU's memory.
        """

    def add(self, layer: int, sequence: int, q_THK: torch.Tensor, k_THK: torch.Tensor) -> None:
        """Compute the maps of one sequence and of one block, counted from 0, if they are requested."""
        output = self._of_layer.get(layer + 1)
        if output is None:
            return
        length = len(q_THK) - 2
        maps_HLL = torch.empty(len(output.heads), length, length)
        at_once = max(1, MAP_NUMBERS // len(q_THK) ** 2)
        for start in range(0, len(output.heads), at_once):
            some = list(output.heads[start : start + at_once])
            maps_HTT = attention_map(q_THK[:, some], k_THK[:, some])
            maps_HLL[start : start + at_once] = maps_HTT[:, 1:-1, 1:-1]
        self.found[sequence][output.name] = maps_HLL


def offloaded(found: Weights, folder: Path, dtype: torch.dtype, device: torch.device) -> Trunk:
    """Build a model in evaluation mode whose layers are on GPUs, in memory and on disk, in this order, as they fit.

    `accelerate` copies layers to the computing device in every forward pass, so packs should be as large as memory
    allows. While it is built, memory holds the whole model once. Outputs and all parts besides the layers are on
    `device`.

    Args:
        found: the weights of the model, see `esmshard.model.weights.read`.
        folder: a directory for the layers on disk. The caller removes it.
        dtype: dtype of weights and arithmetic, as for `weights.build`.
        device: the computing device. `cuda` without a number means all GPUs: each computes the layers that it stores.

    Raises:
        UsageError: if `accelerate` is not installed.
    """
    try:
        from accelerate import dispatch_model, infer_auto_device_map
        from accelerate.utils import get_max_memory
    except ImportError:
        raise UsageError("--offload needs accelerate; pip install 'esmshard[big]'") from None
    main = device.type if device.type != "cuda" else device.index or 0
    where = torch.device(device.type, 0 if device == torch.device("cuda") else device.index)
    memory = {place: int(SHARE * size) for place, size in get_max_memory().items()}
    if device != torch.device("cuda"):
        memory = {place: size for place, size in memory.items() if place in (main, "cpu")}
    model = weights.build(found, torch.device("cpu"), dtype).requires_grad_(False).eval()
    others = {name: part for name, part in model.named_children() if name != "layers"}
    if main in memory:
        memory[main] -= sum(x.numel() * x.element_size() for part in others.values() for x in part.parameters())
    # A layer is not split, because the projections of its attention are read without a call.
    block = [type(model.layers[0]).__name__]
    layers = infer_auto_device_map(model.layers, memory, block, dtype=dtype, clean_result=False)
    # It warns that some weights are elsewhere, which is intended here.
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    places = dict.fromkeys(others, main) | {f"layers.{n}": place for n, place in layers.items()}
    dispatch_model(model, places, main_device=main, offload_dir=str(folder), preload_module_classes=block)
    counts = Counter({"cpu": "in memory", "disk": "on disk"}.get(str(one), f"on GPU {one}") for one in layers.values())
    say(f"{found.source}: layers: " + ", ".join(f"{n} {place}" for place, n in counts.items()))
    forward = model.forward

    def on_device(
        batch: TokenBatch,
        layers: Sequence[int] | None = None,
        logits_at: torch.Tensor | None = None,
        on_attention: OnAttention | None = None,
    ) -> TrunkOutput:
        """Bring input and output to one device, since layers use each other's outputs, and a listener those of all."""

        def on_qk(layer: int, sequence: int, q_THK: torch.Tensor, k_THK: torch.Tensor) -> None:
            assert on_attention is not None
            on_attention(layer, sequence, q_THK.to(where), k_THK.to(where))

        at = None if logits_at is None else logits_at.to(where)
        hear = None if on_attention is None else on_qk
        output = forward(batch.to(where), layers=layers, logits_at=at, on_attention=hear)
        return TrunkOutput({n: x_TD.to(where) for n, x_TD in output.representations.items()}, output.logits_PV)

    model.forward = on_device  # type: ignore[method-assign]
    return model


@dataclass(frozen=True)
class Work:
    """What a process needs in order to compute parts of a job."""

    directory: Path
    """`OUT.partial`."""
    store: Path
    """The token store of the input."""
    model: str
    device: str
    tokens: int | None
    """Tokens of a pack."""
    reuse: Path | None = None
    """An earlier directory of parts."""
    offload: bool = False
    """Whether the model is spread over all GPUs, the memory and the disk."""
    bucket: str | None = None
    """The address where the parts lie, if it is a bucket."""


class Worker:
    """A job with its model, in a process that computes parts.

    Raises:
        InputError: if the model is not the one that the plan was made for.
    """

    def __init__(self, work: Work) -> None:
        plan, read, device = read_plan(work.directory), weights.read(work.model), torch.device(work.device)
        self.spec = spec = Spec.of(plan["spec"])
        if model_hash(read) != spec.model_hash:
            raise InputError(f"{read.source}: its weights were changed since; --overwrite starts over")
        read, dtype = weights.joining(read, spec.chains, "--join"), TORCH[spec.compute]
        how: dict[str, Any] = {"dtype": spec.dtype, "long": spec.long, "tokens": work.tokens}
        if work.offload:
            esm = offloaded(read, work.directory / "work" / "layers", dtype, device)
            # A pass copies the layers once, whatever its number of tokens, and packs at the same time would wait.
            how |= {"tokens": work.tokens or GPU_PACK, "device": device, "threads": False}
        else:
            esm = weights.build(read, device, dtype).eval()
        self.embedder = Embedder(esm, spec.outputs, **how)
        self.store = TokenStore(work.store)
        folder, known = work.directory / "work" / "tracks", family_of(read.config).tracks
        tracks = [TrackStore(folder / one.name, one, self.store) for one in known if one.name in plan["tracks"]]
        self.tracks = RecordTracks(tracks) if tracks else None
        self.parts = Parts(work.directory, plan, None if work.bucket is None else RemoteDirectory(work.bucket))
        self.reuse = None if work.reuse is None else EmbeddingStore(work.reuse)

    def compute(self, part: int) -> tuple[int, int]:
        """Compute a part and write it, unless it was finished meanwhile. Return its computed rows and residues."""
        spec, index = self.spec, self.parts.index
        if self.parts.is_done(part):
            return 0, 0
        first, last = index.bounds[part : part + 2]
        first_n, length_n = index.first[first:last].tolist(), index.lengths_of(part)
        places = RowPlaces(spec, length_n)
        tensors = {one.name: places.empty(one) for one in spec.outputs}

        def put(row: int, values: Mapping[str, torch.Tensor]) -> None:
            for one in spec.outputs:
                target = tensors[one.name][places.slice(one, row)]
                target.copy_(values[one.name].reshape(target.shape))

        todo = list(range(len(first_n)))
        if self.reuse is not None:
            old_n = self.reuse.rows_to_reuse(np.asarray(index.keys[first:last]))
            todo = np.flatnonzero(old_n < 0).tolist()
            for row in np.flatnonzero(old_n >= 0).tolist():
                copied = {name: torch.from_numpy(x) for name, x in self.reuse.values(int(old_n[row])).items()}
                put(row, {name: x.view(TORCH[spec.dtype]) for name, x in copied.items()})
        failed, windowed = list[tuple[int, str]](), list[int]()
        sequences = [np.pad(self.store.residues(first_n[row]), 1, constant_values=(CLS, EOS)) for row in todo]
        tracks = None if self.tracks is None else [self.tracks.get(first_n[row], slice(None)) for row in todo]

        def take(place: int, result: Computed | Failed) -> None:
            if isinstance(result, Failed):
                failed.append((todo[place], result.reason))
            else:
                put(todo[place], result.values)
                windowed.extend([todo[place]] if result.windowed else [])

        self.embedder.each(sequences, tracks, take)
        device = self.embedder.device
        note = {
            "part": part,
            "failed": sorted(failed),
            "windowed": sorted(windowed),
            "reused": len(first_n) - len(todo),
            "kernel": kernel_name(device, TORCH[spec.compute]),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "torch": torch.__version__,
        }
        self.parts.write(part, tensors, note)
        return len(first_n), int(length_n.sum())


worker_of = functools.lru_cache(maxsize=1)(Worker)


def compute_part(work: Work, part: int) -> tuple[int, int]:
    """Compute a part in a process that keeps the model for the next one; see `Worker.compute`."""
    return worker_of(work).compute(part)
