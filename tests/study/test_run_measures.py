"""Check what made-up runs lost and sent by hand."""

import pandas as pd

from lossytp.study.run_measures import (
    copy_spreads,
    mean_by_arm,
    stream_distances,
    traffic_costs,
)


def run(*, extra=0, lost=0, points=()):
    """Return a record whose messages took 100 packets."""
    traffic = {"packets": 100 + extra, "extra": extra, "lost": lost}
    return {"network": {"training": traffic}, "timing": {"steps": 4}, "curves": {"eval": list(points)}}


def test_shares_are_of_the_messages_own_packets():
    assert traffic_costs(run(extra=25, lost=3)) == {"extra_packet_share": 0.25, "lost_a_step": 0.75}
    assert traffic_costs(run(lost=10))["extra_packet_share"] == 0


def test_means_are_over_the_runs_of_an_arm():
    table = pd.DataFrame({"task": "t", "arm": ["a", "a", "b"], "loss_rate": 0.1}, index=[4, 7, 9])
    means = mean_by_arm(table, [{"x": 1.0}, {"x": 3.0}, {"x": 5.0}])
    assert means.set_index("arm")["x"].to_dict() == {"a": 2.0, "b": 5.0}


def test_distances_are_one_row_a_layer_and_runs_of_one_stream_have_none():
    apart = {"step": 5, "stream_distance": [0.1, 0.2], "replica_drift": 0.3}
    runs = [run(points=[apart]), run(points=[{"step": 5, "stream_distance": None, "replica_drift": 0.0}])]
    table = pd.DataFrame({"task": "t", "arm": ["own", "one"], "seed": 0})
    streams, copies = stream_distances(table, runs), copy_spreads(table, runs)
    assert streams[["arm", "step", "layer", "distance"]].values.tolist() == [["own", 5, 1, 0.1], ["own", 5, 2, 0.2]]
    assert copies[["arm", "spread"]].values.tolist() == [["own", 0.3]]
