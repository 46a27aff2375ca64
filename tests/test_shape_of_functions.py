"""Functions of the package are short, and share no state through `nonlocal`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import esmshard

PACKAGE = Path(esmshard.__file__).parent
MOST_LINES = 80

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> dict[Path, str]:
    """The text of each module of the package, by its path inside it."""
    return {path.relative_to(PACKAGE): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def is_command_line(path: Path) -> bool:
    """Whether a module declares commands: their options, with help for each, make long signatures."""
    return path == Path("cli.py") or path.parts[0] == "cli"


def long_functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and length of functions that are too long, docstring and decorators included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            length = (node.end_lineno or first) - first + 1
            if length > MOST_LINES:
                yield node.name, length


def nonlocals(text: str) -> list[int]:
    """Lines of `nonlocal` statements."""
    return [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Nonlocal)]


def test_no_function_is_long() -> None:
    found = [
        f"{path}: {name} has {length} lines"
        for path, text in sources().items()
        if not is_command_line(path)
        for name, length in long_functions(text)
    ]
    assert not found, f"cut these along what they do, none over {MOST_LINES} lines: {found}"


def test_no_closure_shares_state() -> None:
    found = [f"{path}:{line}" for path, text in sources().items() for line in nonlocals(text)]
    assert not found, f"keep the state of these in a small dataclass: {found}"


def test_what_is_looked_for_is_found() -> None:
    body = "    x = 1\n" * (MOST_LINES - 1)
    assert not list(long_functions(f"def f():\n{body}"))
    assert list(long_functions(f"class A:\n    @one\n    async def f():\n{body.replace('    ', ' ' * 8)}")) == [
        ("f", 81)
    ]
    assert nonlocals("def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2\n") == [4]
    assert {Path("__init__.py"), Path("data/__init__.py")} < sources().keys()
    assert [is_command_line(Path(name)) for name in ("cli.py", "cli/data.py", "data/cli.py")] == [True, True, False]
