"""The price of waiting, and step times over transports, in closed form."""

import numpy as np
import pandas as pd
import pytest

from paper.price import BEST_EFFORT, GO_BACK_N, Sweep, price_of_reliability, step_times, transports, waiting_times
from paper.timing import AllReduce, Path


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


def times_of(prices):
    """Step times at 10 % loss, where best effort takes a second, by bandwidth."""
    rows = [
        {"bandwidth_gbits": bandwidth, "round_trip_us": 80, "standard_error": 0.0, "transport": t, "loss_rate": rate,
         "seconds": price if t != BEST_EFFORT and rate else 1.0}
        for bandwidth, price in prices.items()
        for t in (BEST_EFFORT, "selective repeat")
        for rate in (0.0, 0.1)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_waiting_costs_less_where_half_of_the_traffic_waits_in_any_case():
    times = times_of({1: 1.2, 10: 2.0, 100: 5.0})
    reduce = waiting_times(times, loss_rate=0.1)
    assert [each["kilobytes"] for each in reduce] == [10.0, 100.0, 1000.0]
    assert [each["times"] for each in reduce] == pytest.approx([1.2 / 1.1, 2 / 1.5, 5 / 3])
    lossless = waiting_times(times, loss_rate=0.0)
    assert [each["times"] for each in lossless] == [1.0] * 3


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
