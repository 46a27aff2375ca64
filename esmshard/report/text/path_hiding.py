"""The removal of directories from the texts of a page, since pages are shared."""

import re
from dataclasses import replace
from pathlib import Path

from esmshard.report.text.page_parts import Figure, PageTable, Section

_ABSOLUTE = re.compile(r"(?<![\w.:/~<&])~?/(?:[^\s/\"'<>,;:()]+/)+(?=[^\s/])")
"""The directories of a path in a sentence, up to its last part. URLs do not match."""


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
        return _ABSOLUTE.sub("", text)

    def section(self, section: Section) -> Section:
        """Shorten the paths in all texts of a section. Drawings hold only numbers, names and units."""
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

    def _table(self, table: PageTable) -> PageTable:
        return PageTable(
            [self.text(cell) for cell in table.head],
            [[self.text(cell) for cell in row] for row in table.rows],
            self.text(table.caption),
        )
