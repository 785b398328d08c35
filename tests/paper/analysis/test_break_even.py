"""Check steps to accuracy of made-up curves, and break-even points, by hand."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from lossytp.study.statistics import t_interval
from paper.price import (
    BEST_EFFORT,
    price_against_loss,
    price_of_reliability,
    step_ratios,
    step_ratios_of_both_phases,
    steps_to_accuracy,
    target_accuracies,
)

mpl.use("Agg")
TARGET = {"docstrings": 0.6}
CHANCE = 0.3  # of the records


@pytest.fixture
def run(record):
    """Return a function that makes a run's record with the given accuracies, one every 100 steps."""

    def make(loss_rate, seed, *accuracies, status="finished"):
        curve = [{"step": 100 * number, "accuracy_lossy": each} for number, each in enumerate(accuracies, 1)]
        made = record(loss_rate=loss_rate, seed=seed, accuracy=accuracies[-1], status=status, max_steps=400)
        return made | {"curves": {"eval": curve}}

    return make


def steps(records):
    return steps_to_accuracy(records, TARGET)["steps"].tolist()


def test_the_target_is_a_share_of_the_gain_over_chance_without_losses(run):
    records = [run(0.0, 0, 0.5, 0.7), run(0.0, 1, 0.5, 0.8), run(0.1, 0, 0.4, 0.5)]
    assert target_accuracies(records) == {"docstrings": pytest.approx(CHANCE + 0.9 * (0.75 - CHANCE))}
    assert target_accuracies(records, share=0.5) == {"docstrings": pytest.approx(0.525)}
    with pytest.raises(ValueError, match="docstrings has no run without losses"):
        target_accuracies(records[2:])


def test_steps_are_interpolated_between_evaluations_and_from_chance_at_step_0(run):
    assert steps([run(0.0, 0, 0.5, 0.65, 0.7, 0.7)]) == pytest.approx([100 + 100 * 0.1 / 0.15])
    assert steps([run(0.0, 0, 0.9, 0.9)]) == pytest.approx([50])


def test_an_accuracy_that_does_not_hold_is_not_reached_but_the_last_counts(run):
    assert steps([run(0.0, 0, 0.5, 0.61, 0.5, 0.7, 0.8)]) == pytest.approx([350])
    assert steps([run(0.0, 0, 0.5, 0.5, 0.7)]) == pytest.approx([250])


def test_never_is_not_0(run):
    records = [run(0.1, 0, 0.3, 0.5), run(0.1, 1, 0.5, 0.7, status="not finite")]
    found = steps_to_accuracy(records, TARGET)
    assert found["steps"].isna().all()
    assert found["last_step"].tolist() == [200, 400]


def test_records_without_steps_to_accuracy_are_refused(run):
    with pytest.raises(ValueError, match="evaluated 1 times"):
        steps([run(0.0, 0, 0.7)])
    with pytest.raises(ValueError, match=r"target = 0\.2 is not above an untrained model's accuracy"):
        steps_to_accuracy([run(0.0, 0, 0.7, 0.7)], {"docstrings": 0.2})
    bursts = run(0.1, 0, 0.5, 0.7)
    bursts["config"] |= {"loss_type": "g-e", "mean_burst_packets": 8.0}
    with pytest.raises(ValueError, match=r"docstrings has two runs at 0\.1, seed 0"):
        steps([run(0.1, 0, 0.5, 0.7), bursts])


def reached(**by_rate):
    """Return a row a run of 600 steps: a rate's n-th value is seed n's steps to accuracy."""
    rows = [
        {"task": "t", "loss_rate": float(rate[1:]) / 100, "seed": seed, "steps": value, "last_step": 600}
        for rate, values in by_rate.items()
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_ratios_are_paired_by_seed_and_geometric():
    table = step_ratios(reached(p0=[100, 200, 300], p10=[110, 240, 390]).sample(frac=1, random_state=0))
    lossless, lossy = (row for _, row in table.iterrows())
    assert (lossless["ratio"], lossless["low"], lossless["high"]) == (1, 1, 1)
    expected = np.exp(t_interval(np.log([1.1, 1.2, 1.3])))
    assert lossy[["ratio", "low", "high"]].tolist() == pytest.approx(list(expected))
    assert (lossy["seeds"], lossy["never"]) == (3, 0)


def test_runs_that_never_get_there_bound_the_ratio_from_below():
    nan = float("nan")
    table = step_ratios(reached(p0=[200, 300, 300, nan], p10=[300, nan, nan, 400], p30=[nan, nan, nan, nan]))
    some, all_of_them = (row for _, row in table[table["loss_rate"] > 0].iterrows())
    assert (some["seeds"], some["never"], all_of_them["never"]) == (3, 2, 3)
    assert some["ratio"] == pytest.approx((1.5 * 2 * 2) ** (1 / 3))
    assert all_of_them["ratio"] == pytest.approx((3 * 2 * 2) ** (1 / 3))
    assert some["high"] == all_of_them["high"] == np.inf
    assert some["low"] == all_of_them["low"] == 0  # three say too little
    # Student's interval would begin above 1.106, where it begins when the last two, in fact, need 900 and 1,800 steps
    five = step_ratios(reached(p0=[400] * 5, p10=[590, 595, 600, nan, nan])).iloc[1]
    assert (five["low"], five["high"], five["never"]) == (590 / 400, np.inf, 2)


@pytest.fixture
def times():
    """Return step times at rates 0, 0.1 and 0.2: 1, 1.5 and 4 s over reliable transport, 1, 1 and 2 s best effort."""
    rows = [
        {"transport": transport, "bandwidth_gbits": 10, "round_trip_us": 100, "loss_rate": rate}
        | {"seconds": seconds, "standard_error": 0.01}
        for transport, each in {BEST_EFFORT: (1, 1, 2), "selective repeat": (1, 1.5, 4)}.items()
        for rate, seconds in zip((0.0, 0.1, 0.2), each, strict=True)
    ]
    return pd.DataFrame(rows)


def test_the_price_of_reliability_is_the_ratio_of_the_steps_times(times):
    price = price_of_reliability(times)
    assert price["price"].tolist() == [1, 1.5, 2]
    assert price["kilobytes"].tolist() == [125] * 3  # 10 Gbit/s times 100 us
    assert price["standard_error"].iloc[1] == pytest.approx(1.5 * np.hypot(0.01 / 1.5, 0.01))
    # half of the messages are sent reliably by the loser, too
    half = price_of_reliability(times, best_effort_share=0.5)
    assert half["price"].tolist() == pytest.approx([1, 1.5 / 1.25, 4 / 3])
    reliable, losing = np.random.default_rng(0).normal([[1.5], [1.0]], 0.01, (2, 100_000))
    scatter = (reliable / (losing / 2 + reliable / 2)).std()
    assert half["standard_error"].iloc[1] == pytest.approx(scatter, rel=0.02)


def test_losses_in_the_reduce_phase_alone_are_left_out(run):
    lossless = [run(0.0, seed, 0.5, 0.6, 0.69, 0.7) for seed in (0, 1)]
    reduce = [run(0.2, seed, 0.4, 0.5, 0.6, 0.7) for seed in (0, 1)]
    both = [run(0.2, seed, 0.4, 0.45, 0.5, 0.7) for seed in (0, 1)]
    for each in [*lossless, *reduce]:
        each["config"]["reliable_gather"] = True
    for each in both:
        each["config"]["reliable_gather"] = False
    ratios = step_ratios_of_both_phases([*lossless, *reduce, *both])
    # 0.66, nine tenths of the way from 0.3 to 0.7, is reached at steps 266.7 and 380
    assert ratios["ratio"].tolist() == pytest.approx([1, 380 / (200 + 600 / 9)])


def test_the_figure_shows_price_and_steps(times):
    ratios = step_ratios(reached(p0=[200, 300], p10=[300, 450], p20=[float("nan"), 330]))
    (ax,) = price_against_loss(price_of_reliability(times), ratios).axes
    lines = {line.get_label(): line for line in ax.lines}
    assert lines["125 kB"].get_ydata().tolist() == [1, 1.5, 2]
    assert lines["steps, t"].get_ydata().tolist() == pytest.approx([1.5, (3 * 1.1) ** 0.5])
    (hollow,) = [line for line in ax.lines if line.get_markerfacecolor() == "white"]
    assert hollow.get_xdata().tolist() == [0.2]
    assert price_against_loss(price_of_reliability(times)).axes[0].lines
    fewer = ratios.assign(low=ratios["low"].where(ratios["loss_rate"] == 0, 0.6))
    (ax,) = price_against_loss(price_of_reliability(times), fewer).axes
    assert ax.get_ylim()[0] < 0.6, "an interval's lower end is seen"
