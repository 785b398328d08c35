"""Check what made-up runs lacked and cost by hand."""

import math

import pandas as pd
import pytest

from lossytp.study.run_measures import (
    MESSAGE_BYTES,
    PATH,
    copy_spreads,
    expected_errors,
    mean_by_arm,
    mean_over_seeds,
    stream_distances,
    traffic_costs,
)
from lossytp.training.config import TrainConfig


def run(*, extra=0, missing=0, points=(), **config):
    """Return a record whose messages took 100 packets."""
    config = TrainConfig.from_dict(config).as_dict()
    traffic = {"packets": 100 + extra, "extra": extra, "missing": missing, "lost": missing}
    timing = {"steps": 4}
    return {"config": config, "network": {"training": traffic}, "timing": timing, "curves": {"eval": list(points)}}


def test_shares_are_of_the_messages_own_packets():
    parity = traffic_costs(run(repair="fec(10, 8)", extra=25, missing=3, loss_rate=0.1))
    assert (parity["extra_packet_share"], parity["missing_packet_share"], parity["lost_a_step"]) == (0.25, 0.03, 0.75)
    message_s = MESSAGE_BYTES / 1456 * 1500 * 8 / 10e9
    assert parity["time"] == pytest.approx(1 + 0.25 * message_s / (message_s + 50e-6), rel=1e-3)
    nothing = traffic_costs(run(repair="zero", missing=10, loss_rate=0.1))
    assert (nothing["extra_packet_share"], nothing["time"]) == (0, 1)


def test_each_retransmission_waits_a_round_trip():
    once, twice = (traffic_costs(run(repair=f"retransmit({budget})", loss_rate=0.1))["time"] for budget in (1, 2))
    assert twice - 1 == pytest.approx(2 * (once - 1))
    assert (once - 1) * (MESSAGE_BYTES / 1456 * PATH.packet_s + 50e-6) == pytest.approx(100e-6, rel=1e-3)


def test_expected_errors_are_of_the_runs_algorithm_and_ranks():
    coherence = {"2": 0.5, "8": 0.1}
    direct = expected_errors(run(tensor_parallel_size=8, loss_rate=0.2), coherence)
    assert direct["missing_share"] == pytest.approx(7 / 8 * 0.2)
    assert direct["squared_error"] == pytest.approx((7 * 0.2 + 0.1 * 7 * 6 * 0.04) / (8 + 0.1 * 56))
    assert expected_errors(run(tensor_parallel_size=2, loss_rate=0.2), coherence)["missing_share"] == pytest.approx(0.1)
    shards = run(tensor_parallel_size=2, loss_rate=0.2, sequence_parallel=True)
    assert expected_errors(shards, coherence)["missing_share"] == pytest.approx(0.1)
    shards["config"]["reliable_gather"] = False  # what is gathered is no sum
    assert all(math.isnan(value) for value in expected_errors(shards, coherence).values())


def test_means_are_over_the_runs_of_an_arm():
    table = pd.DataFrame({"task": "t", "arm": ["a", "a", "b"], "loss_rate": 0.1}, index=[4, 7, 9])
    means = mean_by_arm(table, [{"x": 1.0}, {"x": 3.0}, {"x": 5.0}])
    assert means.set_index("arm")["x"].to_dict() == {"a": 2.0, "b": 5.0}


def test_means_over_seeds_have_intervals_and_leave_out_what_was_not_finite():
    rows = [("own", 1, 0, 0.1), ("own", 1, 1, 0.3), ("own", 1, 2, None), ("own", 2, 0, 0.5)]
    table = mean_over_seeds(pd.DataFrame(rows, columns=["arm", "layer", "seed", "distance"]), "distance")
    assert table[["arm", "layer"]].values.tolist() == [["own", 1], ["own", 2]]
    assert table["distance"].tolist() == pytest.approx([0.2, 0.5])
    assert table["high"].tolist() == pytest.approx([0.2 + 12.706 * 0.1, math.inf], rel=1e-3)


def test_distances_are_one_row_a_layer_and_runs_of_one_stream_have_none():
    apart = {"step": 5, "stream_distance": [0.1, 0.2], "replica_drift": 0.3}
    runs = [run(points=[apart]), run(points=[{"step": 5, "stream_distance": None, "replica_drift": 0.0}])]
    table = pd.DataFrame({"task": "t", "arm": ["own", "one"], "seed": 0})
    streams, copies = stream_distances(table, runs), copy_spreads(table, runs)
    assert streams[["arm", "step", "layer", "distance"]].values.tolist() == [["own", 5, 1, 0.1], ["own", 5, 2, 0.2]]
    assert copies[["arm", "spread"]].values.tolist() == [["own", 0.3]]
