"""A page is shared, so it names files and does not say where they lie."""

import re
from dataclasses import replace
from pathlib import Path

from esmshard.report.page import Figure, Section, Table

_ABSOLUTE = re.compile(r"(?<![\w.:/~<&])~?/(?:[^\s/\"'<>,;:()]+/)+(?=[^\s/])")
"""Directories of a path that stands in a sentence, up to its last part. Not those of a URL."""


class Places:
    """Takes directories out of texts.

    Args:
        run: directory of the run; what lies in it is named from the directory above.
        paths: of other files that are known to be named: theirs may hold blanks, of which a sentence gives no sign.
    """

    def __init__(self, run: Path, *paths: str) -> None:
        above = {str(place.parent).rstrip("/") + "/" for place in (run.absolute(), run.resolve())}
        above |= {str(Path(path).parent).rstrip("/") + "/" for path in paths}
        self._known = sorted(above - {"/"}, key=len, reverse=True)

    def text(self, text: str) -> str:
        """A text with each path shortened to its name."""
        for known in self._known:
            text = text.replace(known, "")
        return _ABSOLUTE.sub("", text)

    def section(self, section: Section) -> Section:
        """The same of all texts of a part of the page; a drawing has none but numbers, names and units."""
        return replace(
            section,
            texts=[self.text(text) for text in section.texts],
            figures=[self._figure(figure) for figure in section.figures],
            tables=[self._table(table) for table in section.tables],
            code=self.text(section.code),
            missing=self.text(section.missing),
        )

    def _figure(self, figure: Figure) -> Figure:
        return replace(figure, caption=self.text(figure.caption))

    def _table(self, table: Table) -> Table:
        return Table(
            [self.text(cell) for cell in table.head],
            [[self.text(cell) for cell in row] for row in table.rows],
            self.text(table.caption),
        )
