"""The table of `symbols`, row by row, under every policy. Tokens are those of the ESM-2 alphabet, written down."""

import itertools

import pytest

from esmshard.errors import UsageError
from esmshard.io.symbols import STRANGE, Edits, RefusedSymbols, Rules, clean, cut, shown, table

M, K, T, A, X, B, U, Z, O = 20, 15, 11, 5, 24, 25, 26, 27, 28  # noqa: E741  # pyrrolysine
DOT, GAP, MASK = 29, 30, 32
STAR = "a '*' at the end was removed"
LOWER = "lower-case letters were read as upper case"
INSERTIONS = "insertions were removed"
GAPS = "gaps were removed"
LEUCINE = "J (Leu or Ile) was read as X"
MASKED = "symbols that are no residues were read as <mask>"
LEFT_OUT = "a sequence with symbols that are no residues, or without any, was left out"


def cleaned(written: str, **rules: object) -> tuple[list[int] | None, list[str]]:
    edits = Edits()
    tokens = clean(written, Rules(**rules), edits, "r")  # type: ignore[arg-type]
    assert set(edits.counts.values()) <= {1}
    assert edits.first == {kind: ["r"] for kind in edits.counts}
    return None if tokens is None else list(tokens), list(edits.counts)


def refused(written: str, **rules: object) -> str:
    edits = Edits()
    with pytest.raises(RefusedSymbols) as error:
        clean(written, Rules(**rules), edits, "r")  # type: ignore[arg-type]
    assert edits.counts == {}  # nothing was changed
    return str(error.value)


@pytest.mark.parametrize("policy", ["error", "mask", "drop"])
@pytest.mark.parametrize(
    ("written", "tokens", "kinds"),
    [
        ("MKTA", [M, K, T, A], []),
        ("MXBUZOK", [M, X, B, U, Z, O, K], []),
        (" M\tK\r\nT\v\fA\n", [M, K, T, A], []),
        ("mKtA", [M, K, T, A], [LOWER]),
        ("MJK", [M, X, K], [LEUCINE]),
        ("mjk", [M, X, K], [LOWER, LEUCINE]),
        ("M-K.T", [M, K, T], [GAPS]),
        ("MKT*", [M, K, T], [STAR]),
        ("MKT * \n", [M, K, T], [STAR]),
        ("mj-k*", [M, X, K], [STAR, LOWER, GAPS, LEUCINE]),
    ],
)
def test_what_is_changed_is_changed_under_every_policy(
    written: str, tokens: list[int], kinds: list[str], policy: str
) -> None:
    assert cleaned(written, on_unknown=policy) == (tokens, kinds)


@pytest.mark.parametrize(
    ("written", "rules", "tokens", "kinds"),
    [
        ("MkK.Tta", {"a3m": True}, [M, K, T], [INSERTIONS]),
        ("M-kK", {"a3m": True}, [M, K], [INSERTIONS, GAPS]),
        ("M.K", {"a3m": True}, [M, K], [INSERTIONS]),
        ("MK", {"a3m": True}, [M, K], []),
        ("M-K", {"a3m": True}, [M, K], [GAPS]),
        ("MjJ*", {"a3m": True}, [M, X], [STAR, INSERTIONS, LEUCINE]),
        ("M-K.T", {"keep_gaps": True}, [M, GAP, K, DOT, T], []),
        ("m-k.t", {"keep_gaps": True}, [M, GAP, K, DOT, T], [LOWER]),
        ("--.", {"keep_gaps": True}, [GAP, GAP, DOT], []),
        ("M-k.Kt-", {"a3m": True, "keep_gaps": True}, [M, GAP, K, GAP], [INSERTIONS]),
        ("M1K*T", {"on_unknown": "mask"}, [M, MASK, K, MASK, T], [MASKED]),
        ("M\0K", {"on_unknown": "mask"}, [M, MASK, K], [MASKED]),
        ("\xe9\u017fK", {"on_unknown": "mask"}, [MASK, MASK, K], [MASKED]),
        ("12*", {"on_unknown": "mask"}, [MASK, MASK], [STAR, MASKED]),
        ("m1-J", {"on_unknown": "mask"}, [M, MASK, X], [LOWER, GAPS, LEUCINE, MASKED]),
        ("M1-K.", {"on_unknown": "mask", "keep_gaps": True}, [M, MASK, GAP, K, DOT], [MASKED]),
        ("Mk1.", {"on_unknown": "mask", "a3m": True}, [M, MASK], [INSERTIONS, MASKED]),
        ("M1K", {"on_unknown": "drop"}, None, [LEFT_OUT]),
        ("m*k", {"on_unknown": "drop"}, None, [LEFT_OUT]),
        ("", {"on_unknown": "drop"}, None, [LEFT_OUT]),
        ("-*", {"on_unknown": "drop"}, None, [LEFT_OUT]),
        ("kt.", {"on_unknown": "drop", "a3m": True}, None, [LEFT_OUT]),
    ],
)
def test_what_the_rules_make_of_a_sequence(
    written: str, rules: dict[str, object], tokens: list[int] | None, kinds: list[str]
) -> None:
    assert cleaned(written, **rules) == (tokens, kinds)


UNKNOWN = "which is not a residue; write X for an unknown residue"


@pytest.mark.parametrize(
    ("written", "rules", "message"),
    [
        ("MK7", {}, f"has '7' at position 3, {UNKNOWN}"),
        ("M K\n7", {}, f"has '7' at position 3, {UNKNOWN}"),
        ("m-.k#J", {}, f"has '#' at position 5, {UNKNOWN}"),
        ("M-.K#", {"keep_gaps": True}, f"has '#' at position 5, {UNKNOWN}"),
        ("Mkk.K-#", {"a3m": True}, f"has '#' at position 7, {UNKNOWN}"),
        ("Mkk.K-#", {"a3m": True, "keep_gaps": True}, f"has '#' at position 7, {UNKNOWN}"),
        ("M*K", {}, "has '*' at position 2, which is not a residue; write X for an unknown residue"),
        ("MK**", {}, "has '*' at position 3, which is not a residue; write X for an unknown residue"),
        ("M\x1bK", {}, f"has '\\x1b' at position 2, {UNKNOWN}"),
        ("M\xdfK", {}, f"has '\xdf' at position 2, {UNKNOWN}"),
        ("M1-2", {}, f"has '1' at position 2, {UNKNOWN}"),
        ("", {}, "has no residues; remove the record"),
        (" \n", {}, "has no residues; remove the record"),
        ("-*", {}, "has no residues; remove the record"),
        ("", {"on_unknown": "mask"}, "has no residues; remove the record"),
        ("*", {"keep_gaps": True}, "has no residues; remove the record"),
        ("mk.", {"a3m": True}, "has no residues; remove the record"),
    ],
)
def test_what_is_refused(written: str, rules: dict[str, object], message: str) -> None:
    assert refused(written, **rules) == message


@pytest.mark.parametrize("policy", ["error", "mask", "drop"])
def test_structure_letters_between_residues_are_refused_and_the_way_in_is_named(policy: str) -> None:
    for written in ("MdEvVp", "Md\nEvV#*"):
        assert "docs/tracks.md" in refused(written, on_unknown=policy)
    assert cleaned("MdEvVpp")[0] is not None
    assert cleaned("MdEvVp", a3m=True)[1] == [INSERTIONS]


@pytest.mark.parametrize(
    ("rules", "letters"),
    [
        ({}, "LAGVSERTIDPKQNFYMHWCXBUZO"),
        ({"a3m": True}, "LAGVSERTIDPKQNFYMHWCXBUZO"),
        ({"keep_gaps": True}, "LAGVSERTIDPKQNFYMHWCXBUZO.-"),
        ({"keep_gaps": True, "a3m": True}, "LAGVSERTIDPKQNFYMHWCXBUZO-"),
    ],
)
def test_only_what_needs_no_edit_is_taken_without_a_look(rules: dict[str, object], letters: str) -> None:
    codes = table(Rules(**rules), {">": 2})  # type: ignore[arg-type]
    assert len(codes) == 256
    order = "LAGVSERTIDPKQNFYMHWCXBUZO.-"  # tokens 4 to 30
    assert {chr(k): code for k, code in enumerate(codes) if code != STRANGE} == {
        **{letter: 4 + order.index(letter) for letter in letters},
        ">": 2,
    }


LONG = bytes(range(4, 27))  # 23 residues, all different


def pieces(long: str, most: int, tokens: bytes = LONG, name: bytes = b"id", header: bytes = b"id of it") -> object:
    edits = Edits()
    found = cut(name, header, tokens, Rules(long=long, max_length=most), edits)  # type: ignore[arg-type]
    return found, edits.counts


@pytest.mark.parametrize("long", ["full", "crop", "window", "skip", "error"])
def test_a_sequence_up_to_the_limit_is_kept_whole(long: str) -> None:
    for most in (23, 24, 1000):
        assert pieces(long, most) == ([(b"id", b"id of it", LONG)], {})
    assert pieces("full", 22) == ([(b"id", b"id of it", LONG)], {})


def test_a_long_sequence_may_be_left_out_or_refused() -> None:
    assert pieces("skip", 22) == ([], {"a sequence over 22 residues was left out": 1})
    with pytest.raises(RefusedSymbols) as error:
        pieces("error", 22)
    assert str(error.value) == "has 23 residues, over 22; raise the limit, or crop, window or skip long sequences"
    with pytest.raises(RefusedSymbols, match=r"has 1,500 residues, over 1,022; "):
        pieces("error", 1022, bytes(1500))


@pytest.mark.parametrize(
    ("length", "most", "starts"),
    [
        (23, 22, [0, 1]),
        (23, 12, [0, 11]),
        (23, 10, [0, 6, 13]),
        (23, 8, [0, 7, 15]),
        (20, 10, [0, 10]),
        (21, 10, [0, 5, 11]),
        (3, 1, [0, 1, 2]),
    ],
)
def test_windows_cover_a_sequence_evenly(length: int, most: int, starts: list[int]) -> None:
    found, counts = pieces("window", most, LONG[:length])  # type: ignore[misc]
    names = [b"id/%d-%d" % (start + 1, start + most) for start in starts]
    assert found == [
        (name, name + b" of it", LONG[start : start + most]) for name, start in zip(names, starts, strict=True)
    ]
    assert counts == {f"a sequence over {most} residues was cut into windows": 1}


def test_as_few_windows_as_can_be_overlap_as_evenly_as_they_can() -> None:
    for length in range(2, 80):
        tokens = bytes(range(100, 100 + length))
        for most in range(1, length):
            found, _ = pieces("window", most, tokens)  # type: ignore[misc]
            starts = [piece[0] - 100 for _, _, piece in found]
            assert len(found) == -(-length // most)
            assert {len(piece) for _, _, piece in found} == {most}
            assert starts[0] == 0
            assert starts[-1] == length - most
            steps = {later - earlier for earlier, later in itertools.pairwise(starts)}
            assert max(steps) - min(steps) <= 1
            assert max(steps) <= most


def test_a_window_keeps_the_header_after_its_id() -> None:
    edits, rules = Edits(), Rules(long="window", max_length=2)
    for header, wanted in ((b"  id\tof it ", b"id/1-2\tof it "), (b"id", b"id/1-2"), (b"id id", b"id/1-2 id")):
        assert cut(b"id", header, LONG[:3], rules, edits)[0][1] == wanted


STARTS = (13, 6, 1, 8, 2, 10, 1, 11, 3, 1, 7, 3)


def test_a_crop_is_a_window_drawn_from_the_id_alone() -> None:
    # sha256(id:0), its first eight bytes as a little-endian number, modulo 14 places; worked out once.
    for k, start in enumerate(STARTS):
        name = b"r%d" % k
        header = b"%s x residues=%d-%d" % (name, start + 1, start + 10)
        found = pieces("crop", 10, LONG, name, name + b" x")
        assert found == ([(name, header, LONG[start : start + 10])], {"a sequence over 10 residues was cropped": 1})


def test_every_place_of_a_crop_comes_up() -> None:
    found = [pieces("crop", 10, LONG, b"id%d" % k)[0][0][2] for k in range(300)]  # type: ignore[index]
    assert set(found) == {LONG[start : start + 10] for start in range(14)}


def test_rules_that_make_no_sense_are_refused() -> None:
    for long in ("crop", "window", "skip", "error"):
        with pytest.raises(UsageError) as error:
            Rules(long=long)  # type: ignore[arg-type]
        assert str(error.value) == f"--long {long}: needs --max-length"
    for most in (0, -1):
        with pytest.raises(UsageError) as error:
            Rules(long="window", max_length=most)
        assert str(error.value) == f"--max-length {most}: 1 or more is expected"
    assert Rules(max_length=5).long == "full"


def test_edits_name_the_first_three_records_of_each_kind() -> None:
    edits = Edits()
    for k in range(5):
        edits.add("odd" if k % 2 else "even", f"r{k}")
    assert edits.counts == {"even": 3, "odd": 2}
    assert edits.first == {"even": ["r0", "r2", "r4"], "odd": ["r1", "r3"]}
    edits.add("even", "r\x1b[31m" + "x" * 100)
    assert edits.notices() == ["even in 4 records (r0, r2, r4, ...)", "odd in 2 records (r1, r3)"]
    one = Edits()
    one.add("odd", "r\n")
    assert one.notices() == ["odd in 1 record (r\\n)"]


def test_a_thousand_edits_are_written_with_a_comma() -> None:
    assert Edits({"odd": 1234}, {"odd": ["a", "b", "c"]}).notices() == ["odd in 1,234 records (a, b, c, ...)"]


def test_edits_of_later_records_come_after() -> None:
    early, later = Edits({"x": 2, "y": 1}, {"x": ["a", "b"], "y": ["c"]}), Edits()
    later.counts, later.first = {"z": 4, "x": 5}, {"z": ["d", "e", "f"], "x": ["g", "h", "i"]}
    early.extend(later)
    assert list(early.counts.items()) == [("x", 7), ("y", 1), ("z", 4)]
    assert early.first == {"x": ["a", "b", "g", "h"], "y": ["c"], "z": ["d", "e", "f"]}
    early.add("z", "j")
    assert early.first["z"] == ["d", "e", "f", "j"]
    assert later.first == {"z": ["d", "e", "f"], "x": ["g", "h", "i"]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sp|P1|A_B", "sp|P1|A_B"),
        ("\xe9\u0394", "\xe9\u0394"),
        ("a\0b", "a\\x00b"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\x7f\x85", "a\\x7f\\x85"),
        ("\u202eevil\u2028", "\\u202eevil\\u2028"),
        ("a" * 60, "a" * 60),
        ("a" * 61, "a" * 57 + "..."),
        ("a" * 10_000, "a" * 57 + "..."),
        ("\n" * 10_000, "\\n" * 28 + "\\..."),
    ],
)
def test_ids_are_short_and_printable_in_messages(name: str, text: str) -> None:
    assert shown(name) == text
