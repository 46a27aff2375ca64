"""Goodput of runs that were worked out by hand."""

from typing import Any

import pytest

from esmshard.train.records.goodput import attempt_line, cut, parse, sentence, summary


def step(n: int, time: float, step_s: float | None = 2.0) -> dict[str, Any]:
    return {"step": n, "loss": 1.0, "step_s": step_s, "time": time}


def attempt(n: int, started: float, lost: int = 0, seconds: float = 0.0) -> dict[str, Any]:
    times = {"started": started, "time": started + 5}
    return {"event": "attempt", "attempt": n, **times, "from_step": 0, "steps_lost": lost, "seconds_lost": seconds}


def first(seconds: float, time: float) -> dict[str, Any]:
    return {"event": "first_step", "seconds": seconds, "time": time}


def end(state: str, time: float) -> dict[str, Any]:
    return {"event": "end", "state": state, "time": time}


VALID = {"step": 2, "split": "valid", "loss": 1.0, "time": 1015.0}

# An attempt that was killed in its fifth step, 100 s long until the last line that it left.
KILLED = [
    attempt(1, 1000.0),
    step(1, 1010.0, 4.0),
    first(10.0, 1010.0),
    step(2, 1012.0, 2.0),
    VALID,
    step(3, 1050.0, 3.0),
    {"step": 3, "split": "valid", "loss": 1.0, "time": 1060.0},
    step(4, 1100.0, 5.0),
]


def test_an_unbroken_run() -> None:
    lines = [*KILLED, end("done", 1120.0)]
    assert summary(lines) == {
        "attempts": 1,
        "steps_lost": 0,
        "lost_s": 0.0,
        "useful_s": 14.0,
        "allocated_s": 120.0,
        "goodput": 14 / 120,
        "restart_s": [10.0],
    }


def test_what_is_cut_off_is_counted() -> None:
    kept, lost, seconds = cut(KILLED, 2)
    assert kept == [*KILLED[:5], end("killed", 1100.0)]
    assert (lost, seconds) == (2, 8.0)


def test_a_killed_run_that_goes_on() -> None:
    kept, lost, seconds = cut(KILLED, 2)
    line = attempt_line(kept, started=5000.0, now=5006.0, from_step=2, steps_lost=lost, seconds_lost=seconds)
    assert line == attempt(2, 5000.0, 2, 8.0) | {"from_step": 2, "time": 5006.0}
    # The second attempt takes steps 3 and 4 again: 20 s, of which 9 in steps; the hour in the queue is nobody's.
    lines = [*kept, line, step(3, 5011.0, 4.0), first(11.0, 5011.0), step(4, 5017.0, 5.0), end("done", 5020.0)]
    assert summary(lines) == {
        "attempts": 2,
        "steps_lost": 2,
        "lost_s": 8.0,
        "useful_s": 4 + 2 + 4 + 5,
        "allocated_s": 100 + 20,
        "goodput": 15 / 120,
        "restart_s": [10.0, 11.0],
    }
    assert sentence(summary(lines)) == (
        "goodput 12%: 15s of 2m00s in steps that count; 2 attempts, 2 steps lost (8s), first step after 10s, 11s"
    )


def test_a_validation_that_will_be_done_again_goes() -> None:
    assert cut(KILLED, 2, validated=False)[0] == [*KILLED[:4], end("killed", 1100.0)]
    assert cut(KILLED, 2, validated=True)[0] == [*KILLED[:5], end("killed", 1100.0)]
    assert cut(KILLED, 3, validated=False)[0] == [*KILLED[:6], end("killed", 1100.0)]


def test_cutting_twice_changes_nothing_more() -> None:
    """Two starts in a row that did not come to an attempt."""
    once = cut(KILLED, 2)[0]
    assert cut(once, 2) == (once, 0, 0.0)


def test_an_attempt_that_ended_keeps_its_end() -> None:
    lines = [attempt(1, 1000.0), step(1, 1010.0), step(2, 1012.0), end("preempted", 1030.0)]
    kept, lost, _ = cut(lines, 1)
    assert kept == [lines[0], lines[1], lines[3]]
    assert lost == 1
    assert summary(kept)["allocated_s"] == 30.0


def test_attempts_that_never_came_to_a_step() -> None:
    lines = [attempt(1, 100.0), attempt(2, 200.0), end("failed", 207.0)]
    kept, lost, seconds = cut(lines, 0)
    assert kept == [lines[0], end("killed", 105.0), *lines[1:]]
    assert (lost, seconds) == (0, 0.0)
    for found in (summary(lines), summary(kept)):
        assert found["allocated_s"] == 5 + 7
        assert found["goodput"] == 0.0
        assert found["restart_s"] == []


def test_events_are_kept_wherever_they_stand() -> None:
    lines = [attempt(1, 1000.0), step(1, 1010.0), first(10.0, 1010.0)]
    lines.append({"event": "checkpoint", "step": 1, "time": 1011.0})
    kept, lost, _ = cut(lines, 0)
    assert kept == [lines[0], *lines[2:], end("killed", 1011.0)]
    assert lost == 1


def test_three_attempts_are_numbered() -> None:
    kept = [attempt(1, 0.0), end("killed", 5.0), attempt(2, 10.0), end("killed", 12.0)]
    line = attempt_line(kept, started=20.0, now=21.0, from_step=7, steps_lost=1, seconds_lost=2.0)
    assert (line["attempt"], line["from_step"], line["steps_lost"], line["seconds_lost"]) == (3, 7, 1, 2.0)
    assert attempt_line([], started=0.0, now=1.0, from_step=0, steps_lost=0, seconds_lost=0.0)["attempt"] == 1


def test_a_running_attempt_counts_as_far_as_it_came() -> None:
    assert summary(KILLED)["allocated_s"] == 100.0
    assert summary(KILLED)["goodput"] == 14 / 100


def test_the_clock_of_a_second_machine_may_be_behind() -> None:
    lines = [attempt(1, 1000.0), end("preempted", 1050.0), attempt(2, 900.0), end("done", 930.0)]
    assert summary(lines)["allocated_s"] == 50 + 30


def test_time_never_runs_backwards_in_an_attempt() -> None:
    """As when the clock of a machine is set: the farthest line counts."""
    assert summary([attempt(1, 1000.0), step(1, 1040.0), end("done", 1030.0)])["allocated_s"] == 40.0


def test_lines_of_a_run_from_before_there_were_attempts_count_for_nothing() -> None:
    old = [{"step": 1, "loss": 1.0, "step_s": 2.0}, {"step": 2, "loss": 1.0, "step_s": 2.0}]
    assert cut(old, 1) == (old[:1], 1, 2.0)
    assert summary(old) == summary([])
    assert summary([])["goodput"] is None
    assert sentence(summary([])) == "goodput unknown: 0s of 0s in steps that count; 0 attempts, 0 steps lost"


def test_a_step_whose_time_is_not_known() -> None:
    lines = [attempt(1, 0.0), step(1, 10.0, None), step(2, 20.0, 2.0)]
    assert summary(lines)["useful_s"] == 2.0
    assert cut(lines, 0)[1:] == (2, 2.0)


def test_half_a_line_is_left_out() -> None:
    assert parse('{"step": 1}\n\n{"step": 2, "lo') == [{"step": 1}]
    assert parse('{"step": 1}\n{"st\n{"step": 3}') == [{"step": 1}, {"step": 3}]
    assert parse('{"step": 1}\n3\n[1]\nnull\n{"event": "end"}\n') == [{"step": 1}, {"event": "end"}]


def test_singular_and_the_last_five_restarts() -> None:
    lines: list[dict[str, Any]] = []
    for n in range(1, 8):
        lines += [attempt(n, 100.0 * n, int(n == 1), 1.0 * (n == 1)), first(10.0 + n, 100.0 * n + 50)]
    assert sentence(summary(lines)).endswith("7 attempts, 1 step lost (1s), first step after 13s, 14s, 15s, 16s, 17s")
    assert "; 1 attempt, 0 steps lost" in sentence(summary([attempt(1, 0.0), end("done", 10.0)]))


@pytest.mark.parametrize(("done", "lost"), [(0, 4), (1, 3), (3, 1), (4, 0), (9, 0)])
def test_steps_after_the_checkpoint_are_lost(done: int, lost: int) -> None:
    kept, found, _ = cut(KILLED, done)
    assert found == lost
    assert sum("loss" in line and "split" not in line for line in kept) == 4 - lost
