"""What pages of the documentation take from the package when they are built: contents, recipe keys, commands.

A page says where by a comment, `<!-- from source: recipe keys -->`, which readers of the plain Markdown do not see.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from esmshard.cli import app as cli
from esmshard.cluster import site
from esmshard.recipe import recipe_file

_LINK = r"\[(?P<text>[^]]+)\]\((?P<target>[^)#:]+\.md)\)"
_PYTHON = {
    "Fine-tuning": (("autofunction", "esmshard.finetune"), ("autoclass", "esmshard.Run")),
    "Models": (
        ("autofunction", "esmshard.load"),
        ("autoclass", "esmshard.Model"),
        ("autoclass", "esmshard.SequenceEmbedder"),
    ),
    "Embeddings on disk": (("autoclass", "esmshard.embed.parts.EmbeddingStore"),),
    "Parts": (
        ("autofunction", "esmshard.read_fasta"),
        ("autofunction", "esmshard.encode"),
        ("autofunction", "esmshard.pack"),
        ("autoclass", "esmshard.TokenBatch"),
        ("autofunction", "esmshard.load_model"),
        ("autofunction", "esmshard.predict_contacts"),
        ("autofunction", "esmshard.build"),
        ("autoclass", "esmshard.Trunk"),
        ("autoclass", "esmshard.ModelConfig"),
    ),
    "Training loops": (
        ("autofunction", "esmshard.read_weights"),
        ("autofunction", "esmshard.world"),
        ("autoclass", "esmshard.Layout"),
        ("autofunction", "esmshard.shard"),
        ("autofunction", "esmshard.materialise"),
        ("autofunction", "esmshard.state_tensors"),
        ("autofunction", "esmshard.write_checkpoint"),
        ("autofunction", "esmshard.load_checkpoint"),
        ("autofunction", "esmshard.newest_checkpoint"),
        ("autofunction", "esmshard.step_of"),
        ("autofunction", "esmshard.write_transformers"),
    ),
    "Errors": (
        ("autoexception", "esmshard.InputError"),
        ("autoexception", "esmshard.UsageError"),
        ("autoexception", "esmshard.RunFailed"),
    ),
}
"""The public names by what they are for; `esmshard.open` is the class EmbeddingStore."""
_CHILDREN = {
    "benchmarks/README": ["METHOD", "results/*"],
    "data/README": ["starter/model/README", "demo/model/README"],
}
"""Pages that are reached through another one than the table of contents."""


def contents(text: str) -> str:
    """The sidebar: a hidden toctree for each heading of the index page, of the list items that begin with a link."""
    trees = []
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        entries = [
            f"{link['text']} <{link['target'].removesuffix('.md')}>"
            for link in re.finditer(rf"^- {_LINK}", section, re.MULTILINE)
        ]
        if entries:
            trees.append(_toctree(entries, caption=title))
    return "\n".join(trees)


def recipe_keys() -> str:
    """Every key of a recipe as Markdown."""
    return _all_keys(recipe_file.schema())


def site_keys() -> str:
    """Every key of a site profile as Markdown."""
    return _all_keys(site.Site.model_json_schema())


def _all_keys(schema: dict[str, Any]) -> str:
    """The keys of a JSON schema, section by section."""
    parts = []
    for name, key in schema["properties"].items():
        if "oneOf" in key:
            parts.append(f"## {name}\n\n{_words(key['description'])}\n")
            for task, reference in key["discriminator"]["mapping"].items():
                section = _named(schema, reference)
                parts += [f"### {name}, where `name: {task}`\n\n{_words(section['description'])}\n"]
                keys = {k: v for k, v in section["properties"].items() if k != "name"}
                parts += _keys(keys, section.get("required", ()), f"{name}.", "####")
        elif "$ref" in key:
            section = _named(schema, key["$ref"])
            parts.append(f"## {name}\n\n{_words(section['description'])}\n")
            of_section = section["properties"].items()
            plain = {inner: one for inner, one in of_section if "$ref" not in one}
            parts += _keys(plain, section.get("required", ()), f"{name}.", "###")
            for inner, one in of_section:  # sections inside a section
                if "$ref" in one:
                    within = _named(schema, one["$ref"])
                    parts.append(f"### {name}.{inner}\n\n{_words(within['description'])}\n")
                    parts += _keys(within["properties"], within.get("required", ()), f"{name}.{inner}.", "####")
        else:
            parts += _keys({name: key}, schema.get("required", ()), "", "##")
    return "\n".join(parts)


def commands() -> str:
    """Every command with its arguments and options as Markdown, as `--help` has them."""
    return "\n".join(_command(name, command) for name, command in _all_commands())


def python() -> str:
    """The public names of the package, from their docstrings."""
    parts = []
    for title, names in _PYTHON.items():
        parts += [f"## {title}", "", "```{eval-rst}"]
        for directive, name in names:
            parts += [f".. {directive}:: {name}", *([] if directive == "autofunction" else ["   :members:"]), ""]
        parts += ["```", ""]
    return "\n".join(parts)


def _all_commands() -> Iterator[tuple[str, Any]]:
    def below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        if hasattr(command, "commands"):
            for word, inner in command.commands.items():
                yield from below(f"{name} {word}", inner)
        elif not command.hidden:
            yield name, command

    yield from below("esmshard", typer.main.get_command(cli.app))


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    shape = " ".join([name, *("[OPTIONS]" for _ in options[:1]), *map(_argument, arguments)])
    rows = [f"| `{_bar(_argument(p))}` | {_cell(p.help or '')} |" for p in arguments]
    rows += [f"| {_bar(_option(p))} | {_cell(p.help or '')}{_default(p)} |" for p in options]
    table = ["", "| | |", "|---|---|", *rows] if rows else []
    said = re.sub(r"\s+", " ", command.help or "")
    return "\n".join([f"## {name}", "", said, "", "```text", shape, "```", *table, ""])


def _argument(parameter: Any) -> str:
    word = parameter.metavar or parameter.name.upper() + ("..." if parameter.nargs != 1 else "")
    return word if parameter.required or word.startswith("[") else f"[{word}]"


def _option(parameter: Any) -> str:
    annotation = parameter.type_descriptor.annotation
    choices = "|".join(get_args(annotation)) if get_origin(annotation) is Literal else ""
    value = "" if parameter.is_flag else f" {parameter.metavar or choices or parameter.name.upper()}"
    names = [f"`{name}{value}`" for name in parameter.opts]
    return ", ".join(names + [f"`{name}`" for name in parameter.secondary_opts])


def _default(parameter: Any) -> str:
    if parameter.required:
        return " Required."
    if parameter.is_flag or not parameter.show_default or parameter.default in (None, "", (), []):
        return ""
    return f" Default: `{parameter.default}`."


def _bar(code: str) -> str:
    """Inline code in a Markdown table, where a bar ends the cell even in code."""
    return code.replace("|", "\\|")


def _cell(text: str) -> str:
    """Plain text in a Markdown table."""
    return re.sub(r"([|*_<\[])", r"\\\1", re.sub(r"\s+", " ", text))


def _named(schema: dict[str, Any], reference: str) -> dict[str, Any]:
    found: dict[str, Any] = schema["$defs"][reference.rpartition("/")[2]]
    return found


def _keys(keys: dict[str, Any], required: Any, prefix: str, level: str) -> Iterator[str]:
    for name, key in keys.items():
        default = "required" if name in required else f"default `{_written(key.get('default'))}`"
        if name not in required and key.get("default") in (None, [], {}):
            default = "optional"
        yield f"{level} {prefix}{name}\n\n{_kind(key)}; {default}\n\n{_words(key.get('description', ''))}\n"


def _written(value: Any) -> str:
    """A value as a recipe has it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def _kind(key: dict[str, Any]) -> str:
    """What values a key may have, in words: `full` or `head`; an integer, at least 1."""
    if "anyOf" in key:
        return " or ".join(_kind(one) for one in key["anyOf"] if one.get("type") != "null")
    if "enum" in key:
        *others, last = (f"`{value}`" for value in key["enum"])
        return f"{', '.join(others)} or {last}" if others else last
    if "const" in key:
        return f"`{key['const']}`"
    if key["type"] == "array":
        if "prefixItems" in key:
            kinds = [_kind(one) for one in key["prefixItems"]]
            return f"a list of {len(kinds)} values, each {kinds[0]}"
        return f"a list of values, each {_kind(key['items'])}"
    if key.get("additionalProperties") is True:
        return "names, each with any value"
    if key["type"] == "object":
        return f"names, each with a value: {_kind(key['additionalProperties'])}"
    bounds = " and ".join(f"{word} {key[bound]}" for bound, word in _BOUNDS.items() if bound in key)
    return _TYPES[key["type"]] + (f", {bounds}" if bounds else "")


_TYPES = {"string": "text", "integer": "an integer", "number": "a number", "boolean": "`true` or `false`"}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def _words(docstring: str) -> str:
    """A docstring as Markdown; a page that it names becomes a link to that page."""
    text = re.sub(r"\s+", " ", docstring)
    text = re.sub(r"(?<!`)\b((?:docs|data)/[\w/]+\.md)", r"[\1](../\1)", text)
    return re.sub(r"\[(?=[^]]*\](?!\())", r"\\[", text)


def _toctree(entries: list[str], caption: str | None = None) -> str:
    options = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *entries, "```", ""])


_MADE = {"recipe keys": recipe_keys, "site keys": site_keys, "commands": commands, "python": python}


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    text = source[0]
    if docname == app.config.root_doc:
        text += contents(text)
    if docname in _CHILDREN:
        text += _toctree(_CHILDREN[docname])
    if docname.startswith("benchmarks/results/"):  # their scripts leave out a level of headings
        text = re.sub(r"^###", "##", text, flags=re.MULTILINE)
    # A function as the replacement, because backslashes in what was made are meant.
    source[0] = re.sub(r"<!-- from source: ([\w ]+) -->", lambda found: _MADE[found[1]](), text)


def _made_pages(app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Pages to be read again although their own text is as it was."""
    return [name for name in env.found_docs if "<!-- from source:" in env.doc2path(name).read_text(encoding="utf-8")]


def _attribute(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """An attribute's docstring is a sentence. Napoleon takes what stands before its first colon for a type."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "\\ ")  # nothing, in reStructuredText; it looks at the first line only


def _first_page(target: str, app: Sphinx, exception: Exception | None) -> None:
    """`index.html` at the top of the output, which leads to the table of contents."""
    if exception is None and app.builder.format == "html":
        page = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}">'
        (Path(app.outdir) / "index.html").write_text(f'{page}<a href="{target}">esmshard</a>\n', encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("env-get-outdated", _made_pages)
    app.connect("autodoc-process-docstring", _attribute, priority=400)  # before napoleon, at 500
    app.connect("build-finished", partial(_first_page, posixpath.join("docs", "index.html")))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
