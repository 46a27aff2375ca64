"""The output of `esmshard plan`: the keys of the best option, a table with its reasons, and JSON. No torch."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from esmshard.planner.memory_model import KINDS
from esmshard.planner.recipe_plan import GIB, RESERVE, Option, RecipePlan


def keys(found: RecipePlan) -> list[str]:
    """Return the recipe keys of the best option, to paste behind `esmshard finetune RECIPE`."""
    best = found.best
    if best is None:
        return []
    lines = [
        f"parallel.strategy={best.strategy}",
        f"parallel.activation_checkpointing={best.checkpointing}",
        f"batch.tokens_per_rank={best.largest if found.recipe.batch.tokens_per_rank == 'auto' else best.tokens}",
    ]
    lines += [f"parallel.tensor={best.tensor}"] * (best.tensor > 1)
    return [*lines, "parallel.cpu_offload=true"] if best.cpu_offload else lines


_HEAD = (
    *("strategy", "checkpointing", "weights", "grads", "optim", "gather", "activ", "head", "other", "total", "fits"),
    *("most", "tokens", "ms/step", "exposed", "GiB"),
)


def _table(found: RecipePlan) -> Iterator[str]:
    """Yield a line for each option. Columns are as wide as their widest cell; numbers stand at the right of theirs."""
    rows: list[tuple[str, ...]] = [_HEAD]
    impossible: dict[str, str] = {}
    for option in found.options:
        name = option.strategy
        if option.cpu_offload and not found.recipe.parallel.cpu_offload:
            name += " + cpu_offload"
        if option.tensor > 1:
            name += f", tensor {option.tensor}"
        if option.memory is None or option.cost is None:
            impossible[name] = option.impossible  # for every mode alike
            rows += [(name,)] if (name,) not in rows else []
            continue
        rows.append(
            (
                *(name, option.checkpointing),
                *(f"{getattr(option.memory, kind) / GIB:.2f}" for kind in KINDS),
                *(f"{option.memory.total / GIB:.2f}", "yes" if option.fits else "no", f"{option.largest or '-'}"),
                f"{option.micro_batches} x {option.tokens:,}",
                *(f"{1e3 * seconds:.1f}" for seconds in (option.cost.seconds, option.cost.exposed)),
                f"{option.cost.traffic.total / GIB:.2f}",
            )
        )
    widths = [max(len(row[k]) for row in rows if k < len(row)) for k in range(len(_HEAD))]
    for row in rows:
        if len(row) == 1:
            yield f"{row[0]:<{widths[0]}}  not possible: {impossible[row[0]]}"
            continue
        cells = [cell.ljust(widths[k]) if k in (0, 1, 10) else cell.rjust(widths[k]) for k, cell in enumerate(row)]
        yield "  ".join(cells)


def as_text(found: RecipePlan) -> str:
    """Format the table, the recommendation and its reasons."""
    numbers, lengths, machines = found.numbers, found.lengths, found.machines
    lines = [
        f"machines  {machines}: {found.room / GIB:.1f} GiB a GPU to plan with ({machines.gpu.memory_bytes / GIB:.1f} "
        f"less CUDA's own and {RESERVE:.0%}), {machines.gpu.link / 1e9:.0f} GB/s within a machine"
        + (f", {machines.network * 8 / 1e9:g} Gbit/s a GPU between machines (--network)" if machines.nodes > 1 else "")
        + (
            f"; the speed of {machines.gpu.name} is not known, so times are those of {machines.gpu.speed_of} and only "
            "compare strategies"
            if machines.gpu.speed_of
            else ""
        ),
        f"model     {found.recipe.model.name}: {numbers.parameters:,} parameters, {numbers.trained:,} learn, "
        f"{found.precision}",
        f"data      {lengths.records:,} records of {lengths.mean:.0f} tokens on average, longest {lengths.longest:,}; "
        f"{found.recipe.batch.global_tokens:,} tokens a step"
        + (f"; {lengths.beside:,} of the wild type with every micro-batch" if lengths.beside else ""),
        "",
        "GiB a rank at the peak of a step",
        *_table(found),
    ]
    lines += [
        "",
        "most: largest batch.tokens_per_rank that fits; tokens: micro-batches of a step; GiB: received a step",
        "",
    ]
    if found.best is not None:
        assert found.best.cost is not None
        lines += [
            f"take      {' '.join(keys(found))}",
            f"speed     {found.best.cost.tokens_per_second:,.0f} tokens/s a GPU, "
            f"{found.best.cost.tokens_per_second * machines.world_size:,.0f} in all, MFU {found.best.cost.mfu:.1%}",
        ]
    lines += [f"{'because' if n == 0 else '':<10}{reason}" for n, reason in enumerate(found.reasons())]
    return "\n".join(lines)


def as_json(found: RecipePlan) -> dict[str, Any]:
    """Return the same as JSON values, in bytes and seconds."""

    def row(option: Option) -> dict[str, Any]:
        known = asdict(option)
        if option.memory is not None and option.cost is not None:
            known["memory"]["total"], known["cost"]["seconds"] = option.memory.total, option.cost.seconds
            known["cost"]["traffic"]["total"] = option.cost.traffic.total
        return known

    return {
        "machines": {**asdict(found.machines), "world_size": found.machines.world_size},
        "room_bytes": found.room,
        "model": {"name": found.recipe.model.name, "parameters": found.numbers.parameters, **asdict(found.numbers)},
        "lengths": asdict(found.lengths),
        "precision": found.precision,
        "options": [row(option) for option in found.options],
        "left_out": [row(option) for option in found.left_out],
        "best": None if found.best is None else row(found.best),
        "keys": keys(found),
        "reasons": found.reasons(),
    }
