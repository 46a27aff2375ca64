"""Defines `TokenBatch`, the packed batch that the data loader makes and the model reads.

The letters at the end of a tensor's name are its dimensions, before the tensor is divided over processes:

    T  packed tokens of a batch, including `<cls>` and `<eos>` of each sequence
    N  sequences of a batch
    L  residues of one sequence (without `<cls>` and `<eos>`)
    D  width of the residual stream          F  width of the feed-forward layer
    H  attention heads                       K  width of one head
    E  distances between two tokens
    C  channels of the pair representation   V  vocabulary (33)
    B  sequences of a padded block           P  tokens for which logits are computed
    M  changed residues of the variants of a batch
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from esmshard.vocab import CLS, EOS, MASK, SEPARATOR, is_residue

Context = Literal["wild_type", "masked", "variant", "sequence"]
"""The sequence from which the language model predicts the changed residues of a variant: the wild type, the variant
with masks in place of its changes, or the variant. `sequence`: all residues of the variant, from the variant."""


class DistanceBias(NamedTuple):
    """Numbers that attention adds to its scores, as in T5. With this bias, scores are not divided by sqrt(K)."""

    bias_EH: torch.Tensor
    """[2 R + 1, H]: the bias of each head, by the position of the key minus the position of the query, from -R to R.
    Distances beyond R have the bias of R."""
    position_T: torch.Tensor
    """int64 [T]: the positions of all tokens of the batch, even if several processes divide the tokens."""
    hides_first: bool
    """Whether no token may attend to the first token of its sequence, `<cls>`, which T5 lacks."""
    block_mask: Any = None
    """The pairs of tokens to compute, for torch's `flex_attention`; None for other kernels."""


@dataclass(frozen=True)
class TokenBatch:
    """A batch (pack) of N sequences without padding. Each sequence is `<cls> ... <eos>`.

    >>> from esmshard.vocab import encode
    >>> batch = pack([encode("MK"), encode("T")])
    >>> batch.tokens_T.tolist()
    [0, 20, 15, 2, 0, 11, 2]
    >>> batch.position_T.tolist()
    [0, 1, 2, 3, 0, 1, 2]
    >>> batch.cu_seqlens.tolist()
    [0, 4, 7]
    """

    tokens_T: torch.Tensor
    """int64 [T]: the tokens of all sequences, one sequence after another."""
    position_T: torch.Tensor
    """int64 [T]: the position of each token within its sequence, from 0 for `<cls>`."""
    cu_seqlens: torch.Tensor
    """int32 [N + 1]: the index of each sequence's first token in `tokens_T`. The last entry is T."""
    max_seqlen: int
    """The number of tokens in the longest sequence, including `<cls>` and `<eos>`."""
    record_ids: tuple[str, ...]
    bounds: tuple[int, ...]
    """The numbers in `cu_seqlens` as Python integers, which the CPU reads without waiting for the GPU."""
    logits_at_P: torch.Tensor | None = None
    """int64 [P]: indices in `tokens_T` for which the language model computes logits; None for no logits."""
    logit_counts: tuple[int, ...] = ()
    """For each sequence, the number of its entries in `logits_at_P`."""
    changes_4M: torch.Tensor | None = None
    """int64 [4, M]: a column for each changed residue of the variants; None without variants. The rows are: index of
    the variant, new token, index in `tokens_T` of the new residue, and index in `tokens_T` of the wild type's residue.
    The distinct wild types are the last sequences of the batch."""
    n_variants: int | None = None
    """The number of variants, even if `tokens_T` contains only their wild types; None for batches without variants."""
    linked_N: tuple[int, ...] = ()
    """The number of `esmshard.vocab.SEPARATOR` tokens in each sequence; empty if each sequence is a single chain."""
    draw_N: torch.Tensor | None = None
    """int32 [N]: a dropout seed for each record or variant (`esmshard.model.finetuner`). None outside training."""
    tracks: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The tracks (`esmshard.vocab.Track`) by name, [T, ...] each. All values of an absent track count as unknown."""
    distance_bias: DistanceBias | None = None
    """The bias of attention (`Trunk.for_blocks` sets this field); None for models without a bias."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def n_records(self) -> int:
        """The number of variants, or the number of sequences in a batch without variants."""
        return len(self) if self.n_variants is None else self.n_variants

    @property
    def token_counts(self) -> list[int]:
        """The number of tokens in each sequence, including `<cls>` and `<eos>`."""
        return [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each sequence, without `<cls>` and `<eos>`."""
        return [count - 2 for count in self.token_counts]

    @property
    def n_residues(self) -> int:
        """The number of tokens without `<cls>` and `<eos>`. In a batch with variants, wild types are not counted."""
        sequences = len(self) if self.n_variants is None else min(self.n_variants, len(self))
        return self.bounds[sequences] - 2 * sequences

    def residues(self, x_TD: torch.Tensor) -> list[torch.Tensor]:
        """Split a tensor of all tokens [T, ...] into one tensor [L, ...] per sequence, without `<cls>` and `<eos>`."""
        return [x_TD[start + 1 : end - 1] for start, end in zip(self.bounds, self.bounds[1:], strict=False)]

    def means(self, x_TD: torch.Tensor) -> list[torch.Tensor]:
        """Return the mean vector [D] over the residues of each sequence. `SEPARATOR` tokens are left out."""
        means = [x_LD.mean(0) for x_LD in self.residues(x_TD)]
        if self.linked_N:
            tokens = self.residues(self.tokens_T)
            for n, (linked, x_LD) in enumerate(zip(self.linked_N, self.residues(x_TD), strict=True)):
                if linked:
                    is_residue_L1 = (tokens[n] != SEPARATOR)[:, None]
                    means[n] = (x_LD * is_residue_L1).sum(0) / (len(x_LD) - linked)
        return means

    def to(self, device: torch.device) -> "TokenBatch":
        """Copy all tensors of the batch to a device. The CPU does not wait if the tensors are in pinned memory."""

        def moved(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: x.to(device, non_blocking=True) for name, x in values.items() if torch.is_tensor(x)}

        return replace(self, **moved(vars(self)), tracks=moved(self.tracks))


def piece(values: npt.NDArray[Any], start: int, length: int) -> npt.NDArray[Any]:
    """Return at most `length` residues, from residue `start` (counted from 0), between `<cls>` and `<eos>`.

    `values` are the tokens or a track of one sequence.

    >>> piece(np.array([0, 20, 15, 11, 2]), 1, 2).tolist()
    [0, 15, 11, 2]
    """
    return np.concatenate((values[:1], values[1 + start : -1][:length], values[-1:]))


def pack(
    tokens: Sequence[npt.NDArray[np.uint8]],
    record_ids: Sequence[str] | None = None,
    logits_at: Sequence[npt.NDArray[np.int64]] | None = None,
    tracks: Sequence[Mapping[str, npt.NDArray[Any]]] | None = None,
) -> TokenBatch:
    """Put one or more encoded sequences `<cls> ... <eos>` one after another into a `TokenBatch`.

    Args:
        tokens: the tokens of each sequence, uint8 [L + 2].
        record_ids: the id of each sequence; "0", "1", ... by default.
        logits_at: for each sequence, the positions that get logits; `<cls>` is position 0.
        tracks: for each sequence, arrays [L + 2, ...] by track name. All sequences must have the same tracks.
    """
    if not tokens:
        raise ValueError("a batch needs at least one sequence")
    for name, values in (("ids", record_ids), ("places", logits_at), ("tracks", tracks)):
        if values is not None and len(values) != len(tokens):
            raise ValueError(f"{len(values)} {name} for {len(tokens)} sequences; pass one for each sequence")
    for k, sequence in enumerate(tokens):
        if len(sequence) < 3 or sequence[0] != CLS or sequence[-1] != EOS:
            raise ValueError(f"sequence {k} of the batch must be <cls>, at least one residue, and <eos>")
    lengths = [len(t) for t in tokens]
    linked = tuple(int(np.count_nonzero(t == SEPARATOR)) for t in tokens)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    return TokenBatch(
        tokens_T=torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
        position_T=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=max(lengths),
        record_ids=tuple(map(str, range(len(tokens))) if record_ids is None else record_ids),
        bounds=tuple(int(b) for b in bounds),
        logits_at_P=None
        if logits_at is None
        else torch.from_numpy(np.concatenate([at + start for at, start in zip(logits_at, bounds, strict=False)])),
        logit_counts=() if logits_at is None else tuple(len(at) for at in logits_at),
        linked_N=linked if any(linked) else (),
        tracks={}
        if not tracks
        else {name: torch.from_numpy(np.concatenate([arrays[name] for arrays in tracks])) for name in tracks[0]},
    )


def pack_variants(
    tokens: Sequence[npt.NDArray[np.uint8]],
    wild_types: Sequence[npt.NDArray[np.uint8]],
    record_ids: Sequence[str] | None = None,
    *,
    logits_from: Context | None = None,
    alone: bool = False,
    tracks: Mapping[str, npt.NDArray[Any]] | None = None,
) -> TokenBatch:
    """Put variants and then their distinct wild types into one `TokenBatch` with the field `changes_4M`.

    >>> from esmshard.vocab import encode
    >>> batch = pack_variants([encode("MKT"), encode("MTV")], [encode("MKV")] * 2)
    >>> batch.changes_4M.tolist()  # V3T of the first variant, K2T of the second
    [[0, 1], [11, 11], [3, 7], [13, 12]]

    Args:
        tokens: the tokens of each variant, uint8 [L + 2].
        wild_types: the tokens of each variant's wild type, uint8 [L + 2]. Unless `logits_from` is `sequence`, a variant
            is as long as its wild type.
        record_ids: the ids of the variants; "0", "1", ... by default.
        logits_from: the sequence for which the language model computes logits at the M changed residues, if any. With
            `sequence`, it computes logits at all residues of all variants and wild types, and there are no changes.
        alone: whether the batch contains only the wild types, and no variant.
        tracks: arrays [L + 2, ...] by track name, for the only wild type and all variants.
    """
    number_of: dict[bytes, int] = {}
    wild_N = np.array([number_of.setdefault(each.tobytes(), len(number_of)) for each in wild_types])
    distinct = [wild_types[int(n)] for n in np.unique(wild_N, return_index=True)[1]]
    record_ids = list(map(str, range(len(tokens)))) if record_ids is None else record_ids
    ids = [*([] if alone else record_ids), *["wild type"] * len(distinct)]
    copies = [tracks or {}] * len(ids)
    if logits_from == "sequence":
        packed = [*tokens, *distinct]
        residues = [np.flatnonzero(is_residue(sequence)) for sequence in packed]
        return replace(pack(packed, ids, residues, copies), n_variants=len(tokens))
    if any(len(variant) != len(wild_type) for variant, wild_type in zip(tokens, wild_types, strict=True)):
        raise ValueError("each variant must be as long as the wild type")
    places = [np.flatnonzero(variant != wild) for variant, wild in zip(tokens, wild_types, strict=True)]
    record_M, place_M = np.repeat(np.arange(len(tokens)), list(map(len, places))), np.concatenate(places)
    new_M = np.concatenate([variant[place] for variant, place in zip(tokens, places, strict=True)])
    packed = [] if alone else list(tokens)
    if logits_from == "masked":
        packed = [np.where(v != wild, np.uint8(MASK), v) for v, wild in zip(tokens, wild_types, strict=True)]
    start = np.cumsum([0, *map(len, packed), *map(len, distinct)])
    wild_M = place_M + start[len(packed) + wild_N[record_M]]
    mutant_M = wild_M if alone else place_M + start[record_M]
    nowhere, logits_at = np.empty(0, np.int64), None
    if logits_from == "wild_type":
        # The logits of a sequence follow each other, so changes get the order of their wild types.
        order_M = np.argsort(wild_N[record_M], kind="stable")
        record_M, place_M, new_M, mutant_M, wild_M = (x[order_M] for x in (record_M, place_M, new_M, mutant_M, wild_M))
        of_wild_types = np.split(place_M, np.searchsorted(wild_N[record_M], range(1, len(distinct))))
        logits_at = [*[nowhere] * len(packed), *of_wild_types]
    elif logits_from is not None:
        logits_at = [*places, *[nowhere] * len(distinct)]
    changes_4M = np.stack([record_M, new_M, mutant_M, wild_M]).astype(np.int64)
    batch = pack([*packed, *distinct], ids, logits_at, copies)
    return replace(batch, changes_4M=torch.from_numpy(changes_4M), n_variants=len(tokens))


@dataclass(frozen=True)
class Inputs:
    """The model's input for one record, and the record's label. A task (`esmshard.tasks`) makes this object."""

    tokens: npt.NDArray[np.uint8]
    """The tokens of the sequence, `<cls> ... <eos>`, uint8 [L + 2]."""
    target: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, np.float32))
    """The label that the task head should predict; empty if the label is unknown."""
    logits_at: npt.NDArray[np.int64] | None = None
    """Positions in `tokens` for which the language model computes logits; None if the head needs no logits."""
    wild_type: npt.NDArray[np.uint8] | None = None
    """For a variant, the tokens of its wild type; otherwise None."""
    logits_from: Context | None = None
    """For a variant, the sequence whose logits at the changed residues the task head needs; None for no logits."""
    wild_type_alone: bool = False
    tracks: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """The tracks (`esmshard.vocab.Track`) by name, [L + 2, ...] each. A variant and its wild type have the same
    tracks."""
    partner: "Inputs | None" = None
    """The second chain of a pair (only `tokens` and `tracks` are used); None without a pair. The two chains become
    neighbouring sequences of the batch and do not attend to each other."""

    @property
    def longest(self) -> int:
        """The number of tokens in the sequence, or in the longer chain of a pair."""
        return max(len(self.tokens), 0 if self.partner is None else len(self.partner.tokens))


def batch_of(inputs: Sequence[Inputs], record_ids: Sequence[str] | None = None) -> TokenBatch:
    """Put inputs into one `TokenBatch`. By default, `record_ids` are "0", "1", and so on."""
    first = inputs[0]
    if first.wild_type is not None:
        return pack_variants(
            [i.tokens for i in inputs],
            [i.wild_type for i in inputs if i.wild_type is not None],
            record_ids,
            logits_from=first.logits_from,
            alone=first.wild_type_alone,
            tracks=first.tracks,
        )
    places = [i.logits_at for i in inputs if i.logits_at is not None]
    chains = [chain for i in inputs for chain in (i, i.partner) if chain is not None]
    if record_ids is not None and first.partner is not None:
        record_ids = [record_id for record_id in record_ids for _ in range(2)]
    return pack([chain.tokens for chain in chains], record_ids, places or None, [chain.tracks for chain in chains])
