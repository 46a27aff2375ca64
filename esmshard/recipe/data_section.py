"""The `data` section of a recipe. No torch."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from esmshard.recipe.section_base import Names, Settings
from esmshard.vocab import LONGEST_LINKER, WIDEST_GAP, Chains

OPTIONAL = (
    *("labels", "target", "sequence_column", "id_column", "mask"),
    *("table", "wild_type", "mutant", "offset", "unusable", "replicates", "transform", "lower_is_better"),
    *("split", "train_max", "train_share"),
)
"""Keys that only some tasks read. These tasks name them in `TaskSettings.data_keys`."""


INSIDE = "inside"
"""The word for a track that the file of the sequences has, in place of a path."""
EVERY = "all"
"""The word for all chains of a structure file in `data.complexes`, in place of a path."""


class JoinSettings(Settings):
    """How the chains of a record `A:B` become one sequence for the model (docs/chains.md). By default as the model was
    trained, or with a linker of 25 glycines and no gap.
    """

    linker: Annotated[int, Field(ge=1, le=LONGEST_LINKER)] | Literal["break"] | None = None
    """Number of glycines between two chains; `break` for the one token of a chain break that ESM-C and ESM3 have."""
    gap: int | None = Field(None, ge=0, le=WIDEST_GAP)
    """Number that is added to the positions of a chain for every chain before it, besides the linker. For models with
    rotary positions."""

    def over(self, usual: Chains) -> Chains:
        """Return how a model joins chains that usually does so in another way."""
        return Chains(usual.linker if self.linker is None else self.linker, usual.gap if self.gap is None else self.gap)


class DataSettings(Settings):
    """The training, validation and test records: FASTA files, token stores, or tables with sequences and labels
    (docs/labels.md). For contacts each is a directory of PDB or mmCIF files (docs/structures.md), or a FASTA file or
    token store with the coordinates beside it as `.npz` (data/README.md). Task `variant` has `table` and `wild_type`
    instead.
    """

    train: str | None = None
    """The training records: a path, or `sample:contact/train`. If several splits name the same file, the file is
    divided by `SET=` in its headers, or by the column `set` of the table or of its labels (docs/labels.md)."""
    valid: str | None = None
    """The validation records, which are scored during training. The model is never trained on them. By default they are
    in the file of `train`."""
    test: str | None = None
    """The test records, which are scored once at the end. By default they are in the file of `train`."""
    table: str | None = None
    """A table of measured variants of one protein, as CSV, TSV or Parquet (docs/variants.md). This key and the next
    ones are for task `variant`."""
    wild_type: str | None = None
    """The FASTA file with this protein."""
    mutant: str | None = None
    """The column with the mutations. By default it is found by its name."""
    offset: Annotated[int, Field(ge=-(10**6), le=10**6)] | Literal["auto"] | None = None
    """The number that is added to the positions of the table. `auto`, the default, finds the number that fits the wild
    type."""
    unusable: Literal["drop", "error"] | None = None
    """How unusable rows are treated: rows without a substitution, with a stop codon, with a synonymous change, or with
    a residue that the wild type does not have. `drop`, the default, leaves them out and names them. Unreadable rows may
    be a tenth of the table at most, and so may rows that do not fit the wild type."""
    replicates: Literal["mean", "keep", "error"] | None = None
    """How several rows of the same variant are treated; `mean` by default."""
    transform: Literal["none", "log", "rank"] | None = None
    """The transform of the measured values before training. Predictions are in the unit of the table again. `log` is
    for ratios and affinities, `rank` for values with a skewed distribution; `none` is the default."""
    lower_is_better: Names | None = Field(None, strict=False)
    """The targets for which lower values are better, such as a dissociation constant. Their ranks and zero-shot scores
    are reversed."""
    split: Literal["position", "contiguous", "modulo", "random", "mutations", "given"] | None = None
    """How variants are divided into folds. `position`, the default, keeps the variants of one position together, so
    that every test is on positions that training has not seen. `contiguous` and `modulo` are the schemes of ProteinGym.
    `random` gives scores that are too high. `mutations` and `given` make one split of the table without folds:
    `mutations` trains on variants with up to `train_max` mutations and tests on the others, `given` follows the column
    `set` (or `split`) of the table."""
    train_max: int | None = Field(None, ge=1, le=10**6)
    """For split `mutations`, the most mutations of a training variant; 1 by default."""
    train_share: float | None = Field(None, gt=0, le=1)
    """The share of the training variants that is used, for learning curves. A smaller share is a subset of a larger
    one. All are used by default."""
    labels: str | None = None
    """One file with the labels of all three splits: a table, a label FASTA, or an `.npz` (docs/labels.md). By default
    labels are read from the table that has the sequences, from the headers of the FASTA files, or from the `.npz`
    beside each of them."""
    target: Names | None = Field(None, strict=False)
    """The columns of the table, the keys of the headers, or the array of the `.npz` with the labels: one name, or a
    list."""
    sequence_column: str | None = None
    """The column with the sequences, if `train` is a table. By default it is found by its name (docs/ingest.md)."""
    id_column: str | None = None
    """The column of the table with the ids, of `labels` or else of `train`. By default it is found by its name."""
    mask: str | None = None
    """A FASTA file of 0 and 1 for task `residue`. A residue with 0 has no label."""
    complexes: str | None = None
    """The chains of a structure file that become one record (docs/structures.md). By default each chain is a record of
    its own. `all`: all protein chains of a file are one record, in the order of the file. Or the path of a list with a
    record on each line, such as `1abc_A:B` for chain A followed by chain B of the file `1abc.cif`."""
    join: JoinSettings = JoinSettings()  # type: ignore[call-arg]  # see Recipe
    tracks: dict[str, str] | None = None
    """What the model reads of each residue besides the amino acid, if it is of a family that does (docs/tracks.md): a
    path by the name of the track, such as {3di: letters.fasta}, or `inside` for the coordinates of structures that
    are the data themselves."""
    folds: int | None = Field(None, ge=3, le=10**4)
    """The number of parts into which `train`, or `table`, is divided for cross-validation. One part is the test set;
    the next part is the validation set of a table, or if `valid` names the same file as `train`. `--folds` sets this
    key and `fold` for each run. If this key is set without `--folds`, `fold` must be set, too."""
    fold: int = Field(0, ge=0)
    """The number of the part that is the test set, counted from 0."""
    clusters: str | None = None
    """The `_cluster.tsv` of MMseqs2 for the training records. `folds` then keep clusters together; without this key
    they keep only equal sequences together."""
    long: Literal["crop", "window", "full", "skip", "error"] = "crop"
    """How a training record over `max_length` is treated. `crop` cuts a random window, another one in each epoch;
    `window` makes as few windows as cover the record, each of them an example; `full` uses the whole record; `skip`
    leaves the record out and counts it; `error` refuses it. Validation, test and prediction always use whole chains.
    For task `sequence`, `full` is the default, and `crop` is refused because it may remove the cause of the label."""
    max_length: int = Field(1022, ge=8, le=10**6)
    """The most residues of a training record."""

    @field_validator("fold")
    @classmethod
    def _of_folds(cls, fold: int, info: ValidationInfo) -> int:
        if "folds" not in info.data:  # the value of `folds` has been refused
            return fold
        folds = info.data["folds"]
        if fold and folds is None:
            raise ValueError("is one of data.folds, and the recipe has none; add data.folds, or remove it")
        if folds is not None and fold >= folds:
            raise ValueError(f"is counted from 0, and of {folds} folds the last one is {folds - 1}, not {fold}")
        return fold
