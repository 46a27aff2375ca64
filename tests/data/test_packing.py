"""One process plays all ranks: steps lose nothing and are nearly equal, and every record of a step is assigned once."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from esmshard.data.batching.packing import MicroBatch, StepPlan, _balanced, assign
from esmshard.errors import InputError

LENGTHS = st.lists(st.one_of(st.integers(2, 60), st.integers(2, 1024), st.sampled_from([50, 51, 30_000])), min_size=1)
quick = settings(max_examples=25, deadline=None, derandomize=True)


def lengths(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(20, 260, n)


def proteins(n: int, seed: int = 0) -> np.ndarray:
    """Tokens of proteins with a median of 270 and a mean of 330 residues."""
    residues = np.random.default_rng(seed).lognormal(np.log(270), 0.63, n)
    return residues.clip(20, 1022).astype(np.int64) + 2


def step_of(plan: StepPlan, number: int) -> tuple[int, list[int]]:
    epoch, records = plan.step(number)
    return epoch, records.tolist()


def epoch_of(plan: StepPlan, epoch: int) -> list[list[int]]:
    first = epoch * plan.steps_per_epoch
    steps = [step_of(plan, number) for number in range(first, first + plan.steps_per_epoch)]
    assert {number for number, _ in steps} == {epoch}
    return [records for _, records in steps]


def sizes(plan: StepPlan, tokens: np.ndarray, epoch: int = 0) -> list[int]:
    return [int(tokens[step].sum()) for step in epoch_of(plan, epoch)]


@settings(quick, max_examples=60)
@example([30, 32, 53, 17], 73, 1463, 0)  # Only first-fit decreasing finds steps for these.
@example([18, 51, 42, 2, 17, 38], 86, 177, 1)
@example([50] * 75 + [20] * 67, 100, 1610, 0)
@given(LENGTHS, st.integers(16, 3000), st.integers(0, 2**40), st.integers(0, 1000))
def test_an_epoch_holds_every_record_once_in_steps_that_are_not_too_large(
    tokens: list[int], most: int, seed: int, epoch: int
) -> None:
    steps = epoch_of(StepPlan(np.array(tokens), most, seed), epoch)
    assert sorted(record for step in steps for record in step) == list(range(len(tokens)))
    assert all(steps)
    assert all(len(step) == 1 or sum(tokens[record] for record in step) <= most for step in steps)


def test_records_longer_than_a_step_leave_no_step_empty() -> None:
    for n in (1, 63, 65, 128):
        plan = StepPlan(np.array([10**6] * 3 + [20] * n), 16, seed=1)
        for epoch in range(3):
            assert sorted(map(tuple, epoch_of(plan, epoch))) == [(record,) for record in range(n + 3)]
    plan = StepPlan(np.array([100] * 2000 + [65_636]), 1000, seed=0)
    assert plan.steps_per_epoch == 268
    assert all([2000] in epoch_of(plan, epoch) for epoch in range(3))


def test_steps_of_an_epoch() -> None:
    for tokens, most, steps in (
        ([10] * 40, 101, 4),
        ([10] * 40, 100, 5),  # 4 full steps would leave the ranks no slack
        ([50] * 30, 16, 30),
        ([288] * 5600, 16384, 100),  # 56 fit a step; counting tokens alone gives 99.06 steps
        ([60] * 10 + [10] * 20, 100, 10),  # two of 60 never fit
        ([34] * 10 + [3] * 3, 100, 5),  # two of 34, not three
        ([3000, 10, 10], 100, 3),
        ([7], 100, 1),
    ):
        plan = StepPlan(np.array(tokens), most, seed=0)
        assert plan.steps_per_epoch == steps, tokens
        assert max(tokens) > most or max(sizes(plan, np.array(tokens))) <= most


def test_proteins_fill_equal_steps_to_99_percent() -> None:
    most = 4096
    tokens = proteins(15_000, seed=1)
    found = sizes(StepPlan(tokens, most, seed=1), tokens, epoch=1)
    assert len(found) > 1000
    assert np.mean(found) > 0.99 * most
    assert max(found) <= most
    assert max(found) - min(found) <= most / 100  # over all windows
    for window in range(0, 640, 64):
        assert np.ptp(found[window : window + 64]) <= most / 128


def test_the_shuffle_is_that_of_the_bit_generators_raw_stream() -> None:
    for n, seed, epoch in ((1, 0, 0), (2, 0, 1), (60, 0, 0), (127, 2**70, 0)):  # one record a step
        raw = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(n)
        steps = epoch_of(StepPlan(np.full(n, 50), 16, seed), epoch)
        assert [record for step in steps for record in step] == np.argsort(raw).tolist()


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    orders = {
        (seed, epoch): [tuple(step) for step in epoch_of(StepPlan(lengths(50), 1000, seed), epoch)]
        for seed in range(3)
        for epoch in range(3)
    }
    assert len({tuple(order) for order in orders.values()}) == 9
    assert len({frozenset(map(frozenset, order)) for order in orders.values()}) == 9, "other steps, not only reordered"
    tokens = lengths(100)
    tokens[42] = 400
    plan = StepPlan(tokens, 1000, 0)
    at = [next(k for k, step in enumerate(epoch_of(plan, epoch)) if 42 in step) for epoch in range(40)]
    assert len(set(at)) > 8, "the longest record comes at any time"
    tokens[7] = 40_000
    narrow = tokens.astype(np.uint16)
    assert epoch_of(StepPlan(narrow, 900, 3), 2) == epoch_of(StepPlan(tokens, 900, 3), 2)
    assert assign(np.arange(9), narrow, 50_000, 0, 2) == assign(np.arange(9), tokens, 50_000, 0, 2)


def test_a_resumed_run_gets_the_steps_of_one_that_walked_there() -> None:
    for tokens, most in ((lengths(2000), 900), (lengths(7), 300), (np.array([50, 30_000, 51, 9]), 60)):
        walking, jumping = (StepPlan(tokens, most, 4) for _ in range(2))
        steps = [step_of(walking, number) for number in range(3 * walking.steps_per_epoch)]
        assert [epoch for epoch, _ in steps] == sorted([0, 1, 2] * walking.steps_per_epoch)
        for number in (0, len(steps) - 1, len(steps) // 2, 1, len(steps) // 3):
            assert step_of(jumping, number) == steps[number]
    plan = StepPlan(lengths(2000), 900, 4)
    epoch, records = step_of(plan, 10**15)  # a walk would never end
    assert epoch == 10**15 // plan.steps_per_epoch
    assert records == epoch_of(plan, epoch)[10**15 % plan.steps_per_epoch]


@quick
@given(LENGTHS, st.integers(1, 40), st.integers(0, 9))
def test_swaps_lose_nothing_and_end_when_bins_are_close(tokens: list[int], n_bins: int, within: int) -> None:
    queue = np.argsort(-np.array(tokens), kind="stable")
    _, before = _balanced(np.array(tokens), queue, n_bins, within=10**9)
    bins, loads = _balanced(np.array(tokens), queue, n_bins, within)
    assert loads.tolist() == np.bincount(bins, weights=tokens, minlength=n_bins).tolist()
    assert loads.max() <= before.max()
    assert loads.max() - loads.min() <= max(within, *tokens)
    assert len(set(bins.tolist())) == min(n_bins, len(tokens))


def assigned(records: np.ndarray, tokens: np.ndarray, budget: int, world_size: int) -> list[list[MicroBatch]]:
    return [assign(records, tokens, budget, rank, world_size) for rank in range(world_size)]


def weight(batch: MicroBatch, tokens: np.ndarray) -> int:
    return 0 if batch.is_dummy else int(tokens[list(batch.records)].sum())


@quick
@given(LENGTHS, st.integers(0, 900), st.integers(1, 9))
def test_a_step_is_dealt_completely_and_within_the_budget(tokens_of: list[int], spare: int, world_size: int) -> None:
    tokens = np.array([*tokens_of, 10**6])  # The last record is not of this step.
    step, longest = np.arange(len(tokens_of))[::-1], max(tokens_of)
    ranks = assigned(step, tokens, longest + spare, world_size)
    batches = [batch for rank in ranks for batch in rank]
    real = [batch for batch in batches if not batch.is_dummy]

    assert sorted(r for batch in real for r in batch.records) == sorted(step.tolist())
    assert len({len(rank) for rank in ranks}) == 1
    assert all(0 < tokens[list(batch.records)].sum() <= longest + spare for batch in batches)
    assert len(batches) - len(real) == max(0, len(batches) - len(step))  # dummies only without records
    assert all(len(b.records) == 1 and tokens[b.records[0]] == min(tokens_of) for b in batches if b.is_dummy)

    weights = [weight(batch, tokens) for batch in batches]
    assert max(weights) - min(weights) <= longest
    shares = [sum(weight(batch, tokens) for batch in rank) for rank in ranks]
    assert max(shares) - min(shares) <= longest
    # With too few bins, all would be half full when a record finds no place: twice the tokens' bins are enough.
    assert len(ranks[0]) <= 2 * -(-sum(tokens_of) // (world_size * (longest + spare)))


def test_budgets_that_make_up_a_step_take_the_least_rounds() -> None:
    world_size, budget = 8, 2048
    tokens = proteins(20_000)
    plan = StepPlan(tokens, 16384, 0)
    rounds, spreads, shares = [], [], []
    for step in epoch_of(plan, 0)[:60]:
        ranks = assigned(np.array(step), tokens, budget, world_size)
        rounds.append(len(ranks[0]))
        spreads.append(np.ptp([weight(batch, tokens) for rank in ranks for batch in rank]))
        shares.append(np.ptp([sum(weight(batch, tokens) for batch in rank) for rank in ranks]))
    assert rounds.count(16384 // budget // world_size) >= 59
    assert np.mean(spreads) < budget / 200
    assert np.mean(shares) < 10


def test_a_step_takes_the_fewest_rounds() -> None:
    for tokens, budget, world_size, rounds in (
        ([101, 101, 101, 99, 99, 99], 300, 2, 2),  # no half of them has 300
        ([101, 101, 101, 99, 99, 99], 301, 2, 1),
        *(([20 * k + 11 for k in range(12)], 1452, world_size, 1) for world_size in (1, 3, 7)),
        *(([100] * 12, 200, *pair) for pair in ((1, 6), (2, 3), (3, 2), (4, 2), (6, 1), (7, 1))),
    ):
        ranks = assigned(np.arange(len(tokens)), np.array(tokens), budget, world_size)
        assert [len(rank) for rank in ranks] == [rounds] * world_size


def test_a_record_over_the_budget_is_refused_on_every_rank() -> None:
    tokens = np.array([30, 101, 20])
    for rank in range(3):
        with pytest.raises(InputError, match=r"batch\.tokens_per_rank"):
            assign(np.arange(3), tokens, 100, rank, 3)
    assert len(assign(np.array([0, 2]), tokens, 100, 0, 3)) == 1  # The long record is not of this step.
