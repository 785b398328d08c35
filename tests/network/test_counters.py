"""Packets sent and lost, counted."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network.counters import Counters, Site
from tests.network.loss_statistics import reproducible

sites = st.builds(
    Site, st.integers(0, 2), st.sampled_from(["attention", "mlp"]), st.sampled_from(["forward", "backward"])
)
keys = st.tuples(
    st.sampled_from(["training", "evaluation"]),
    st.none() | sites,
    st.sampled_from(["tp", "dp"]),
    st.integers(-1, 2),
    st.integers(-1, 2),
)
additions = st.lists(st.tuples(keys, st.integers(0, 1000), st.integers(0, 1000)), max_size=12)


def counted(calls):
    counters = Counters()
    for row, packets, lost in calls:
        counters.add(row, packets, lost)
    return counters


@reproducible
@given(calls=additions)
def test_rows_total_what_was_added(calls):
    packets, lost = Counter(), Counter()
    for row, more_packets, more_lost in calls:
        packets[row] += more_packets
        lost[row] += more_lost
    rows = {}
    for row in counted(calls).rows():
        site = None if row["layer"] is None else Site(*(row[name] for name in Site._fields))
        rows[row["purpose"], site, row["group"], row["src"], row["dst"]] = row["packets"], row["lost"]
    assert rows == {row: (packets[row], lost[row]) for row, _, _ in calls}


@reproducible
@given(calls=additions)
def test_every_grouping_of_a_summary_adds_up(calls):
    counters = counted(calls)
    for purpose in ("training", "evaluation"):
        summary = counters.summary(purpose)
        assert summary["packets"] == sum(packets for row, packets, _ in calls if row[0] == purpose)
        assert summary["lost"] == sum(lost for row, _, lost in calls if row[0] == purpose)
        for grouping in ("by_direction", "by_module", "by_layer", "by_link"):
            parts = summary[grouping].values()
            assert sum(part["packets"] for part in parts) == summary["packets"]
            assert sum(part["lost"] for part in parts) == summary["lost"]


def test_a_summary_by_hand():
    """Two layers, both directions, two links; evaluation and other purposes stay apart."""
    counters = Counters()
    counters.add(("training", Site(0, "attention", "forward"), "tp", 0, 1), 10, 1)
    counters.add(("training", Site(0, "attention", "forward"), "tp", 0, 1), 10, 2)
    counters.add(("training", Site(0, "mlp", "backward"), "tp", 1, 0), 30, 3)
    counters.add(("training", Site(1, "mlp", "forward"), "tp", 0, 1), 50, 4)
    counters.add(("evaluation", Site(1, "mlp", "forward"), "tp", 0, 1), 7, 7)

    def total(packets, lost):
        return {"packets": packets, "lost": lost, "observed_loss_rate": lost / packets}

    assert counters.summary("training") == {
        **total(100, 10),
        "by_direction": {"forward": total(70, 7), "backward": total(30, 3)},
        "by_operation": {"all_reduce": total(100, 10)},
        "by_module": {"attention": total(20, 3), "mlp": total(80, 7)},
        "by_layer": {"0": total(50, 6), "1": total(50, 4)},
        "by_link": {"0->1": total(70, 7), "1->0": total(30, 3)},
        "messages": {"called": 0, "lossy": 0, "by_direction": {}},
    }
    assert counters.summary("evaluation")["packets"] == 7


@pytest.mark.parametrize("purpose", ["training", "evaluation"])
def test_nothing_sent_has_no_observed_rate(purpose):
    summary = Counters().summary(purpose)
    assert (summary["packets"], summary["lost"], summary["observed_loss_rate"]) == (0, 0, None)


def test_rows_of_one_purpose():
    counters = counted([(("training", None, "tp", 0, 1), 5, 1), (("evaluation", None, "tp", 0, 1), 6, 2)])
    assert [row["packets"] for row in counters.rows("evaluation")] == [6]
    assert [row["packets"] for row in counters.rows()] == [5, 6]


@reproducible
@given(calls=additions, more=additions)
def test_a_saved_state_counts_on(calls, more):
    """Through JSON, into counters that have counted something else."""
    resumed = counted(more)
    resumed.load_state_dict(json.loads(json.dumps(counted(calls).state_dict())))
    for row, packets, lost in more:
        resumed.add(row, packets, lost)
    assert resumed.rows() == counted(calls + more).rows()
