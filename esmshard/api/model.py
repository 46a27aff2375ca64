"""Open models in Python: `esmshard.load`, its class `Model`, and a scikit-learn transformer that embeds sequences."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, TransformerMixin

from esmshard.api import sequence_inputs
from esmshard.api.sequence_inputs import SequenceInputs, Sequences
from esmshard.batch import Inputs
from esmshard.data.batching.loader import Example
from esmshard.data.tracks import in_batches, require_length, track_files, unknown_entry, values_of
from esmshard.devices import DeviceName, chosen_device
from esmshard.embed.compute import Embedder, Failed
from esmshard.embed.spec import TORCH, Long, choose
from esmshard.errors import InputError, UsageError
from esmshard.io.array_formats import Dtype, Output
from esmshard.io.paths import state
from esmshard.model import weights
from esmshard.model.config import ModelConfig
from esmshard.model.families.family_registry import family_of
from esmshard.model.trunk import Trunk
from esmshard.predict import heads
from esmshard.predict.variants import predictions
from esmshard.predict.zero_shot import Method, score
from esmshard.tasks.base import Task
from esmshard.tasks.finetuned import FineTuned, load_finetuned, without_tracks
from esmshard.tasks.registry import traits
from esmshard.vocab import BETWEEN, SEPARATOR, decode, join_option

Array = npt.NDArray[np.float32]

Tracks = Mapping[str, Any]
"""Inputs for each residue besides the amino acid, by the name of the track. For a single sequence, give one entry. For
several sequences, give a list of entries in their order, or a dictionary of entries by id. An entry is a string of
letters, an array of integers [L], or an array of coordinates [L, 3, 3]. None, or a missing id, means unknown values.
"""


class Model:
    """A protein language model, with its fine-tuned head if it has one. The function `load` opens a model.

    Sequences are a list of strings, a dictionary of strings, or the `pathlib.Path` of a FASTA file, table or token
    store. Results have the order of the sequences. A single string gives the result of one sequence. Lower case, a `*`
    at the end, gaps and `J` are corrected with a warning. Any other character that is no residue is an `InputError`,
    and so is DNA or RNA. A `:` divides the chains of a complex, as in `MKT:MKV`. The model reads all chains as one
    sequence, and results have the residues of the first chain, then of the second, and so on (docs/chains.md).
    """

    def __init__(self, name: str, esm: Trunk, unlearned: Sequence[str] = (), tuned: FineTuned | None = None) -> None:
        self.name = name
        self.esm = esm
        """The transformer without a fine-tuned head, a `torch.nn.Module`."""
        self.tuned = tuned
        """The fine-tuned model, with the attributes `model` (transformer and head) and `task`; None without a head."""
        self._unlearned = tuple(unlearned)

    @property
    def config(self) -> ModelConfig:
        """The architecture: number of layers, width, attention heads and so on."""
        return self.esm.config

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.esm.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and the arithmetic."""
        return self.esm.embed_tokens.weight.dtype

    @property
    def task(self) -> str | None:
        """The task of the fine-tuned head, such as `sequence`; None for a model without a head."""
        return None if self.tuned is None else str(self.tuned.about["recipe"]["task"]["name"])

    @property
    def names(self) -> tuple[str, ...]:
        """The column names of `predict`: targets, classes or amino acids; empty for maps of pairs or without a head."""
        return () if self.tuned is None else self.tuned.task.names

    def __repr__(self) -> str:
        config, kind = self.config, "" if self.task is None else f", task={self.task!r}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Model({self.name!r}{kind}, layers={config.n_layers}, dim={config.dim}, {dtype} on {self.device})"

    def embed(
        self,
        sequences: Sequences,
        pool: str | Sequence[str] = "mean",
        layers: int | Sequence[int] | None = None,
        long: str | Long = "full",
        tokens: int | None = None,
        tracks: Tracks | None = None,
    ) -> Any:
        """Compute embeddings, float32.

        Args:
            sequences: N sequences; see the class `Model`.
            pool: `mean`, `max` and `cls` give an array [N, D]. Other pools give a list of arrays: `residue` [L, D],
                `logits` [L, 33] for the tokens `esmshard.vocab.TOKENS`, `contacts` [L, L] from the language model's
                contact regression, `attentions` [H, L, L] for all heads of a layer. For several pools, give a list.
            layers: 0 (the embedding, which has no `attentions`), or 1 to the number of layers; by default the last
                layer. For several layers, give a list.
            long: the treatment of sequences that are longer than the training sequences: `full`, `window` or
                `truncate`, or an `embed.spec.Long`.
            tokens: the maximum number of tokens of a batch. A longer sequence gets a batch without other sequences.
            tracks: the tracks of the sequences, for models that read tracks; see `Tracks`.

        Returns:
            An array or list. If `pool` or `layers` is a list: a dictionary of arrays or lists, with keys such as
            `mean_6`.

        Raises:
            InputError: a sequence cannot be read, memory does not suffice, or the model has no trained head for a pool.
        """
        pools = [pool] if isinstance(pool, str) else list(pool)
        several = not (isinstance(pool, str) and (layers is None or isinstance(layers, int)))
        wanted = None if layers is None else [layers] if isinstance(layers, int) else list(layers)
        outputs = choose(pools, wanted, self.config, self.name)
        if not outputs:
            raise UsageError("pool: the list is empty; give at least one kind of output, such as mean")
        for pool_name, part in (("logits", "lm_head"), ("contacts", "contact_head")):
            if pool_name in pools:
                self._require(part)
        how = long if isinstance(long, Long) else Long(long)  # type: ignore[arg-type]  # `Embedder` checks the mode.
        given = sequence_inputs.sequences(sequences, linker=self.config.chains.tokens)
        track_arrays = self._tracks(tracks, given)
        most = self.config.most_tokens if how.mode == "full" else None  # Learned positions limit the number of tokens.
        for name, sequence in zip(given.names, given.tokens, strict=True):
            if most is not None and len(sequence) > most:
                raise InputError(
                    f"{name} has {len(sequence) - 2:,} residues, and this model has positions for {most - 2:,}; cut "
                    "the sequence, or use a model with rotary positions, such as an ESM-2"
                )
        computed = Embedder(self.esm, outputs, long=how, tokens=tokens).compute(given.tokens, track_arrays)
        values: dict[str, Any] = {output.name: [] for output in outputs}
        for name, result in zip(given.names, computed, strict=True):
            if isinstance(result, Failed):
                raise InputError(f"{name}: {result.reason}")
            for output in outputs:
                values[output.name].append(result.values[output.name].numpy())
        for output in outputs:
            arrays = values[output.name]
            values[output.name] = arrays[0] if given.single else np.stack(arrays) if output.pooled else arrays
        return values if several else values[outputs[0].name]

    def contacts(self, sequences: Sequences, tracks: Tracks | None = None) -> Any:
        """Compute contact probabilities, a symmetric float32 array [L, L] for each sequence.

        If the fine-tuned head predicts contacts, it computes the probabilities. Otherwise, the language model's
        regression computes them from attention maps. For errors see `embed` and `predict`.
        """
        if traits(self.task).predicts_contacts:
            return self.predict(sequences, tracks)
        return self.embed(sequences, "contacts", tracks=tracks)

    def score(
        self,
        wild_type: str,
        variants: Iterable[str],
        method: Method = "masked-marginals",
        window: int | None = None,
        tracks: Tracks | None = None,
    ) -> npt.NDArray[np.float64]:
        """Score variants of a protein with the language model, not the fine-tuned head. Higher scores are more natural.

        Args:
            wild_type: the residues of the protein, which has one chain.
            variants: N variants, such as `A24G`, `A24G:V30L`, `p.Ala24Gly` or `WT`.
            method: `masked-marginals`, `wild-type-marginals` or `pseudo-perplexity`; see `predict.zero_shot.score`.
            window: the maximum number of residues that the model reads at once; by default as many as in its training.
            tracks: the tracks of the protein, which are used for all variants; see `Tracks`.

        Returns:
            The scores, float64 [N]; NaN for a variant that changes a residue outside the 20 amino acids, such as X.

        Raises:
            InputError: a variant does not fit the protein, or the model has no trained LM head.
        """
        if not isinstance(wild_type, str):
            raise UsageError(f"the wild type is of type {type(wild_type).__name__}; a string of residues is expected")
        given = sequence_inputs.sequences(wild_type, "the wild type")
        protein = decode(given.tokens[0])
        if BETWEEN in protein:
            raise InputError("the wild type has several chains; give only the chain that the variants change")
        mutations = sequence_inputs.variants(variants, protein)
        self._require("lm_head")
        return score(self.esm, protein, mutations, method, window, self._tracks(tracks, given)[0])

    def predict(self, sequences: Sequences, tracks: Tracks | None = None) -> Any:
        """Compute the predictions of the fine-tuned head, float32.

        For a task with one label for each protein, the result is [N, C] with the columns `names`. For a label of each
        residue it is a list of arrays [L, C], or [L] if the label is a number. For contacts it is a list of arrays
        [L, L].

        For a model fine-tuned on a table of variants, `sequences` are variants, such as `A24G:V30L` or `WT`. The first
        residue of the wild type has position 1. A variant of the table also gets a prediction, not its measured value.

        Raises:
            InputError: the model has no fine-tuned head, or a sequence or variant cannot be read.
        """
        if self.tuned is None:
            raise InputError(f"{self.name}: has no fine-tuned head; fine-tune it first, or call embed or contacts")
        task = self.tuned.task
        if task.settings.reads_table:
            if tracks:
                raise UsageError("tracks: a model of variants contains the tracks of its wild type; leave tracks out")
            return self._predict_variants(sequences, task)
        given = sequence_inputs.sequences(sequences, linker=self.config.chains.tokens)
        track_arrays = self._tracks(tracks, given)

        def question(n: int) -> Inputs:
            return task.question(Example(given.names[n], given.tokens[n], {}, tracks=track_arrays[n]))

        values: list[Array] = []
        lengths = np.array([len(tokens) for tokens in given.tokens])
        for name, array in zip(given.names, heads.predictions(self.tuned, lengths, question), strict=True):
            if isinstance(array, str):
                raise InputError(f"{name}: {array}")
            values.append(array)
        if given.single:
            return values[0]
        return np.stack(values) if task.names and not task.per_residue else values

    def _predict_variants(self, variants: Sequences, task: Task) -> Array:
        assert self.tuned is not None
        if "proteins" in task.facts:
            raise InputError(
                f"{self.name}: learned several proteins; rank variants by esmshard predict with --wild-type wt.fasta"
            )
        names = [variants] if isinstance(variants, str) else sequence_inputs.as_list(variants, "variants")
        mutations = sequence_inputs.variants(names, str(task.facts["protein"]))
        if shift := task.facts.get("offset"):
            warnings.warn(
                f"{self.name}: positions of variants count from 1 for the wild type's first residue; in the training "
                f"table they differed, and {shift:+d} was added",
                stacklevel=3,
            )
        first, last = int(task.facts["first"]), int(task.facts["first"]) + int(task.facts["length"])
        for name, of_variant in zip(names, mutations, strict=True):
            if any(not first <= mutation.position < last for mutation in of_variant):
                raise InputError(
                    f"{name}: the model reads only residues {first + 1:,} to {last:,} of the protein; remove "
                    "this variant"
                )
        if not mutations:
            raise InputError("there is no variant; give at least one")
        values = predictions(self.tuned, mutations)
        return values[0] if isinstance(variants, str) else values

    def _tracks(self, tracks: Tracks | None, given: SequenceInputs) -> list[dict[str, npt.NDArray[Any]]]:
        """Return the track arrays [L + 2, ...] of each sequence, by the name of the track. Warn the user if the model
        was fine-tuned with a track that is not in `tracks`.
        """
        arrays: list[dict[str, npt.NDArray[Any]]] = [{} for _ in given.tokens]
        tracks = tracks or {}
        for name, tokens in zip(given.names, given.tokens, strict=True):
            if tracks and SEPARATOR in tokens:
                raise InputError(f"{name} has several chains, and a track is for one chain; give each chain separately")
        accepted = family_of(self.config).tracks_of(self.config)
        for track in [file.track for file in track_files(dict.fromkeys(tracks, ""), accepted, self.name, "tracks: ")]:
            of_track, entries = tracks[track.name], list[Any]()
            if given.single:
                entries = [of_track]
            elif isinstance(of_track, Mapping) and given.ids is not None:
                entries = [of_track.get(name) for name in given.ids]
            elif isinstance(of_track, list | tuple):
                entries = list(of_track)
            if len(entries) != len(given.tokens):
                raise UsageError(
                    f"tracks: {track.name}: give a list with an entry for each of the {len(given.tokens):,} sequences, "
                    "or, for sequences with ids, a dictionary of entries by id"
                )
            for n, entry in enumerate(entries):
                length = len(given.tokens[n]) - 2
                values = unknown_entry(track, length)
                if entry is not None:
                    where = f"tracks[{track.name!r}] of {given.names[n]}"
                    values = values_of(track, entry, where)
                    require_length(track, values, length, where)
                arrays[n][track.name] = in_batches(track, values)
        for notice in without_tracks(self.name, tracks):
            warnings.warn(notice, stacklevel=3)
        return arrays

    def _require(self, part: str) -> None:
        if part in self._unlearned:
            what = {"lm_head": "LM head", "contact_head": "contact regression"}[part]
            raise InputError(f"{self.name}: has no trained {what}; take another model")


def load(
    model: str | Path,
    device: DeviceName = None,
    dtype: Dtype | torch.dtype | None = None,
    join: str | None = None,
) -> Model:
    """Open a pretrained or fine-tuned model.

    Args:
        model: the directory of a fine-tuned model (`runs/contact/model`), a `transformers` model or an adapter; a `.pt`
            file of fair-esm; the name of a released model such as `esm2_t33_650M_UR50D`, or `OWNER/NAME` on the Hugging
            Face hub (both are downloaded); or `starter` or `demo`, which are part of esmshard.
        device: `cpu`, `cuda`, `cuda:N` or `mps`; by default the first GPU, or the CPU if there is no GPU.
        dtype: the dtype of weights and arithmetic: `fp32` (the default), `fp16` or `bf16`.
        join: how the chains of a sequence are joined, such as `linker:25,gap:512`; by default as the model's files say,
            or else with 25 glycines. A fine-tuned model accepts only the value of its fine-tuning.

    Raises:
        InputError: a file of the model cannot be used.
        UsageError: `device`, `dtype` or `join` is unknown, or not possible with this model.
    """
    name, where, chains = str(model), chosen_device(device), join_option(join)
    precision = dtype if isinstance(dtype, torch.dtype) else TORCH.get(dtype or "fp32")
    if precision is None or precision not in TORCH.values():
        raise UsageError(f"dtype is {dtype!r}; one of {', '.join(TORCH)} is expected")
    if weights.record_of([weights.directory(name) / weights.ABOUT]):
        with torch.random.fork_rng(devices=[]):  # A new head draws random values before its weights are read.
            tuned = load_finetuned(name, where)
        tuned.model.trunk.to(precision)
        trained = tuned.model.trunk.config.chains
        if chains not in (None, trained):
            raise UsageError(f"join {join}: {name} was fine-tuned with {trained.text}; leave join out")
        return Model(name, tuned.model.trunk, weights.read(name).unlearned, tuned)
    source = weights.joining(weights.read(name), chains, f"join: {name}")
    weights.report_altered(source.files)
    return Model(name, weights.build(source, where, precision).eval(), source.unlearned)


class SequenceEmbedder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A scikit-learn transformer that turns protein sequences into embeddings, for pipelines and parameter searches.

    `transform` works without `fit`, because nothing is trained. A pickled or cloned object contains no weights, so each
    worker process of scikit-learn (`n_jobs=2`) reads the weights once.

    >>> SequenceEmbedder(layer=3).transform(["MKTAYIAK", "GSHM"]).shape
    (2, 192)

    Args:
        model: see `esmshard.load`.
        pool: `mean`, `max` or `cls`.
        layer: a number from 0 (embedding) to the number of layers; by default the last layer.
        tokens: the maximum number of tokens of a batch. A longer sequence gets a batch without other sequences.
        device: see `esmshard.load`.
    """

    def __init__(
        self,
        model: str = "starter",
        pool: str = "mean",
        layer: int | None = None,
        tokens: int | None = 4096,
        device: str | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.layer = layer
        self.tokens = tokens
        self.device = device

    def fit(self, X: Any, y: object = None) -> "SequenceEmbedder":
        """Check the parameters and the sequences. Nothing is trained."""
        self._output()
        sequence_inputs.sequences(sequence_inputs.as_list(X, "sequences"))
        return self

    def transform(self, X: Any) -> Array:
        """Compute the embeddings of N sequences, float32 [N, D]. `X` is a list, a 1-d array or a Series of strings."""
        output, sequences = self._output(), sequence_inputs.as_list(X, "sequences")
        model = _loaded(str(self.model), _version(str(self.model)), self.device)
        embeddings: Array = model.embed(sequences, output.pool, output.layer, tokens=self.tokens)
        return embeddings

    def get_feature_names_out(self, input_features: object = None) -> npt.NDArray[np.object_]:
        """Return the names of the D columns: pool, layer and column number, such as `mean_6_0`."""
        name, dim = self._output().name, weights.read(str(self.model)).config.dim
        return np.array([f"{name}_{column}" for column in range(dim)], dtype=object)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = tags.input_tags.one_d_array = True
        tags.input_tags.two_d_array = False
        tags.requires_fit = False
        tags.transformer_tags.preserves_dtype = []
        return tags

    def _output(self) -> Output:
        """Return `pool` and `layer` as an `Output`, and read no weights. Raise `UsageError` for a wrong parameter."""
        if self.tokens is not None and (not isinstance(self.tokens, int) or self.tokens < 1):
            raise UsageError(f"tokens is {self.tokens!r}; a whole number of at least 1, or None, is expected")
        layers = None if self.layer is None else [self.layer]
        output = choose([self.pool], layers, weights.read(str(self.model)).config, str(self.model))[0]
        if not output.pooled:
            raise UsageError(f"pool is {self.pool!r}; mean, max or cls is expected, which give one row for a sequence")
        return output


def _version(model: str) -> tuple[Any, ...]:
    """Return a cache key that changes when the files of a model change, for example after another fine-tuning."""
    source = weights.read(model)
    return (source.made, *((str(file), *state(Path(file))) for file in source.files))


@lru_cache(maxsize=2)
def _loaded(model: str, version: tuple[Any, ...], device: str | None) -> Model:
    return load(model, device)
