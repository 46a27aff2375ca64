"""Fine-tune protein language models (ESM-2, ESM-C and others), sharded, from one recipe.

The names below are imported when they are first used, so that `import esmshard` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "esmshard.api.model": "Model load",
    "esmshard.api.runs": "Run finetune",
    "esmshard.api.sequence_embedder": "SequenceEmbedder",
    "esmshard.batch": "TokenBatch pack",
    "esmshard.checkpoint.manifest": "step_of",
    "esmshard.checkpoint.sharded": "load_checkpoint=load newest_checkpoint=newest write_checkpoint=write",
    "esmshard.embed.parts": "open=EmbeddingStore",
    "esmshard.errors": "InputError RunFailed UsageError",
    "esmshard.io.sequences": "read_fasta",
    "esmshard.model.config": "ModelConfig",
    "esmshard.model.contacts": "predict_contacts",
    "esmshard.model.export": "write_transformers",
    "esmshard.model.families.family_registry": "FAMILIES SIZES build",
    "esmshard.model.trunk": "Trunk",
    "esmshard.model.weights": "Weights load_model read_weights=read",
    "esmshard.parallel.layout": "Layout",
    "esmshard.parallel.load": "materialise",
    "esmshard.parallel.process_group": "World world",
    "esmshard.parallel.shard": "shard",
    "esmshard.train.optim": "state_tensors",
    "esmshard.vocab": "encode",
}
"""The public names of each module; after `=` the name there, where it is another one."""
_WHERE = {name.partition("=")[0]: (module, name) for module, names in _MODULES.items() for name in names.split()}

__all__ = [*_WHERE, "__version__"]  # noqa: PLE0604  # strings, all of them

if TYPE_CHECKING:
    from esmshard.api.model import Model, load
    from esmshard.api.runs import Run, finetune
    from esmshard.api.sequence_embedder import SequenceEmbedder
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
        module, there = _WHERE[name]
        return getattr(import_module(module), there.rpartition("=")[2])
    raise AttributeError(f"module 'esmshard' has no attribute '{name}'")
