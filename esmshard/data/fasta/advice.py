"""Advice for messages about an input file: the command that reads the file under another rule."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from esmshard.data.fasta.symbols import Rules
from esmshard.joined_chains import LINKER

Option = Literal["--on-unknown drop", "--on-duplicate suffix", "--on-nucleotides keep"]

_ENDING = re.compile(
    r"(\.(fasta|faa|fas|fa|a3m|txt|seq|csv|tsv|tab|parquet|xlsx|gb|gbk|gp|dat|xml|sto|aln))?(\.(gz|bgz|bz2|xz|zst))?$",
    re.IGNORECASE,
)
_DOES: dict[Option, str] = {
    "--on-unknown drop": "leave out such records",
    "--on-duplicate suffix": "give the later ones a number (--on-duplicate first leaves them out)",
    "--on-nucleotides keep": "if they are proteins nevertheless, say so",
}


def instead(files: Sequence[Path], option: Option, rules: Rules = Rules()) -> str:  # noqa: B008  # frozen
    """Advise how to read files under another rule. Only `ingest` has the options; all commands take its store.

    >>> print(instead([Path("in/x.fasta.gz")], "--on-unknown drop"))
    leave out such records: `esmshard ingest in/x.fasta.gz -o x.store --on-unknown drop`, and name x.store instead

    Args:
        files: the input files.
        option: the option that is added to the command.
        rules: the rules under which the files are read now.
    """
    name = "input" if files[0] == Path("-") else _ENDING.sub("", files[0].name) or "input"
    store = shlex.quote(f"{name}.store")
    typed = " ".join([f"esmshard ingest {shlex.join(map(str, files))} -o {store}", *_options(rules), option])
    return f"{_DOES[option]}: `{typed}`, and name {store} instead"


def _options(rules: Rules) -> list[str]:
    """Spell the options of `ingest` for those rules that are not the default."""
    return [
        *([f"--on-unknown {rules.on_unknown}"] if rules.on_unknown != "error" else []),
        *(["--on-nucleotides keep"] if rules.on_nucleotides == "keep" else []),
        *([f"--max-length {rules.max_length} --long {rules.long}"] if rules.max_length is not None else []),
        *(["--a3m"] if rules.a3m else []),
        *(["--keep-gaps"] if rules.keep_gaps else []),
        *([f"--join linker:{rules.linker}"] if rules.linker != LINKER else []),
        *([f"--sequence-column {shlex.quote(rules.sequence_column)}"] if rules.sequence_column is not None else []),
        *([f"--id-column {shlex.quote(rules.id_column)}"] if rules.id_column is not None else []),
    ]
