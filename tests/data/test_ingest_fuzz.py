"""Odd FASTA files, compared with a slow reader that reads the letters one by one."""

import gzip
import hashlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from esmshard.errors import InputError
from esmshard.io import sequences as fasta_blocks
from esmshard.io import store as ingestion
from esmshard.io.sequences import read_fasta
from esmshard.io.store import OnDuplicate, ingest
from esmshard.io.symbols import Edits, Rules
from esmshard.vocab import decode

Kept = tuple[str, str, str]
"""Id, header, sequence."""

UNREADABLE = {": not text (byte ", ": cannot be read to its end (", ": holds no record"}


class Wrong(Exception):
    """The message after the path."""


# The reader to compare with.


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    line, number, before = "", 1, ""
    for letter in text:
        if letter == "\n" and before == "\r":
            pass
        elif letter in "\r\n":
            yield number, line
            line, number = "", number + 1
        else:
            line += letter
        before = letter
    yield number, line


def records_of(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, header, letters) of each record."""
    records: list[tuple[int, str, list[str]]] = []
    for number, line in lines_of(text):
        if line.startswith(">"):
            records.append((number, line[1:], []))
        elif records:
            records[-1][2].append(line)
        elif line.strip(" \t\v\f"):
            raise Wrong(f":{number}: text before the first '>'")
    if not records:
        raise Wrong(": holds no record")
    yield from ((number, header, "".join(lines)) for number, header, lines in records)


def printable(name: str) -> str:
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    return text if len(name) <= 60 and len(text) <= 60 else text[:57] + "..."


def residues_of(letters: str, rules: Rules) -> tuple[str | None, list[str]]:
    """Return the residues (`?` is a mask; None if the record is left out) and the changes."""
    letters, sequence, kinds, foreign = "".join(c for c in letters if c not in " \t\v\f"), "", [0] * 5, ""
    if letters.endswith("*"):
        letters, kinds[0] = letters[:-1], 1
    for position, written in enumerate(letters, 1):
        letter = written
        if rules.a3m and letter in "abcdefghijklmnopqrstuvwxyz.":
            kinds[1] = 1
            continue
        if letter in "abcdefghijklmnopqrstuvwxyz":
            letter, kinds[1] = letter.upper(), 1
        if letter in "-." and not rules.keep_gaps:
            kinds[2] = 1
            continue
        if letter == "J":
            letter, kinds[3] = "X", 1
        elif letter not in "ACDEFGHIKLMNPQRSTVWYXBUZO" + "-." * rules.keep_gaps:
            letter, kinds[4] = "?", 1
            foreign = foreign or f" has '{printable(written)}' at position {position}, which is not a residue"
        sequence += letter
    if rules.on_unknown == "drop" and (foreign or not sequence):
        return None, ["a sequence with symbols that are no residues, or without any, was left out"]
    if not sequence:
        raise Wrong(" has no residues")
    if rules.on_unknown == "error" and foreign:
        raise Wrong(foreign)
    lower = "insertions were removed" if rules.a3m else "lower-case letters were read as upper case"
    names = ["a '*' at the end was removed", lower, "gaps were removed", "J (Leu or Ile) was read as X"]
    names.append("symbols that are no residues were read as <mask>")
    return sequence, [name for name, happened in zip(names, kinds, strict=True) if happened]


def cut(name: str, header: str, sequence: str, rules: Rules, kinds: list[str]) -> list[tuple[str, str, str]]:
    length, most = len(sequence), rules.max_length or 1 << 30
    if rules.long == "full" or length <= most:
        return [(name, header, sequence)]
    if rules.long == "error":
        raise Wrong(f" has {length} residues, over {most}; raise")
    doing = {"skip": "left out", "crop": "cropped", "window": "cut into windows"}[rules.long]
    kinds.append(f"a sequence over {most} residues was {doing}")
    if rules.long == "skip":
        return []
    if rules.long == "crop":
        draw = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        first = draw % (length - most + 1)
        return [(name, f"{header} residues={first + 1}-{first + most}", sequence[first : first + most])]
    count, after, found = (length + most - 1) // most, header.lstrip(" \t\v\f")[len(name) :], []
    for k in range(count):
        first = k * (length - most) // (count - 1)
        new = f"{name}/{first + 1}-{first + most}"
        found.append((new, new + after, sequence[first : first + most]))
    return found


def expected(text: str, rules: Rules) -> tuple[list[Kept], list[tuple[str, str]], str]:
    """Return the records, (kind, id) of each edit, and the error of the record after them, if any."""
    kept: list[Kept] = []
    edits: list[tuple[str, str]] = []
    try:
        for line, written, letters in records_of(text):
            header = written
            words = header.replace("\t", " ").replace("\v", " ").replace("\f", " ").split(" ")
            name = next((word for word in words if word), "")
            if not name:
                name = header = f"seqnum{line - 1:09d}"
            try:
                sequence, kinds = residues_of(letters, rules)
                if sequence is not None:
                    kept += cut(name, header, sequence, rules, kinds)
            except Wrong as wrong:
                return kept, edits, f":{line}: record '{printable(name)}'{wrong}"
            edits += [(kind, name) for kind in kinds]
    except Wrong as wrong:
        return [], [], str(wrong)
    return kept, edits, ""


def told_apart(kept: list[Kept], on_duplicate: OnDuplicate) -> tuple[list[Kept], list[tuple[str, str]]]:
    first: dict[str, str] = {}
    again: dict[str, int] = {}
    taken = {name for name, *_ in kept}
    result: list[Kept] = []
    edits: list[tuple[str, str]] = []
    for name, header, sequence in kept:
        again[name] = again.get(name, 0) + 1
        if name not in first:
            first[name] = sequence
            result.append((name, header, sequence))
        elif on_duplicate == "suffix":
            number = again[name]
            while f"{name}_{number}" in taken:
                number += 1
            new = f"{name}_{number}"
            taken.add(new)
            result.append((new, new + header.lstrip(" \t\v\f")[len(name) :], sequence))
            edits.append(("an id that came again got a number", new))
        elif sequence == first[name]:
            edits.append(("a record that came twice was read once", name))
        elif on_duplicate == "first":
            edits.append(("a record with the id of an earlier one and another sequence was left out", name))
        else:
            raise Wrong(f": id '{printable(name)}' has two different sequences")
    return result, edits


def counted(edits: list[tuple[str, str]]) -> dict[str, tuple[int, list[str]]]:
    found: dict[str, tuple[int, list[str]]] = {}
    for kind, name in edits:
        count, names = found.get(kind, (0, []))
        found[kind] = count + 1, [*names, printable(name)][:3]
    return found


# The files.


def odd_name(draw: random.Random) -> str:
    return draw.choice([
        f"r{draw.randrange(12)}", f"r{draw.randrange(1000)}", "a", "a_2", "a/1-6", "../../etc/passwd", "x/y", "a>b",
        "é", "\x1b[31m", "\x1c", "\u2028", "\xa0", "sp|P1|N_ECOLI", "i" * 61, "i" * 10_000, "", "seqnum000000000",
    ])  # fmt: skip


def odd_text(draw: random.Random) -> str:
    newlines = draw.choice([["\n"], ["\n"], ["\r\n"], ["\r"], ["\n", "\r\n", "\r"]])
    evil = draw.random() ** 4  # most files are nearly sound
    text = draw.choice(["", "", "", "\ufeff", "\n\n", " \n", "\r\n", "\ufeff\r\n \r\n"])
    for _ in range(draw.choice([0, 1, 1, 2, 3, 5, 9]) if draw.random() < 0.1 else draw.randrange(1, 10)):
        name = odd_name(draw) if draw.random() < 0.3 else f"r{draw.randrange(10_000)}"
        text += f">{draw.choice(['', '', '', ' '])}{name}{draw.choice(['', '', ' x', ' a>b', '  ', chr(9), ' é'])}"
        text += draw.choice(newlines)
        letters = "".join(draw.choices("ACDEFGHIKLMNPQRSTVWY", k=draw.choice([1, 3, 8, 20])))
        if draw.random() < 0.4:
            letters += "".join(draw.choices("acdkJjXBUZO-. \t\v", k=3))
        if draw.random() < 0.1:
            letters += "*"
        if draw.random() < evil:
            at = draw.randrange(len(letters) + 1)
            letters = letters[:at] + draw.choice("1?*>éßſ\0\x1b\u2028\x85<") + letters[at:]
        if draw.random() < evil / 2:
            letters = draw.choice(["", "-", "*", ".-*", " "])
        width = draw.choice([1, 5, 100])
        for at in range(0, len(letters), width):
            text += letters[at : at + width] + draw.choice(newlines) * draw.choice([1, 1, 1, 2])
    if draw.random() < 0.3:
        text = text.rstrip("\r\n")
    if draw.random() < 0.03:
        text = draw.choice(["MKT\n", ";", " ", "\t>a", "@", "Prot\xe9\u2028\n"]) + text
    if draw.random() < 0.1:
        text += draw.choice([">", ">\n", "\n\n", " ", "\r", ">a", "*", ">é\nMé"])
    return text


def odd_rules(draw: random.Random) -> Rules:
    long = draw.choice(["full", "full", "crop", "window", "skip", "error"])
    limit = None if long == "full" else draw.choice([1, 6, 7, 21, 30])
    return Rules(draw.choice(["error", "error", "mask", "drop"]), draw.random() < 0.2, draw.random() < 0.2, long, limit)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        monkeypatch.chdir(scratch)
        yield
        monkeypatch.chdir("/")


def letters_of(tokens: object) -> str:
    return decode(tokens).replace("<mask>", "?")  # type: ignore[arg-type]


def check_refusal(refused: str, path: Path, wrong: set[str]) -> None:
    assert refused.startswith(tuple(f"{path}{sentence}" for sentence in wrong))
    assert refused
    assert "\n" not in refused


def check_reading(path: Path, text: str, rules: Rules, broken: bool) -> None:
    edits = Edits()
    kept, seen, sentence = expected(text, rules)
    wrong = {sentence} - {""}
    try:  # an id may come again before what is wrong, or after it in one block
        kept, once = told_apart(kept, "error")
    except Wrong as error:
        wrong.add(str(error))
    if broken:
        wrong |= UNREADABLE
    found, refused = [], ""
    try:
        found = [(r.id, r.description, r.sequence.replace("<mask>", "?")) for r in read_fasta(path, edits, rules)]
    except InputError as error:
        refused = str(error)
    if refused or wrong:
        check_refusal(refused, path, wrong)
        return
    assert found == [(name, header.strip(" \t\v\f"), sequence) for name, header, sequence in kept]
    assert {kind: (count, edits.first[kind][:3]) for kind, count in edits.counts.items()} == counted(seen + once)


def check_store(path: Path, text: str, rules: Rules, on_duplicate: OnDuplicate, broken: bool) -> int:
    out, before = Path("out"), sorted(Path().iterdir())
    kept, edits, sentence = expected(text, rules)
    wrong = {sentence} - {""}
    if not wrong:
        try:
            kept, more = told_apart(kept, on_duplicate)
            edits += more
        except Wrong as error:
            wrong.add(str(error))
        if not kept:
            wrong.add(": every record was left out by --on-unknown drop or --long skip")
    if broken:
        wrong |= UNREADABLE
    refused = ""
    try:
        store = ingest([path], out, rules, on_duplicate)
    except InputError as error:
        refused = str(error)
    if refused or wrong:
        check_refusal(refused, path, wrong)
        assert sorted(Path().iterdir()) == before
        return 0
    numbers = range(len(store))
    assert [(store.id(n), store.header(n).decode(), letters_of(store.residues(n))) for n in numbers] == kept
    assert [store.find(store.id(n)) for n in numbers] == [*numbers]
    assert {path.name for path in store.path.iterdir()} == {*store.manifest["sha256"], "manifest.json"}
    assert [store.description(n) for n in numbers] == [header.strip(" \t\v\f") for _, header, _ in kept]
    manifest = {kind: (entry["records"], entry["first"]) for kind, entry in store.manifest["edits"].items()}
    assert list(manifest.items()) == list(counted(edits).items())
    assert sorted(Path().iterdir()) == [out, *before]
    shutil.rmtree(out)
    return len(store)


@pytest.mark.parametrize(
    ("seed", "cases"), [(0, 160), *(pytest.param(k, 1000, marks=pytest.mark.slow) for k in range(1, 6))]
)
def test_odd_files(seed: int, cases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, path = random.Random(seed), Path("x.fasta")
    stored = []
    for case in range(cases):
        text, rules, broken = odd_text(draw), odd_rules(draw), False
        data = text.encode()
        text = text.removeprefix("\ufeff")
        if draw.random() < 0.02:
            at = draw.randrange(len(data) + 1)
            data, broken = data[:at] + b"\xff" + data[at:], True
            text = text if data[:3] == b"\xef\xbb\xbf" else data.decode(errors="replace")
        monkeypatch.setattr(fasta_blocks, "BLOCK", draw.choice([7, 16, 64, 1 << 20]))
        if draw.random() < 0.1:
            data = gzip.compress(data, 1, mtime=0)
            if draw.random() < 0.3:
                data, broken = data[: draw.randrange(2, len(data))], True
        monkeypatch.setattr(ingestion, "SHARD", draw.choice([5, 16, 64, 200, 1 << 26]) + len(data) // 12)
        path.write_bytes(data)
        check_reading(path, text, rules, broken)
        if case % 4 == 0:  # the others are only read
            on_duplicate: OnDuplicate = draw.choice(["error", "first", "suffix"])  # type: ignore[assignment]
            stored.append(check_store(path, text, rules, on_duplicate, broken))
    assert sum(count > 3 for count in stored) > 0.2 * len(stored)
