import math

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy import stats

from lossyprobe.expected_cost import loss_budget, rate_of_drop
from lossytp.study.statistics import crossed_interval, t_interval
from lossytp.study.style import save, set_style
from paper.study import holm

RATES = np.array([0, 0.01, 0.02, 0.05, 0.1, 0.2])


def test_t_interval_is_students_and_covers():
    values = np.array([0.5, 0.6, 0.8, 0.55])
    expected = stats.t.interval(0.95, 3, values.mean(), values.std(ddof=1) / 2)
    assert t_interval(values)[1:] == pytest.approx(expected)
    assert t_interval(np.array([0.5])) == (0.5, -math.inf, math.inf)
    samples = np.random.default_rng(0).normal(size=(2000, 3))
    intervals = [t_interval(sample) for sample in samples]
    covered = [interval.low <= 0 <= interval.high for interval in intervals]
    assert np.mean(covered) == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 2000))


def test_a_crossed_interval_by_hand():
    values = np.array([[1.0, 3.0, 5.0], [2.0, 2.0, 8.0]])
    seeds, examples = np.var([3.0, 4.0], ddof=1) / 2, np.var([1.5, 2.5, 6.5], ddof=1) / 3
    freedom = (seeds + examples) ** 2 / (seeds**2 / 1 + examples**2 / 2)
    expected = stats.t.interval(0.95, freedom, 3.5, (seeds + examples) ** 0.5)
    assert crossed_interval(values) == pytest.approx((3.5, *expected))
    assert crossed_interval(values[:1]) == pytest.approx(t_interval(values[0])), "examples alone"
    assert crossed_interval(np.full((3, 4), 2.0)) == (2, 2, 2)


@pytest.mark.parametrize(("seed", "example", "pair"), [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)])
def test_a_crossed_interval_covers_other_seeds_and_other_examples(seed, example, pair):
    generator, studies, shape = np.random.default_rng(0), 1000, (5, 40)
    covered = 0
    for _ in range(studies):
        scales = ((seed, (shape[0], 1)), (example, (1, shape[1])), (pair, shape))
        values = sum(scale * generator.normal(size=size) for scale, size in scales)
        interval = crossed_interval(values)
        covered += interval.low <= 0 <= interval.high
    assert covered / studies > 0.95 - 4 * math.sqrt(0.95 * 0.05 / studies)


def test_holm_by_hand_and_in_one_of_twenty_studies():
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.9, 0.8])).tolist() == [1, 1]
    assert holm(np.array([])).tolist() == []
    draws = np.random.default_rng(0).uniform(size=(4000, 6))
    false = np.mean([holm(study).min() < 0.05 for study in draws])
    assert 0.04 < false < 0.06
    assert np.mean(draws.min(1) < 0.05) > 0.2  # uncorrected


def test_rate_of_drop_is_where_the_curve_has_fallen_by_the_drop():
    assert rate_of_drop(RATES, 0.4 * RATES) == pytest.approx(0.025)
    assert rate_of_drop(RATES, np.zeros(6)) == math.inf
    assert rate_of_drop(RATES, np.array([0, 0, 0, 0, 0, 0.01])) == pytest.approx(0.2)
    falls = np.array([0, 0.02, -0.01, 0.0, 0.03, 0.05])  # the three after the first are pooled, to a third of a point
    assert rate_of_drop(RATES, falls) == pytest.approx(0.0625), "a rise of accuracy is noise"
    below = np.array([0, -0.02, 0.02])  # a fit goes from zero, not from below it
    assert rate_of_drop(np.array([0, 0.1, 0.2]), below) == pytest.approx(0.15)


@pytest.mark.parametrize("num_seeds", [3, 5, 10])
@pytest.mark.parametrize("noise", [0.006, 0.02])
@pytest.mark.parametrize("slope", [0.06, 0.3, 2.0])
def test_budget_interval_covers(num_seeds, noise, slope):
    """Check coverage on made-up data with known budgets, from gentle to steep drops.

    Each seed has an offset at all rates, as real runs do. Coverage may exceed 95 %, since the interval also covers gaps
    between the rates that the test accepts. But with little noise and a steep drop it is short.
    """
    generator = np.random.default_rng(num_seeds)
    budget, covered, widths = 0.01 / slope, [], []
    for _ in range(300):
        deviations = generator.normal(0, 0.01, (num_seeds, 1)) + generator.normal(0, noise, (num_seeds, len(RATES)))
        estimate = loss_budget(RATES, 0.65 - slope * RATES + deviations)
        covered.append(estimate.low <= budget <= estimate.high)
        widths.append(estimate.high - estimate.low)
    assert np.mean(covered) >= 0.95 - 3.5 * math.sqrt(0.95 * 0.05 / 300)
    if (num_seeds, noise, slope) == (10, 0.006, 2.0):
        assert np.median(widths) < 0.01


@pytest.mark.parametrize("num_seeds", [3, 5])
def test_on_a_flat_curve_the_interval_seldom_ends(num_seeds):
    """Without a drop the budget is infinite, so the interval must reach infinity in 95 % of studies."""
    generator = np.random.default_rng(0)
    ends = [loss_budget(RATES, generator.normal(0.6, 0.02, (num_seeds, 6))).high for _ in range(400)]
    assert np.mean(np.isinf(ends)) >= 0.95 - 3.5 * math.sqrt(0.95 * 0.05 / 400)


def test_budget_never_reached_is_infinite_and_identical_seeds_have_no_width():
    assert loss_budget(RATES, np.full((3, 6), 0.7)) == (math.inf, math.inf, math.inf)
    line = loss_budget(RATES, np.tile(0.7 - 0.4 * RATES, (3, 1)))
    assert line == pytest.approx((0.025, 0.025, 0.025))
    assert loss_budget(RATES, np.array([0.7 - 0.4 * RATES])).high == math.inf


def test_save_writes_the_same_bytes_for_the_same_values(tmp_path):
    mpl.use("Agg")
    set_style()
    for name, values in {"a": [1, 2], "b": [1, 2], "c": [1, 3]}.items():
        figure, ax = plt.subplots()
        ax.plot(values, label="values")
        ax.legend()
        save(figure, tmp_path / name, "f")
    for file in ("f.png", "f.svg"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        assert (tmp_path / "a" / file).read_bytes() != (tmp_path / "c" / file).read_bytes()
