"""What the ranks of the tests of sharded embedding do."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from esmshard.embed.compute.outputs import Long, choose
from esmshard.embed.job.embed_job import embed
from esmshard.embed.job.embed_request import request
from esmshard.embed.store.part_plan import Spec
from esmshard.embed.workers.sharded_worker import Lockstep, joined, sharded
from esmshard.errors import InputError
from esmshard.joined_chains import Chains
from esmshard.model import weights
from esmshard.parallel.shard import groups, local
from esmshard.progress import Progress
from esmshard.vocab import encode


def embedded(model: str, fasta: str, out: str, how: dict[str, Any], part_tokens: int, tensor: int = 1) -> str:
    """What each rank says at the end."""
    asked, more = request(model, Path(out), **how), {"tokens": 128, "part_tokens": part_tokens}
    return str(embed(asked, Path(fasta), shard=True, tensor=tensor, **more))


def lockstep(model: str, pools: list[str], ranks: Any) -> Lockstep:
    found = weights.read(model)
    outputs = choose(pools, None, found.config, model)
    spec = Spec("", outputs, found.config.dim, "fp32", "fp32", Long(), Chains())
    esm = sharded(found, spec, ranks)
    return Lockstep(esm, spec, ranks, None, Progress("embed", 1, show=False), 0, 1)


def numbers(model: nn.Module) -> int:
    return sum(local(p).numel() for p in model.parameters())


def held(model: str) -> dict[str, int]:
    """Numbers that a rank holds before any pass, most in any layer's pass, and after one; groups of the model."""
    with joined() as ranks, torch.no_grad():
        embedder = lockstep(model, ["mean", "logits", "contacts"], ranks)
        found = {"before": numbers(embedder.esm), "groups": len(groups(embedder.esm)), "during": 0}

        def look(*_: object) -> None:
            found["during"] = max(found["during"], numbers(embedder.esm))

        for layer in embedder.esm.layers:
            layer.fc1.register_forward_hook(look)
        assert len(list(embedder.compute([encode("MKTAYIAK")]))) == 1
        embedder.keep_up()
        return found | {"after": numbers(embedder.esm)}


def passes(model: str) -> dict[str, Any]:
    """Forward passes of a rank that has as many packs as its number, and what came of them."""
    with joined() as ranks:
        embedder = lockstep(model, ["mean"], ranks)
        count: list[int] = []
        embedder.esm.register_forward_hook(lambda *_: count.append(1))
        embedder.tokens = 8
        found = dict(embedder.compute([encode("MKTAYIAK")] * ranks.rank))
        embedder.keep_up()
        return {"passes": len(count), "values": len(found)}


def short_of_memory(model: str) -> dict[str, Any]:
    """What each rank is told when memory of the second one does not suffice."""
    tokens = np.concatenate([encode("A" * 2000)])
    told = ""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with_packs = False
    try:
        with joined() as ranks:
            embedder = lockstep(model, ["contacts"], ranks)
            with_packs = ranks.rank == 1
            if with_packs:
                size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), limits[1]))
                list(embedder.compute([tokens]))
            embedder.keep_up()
    except InputError as error:
        told = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return {"told": told, "with_packs": with_packs}


def with_nproc(model: str, fasta: str, out: str) -> str:
    """What a rank of a launcher is told that is to start ranks itself."""
    try:
        embed(request(model, Path(out)), Path(fasta), nproc=2, shard=True)
    except InputError as error:
        return str(error)
    return ""
