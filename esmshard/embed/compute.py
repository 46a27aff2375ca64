"""Compute embeddings: the arrays of each sequence, and the parts of an `embed` job.

Sequences of similar lengths are computed together in a batch (pack). A pack that does not fit into memory is divided
into smaller packs. A sequence that does not fit alone is divided into windows. A model that does not fit can be spread
over GPUs, memory and disk.
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
from esmshard.embed.parts import EmbeddingStore, Parts, RowPlaces
from esmshard.embed.spec import TORCH, Long, Spec
from esmshard.errors import InputError, UsageError
from esmshard.io.array_formats import Dtype, Output
from esmshard.io.paths import read_json
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
"""One array [L + 2, ...] for each track, with a value for each token; the keys are the names of the tracks."""
PACK, GPU_PACK = 2048, 16384
"""The default number of tokens of a batch (pack) on a CPU and on a GPU. On a CPU, larger packs are not faster."""
PACK_MAPS = 1 << 26
"""The maximum count of numbers in all attention maps of a batch (pack). These maps (256 MiB) are in memory at once."""
SMALLEST = 128
"""The smallest window, in residues, that is tried if memory does not suffice for a sequence."""
SHARE = 0.8
"""The fraction of free memory that the layers of an offloaded model may fill. Activations use the rest."""


@dataclass(frozen=True)
class ModelInput:
    """The tokens and tracks of one sequence, or of one window of a sequence."""

    tokens: Tokens
    tracks: Tracks

    def piece(self, start: int, length: int) -> "ModelInput":
        """Return a window: at most `length` residues from residue `start` on, with `<cls>` and `<eos>` at its ends."""
        tracks = {name: piece(values, start, length) for name, values in self.tracks.items()}
        return ModelInput(piece(self.tokens, start, length), tracks)


@dataclass(frozen=True)
class Computed:
    """The computed arrays of one sequence."""

    values: dict[str, torch.Tensor]
    """The arrays on the CPU in the requested dtype, by output name, such as `mean_6`."""
    windowed: int = 0
    """The window length in residues if the sequence was too large for the memory; otherwise 0."""


@dataclass(frozen=True)
class Failed:
    """A sequence whose arrays could not be computed."""

    reason: str
    """The reason, for the user."""


class Embedder:
    """A model that computes the requested outputs for any number of sequences.

    Other sequences in the same batch (pack) change the values of a sequence only by rounding (1e-6 in fp32).

    Args:
        esm: the model in evaluation mode. The dtype of its weights is also the dtype of the arithmetic.
        outputs: one or more outputs. Means over residues are computed in fp32.
        dtype: the dtype of the returned arrays.
        long: the treatment of long sequences.
        tokens: the maximum number of tokens of a batch (pack). A longer sequence gets a pack without other sequences.
        device: the device to which batches are sent; by default the device of the weights.
        threads: whether a CPU may compute several batches (packs) at the same time.
    """

    def __init__(
        self,
        esm: Trunk,
        outputs: Sequence[Output],
        *,
        dtype: Dtype = "fp32",
        long: Long = Long(),  # noqa: B008  # a frozen dataclass
        tokens: int | None = None,
        device: torch.device | None = None,
        threads: bool = True,
    ) -> None:
        self.esm, self.outputs, self.long, self._dtype = esm, tuple(outputs), long.for_model(esm.config), TORCH[dtype]
        self.device, self._threads = device or next(esm.parameters()).device, threads
        self.tokens = tokens or (PACK if self.device.type == "cpu" else GPU_PACK)
        self._layers = sorted({o.layer for o in outputs if o.layer is not None and o.pool != "attentions"})
        pools = {output.pool for output in outputs}
        self._logits, self._contacts = "logits" in pools, "contacts" in pools
        self._paired = {output.name for output in outputs if output.paired}
        self._maps = sum(len(output.heads) for output in outputs)
        # The trunk runs no block after the last of these layers.
        map_layers = {o.layer for o in outputs if o.layer is not None and o.pool == "attentions"}
        self._trunk_layers = sorted({*self._layers, *map_layers, *([esm.config.n_layers] if self._contacts else [])})

    def packs(self, lengths: Sequence[int]) -> list[list[int]]:
        """Group sequences of similar lengths into batches (packs), and return the sequence indices of each pack. A
        sequence that is computed in windows gets a pack without other sequences. These packs come last.
        """
        in_packs = [n for n, length in enumerate(lengths) if len(self.long.starts(length)) == 1]
        kept = self.long.kept(np.array([lengths[n] for n in in_packs], dtype=np.int64))
        groups = by_length(self._cost(kept).tolist(), self.tokens) if in_packs else iter(())
        in_windows = sorted(set(range(len(lengths))) - set(in_packs), key=lambda n: lengths[n])
        return [*([in_packs[k] for k in group] for group in groups), *([n] for n in in_windows)]

    def _cost(self, kept: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return how many tokens of a batch's maximum each sequence with `kept` residues uses. Long sequences with
        attention maps use more than their own tokens, because the maps need memory.
        """
        cost: npt.NDArray[np.int64] = np.maximum(kept + 2, kept * kept * self._maps * self.tokens // PACK_MAPS)
        return cost

    def compute(self, sequences: Sequence[Tokens], tracks: Sequence[Tracks] | None = None) -> list[Computed | Failed]:
        """Return the arrays of each sequence in the order of `sequences`. For the arguments see `each`."""
        results: dict[int, Computed | Failed] = {}
        self.each(sequences, tracks, results.__setitem__)
        return [results[n] for n in range(len(sequences))]

    def each(
        self,
        sequences: Sequence[Tokens],
        tracks: Sequence[Tracks] | None,
        take: Callable[[int, Computed | Failed], None],
    ) -> None:
        """Compute the arrays of each sequence, and pass them to `take`.

        Args:
            sequences: the tokens of each sequence, `<cls> ... <eos>`, uint8 [L + 2], as from `esmshard.vocab.encode`.
            tracks: the tracks of each sequence, with the same names for all sequences; see `TokenBatch.tracks`.
            take: is called with the index and the arrays of each sequence, by several threads and in any order.
        """

        def compute(members: Sequence[int]) -> None:
            inputs = [ModelInput(sequences[n], {} if tracks is None else tracks[n]) for n in members]
            for n, result in zip(members, self._pack(inputs), strict=True):
                take(n, result)

        packs = self.packs([len(tokens) - 2 for tokens in sequences])
        side_by_side(compute, packs, self.device, threads=self._threads)

    def _pack(self, inputs: Sequence[ModelInput]) -> list[Computed | Failed]:
        """Compute all sequences at once. If memory does not suffice, compute each half of them separately. A sequence
        that does not fit alone is divided into windows.
        """
        results = halving(lambda members: self._finish(self._values(members)), inputs, self.device)
        return [result or self._in_windows(source) for source, result in zip(inputs, results, strict=True)]

    def _in_windows(self, source: ModelInput) -> Computed | Failed:
        """Compute a sequence in windows. Halve the windows until memory suffices."""
        length = int(self.long.kept(np.array([len(source.tokens) - 2]))[0])
        kept, window = source.piece(0, length), min(length, self.long.window)
        if window == length or len(self.long.starts(length)) > 1:
            window //= 2

        def in_windows(members: Sequence[ModelInput], window: int) -> list[Computed | Failed]:
            long = replace(self.long, mode="window", window=window, overlap=min(self.long.overlap, window // 4))
            return self._finish([self._blend(member, long, at_once=1) for member in members])

        while window >= SMALLEST:
            (result,) = halving(functools.partial(in_windows, window=window), [kept], self.device)
            if result is not None:
                return replace(result, windowed=window) if isinstance(result, Computed) else result
            window //= 2
        return Failed(f"memory does not suffice for its {length:,} residues, nor for small windows of it")

    def _values(self, inputs: Sequence[ModelInput]) -> list[dict[str, torch.Tensor]]:
        """Compute the outputs of each sequence on the device, in the dtype of the arithmetic."""
        long = self.long
        if len(inputs) == 1 and len(long.starts(len(inputs[0].tokens) - 2)) > 1:
            (cost,) = self._cost(np.array([long.window])).tolist()
            return [self._blend(inputs[0], long, at_once=max(1, self.tokens // cost))]
        if long.mode == "truncate":
            inputs = [source.piece(0, long.window) for source in inputs]
        return [self._reduce(part, kept) for part, kept in zip(self._forward(inputs), inputs, strict=True)]

    def _forward(self, inputs: Sequence[ModelInput]) -> list[dict[str, torch.Tensor]]:
        """Run the model on all sequences at once. Return the values of each sequence by name, with K for the layer:
        `residue_K` [L, D], `cls_K` [D], `logits` [L, 33] and `contacts` [L, L] on the device, and `attentions_K`
        [H, L, L] on the CPU.
        """
        batch = pack([x.tokens for x in inputs], tracks=[x.tracks for x in inputs]).to(self.device)
        sums = None
        if self._contacts:
            regression = self.esm.contact_head.regression
            sums = ContactAccumulators(len(batch), regression.weight, regression.bias)
        maps = AttentionMaps(self.outputs, len(batch)) if self._maps else None
        listeners = [listener.add for listener in (sums, maps) if listener is not None]

        def on_attention(layer: int, sequence: int, q_THK: torch.Tensor, k_THK: torch.Tensor) -> None:
            for add in listeners:
                add(layer, sequence, q_THK, k_THK)

        logits_at = torch.cat(batch.residues(torch.arange(batch.bounds[-1]))).to(self.device) if self._logits else None
        output = self.esm(
            batch, layers=self._trunk_layers, logits_at=logits_at, on_attention=on_attention if listeners else None
        )
        parts: list[dict[str, torch.Tensor]] = [{} for _ in inputs] if maps is None else maps.maps_N
        for layer in self._layers:
            x_TD = output.representations[layer]
            for part, start, x_LD in zip(parts, batch.bounds, batch.residues(x_TD), strict=False):
                part[f"residue_{layer}"], part[f"cls_{layer}"] = x_LD, x_TD[start]
        if output.logits_PV is not None:
            for part, x_LV in zip(parts, output.logits_PV.split(batch.lengths), strict=True):
                part["logits"] = x_LV[:, :VOCAB_SIZE]  # ESM-C has further columns without a meaning.
        if sums is not None:
            for part, logits_1LL in zip(parts, sums.logits(), strict=True):
                part["contacts"] = logits_1LL[0].sigmoid()
        return parts

    def _reduce(self, part: dict[str, torch.Tensor], source: ModelInput) -> dict[str, torch.Tensor]:
        """Remove the linkers between chains from the values `part`, and compute means and maxima over the residues."""
        kept_L, values = torch.from_numpy(is_residue(source.tokens[1:-1])), dict[str, torch.Tensor]()
        for output in self.outputs:
            x = part[f"residue_{output.layer}" if output.pool in ("mean", "max", "residue") else output.name]
            if not kept_L.all() and output.pool != "cls":
                rows = kept_L.nonzero()[:, 0].to(x.device)
                x = x[..., rows[:, None], rows] if output.paired else x[rows]
            if output.pool == "mean":
                x = x.float().mean(0)
            elif output.pool == "max":
                x = x.amax(0)
            values[output.name] = x
        return values

    def _blend(self, source: ModelInput, long: Long, at_once: int) -> dict[str, torch.Tensor]:
        """Compute the outputs of one sequence from overlapping windows, `at_once` windows at a time.

        Where windows overlap, the result is their weighted mean; see `_taper`. The weight of a residue pair is the
        product of both residues' weights. A pair that no window contains is NaN. `cls` is the mean over the windows.
        Each window has `<cls>` and `<eos>`, because the crops of long proteins in training had them.
        """
        length = len(source.tokens) - 2
        starts = long.starts(length)
        sums: dict[str, torch.Tensor] = {}
        weight_L = torch.zeros(length, device=self.device)
        pair_LL = torch.zeros(length if self._paired else 0, length, device=self.device)
        for at in range(0, len(starts), at_once):
            pieces = [source.piece(start, long.window) for start in starts[at : at + at_once]]
            for start, part in zip(starts[at:], self._forward(pieces), strict=False):
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
                        sum_LX = sums.setdefault(name, torch.zeros(length, x.shape[-1], device=self.device))
                        sum_LX[rows] += x.float() * taper_W[:, None]
        for name, x in sums.items():
            if name in self._paired:
                sums[name] = x.div_(pair_LL.to(x.device))  # 0 / 0 is NaN
            elif not name.startswith("cls"):
                sums[name] = x / weight_L[:, None]
        return self._reduce(sums, source)

    def _finish(self, values: list[dict[str, torch.Tensor]]) -> list[Computed | Failed]:
        """Copy the values to the CPU in the requested dtype. A sequence with values that are not finite has failed."""
        done: list[dict[str, torch.Tensor]] = [{} for _ in values]
        reasons: dict[int, str] = {}
        for name in values[0]:
            arrays = [of_sequence[name] for of_sequence in values]
            # The host waits for each copy, so all sequences share one copy.
            flat = torch.cat([x.reshape(-1) for x in arrays]).to(self._dtype).cpu()
            # If a value is not finite, the sum is not finite. Only pairs that no window contains may be NaN.
            finite = name in self._paired or bool(flat.sum(dtype=torch.float32).isfinite())
            for n, (x, stored) in enumerate(zip(arrays, torch.split(flat, [x.numel() for x in arrays]), strict=True)):
                done[n][name] = stored.view(x.shape)
                if not finite and not bool(stored.isfinite().all()):
                    beyond = f"{name} has values beyond the range of {str(self._dtype).removeprefix('torch.')}"
                    reasons[n] = beyond if bool(x.isfinite().all()) else f"{name} has values that are not finite"
        return [Failed(reasons[n]) if n in reasons else Computed(arrays) for n, arrays in enumerate(done)]


def _taper(start: int, long: Long, length: int) -> torch.Tensor:
    """Return the weight of each residue of a window, fp32 [W]: 1; in an overlap, it falls towards the window's end."""
    place_W = torch.arange(long.window, dtype=torch.float32)
    weight_W = torch.ones(long.window)
    width = long.overlap + 1
    if start > 0:
        weight_W = torch.minimum(weight_W, (place_W + 1) / width)
    if start + long.window < length:
        weight_W = torch.minimum(weight_W, (long.window - place_W) / width)
    return weight_W


class AttentionMaps:
    """The requested attention maps of N sequences. Pass the method `add` to `Trunk.forward` as `on_attention`.

    The softmax includes `<cls>` and `<eos>`, whose rows and columns are then removed. So the rows of a map sum to less
    than 1.
    """

    def __init__(self, outputs: Sequence[Output], n_sequences: int) -> None:
        self._of_layer = {output.layer: output for output in outputs if output.pool == "attentions"}
        self.maps_N: list[dict[str, torch.Tensor]] = [{} for _ in range(n_sequences)]
        """The maps of each sequence by output name, fp32 [H, L, L]; on the CPU, because a GPU may lack memory."""

    def add(self, layer: int, sequence: int, q_THK: torch.Tensor, k_THK: torch.Tensor) -> None:
        """Compute the attention maps of a sequence in block `layer` (from 0), if these maps were requested."""
        output = self._of_layer.get(layer + 1)
        if output is None:
            return
        length = len(q_THK) - 2
        maps_HLL = torch.empty(len(output.heads), length, length)
        at_once = max(1, MAP_NUMBERS // len(q_THK) ** 2)
        for start in range(0, len(output.heads), at_once):
            heads = list(output.heads[start : start + at_once])
            maps_HTT = attention_map(q_THK[:, heads], k_THK[:, heads])
            maps_HLL[start : start + at_once] = maps_HTT[:, 1:-1, 1:-1]
        self.maps_N[sequence][output.name] = maps_HLL


def offloaded(source: Weights, folder: Path, dtype: torch.dtype, device: torch.device) -> Trunk:
    """Build a model in evaluation mode whose layers fill the GPUs, then the memory, then the disk.

    Every forward pass copies layers to the computing device, so batches should be as large as memory allows. The build
    needs memory for the whole model. The modules outside the layers, and all outputs, are on `device`.

    Args:
        source: the weights, from `esmshard.model.weights.read`.
        folder: a directory for the layers on disk. The caller removes this directory.
        dtype: the dtype of weights and arithmetic.
        device: the computing device. `cuda` without a number means all GPUs: each computes the layers that it stores.
    """
    try:
        from accelerate import dispatch_model, infer_auto_device_map
        from accelerate.utils import get_max_memory
    except ImportError:
        raise UsageError("--offload needs accelerate; pip install 'esmshard[big]'") from None
    main = device.type if device.type != "cuda" else device.index or 0
    all_gpus = device == torch.device("cuda")
    where = torch.device(device.type, 0 if all_gpus else device.index)
    memory = {
        place: int(SHARE * size) for place, size in get_max_memory().items() if all_gpus or place in (main, "cpu")
    }
    model = weights.build(source, torch.device("cpu"), dtype).requires_grad_(False).eval()
    others = {name: part for name, part in model.named_children() if name != "layers"}
    if main in memory:
        memory[main] -= sum(x.numel() * x.element_size() for part in others.values() for x in part.parameters())
    # No layer is divided over devices, because attention reads weights of its modules without calling the modules.
    block = [type(model.layers[0]).__name__]
    layers = infer_auto_device_map(model.layers, memory, block, dtype=dtype, clean_result=False)
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # no warning for each weight
    places = dict.fromkeys(others, main) | {f"layers.{n}": place for n, place in layers.items()}
    dispatch_model(model, places, main_device=main, offload_dir=str(folder), preload_module_classes=block)
    counts = Counter({"cpu": "in memory", "disk": "on disk"}.get(str(p), f"on GPU {p}") for p in layers.values())
    say(f"{source.source}: layers: " + ", ".join(f"{n} {place}" for place, n in counts.items()))
    forward = model.forward

    def on_device(
        batch: TokenBatch,
        layers: Sequence[int] | None = None,
        logits_at: torch.Tensor | None = None,
        on_attention: OnAttention | None = None,
    ) -> TrunkOutput:
        """Move inputs and outputs to one device. Otherwise each output would stay on the GPU of its layer."""

        def on_qk(layer: int, sequence: int, q_THK: torch.Tensor, k_THK: torch.Tensor) -> None:
            assert on_attention is not None
            on_attention(layer, sequence, q_THK.to(where), k_THK.to(where))

        at, listener = None if logits_at is None else logits_at.to(where), None if on_attention is None else on_qk
        output = forward(batch.to(where), layers=layers, logits_at=at, on_attention=listener)
        return TrunkOutput({n: x_TD.to(where) for n, x_TD in output.representations.items()}, output.logits_PV)

    model.forward = on_device  # type: ignore[method-assign]
    return model


@dataclass(frozen=True)
class Work:
    """The arguments of a process that computes parts of an `embed` job."""

    directory: Path
    """The directory `OUT.partial`."""
    store: Path
    """The token store with the input sequences."""
    model: str
    device: str
    tokens: int | None
    """The maximum number of tokens of a batch; None for a number that suits the device."""
    reuse: Path | None = None
    """An earlier directory of parts. Its rows are copied for records with the same sequence and tracks."""
    offload: bool = False
    """Whether the model is spread over all GPUs, the memory and the disk."""
    bucket: str | None = None
    """The address of the output in a bucket; None if the output is on a disk."""


class Worker:
    """The model and the input with which a process computes parts of an `embed` job."""

    def __init__(self, work: Work) -> None:
        plan = read_json(work.directory / "plan.json")
        source, device = weights.read(work.model), torch.device(work.device)
        self.spec = spec = Spec.of(plan["spec"])
        if model_hash(source) != spec.model_hash:
            raise InputError(
                f"{source.source}: its weights have changed since this output was begun; pass --overwrite to start over"
            )
        source, dtype = weights.joining(source, spec.chains, "--join"), TORCH[spec.compute]
        how: dict[str, Any] = {"dtype": spec.dtype, "long": spec.long, "tokens": work.tokens}
        if work.offload:
            esm = offloaded(source, work.directory / "work" / "layers", dtype, device)
            # Each forward pass copies the layers, so a pass should have many tokens, and two passes would both wait.
            how |= {"tokens": work.tokens or GPU_PACK, "device": device, "threads": False}
        else:
            esm = weights.build(source, device, dtype).eval()
        self.embedder = Embedder(esm, spec.outputs, **how)
        self.store = TokenStore(work.store)
        folder, known = work.directory / "work" / "tracks", family_of(source.config).tracks
        tracks = [TrackStore(folder / track.name, track, self.store) for track in known if track.name in plan["tracks"]]
        self.tracks = RecordTracks(tracks) if tracks else None
        self.parts = Parts(work.directory, plan, None if work.bucket is None else RemoteDirectory(work.bucket))
        self.reuse = None if work.reuse is None else EmbeddingStore(work.reuse)

    def compute(self, part: int) -> tuple[int, int]:
        """Compute and write a part. Return its numbers of rows and residues; (0, 0) if the part existed already."""
        spec, index = self.spec, self.parts.index
        if self.parts.is_done(part):
            return 0, 0
        first, last = index.bounds[part : part + 2]
        first_n, length_n = index.first[first:last].tolist(), index.lengths_of(part)
        places = RowPlaces(spec, length_n)
        tensors = {output.name: places.empty(output) for output in spec.outputs}

        def put(row: int, values: Mapping[str, torch.Tensor]) -> None:
            for output in spec.outputs:
                target = tensors[output.name][places.slice(output, row)]
                target.copy_(values[output.name].reshape(target.shape))

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

        def take(n: int, result: Computed | Failed) -> None:
            if isinstance(result, Failed):
                failed.append((todo[n], result.reason))
            else:
                put(todo[n], result.values)
                windowed.extend([todo[n]] if result.windowed else [])

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
    """Compute a part like `Worker.compute`. The model stays in memory for the next part."""
    return worker_of(work).compute(part)
