"""The shapes of ESM-2, ESM-1b and ESM-1v, and their registry. No torch."""

from dataclasses import dataclass
from typing import ClassVar

from esmshard.model.families.esm_shapes import EsmShape
from esmshard.vocab import TOKENS


@dataclass(frozen=True, kw_only=True)
class EsmConfig(EsmShape):
    """The architecture of an ESM-2, or of an ESM-1b or ESM-1v with `max_positions`."""

    family: ClassVar[str] = "esm2"
    vocabulary: ClassVar[tuple[str, ...]] = TOKENS


SIZES: dict[str, EsmConfig] = {
    # These are for tests and for training from scratch on a laptop; nothing is released under these names.
    "nano": EsmConfig(n_layers=2, dim=32, n_heads=4),
    "mini": EsmConfig(n_layers=6, dim=128, n_heads=8),
    # data/starter and data/demo have their trained weights (`esmshard.model.config.SHIPPED`).
    "starter": EsmConfig(n_layers=6, dim=192, n_heads=12),
    "demo": EsmConfig(n_layers=6, dim=192, n_heads=6),
    # Lin et al. 2023 (doi:10.1126/science.ade2574), as released in fair-esm.
    "esm2_t6_8M_UR50D": EsmConfig(n_layers=6, dim=320, n_heads=20),
    "esm2_t12_35M_UR50D": EsmConfig(n_layers=12, dim=480, n_heads=20),
    "esm2_t30_150M_UR50D": EsmConfig(n_layers=30, dim=640, n_heads=20),
    "esm2_t33_650M_UR50D": EsmConfig(n_layers=33, dim=1280, n_heads=20),
    "esm2_t36_3B_UR50D": EsmConfig(n_layers=36, dim=2560, n_heads=40),
    "esm2_t48_15B_UR50D": EsmConfig(n_layers=48, dim=5120, n_heads=40),
    # Rives et al. 2021 (doi:10.1073/pnas.2016239118) and Meier et al. 2021 (five models, for variant effects).
    "esm1b_t33_650M_UR50S": EsmConfig(
        n_layers=33, dim=1280, n_heads=20, max_positions=1024, emb_layer_norm_before=True
    ),
    **{
        f"esm1v_t33_650M_UR90S_{n}": EsmConfig(n_layers=33, dim=1280, n_heads=20, max_positions=1024)
        for n in range(1, 6)
    },
}
