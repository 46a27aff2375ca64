"""The sentences that say why a plan takes its best option. No torch."""

from collections.abc import Iterator

from esmshard.errors import UsageError
from esmshard.planner.cost import LINK_SHARE, Cost, Traffic, traffic
from esmshard.planner.recipe_plan import AS_GOOD, GIB, RESERVE, Option, RecipePlan, layout_of, seconds, total_bytes

MIB = 2**20


def reasons(found: RecipePlan) -> Iterator[str]:
    """Yield the reasons why the best option is the best, one sentence each."""
    best = found.best
    if best is None:
        every = found.options + found.left_out
        least = min(total_bytes(option) for option in every if option.memory is not None) / GIB
        yield (
            f"nothing fits: the least needs {least:.1f} GiB a GPU, and there are {found.room / GIB:.1f} to plan with; "
            "take more or larger GPUs, or lower data.max_length or batch.tokens_per_rank"
        )
        return
    assert best.cost is not None
    assert best.memory is not None
    free = 1 - best.memory.total / found.machines.gpu.memory_bytes
    yield (
        f"it fits: {best.memory.total / GIB:.1f} GiB at the peak ({best.memory.when}), which leaves {free:.0%} of the "
        f"GPU free, {RESERVE:.0%} being the reserve"
    )
    if best.memory.host:
        yield (
            f"each machine needs {best.memory.host * found.machines.per_machine / GIB:.0f} GiB of its own memory for "
            "weights, gradients and optimizer state"
        )
    others = [o for o in found.options if o.fits and o is not best]
    faster = [o for o in others if seconds(o) < best.cost.seconds]
    if faster:
        yield f"the faster options ({len(faster)}) save less than {AS_GOOD - 1:.0%} of a step, and need more memory"
    elif others:
        yield "no other option that fits has a shorter step"
    else:
        yield "no other option fits"
    if found.lengths.assumed:
        yield (
            "the memory of validation and evaluation is that of records as long as those of training, since those sets "
            f"cannot be read here: {found.lengths.assumed}"
        )
    if found.numbers.quantization is not None:
        numbers = found.numbers
        packed, before = (numbers.n_layers * size for size in (numbers.layer_packed, 4 * numbers.layer_quantized))
        yield (
            f"model.quantize={numbers.quantization} keeps the frozen matrices of the layers in {packed / GIB:.2f} GiB, "
            f"whole on each GPU, in place of {before / GIB:.2f} GiB over all GPUs that share a copy; unpacking them "
            "takes time, which the times above do not include"
        )
    total = best.cost.traffic.total
    if total == 0:
        yield "nothing travels between GPUs"
    elif best.cost.exposed < 0.02 * best.cost.seconds:
        yield f"the link hides its {total / GIB:.2f} GiB a step behind the arithmetic"
    else:
        yield (
            f"the link does not hide its {total / GIB:.2f} GiB a step: "
            f"{best.cost.exposed / best.cost.seconds:.0%} of the step is waiting; a larger batch.global_tokens helps"
        )
    if best.tensor > 1:
        yield _why_divided(found, best, best.cost)


def _why_divided(found: RecipePlan, best: Option, cost: Cost) -> str:
    """Return one sentence on `parallel.tensor` of the best option, with the traffic of a layer and the link."""
    link, own = found.machines.gpu, cost.traffic
    each = MIB * found.numbers.n_layers * best.micro_batches
    carried = own.tensor / (LINK_SHARE * link.link)
    whole = _undivided(found, best)
    against = "" if whole is None else f" in place of {whole.of_weights / each:,.1f} with parallel.tensor=1"
    gain, undivided = "", [option for option in found.options if option.tensor == 1]
    if shortest := min((seconds(option) for option in undivided if option.fits), default=0.0):
        gain = f"; the step is {1 - cost.seconds / shortest:.0%} shorter than the shortest without it"
    elif undivided:
        gain = "; nothing fits without it"
    return (
        f"parallel.tensor={best.tensor}: in a micro-batch a GPU receives {own.of_weights / each:,.1f} MiB of weights "
        f"and gradients of each layer{against}, and {own.tensor / each:,.1f} MiB of activations, which "
        f"{link.link_name} at {link.link / 1e9:.0f} GB/s carries in {carried / cost.seconds:.1%} of the step{gain}"
    )


def _undivided(found: RecipePlan, best: Option) -> Traffic | None:
    """Return the traffic of the best option without `parallel.tensor`; None where its strategy then is impossible."""
    try:
        laid_out = layout_of(found, best.strategy, best.checkpointing, best.cpu_offload, 1)
    except UsageError:
        return None
    return traffic(found.numbers, laid_out, found.machines, best.micro_batches)
