"""The layout of the package: few modules in a folder, two levels, unique names, and a map of all folders."""

import ast
from collections import defaultdict
from pathlib import Path

import esmshard

ROOT = Path(esmshard.__file__).parent
MOST = 12
AT_THE_TOP = {"batch.py", "errors.py", "files.py", "progress.py", "shipped.py", "spreadsheet.py", "vocab.py"}
OWN = {"__init__.py", "__main__.py"}

MODULES = [path.relative_to(ROOT) for path in sorted(ROOT.rglob("*.py")) if "_shipped" not in path.parts]
FOLDERS = sorted({path.parent for path in MODULES} - {Path()})


def sentence(folder: Path) -> str:
    """The docstring of a folder's `__init__.py`, which holds nothing else."""
    (only,) = ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8")).body
    assert isinstance(only, ast.Expr)
    assert isinstance(only.value, ast.Constant)
    return str(only.value.value)


def test_a_folder_has_at_most_twelve_modules() -> None:
    count: dict[str, int] = defaultdict(int)
    for path in MODULES:
        count[str(path.parent)] += path.name not in OWN
    assert len(count) > 30
    assert {folder: n for folder, n in count.items() if n > MOST} == {}


def test_folders_have_at_most_two_levels() -> None:
    assert [str(folder) for folder in FOLDERS if len(folder.parts) > 2] == []
    assert {len(folder.parts) for folder in FOLDERS} == {1, 2}


def test_the_top_of_the_package_holds_a_handful() -> None:
    assert {path.name for path in MODULES if len(path.parts) == 1} - OWN == AT_THE_TOP


def test_a_file_name_occurs_once() -> None:
    places = defaultdict(list)
    for path in MODULES:
        if path.name not in OWN:
            places[path.name].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_a_folder_says_in_one_sentence_what_it_holds() -> None:
    for folder in FOLDERS:
        said = sentence(folder)
        assert said.endswith("."), folder
        assert "\n" not in said, folder
        assert ". " not in said, folder


def test_the_map_for_contributors_has_one_line_for_each_folder() -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = (part for part in text.split("```\n") if part.startswith("api/"))
    lines = dict(line.split("/ ", 1) for line in block.splitlines())
    assert {folder: said.strip() for folder, said in lines.items()} == {str(f): sentence(f) for f in FOLDERS}


def test_a_public_class_name_occurs_once() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
