"""Rules that the settings of all tasks with classes share. No torch."""

from pydantic import ValidationInfo

OUTPUTS = 8
"""The number of classes that a plan assumes before labels are read."""


def for_classes(balance: float, info: ValidationInfo) -> float:
    """Refuse the key `balance` for numbers."""
    if balance and info.data.get("kind") == "number":
        raise ValueError("weighs classes, and the recipe has kind number; remove it")
    return balance
