"""A trained contact head over attention maps, as the contact regression of a model that had none."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from esmshard.model.export import Source
from esmshard.tasks import registry

_OWN = "contact_head.regression."


def is_regression(state: Mapping[str, Any], sizes: Mapping[str, torch.Size]) -> bool:
    """Return whether the trained head is a regression over attention maps, and the model has no other that learned."""
    if (
        "contact_head" not in state.get("unlearned", ())
        or not registry.traits(state["recipe"]["task"]["name"]).predicts_contacts
    ):
        return False
    head = {name: size for name, size in sizes.items() if name.startswith("head.")}
    own = {name: size for name, size in sizes.items() if name.startswith(_OWN)}
    return head == {name.replace(_OWN, "head.regression."): size for name, size in own.items()}


def with_regression(read: Source) -> Source:
    """Return a function that reads the head's tensors for the contact regression, so that it is part of the model."""

    def read_both(names: Sequence[str]) -> dict[str, torch.Tensor]:
        theirs = {name: name.replace(_OWN, "head.regression.") for name in names}
        found = read(sorted(set(theirs.values())))
        return {name: found[source] for name, source in theirs.items()}

    return read_both
