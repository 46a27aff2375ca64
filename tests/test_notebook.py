"""The example notebook, run from its first cell to its last in an empty directory."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parent.parent / "examples" / "variants.ipynb"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, landscape_cache: Path) -> tuple[Path, list[str], list[str]]:
    """The directory, what each code cell printed, and the kinds of its pictures."""
    import nbformat  # here, since it takes 4 s and each worker of pytest imports all files
    from nbclient import NotebookClient

    directory = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESMSHARD_CACHE", str(landscape_cache))
        NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(directory)}}).execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    printed = ["".join(o.text for o in each if o.get("name") == "stdout") for each in outputs]
    shown = [kind for each in outputs for o in each if o.output_type == "display_data" for kind in o.data]
    return directory, printed, shown


def test_it_is_saved_without_results() -> None:
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 5
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert notebook.metadata.kernelspec.name == "python3"


def test_embeddings_are_better_than_no_labels(done: tuple[Path, list[str], list[str]]) -> None:
    assert done[1][0] == "3CS1_A: 192 residues, 1934 measured variants, 1733 of them single\n"
    zero_shot = float(re.search(r"Spearman with the measurements: (.*)", done[1][1])[1])
    assert abs(zero_shot) < 0.3, "the starter has hardly learned what is natural; the text says so"
    by_position = [float(value) for value in re.search(r"\[(.*)\]", done[1][2])[1].split()]
    assert len(by_position) == 3
    assert min(by_position) > 0.4


def test_fine_tuning_is_better_than_no_labels(done: tuple[Path, list[str], list[str]]) -> None:
    directory, printed, _ = done
    run = directory / "runs" / "notebook"
    assert printed[3].endswith(f"Run({str(run)!r}) done\n")
    metrics = json.loads((run / "evaluation.json").read_text())["metrics"]
    fine_tuned, zero_shot = (metrics[name]["Spearman"] for name in ("fine-tuned", "zero-shot"))
    assert fine_tuned["low"] > 0.4 > zero_shot["high"]
    told = f"{fine_tuned['value']:.2f} [{fine_tuned['low']:.2f}, {fine_tuned['high']:.2f}]"
    assert printed[4].splitlines()[0].split(None, 1) == ["fine-tuned", told]
    assert printed[4].count("\n") == len(metrics)


def test_it_ends_with_a_list_and_a_picture(done: tuple[Path, list[str], list[str]]) -> None:
    directory, printed, shown = done
    lines = [line.split() for line in printed[5].splitlines()]
    assert len(lines) == 10
    assert len({name for name, _ in lines}) == 10
    values = [float(value) for _, value in lines]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0.5, "the best of those measured are near 1"
    assert shown.count("image/png") == 1
    assert [path.name for path in directory.iterdir()] == ["runs"]
