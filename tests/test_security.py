"""No recipe, site profile or override can make the package run code of theirs.

The linter refuses calls that run text: its rules S, and its list of banned names.
"""

import ast
from pathlib import Path

from command import in_process

import esmshard as package

EVIL = """\
task: {{name: contact}}
model: {{name: !!python/object/apply:os.system ["touch {mark}"]}}
data: {{train: !!python/object/apply:subprocess.check_call [[touch, "{mark}"]], valid: "$(touch {mark})", test: b}}
optim: {{lr: !!python/object/apply:eval ["open('{mark}', 'w').close() or 1e-3"]}}
out: !!python/object/new:subprocess.Popen [[touch, "{mark}"]]
"""


def test_tags_of_yaml_run_nothing(tmp_path: Path) -> None:
    mark, recipe = tmp_path / "ran", tmp_path / "evil.yaml"
    recipe.write_text(EVIL.format(mark=mark))
    for command in ("recipes validate", "finetune", "plan --gpus A100-40GB", "launch --target slurm"):
        result = in_process(*command.split(), recipe, cwd=tmp_path)
        assert result.returncode == 2
        assert "evil.yaml:2:" in result.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["evil.yaml"]


def test_overrides_run_nothing(tmp_path: Path) -> None:
    for value in ("$(touch ran)", "`touch ran`", "; touch ran", "!!python/object/apply:os.system [touch ran]"):
        result = in_process("finetune", "contact", f"model.name={value}", "--dry-run", cwd=tmp_path)
        assert result.returncode in (1, 2)
        assert list(tmp_path.iterdir()) == []


def test_nothing_runs_text_that_the_linter_does_not_see() -> None:
    """Its list of banned names is not read in the folders of checkpoints and ranks."""
    sources = [path.read_text(encoding="utf-8") for path in Path(package.__file__).parent.rglob("*.py")]
    names = ("torch.load", "compile", "__import__")
    trees = [ast.parse(source) for source in sources if any(name in source for name in names)]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [ast.unparse(call) for call in calls if ast.unparse(call.func) in names]
    assert found
    assert all(text.startswith("torch.load(") and "weights_only=True" in text for text in found)
