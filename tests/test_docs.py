"""What the documentation, and the messages of the package, say of commands, recipe keys, files and errors is true."""

import ast
import importlib.util
import itertools
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import typer
from pydantic import BaseModel, TypeAdapter
from ruamel.yaml import YAML

from esmshard.cli import app
from esmshard.cluster.site import Site
from esmshard.recipe.sections import Recipe
from esmshard.recipe.sweep_file import SweepSettings
from esmshard.tasks.registry import registered

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*GUIDES, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "data/README", "benchmarks/README"))]
if not all(page.is_file() for page in PAGES):
    pytest.skip("needs the whole repository, whose pages these tests read", allow_module_level=True)
ENDINGS = {"conf", "csv", "fasta", "npz", "safetensors", "tsv"}
"""What makes `train.csv` a file and no key of a recipe."""
OF_A_MODEL = {"contacts", "config", "device", "embed", "esm", "names", "predict", "score", "task"}
"""Attributes of a model in Python, as `model.config`."""
OF_OTHERS = {"docs/performance.md", "docs/data_standardization.md"}
"""Pages of torchtitan and biotrainer."""
FENCE = r"^( *)```"
"""How a fenced block begins; in a list it is indented."""


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of fenced blocks."""
    for found in re.finditer(rf"{FENCE}(\S*)[^\n]*\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL):
        yield found[2], dedent(found[3])


def _inline(text: str) -> list[str]:
    """Inline code, of which a line may end within."""
    text = re.sub(rf"{FENCE}.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [re.sub(r"\s+", " ", found) for found in re.findall(r"`([^`]+)`", text)]


def _commands(text: str) -> Iterator[list[str]]:
    """Words behind `esmshard` of each command, without comments."""
    lines = _inline(text)
    for language, block in _blocks(text):
        if language in ("", "sh", "bash", "text", "console"):
            lines += block.replace("\\\n", " ").splitlines()
    for line in lines:  # `-n esmshard` is an environment of conda, and `test` a command of the image
        if re.search(r"docker run .* esmshard test\b", line):
            continue
        for found in re.finditer(r"(?<![\w./-])(?<!-n )esmshard (?=[a-z-])([^#|;&>`]*)", line):
            try:
                yield shlex.split(found[1])
            except ValueError:
                yield found[1].split()


@cache
def _tree() -> Any:
    return typer.main.get_command(app.app)


def _wrong_with(words: list[str]) -> str | None:
    """Why a command line cannot be typed, or None. What stands behind `--` is of the command that `launch` is given."""
    command, words = _tree(), list(words)
    if words[:1] == ["launch"] and "--" in words:
        end = words.index("--")
        inner = next((word for word in words[1:end] if word in command.commands), None)
        if inner is None:
            return "has -- without a command before it"
        return _wrong_with(words[:end]) or _wrong_with([inner, *words[end + 1 :]])
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        word = words.pop(0)
        if word not in command.commands:
            return f"there is no command {word}"
        command = command.commands[word]
    known = {"-h", "--help", *(name for p in command.params for name in (*p.opts, *p.secondary_opts))}
    for before, word in itertools.pairwise(["", *words]):
        option = re.match(r"\[?(--?[a-z][a-z0-9-]*)", word)
        if option and option[1] not in known:
            return f"has no option {option[1]}"
        key = re.match(r"([a-z_]+(?:\.[a-z_]+)*)=", word)
        if key and key[1] not in _keys() and before != "--track":
            return f"there is no key {key[1]}"
    return None


def _below(model: type[BaseModel], prefix: str) -> frozenset[str]:
    """Dotted keys of settings and of their sections."""
    found = {prefix + name for name in model.model_fields}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _below(field.annotation, f"{prefix}{name}.")
    return frozenset(found)


@cache
def _keys() -> frozenset[str]:
    """Dotted keys of recipes of all tasks."""
    return _below(Recipe, "").union(*(_below(section, "task.") for section in registered().settings.values()))


def _wrong(text: str) -> list[tuple[str, str]]:
    return [(" ".join(words), why) for words in _commands(text) if (why := _wrong_with(words))]


def test_commands_can_be_typed():
    assert {page.name: wrong for page in GUIDES if (wrong := _wrong(page.read_text()))} == {}
    lines = [line.strip() for line in app.WELCOME.splitlines() if line.startswith("  ")]
    assert _wrong("\n".join(f"`{line}`" for line in [*lines, *app.EXAMPLES.splitlines()] if line)) == []
    examples = {words[0] for line in app.EXAMPLES.splitlines() for words in _commands(f"`{line}`")}
    assert examples == {*_tree().commands} - {"recipes", "embeddings"}
    bad = "Use `esmshard fintune x`.\n```\nesmshard embed m x.fasta -o y --pol mean   # a comment --no\n```\n"
    bad += "```\nesmshard finetune contact \\\n  optim.lrr=1 | tee --append log\n```\n"
    assert [why for _, why in _wrong(bad)] == [
        "there is no command fintune",
        "has no option --pol",
        "there is no key optim.lrr",
    ]


def test_keys_and_recipes_of_pages_are_valid():
    known = _keys() | _below(Site, "")
    sections = {key.partition(".")[0] for key in known if "." in key}
    for page in GUIDES:
        named = {
            found[0]
            for code in _inline(page.read_text())
            if (found := re.match(r"([a-z]+)\.([a-z_]+)(?=$|[=:, ])", code))
            and found[1] in sections
            and found[2] not in ENDINGS
            and not (found[1] == "model" and found[2] in OF_A_MODEL)
        }
        assert named - known == set(), page
        for language, block in _blocks(page.read_text()):
            if language != "yaml" or "apiVersion:" in block:
                continue
            for part in re.split(r"^(?=\w)", block, flags=re.MULTILINE):  # a key may come again, as another example
                for key, value in (YAML(typ="safe").load(part) or {}).items():
                    model = next((one for one in (Recipe, SweepSettings) if key in one.model_fields), Site)
                    assert key in model.model_fields, f"{page}: {key} is no section of a recipe, sweep or site profile"
                    TypeAdapter(model.model_fields[key].rebuild_annotation()).validate_python(value)


def _slugs(page: Path) -> set[str]:
    """Anchors of the headings, as code hosts make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            there = page if not path else page.parent / path
            assert there.is_file(), f"{page}: {target}"
            assert not anchor or there.suffix != ".md" or anchor in _slugs(there), f"{page}: {target}"
    for file in [*GUIDES, *(ROOT / "esmshard").rglob("*.py"), *(ROOT / "recipes").glob("*.yaml")]:
        for name in set(re.findall(r"(?<![\w/])docs/[\w-]+\.md", file.read_text())) - OF_OTHERS:
            assert (ROOT / name).is_file(), f"{file}: {name}"
    index = (ROOT / "docs" / "index.md").read_text().partition("## All pages")[2]
    listed = re.findall(r"^- \[[^]]+\]\(([\w-]+\.md)\)", index, re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in GUIDES[1:] if page.name != "index.md")


def _strings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string of a module but docstrings; a NUL where a value is put in."""
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


EVERY = [(path, line, text) for path in sorted((ROOT / "esmshard").rglob("*.py")) for line, text in _strings(path)]


def _is_said(sentence: str) -> bool:
    """Whether the parts of a sentence around `...` come in one text of the package, in this order."""
    parts = [re.escape(part.strip()) for part in sentence.split("...") if part.strip()]
    pattern = re.compile(r"[\s\S]*".join(parts))
    return any(pattern.search(text) for *_, text in EVERY)


def test_errors_are_quoted_as_they_are_said():
    quoted = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert len(quoted) >= 20
    assert [sentence for sentence in quoted if not _is_said(sentence)] == []
    assert not _is_said("the ranks ... have quarrelled")


def test_generated_pages_follow_the_source():
    spec = importlib.util.spec_from_file_location("from_source", ROOT / "docs" / "_ext" / "from_source.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    keys, commands = made.recipe_keys(), made.commands()
    assert set(re.findall(r"^#+ (\S+)$", keys, re.MULTILINE)) == {key for key in _keys() if key != "task.name"}
    clip = (
        "### optim.clip\n\na number, above 0 and at most 1000000000; default `1.0`\n\nThe maximum norm of the gradient"
    )
    assert clip in keys
    assert "### checkpoint.async_save\n\n`auto` or `true` or `false`; default `auto`" in keys
    assert "### slurm.grace\n\nan integer, at least 10 and at most 65535; default `180`" in made.site_keys()
    assert {"## esmshard finetune", "## esmshard recipes cp"} <= set(commands.splitlines())
    rows = [line for line in commands.splitlines() if line.startswith("|")]
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {4}  # two cells, and the ends


# What messages advise can be done: every recipe key and option that a string of the source names is there.

FOREIGN = {
    # of Slurm
    *("--bind", "--container-env", "--container-image", "--container-mounts", "--container-workdir", "--cpu-bind"),
    *("--cpus-per-task", "--gres", "--gpus-per-task", "--input", "--kill-on-bad-exit", "--mail-type", "--mem"),
    *("--mpi", "--no-container-mount-home", "--no-kill", "--ntasks", "--ntasks-per-node", "--requeue", "--signal"),
    "--wait",
    # of containers
    *("--cpus", "--device", "--ipc", "--memory", "--nv", "--pwd", "--shm-size", "--ulimit"),
    # of pip
    *("--dest", "--extra-index-url", "--force-reinstall", "--hash", "--ignore-installed", "--implementation"),
    *("--index-url", "--no-build-isolation", "--no-deps", "--only-binary", "--python-version", "--quiet"),
    *("--requirement", "--upgrade", "--wheel-dir", "--yes"),
    # of torchrun
    *("--local-addr", "--max-restarts", "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-conf"),
    *("--rdzv-endpoint", "--rdzv-id"),
    # of ray, env, mmseqs, nvidia-smi and ps
    *("--head", "--chdir", "--cov-mode", "--min-seq-id", "--query-compute-apps", "--query-gpu", "--sort", "--status"),
}
"""Options of other programs that the source calls or names."""


def _options(command: Any) -> set[str]:
    """Options of a command and of the commands in it."""
    inner = [_options(one) for one in getattr(command, "commands", {}).values()]
    return {name for p in command.params for name in (*p.opts, *p.secondary_opts)}.union(*inner)


def _named_in_strings(pattern: str) -> dict[str, str]:
    """Each match of the first group of a pattern in a string of the source, with a place where it stands."""
    return {match[1]: f"{path}:{line}" for path, line, text in EVERY for match in re.finditer(pattern, text)}


def test_keys_and_options_of_messages_exist() -> None:
    known = _keys() | _below(Site, "")
    top = "|".join(sorted({key.split(".")[0] for key in _keys() if "." in key}))
    files = r"(?!\w*\.(?:safetensors|pt|json|bin|fasta|npz|csv|py|yaml|html|index|kubernetes)\b)"
    keys = _named_in_strings(rf"(?<![\w./{{-]){files}((?:{top})\.[a-z_]+(?:\.[a-z_]+)*)(?![\w(/-])")
    assert {"data.target", "adapt.method", "task.kind"} <= keys.keys()
    assert {k: v for k, v in keys.items() if not any(one.startswith(k) for one in known)} == {}
    settable = _named_in_strings(r"\bset ([a-z]+(?:[._][a-z]+)+|[a-z]+(?==| to '|: ))")
    assert {k: v for k, v in settable.items() if k not in known} == {}
    options = _named_in_strings(r"(?<![\w-])(--[a-z][a-z-]*[a-z])(?![\w.-])")
    assert {"--overwrite", "--resume"} <= options.keys()
    assert {k: v for k, v in options.items() if k not in _options(_tree()) | {"--help"} | FOREIGN} == {}
