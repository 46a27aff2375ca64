"""Fine-tune protein language models (ESM-2, ESM-C and others), sharded, from one recipe.

The names below are imported when they are first used, so that `import esmshard` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "FAMILIES": "esmshard.model.families.family_registry",
    "InputError": "esmshard.errors",
    "Model": "esmshard.api.model",
    "ModelConfig": "esmshard.model.config",
    "Run": "esmshard.api.runs",
    "RunFailed": "esmshard.api.start_run",
    "SIZES": "esmshard.model.families.family_registry",
    "SequenceEmbedder": "esmshard.api.sequence_embedder",
    "TokenBatch": "esmshard.batch",
    "Trunk": "esmshard.model.trunk",
    "UsageError": "esmshard.errors",
    "build": "esmshard.model.families.family_registry",
    "encode": "esmshard.vocab",
    "finetune": "esmshard.api.runs",
    "load": "esmshard.api.model",
    "load_model": "esmshard.model.weights.open_weights",
    "open": "esmshard.embed.store.embedding_store:EmbeddingStore",
    "pack": "esmshard.batch",
    "predict_contacts": "esmshard.model.contacts",
    "read_fasta": "esmshard.data.fasta.fasta_reader",
}

__all__ = [*_WHERE, "__version__"]  # noqa: PLE0604  # strings, all of them

if TYPE_CHECKING:
    from esmshard.api.model import Model, load
    from esmshard.api.runs import Run, finetune
    from esmshard.api.sequence_embedder import SequenceEmbedder
    from esmshard.api.start_run import RunFailed
    from esmshard.batch import TokenBatch, pack
    from esmshard.data.fasta.fasta_reader import read_fasta
    from esmshard.embed.store.embedding_store import EmbeddingStore as open
    from esmshard.errors import InputError, UsageError
    from esmshard.model.config import ModelConfig
    from esmshard.model.contacts import predict_contacts
    from esmshard.model.families.family_registry import FAMILIES, SIZES, build
    from esmshard.model.trunk import Trunk
    from esmshard.model.weights.open_weights import load_model
    from esmshard.vocab import encode


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        module, _, there = _WHERE[name].partition(":")
        return getattr(import_module(module), there or name)
    raise AttributeError(f"module 'esmshard' has no attribute '{name}'")
