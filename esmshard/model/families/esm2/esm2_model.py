"""ESM-2, ESM-1b and ESM-1v."""

from esmshard.model.families.esm2.esm2_config import EsmConfig
from esmshard.model.families.esm_blocks import EsmTrunk


class ESM2(EsmTrunk):
    """The ESM-2 trunk with its two own heads."""

    config: EsmConfig
