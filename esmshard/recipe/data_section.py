"""The `data` section of a recipe. No torch."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from esmshard.recipe.section_base import Names, Settings

OPTIONAL = (
    *("labels", "target", "id_column", "mask"),
    *("table", "wild_type", "mutant", "offset", "unusable", "replicates", "transform", "lower_is_better"),
    *("split", "train_max", "train_share"),
)
"""Keys that only some tasks read: those that name them in `TaskSettings.data_keys`."""


class DataSettings(Settings):
    """The three splits. For contacts: a directory of PDB or mmCIF files (docs/structures.md), or a FASTA file or token
    store and beside it the coordinates as `.npz` (data/README.md). Task `variant` has `table` and `wild_type` instead.
    """

    train: str | None = None
    """Records to learn from: a path, or `sample:contact/train`. A file that is named for several splits is divided by
    `SET=` in its headers, or the column `set` of its labels (docs/labels.md)."""
    valid: str | None = None
    """Records to watch while training. Never trained on."""
    test: str | None = None
    """Records for the final numbers. Never looked at before."""
    table: str | None = None
    """Measured variants of one protein, as CSV, TSV or Parquet (docs/variants.md). For task `variant`, as the next
    keys."""
    wild_type: str | None = None
    """FASTA file with that protein."""
    mutant: str | None = None
    """Column with the mutations; found by its name by default."""
    offset: Annotated[int, Field(ge=-(10**6), le=10**6)] | Literal["auto"] | None = None
    """Added to the positions of the table; by default `auto`, which finds the shift that fits the wild type."""
    unusable: Literal["drop", "error"] | None = None
    """What becomes of rows that cannot be used: no substitution, a stop codon, a synonymous change, another residue
    than the wild type has. By default `drop`: they are left out and named; unreadable ones and misfits up to a tenth of
    the table each."""
    replicates: Literal["mean", "keep", "error"] | None = None
    """What becomes of a variant in several rows; `mean` by default."""
    transform: Literal["none", "log", "rank"] | None = None
    """Of the measured values before they are learned; predictions come back in their unit. `log` for ratios and
    affinities, `rank` for values with a skewed distribution; `none` by default."""
    lower_is_better: Names | None = Field(None, strict=False)
    """Targets of which a lower value is the better one, as a dissociation constant; ranks and zero-shot scores turn
    round."""
    split: Literal["position", "contiguous", "modulo", "random", "mutations", "given"] | None = None
    """How `folds` divide variants. By default `position`: those of one position go together, so that every test is on
    positions that were never seen; `contiguous` and `modulo` are ProteinGym's; `random` flatters. `mutations` and
    `given` make one split of the table, without folds: up to `train_max` mutations to learn from and the rest to test
    on, or as its column `set` (or `split`) says."""
    train_max: int | None = Field(None, ge=1, le=10**6)
    """Most mutations of a variant to learn from, of split `mutations`; 1 by default."""
    train_share: float | None = Field(None, gt=0, le=1)
    """Share of the training variants that are learned from, for learning curves; a smaller share is a part of a larger
    one. All by default."""
    labels: str | None = None
    """Labels of all three splits in one file: a table, a label FASTA, or an `.npz` (docs/labels.md). By default they
    stand in the headers of the FASTA files, or in the `.npz` beside each."""
    target: Names | None = Field(None, strict=False)
    """Columns of the table, keys of the headers, or the array of the `.npz` that are learned; one name, or a list."""
    id_column: str | None = None
    """Column of the table with the ids; found by its name by default."""
    mask: str | None = None
    """FASTA file of 0 and 1: residues under a 0 have no label. For task `residue`."""
    folds: int | None = Field(None, ge=3, le=10**4)
    """Cross-validation: `train`, or `table`, is divided into so many parts, one of which is the test set; of a table,
    another one is the validation set. `--folds` sets it and `fold`, run by run; without that `fold` is wanted too."""
    fold: int = Field(0, ge=0)
    """Which part that is, from 0."""
    clusters: str | None = None
    """MMseqs2's `_cluster.tsv` of the training records: `folds` keep its clusters together. Without it, equal sequences
    only."""
    long: Literal["crop", "window", "full", "skip", "error"] = "crop"
    """What to do with a training record over `max_length`: `crop` cuts a random window, another one each epoch;
    `window` makes as few windows as cover it, each an example; `full` takes it whole; `skip` leaves it out, counted;
    `error` refuses it. Validation, test and prediction always see whole chains. For task `sequence` `full` is the
    default, and `crop` is refused: it may cut away what the label comes from."""
    max_length: int = Field(1022, ge=8, le=10**6)
    """Residues of the longest training record."""

    @field_validator("fold")
    @classmethod
    def _of_folds(cls, fold: int, info: ValidationInfo) -> int:
        if "folds" not in info.data:  # refused itself
            return fold
        folds = info.data["folds"]
        if fold and folds is None:
            raise ValueError("is one of data.folds, and the recipe has none; add data.folds, or remove it")
        if folds is not None and fold >= folds:
            raise ValueError(f"is counted from 0, and of {folds} folds the last one is {folds - 1}, not {fold}")
        return fold
