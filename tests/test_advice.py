"""What messages advise can be done: every recipe key and option that a string of the source names is there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import click
import typer.main
from pydantic import BaseModel

import esmshard
from esmshard.cli.app import app
from esmshard.cluster.site import Site
from esmshard.recipe.sections import Recipe
from esmshard.tasks.registry import registered

SOURCE = Path(esmshard.__file__).parent
OF_SLURM = """bind container-env container-image container-mounts container-workdir cpu-bind cpus-per-task gres
    gpus-per-task input kill-on-bad-exit mail-type mem mpi no-container-mount-home no-kill ntasks ntasks-per-node
    requeue signal wait"""
OF_CONTAINERS = "cpus device ipc memory nv pwd shm-size ulimit"
OF_PIP = """dest extra-index-url force-reinstall hash ignore-installed implementation index-url no-build-isolation
    no-deps only-binary python-version quiet requirement upgrade wheel-dir yes"""
OF_TORCHRUN = "local-addr max-restarts nnodes nproc-per-node rdzv-backend rdzv-conf rdzv-endpoint rdzv-id"
# Of ray, env, mmseqs, nvidia-smi and ps.
OF_OTHERS = "head chdir cov-mode min-seq-id query-compute-apps query-gpu sort status"
FOREIGN = {f"--{name}" for text in (OF_SLURM, OF_CONTAINERS, OF_PIP, OF_TORCHRUN, OF_OTHERS) for name in text.split()}
"""Options of other programs that the source calls or names."""


def sections(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Every dotted key below a section, and the section that it is in."""
    for name, field in model.model_fields.items():
        yield name, model
        parts = [field.annotation, *get_args(field.annotation)]
        for inner in [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]:
            for key, section in sections(inner):
                yield f"{name}.{key}", section


RECIPE_KEYS = {key for key, _ in sections(Recipe)} | {
    f"task.{key}" for section in registered().settings.values() for key in section.model_fields
}
KEYS = RECIPE_KEYS | {key for key, _ in sections(Site)}
TOP = "|".join(sorted({key.split(".")[0] for key in RECIPE_KEYS if "." in key}))


def commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from commands(inner)


OPTIONS = {
    option
    for command in commands(typer.main.get_command(app))
    for parameter in command.params
    for option in (*parameter.opts, *parameter.secondary_opts)
} | {"--help"}


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string of a module but docstrings; what an f-string puts in is a space."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(id(node.value))  # a docstring, of a module, function, class or constant
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            parts = [str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


EVERY = [(path, line, text) for path in sorted(SOURCE.rglob("*.py")) for line, text in strings(path)]


def said(pattern: str) -> dict[str, list[str]]:
    """Where each match of the first group of a pattern stands."""
    found: dict[str, list[str]] = {}
    for path, line, text in EVERY:
        for match in re.finditer(pattern, text):
            found.setdefault(match[1], []).append(f"{path.relative_to(SOURCE)}:{line}: {text.strip()[:100]}")
    return found


def unknown(found: dict[str, list[str]], known: set[str]) -> dict[str, Any]:
    return {name: places[:3] for name, places in found.items() if name not in known}


def test_the_walk_finds_what_is_there() -> None:
    assert len(EVERY) > 1000
    assert {"data.target", "adapt.method", "task.kind"} <= said(rf"\b((?:{TOP})\.[a-z][a-z_.]*[a-z])").keys()
    assert {"--overwrite", "--resume"} <= said(r"(?<![\w-])(--[a-z][a-z-]*[a-z])").keys()


def test_recipe_keys() -> None:
    files = r"(?!\w*\.(?:safetensors|pt|json|bin|fasta|npz|csv|py|yaml|html|index|kubernetes)\b)"
    found = said(rf"(?<![\w./{{-]){files}((?:{TOP})\.[a-z_]+(?:\.[a-z_]+)*)(?![\w(/-])")
    starts = {key for key in found if any(known.startswith(key) for known in KEYS)}
    assert unknown(found, KEYS | starts) == {}


def test_options() -> None:
    assert unknown(said(r"(?<![\w-])(--[a-z][a-z-]*[a-z])(?![\w.-])"), OPTIONS | FOREIGN) == {}


def test_what_is_to_be_set() -> None:
    key = r"[a-z]+(?:[._][a-z]+)+|[a-z]+(?==| to '|: )"
    assert unknown(said(rf"\bset ({key})"), KEYS) == {}
