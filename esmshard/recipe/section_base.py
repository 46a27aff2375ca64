"""What all sections of a recipe are made of. No torch."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Settings(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion, field docstrings in the schema."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def as_list(value: Any) -> Any:
    """Of a key that is a list of names: a single name is a list of one."""
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(as_list, json_schema_input_type=str | list[str])]
"""A list of names, or a single one."""


class Clash(ValueError):
    """A key of one section that does not go with another section."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key, self.reason = key, reason


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
