"""Check what made-up runs lost and sent by hand."""

import pandas as pd

from paper.comparisons import mean_by_arm, speed_and_traffic, traffic_costs
from paper.robustness import copy_spreads, stream_distances


def run(*, extra=0, lost=0, points=()):
    """Return a record whose messages took 100 packets."""
    traffic = {"packets": 100 + extra, "extra": extra, "lost": lost}
    return {"network": {"training": traffic}, "timing": {"steps": 4}, "curves": {"eval": list(points)}}


def test_shares_are_of_the_messages_own_packets():
    assert traffic_costs(run(extra=25, lost=3)) == {"extra_packet_share": 0.25, "lost_a_step": 0.75}
    assert traffic_costs(run(lost=10))["extra_packet_share"] == 0


def measured(operations, **more):
    """Return a run's record with 4 packets, 1 of them lost, for each operation; the messages are an older record's."""
    counts = {"packets": 4, "lost": 1}
    traffic = {"by_direction": {"backward": counts}, "by_operation": dict.fromkeys(operations, counts)}
    traffic["messages"] = {"called": 3, "lossy": 2, "by_direction": {"backward": {"called": 3, "lossy": 2}}}
    return {
        "config": {"loss_rate": 0.1, "data_parallel_size": 2, "max_steps": 10},
        "timing": {"step_seconds": 0.25, "tokens_per_second": 800.0, "device": "cpu"},
        "environment": {"processor": "this one"},
        "network": {"training": traffic},
        "time_to_accuracy": None,
        **more,
    }


def test_the_summary_has_speed_time_to_accuracy_and_collectives_by_direction_and_operation():
    reached = {"target": 0.7, "step": 5, "seconds": 1.5}
    row = speed_and_traffic([measured(["all_reduce"], times_to_targets=[reached])]).iloc[0]
    speed = {name: row[name] for name in row.index if name.startswith("machine") and pd.notna(row[name])}
    assert speed == {
        "machine_processor": "this one", "machine_step_seconds": 0.25, "machine_tokens_per_second": 800.0,
        "machine_seconds_to_0.7": 1.5,
    }  # fmt: skip
    assert row["steps_to_0.7"] == 5
    assert pd.isna(row["steps_to_target"])
    for name in ("backward", "all_reduce"):  # an only operation's calls are all of them
        counted = [row[f"{name}_{what}"] for what in ("called", "lossy", "packets", "lost")]
        assert counted == [3, 2, 4, 1]
    sharded = measured(["all_gather", "reduce_scatter"])
    assert speed_and_traffic([sharded])["all_gather_called"].isna().all(), "unknown"
    calls = {"all_gather": {"called": 2, "lossy": 2}, "reduce_scatter": {"called": 1, "lossy": 0}}
    sharded["network"]["training"]["messages"]["by_operation"] = calls
    row = speed_and_traffic([sharded]).iloc[0]
    assert (row["all_gather_called"], row["reduce_scatter_lossy"], row["reduce_scatter_lost"]) == (2, 0, 1)


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
