"""`embed verify` finds every fault of a product; what a product answers; status, merge, and reuse of a damaged one."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch
from embed_runs import content
from model_files import TINY, fair_esm, write_transformers
from safetensors.numpy import load_file, save_file

import esmshard
from esmshard.embed.engines import compute_part, make_embedder
from esmshard.embed.formats.format_registry import FORMATS
from esmshard.embed.job.embed_job import embed
from esmshard.embed.job.embed_request import request
from esmshard.embed.job.embed_status import merge, status, verify
from esmshard.embed.store import part_plan
from esmshard.embed.store.embedding_store import EmbeddingStore
from esmshard.embed.store.part_plan import PlanRequest, digest
from esmshard.errors import InputError, UsageError
from esmshard.vocab import RESIDUES, encode

RECORDS, PART, MUTANTS = 40, 150, 1000
NAMES = ("mean_1", "mean_2", "residue_1", "residue_2")
Rng = np.random.Generator


class Given(NamedTuple):
    model: Path
    fasta: Path
    sequences: dict[str, str]
    product: Path


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    """Two layers, means and residues of 40 records; `r30` fails: tryptophan is beyond fp32."""
    directory = tmp_path_factory.mktemp("given")
    reference = fair_esm(TINY)
    rng = np.random.default_rng(4)
    letters = [letter for letter in RESIDUES if letter not in "WXBZUO"]
    lengths = rng.integers(8, 30, RECORDS)
    lengths[10:20] = 21  # rows of one length can be swapped
    sequences = {f"r{k}": "".join(rng.choice(letters, length)) for k, length in enumerate(lengths)}
    for k in (9, 23, 31):
        sequences[f"r{k}"] = sequences["r3"]
    sequences["r30"] = sequences["r30"][:5] + "W" + sequences["r30"][6:]
    with torch.no_grad():
        reference.embed_tokens.weight[encode("W")[1]] = 3e38
        reference.lm_head.weight = reference.embed_tokens.weight
    model = write_transformers(directory / "model", reference, TINY)
    fasta = directory / "x.fasta"
    fasta.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in sequences.items()))
    return Given(model, fasta, sequences, make(model, fasta, directory / "product"))


def make(model: Path, fasta: Path, out: Path, **options: Any) -> Path:
    asked = request(str(model), out, pools=["mean", "residue"], layers=[1, 2], **options)
    embed(asked, fasta, part_tokens=PART)
    return out


# --- Mutations. Each changes a copy of the product, and says what the sentence must name.


class Mutant:
    """A copy of a product that is about to be damaged."""

    def __init__(self, path: Path, rng: Rng) -> None:
        self.path, self.rng = path, rng
        self.manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
        self.parts = [path / "parts" / note["file"] for note in self.manifest["parts"]]

    def part(self) -> int:
        return int(self.rng.integers(len(self.parts)))

    def one(self, choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def rows(self, part: int) -> list[int]:
        """Of a part, those that have values."""
        failed = {row for row, _ in self.manifest["parts"][part]["failed"]}
        return [row for row in range(self.manifest["parts"][part]["rows"]) if row not in failed]

    def lengths(self, part: int) -> npt.NDArray[np.int64]:
        index = self.path / "index"
        bounds = np.load(index / "bounds.npy")
        return np.load(index / "lengths.npy")[np.load(index / "first.npy")[bounds[part] : bounds[part + 1]]]

    def spans(self, part: int, name: str) -> list[tuple[int, int]]:
        """Bytes of each row of an output in the file of a part, by the header of the file and the lengths."""
        data = self.parts[part].read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        at = begin + json.loads(data[8:begin])[name]["data_offsets"][0]
        lengths = self.lengths(part)
        size = 4 * TINY.dim * (lengths if name.startswith("residue") else np.ones_like(lengths))
        ends = at + np.cumsum(size)
        return list(zip((ends - size).tolist(), ends.tolist(), strict=True))

    def write(self, part: int, data: bytes) -> None:
        self.parts[part].write_bytes(data)

    def tensors(self, part: int) -> dict[str, npt.NDArray[Any]]:
        return {name: array.copy() for name, array in load_file(self.parts[part]).items()}

    def sign(self) -> None:
        """Write the manifest as if it had been so from the beginning; it cannot be told by its own hash then."""
        self.manifest["sha256"] = digest(self.manifest)
        (self.path / "manifest.json").write_text(json.dumps(self.manifest))


def same_length(mutant: Mutant) -> tuple[int, int, int]:
    """Two rows of a part whose arrays have one shape."""
    while True:
        part = mutant.part()
        rows, lengths = mutant.rows(part), mutant.lengths(part)
        pairs = [(a, b) for a in rows for b in rows if a < b and lengths[a] == lengths[b]]
        if pairs:
            return part, *mutant.one(pairs)


def row_dropped(mutant: Mutant) -> str:
    """The rest moves up; the file gets shorter."""
    part, name = mutant.part(), mutant.one(NAMES)
    begin, end = mutant.one(mutant.spans(part, name))
    data = mutant.parts[part].read_bytes()
    mutant.write(part, data[:begin] + data[end:])
    return mutant.parts[part].name


def row_dropped_padded(mutant: Mutant) -> str:
    """The rest moves up; the last row comes twice or is zero, so that the file stays as long."""
    part, name = mutant.part(), mutant.one(NAMES)
    spans = mutant.spans(part, name)
    row = mutant.one(mutant.rows(part)[:-1])
    (begin, end), last = spans[row], spans[-1][1]
    data = mutant.parts[part].read_bytes()
    fill = mutant.one([bytes(end - begin), data[last - (end - begin) : last]])
    mutant.write(part, data[:begin] + data[end:last] + fill + data[last:])
    return f"{mutant.parts[part].name}: {name} of row {row} "


def row_doubled(mutant: Mutant) -> str:
    """A row lies in another one's place, too."""
    part, a, b = same_length(mutant)
    name = mutant.one(NAMES)
    spans, data = mutant.spans(part, name), bytearray(mutant.parts[part].read_bytes())
    data[slice(*spans[b])] = data[slice(*spans[a])]
    mutant.write(part, data)
    return f"{mutant.parts[part].name}: {name} of row {b} "


def rows_swapped(mutant: Mutant) -> str:
    """Values alone."""
    part, a, b = same_length(mutant)
    name = mutant.one(NAMES)
    spans, data = mutant.spans(part, name), bytearray(mutant.parts[part].read_bytes())
    first, second = bytes(data[slice(*spans[a])]), bytes(data[slice(*spans[b])])
    data[slice(*spans[a])], data[slice(*spans[b])] = second, first
    mutant.write(part, data)
    return f"{mutant.parts[part].name}: {name} of row {a} "


def rows_swapped_with_marks(mutant: Mutant) -> str:
    """Values of all outputs, with or without checksums, keys and statuses."""
    part, a, b = same_length(mutant)
    tensors, marks = mutant.tensors(part), mutant.one([("crc",), ("crc", "key", "status"), ("key",)])
    begins = np.concatenate([[0], np.cumsum(mutant.lengths(part))])
    for name in (*NAMES, *marks):
        of_residues = name.startswith("residue")
        one, other = (slice(begins[k], begins[k + 1]) if of_residues else slice(k, k + 1) for k in (a, b))
        x = tensors[name]
        x[one], x[other] = x[other].copy(), x[one].copy()
    rewrite(mutant, part, tensors)
    return mutant.parts[part].name


def rewrite(mutant: Mutant, part: int, tensors: dict[str, npt.NDArray[Any]]) -> None:
    """Put arrays into the file as it is laid out."""
    data = bytearray(mutant.parts[part].read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    for name, array in tensors.items():
        start, end = header[name]["data_offsets"]
        data[begin + start : begin + end] = array.tobytes()
    assert data != mutant.parts[part].read_bytes()
    mutant.write(part, data)


def truncated(mutant: Mutant) -> str:
    part = mutant.part()
    data = mutant.parts[part].read_bytes()
    mutant.write(part, data[: int(mutant.rng.integers(len(data)))])
    return mutant.parts[part].name


def rounded(mutant: Mutant) -> str:
    """One row was fp16 or bf16 at some time; the file is fp32."""
    part, name = mutant.part(), mutant.one(NAMES)
    row = mutant.one(mutant.rows(part))
    begin, end = mutant.spans(part, name)[row]
    data = bytearray(mutant.parts[part].read_bytes())
    dtype = mutant.one([torch.float16, torch.bfloat16])
    values = torch.frombuffer(data[begin:end], dtype=torch.float32)
    data[begin:end] = values.to(dtype).float().numpy().tobytes()
    mutant.write(part, data)
    return f"{mutant.parts[part].name}: {name} of row {row} "


def other_part(mutant: Mutant) -> str:
    a, b = mutant.rng.choice(len(mutant.parts), 2, replace=False)
    shutil.copy(mutant.parts[a], mutant.parts[b])
    return mutant.parts[b].name


def half_precision(mutant: Mutant) -> str:
    part = mutant.part()
    arrays = {k: v.astype(np.float16) if v.dtype == np.float32 else v for k, v in mutant.tensors(part).items()}
    save_file(arrays, mutant.parts[part])
    return mutant.parts[part].name


def bit(mutant: Mutant) -> str:
    part = mutant.part()
    data = bytearray(mutant.parts[part].read_bytes())
    data[int(mutant.rng.integers(len(data)))] ^= 1 << int(mutant.rng.integers(8))
    mutant.write(part, data)
    return mutant.parts[part].name


def failed_row(mutant: Mutant) -> str:
    """Something stands where a failed row has nothing."""
    part = next(k for k, note in enumerate(mutant.manifest["parts"]) if note["failed"])
    row = mutant.manifest["parts"][part]["failed"][0][0]
    begin, end = mutant.spans(part, mutant.one(NAMES))[row]
    data = bytearray(mutant.parts[part].read_bytes())
    data[int(mutant.rng.integers(begin, end))] = 1
    mutant.write(part, data)
    return f"{mutant.parts[part].name}: row {row} "


def part_gone(mutant: Mutant) -> str:
    part = mutant.part()
    mutant.parts[part].unlink()
    return mutant.parts[part].name


def part_more(mutant: Mutant) -> str:
    name = f"{mutant.one(['000000-12345678', '000099-12345678', 'x'])}.safetensors"
    shutil.copy(mutant.one(mutant.parts), mutant.path / "parts" / name)
    return name


def ids(mutant: Mutant) -> str:
    path = mutant.path / "index" / "ids.txt"
    lines = path.read_text().splitlines()
    a, b = sorted(mutant.rng.choice(len(lines), 2, replace=False).tolist())
    how = mutant.one(["swapped", "doubled", "dropped", "replaced", "cut"])
    if how == "swapped":
        lines[a], lines[b] = lines[b], lines[a]
    elif how == "doubled":
        lines.insert(a, lines[a])
    elif how == "dropped":
        del lines[a]
    elif how == "replaced":
        lines[b] = lines[a]
    path.write_text("\n".join(lines) + ("\n" if how != "cut" else ""))
    return "index/ids.txt"


def index(mutant: Mutant) -> str:
    path = mutant.one(sorted((mutant.path / "index").glob("*.npy")))
    array = np.load(path)
    how = mutant.one(["number", "swapped", "shorter", "bit", "gone"])
    if how == "number":
        array.reshape(-1)[int(mutant.rng.integers(array.size))] += 1
    elif how == "swapped":
        different = np.flatnonzero((array != array[0]).reshape(len(array), -1).any(1))
        b = mutant.one(different)
        array[[0, b]] = array[[b, 0]]
    elif how == "shorter":
        array = array[:-1]
    if how == "gone":
        path.unlink()
    elif how == "bit":
        data = bytearray(path.read_bytes())
        data[int(mutant.rng.integers(len(data)))] ^= 1 << int(mutant.rng.integers(8))
        path.write_bytes(data)
    else:
        np.save(path, array)
    return f"index/{path.name}"


def manifest(mutant: Mutant) -> str:
    """A number or word of the manifest, signed anew or not."""
    known, part = mutant.manifest, mutant.part()
    note = known["parts"][part]
    how = mutant.one(["records", "unique", "spec.dtype", "spec.compute", "dim", "order", "removed", "doubled", "text"])
    signed = how != "text" and mutant.rng.random() < 0.5
    if how in ("records", "unique"):
        known[how] += mutant.one([-1, 1])
    elif how == "spec.dtype":
        known["spec"]["dtype"] = mutant.one(["fp16", "bf16"])
    elif how == "spec.compute":
        known["spec"]["compute"] = mutant.one(["fp16", "bf16"])
    elif how == "dim":
        known["spec"]["dim"] *= 2
    elif how == "order":
        other = (part + 1) % len(known["parts"])
        known["parts"][part], known["parts"][other] = known["parts"][other], note
    elif how == "removed":
        del known["parts"][part]
    elif how == "doubled":
        known["parts"].insert(part, note)
    else:
        known["source"]["path"] += "x"
    if signed:
        mutant.sign()
    else:
        (mutant.path / "manifest.json").write_text(json.dumps(known))
    return ""


def note(mutant: Mutant) -> str:
    """What the manifest says of one part, signed anew."""
    part = mutant.part()
    said = mutant.manifest["parts"][part]
    how = mutant.one(["compute", "dtype", "part", "file", "rows", "bytes", "marks", "failed"])
    if how in ("compute", "dtype"):
        said[how] = mutant.one(["fp16", "bf16"])
    elif how in ("part", "rows", "bytes"):
        said[how] += 1
    elif how == "file":
        said[how] = mutant.manifest["parts"][part - 1]["file"]
    elif how == "marks":
        said[how] = mutant.manifest["parts"][part - 1]["marks"]
    else:
        said[how] = [] if said[how] else [[0, "no reason"]]
    mutant.sign()
    return f"part {part}:" if how in ("compute", "dtype", "part", "rows", "bytes", "failed") else f"parts/{part:06d}-"


def failed_table(mutant: Mutant) -> str:
    path = mutant.path / "failed.tsv"
    text = path.read_text()
    new = mutant.one(["", text.replace("r30", "r31"), text + "r1\t9\tno reason\n"])
    path.write_text(new) if new else path.unlink()
    return "failed.tsv"


KINDS: tuple[Callable[[Mutant], str], ...] = (
    *(row_dropped, row_dropped_padded, row_doubled, rows_swapped, rows_swapped_with_marks, truncated, rounded),
    *(other_part, half_precision, bit, bit, bit, failed_row, part_gone, part_more, ids, index, manifest, note),
    failed_table,
)


def test_every_fault_is_found(given: Given, tmp_path: Path) -> None:
    assert verify(given.product).endswith("/product: 40 records, 37 rows in 6 parts, all as they were written")
    rng = np.random.default_rng(11)
    found: Counter[str] = Counter()
    for k in range(MUTANTS):
        kind = KINDS[k % len(KINDS)]
        copy = Path(shutil.copytree(given.product, tmp_path / "copy"))
        names = kind(Mutant(copy, rng))
        with pytest.raises(InputError) as caught:
            pytest.fail(f"{kind.__name__} number {k}: {verify(copy)}")
        assert names in str(caught.value), kind.__name__
        found[kind.__name__] += 1
        shutil.rmtree(copy)
    assert found.total() == MUTANTS
    verify(given.product)


# --- What is said of a product, and what it answers


def test_status_before_while_and_after(given: Given, tmp_path: Path) -> None:
    out = tmp_path / "x"
    with pytest.raises(InputError, match=r"x: there is nothing; embed writes it$"):
        status(out)
    directory = part_plan.partial(out)
    asked = request(str(given.model), out, pools=["mean", "residue"], layers=[1, 2])
    plan = part_plan.begin(directory, PlanRequest(given.fasta, asked.spec, asked.facts, None, "cpu", PART))
    embedder = make_embedder(plan, asked.device, None)
    for part in range(2):
        compute_part(directory, plan, part, embedder, lambda rows, residues: None)
    said = status(out).splitlines()
    assert said[0] == f"{directory}: not finished"
    assert said[1].startswith(f"holds      {', '.join(NAMES)} of 40 records (37 different sequences) by ")
    rows = np.load(directory / "index" / "bounds.npy")[2]
    assert said[2] == f"parts      2 of 6; {rows} of 37 sequences"
    embed(asked, given.fasta)
    said = status(out).splitlines()
    assert said[0] == f"{out}: finished"
    assert said[2:4] == ["parts      6 of 6; 37 of 37 sequences", "failed     1, in windows 0, reused 0"]
    assert not any(line.startswith(("go on", "worker")) for line in said)


@pytest.mark.parametrize("name", [f"x.{fmt}" for fmt in FORMATS])
@pytest.mark.parametrize("several", [False, True])
def test_merge_writes_what_embed_writes(given: Given, tmp_path: Path, name: str, several: bool) -> None:
    how: dict[str, Any] = {"pools": ["mean"], "layers": [1, 2] if several else [2]}
    if several and not FORMATS[name.removeprefix("x.")].several:
        with pytest.raises(UsageError, match=r"none for residue_1|holds one output"):
            merge(given.product, tmp_path / name, None, overwrite=False)
        assert not any(tmp_path.iterdir())
        return
    for place in ("product", "direct", "merged"):
        (tmp_path / place).mkdir()
    embed(request(str(given.model), tmp_path / "product" / "x", **how), given.fasta, part_tokens=PART)
    embed(request(str(given.model), tmp_path / "direct" / name, **how), given.fasta, part_tokens=PART)
    before = content(tmp_path / "product" / "x")
    if name == "x.biotrainer-h5":
        with pytest.raises(UsageError, match=r"has no sequences, .* --reuse \S+, which computes nothing again"):
            merge(tmp_path / "product" / "x", tmp_path / "merged" / name, None, overwrite=False)
        assert not any((tmp_path / "merged").iterdir())
        return
    said = merge(tmp_path / "product" / "x", tmp_path / "merged" / name, None, overwrite=False)
    assert said == f"{tmp_path / 'merged' / name}: 39 records"
    assert content(tmp_path / "merged" / name) == content(tmp_path / "direct" / name)
    assert content(tmp_path / "product" / "x") == before
    with pytest.raises(UsageError, match="exists already"):
        merge(tmp_path / "product" / "x", tmp_path / "merged" / name, None, overwrite=False)


def test_merge_of_a_damaged_product_is_refused(given: Given, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(given.product, tmp_path / "copy"))
    names = rounded(Mutant(copy, np.random.default_rng(1)))
    with pytest.raises(InputError) as caught:
        merge(copy, tmp_path / "x.h5", None, overwrite=False)
    assert names in str(caught.value)
    assert "is computed then" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_records_are_found_by_id(given: Given, tmp_path: Path) -> None:
    embed(request(str(given.model), tmp_path / "x.h5", pools=["residue"], layers=[2]), given.fasta, part_tokens=PART)
    product = esmshard.open(given.product)
    assert list(product) == list(given.sequences)
    assert len(product) == 40
    assert "r30" in product
    assert "r40" not in product
    with h5py.File(tmp_path / "x.h5") as file:
        for name, sequence in given.sequences.items():
            if name == "r30":
                continue
            found = product[name]
            assert found.keys() == set(NAMES)
            assert found["residue_2"].shape == (len(sequence), TINY.dim)
            assert np.abs(found["residue_2"] - file[name][()]).max() < 1e-5
            for layer in (1, 2):
                assert np.abs(found[f"mean_{layer}"] - found[f"residue_{layer}"].mean(0)).max() < 1e-5
    some = product[["r23", "r3", "r0"]]
    assert some["mean_2"].shape == (3, TINY.dim)
    assert np.array_equal(some["mean_2"][0], some["mean_2"][1]), "they have one sequence"
    assert not np.array_equal(some["mean_2"][1], some["mean_2"][2])
    assert [len(values) for values in some["residue_1"]] == [len(given.sequences[name]) for name in ("r23", "r3", "r0")]
    with pytest.raises(KeyError, match="has no record 'nobody'"):
        product["nobody"]
    with pytest.raises(KeyError, match="has no record 'nobody'"):
        product[["r1", "nobody"]]
    with pytest.raises(KeyError, match=r"'r30' has no values: .* not finite"):
        product["r30"]
    assert list(product.failed) == ["r30"]


def test_reuse_of_a_damaged_product_computes_what_is_damaged(given: Given, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(given.product, tmp_path / "copy"))
    mutant = Mutant(copy, np.random.default_rng(2))
    notes = mutant.manifest["parts"]
    hurt = next(k for k in range(len(notes)) if not notes[k]["failed"] and k > 0)
    gone = next(k for k in range(len(notes)) if not notes[k]["failed"] and k > hurt)
    data = bytearray(mutant.parts[hurt].read_bytes())
    data[mutant.spans(hurt, "residue_1")[1][0] + 2] ^= 1
    mutant.write(hurt, data)
    mutant.parts[gone].unlink()
    asked = request(str(given.model), tmp_path / "x", pools=["mean", "residue"], layers=[1, 2])
    report = embed(asked, given.fasta, reuse=copy, part_tokens=PART)
    again = 1 + notes[gone]["rows"] + 1  # the failed one, too
    assert (report.reused, report.computed, report.failed) == (37 - again, again, 1)
    verify(tmp_path / "x")
    assert largest_difference(given.product, tmp_path / "x") < 1e-5


def test_reuse_of_a_product_with_a_damaged_index_mixes_nothing(given: Given, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(given.product, tmp_path / "copy"))
    keys = np.load(copy / "index" / "content.npy")
    first = np.load(copy / "index" / "first.npy").tolist()
    a, b = first.index(12), first.index(15)  # of one length
    keys[[a, b]] = keys[[b, a]]
    np.save(copy / "index" / "content.npy", keys)
    places = np.load(copy / "index" / "content_rows.npy")
    at = np.flatnonzero(np.isin(places, [a, b]))
    places[at] = places[at[::-1]]
    places[np.flatnonzero(places == 2)] = 1000
    np.save(copy / "index" / "content_rows.npy", places)
    asked = request(str(given.model), tmp_path / "x", pools=["mean", "residue"], layers=[1, 2])
    report = embed(asked, given.fasta, reuse=copy, part_tokens=PART)
    assert report.reused == 37 - 4  # these two, the one that is not found, and the failed one
    assert largest_difference(given.product, tmp_path / "x") < 1e-5


def largest_difference(one: Path, other: Path) -> float:
    products = EmbeddingStore(one), EmbeddingStore(other)
    assert list(products[0]) == list(products[1])
    names = [name for name in products[0] if name != "r30"]
    found = [product[names] for product in products]
    return max(float(np.abs(np.concatenate(found[0][name]) - np.concatenate(found[1][name])).max()) for name in NAMES)
