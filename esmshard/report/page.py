"""`esmshard report RUN`: one HTML page on a run, for people. It needs no network, script or server."""

from collections.abc import Iterator
from pathlib import Path

from esmshard import __version__
from esmshard.errors import InputError, UsageError, reading, writing
from esmshard.io.paths import ABSOLUTE, replace_text
from esmshard.recipe import recipe_file
from esmshard.report import run_page, sweep_page, variant_page
from esmshard.report.files import is_cross_validated, is_sweep, json_object, read_run, read_sweep, read_variants

SENTENCES = ("notices", "left_out", "leakage", "verdict", "message")
"""The keys of a run's files that hold sentences for the user."""


def report(run: Path, out: Path | None = None) -> Path:
    """Write a page about a run, whether it is done, running, preempted or failed. The file appears complete.

    Args:
        run: the directory of the run, of a cross-validated run of variants, or of a sweep.
        out: the file to write; by default `report.html` in that directory. An existing file is replaced.

    Returns:
        The file.

    Raises:
        InputError: if there is no run, a file of it is damaged, or a package is missing.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise InputError("a report needs jinja2 and matplotlib; pip install 'esmshard[plots]'") from None
    names = "evaluation.json, status.json, versions.json, metrics.jsonl, summary.json, sweep.json"
    files, states = f"{run}: one of its files ({names})", list[str]()
    with reading(files, "remove it, or make it anew with `esmshard evaluate MODEL DATA -o DIR`, to see the rest"):
        if is_sweep(run):
            swept = read_sweep(run)
            about, facts = sweep_page.about(swept), sweep_page.facts(swept)
            lead = sweep_page.states(swept)
            sections = [part(swept) for part in sweep_page.SECTIONS]
        elif is_cross_validated(run):
            several = read_variants(run)
            about, facts = variant_page.about(several), variant_page.facts(several)
            lead = [variant_page.verdict(several)]
            sections = [section(several) for section in variant_page.SECTIONS]
        else:
            found = read_run(run)
            about, facts = run_page.about(found), run_page.facts(found)
            lead, states = run_page.achieved(found), [run_page.state(found)]
            sections = [part(found) for part in run_page.SECTIONS]
    hidden = Places(run, *_named(run))
    source = (Path(__file__).parent / "templates" / "report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=hidden.shown
    )
    page = environment.from_string(source).render(
        title=run.resolve().name,
        about=about,
        lead=lead,
        states=states,
        facts=facts,
        sections=sections,
        version=__version__,
    )
    out = out or run / "report.html"
    if not out.parent.is_dir():
        raise InputError(f"{out}: there is no directory {out.parent}; make it first")
    with writing(out, "make room, or choose another place with -o FILE"):
        replace_text(out, page)
    return out


def _named(run: Path) -> Iterator[str]:
    """Yield the paths that the files of a run name."""
    for name in ("versions.json", "evaluation.json", "summary.json"):
        found = json_object(run / name) or {}
        yield from _paths(found)
    try:
        yield from _paths(recipe_file.load(run / "recipe.yaml").model_dump())
    except UsageError:  # a cross-validation has no such file, or another version wrote it
        pass


def _paths(found: object) -> Iterator[str]:
    if isinstance(found, str) and found.startswith("/"):
        yield found
    elif isinstance(found, dict | list | tuple):
        # A sentence may begin with a path, and is no path itself.
        for part in [one for key, one in found.items() if key not in SENTENCES] if isinstance(found, dict) else found:
            yield from _paths(part)


class Places:
    """The directories to remove from texts.

    Args:
        run: the directory of the run. Its files are named from the directory above it.
        paths: other known paths. They may contain blanks, so a sentence does not show where they end.
    """

    def __init__(self, run: Path, *paths: str) -> None:
        above = {str(place.parent).rstrip("/") + "/" for place in (run.absolute(), run.resolve())}
        above |= {str(Path(path).parent).rstrip("/") + "/" for path in paths}
        self._known = sorted(above - {"/"}, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Shorten each path in a text to its name."""
        for known in self._known:
            text = text.replace(known, "")
        return ABSOLUTE.sub("", text)

    def shown(self, value: object) -> object:
        """Return what a page shows of a value. Drawings, which are marked as safe, hold no paths."""
        return self.text(value) if type(value) is str else value
