"""`Chains`: how the chains of one record, written `A:B`, become one sequence for a model. No torch.

Token stores hold `SEPARATOR` tokens between two chains (`esmshard.vocab`), as many as the linker has residues, so that
lengths and memory are those of the sequence that the model sees. The model reads each of them as glycine, or as its own
token of a chain break.
"""

import re
from dataclasses import dataclass
from typing import Literal

from esmshard.errors import UsageError

LINKER = 25
"""Residues of the linker by default: the 25 glycines of ESMFold (Lin et al. 2023, doi:10.1126/science.ade2574)."""
LONGEST_LINKER, WIDEST_GAP = 1_000, 100_000
BETWEEN = ":"
"""The symbol between the chains of a record, as in ColabFold and ESMFold."""
FORM = "linker:25, gap:512, linker:25,gap:512 or linker:break"

Linker = int | Literal["break"]


@dataclass(frozen=True)
class Chains:
    """How two neighbouring chains of a record are joined.

    >>> Chains(25, 512).text
    'linker:25,gap:512'
    """

    linker: Linker = LINKER
    """Number of glycines between two chains, or `break` for the one token of a chain break that some models have."""
    gap: int = 0
    """Number that is added to the positions of a chain for every chain before it, besides the linker."""

    @property
    def tokens(self) -> int:
        """Number of tokens between two chains."""
        return 1 if self.linker == "break" else self.linker

    @property
    def text(self) -> str:
        """The value of `--join`."""
        return f"linker:{self.linker}" + (f",gap:{self.gap}" if self.gap else "")

    def __str__(self) -> str:
        linker = "a chain break" if self.linker == "break" else f"a linker of {self.linker} G"
        return linker + (f" and a gap of {self.gap:,} positions" if self.gap else "")


def read_chains(text: str) -> Chains:
    """Read the value of `--join`.

    >>> read_chains("gap:512")
    Chains(linker=25, gap=512)

    Raises:
        ValueError: it is no such value; the message says what is expected.
    """
    found: dict[str, Linker] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition(":"))
        most = {"linker": LONGEST_LINKER, "gap": WIDEST_GAP}.get(key)
        breaks = key == "linker" and value == "break"
        if most is None or key in found or not (breaks or re.fullmatch("[0-9]{1,6}", value)):
            raise ValueError(f"one of {FORM} is expected")
        if not breaks and not (key == "linker") <= int(value) <= most:
            raise ValueError(f"{key} is {int(key == 'linker')} to {most:,}, not {value}")
        found[key] = "break" if breaks else int(value)
    return Chains(**found)  # type: ignore[arg-type]


def join_option(text: str | None) -> Chains | None:
    """Read `--join` of a command, or `join` of a function. None if it is not given. `UsageError` if it is no such
    value.
    """
    try:
        return None if text is None else read_chains(text)
    except ValueError as error:
        raise UsageError(f"--join {text}: {error}") from None
