"""A model whose layers take turns in the room of one computes what the whole one does, to the last bit."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from model_files import SMALL, fair_esm, ours, tokenise

from esmshard.model.contacts import ContactAccumulator
from esmshard.model.families.esm_layouts import TIED
from esmshard.model.weights.export import few
from esmshard.model.weights.streamed import streamed


@pytest.mark.parametrize("family", SMALL)
def test_layers_that_take_turns_equal_the_whole_model(family: str) -> None:
    config = SMALL[family]
    whole = ours(fair_esm(config), config)
    state = whole.state_dict()
    asked: list[list[str]] = []
    seen: dict[str, torch.Tensor] = {}

    def source(names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        asked.append(list(names))
        return {name: state[name] for name in names}

    model = streamed(config, source, seen.__setitem__)
    _, batch = tokenise(["MKTAYIAKQR", "LLGG<mask>AVWXB"])
    found = []
    for it in (whole, model, model):
        sums = [ContactAccumulator(it.contact_head.regression.weight, it.contact_head.regression.bias)] * 2
        with torch.no_grad():
            out = it(
                batch,
                layers=range(config.n_layers + 1),
                logits_at=torch.arange(batch.bounds[-1]),
                on_attention=lambda layer, n, q, k, sums=sums: n or sums[0].add(layer, q, k),
            )
            found.append([*out.representations.values(), out.logits_PV, sums[0].logits()])
    assert len(found[0]) == config.n_layers + 3
    assert all(torch.equal(x, y) for x, y in zip(found[0], found[1], strict=True))
    assert all(torch.equal(x, y) for x, y in zip(found[0], found[2], strict=True)), "and again"
    assert seen.keys() == state.keys() - {TIED}
    assert all(torch.equal(seen[name], state[name]) for name in seen)
    assert sum(map(len, asked)) == len(seen) + sum(name.startswith("layers.") for name in seen), "two forward passes"
    largest = max(tensor.numel() for tensor in state.values())
    assert max(sum(state[name].numel() for name in names) for names in asked) <= largest
    held = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert len(held) < len(state) / 2, "one layer's room"


def test_a_few_tensors_are_no_more_than_the_largest() -> None:
    sizes = {"a": (2,), "b": (3, 2), "c": (4,), "d": (2, 1), "e": (1,), "f": (6,)}
    groups = list(few({name: torch.Size(size) for name, size in sizes.items()}))
    assert groups == [["a"], ["b"], ["c", "d"], ["e"], ["f"]]
