"""Steps to accuracy of made-up curves, break-even points, and step times over transports, in closed form."""

import numpy as np
import pandas as pd
import pytest

from lossytp.study.statistics import t_interval
from paper.price import (
    BEST_EFFORT,
    GO_BACK_N,
    Sweep,
    price_of_reliability,
    step_ratios,
    step_ratios_of_both_phases,
    step_times,
    steps_to_accuracy,
    target_accuracies,
    transports,
)
from paper.timing import AllReduce, Path

TARGET = {"docstrings": 0.6}
CHANCE = 0.3  # of the records


@pytest.fixture
def run(record):
    """Return a function that makes a run's record with the given accuracies, one every 100 steps."""

    def make(loss_rate, seed, *accuracies, status="finished", **config):
        curve = [{"step": 100 * number, "accuracy_lossy": each} for number, each in enumerate(accuracies, 1)]
        made = record(loss_rate=loss_rate, seed=seed, accuracy=accuracies[-1], status=status, max_steps=400, **config)
        return made | {"curves": {"eval": curve}}

    return make


def test_target_accuracies_are_a_share_of_the_gain_over_chance_without_losses(run):
    records = [run(0.0, 0, 0.5, 0.7), run(0.0, 1, 0.5, 0.8), run(0.1, 0, 0.4, 0.5)]
    assert target_accuracies(records) == {"docstrings": pytest.approx(CHANCE + 0.9 * (0.75 - CHANCE))}
    with pytest.raises(ValueError, match="docstrings has no run without losses"):
        target_accuracies(records[2:])


@pytest.mark.parametrize(
    ("accuracies", "steps"),
    [
        ((0.5, 0.65, 0.7, 0.7), 100 + 100 * 0.1 / 0.15),  # between two evaluations
        ((0.9, 0.9), 50),  # from chance at step 0
        ((0.5, 0.61, 0.5, 0.7, 0.8), 350),  # what does not hold is not reached
        ((0.5, 0.5, 0.7), 250),  # but the last evaluation counts
        ((0.3, 0.5), np.nan),  # never
    ],
)
def test_steps_to_accuracy(run, accuracies, steps):
    (found,) = steps_to_accuracy([run(0.0, 0, *accuracies)], TARGET)["steps"]
    assert found == pytest.approx(steps, nan_ok=True)


def test_steps_to_accuracy_of_a_diverged_run_are_unknown_and_other_records_are_refused(run):
    assert steps_to_accuracy([run(0.1, 1, 0.5, 0.7, status="not finite")], TARGET)["steps"].isna().all()
    with pytest.raises(ValueError, match="evaluated 1 times"):
        steps_to_accuracy([run(0.0, 0, 0.7)], TARGET)
    with pytest.raises(ValueError, match=r"target = 0\.2"):
        steps_to_accuracy([run(0.0, 0, 0.7, 0.7)], {"docstrings": 0.2})
    with pytest.raises(ValueError, match=r"docstrings has two runs at 0\.1, seed 0"):
        steps_to_accuracy([run(0.1, 0, 0.5, 0.7), run(0.1, 0, 0.5, 0.7, algorithm="ring")], TARGET)


def reached(**by_rate):
    """Return a row a run of 600 steps: a rate's n-th value is seed n's steps to accuracy."""
    rows = [
        {"task": "t", "loss_rate": float(rate[1:]) / 100, "seed": seed, "steps": value, "last_step": 600}
        for rate, values in by_rate.items()
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_step_ratios_are_paired_by_seed_and_geometric():
    table = step_ratios(reached(p0=[100, 200, 300], p10=[110, 240, 390]).sample(frac=1, random_state=0))
    lossless, lossy = (row for _, row in table.iterrows())
    assert (lossless["ratio"], lossless["low"], lossless["high"]) == (1, 1, 1)
    expected = np.exp(t_interval(np.log([1.1, 1.2, 1.3])))
    assert lossy[["ratio", "low", "high"]].tolist() == pytest.approx(list(expected))
    assert (lossy["seeds"], lossy["never"]) == (3, 0)


def test_step_ratios_of_runs_that_never_get_there_are_bounds_from_below():
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


def test_step_ratios_of_both_phases_leave_out_losses_in_the_reduce_phase_alone(run):
    lossless = [run(0.0, seed, 0.5, 0.6, 0.69, 0.7, reliable_gather=True) for seed in (0, 1)]
    reduce = [run(0.2, seed, 0.4, 0.5, 0.6, 0.7, reliable_gather=True) for seed in (0, 1)]
    both = [run(0.2, seed, 0.4, 0.45, 0.5, 0.7, reliable_gather=False) for seed in (0, 1)]
    ratios = step_ratios_of_both_phases([*lossless, *reduce, *both])
    # 0.66, nine tenths of the way from 0.3 to 0.7, is reached at steps 266.7 and 380
    assert ratios["ratio"].tolist() == pytest.approx([1, 380 / (200 + 600 / 9)])


def test_price_of_reliability_is_the_ratio_of_the_steps_times():
    rows = [
        {"transport": transport, "bandwidth_gbits": 10, "round_trip_us": 100, "loss_rate": rate}
        | {"seconds": seconds, "standard_error": 0.01}
        for transport, each in {BEST_EFFORT: (1, 1, 2), "selective repeat": (1, 1.5, 4)}.items()
        for rate, seconds in zip((0.0, 0.1, 0.2), each, strict=True)
    ]
    price = price_of_reliability(pd.DataFrame(rows))
    assert price["price"].tolist() == [1, 1.5, 2]
    assert price["kilobytes"].tolist() == [125] * 3  # 10 Gbit/s times 100 us
    assert price["standard_error"].iloc[1] == pytest.approx(1.5 * np.hypot(0.01 / 1.5, 0.01))
    half = price_of_reliability(pd.DataFrame(rows), best_effort_share=0.5)  # the other half waits in any case
    assert half["price"].tolist() == pytest.approx([1, 1.5 / 1.25, 4 / 3])
    reliable, losing = np.random.default_rng(0).normal([[1.5], [1.0]], 0.01, (2, 100_000))
    scatter = (reliable / (losing / 2 + reliable / 2)).std()
    assert half["standard_error"].iloc[1] == pytest.approx(scatter, rel=0.02)


# Step times

ALL_REDUCE = {"algorithm": "direct", "ranks": 4, "num_elements": 64 * 1456, "itemsize": 2}
NUM_PACKETS = 3 * 32  # two packets carry a token
SWEEP = {"bandwidths_gbits": [10], "round_trips_us": [10, 1000], "loss_rates": [0.0, 0.01, 0.1]}
STEP = {"num_layers": 3, "timeout_round_trips": 1.5, "samples": 40, "seed": 0}


def timed(**changes):
    given = ALL_REDUCE | SWEEP | STEP | changes
    of = (AllReduce, ALL_REDUCE), (Sweep, SWEEP)
    return step_times(
        *(kind(**{name: given[name] for name in names}) for kind, names in of), **{name: given[name] for name in STEP}
    )


@pytest.fixture(scope="module")
def table():
    return timed().set_index(["transport", "round_trip_us", "loss_rate"])


@pytest.mark.parametrize("round_trip_us", [10, 1000])
def test_step_times_without_losses_and_of_best_effort_take_the_closed_form(table, round_trip_us):
    """Each layer has four collectives of two messages, and no window binds.

    Best effort waits a round trip wherever a last packet is lost.
    """
    for transport in (BEST_EFFORT, "selective repeat", GO_BACK_N):
        row = table.loc[transport, round_trip_us, 0.0]
        assert row["seconds"] == pytest.approx(3 * 4 * 2 * (NUM_PACKETS * 1.2e-6 + round_trip_us * 0.5e-6))
        assert row["standard_error"] == pytest.approx(0, abs=1e-12)
    waits = 3 * 4 * 2 * (1 - 0.9**4) * round_trip_us * 1e-6
    lossless, lossy = (table.loc[BEST_EFFORT, round_trip_us, rate] for rate in (0.0, 0.1))
    assert abs(lossy["seconds"] - lossless["seconds"] - waits) < 5 * lossy["standard_error"]
    assert abs(lossy["seconds"] - lossless["seconds"] - 1.5 * waits) > 2 * lossy["standard_error"]


@pytest.mark.parametrize("transport", ["selective repeat", GO_BACK_N])
def test_step_times_of_reliability_grow_with_losses_and_the_round_trip(table, transport):
    price = table.loc[transport, "seconds"] / table.loc[BEST_EFFORT, "seconds"]
    assert price[10][0.0] < price[10][0.01] < price[10][0.1] < price[1000][0.1]
    assert price[1000][0.0] < price[1000][0.01] < price[1000][0.1]
    assert price[10][0.1] > 1 / 0.9  # what is sent again, and the wait for it
    assert table.loc[GO_BACK_N, 1000, 0.1]["seconds"] > 3 * table.loc["selective repeat", 1000, 0.1]["seconds"]


def test_step_times_leave_go_back_n_out_where_its_simulation_would_not_end():
    rates = [0.0, 0.01, 0.5]
    rows = timed(round_trips_us=[1000], loss_rates=rates, samples=1).groupby("transport")["loss_rate"].apply(list)
    assert rows.to_dict() == {BEST_EFFORT: rates, "selective repeat": rates, GO_BACK_N: rates[:2]}


def test_transports_have_windows_that_cover_a_loss_and_its_repair_but_not_two():
    path = Path(bandwidth_bits_per_s=12e9, round_trip_s=100e-6)  # 100 packets a round trip
    reliable = transports(1000, path, 1.5)["selective repeat"]
    assert reliable.timeout_s == pytest.approx(153e-6)
    assert reliable.window_packets in (254, 255)  # rounding apart
    assert transports(1000, path, 1.5)[BEST_EFFORT].deadline_s == pytest.approx(1150e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("itemsize", 0), ("ranks", "4"), ("seed", None), ("timeout_round_trips", "1")),
        *(("bandwidths_gbits", [10, 0]), ("bandwidths_gbits", []), ("round_trips_us", [-1]), ("loss_rates", 0.1)),
        ("loss_rates", [1.5]),
    ],
)
def test_step_times_of_what_cannot_be_timed_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name} = "):
        timed(**{name: value})
