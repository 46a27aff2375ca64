"""What label readers need of a token store, without files."""

import numpy as np
import numpy.typing as npt

from esmshard.vocab import encode_residues


class InMemory:
    """Records from texts as `>a TARGET=1 MKT`: the last word is the sequence."""

    def __init__(self, *records: str) -> None:
        self.headers = [record.removeprefix(">").rsplit(" ", 1)[0] for record in records]
        self.tokens = [np.frombuffer(encode_residues(record.rsplit(" ", 1)[1]), np.uint8) for record in records]
        self.numbers = {header.split()[0]: n for n, header in enumerate(self.headers)}

    linker: int | None = None

    def __len__(self) -> int:
        return len(self.headers)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        return np.array([len(tokens) for tokens in self.tokens], dtype=np.int32)

    def residues(self, n: int) -> npt.NDArray[np.uint8]:
        return self.tokens[n]

    def id(self, n: int) -> str:
        return self.headers[n].split()[0]

    def find(self, record_id: str) -> int | None:
        return self.numbers.get(record_id)

    def description(self, n: int) -> str:
        return self.headers[n]
