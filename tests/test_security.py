"""No recipe, site profile or model file can make the package run code of theirs."""

import ast
from pathlib import Path

import pytest
from command import esmshard

import esmshard as package

SOURCE = Path(package.__file__).parent

EVIL = """\
task: {{name: contact}}
model: {{name: !!python/object/apply:os.system ["touch {mark}"]}}
data: {{train: !!python/object/apply:subprocess.check_call [[touch, "{mark}"]], valid: "$(touch {mark})", test: b}}
optim: {{lr: !!python/object/apply:eval ["open('{mark}', 'w').close() or 1e-3"]}}
out: !!python/object/new:subprocess.Popen [[touch, "{mark}"]]
"""


@pytest.mark.parametrize(
    "command",
    [("recipes", "validate"), ("finetune",), ("plan", "--gpus", "A100-40GB"), ("launch", "--target", "slurm")],
)
def test_tags_of_yaml_run_nothing(command: tuple[str, ...], tmp_path: Path) -> None:
    mark, recipe = tmp_path / "ran", tmp_path / "evil.yaml"
    recipe.write_text(EVIL.format(mark=mark))
    result = esmshard(*command, recipe, cwd=tmp_path)
    assert result.returncode == 2
    assert "evil.yaml:2:" in result.stderr
    assert "Traceback" not in result.stderr
    assert not mark.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["evil.yaml"]


@pytest.mark.parametrize(
    "value", ["$(touch ran)", "`touch ran`", "; touch ran", "!!python/object/apply:os.system [touch ran]"]
)
def test_overrides_run_nothing(value: str, tmp_path: Path) -> None:
    result = esmshard("finetune", "contact", f"model.name={value}", "--dry-run", cwd=tmp_path)
    assert result.returncode in (1, 2)
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def _calls(tree: ast.AST) -> list[tuple[ast.Call, str]]:
    return [(node, ast.unparse(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _wrong(call: ast.Call, name: str) -> bool:
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads"):
        return True
    if name == "torch.load":
        return options.get("weights_only") != "True"
    return options.get("shell") not in (None, "False")


def test_no_part_of_the_package_runs_text() -> None:
    looked, wrong = 0, []
    for path in SOURCE.rglob("*.py"):
        for call, name in _calls(ast.parse(path.read_text(encoding="utf-8"))):
            looked += 1
            if _wrong(call, name):
                wrong.append(f"{path.relative_to(SOURCE)}:{call.lineno}: {ast.unparse(call)}")
    assert looked > 3_000
    assert wrong == []


@pytest.mark.parametrize(
    "text", ["eval(x)", "os.system(x)", "torch.load(p)", "subprocess.run(x, shell=True)", "pickle.load(f)"]
)
def test_what_is_looked_for_is_found(text: str) -> None:
    assert [_wrong(call, name) for call, name in _calls(ast.parse(text))] == [True]
