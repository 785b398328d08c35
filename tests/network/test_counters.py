"""Packets sent and lost, counted."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network import Bernoulli, LossyNetwork
from lossytp.network.scope import COUNTED, NOWHERE, Counters, Site
from tests.network.loss_statistics import reproducible

sites = st.builds(
    Site,
    st.integers(0, 2),
    st.sampled_from(["attention", "mlp"]),
    st.sampled_from(["forward", "backward"]),
    st.sampled_from(["all_reduce", "all_gather"]),
    st.sampled_from(["reduce", "gather"]),
)
keys = st.tuples(
    st.sampled_from(["training", "evaluation"]),
    st.none() | sites,
    st.sampled_from(["tp", "dp"]),
    st.integers(-1, 2),
    st.integers(-1, 2),
)
counts = st.integers(0, 1000)
additions = st.lists(st.tuples(keys, counts, counts, counts, counts), max_size=12)
messages = st.lists(st.tuples(keys.map(lambda key: key[:3]), st.booleans()), max_size=12)


def counters_of(calls, called=()):
    counters = Counters()
    for row, packets, lost, *repaired in calls:
        counters.add(row, packets, lost, *(repaired or (0, lost)))
    for key, lossy in called:
        counters.add_message(key, lossy)
    return counters


@reproducible
@given(calls=additions)
def test_rows_total_what_was_added(calls):
    expected = {row: Counter() for row, *_ in calls}
    for row, *more in calls:
        for name, count in zip(("packets", "lost", "extra", "missing"), more, strict=True):
            expected[row][name] += count
    rows = {}
    for row in counters_of(calls).rows():
        site = None if row["layer"] is None else Site(*(row[name] for name in Site._fields))
        rows[row["purpose"], site, row["group"], row["src"], row["dst"]] = {name: row[name] for name in COUNTED}
    assert rows == expected


@reproducible
@given(calls=additions)
def test_every_grouping_of_a_summary_adds_up(calls):
    counters = counters_of(calls)
    for purpose in ("training", "evaluation"):
        summary = counters.summary(purpose)
        for place, name in enumerate(("packets", "lost", "extra", "missing"), start=1):
            assert summary[name] == sum(call[place] for call in calls if call[0][0] == purpose)
            for grouping in ("by_direction", "by_operation", "by_phase", "by_module", "by_layer", "by_link"):
                assert sum(part[name] for part in summary[grouping].values()) == summary[name]


def test_a_summary_by_hand():
    """Two layers, both directions, two links; evaluation and other purposes stay apart."""
    counters = Counters()
    counters.add(("training", Site(0, "attention", "forward"), "tp", 0, 1), 10, 1, 2, 0)
    counters.add(("training", Site(0, "attention", "forward"), "tp", 0, 1), 10, 2, 2, 1)
    counters.add(("training", Site(0, "mlp", "backward", "all_reduce", "gather"), "tp", 1, 0), 30, 3, 0, 3)
    counters.add(("training", Site(1, "mlp", "forward"), "tp", 0, 1), 50, 4, 5, 2)
    counters.add(("evaluation", Site(1, "mlp", "forward"), "tp", 0, 1), 7, 7, 0, 7)

    def total(packets, lost, extra, missing):
        rate = lost / packets
        return {"packets": packets, "lost": lost, "extra": extra, "missing": missing, "observed_loss_rate": rate}

    assert counters.summary("training") == {
        **total(100, 10, 9, 6),
        "by_direction": {"forward": total(70, 7, 9, 3), "backward": total(30, 3, 0, 3)},
        "by_operation": {"all_reduce": total(100, 10, 9, 6)},
        "by_phase": {"reduce": total(70, 7, 9, 3), "gather": total(30, 3, 0, 3)},
        "by_module": {"attention": total(20, 3, 4, 1), "mlp": total(80, 7, 5, 5)},
        "by_layer": {"0": total(50, 6, 4, 4), "1": total(50, 4, 5, 2)},
        "by_link": {"0->1": total(70, 7, 9, 3), "1->0": total(30, 3, 0, 3)},
        "messages": {"called": 0, "lossy": 0, "by_direction": {}, "by_operation": {}},
    }
    assert counters.summary("evaluation")["packets"] == 7
    counters.add(("training", None, "replicas", 0, 1), 1, 1, 0, 1)  # another end's 0 and 1
    links = counters.summary("training")["by_link"]
    assert {name: row["packets"] for name, row in links.items()} == {
        "tp: 0->1": 70,
        "1->0": 30,
        "replicas: 0->1": 1,
    }


@pytest.mark.parametrize("purpose", ["training", "evaluation"])
def test_nothing_sent_has_no_observed_rate(purpose):
    summary = Counters().summary(purpose)
    assert (summary["packets"], summary["lost"], summary["observed_loss_rate"]) == (0, 0, None)


def test_rows_of_one_purpose():
    counters = counters_of([(("training", None, "tp", 0, 1), 5, 1), (("evaluation", None, "tp", 0, 1), 6, 2)])
    assert [row["packets"] for row in counters.rows("evaluation")] == [6]
    assert [row["packets"] for row in counters.rows()] == [5, 6]


@reproducible
@given(called=messages)
def test_messages_are_totalled_by_direction_and_operation_for_a_purpose(called):
    counters = counters_of([], called)
    for purpose in ("training", "evaluation"):
        messages = counters.summary(purpose)["messages"]
        for grouping in ("direction", "operation"):
            total, lossy = Counter(), Counter()
            for (of, site, _), lost_something in called:
                if of == purpose:
                    group = str(getattr(site or NOWHERE, grouping))
                    total[group] += 1
                    lossy[group] += lost_something
            assert (messages["called"], messages["lossy"]) == (total.total(), lossy.total())
            expected = {name: {"called": total[name], "lossy": lossy[name]} for name in total}
            assert messages[f"by_{grouping}"] == expected


def test_messages_by_hand():
    """Of two groups in one direction, of one in the other, and of sites that nobody knows."""
    counters = Counters()
    forward, backward = Site(0, "mlp", "forward"), Site(None, None, "backward", "send")
    counters.add_message(("training", forward, "tp"), True)
    counters.add_message(("training", forward, "tp"), False)
    counters.add_message(("training", forward, "dp"), True)
    counters.add_message(("training", backward, "tp"), False)
    counters.add_message(("training", None, "tp"), True)
    counters.add_message(("evaluation", forward, "tp"), True)
    assert counters.summary("training")["messages"] == {
        "called": 5,
        "lossy": 3,
        "by_direction": {
            "forward": {"called": 3, "lossy": 2},
            "backward": {"called": 1, "lossy": 0},
            "None": {"called": 1, "lossy": 1},
        },
        "by_operation": {"all_reduce": {"called": 4, "lossy": 3}, "send": {"called": 1, "lossy": 0}},
    }
    assert counters.rows() == [], "a message is no packet"


def test_operations_are_apart_in_rows_and_summary():
    counters = counters_of(
        [
            (("training", Site(None, None, "forward", "all_gather"), "0", 0, 1), 5, 1),
            (("training", Site(None, None, "forward", "send"), "0", 0, 1), 6, 2),
            (("training", Site(None, None, "forward", "send"), "0", 1, 0), 4, 0),
        ]
    )
    assert [row["operation"] for row in counters.rows()] == ["all_gather", "send", "send"]
    by_operation = counters.summary("training")["by_operation"]
    assert {name: (total["packets"], total["lost"]) for name, total in by_operation.items()} == {
        "all_gather": (5, 1),
        "send": (10, 2),
    }


def everything(counters):
    """In an order of its own."""
    return {name: sorted(map(repr, table)) for name, table in counters.state_dict().items()}


@reproducible
@given(calls=additions, called=messages)
def test_what_two_processes_saw_is_counted_once(calls, called):
    merged = counters_of(calls, called)
    merged.merge(counters_of(calls, called))
    assert merged.state_dict() == counters_of(calls, called).state_dict()


@reproducible
@given(calls=additions, called=messages)
def test_what_only_one_process_saw_is_taken_in(calls, called):
    """Each group has rows of its own."""

    def part(group):
        return counters_of([c for c in calls if c[0][2] == group], [c for c in called if c[0][2] == group])

    for first, second in (("tp", "dp"), ("dp", "tp")):
        merged, other = part(first), part(second)
        before = other.state_dict()
        merged.merge(other)
        assert everything(merged) == everything(counters_of(calls, called))
        merged.add(("training", None, second, 0, 1), 1, 1, 1, 1)
        merged.add_message(("training", None, second), True)
        assert other.state_dict() == before, "the other process's counters are now the same object"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([(5, 1)], [(5, 2)]),
        ([(5, 1)], [(6, 1)]),
        ([(5, 1, 1, 0)], [(5, 1, 2, 0)]),
        ([(5, 1, 1, 0)], [(5, 1, 1, 1)]),
    ],
)
def test_processes_that_disagree_on_a_link_ran_apart(first, second):
    key = ("training", Site(None, None, "forward"), "tp", 0, 1)
    mine, theirs = (counters_of([(key, *counts) for counts in each]) for each in (first, second))
    with pytest.raises(
        ValueError, match=r"^processes disagree on the traffic of \('training', Site\(.*\), 'tp', 0, 1\): "
    ):
        mine.merge(theirs)


@pytest.mark.parametrize("theirs", [[True], [False, False], []])
def test_processes_that_disagree_on_messages_ran_apart(theirs):
    """One that saw none of them does not disagree."""
    key = ("training", None, "tp")
    mine, other = counters_of([], [(key, False)]), counters_of([], [(key, lossy) for lossy in theirs])
    if theirs:
        with pytest.raises(
            ValueError, match=r"^processes disagree on the traffic of .*: \[1, 0\] and \[.*\]; give all the same seed"
        ):
            mine.merge(other)
    else:
        mine.merge(other)
        assert mine.summary("training")["messages"]["called"] == 1


@reproducible
@given(calls=additions, more=additions, called=messages, more_called=messages)
def test_a_saved_state_counts_on(calls, more, called, more_called):
    """Through JSON, into counters that have counted something else."""
    resumed = counters_of(more, more_called)
    resumed.load_state_dict(json.loads(json.dumps(counters_of(calls, called).state_dict())))
    for row, *further in more:
        resumed.add(row, *further)
    for key, lossy in more_called:
        resumed.add_message(key, lossy)
    assert resumed.rows() == counters_of(calls + more).rows()
    assert resumed.state_dict() == counters_of(calls + more, called + more_called).state_dict()


@pytest.mark.parametrize("purpose", ["eval", "Training", None, 3])
def test_a_summary_of_another_purpose_is_refused(purpose):
    """It would be a summary of nothing."""
    with pytest.raises(ValueError, match=r"^purpose = .* is unknown: choose one of training, evaluation$"):
        LossyNetwork(Bernoulli(loss_rate=0.1)).summary(purpose)
