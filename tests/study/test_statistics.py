import math

import numpy as np
import pytest
from scipy import stats

from lossytp.study import statistics
from lossytp.study.statistics import budget_of_curve, loss_budget, t_interval

RATES = np.array([0, 0.01, 0.02, 0.05, 0.1, 0.2])


def test_t_interval_is_students():
    values = np.array([0.5, 0.6, 0.8, 0.55])
    expected = stats.t.interval(0.95, 3, values.mean(), values.std(ddof=1) / 2)
    assert t_interval(values)[1:] == pytest.approx(expected)
    assert t_interval(np.array([0.5])) == (0.5, -math.inf, math.inf)


def test_t_interval_covers():
    samples = np.random.default_rng(0).normal(size=(2000, 3))
    intervals = [t_interval(sample) for sample in samples]
    covered = [interval.low <= 0 <= interval.high for interval in intervals]
    assert np.mean(covered) == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 2000))


def test_budget_of_a_straight_line_is_where_it_has_fallen_by_the_drop():
    assert budget_of_curve(RATES, 0.7 - 0.4 * RATES, 0.01) == pytest.approx(0.025)
    assert budget_of_curve(RATES, np.full(6, 0.7), 0.01) == math.inf
    assert budget_of_curve(RATES, np.array([0.7, 0.7, 0.7, 0.7, 0.7, 0.69]), 0.01) == pytest.approx(0.2)


def test_budget_takes_a_rise_for_noise():
    bumpy = np.array([0.70, 0.72, 0.70, 0.68, 0.6, 0.5])  # the first two are pooled to 0.71
    assert budget_of_curve(RATES, bumpy, 0.01) == pytest.approx(0.02)


@pytest.mark.parametrize("num_seeds", [3, 5, 10])
def test_budget_interval_covers(num_seeds, monkeypatch):
    """On made-up data of a known budget; seeds share an offset, as runs of one seed do."""
    monkeypatch.setattr(statistics, "DRAWS", 500)
    generator = np.random.default_rng(num_seeds)
    truth = 0.65 - 0.3 * RATES
    budget = budget_of_curve(RATES, truth, 0.01)
    covered = []
    for seed in range(200):
        noise = generator.normal(0, 0.01, (num_seeds, 1)) + generator.normal(0, 0.006, (num_seeds, len(RATES)))
        estimate = loss_budget(RATES, truth + noise, seed=seed)
        covered.append(estimate.low <= budget <= estimate.high)
    assert np.mean(covered) >= 0.95 - 3.5 * math.sqrt(0.95 * 0.05 / 200)


def test_a_plain_bootstrap_would_not_cover():
    """The control of the test above: percentiles of resampled means of 3 seeds are too narrow."""
    generator = np.random.default_rng(0)
    covered = []
    for _ in range(300):
        sample = generator.normal(size=3)
        means = np.sort(generator.choice(sample, (400, 3)).mean(1))
        covered.append(means[10] <= 0 <= means[389])
    assert np.mean(covered) < 0.85


def test_budget_never_reached_is_infinite_and_identical_seeds_have_no_width():
    flat = loss_budget(RATES, np.full((3, 6), 0.7))
    assert flat == (math.inf, math.inf, math.inf)
    line = loss_budget(RATES, np.tile(0.7 - 0.4 * RATES, (3, 1)))
    assert line == pytest.approx((0.025, 0.025, 0.025))
    assert loss_budget(RATES, np.array([0.7 - 0.4 * RATES])).high == math.inf
