"""Every file format of embeddings, read with the library of its users."""

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pandas
import pytest
import torch
import zarr
from pyarrow import parquet
from safetensors import safe_open

from esmshard.errors import InputError, UsageError
from esmshard.io.array_formats import FORMATS, About, CsvFormat, Output, Row, SafetensorsFormat, ZarrFormat, suits

DIM = 24
IDS = (
    "zeta", "sp|P12345|NAME_HUMAN", "a/b", "alpha", "a_b", "10", "2", "x/y/z", "Ünï-蛋白", "..", "../up", "/etc/x",
    'q"uo\\te', "c:1-20(+)", "A_B", "long" * 40, "last",
)  # fmt: skip
LENGTHS = (31, 1, 120, 7, 7, 64, 2, 33, 18, 45, 9, 77, 5, 3, 12, 8, 6)
ATTRIBUTES = {f"note_{n}": f"{n} é" for n in range(9)} | {"model": "tiny", "residues_at_once": 1022}
"""HDF5 keeps more than eight attributes in another way than fewer."""

ATTENTIONS = Output("attentions", 6, (0, 2))
ALL = (*(Output(pool, None if pool in ("logits", "contacts") else 6) for pool in FORMATS["parquet"].pools), ATTENTIONS)
MEAN, MAX, CLS, RESIDUE, LOGITS, CONTACTS, _ = ALL
NUMBERS = {"fp32": np.float32, "fp16": np.float16}


def values_of(outputs: Sequence[Output], dtype: str, ids: Sequence[str] = IDS) -> list[dict[str, torch.Tensor]]:
    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    generator = torch.Generator().manual_seed(3)
    found = []
    for n, _ in enumerate(ids):
        length = LENGTHS[n % len(LENGTHS)]
        shapes: dict[str, tuple[int, ...]]
        shapes = {"residue": (length, DIM), "logits": (length, 33), "contacts": (length, length)}
        shapes["attentions"] = (2, length, length)
        found.append({o.name: torch.randn(shapes.get(o.pool, (DIM,)), generator=generator).to(kind) for o in outputs})
    return found


def rows_of(outputs: Sequence[Output], dtype: str, ids: Sequence[str] = IDS) -> Iterator[Row]:
    """Give bfloat16 as its bits, because numpy has no bfloat16."""
    for n, tensors in enumerate(values_of(outputs, dtype, ids)):
        arrays = {name: (t.view(torch.uint16) if dtype == "bf16" else t).numpy() for name, t in tensors.items()}
        yield Row(ids[n], LENGTHS[n % len(LENGTHS)] + 1000, arrays, "A" * n + "MKT")


def write(fmt: str, out: Path, outputs: Sequence[Output], dtype: Any = "fp32", ids: Sequence[str] = IDS) -> None:
    suits(fmt, outputs, dtype, out)
    with FORMATS[fmt](out, About(tuple(outputs), DIM, dtype, len(ids), ATTRIBUTES)) as writer:
        for row in rows_of(outputs, dtype, ids):
            writer.add(row)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


H5_KEYS = [
    "zeta", "sp|P12345|NAME_HUMAN", "a_b", "alpha", "a_b_2", "10", "2", "x_y_z", "Ünï-蛋白", "id_9", ".._up", "_etc_x",
    'q"uo\\te', "c:1-20(+)", "A_B", "long" * 40, "last",
]  # fmt: skip


def test_h5_has_a_data_set_a_record_or_a_group_an_output(tmp_path: Path) -> None:
    for outputs, dtype in [*(([output], "fp32") for output in ALL), ([MEAN], "fp16"), ([MEAN, CLS, RESIDUE], "fp32")]:
        write("h5", tmp_path / "x.h5", outputs, dtype)
        with h5py.File(tmp_path / "x.h5") as file:
            assert dict(file.attrs) == ATTRIBUTES | {"records": len(IDS), "dim": DIM}
            if len(outputs) > 1:
                assert list(file) == [output.name for output in outputs]
            for output in outputs:
                group = file[output.name] if len(outputs) > 1 else file
                assert list(group) == H5_KEYS
                assert [data.attrs["original_id"] for data in group.values()] == list(IDS)
                for data, expected in zip(group.values(), values_of(outputs, dtype), strict=True):
                    assert data.dtype == NUMBERS[dtype]
                    assert np.array_equal(data[()], expected[output.name].numpy())
        assert names(tmp_path) == ["x.h5"]
    before = (tmp_path / "x.h5").read_bytes()
    time.sleep(1.1)  # HDF5's clock has seconds
    write("h5", tmp_path / "x.h5", outputs)
    assert (tmp_path / "x.h5").read_bytes() == before


HASHES = {
    "MKTAYIAK": "e2f1d9e030c2852fc3d16b48d5a176d27b5314511ed3a649b4e5526198a42063",
    "MKV": "0248cf4a15aee2974486c1bfdc1fdde115c073e774fe5702f5169e31f1e20b12",
}
"""What `calculate_sequence_hash` of biotrainer 1.4.0 returns."""


@pytest.mark.parametrize(("output", "dtype"), [(MEAN, "fp32"), (RESIDUE, "fp16")])
def test_biotrainer_files_have_a_data_set_a_sequence(tmp_path: Path, output: Output, dtype: Any) -> None:
    """The key is the hash of the sequence, and the id is that of the first record with this sequence."""

    def write_all(name: str, rows: Sequence[tuple[str, str, Any]]) -> None:
        with FORMATS["biotrainer-h5"](tmp_path / name, About((output,), DIM, dtype, len(rows), ATTRIBUTES)) as writer:
            for record_id, residues, values in rows:
                writer.add(Row(record_id, len(residues), {output.name: values}, residues))

    long, short, other = (np.full(output.shape(n, DIM), n, NUMBERS[dtype]) for n in (8, 3, 4))
    write_all("x.h5", [("a/1", "MKTAYIAK", long), ("b", "MKV", short), ("again", "MKTAYIAK", long)])
    with h5py.File(tmp_path / "x.h5") as file:
        assert list(file) == [HASHES["MKTAYIAK"], HASHES["MKV"]]
        assert [data.attrs["original_id"] for data in file.values()] == ["a/1", "b"]
        for data, values in zip(file.values(), (long, short), strict=True):
            assert data.dtype == NUMBERS[dtype]
            assert np.array_equal(data[()], values)
        assert dict(file.attrs) == ATTRIBUTES | {"records": 3, "dim": DIM}
    with pytest.raises(InputError, match=r"record 'c' has the same sequence as an earlier record.*--format h5$"):
        write_all("y.h5", [("b", "MKV", short), ("c", "MKV", other)])
    assert names(tmp_path) == ["x.h5"]


def test_npy_is_a_matrix_and_its_ids_and_npz_has_an_array_a_record_and_output(tmp_path: Path) -> None:
    for dtype, number in NUMBERS.items():
        write("npy", tmp_path / "x.npy", [CLS], dtype)
        matrix = np.load(tmp_path / "x.npy", allow_pickle=False)
        assert matrix.dtype == number
        assert np.array_equal(matrix, np.stack([tensors["cls_6"].numpy() for tensors in values_of([CLS], dtype)]))
        assert (tmp_path / "x.ids.txt").read_text(encoding="utf-8").split("\n") == [*IDS, ""]
        assert names(tmp_path) == ["x.ids.txt", "x.npy"]
    for outputs, dtype in (((RESIDUE,), "fp16"), (ALL, "fp32")):
        write("npz", tmp_path / "x.npz", outputs, dtype)
        with np.load(tmp_path / "x.npz") as file:
            assert len(file.files) == len(IDS) * len(outputs)
            for record_id, tensors in zip(IDS, values_of(outputs, dtype), strict=True):
                for name, tensor in tensors.items():
                    stored = file[f"{name}/{record_id}" if len(outputs) > 1 else record_id]
                    assert np.array_equal(stored, tensor.numpy())


def test_csv_has_the_lines_that_pandas_writes(tmp_path: Path) -> None:
    ids = ["WT", "A24G:V30L", "a,b", "-x"]
    values = np.array([[0.1, -1e-7, 3.0], [1 / 3, 65504, 0], [-0.00012345678, 1e10, -5], [1, 2, 3]], np.float32)
    with FORMATS["csv"](tmp_path / "x.csv", About((MEAN,), 3, "fp32", 4, {})) as writer:
        for record_id, row in zip(ids, values, strict=True):
            writer.add(Row(record_id, 5, {"mean_6": row}))
    assert (tmp_path / "x.csv").read_text() == (
        ",0,1,2\n"
        "WT,0.100000001,-1.00000001e-07,3\n"
        "A24G:V30L,0.333333343,65504,0\n"
        '"a,b",-0.000123456775,1e+10,-5\n'
        "-x,1,2,3\n"
    )
    table = pandas.read_csv(tmp_path / "x.csv", index_col=0)  # as in `evolvepro/src/data.py`
    assert (list(table.index), list(table.columns)) == (ids, ["0", "1", "2"])
    assert np.array_equal(table.to_numpy().astype(np.float32), values)
    write("csv", tmp_path / "y.csv", [MEAN])
    assert list(pandas.read_csv(tmp_path / "y.csv", index_col=0).index) == list(IDS)


@pytest.mark.parametrize(("dtype", "bits"), [("fp32", np.uint32), ("fp16", np.uint16)])
def test_every_number_of_csv_is_read_back_exactly(tmp_path: Path, dtype: Any, bits: Any) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, np.iinfo(bits).max, 20_000, bits, endpoint=True).view(NUMBERS[dtype])
    numbers = numbers[np.isfinite(numbers)]
    out = tmp_path / "x.csv"
    with FORMATS["csv"](out, About((MEAN,), len(numbers), dtype, 1, {})) as writer:
        writer.add(Row("one", 5, {"mean_6": numbers}))
    line = out.read_text().splitlines()[1]
    assert np.array_equal(np.array(line.split(",")[1:], np.float64).astype(NUMBERS[dtype]), numbers)
    assert max(len(text) for text in line.split(",")) + 1 == FORMATS["csv"].number_bytes[dtype]


@pytest.mark.parametrize(("group", "dtype"), [(1, "fp32"), (9000, "fp16"), (1 << 30, "fp32")])
def test_parquet_has_a_row_a_record_and_a_column_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, group: int
) -> None:
    monkeypatch.setattr(FORMATS["parquet"], "BLOCK", group)
    write("parquet", tmp_path / "x.parquet", ALL[:-1], dtype)
    number = {"fp32": "float", "fp16": "halffloat"}[dtype]
    with parquet.ParquetFile(tmp_path / "x.parquet") as file:
        if group == 9000:
            assert 2 < file.num_row_groups < len(IDS)
        else:
            assert file.num_row_groups == (len(IDS) if group == 1 else 1)
        table = file.read()
    assert [str(column.type).replace("element", "item") for column in table.schema] == [
        "string", "int32", *[f"fixed_size_list<item: {number}>[{DIM}]"] * 3,
        f"list<item: fixed_size_list<item: {number}>[{DIM}]>", f"list<item: fixed_size_list<item: {number}>[33]>",
        f"list<item: {number}>",
    ]  # fmt: skip
    assert table.column_names == ["id", "length", "mean_6", "max_6", "cls_6", "residue_6", "logits", "contacts"]
    assert table["id"].to_pylist() == list(IDS)
    assert table["length"].to_pylist() == [length + 1000 for length in LENGTHS]
    stored = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    expected = ATTRIBUTES | {"records": len(IDS), "dim": DIM}
    assert stored == {key: str(value) for key, value in expected.items()}
    for n, tensors in enumerate(values_of(ALL[:-1], dtype)):
        for name, tensor in tensors.items():
            array = np.array(table[name][n].as_py(), NUMBERS[dtype])
            assert np.array_equal(array, tensor.flatten().numpy() if name == "contacts" else tensor.numpy())
    assert names(tmp_path) == ["x.parquet"]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_h5ad_is_read_by_anndata(tmp_path: Path, dtype: str) -> None:
    write("h5ad", tmp_path / "x.h5ad", [CLS, MEAN, MAX], dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an element without an encoding is read with a warning
        data = anndata.read_h5ad(tmp_path / "x.h5ad")
    expected = values_of([CLS, MEAN, MAX], dtype)
    for array, output in ((data.X, CLS), (data.obsm["mean_6"], MEAN), (data.obsm["max_6"], MAX)):
        assert array.dtype == NUMBERS[dtype]
        assert np.array_equal(array, np.stack([one[output.name].numpy() for one in expected]))
    assert list(data.obsm) == ["max_6", "mean_6"]
    assert list(data.obs_names) == list(IDS)
    assert list(data.obs["length"]) == [length + 1000 for length in LENGTHS]
    assert list(data.var_names) == [str(i) for i in range(DIM)]
    assert data.uns == ATTRIBUTES | {"records": len(IDS), "dim": DIM}
    data[:, :5].copy().write_h5ad(tmp_path / "again.h5ad")  # and anndata takes it for its own
    assert anndata.read_h5ad(tmp_path / "again.h5ad").shape == (len(IDS), 5)


def test_safetensors_has_a_tensor_a_record_and_output(tmp_path: Path) -> None:
    for outputs, dtype in (((RESIDUE,), "fp32"), ((CONTACTS,), "fp16"), (ALL, "fp32"), (ALL, "bf16")):
        write("safetensors", tmp_path / "tensors", outputs, dtype)
        with safe_open(tmp_path / "tensors", "pt") as file:
            expected = {
                f"{name}/{record_id}" if len(outputs) > 1 else record_id: tensor
                for record_id, tensors in zip(IDS, values_of(outputs, dtype), strict=True)
                for name, tensor in tensors.items()
            }
            assert list(file.offset_keys()) == list(expected)
            for name, tensor in expected.items():
                stored = file.get_tensor(name)
                assert stored.dtype == tensor.dtype
                assert torch.equal(stored, tensor)
            attributes = ATTRIBUTES | {"records": len(IDS), "dim": DIM}
            assert file.metadata() == {key: str(value) for key, value in attributes.items()}
        assert int.from_bytes((tmp_path / "tensors").read_bytes()[:8], "little") % 8 == 0
        assert names(tmp_path) == ["tensors"]


def test_a_header_that_safetensors_would_not_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "x.safetensors"
    with pytest.raises(UsageError, match=r"header .* no room for the names .* use --format h5"):
        suits("safetensors", [MEAN], "fp32", out, records=1_500_000, id_bytes=15_000_000)
    suits("safetensors", [MEAN], "fp32", out, records=1_000_000, id_bytes=20_000_000)
    monkeypatch.setattr(SafetensorsFormat, "header", 1400)
    with pytest.raises(UsageError, match="no room for the names of so many records"):
        write("safetensors", out, [MEAN])
    assert names(tmp_path) == []
    with pytest.raises(UsageError, match="keeps the name '__metadata__' for itself"):
        write("safetensors", out, [MEAN], ids=["__metadata__"])
    assert names(tmp_path) == []


@pytest.mark.parametrize(("block", "dtype"), [(1000, "fp32"), (9000, "fp16"), (1 << 22, "fp32")])
def test_zarr_has_an_array_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, block: int) -> None:
    monkeypatch.setattr(ZarrFormat, "BLOCK", block)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what the format does not specify
        write("zarr", tmp_path / "x.zarr", ALL, dtype)
        group: Any = zarr.open_group(tmp_path / "x.zarr", mode="r")
    assert dict(group.attrs) == ATTRIBUTES | {"records": len(IDS), "dim": DIM}
    assert list(group["ids"][:]) == list(IDS)
    assert group["lengths"][:].tolist() == [length + 1000 for length in LENGTHS]
    for n, tensors in enumerate(values_of(ALL, dtype)):
        for output in ALL:
            values, expected = group[output.name], tensors[output.name].numpy()
            assert values.dtype == NUMBERS[dtype]
            rows = n if output.pooled else slice(*group[f"starts_{output.name}"][n : n + 2])
            assert np.array_equal(values[rows].reshape(expected.shape), expected)


def test_files_are_replaced_only_when_told_and_files_of_others_never(tmp_path: Path) -> None:
    for fmt in FORMATS.keys() - {"zarr"}:
        (tmp_path / fmt).mkdir()
        out = tmp_path / fmt / f"x.{fmt}"
        FORMATS[fmt].check_place(out, overwrite=False)
        for name in PLACES[fmt]:
            out.with_name(name).write_text("mine")
            with pytest.raises(UsageError, match=f"{name}: exists already"):
                FORMATS[fmt].check_place(out, overwrite=False)
            FORMATS[fmt].check_place(out, overwrite=True)
            out.with_name(name).unlink()
        out.mkdir()
        with pytest.raises(InputError, match="is a directory"):
            FORMATS[fmt].check_place(out, overwrite=True)
    tmp_path = tmp_path / "others"
    out = tmp_path / "x.zarr"
    out.mkdir(parents=True)
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match="thesis"):
        ZarrFormat.check_place(out, overwrite=True)
    with pytest.raises(UsageError, match="thesis"):
        write("zarr", out, [MEAN])
    assert (out / "thesis.tex").read_text() == "mine"
    (tmp_path / ".old-x.csv").write_text("mine")
    write("csv", tmp_path / "x.csv", [MEAN], ids=[])
    with pytest.raises(OSError, match="directory"), CsvFormat(tmp_path / "y.csv", About((MEAN,), DIM, "fp32", 0, {})):
        (tmp_path / "y.csv" / "results").mkdir(parents=True)
    assert names(tmp_path) == [".old-x.csv", "x.csv", "x.zarr", "y.csv"]
    assert names(tmp_path / "y.csv") == ["results"]


def test_arrays_may_be_parts_of_others_that_cannot_be_written_to(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).random((50, 50), np.float32)
    whole.flags.writeable = False
    for fmt in ("h5", "npz", "parquet", "safetensors"):
        for name, values in (("part", whole[3:20, 3:20]), ("copy", whole[3:20, 3:20].copy())):
            with FORMATS[fmt](tmp_path / f"{name}.{fmt}", About((CONTACTS,), DIM, "fp32", 1, {})) as writer:
                writer.add(Row("one", 17, {"contacts": values}))
        assert (tmp_path / f"part.{fmt}").read_bytes() == (tmp_path / f"copy.{fmt}").read_bytes()


class Broken(Exception):
    pass


PLACES = {
    "h5": ["x.h5"], "npy": ["x.ids.txt", "x.npy"], "csv": ["x.csv"], "parquet": ["x.parquet"], "h5ad": ["x.h5ad"],
    "safetensors": ["x.safetensors"], "npz": ["x.npz"], "zarr": ["x.zarr"],
    "biotrainer-h5": ["x.biotrainer-h5"],
}  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS)
def test_an_error_leaves_what_was_there_and_nothing_else(tmp_path: Path, fmt: str) -> None:
    out = tmp_path / f"x.{fmt}"
    about = About((MEAN,), DIM, "fp32", len(IDS), ATTRIBUTES)

    def interrupted(rows: int, error: type[Exception] | None = Broken) -> None:
        with FORMATS[fmt](out, about) as writer:
            for row in rows_of([MEAN], "fp32", IDS[:rows]):
                writer.add(row)
            if error is not None:
                raise error

    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    for rows in (0, 3, len(IDS)):
        with pytest.raises(Broken):
            interrupted(rows)
    with pytest.raises(AssertionError, match="8 rows came"):
        interrupted(8, error=None)
    assert names(tmp_path) == []
    for ids in ([], IDS[:2]):
        write(fmt, out, [MEAN], ids=ids)
    before = content()
    with pytest.raises(Broken):
        interrupted(3)
    assert content() == before
    write(fmt, out, [MEAN])
    assert content() != before
    assert names(tmp_path) == PLACES[fmt]


def test_what_a_format_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[str, list[Output], Any, str]] = [
        ("tsv", [MEAN], "fp32", "no format 'tsv'"),
        ("npy", [RESIDUE], "fp32", "not residue_6"),
        ("csv", [MEAN, CLS], "fp32", "csv can store only one output"),
        ("npy", [MEAN], "bf16", "not bf16"),
        ("biotrainer-h5", [LOGITS], "fp32", "not logits"),
        ("parquet", [ATTENTIONS], "fp32", "--format h5 or npz or zarr"),
    ]
    for fmt, outputs, dtype, token in cases:
        with pytest.raises(UsageError, match=token):
            suits(fmt, outputs, dtype, tmp_path / "x")
    for fmt, module, extra in (("h5ad", "anndata", "h5ad"), ("parquet", "pyarrow", "tables")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UsageError, match=rf"needs {module}; pip install 'esmshard\[{extra}\]'"):
            suits(fmt, [MEAN], "fp32", tmp_path / "x")
