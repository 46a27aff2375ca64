"""The example notebook, run from its first cell to its last in an empty directory."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parent.parent / "examples" / "variants.ipynb"


def test_it_is_saved_without_results_and_runs(tmp_path: Path) -> None:
    import nbformat  # here, since it takes 4 s and each worker of pytest imports all files
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert notebook.metadata.kernelspec.name == "python3"
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = ["".join(o.text for o in cell.outputs if o.get("name") == "stdout") for cell in code]
    shown = [kind for cell in code for o in cell.outputs if o.output_type == "display_data" for kind in o.data]

    assert printed[0] == "3CS1_A: 192 residues, 1934 measured variants, 1733 of them single\n"
    assert abs(float(re.search(r"Spearman with the measurements: (.*)", printed[1])[1])) < 0.3
    by_position = [float(value) for value in re.search(r"\[(.*)\]", printed[2])[1].split()]
    assert len(by_position) == 3
    assert min(by_position) > 0.4, "embeddings are better than no labels"
    metrics = json.loads((tmp_path / "runs" / "notebook" / "evaluation.json").read_text())["metrics"]
    fine_tuned, zero_shot = (metrics[name]["Spearman"] for name in ("fine-tuned", "zero-shot"))
    assert fine_tuned["low"] > 0.4 > zero_shot["high"]
    values = [float(line.split()[1]) for line in printed[5].splitlines()]
    assert len(values) == 10
    assert values[0] > 0.5, "the best of those measured are near 1"
    assert shown.count("image/png") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
