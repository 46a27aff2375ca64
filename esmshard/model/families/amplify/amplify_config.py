"""The shapes of AMPLIFY. No torch."""

from dataclasses import dataclass, replace
from typing import ClassVar

from esmshard.model.config import ModelConfig
from esmshard.model.gated_config import GatedConfig
from esmshard.vocab import TOKENS, VOCAB_SIZE

VOCABULARY = ("<pad>", "<unk>", "<mask>", "<bos>", "<eos>", "|", *"LAGVSERTIDPKQNFYMHWCB")
"""The tokens of AMPLIFY, in the order of the rows of its embedding (`conf/tokenizer/amplify_vocab.txt` there)."""

_SAME = {"<cls>": "<bos>", "<null_1>": "|"}
"""Tokens of `esmshard.vocab` that have another name in AMPLIFY. ESM-C, too, has `|` in the place of `<null_1>`."""


def _row(token: str) -> int | None:
    name = _SAME.get(token, token)
    return VOCABULARY.index(name) if name in VOCABULARY else None


ROWS: tuple[int | None, ...] = tuple(_row(token) for token in TOKENS)
"""The row of each token of `esmshard.vocab`; None for X, U, Z, O and gaps, which AMPLIFY reads as `<unk>`."""
UNKNOWN = VOCABULARY.index("<unk>")


@dataclass(frozen=True, kw_only=True)
class AmplifyConfig(GatedConfig):
    """The architecture of an AMPLIFY.

    Everything else (vocabulary, RMSNorm with eps 1e-5, interleaved rotary positions of base 10000, no biases in blocks)
    is fixed. The reference is `src/amplify/model/amplify.py` of https://github.com/chandar-lab/AMPLIFY.
    """

    family: ClassVar[str] = "amplify"
    qk_norm: ClassVar[bool] = False
    chain_break: ClassVar[bool] = False

    @property
    def n_logits(self) -> int:
        """The 33 tokens. Those that the model lacks have a logit that makes their probability zero."""
        return VOCAB_SIZE

    @property
    def ffn_width(self) -> int:
        """Width of gate and up: 8/3 of the model's width, up to a multiple of 8, in all released models."""
        return (8 * self.dim // 3 + 7) // 8 * 8 if self.ffn is None else self.ffn

    @property
    def branch_scale(self) -> float:
        """Nothing is scaled."""
        return 1.0

    @property
    def layer_parameters(self) -> int:
        """Matrices and two norms, all without biases."""
        return sum(matrix.rows * matrix.columns for matrix in self.matrices) + 2 * self.dim

    @property
    def layer_biases(self) -> int:
        """None."""
        return 0

    @property
    def embedding_parameters(self) -> int:
        """The token embedding."""
        return len(VOCABULARY) * self.dim

    @property
    def lm_head_parameters(self) -> int:
        """One matrix, which is not the embedding's, with a bias."""
        return len(VOCABULARY) * (self.dim + 1)


_M120 = AmplifyConfig(n_layers=24, dim=640, n_heads=10)
_M350 = AmplifyConfig(n_layers=32, dim=960, n_heads=15)

SIZES: dict[str, ModelConfig] = {
    # These are for tests and for training from scratch on a laptop; nothing is released under these names.
    "amplify_nano": AmplifyConfig(n_layers=2, dim=32, n_heads=4),
    "amplify_mini": AmplifyConfig(n_layers=6, dim=128, n_heads=8),
    "amplify_120m": _M120,
    "amplify_350m": _M350,
    # These are the models after the first stage of training, in which proteins had at most 512 tokens.
    "amplify_120m_base": replace(_M120, window=510),
    "amplify_350m_base": replace(_M350, window=510),
}
