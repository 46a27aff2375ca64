"""Defines `ModelConfig`, the architecture of a model of any family (ESM-2, ESM-C, ...), without importing torch."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from esmshard.vocab import Chains

Quantization = Literal["nf4", "int8"]
"""How a frozen matrix is stored: `nf4` with 4 bits per number and a scale for each block of 64 numbers, `int8` with 8
bits per number and a scale for each row."""

SHIPPED = {
    "starter": "was trained on some 77,000 sequences and 9,000 structures",
    "demo": "was trained on some 50,000 sequences and on no structure",
}
"""The names of the small trained models in the directories `data/NAME`, mapped to words about their training."""


@dataclass(frozen=True)
class Matrix:
    """A linear layer of a block. A LoRA can adapt this layer."""

    target: str
    """The layer's name in the recipe key `adapt.targets`: q, k, v, out, fc1 or fc2. Gated blocks have two fc1."""
    path: str
    """The name of the layer's module inside a block, such as `self_attn.q_proj`."""
    columns: int
    """Width of the layer's input, which is the number of columns of the layer's matrix."""
    rows: int
    """Width of the layer's output, which is the number of rows of the layer's matrix."""
    reads: str
    """A name for the layer's input. Layers with the same input share this name, because training keeps it once."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """The architecture of one model. Each model family (ESM-2, ESM-C, ...) defines a subclass with further sizes."""

    n_layers: int
    dim: int
    n_heads: int
    window: int | None = field(default=None, compare=False)
    """Maximum number of residues of a sequence in training; None for the model family's default (`Family.window`)."""
    chains: Chains = field(default=Chains(), compare=False)  # `Chains` is immutable
    """How the chains of a protein complex become one sequence. The shapes of tensors do not depend on this setting."""

    family: ClassVar[str]
    """Name of the model family, a key of `family_registry.FAMILIES`."""
    gated: ClassVar[bool] = False
    """Whether the feed-forward part is gated (SwiGLU): silu(gate matrix x input) times (up matrix x input)."""
    qk_norm: ClassVar[bool] = False
    """Whether a LayerNorm is applied to queries and keys before the rotary embedding."""
    chain_break: ClassVar[bool] = False
    """Whether the model has a token of its own for a chain break, with the number `esmshard.vocab.SEPARATOR`."""

    def __post_init__(self) -> None:
        for name in ("n_layers", "dim", "n_heads", "v_heads", "ffn", "max_positions", "window"):
            value = getattr(self, name, None)
            is_unset = value is None and name not in ("n_layers", "dim", "n_heads")
            if not is_unset and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a positive whole number, not {value!r}")
        if self.dim % (2 * self.n_heads):
            raise ValueError(f"dim {self.dim} must be a multiple of 2 x n_heads ({self.n_heads}), for pairs of numbers")
        if self.chains.linker == "break" and not self.chain_break:
            raise ValueError("linker:break is for models with a token of a chain break; choose a length, as linker:25")
        if self.chains.gap and self.most_tokens is not None:
            raise ValueError("a gap is for models with rotary positions; this model has learned positions; omit gap")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of tokens of a sequence, including `<cls>` and `<eos>`; None if the model has no limit."""
        return None

    @property
    @abstractmethod
    def n_logits(self) -> int:
        """Number V of logits of a token. The first 33 are for the tokens of `esmshard.vocab`, in the same order."""

    @property
    @abstractmethod
    def ffn_width(self) -> int:
        """Width F of the feed-forward part of a block."""

    @property
    @abstractmethod
    def matrices(self) -> tuple[Matrix, ...]:
        """All linear layers of a block."""

    @property
    def projections(self) -> tuple[Matrix, ...]:
        """The linear layers of a block's attention. All model families have the same four layers."""
        d = self.dim
        qkv = [Matrix(name, f"self_attn.{name}_proj", d, d, "qkv") for name in "qkv"]
        return (*qkv, Matrix("out", "self_attn.out_proj", d, d, "out"))

    @property
    def n_maps(self) -> int:
        """Number of attention maps, one for each head of each layer. Each has a weight in the contact regression."""
        return self.n_layers * self.n_heads

    def kept_with(self, track: str) -> int:
        """Return how many more numbers per token are kept for the backward pass if batches have this track."""
        return 0

    @property
    def sizes(self) -> dict[str, Any]:
        """The fields that decide the shapes of the tensors, by name."""
        return {name: value for name, value in asdict(self).items() if name not in ("window", "chains")}

    def recorded(self) -> dict[str, Any]:
        """Return the architecture as a dictionary for checkpoints, which `family_registry.recorded_config` reads."""
        window = {} if self.window is None else {"window": self.window}
        chains = {} if self.chains == Chains() else {"chains": asdict(self.chains)}
        return {"family": self.family, **self.sizes, **window, **chains}
