"""The files of tracks, read by kind: letters as FASTA, codes as `.npz`, coordinates as PDB and mmCIF files."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from esmshard.data.fasta.symbols import Edits
from esmshard.data.labels.coordinates import read_arrays
from esmshard.data.labels.label_fasta import read_label_fasta
from esmshard.data.labels.pairing import UNIPROT
from esmshard.data.structures.chains import Chain, chain_prefix, read_chains
from esmshard.data.structures.structure_folder import MANY, listed_files
from esmshard.data.tables import shown
from esmshard.data.tracks.track_values import require_length, values_of
from esmshard.errors import InputError
from esmshard.progress import Progress
from esmshard.vocab import Track, decode

Entry = tuple[int, npt.NDArray[Any]]
"""The number of a record, and its values [L, ...]."""


class Records(Protocol):
    """The records that a track is read for, such as those of a token store."""

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Number of residues of each record, int32 [N]."""

    def __len__(self) -> int: ...

    def id(self, n: int) -> str:
        """Return the id of record n."""

    def find(self, record_id: str) -> int | None:
        """Return the number of the record with this id, or None."""

    def residues(self, n: int) -> npt.NDArray[np.uint8]:
        """Return the residue tokens of record n, uint8 [L]."""


def entries(track: Track, source: Path, records: Records, edits: Edits) -> Iterator[Entry]:
    """Yield the entry of each record that has one, each record once, in the order of the source.

    Entries of other proteins are passed over.

    Args:
        track: the track.
        source: the file or directory.
        records: the records.
        edits: collects what is worth a notice.

    Raises:
        InputError: the source cannot be read, or an entry does not fit its record; the message names the record.
    """
    readers = {"letters": _letters, "codes": _codes, "coordinates": _coordinates}
    return readers[track.kind](track, source, records, edits)


def _letters(track: Track, source: Path, records: Records, edits: Edits) -> Iterator[Entry]:
    lines: dict[int, int] = {}
    for record in read_label_fasta(source):
        n = records.find(record.id)
        if n is None:
            continue
        where = f"{source}:{record.line}: record {shown(record.id)}"
        if n in lines:
            raise InputError(f"{where} stands in line {lines[n]} too; leave one of them out")
        lines[n] = record.line
        values_L = values_of(track, record.text, where)
        require_length(track, values_L, int(records.lengths[n]), where)
        yield n, values_L


def _codes(track: Track, source: Path, records: Records, edits: Edits) -> Iterator[Entry]:
    if source.suffix != ".npz":
        raise InputError(f"{source}: {track.title} are read from an .npz file with an array for each record by its id")
    for record_id, given in read_arrays(source).items():
        n = records.find(record_id)
        if n is None:
            continue
        where = f"{source}: record {shown(record_id)}"
        values_L = values_of(track, given, where)
        require_length(track, values_L, int(records.lengths[n]), where)
        yield n, values_L


def _coordinates(track: Track, source: Path, records: Records, edits: Edits) -> Iterator[Entry]:
    """Read the files whose names belong to a record: `1abc.cif` for `1abc`, `1ABC`, `1abc_A` or `sp|1ABC|NAME`."""
    wanted = _records_by_entry(records)
    found: dict[int, Path] = {}
    files = [path for path in listed_files(source, edits) if chain_prefix(path) in wanted]
    with Progress(f"structures in {source.name}", len(files), show=len(files) >= MANY) as progress:
        for done, path in enumerate(files, 1):
            prefix, about = chain_prefix(path), Edits()
            chains = read_chains(path, every=True, edits=about)
            for n in wanted[prefix]:
                chain = _chain_of(path, chains, prefix, n, records)
                if chain is None:
                    continue
                where = f"{path}: chain '{chain.id}' of record {shown(records.id(n))}"
                if n in found:
                    raise InputError(f"{where}: it has coordinates in {found[n]} too; remove one of the files")
                found[n] = path
                fix = "give a structure of the whole sequence, which SEQRES or _entity_poly_seq says"
                require_length(track, chain.backbone_L33, int(records.lengths[n]), where, fix)
                if chain.sequence != decode(records.residues(n)):
                    edits.add("the structure has other residues than the sequence", records.id(n))
                yield n, values_of(track, chain.backbone_L33, where)
            progress.update(done, path.name)


def _records_by_entry(records: Records) -> dict[str, list[int]]:
    """Return, for each name that a file or an array may have, in lower case, the records that it may belong to."""
    wanted: dict[str, list[int]] = defaultdict(list)
    for n in range(len(records)):
        name = records.id(n).lower()
        accession = UNIPROT.match(name)
        for entry in {name, name.rpartition("_")[0], accession[1] if accession else ""} - {""}:
            wanted[entry].append(n)
    return wanted


def _chain_of(path: Path, chains: list[Chain], prefix: str, n: int, records: Records) -> Chain | None:
    """Return the chain of a record in the file of an entry; None if the file is not of the record.

    A record that is called as the chain has this chain, `1abc_A` for one. A record that is called as the file has the
    chain of its sequence, or the only chain.
    """
    record_id = records.id(n)
    name, _, chain_name = record_id.rpartition("_")
    if name.lower() == prefix:
        called = [chain for chain in chains if chain.id == f"{prefix}_{chain_name}"]
        return called[0] if called else None
    sequence = decode(records.residues(n))
    same = [chain for chain in chains if chain.sequence == sequence] or (chains if len(chains) == 1 else [])
    if not same:
        raise InputError(
            f"{path}: has {len(chains)} protein chains, and none has the sequence of record {shown(record_id)}; name "
            f"the record {prefix}_CHAIN, or leave one chain in the file"
        )
    return same[0]
