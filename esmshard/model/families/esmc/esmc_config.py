"""The shapes of ESM-C. No torch."""

from dataclasses import dataclass
from typing import ClassVar

from esmshard.model.config import ModelConfig
from esmshard.model.gated_config import GatedConfig


@dataclass(frozen=True, kw_only=True)
class EsmcConfig(GatedConfig):
    """The architecture of an ESM-C. The reference is `transformers/models/esmc/modeling_esmc.py`."""

    family: ClassVar[str] = "esmc"


SIZES: dict[str, ModelConfig] = {
    # These are for tests and for training from scratch on a laptop; nothing is released under these names.
    "esmc_nano": EsmcConfig(n_layers=2, dim=32, n_heads=4),
    "esmc_mini": EsmcConfig(n_layers=6, dim=128, n_heads=8),
    "esmc_300m": EsmcConfig(n_layers=30, dim=960, n_heads=15),
    "esmc_600m": EsmcConfig(n_layers=36, dim=1152, n_heads=18),
    "esmc_6b": EsmcConfig(n_layers=80, dim=2560, n_heads=40),
}
