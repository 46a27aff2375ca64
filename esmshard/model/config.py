"""Defines `ModelConfig`, the architecture of a model of any family (ESM-2, ESM-C, ...), without importing torch."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

from esmshard.vocab import Chains

Quantization = Literal["nf4", "int8"]
"""The number format of a frozen matrix. `nf4` has 4 bits per number and a scale for each block of 64 numbers. `int8`
has 8 bits per number and a scale for each row."""

SHIPPED = {
    "starter": "was trained on some 77,000 sequences and 9,000 structures",
    "demo": "was trained on some 50,000 sequences and on no structure",
}
"""The small trained models in the directories `data/NAME`, and a description of their training for messages."""


RELEASED_NAMES = """esm2_t6_8M_UR50D esm2_t12_35M_UR50D esm2_t30_150M_UR50D esm2_t33_650M_UR50D esm2_t36_3B_UR50D
    esm2_t48_15B_UR50D
    esm1b_t33_650M_UR50S esm1v_t33_650M_UR90S_1 esm1v_t33_650M_UR90S_2 esm1v_t33_650M_UR90S_3 esm1v_t33_650M_UR90S_4
    esm1v_t33_650M_UR90S_5 esmc_300m esmc_600m esmc_6b esm3_sm_open_v1 amplify_120m amplify_350m amplify_120m_base
    amplify_350m_base saprot_35m_af2 saprot_650m_af2 saprot_650m_pdb prot_bert prot_bert_bfd igbert igbert_unpaired
    dplm_150m dplm_650m dplm_3b prot_t5_xl prost_t5 ankh_base ankh_large ankh3_large"""
"""The names of released models. `family_registry.RELEASED` has the same names, but its import takes seconds (torch)."""


@dataclass(frozen=True)
class Matrix:
    """A linear layer in a transformer block. A LoRA can adapt this layer."""

    target: str
    """The layer's name in the recipe key `adapt.targets`: q, k, v, out, fc1 or fc2. Gated blocks have fc1 twice."""
    path: str
    """The name of the layer's module inside a block, such as `self_attn.q_proj`."""
    columns: int
    """The width of the layer's input."""
    rows: int
    """The width of the layer's output."""
    reads: str
    """A name for the layer's input tensor, such as `qkv`. If several layers have the same input tensor, they have the
    same name here. Training saves such a tensor only once."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """The architecture of a model. Each model family (ESM-2, ESM-C, ...) defines a subclass."""

    n_layers: int
    dim: int
    n_heads: int
    window: int | None = field(default=None, compare=False)
    """The length of the longest sequence that the model was trained on, in residues; None if it is `Family.window`."""
    chains: Chains = field(default=Chains(), compare=False)  # `Chains` is immutable
    """How the chains of a protein complex become one sequence."""

    family: ClassVar[str]
    """The name of the model family, a key of `family_registry.FAMILIES`."""
    gated: ClassVar[bool] = False
    """Whether the feed-forward part computes silu(gate matrix x input) * (up matrix x input), which is called SwiGLU,
    or the same with gelu."""
    qk_norm: ClassVar[bool] = False
    """Whether a LayerNorm is applied to queries and keys before the rotary embedding."""
    only_represents: ClassVar[bool] = False
    """Whether the model computes representations only. It has no LM head and no contact regression, and its attention
    maps cannot be read."""
    distance_bias: ClassVar[bool] = False
    """Whether attention adds `TokenBatch.distance_bias` to its scores, in place of rotary or learned positions."""
    chain_break: ClassVar[bool] = False
    """Whether the model has a chain-break token. Its index is `esmshard.vocab.SEPARATOR`."""

    def __post_init__(self) -> None:
        for name in ("n_layers", "dim", "n_heads", "head_width", "v_heads", "ffn", "max_positions", "window"):
            value = getattr(self, name, None)
            is_unset = value is None and name not in ("n_layers", "dim", "n_heads")
            if not is_unset and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a positive whole number, not {value!r}")
        if self.dim % (2 * self.n_heads):
            raise ValueError(f"dim {self.dim} must be a multiple of 2 x n_heads ({self.n_heads})")
        if self.chains.linker == "break" and not self.chain_break:
            raise ValueError("linker:break: this model has no chain-break token; give a linker length, as linker:25")
        if self.chains.gap and self.most_tokens is not None:
            raise ValueError("gap: this model has position embeddings, and a gap needs rotary positions; omit gap")

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.dim // self.n_heads

    @property
    def inner(self) -> int:
        """The width of all attention heads together, which differs from `dim` in some T5 models."""
        return self.n_heads * self.head_dim

    @property
    def most_tokens(self) -> int | None:
        """The maximum number of tokens in a sequence, including `<cls>` and `<eos>`; None without a maximum."""
        return None

    @property
    def has_cls(self) -> bool:
        """Whether the model has a token `<cls>`. If not, no token attends to `<cls>`, and its output has no meaning."""
        return True

    @property
    def relu(self) -> bool:
        """Whether the feed-forward part computes relu, and not gelu or a gate."""
        return False

    @property
    @abstractmethod
    def n_logits(self) -> int:
        """The number V of logits per token; 0 without an LM head. The first 33 are the tokens of `esmshard.vocab`."""

    @property
    def ffn_width(self) -> int:
        """The width F of the feed-forward part."""
        return 4 * self.dim

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The linear layers of a block."""
        d, f, inner = self.dim, self.ffn_width, self.inner
        qkv = [Matrix(name, f"self_attn.{name}_proj", d, inner, "qkv") for name in "qkv"]
        first = [Matrix("fc1", name, d, f, "fc1") for name in (("gate", "up") if self.gated else ("fc1",))]
        return (*qkv, Matrix("out", "self_attn.out_proj", inner, d, "out"), *first, Matrix("fc2", "fc2", f, d, "fc2"))

    @property
    def n_maps(self) -> int:
        """The number of attention maps in all layers, which is the number of weights in the contact regression."""
        return self.n_layers * self.n_heads

    def kept_with(self, track: str) -> int:
        """Return how many numbers per token the track `track` adds to those saved for the backward pass."""
        return 0

    @property
    def sizes(self) -> dict[str, Any]:
        """The fields that determine the shapes of the tensors, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.compare}

    def completed(self, named: Self) -> Self:
        """Return this architecture with the values of `named`, the same architecture in esmshard's list, for fields
        without influence on shapes that this one leaves at their defaults. Released files lack the window, for example.
        """
        mine = {field.name: getattr(self, field.name) for field in fields(self) if not field.compare}
        defaults = {field.name: field.default for field in fields(self)}
        return replace(named, **{name: value for name, value in mine.items() if value != defaults[name]})

    def recorded(self) -> dict[str, Any]:
        """Return the architecture as a dictionary for checkpoints. `family_registry.recorded_config` is the inverse."""
        others = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        values = {name: value for name, value in asdict(self).items() if name in others}
        return {"family": self.family, **values, **self.sizes}
