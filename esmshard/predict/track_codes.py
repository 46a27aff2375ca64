"""Computes the values of a track (an additional model input), such as ESM3's structure tokens, from structure files."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from esmshard.data.structures.chains import read_chains
from esmshard.data.structures.structure_folder import listed_files
from esmshard.devices import DeviceName, chosen_device
from esmshard.errors import InputError, UsageError, writing
from esmshard.io.paths import replacing
from esmshard.io.symbols import Edits
from esmshard.io.tables import counted
from esmshard.io.writers import check
from esmshard.model.families.family_registry import encoder_of
from esmshard.progress import Progress, say


def write_codes(
    track: str, structures: Path, weights: Path, out: Path, *, device: DeviceName = None, overwrite: bool = False
) -> str:
    """Write an `.npz` file with an array of codes [L] for each protein chain in structure files, under the chain's id.

    Return a sentence about the written file. `structures` is a PDB or mmCIF file, or a directory of such files.
    `weights` is a file with the weights of the encoder, which computes the codes.
    """
    encode, computing, edits = encoder_of(track), chosen_device(device), Edits()
    if out.suffix != ".npz":
        raise UsageError(f"{out}: codes are written as .npz; give the file this ending")
    check(out, overwrite=overwrite)
    codes, unknown, files = dict[str, npt.NDArray[np.uint16]](), 0, listed_files(structures, edits)
    file_of = dict[str, Path]()
    with Progress(f"{track} of {structures.name}", len(files)) as progress:
        for done, path in enumerate(files, 1):
            for chain in read_chains(path, edits=edits):
                if chain.id in codes:
                    raise InputError(f"{path}: chain '{chain.id}' is also in {file_of[chain.id]}; remove one file")
                file_of[chain.id] = path
                codes[chain.id] = encode(weights, chain.backbone_L33, computing).astype(np.uint16)
                unknown += int(np.isnan(chain.backbone_L33).any((1, 2)).sum())
            progress.update(done, path.name)
    with writing(out, "choose another place with -o"), replacing(out, binary=True) as file:
        np.savez_compressed(file, **codes)  # type: ignore[arg-type]
    for notice in edits.notices():
        say(f"{structures}: {notice}")
    written = f"{out}: {track} of {counted(len(codes), 'chain')} and {sum(map(len, codes.values())):,} residues"
    return written + (f"; {unknown:,} have no coordinates and get the code for this case" if unknown else "")
