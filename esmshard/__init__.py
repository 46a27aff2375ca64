"""Fine-tune protein language models (ESM-2, ESM-C and others), sharded, from one recipe.

A name below is imported when it is first used, so `import esmshard` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "build": "esmshard.model.families.family_registry",
    "encode": "esmshard.vocab",
    "FAMILIES": "esmshard.model.families.family_registry",
    "finetune": "esmshard.api.runs",
    "InputError": "esmshard.errors",
    "Layout": "esmshard.parallel.layout",
    "load": "esmshard.api.model",
    "load_checkpoint": "esmshard.checkpoint.sharded:load",
    "load_model": "esmshard.model.weights",
    "materialise": "esmshard.parallel.load",
    "Model": "esmshard.api.model",
    "ModelConfig": "esmshard.model.config",
    "newest_checkpoint": "esmshard.checkpoint.sharded:newest",
    "open": "esmshard.embed.parts:EmbeddingStore",
    "pack": "esmshard.batch",
    "predict_contacts": "esmshard.model.contacts",
    "read_fasta": "esmshard.io.sequences",
    "read_weights": "esmshard.model.weights:read",
    "Run": "esmshard.api.runs",
    "RunFailed": "esmshard.errors",
    "SequenceEmbedder": "esmshard.api.model",
    "shard": "esmshard.parallel.shard",
    "SIZES": "esmshard.model.families.family_registry",
    "state_tensors": "esmshard.train.optim",
    "step_of": "esmshard.checkpoint.manifest",
    "TokenBatch": "esmshard.batch",
    "Trunk": "esmshard.model.trunk",
    "UsageError": "esmshard.errors",
    "Weights": "esmshard.model.weights",
    "World": "esmshard.parallel.process_group",
    "world": "esmshard.parallel.process_group",
    "write_checkpoint": "esmshard.checkpoint.sharded:write",
    "write_transformers": "esmshard.model.export",
}

__all__ = [*_WHERE, "__version__"]  # noqa: PLE0604  # All items are strings.

if TYPE_CHECKING:
    from esmshard.api.model import Model, SequenceEmbedder, load
    from esmshard.api.runs import Run, finetune
    from esmshard.batch import TokenBatch, pack
    from esmshard.checkpoint.manifest import step_of
    from esmshard.checkpoint.sharded import load as load_checkpoint
    from esmshard.checkpoint.sharded import newest as newest_checkpoint
    from esmshard.checkpoint.sharded import write as write_checkpoint
    from esmshard.embed.parts import EmbeddingStore as open
    from esmshard.errors import InputError, RunFailed, UsageError
    from esmshard.io.sequences import read_fasta
    from esmshard.model.config import ModelConfig
    from esmshard.model.contacts import predict_contacts
    from esmshard.model.export import write_transformers
    from esmshard.model.families.family_registry import FAMILIES, SIZES, build
    from esmshard.model.trunk import Trunk
    from esmshard.model.weights import Weights, load_model
    from esmshard.model.weights import read as read_weights
    from esmshard.parallel.layout import Layout
    from esmshard.parallel.load import materialise
    from esmshard.parallel.process_group import World, world
    from esmshard.parallel.shard import shard
    from esmshard.train.optim import state_tensors
    from esmshard.vocab import encode


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        module, _, attribute = _WHERE[name].partition(":")
        return getattr(import_module(module), attribute or name)
    raise AttributeError(f"module 'esmshard' has no attribute '{name}'")
