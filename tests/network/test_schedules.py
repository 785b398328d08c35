"""Which message of a collective waits for which, against event simulations."""

import numpy as np
import pytest
import simpy

from lossytp.network import routes as schedules
from lossytp.network.routes import ALGORITHMS

SCHEDULES = {name: algorithm.schedule for name, algorithm in ALGORITHMS.items()}


def ring_events(seconds: np.ndarray) -> float:
    """Each rank forwards message k + 1 once it has message k of its predecessor and its own message k is through."""
    messages, ranks = seconds.shape
    env = simpy.Environment()
    arrived = [[env.event() for _ in range(messages)] for _ in range(ranks)]  # of rank r's message k at its successor

    def rank(r):
        for k in range(messages):
            if k:
                yield arrived[r - 1][k - 1]
            yield env.timeout(seconds[k, r])
            arrived[r][k].succeed()

    for r in range(ranks):
        env.process(rank(r))
    env.run()
    return env.now


def tree_events(up: dict[int, float], down: dict[int, float], ranks: int) -> float:
    """A rank's children are twice its number and one, and two, more; it hears both, and answers both at once."""
    env = simpy.Environment()
    summed, told = [env.event() for _ in range(ranks)], [env.event() for _ in range(ranks)]
    last = []

    def children(r):
        return [child for child in (2 * r + 1, 2 * r + 2) if child < ranks]

    def rank(r):
        for child in children(r):
            yield summed[child]
        if r:
            yield env.timeout(up[r])
        summed[r].succeed()
        if r:
            yield told[(r - 1) // 2]
            yield env.timeout(down[r])
        else:
            yield env.all_of(summed)
        told[r].succeed()
        last.append(env.now)

    for r in range(ranks):
        env.process(rank(r))
    env.run()
    return max(last)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16])
def test_ring_and_tree_wait_for_each_other_as_in_an_event_simulation(ranks):
    draws = np.random.Generator(np.random.Philox(0))
    ring = draws.exponential(size=(2 * (ranks - 1), 3, ranks))
    expected = [ring_events(ring[:, sample]) for sample in range(3)]
    assert SCHEDULES["ring"].complete(ring) == pytest.approx(np.array(expected))
    tree = draws.exponential(size=(1, 3, 2 * (ranks - 1)))
    halves = [np.split(tree[0, sample], 2) for sample in range(3)]
    expected = [tree_events(dict(enumerate(up, 1)), dict(enumerate(down, 1)), ranks) for up, down in halves]
    assert SCHEDULES["tree"].complete(tree) == pytest.approx(np.array(expected))


def test_a_ring_that_waits_for_neighbours_is_sooner_than_one_that_waits_for_all():
    draws = np.random.Generator(np.random.Philox(0)).exponential(size=(14, 5, 8))
    assert (SCHEDULES["ring"].complete(draws) < schedules.in_steps(draws)).all()


def test_direct_and_switch_wait_for_the_slowest_rank_between_their_two_phases():
    assert SCHEDULES["direct"].complete(np.array([[[1.0, 2, 3]], [[5, 4, 1]]])).tolist() == [3 + 5]
    assert SCHEDULES["switch"].complete(np.array([[[1.0, 2, 3, 5, 4, 1]]])).tolist() == [3 + 5]
