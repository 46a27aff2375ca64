"""One process plays all ranks: steps lose nothing, and every record of a step is dealt once."""

import numpy as np
import pytest

from esmshard.data.packing import MicroBatch, Plan, deal, epoch_steps
from esmshard.errors import InputError

WORLDS = [1, 2, 3, 4, 7]


def lengths(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(20, 260, n)


def as_lists(steps: list[np.ndarray]) -> list[list[int]]:
    return [step.tolist() for step in steps]


@pytest.mark.parametrize("n", [1, 2, 50, 333])
@pytest.mark.parametrize("global_tokens", [16, 500, 4096, 10**6])
def test_an_epoch_holds_every_record_once(n: int, global_tokens: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (5, 0), (5, 17)):
        steps = epoch_steps(lengths(n), global_tokens, seed, epoch)
        assert sorted(np.concatenate(steps).tolist()) == list(range(n))
        assert all(len(step) for step in steps)


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    orders = {
        (seed, epoch): tuple(np.concatenate(epoch_steps(lengths(50), 1000, seed, epoch)).tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(set(orders.values())) == 9
    assert as_lists(epoch_steps(lengths(50), 1000, 2, 1)) == as_lists(epoch_steps(lengths(50), 1000, 2, 1))


def test_steps_are_nearly_equal_and_about_as_large_as_wanted() -> None:
    for seed in range(10):
        tokens = lengths(400, seed)
        for global_tokens in (1024, 2000, 4096):
            sizes = [int(tokens[step].sum()) for step in epoch_steps(tokens, global_tokens, seed, 0)]
            average = sum(sizes) / len(sizes)
            assert len(sizes) > 10
            assert abs(average - global_tokens) < global_tokens / len(sizes)
            assert max(abs(size - average) for size in sizes) < tokens.max()


def test_equal_records_fill_steps_exactly() -> None:
    steps = epoch_steps(np.full(40, 10), 100, 0, 0)
    assert [len(step) for step in steps] == [10] * 4


def test_a_step_larger_than_the_epoch_is_the_epoch_and_a_tiny_one_is_a_record() -> None:
    assert len(epoch_steps(lengths(30), 10**6, 0, 0)) == 1
    assert [len(step) for step in epoch_steps(np.full(30, 50), 16, 0, 0)] == [1] * 30


def expected_plan(tokens: np.ndarray, seed: int, epochs: int) -> list[tuple[int, list[int]]]:
    return [(epoch, step.tolist()) for epoch in range(epochs) for step in epoch_steps(tokens, 900, seed, epoch)]


def step_of(plan: Plan, number: int) -> tuple[int, list[int]]:
    epoch, records = plan.step(number)
    return epoch, records.tolist()


def test_a_plan_goes_through_epoch_after_epoch() -> None:
    tokens, plan = lengths(37), Plan(lengths(37), 900, seed=4)
    expected = expected_plan(tokens, 4, epochs=5)
    assert [step_of(plan, number) for number in range(len(expected))] == expected
    assert len(expected) > 20
    assert len({tuple(records) for _, records in expected}) == len(expected)


def test_a_plan_goes_backwards_and_jumps() -> None:
    plan = Plan(lengths(37), 900, seed=4)
    expected = expected_plan(lengths(37), 4, epochs=5)
    for number in [20, 3, 3, 21, 0, len(expected) - 1, 10, 9, 8]:
        assert step_of(plan, number) == expected[number]


def test_a_resumed_run_gets_the_same_step() -> None:
    running = Plan(lengths(37), 900, seed=4)
    steps = [step_of(running, number) for number in range(25)]
    assert [step_of(Plan(lengths(37), 900, seed=4), number) for number in range(25)] == steps
    assert [step_of(Plan(lengths(37), 900, seed=5), number) for number in range(25)] != steps


def dealt(records: np.ndarray, tokens: np.ndarray, budget: int, world_size: int) -> list[list[MicroBatch]]:
    return [deal(records, tokens, budget, rank, world_size) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("budget", [260, 300, 700, 10**6])
def test_a_step_is_dealt_completely_evenly_and_within_the_budget(world_size: int, budget: int) -> None:
    ghosts = 0
    for seed in range(6):
        tokens = lengths(200, seed)
        for step in epoch_steps(tokens, [300, 1500, 6000][seed % 3], seed, 0)[:4]:
            longest = int(tokens[step].max())
            ranks = dealt(step, tokens, budget, world_size)
            batches = [batch for rank in ranks for batch in rank]
            real = [batch for batch in batches if not batch.ghost]

            assert sorted(r for batch in real for r in batch.records) == sorted(step.tolist())
            assert len({len(rank) for rank in ranks}) == 1
            assert all(0 < tokens[list(batch.records)].sum() <= budget for batch in batches)

            weights = [0 if batch.ghost else int(tokens[list(batch.records)].sum()) for batch in batches]
            assert max(weights) - min(weights) <= longest

            n_ghosts = len(batches) - len(real)
            assert n_ghosts == max(0, len(batches) - len(step))  # only where records run out
            assert n_ghosts < world_size  # else one round less would do
            assert all(len(batch.records) == 1 and batch.records[0] in step for batch in batches if batch.ghost)
            ghosts += n_ghosts
    assert ghosts or world_size < 3


@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_have_near_equal_shares(world_size: int) -> None:
    for seed in range(6):
        tokens = lengths(60, seed)
        ranks = dealt(np.arange(60), tokens, 600, world_size)
        shares = [sum(int(tokens[list(b.records)].sum()) for b in rank if not b.ghost) for rank in ranks]
        assert max(shares) - min(shares) <= tokens.max()
        assert len(ranks[0]) >= 2


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_fits_goes_at_once(world_size: int) -> None:
    tokens = lengths(50)
    assert {len(rank) for rank in dealt(np.arange(50), tokens, int(tokens.sum()), world_size)} == {1}


@pytest.mark.parametrize(("world_size", "rounds"), [(1, 6), (2, 3), (3, 2), (4, 2), (6, 1), (7, 1)])
def test_no_more_rounds_than_the_budget_asks_for(world_size: int, rounds: int) -> None:
    ranks = dealt(np.arange(12), np.full(12, 100), 200, world_size)
    assert [len(rank) for rank in ranks] == [rounds] * world_size


def test_one_record_on_three_ranks_leaves_two_ghosts_of_it() -> None:
    ranks = dealt(np.array([5]), lengths(10), 300, 3)
    assert sorted((batch.records, batch.ghost) for rank in ranks for batch in rank) == [
        ((5,), False),
        ((5,), True),
        ((5,), True),
    ]


def test_a_ghost_is_the_shortest_record_of_the_step() -> None:
    ranks = dealt(np.array([0, 2, 3]), np.array([30, 1, 20, 40]), 100, 4)
    assert [batch.records for rank in ranks for batch in rank if batch.ghost] == [(2,)]


def test_the_deal_is_the_same_every_time() -> None:
    assert dealt(np.arange(60), lengths(60), 600, 3) == dealt(np.arange(60), lengths(60), 600, 3)


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_record_over_the_budget_is_refused_on_every_rank(world_size: int) -> None:
    tokens = np.array([30, 101, 20])
    for rank in range(world_size):
        with pytest.raises(InputError, match=r"has 101 tokens, but batch\.tokens_per_rank is 100"):
            deal(np.arange(3), tokens, 100, rank, world_size)
    assert len(deal(np.arange(3), tokens, 101, 0, world_size)) >= 1
    assert len(deal(np.array([0, 2]), tokens, 100, 0, world_size)) == 1  # the long one is not of this step
