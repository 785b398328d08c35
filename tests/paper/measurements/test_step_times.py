"""Check the times of training steps over different transports against closed forms."""

import re

import pytest

from paper.price import BEST_EFFORT, GO_BACK_N, Sweep, step_times, transports
from paper.timing import AllReduce, Path

ALL_REDUCE = {"algorithm": "direct", "ranks": 4, "num_elements": 64 * 1456, "itemsize": 2}
NUM_PACKETS = 3 * 32  # two packets carry a token
RATES = [0.0, 0.01, 0.1]


@pytest.fixture(scope="module")
def table():
    """Return step times, indexed by transport, round trip and loss rate."""
    sweep = Sweep(bandwidths_gbits=[10], round_trips_us=[10, 1000], loss_rates=RATES)
    times = step_times(AllReduce(**ALL_REDUCE), sweep, num_layers=3, timeout_round_trips=1.5, samples=40, seed=0)
    return times.set_index(["transport", "round_trip_us", "loss_rate"])


@pytest.mark.parametrize("round_trip_us", [10, 1000])
@pytest.mark.parametrize("transport", [BEST_EFFORT, "selective repeat", GO_BACK_N])
def test_without_losses_all_take_the_closed_form(table, transport, round_trip_us):
    """Each layer has four collectives of two messages; no window binds."""
    row = table.loc[transport, round_trip_us, 0.0]
    assert row["seconds"] == pytest.approx(3 * 4 * 2 * (NUM_PACKETS * 1.2e-6 + round_trip_us * 0.5e-6))
    assert row["standard_error"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("round_trip_us", [10, 1000])
def test_best_effort_waits_a_round_trip_wherever_a_last_packet_is_lost(table, round_trip_us):
    waits = 3 * 4 * 2 * (1 - 0.9**4) * round_trip_us * 1e-6
    lossless, lossy = (table.loc[BEST_EFFORT, round_trip_us, rate] for rate in (0.0, 0.1))
    assert abs(lossy["seconds"] - lossless["seconds"] - waits) < 5 * lossy["standard_error"]
    assert abs(lossy["seconds"] - lossless["seconds"] - 1.5 * waits) > 2 * lossy["standard_error"]


@pytest.mark.parametrize("transport", ["selective repeat", GO_BACK_N])
def test_reliability_costs_more_the_more_is_lost_and_the_longer_the_round_trip(table, transport):
    price = table.loc[transport, "seconds"] / table.loc[BEST_EFFORT, "seconds"]
    assert price[10][0.0] < price[10][0.01] < price[10][0.1]
    assert price[1000][0.0] < price[1000][0.01] < price[1000][0.1]
    assert price[10][0.1] < price[1000][0.1]
    assert price[10][0.1] > 1 / 0.9  # what is sent again, and the wait for it
    assert table.loc[GO_BACK_N, 1000, 0.1]["seconds"] > 3 * table.loc["selective repeat", 1000, 0.1]["seconds"]


def test_go_back_n_is_left_out_where_its_simulation_would_not_end():
    rates = [0.0, 0.01, 0.5]
    sweep = Sweep(bandwidths_gbits=[10], round_trips_us=[1000], loss_rates=rates)
    times = step_times(AllReduce(**ALL_REDUCE), sweep, num_layers=3, timeout_round_trips=1.5, samples=1, seed=0)
    rows = times.groupby("transport")["loss_rate"].apply(list)
    assert rows.to_dict() == {BEST_EFFORT: rates, "selective repeat": rates, GO_BACK_N: rates[:2]}


def test_windows_cover_a_loss_and_its_repair_but_not_two():
    path = Path(bandwidth_bits_per_s=12e9, round_trip_s=100e-6)  # 100 packets a round trip
    reliable = transports(1000, path, 1.5)["selective repeat"]
    assert reliable.timeout_s == pytest.approx(153e-6)
    assert reliable.window_packets in (254, 255)  # rounding apart
    assert transports(1000, path, 1.5)[BEST_EFFORT].deadline_s == pytest.approx(1150e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"itemsize": 0}, "itemsize = 0 is below 1: give 1 or more"),
        ({"ranks": "4"}, "ranks = '4' is not a whole number: give one, 1 or more"),
        ({"seed": None}, "seed = None is not a whole number: give one, 0 or more"),
        ({"bandwidths_gbits": [10, 0]}, "bandwidths_gbits = 0 is not a finite number above 0: give a number of Gbit/s"),
        ({"bandwidths_gbits": []}, "bandwidths_gbits = [] is not a list of at least one value: give one"),
        ({"round_trips_us": []}, "round_trips_us = [] is not a list of at least one value: give one"),
        ({"round_trips_us": [-1]}, "round_trips_us = -1 is negative or infinite: give 0 microseconds or more"),
        ({"loss_rates": 0.1}, "loss_rates = 0.1 is not a list of at least one value: give one"),
        ({"loss_rates": [1.5]}, "loss_rates = 1.5 is not in [0, 1]: give a fraction"),
        (
            {"timeout_round_trips": "1"},
            "timeout_round_trips = '1' is not a number: give 0 round trips or more",
        ),
    ],
)
def test_what_cannot_be_timed_is_refused_by_name(values, message):
    given = {**ALL_REDUCE, "num_layers": 1, "samples": 2, "seed": 0}
    given |= {"bandwidths_gbits": [10], "round_trips_us": [10], "loss_rates": [0.1], "timeout_round_trips": 1.5}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        measured(given | values)


def measured(given):
    all_reduce = AllReduce(**{name: given.pop(name) for name in ALL_REDUCE})
    sweep = Sweep(**{name: given.pop(name) for name in ("bandwidths_gbits", "round_trips_us", "loss_rates")})
    return step_times(all_reduce, sweep, **given)
