"""How `make docs` turns the Markdown of the repository into HTML. The build reads no network.

The source directory is the whole repository, so that a link such as `../data/README.md` means the same file in the HTML
as on a code host; what is no page (recipes, notebooks) becomes a download.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs" / "_ext"), str(ROOT)]

from sphinx.application import Sphinx  # noqa: E402

import esmshard  # noqa: E402

project = "esmshard"
author = "the esmshard authors"
project_copyright = "MIT licence"
version = release = esmshard.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "from_source"]
root_doc = "docs/index"
_PAGES = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "data", "benchmarks", "deploy"}
exclude_patterns = sorted(path.name for path in ROOT.iterdir() if path.name not in _PAGES)
exclude_patterns += ["docs/_ext", "docs/_static"]

myst_heading_anchors = 4
myst_links_external_new_tab = False
highlight_language = "text"  # a block without a language is a command line, or a file
smartquotes = False  # it makes one dash of the two of an option
default_role = "code"  # docstrings write names in single backticks
nitpick_ignore_regex = [("py:.*", ".*")]  # types in signatures are numpy's and torch's too; their pages are not fetched
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"esmshard {version}"
html_static_path = ["_static"]
html_css_files = ["width.css"]
html_copy_source = False
html_show_sphinx = False


def setup(app: Sphinx) -> None:
    """Read pages from the whole repository, also for `sphinx-build docs OUT`."""
    app.srcdir = type(app.srcdir)(ROOT)
