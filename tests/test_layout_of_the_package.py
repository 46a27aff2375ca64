"""The layout of the package: few modules in a folder, two levels, unique names, and a map of all folders.

The families of models have a third level, `model/families/NAME`.
"""

import ast
from collections import defaultdict
from pathlib import Path

import esmshard

ROOT = Path(esmshard.__file__).parent
MOST = 12
AT_THE_TOP = {
    "batch.py",
    "devices.py",
    "errors.py",
    "files.py",
    "joined_chains.py",
    "progress.py",
    "remote.py",
    "shipped.py",
    "spreadsheet.py",
    "vocab.py",
}
OWN = {"__init__.py", "__main__.py"}

MODULES = [path.relative_to(ROOT) for path in sorted(ROOT.rglob("*.py")) if "_shipped" not in path.parts]
FOLDERS = sorted({path.parent for path in MODULES} - {Path()})
FAMILIES = Path("model", "families")


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
    assert [str(folder) for folder in FOLDERS if len(folder.parts) > 2 and folder.parent != FAMILIES] == []
    assert {len(folder.parts) for folder in FOLDERS} == {1, 2, 3}


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
    assert {folder: said.strip() for folder, said in lines.items()} == {
        str(folder): sentence(folder) for folder in FOLDERS if folder.parent != FAMILIES
    }


def test_a_public_class_name_occurs_once() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_only_the_registry_and_a_family_itself_import_modules_of_the_family() -> None:
    """And the registry imports one module of each: its record."""
    names = {folder.name for folder in FOLDERS if folder.parent == FAMILIES}
    assert {"esm2", "esmc"} <= names
    found: dict[str, set[str]] = defaultdict(set)
    for path in MODULES:
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                family = module.removeprefix("esmshard.model.families.").split(".")[0]
                if module.startswith("esmshard.model.families.") and family in names and path.parent.name != family:
                    found[str(path)].add(module)
    assert found == {str(FAMILIES / "family_registry.py"): {f"esmshard.model.families.{name}" for name in names}}
