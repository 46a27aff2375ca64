"""Fine-tune ESM-2 protein language models, sharded, from one recipe.

The names below are imported when they are first used, so that `import esmshard` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "ESM2": "esmshard.model.esm2",
    "SIZES": "esmshard.model.config",
    "EsmConfig": "esmshard.model.config",
    "InputError": "esmshard.errors",
    "Model": "esmshard.infer.loaded",
    "Run": "esmshard.runs",
    "RunFailed": "esmshard.command",
    "SequenceEmbedder": "esmshard.infer.sequence_embedder",
    "TokenBatch": "esmshard.batch",
    "UsageError": "esmshard.errors",
    "encode": "esmshard.vocab",
    "finetune": "esmshard.runs",
    "load": "esmshard.infer.loaded",
    "load_model": "esmshard.model.weights",
    "open": "esmshard.infer.product:Product",
    "pack": "esmshard.batch",
    "predict_contacts": "esmshard.model.contacts",
    "read_fasta": "esmshard.data.fasta",
}

__all__ = [*_WHERE, "__version__"]  # noqa: PLE0604  # strings, all of them

if TYPE_CHECKING:
    from esmshard.batch import TokenBatch, pack
    from esmshard.command import RunFailed
    from esmshard.data.fasta import read_fasta
    from esmshard.errors import InputError, UsageError
    from esmshard.infer.loaded import Model, load
    from esmshard.infer.product import Product as open
    from esmshard.infer.sequence_embedder import SequenceEmbedder
    from esmshard.model.config import SIZES, EsmConfig
    from esmshard.model.contacts import predict_contacts
    from esmshard.model.esm2 import ESM2
    from esmshard.model.weights import load_model
    from esmshard.runs import Run, finetune
    from esmshard.vocab import encode


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        module, _, there = _WHERE[name].partition(":")
        return getattr(import_module(module), there or name)
    raise AttributeError(f"module 'esmshard' has no attribute '{name}'")
