"""The removal of directories from the texts of a page, since pages are shared."""

from pathlib import Path

from esmshard.files import ABSOLUTE


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
