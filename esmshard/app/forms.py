"""The jobs of the page: reads their forms from `forms.yaml`, and makes the commands of esmshard from the answers.

A command in `forms.yaml` is a line of words, without `esmshard`. `{table}` in a word stands for the answer to the
question `table`, `{labels|data}` for the first of two answers that is not empty, and `{job}` for the job's directory.
A word with an empty answer is left out. Commands run in the page's directory, so their paths are relative to it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML

from esmshard.model.config import RELEASED_NAMES

MODELS = ("starter", *RELEASED_NAMES.split())
RECIPES = ("contact", "mlm", "sequence", "residue", "pair", "variants")
"""The names of models and recipes that the page offers."""


@dataclass(frozen=True)
class Field:
    """A question in a form."""

    name: str
    label: str
    kind: Literal["file", "files", "sequence", "text", "choice", "number", "model", "recipe"] = "text"
    """`files`: one or several files. `sequence`: a FASTA file, or a sequence to type. `model`, `recipe`: a name, or a
    path in the directory of a run. The answer to a question for files is the path of the uploaded file or directory."""
    hint: str = ""
    default: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    """For the kind `choice`: the text of each answer, the default first. An answer may be several words."""
    needed: bool = False
    keys: tuple[str, ...] = ()
    """Recipe keys and options. An error message with one of them is shown beside this question."""
    most: int = 1_000_000
    """The maximum of a number; the minimum is 1."""


@dataclass(frozen=True)
class Kind:
    """A kind of job."""

    title: str
    text: str
    commands: tuple[str, ...]
    fields: tuple[Field, ...]
    checked: bool = False
    """Whether the first command has the option `--dry-run`, whose output the user sees before the job starts."""

    def words(self, values: Mapping[str, str], job: str) -> list[list[str]]:
        """Return the words of each command, from the answers by name and the directory of the job."""
        choices = {f"{{{each.name}}}" for each in self.fields if each.kind == "choice"}
        answers = {**values, "job": job}

        def filled(word: str) -> list[str]:
            key, equals, value = word.rpartition("=")
            used = [
                next(filter(None, map(answers.get, name.split("|"))), "") for name in re.findall(r"{([^}]+)}", value)
            ]
            if not all(used):
                return []
            pieces = iter(used)
            text = re.sub(r"{[^}]+}", lambda _: next(pieces), value)
            if word in choices:
                return text.split()
            # A value of a recipe key is YAML. As JSON, a text such as `1e5`, `no` or `a: b` stays a text.
            if equals and not re.fullmatch(r"(?!(?i:null|true|false|yes|no|on|off)$)[a-zA-Z_][\w./-]*", text):
                text = json.dumps(text, ensure_ascii=False)
            return [f"{key}={text}" if equals else text]

        return [[part for word in line.split() for part in filled(word)] for line in self.commands]


def _kinds() -> dict[str, Kind]:
    raw: dict[str, Any] = YAML(typ="safe").load(Path(__file__).with_name("forms.yaml"))
    kinds = {}
    for name, kind in raw.items():
        fields = [Field(**{"default": next(iter(each.get("choices", [""]))), **each}) for each in kind.pop("fields")]
        kinds[name] = Kind(**kind, fields=tuple(fields))
    return kinds


KINDS = _kinds()
"""All kinds of jobs, by the name in their address."""
