"""Lossy collectives against routes, theory and sums computed part by part, and the channel against closed forms."""

import numpy as np
import pytest

import lossytp as ltp
from notebooks.collectives import burst_table, completion_times, errors_by_rank, measure, squared_errors, who_lacks_what
from paper import timing as transport
from paper.timing import AllReduce

NOTHING, SOME = ltp.Bernoulli(loss_rate=0.0), ltp.Bernoulli(loss_rate=0.2)
OWN = {"reliable_gather": False}


def test_who_lacks_what_is_whole_packets_of_the_routes() -> None:
    lacks = who_lacks_what("ring", ltp.Bernoulli(loss_rate=1.0), ranks=3, num_elements=3 * 364, seed=0)
    # every hop loses: of a chunk only its owner's part reaches the sum, and nobody else gets it
    assert (lacks["reduce"][:, ::364] == ~np.eye(3, dtype=bool)).all()
    assert (lacks["gather"] == lacks["reduce"]).all()
    assert not any(lost.any() for lost in who_lacks_what("tree", NOTHING, ranks=4, num_elements=999, seed=0).values())


def test_errors_of_each_rank_are_where_it_lacks_something() -> None:
    settings = {"ranks": 4, "coherence": 0.5, "num_packets": 40, "seed": 3}
    assert not errors_by_rank(NOTHING, OWN, **settings).any()
    errors = errors_by_rank(SOME, OWN, **settings)
    assert errors.shape == (4, 40)
    assert not (errors == errors[0]).all()
    shared = errors_by_rank(SOME, {"repair": "retransmit(3)"}, **settings)
    assert (shared == shared[0]).all()
    assert shared.sum() < errors.sum() / 5


def test_measured_errors_are_those_expected_and_nothing_without_losses() -> None:
    ways = [{"algorithm": "ring"}, {"repair": "rescale", **OWN}]
    settings = {"ranks": 4, "coherence": 0.5, "num_elements": 40 * 364, "num_messages": 30, "seed": 1}
    table = squared_errors(SOME, ways, **settings)
    assert (abs(table["measured"] - table["expected"]) < 4 * table["standard_error"]).all()
    assert table["reliable_gather"].tolist() == [True, False]
    other = squared_errors(ltp.Bernoulli(loss_rate=0.1), ways, **settings)
    assert (abs(other["measured"] - table["expected"]) > 4 * other["standard_error"]).all(), "the control"
    assert squared_errors(NOTHING, ways[:1], **settings)["measured"].tolist() == pytest.approx([0], abs=1e-12)


def test_completion_times_of_each_algorithm() -> None:
    times = completion_times(
        [AllReduce(algorithm=name, num_elements=10_000, ranks=4) for name in ("ring", "switch")],
        {"best effort": transport.BestEffort(deadline_s=1.0)},
        {"Bernoulli": SOME},
        path=transport.Path(bandwidth_bits_per_s=10e9, round_trip_s=1e-5),
        samples=400,
        seed=0,
    )
    assert times["algorithm"].tolist() == ["ring", "switch"]
    assert times["missing_share"].to_numpy() == pytest.approx(0.2, abs=0.02)
    assert (times["p50_s"] <= times["p999_s"]).all()


# The channel


def test_burst_table_holds_shares_near_the_closed_form():
    process = ltp.GilbertElliott.from_loss_and_burst(loss_rate=0.05, mean_burst_packets=2)
    table = burst_table(process, num_packets=1_000_000, seed=0)
    assert table["measured"].sum() == pytest.approx(1, abs=1e-3)
    assert table["expected"].tolist()[:3] == pytest.approx([0.5, 0.25, 0.125])
    assert table["measured"].tolist()[:3] == pytest.approx([0.5, 0.25, 0.125], abs=0.02)


@pytest.mark.parametrize("burst", [2, 8])
def test_measured_agrees_with_the_closed_form(burst):
    process = ltp.GilbertElliott.from_loss_and_burst(loss_rate=0.05, mean_burst_packets=burst)
    table = measure(process, num_packets=1_000_000, seed=1)
    assert ((table["measured"] - table["expected"]).abs() < 4 * table["standard_error"]).all()
    assert (table["standard_error"] > 0).all()


def test_another_process_is_found_out():
    class Mistaken(ltp.GilbertElliott):
        @property
        def mean_burst_packets(self):
            return 8.0

    table = measure(Mistaken(p_good_to_bad=0.03, p_bad_to_good=0.1428), num_packets=1_000_000, seed=1)
    burst = table.set_index("quantity").loc["mean burst, packets"]
    assert abs(burst["measured"] - burst["expected"]) > 6 * burst["standard_error"]  # 7.0 against 8
