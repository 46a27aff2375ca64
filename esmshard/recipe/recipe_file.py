"""Functions that load, check and write recipes. This module does not import torch.

A recipe is one YAML file. `resolve` finds the file by its path or by the name of a shipped recipe. `load` reads the
file, applies `key=value` overrides, makes paths absolute, and reports all problems at once, each with line and column.

Paths in a recipe are relative to the recipe file. Only `out`, and paths in overrides, are relative to the working
directory. `sample:NAME` names sample data in the package, and a path that begins with `s3://` or `gs://` is in a
bucket. `~` and environment variables in HARMLESS, written `${VAR}`, are expanded.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from esmshard.errors import UsageError
from esmshard.io import remote
from esmshard.io.paths import is_hub_name, shared_place, shipped
from esmshard.recipe.sections import EVERY, INSIDE, Recipe, sections
from esmshard.recipe.yaml_keys import Tree, did_you_mean, read

_DATA_PATHS = ("train", "valid", "test", "labels", "mask", "complexes", "clusters", "table", "wild_type")
PATH_KEYS = (("model", "name"), *(("data", key) for key in _DATA_PATHS), ("out",))
"""The recipe keys whose values are paths. `data.tracks` is not here, because it is a mapping of several paths."""

TWO_WAYS = (("train", "steps", "epochs"), ("batch", "sequences", "global_tokens"))
"""The name of a section, and two of its keys. A recipe may set only one of the two keys."""

HARMLESS = r"HOME|USER|SCRATCH|TMPDIR|WORK|SLURM_(?!JWT)\w+"  # SLURM_JWT is a password for Slurm's server
"""A pattern for the environment variables that a recipe may read. None of them may hold a secret, because a
stranger may have written the recipe."""

SCHEMA_LINE = "# yaml-language-server: $schema="
"""The start of the first line of a recipe, which tells editors the path of the schema."""


def names() -> list[str]:
    """Return the names of the shipped recipes."""
    return sorted(p.stem for p in shipped("recipes").glob("*.yaml"))


def resolve(name: str) -> Path:
    """Return the path of a recipe. `name` is a path or a shipped recipe; another name raises `UsageError`."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if name in names():
        return shipped("recipes") / f"{name}.yaml"
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UsageError(f"{name}: no such recipe file; `esmshard recipes cp contact my.yaml` makes one")
    hint = did_you_mean(name, names())
    raise UsageError(f"{name}: neither a file nor a shipped recipe ({', '.join(names())}){hint}")


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from the file `path`, apply overrides such as `optim.lr=1e-4`, and check the recipe.

    Raises:
        UsageError: with a sentence for each problem: `recipe.yaml:4:3: optim.lrr: unknown key; did you mean 'lr'?`.
    """
    return checked(opened(path, overrides))


def opened(path: Path, overrides: Sequence[str] = ()) -> Tree:
    """Read a recipe and apply overrides, but do not check the recipe. Pass the result to `checked`."""
    tree = read(path, "a recipe", Recipe)
    for override in overrides:
        tree.override(override)
    _make_room(tree, path)
    for node, place, keys in list(_paths(tree.node)):
        is_typed = keys == ("out",) or tree.override_of(keys) is not None
        _expand(tree, node, place, keys, Path.cwd() if is_typed else path.parent)
    return tree


def _make_room(tree: Tree, path: Path) -> None:
    """Remove keys of the recipe file that contradict an override. If an override sets one of two keys in TWO_WAYS,
    remove the other key. If an override sets `data.train` to the user's own data, remove sample data and placeholders
    from `data.valid` and `data.test`, and so for `data.table` and `data.wild_type`.
    """
    for section, *keys in TWO_WAYS:
        node = tree.node.get(section)
        for key, other in (keys, keys[::-1]):
            overridden = isinstance(node, dict) and (section, key) in tree.overrides and node.get(key) is not None
            if overridden and (section, other) not in tree.overrides:
                node.pop(other, None)
    data = tree.node.get("data")
    for first, *others in (("train", "valid", "test"), ("table", "wild_type")) if isinstance(data, dict) else ():
        if ("data", first) in tree.overrides and not _is_sample(data.get(first)):
            for key in others:
                has_placeholder = _is_sample(data.get(key)) or path.parent == shipped("recipes")
                if ("data", key) not in tree.overrides and has_placeholder:
                    data.pop(key, None)


def _is_sample(value: object) -> bool:
    return str(value).startswith("sample:")


def _paths(recipe: Any) -> Iterator[tuple[Any, Any, tuple[str, ...]]]:
    """For each path in a recipe, yield the section or list with the path, the path's key or index there, and the keys
    of the path in the recipe: `("data", "train")`.
    """
    data = recipe.get("data")
    tracks = data.get("tracks") if isinstance(data, dict) else None
    names = [name for name in tracks if isinstance(name, str)] if isinstance(tracks, dict) else []
    for keys in (*PATH_KEYS, *(("data", "tracks", name) for name in names)):
        node = recipe
        for key in keys[:-1]:
            node = node.get(key) if isinstance(node, dict) else None
        value = node.get(keys[-1]) if isinstance(node, dict) else None
        if isinstance(value, str):
            yield node, keys[-1], keys
        elif keys == ("data", "table") and isinstance(value, list):
            yield from ((value, n, keys) for n, item in enumerate(value) if isinstance(item, str))


def checked(tree: Tree) -> Recipe:
    """Check the result of `opened`, and return the recipe. Raises `UsageError`, as `load` does."""
    return tree.checked(Recipe, sections())


def dump(recipe: Recipe) -> str:
    """Return a checked recipe as the text of a YAML file, with all keys."""
    out = StringIO()
    yaml = YAML()
    yaml.width = 1000
    yaml.dump(recipe.model_dump(mode="json"), out)
    return out.getvalue()


def for_others(recipe: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return a copy of a recipe for other people, who get it in `directory`. Paths in `data` and `out` lose their
    directories. The path of the model becomes relative to `directory`.
    """
    shared = deepcopy(dict(recipe))
    for section, place, keys in _paths(shared):
        value = section[place]
        if not _is_sample(value):
            is_model = keys == ("model", "name")
            section[place] = shared_place(value, directory) if is_model else Path(value).name or value
    return shared


def schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe for editors, which is also in the file `recipes/schema.json`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}


def description(name: str) -> str:
    """Return the description of a shipped recipe: the first comment line of its file after the schema line."""
    lines = (shipped("recipes") / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("#") and not line.startswith(SCHEMA_LINE)), "")


def copy_of(path: Path) -> str:
    """Return the text of a recipe file. If its first line names a schema, put the installed schema there."""
    first, newline, rest = path.read_text(encoding="utf-8").partition("\n")
    if first.startswith(SCHEMA_LINE):
        first = f"{SCHEMA_LINE}{shipped('recipes') / 'schema.json'}"
    return first + newline + rest


def differences(old: Recipe, new: Recipe) -> list[str]:
    """Return a text such as `optim.lr (0.001, was 0.002)` for each key whose value differs between two recipes."""
    a, b = dict(_leaves(old.model_dump(mode="json"))), dict(_leaves(new.model_dump(mode="json")))
    return [
        f"{key} ({b.get(key)}, was {a.get(key)})" for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)
    ]


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _expand(tree: Tree, node: Any, place: Any, keys: tuple[str, ...], base: Path) -> None:
    """Expand `${VAR}` and `~` in the path `node[place]`, and make it absolute from `base`. Names of samples and models
    do not change. Add problems to `tree`.
    """
    text, key, problem = str(node[place]), ".".join(keys), None
    for name in re.findall(r"\$\{(\w+)\}", text):
        if not re.fullmatch(HARMLESS, name):
            problem = (
                f"a recipe may not read the environment variable {name}, which may be a secret; let the shell expand "
                f"the variable, as in {key}=${name}"
            )
        elif name not in os.environ:
            problem = f"the environment variable {name} is not set"
        else:
            text = text.replace(f"${{{name}}}", os.environ[name])
    is_model, url = keys == ("model", "name"), remote.address(text)
    if url is not None and keys == ("out",):
        problem = (
            "a run needs a directory on a disk, because a bucket cannot append to files; set out=runs/NAME, and run "
            f"`aws s3 sync runs/NAME {url}` every few minutes (docs/clouds.md)"
        )
    if problem is not None:
        tree.problems.append(f"{tree.where(keys, on_value=True)}: {key}: {problem}")
        return
    is_name = (
        _is_sample(text)
        or (is_model and (re.fullmatch(r"[\w-]+", text) or is_hub_name(text)) and not (base / text).exists())
        or (keys[:-1] == ("data", "tracks") and text == INSIDE)
        or (keys == ("data", "complexes") and text == EVERY)
    )
    if url is None and not is_name:
        url = os.path.abspath(base / Path(text).expanduser())  # noqa: PTH100  # does not resolve links
    node[place] = url or text
