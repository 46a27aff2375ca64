"""Files that `predict` writes of every task, whatever the packs; records that fail; pictures; chains."""

import csv
import io
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from command import in_process
from matplotlib.image import imread
from model_files import SMALL, TINY, fair_esm, ours, perturb, tokenise, write_transformers
from safetensors import safe_open

from esmshard.batch import TokenBatch
from esmshard.checkpoint.consolidate import FORMAT, VERSION
from esmshard.errors import InputError, UsageError
from esmshard.io import writers
from esmshard.io.writers import TableWriter
from esmshard.model.families.esm2 import EsmConfig
from esmshard.model.finetuner import FineTuner, LanguageModelHead
from esmshard.predict import heads, pictures
from esmshard.predict.heads import columns_of, predict, rows_of
from esmshard.predict.pictures import draw_map, matplotlib_figure
from esmshard.tasks.contact import ContactSettings
from esmshard.tasks.mlm import MlmSettings
from esmshard.tasks.registry import new_task
from esmshard.tasks.residue import ResidueSettings
from esmshard.tasks.sequence import SequenceSettings
from esmshard.vocab import STANDARD

LENGTHS = {"zeta": 31, "sp|P1|N": 90, "a/b": 7, "a_b": 2, "long": 141, "one": 1, "mid": 64, "A_B": 33}
TASKS_TRIED: dict[str, tuple[Any, dict[str, Any]]] = {
    "contact": (ContactSettings(name="contact", channels=8, blocks=2), {}),
    "attention": (ContactSettings(name="contact", head="attention"), {}),
    "mlm": (MlmSettings(name="mlm"), {}),
    "states": (ResidueSettings(name="residue", hidden=8), {"classes": ["HG", "E", "-"], "counts": [5, 3, 2]}),
    "disorder": (
        ResidueSettings(name="residue", kind="number"),
        {"targets": ["value"], "mean": [0.5], "std": [2.0]},
    ),
    "values": (SequenceSettings(name="sequence"), {"targets": ["Tm", "id"], "mean": [50.0, 1.0], "std": [10.0, 0.5]}),
    "fold": (
        SequenceSettings(name="sequence", kind="class"),
        {"classes": ["alpha", "beta"], "counts": [3, 4], "records": 7},
    ),
    "terms": (
        SequenceSettings(name="sequence", kind="multilabel"),
        {"classes": ["GO:1", "GO:2", "GO:3"], "counts": [3, 4, 1], "records": 7},
    ),
}


@cache
def module(name: str, config: EsmConfig = TINY) -> FineTuner:
    settings, facts = TASKS_TRIED[name]
    torch.manual_seed(1)
    head = new_task(settings, facts).head(config)
    perturb(head, deviation=0.3)
    if not isinstance(head, LanguageModelHead):
        for parameter in head.parameters():  # new heads say nearly the same of everything
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    return FineTuner(ours(fair_esm(config), config), head).eval()


def write_model(directory: Path, name: str, config: EsmConfig = TINY) -> str:
    model = module(name, config)
    write_transformers(directory, model.trunk, config, model.head.state_dict())
    settings, facts = TASKS_TRIED[name]
    about = {"format": FORMAT, "version": VERSION, "step": 7, "facts": facts}
    about["recipe"] = {"task": settings.model_dump(mode="json")}
    (directory / "esmshard.json").write_text(json.dumps(about))
    return str(directory)


def expected(name: str, sequence: str) -> np.ndarray:
    """The array of a record: the module called with the record alone, and the formulae of docs/tasks.md."""
    batch, model = tokenise([sequence])[1], module(name)
    if name == "mlm":
        logits = model.trunk(batch, logits_at=torch.arange(1, len(sequence) + 1)).logits_PV
        return logits[:, tokenise([STANDARD])[1].tokens_T[1:-1].long()].softmax(1).detach().numpy()
    output = model(batch)[0].detach()
    if name in ("contact", "attention", "terms"):
        return output.sigmoid().numpy()
    if name in ("states", "fold"):
        return output.softmax(-1).numpy()
    if name == "disorder":
        return output.numpy()[:, 0] * 2.0 + 0.5
    return output.numpy() * np.array([10.0, 0.5]) + np.array([50.0, 1.0])


@pytest.fixture(scope="module")
def sequences() -> dict[str, str]:
    rng = np.random.default_rng(6)
    return {i: "".join(rng.choice(list(STANDARD), n)) for i, n in LENGTHS.items()}


@pytest.fixture
def fasta(tmp_path: Path, sequences: dict[str, str]) -> Path:
    path = tmp_path / "input.fasta"
    path.write_text("".join(f">{i} words\n{s}\n" for i, s in sequences.items()))
    (tmp_path / "out").mkdir()
    return path


def left(fasta: Path) -> set[str]:
    found = {str(p.relative_to(fasta.parent / "out")) for p in (fasta.parent / "out").rglob("*")}
    return found - {f"{name}.json" for name in found}


def read_csv(path: Path) -> tuple[list[str], list[list[str]]]:
    with open(path, newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    return head, rows


def record_arrays(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            return {data.attrs["original_id"]: data[()] for data in file.values()}
    if path.suffix == ".safetensors":
        with safe_open(path, "np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    group: Any = zarr.open_group(path, mode="r")
    ids, starts = group["ids"][:], group["starts_prediction"][:] if "starts_prediction" in group else None
    rows = [n if starts is None else slice(starts[n], starts[n + 1]) for n in range(len(ids))]
    return {name: np.asarray(group["prediction"][row]) for name, row in zip(ids, rows, strict=True)}


@pytest.mark.parametrize("name", TASKS_TRIED)
def test_a_record_says_the_same_in_every_pack_and_format(
    name: str, fasta: Path, sequences: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, among a few and all together, in windows of 5: the values of the module called with each record alone."""
    out, model = fasta.parent / "out", write_model(tmp_path / "model", name)
    wanted = {record_id: expected(name, sequence) for record_id, sequence in sequences.items()}
    scale = 10.0 if name == "values" else 1.0  # of its unit
    monkeypatch.setattr(heads, "WINDOW", 5)
    monkeypatch.setattr(heads, "LEAST", 1)
    packs = failing(monkeypatch, lambda batch: None)
    sizes = {1: [1] * 8, 150: [4, 1, 3], 100_000: [5, 3]}
    for tokens, ending in ((150, "npz"), (1, "h5"), (100_000, "zarr"), (150, "safetensors")):
        monkeypatch.setattr(heads, "TOKENS", tokens)
        packs.clear()
        assert predict(model, fasta, out / f"x.{ending}") == (len(LENGTHS), [])
        assert [len(pack) for pack in packs] == sizes[tokens]
        arrays = record_arrays(out / f"x.{ending}")
        assert set(arrays) == set(LENGTHS)
        for record_id, values in wanted.items():
            assert arrays[record_id].dtype == np.float32
            assert np.abs(arrays[record_id].reshape(values.shape) - values).max() <= 1e-5 * scale, record_id
    assert {path.split("/")[0] for path in left(fasta)} == {"x.npz", "x.h5", "x.zarr", "x.safetensors"}


COLUMNS = {
    "mlm": (["id", "position", "residue", "prediction"], list(STANDARD)),
    "states": (["id", "position", "residue", "prediction"], ["HG", "E", "-"]),
    "disorder": (["id", "position", "residue"], ["value"]),
    "values": (["id"], ["Tm", "id (predicted)"]),
    "fold": (["id", "prediction"], ["alpha", "beta"]),
    "terms": (["id"], ["GO:1", "GO:2", "GO:3"]),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_csv_and_parquet_have_the_same_rows(
    name: str, fasta: Path, sequences: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "GROUP_ROWS", 50)
    out, model = fasta.parent / "out", write_model(tmp_path / "model", name)
    for ending in ("csv", "parquet"):
        assert predict(model, fasta, out / f"x.{ending}")[0] == len(LENGTHS)
    keys, numbers = COLUMNS[name]
    wanted = np.concatenate([expected(name, s).reshape(-1, len(numbers)) for s in sequences.values()])
    lengths = LENGTHS if "position" in keys else dict.fromkeys(LENGTHS, 1)
    columns = {
        "id": [i for i, n in lengths.items() for _ in range(n)],
        "position": [k for n in LENGTHS.values() for k in range(1, n + 1)],
        "residue": list("".join(sequences.values())),
        "prediction": [numbers[k] for k in wanted.argmax(1)],
    }
    head, rows = read_csv(out / "x.csv")
    table, groups = pq.read_table(out / "x.parquet"), pq.ParquetFile(out / "x.parquet").metadata
    assert head == table.column_names == [*keys, *numbers]
    types = ["int32" if key == "position" else "string" for key in keys] + ["float"] * len(numbers)
    assert [str(field.type) for field in table.schema] == types
    for place, column in enumerate(table.columns):
        values = column.to_pylist()
        assert [row[place] for row in rows] == [str(v) if place < len(keys) else f"{v:.6g}" for v in values]
        if place < len(keys):
            assert values == columns[keys[place]]
        else:
            assert values == pytest.approx(wanted[:, place - len(keys)], abs=1e-4 if name == "values" else 1e-5)
    assert table.schema.metadata[b"format"] == b"esmshard-predictions"
    assert max(groups.row_group(k).num_rows for k in range(groups.num_row_groups)) <= 50


def failing(monkeypatch: pytest.MonkeyPatch, refuse: Callable[[TokenBatch], object]) -> list[list[int]]:
    """Lengths of the records of each forward pass, which first lets `refuse` raise."""
    forward, seen = FineTuner.forward, list[list[int]]()

    def wrapped(self: FineTuner, batch: TokenBatch) -> list[torch.Tensor]:
        seen.append(batch.lengths)
        refuse(batch)
        return forward(self, batch)  # type: ignore[no-any-return]

    monkeypatch.setattr(FineTuner, "forward", wrapped)
    return seen


def cuda_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n20.00 GiB.")


def host_out() -> None:
    raise MemoryError("Unable to allocate 20.0 GiB")


@pytest.mark.parametrize(
    ("name", "out_of_memory"),  # torch raises for more than an address space
    [("contact", cuda_out), ("states", host_out), ("states", lambda: torch.empty(1 << 50, dtype=torch.uint8))],
)
def test_a_record_may_fail_and_the_others_are_there(
    name: str,
    out_of_memory: Callable[[], object],
    fasta: Path,
    sequences: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records of 90 residues and more do not fit: each is tried with others, then alone, and listed."""
    model, out = write_model(tmp_path / "model", name), fasta.parent / "out" / "x.npz"
    wanted = {i: expected(name, s) for i, s in sequences.items() if len(s) < 90}
    seen = failing(monkeypatch, lambda batch: out_of_memory() if max(batch.lengths) >= 90 else None)
    records, failures = predict(model, fasta, out)
    assert (records, [failure[:2] for failure in failures]) == (6, [("sp|P1|N", 90), ("long", 141)])
    assert all([length] in seen for length in (90, 141))
    assert left(fasta) == {"x.npz", "x.npz.failed.tsv"}
    head, *rows = (line.split("\t") for line in out.with_name("x.npz.failed.tsv").read_text().splitlines())
    assert head == ["id", "length", "reason"]
    assert [row[:2] for row in rows] == [["sp|P1|N", "90"], ["long", "141"]]
    assert all("memory" in row[2] for row in rows)
    arrays = record_arrays(out)
    assert list(arrays) == list(wanted)
    assert all(np.abs(arrays[i] - values).max() <= 1e-5 for i, values in wanted.items())


def test_packs_that_do_not_fit_get_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 tokens do: of three windows of four records of 12, one is tried whole and the others by halves."""
    monkeypatch.setattr(heads, "WINDOW", 4)
    monkeypatch.setattr(heads, "LEAST", 1)
    (tmp_path / "in.fasta").write_text("".join(f">{n}\n{'MKTVLSAEGH'}\n" for n in range(12)))
    model = write_model(tmp_path / "model", "fold")
    seen = failing(monkeypatch, lambda batch: cuda_out() if sum(batch.token_counts) > 30 else None)
    assert predict(model, tmp_path / "in.fasta", tmp_path / "x.csv") == (12, [])
    assert [len(pack) for pack in seen] == [4, 1, 1, 1, 1, 2, 2, 2, 2]


def test_windows_end_before_maps_fill_the_memory() -> None:
    """64 maps of 1,024 tokens, as many as there may be of short ones, and one of a protein that is longer than all."""
    for tokens, sizes in (
        ([4096] * 130, [64, 64, 2]),  # a pair map of 1,024 tokens
        ([100] * 3000, [2048, 952]),
        ([100, 40_000 * 40_000 // 256, 40_000 * 40_000 // 256, 100], [1, 1, 1, 1]),
    ):
        assert [len(window) for window in heads.windows(np.array(tokens))] == sizes


def test_another_error_stops_the_run(fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second window; nothing of the first stays."""
    model, out = write_model(tmp_path / "model", "contact"), fasta.parent / "out"
    fasta.write_text("".join(f">{n}\n{'MKTAYIAKQR' * 2}\n" for n in range(3)))
    monkeypatch.setattr(heads, "WINDOW", 2)
    monkeypatch.setattr(pictures, "draw", lambda *_, **__: b"png")

    def broken(batch: TokenBatch) -> None:
        if len(batch) < 2:
            assert len(list(out.rglob("*.png"))) == 2
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    failing(monkeypatch, broken)
    for expected in (set(), {"maps"}):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            predict(model, fasta, out / "x.npz", png=out / "maps")
        assert left(fasta) == expected
        (out / "maps").mkdir(exist_ok=True)


def test_facts_lie_beside_the_output_and_existing_files_stay(fasta: Path, tmp_path: Path) -> None:
    model, out = write_model(tmp_path / "model", "fold"), fasta.parent / "out" / "x.parquet"
    fasta.write_text(">a\nmktayiak\n>b\nMK-TAYIAK*\n")
    predict(model, fasta, out, device="cpu")
    facts = json.loads(out.with_name("x.parquet.json").read_text())
    assert len(facts["notices"]) == 3
    assert "lower-case" in facts["notices"][0]
    assert (facts["model"], facts["input"], facts["device"]) == (Path(model).name, fasta.name, "cpu")
    assert (facts["task"]["name"], facts["records"], facts["failed"]) == ("sequence", 2, 0)
    out.unlink()
    with pytest.raises(UsageError, match=r"x\.parquet\.json: exists already"):
        predict(model, fasta, out)
    (npz := out.with_suffix(".npz")).write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        predict(model, fasta, npz)
    assert npz.read_text() == "mine"
    predict(model, fasta, npz, overwrite=True)
    assert list(record_arrays(npz)) == ["a", "b"]


def test_a_run_without_any_result_fails(fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a list of failures is refused like its output, and goes when nothing fails any more."""
    model, out = write_model(tmp_path / "model", "fold"), fasta.parent / "out" / "x.csv"
    with monkeypatch.context() as patch:
        failing(patch, lambda batch: cuda_out())
        with pytest.raises(InputError, match=r"x\.csv\.failed\.tsv"):
            predict(model, fasta, out)
    assert left(fasta) == {"x.csv.failed.tsv"}
    with pytest.raises(UsageError, match=r"x\.csv\.failed\.tsv: exists already"):
        predict(model, fasta, out)
    predict(model, fasta, out, overwrite=True)
    assert left(fasta) == {"x.csv"}


def test_the_command_counts_failures_and_strict_is_an_exit_code(tmp_path: Path) -> None:
    """A model with 1,024 learned positions takes 1,022 residues."""
    model = write_model(tmp_path / "model", "fold", SMALL["ESM-1b"])
    (tmp_path / "in.fasta").write_text(f">a\n{'MKTV' * 5}\n>b\n{'M' * 1023}\n>c\n{'G' * 1022}\n")
    for out, options, code in (("x.csv", [], 0), ("y.csv", ["--strict"], 1)):
        done = in_process("predict", model, "in.fasta", "-o", out, *options, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (code, f"{out}: 2 records; 1 failed, see {out}.failed.tsv\n")
    assert [row[0] for row in read_csv(tmp_path / "x.csv")[1]] == ["a", "c"]
    assert (tmp_path / "x.csv.failed.tsv").read_text().splitlines()[1].startswith("b\t1023\t")
    assert (tmp_path / "y.csv").read_bytes() == (tmp_path / "x.csv").read_bytes()


def test_a_picture_of_each_map(fasta: Path, tmp_path: Path) -> None:
    """Under names that any file system takes, told apart in lower case; the id itself is in the picture."""
    model, out = write_model(tmp_path / "model", "contact"), fasta.parent / "out"
    fasta.write_text("".join(f">{name}\n{'MKTAYIAKQR' * 2}\n" for name in ("sp|P1|N", "a/b", "a_b", "A_B")))
    predict(model, fasta, out / "x.npz", png=out / "maps")
    names = {"sp|P1|N": "sp_P1_N", "a/b": "a_b", "a_b": "a_b_2", "A_B": "A_B_3"}
    assert left(fasta) == {"x.npz", "maps", *(f"maps/{name}.png" for name in names.values())}
    for record_id, name in names.items():
        png = (out / "maps" / f"{name}.png").read_bytes()
        assert f"Title\0{record_id}".encode() in png
        assert imread(io.BytesIO(png)).std() > 0.05


def test_colours_are_of_probabilities_and_not_of_the_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map that reaches .5 ends in the middle of the scale. Of one longer than the picture no contact is lost."""
    middle, dark = (np.array(pictures.colours()(value)[:3]) for value in (0.5, 1.0))

    def share(probability_LL: np.ndarray, colour: np.ndarray) -> float:
        png = pictures.draw(probability_LL.astype(np.float32), "x")
        return float((np.abs(imread(io.BytesIO(png))[:, :, :3] - colour).max(-1) <= 0.01).mean())

    assert share(np.repeat([0.0, 0.5], 20)[:, None].repeat(40, axis=1), middle) > 0.2
    contact = np.zeros((95, 95))
    contact[3, 90] = 1
    monkeypatch.setattr(pictures, "SIDE", 10)
    assert share(contact, dark) > share(0 * contact, dark)


def test_refused_pictures_and_inputs_leave_nothing(fasta: Path, tmp_path: Path) -> None:
    out, fold = fasta.parent / "out", write_model(tmp_path / "fold", "fold")
    (out / "maps").mkdir()
    (out / "maps" / "mine.txt").write_text("mine")
    contact = write_model(tmp_path / "contact", "contact")
    for model, name, given, token in (
        (fold, "x.csv", {"png": out / "new"}, "--png"),
        (fold, "x.npy", {}, r"x\.npy"),
        (fold, "x.npz", {"complexes": "all"}, "--complexes all"),
        (contact, "x.npz", {"png": out / "maps"}, "maps: is not empty"),
        (contact, "x.npz", {"png": fasta}, "is a file"),
    ):
        with pytest.raises((InputError, UsageError), match=token):
            predict(model, fasta, out / name, **given)
    fasta.write_text(">a\nMKT\n>b\nM*K\n")
    with pytest.raises(InputError, match=r"input\.fasta"):
        predict(fold, fasta, out / "x.npz")
    assert left(fasta) == {"maps", "maps/mine.txt"}


def test_a_missing_package_is_said_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, out, png in (("matplotlib", "x.npz", tmp_path / "maps"), ("pyarrow", "x.parquet", None)):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UsageError, match=rf"needs {package}; pip install"):
            predict("nowhere", tmp_path / "no.fasta", tmp_path / out, png=png)
    assert list(tmp_path.iterdir()) == []


def test_models_that_cannot_predict_are_refused(fasta: Path, tmp_path: Path) -> None:
    plain = write_transformers(tmp_path / "plain", fair_esm(TINY), TINY)
    changed = Path(write_model(tmp_path / "model", "contact"))
    about = json.loads((changed / "esmshard.json").read_text())
    for model, task, token in (
        (plain, {}, "has no fine-tuned head"),
        (tmp_path / "nowhere", {}, "no such file"),
        (changed, {"blocks": 3}, "consolidate the run again"),  # a head of other tensors
        (changed, {"channels": 16}, "consolidate the run again"),  # tensors of other shapes
        (changed, {"name": "folding"}, "no installed package has"),
    ):
        recipe = {"task": task if "name" in task else about["recipe"]["task"] | task}
        (changed / "esmshard.json").write_text(json.dumps(about | {"recipe": recipe}))
        with pytest.raises(InputError, match=token):
            predict(str(model), fasta, fasta.parent / "out" / "x.npz")
        assert left(fasta) == set()


def test_residues_are_counted_in_each_chain(tmp_path: Path) -> None:
    values = np.array([[0.1], [0.2], [0.3], [0.4], [0.5]], dtype=np.float32)
    task: Any = SimpleNamespace(per_residue=True, names=["y"], one_of_names=False, settings=MlmSettings(name="mlm"))
    for chains in (True, False):
        with TableWriter(tmp_path / "x.csv", columns_of(task, chains=chains)) as writer:
            writer.add(rows_of(task, "a", values, "MK:TVL"))
            writer.add(rows_of(task, "b", values[:1], "G"))
        head, rows = read_csv(tmp_path / "x.csv")
        assert head == ["id", *(["chain"] if chains else []), "position", "residue", "y"]
        wanted = ["a11M0.1", "a12K0.2", "a21T0.3", "a22V0.4", "a23L0.5", "b11G0.1"]
        assert ["".join(row) for row in rows] == [row if chains else row[0] + row[2:] for row in wanted]


def test_a_map_shows_where_the_second_chain_begins() -> None:
    figure, settings = matplotlib_figure()
    with settings:
        axes = figure().add_subplot()
        image = draw_map(axes, np.full((90, 90), 0.5, np.float32), chains=[50, 40])
    assert axes.lines[0].get_xdata()[0] == axes.lines[1].get_ydata()[0] == 50.5
    ticks = [text.get_text() for text in axes.get_xticklabels()]
    assert ticks == ["1: 1", "10", "20", "30", "40", "2: 1", "10", "20", "30"]
    shown = np.ma.filled(image.get_array(), np.nan)
    assert np.isnan(shown[48, 49])  # neighbours of a chain
    assert shown[49, 50] == 0.5  # the last residue of the first chain and the first of the second
