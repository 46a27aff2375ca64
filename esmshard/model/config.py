"""`ModelConfig`, the architecture of a model of any family. No torch."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from esmshard.vocab import Chains

Quantization = Literal["nf4", "int8"]
"""How a frozen matrix is stored: in 4 bits, scaled by blocks of 64 numbers, or in 8 bits, scaled by rows."""

SHIPPED = {
    "starter": "was trained on some 77,000 sequences and 9,000 structures",
    "demo": "was trained on some 50,000 sequences and on no structure",
}
"""The small trained models that come with the package in `data/NAME`, with their training data in words."""


@dataclass(frozen=True)
class Matrix:
    """A linear layer of a block, which a LoRA can adapt."""

    target: str
    """The name in a recipe's `adapt.targets`: q, k, v, out, fc1 or fc2. A gated feed-forward part has two fc1."""
    path: str
    """The name of the module in a block."""
    columns: int
    """Width of the input."""
    rows: int
    """Width of the output."""
    reads: str
    """Name of the input. Matrices with the same input keep the input once for the backward pass."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """The architecture of one model. A family has a subclass with the numbers in which its models differ."""

    n_layers: int
    dim: int
    n_heads: int
    window: int | None = field(default=None, compare=False)
    """Residues that the model saw at once in training; None for the window of the family. Not a part of the shape."""
    chains: Chains = field(default=Chains(), compare=False)  # frozen
    """How the model reads several chains as one sequence. Not a part of the shape."""

    family: ClassVar[str]
    """Name of the family in `family_registry.FAMILIES`."""
    gated: ClassVar[bool] = False
    """Whether the feed-forward part multiplies two products of its input (SwiGLU)."""
    qk_norm: ClassVar[bool] = False
    """Whether queries and keys have a LayerNorm before the rotation."""
    chain_break: ClassVar[bool] = False
    """Whether `esmshard.vocab.SEPARATOR` is the model's own token of a chain break."""

    def __post_init__(self) -> None:
        for name in ("n_layers", "dim", "n_heads", "v_heads", "ffn", "max_positions", "window"):
            value = getattr(self, name, None)
            is_unset = value is None and name not in ("n_layers", "dim", "n_heads")
            if not is_unset and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a positive whole number, not {value!r}")
        if self.dim % (2 * self.n_heads):
            raise ValueError(f"dim {self.dim} must be a multiple of 2 x n_heads ({self.n_heads}): rotary turns pairs")
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
        """Most tokens of a sequence, `<cls>` and `<eos>` included; None if the model has no limit."""
        return None

    @property
    @abstractmethod
    def n_logits(self) -> int:
        """Number V of columns of the logits. The first 33 are the tokens of `esmshard.vocab`, in their order."""

    @property
    @abstractmethod
    def ffn_width(self) -> int:
        """Width F of the feed-forward part."""

    @property
    @abstractmethod
    def matrices(self) -> tuple[Matrix, ...]:
        """The linear layers of a block."""

    @property
    def projections(self) -> tuple[Matrix, ...]:
        """The linear layers of the attention of a block, alike in all families."""
        d = self.dim
        qkv = [Matrix(name, f"self_attn.{name}_proj", d, d, "qkv") for name in "qkv"]
        return (*qkv, Matrix("out", "self_attn.out_proj", d, d, "out"))

    @property
    def n_maps(self) -> int:
        """Number of attention maps. Each map has a weight in the contact regression."""
        return self.n_layers * self.n_heads

    def kept_with(self, track: str) -> int:
        """Return how many more numbers a model with this track keeps of each token for the backward pass."""
        return 0

    @property
    def sizes(self) -> dict[str, Any]:
        """The numbers of the shape, by name."""
        return {name: value for name, value in asdict(self).items() if name not in ("window", "chains")}

    def recorded(self) -> dict[str, Any]:
        """Return the architecture as a checkpoint records it; see `family_registry.recorded_config`."""
        window = {} if self.window is None else {"window": self.window}
        chains = {} if self.chains == Chains() else {"chains": asdict(self.chains)}
        return {"family": self.family, **self.sizes, **window, **chains}
