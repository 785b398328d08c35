"""Recorded losses: replayed in a circle from an offset of each link's own, against the recording laid end to end."""

import gzip
import itertools
import math
import os
import re
import struct
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from lossytp.network import Bernoulli, LossyNetwork, Trace
from lossytp.network.traces import FlowTrace, ProbeTrace, burst_lengths, write_trace
from tests.network.loss_statistics import (
    assert_a_saved_state_resumes,
    assert_any_pieces_lose_the_same,
    assert_within,
    batch_means,
    partitions,
    reproducible,
)

KEY = (0, "test")
recordings = st.lists(st.booleans(), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("lost", "expected"), [([], []), ([0], [1]), ([4], [1]), ([0, 1, 3], [2, 1]), ([1, 2, 3, 7, 9, 10], [3, 1, 2])]
)
def test_bursts_are_runs_of_losses(lost, expected):
    assert burst_lengths(np.array(lost, dtype=np.int64)).tolist() == expected


def offset_of(trace, key):
    """Where a link starts, told from its losses alone, for a recording that no turn of the circle leaves the same."""
    is_lost = np.isin(np.arange(trace.num_packets), trace.losses(key).take(trace.num_packets))
    recorded = np.isin(np.arange(trace.num_packets), trace.lost)
    [offset] = [n for n in range(trace.num_packets) if np.array_equal(np.roll(recorded, -n), is_lost)]
    return offset


# Closed forms, by counting


@reproducible
@given(recording=recordings, lag=st.integers(-90, 90))
def test_closed_forms_by_counting_around_the_circle(recording, lag):
    trace, size = Trace.from_indicators(recording), len(recording)
    rate = sum(recording) / size
    assert trace.loss_rate == rate
    if not 0 < rate < 1:
        assert trace.mean_burst_packets == (math.inf if rate else 0)
        assert [trace.autocorrelation(n) for n in (0, 1, size)] == [1, 0, 0]
        return
    begin = recording.index(False)  # around once from a delivered packet, so that no run is cut
    around = "".join("1" if is_lost else "0" for is_lost in recording[begin:] + recording[:begin])
    runs = [len(run) for run in around.split("0") if run]
    assert trace.mean_burst_packets == pytest.approx(sum(runs) / len(runs))
    later = [recording[(n + lag) % size] for n in range(size)]
    assert trace.autocorrelation(lag) == pytest.approx(np.corrcoef(recording, later)[0, 1])


def test_a_burst_that_the_recordings_ends_cut_is_one():
    trace = Trace.from_indicators([1, 1, 0, 0, 1, 0, 0, 1])
    assert trace.mean_burst_packets == 2
    assert (trace.loss_rate, trace.autocorrelation(8)) == (0.5, pytest.approx(1))


def test_links_from_random_offsets_lose_at_the_closed_forms():
    """Each packet of a link is a fair sample of the recording, although a link replays all of it in turn."""
    trace = Trace.from_indicators(np.random.default_rng(0).random(37) < 0.3)
    first_two = np.array([np.isin([0, 5], trace.losses((link, "test")).take(6)) for link in range(20_000)], dtype=float)
    rate = trace.loss_rate
    assert_within(batch_means(first_two[:, 0]), rate, "loss rate")
    both = rate**2 + trace.autocorrelation(5) * rate * (1 - rate)
    assert_within(batch_means(first_two[:, 0] * first_two[:, 1]), both, "lag 5")


# Replay


@reproducible
@given(recording=recordings, sizes=st.lists(st.integers(0, 100), max_size=8), link=st.integers(0, 10))
def test_replays_the_recording_laid_end_to_end(recording, sizes, link):
    """Also counts how often it is begun again."""
    trace = Trace.from_indicators([*recording, True, False])
    losses, size = trace.losses((link,)), len(recording) + 2
    laid = np.tile([*recording, True, False], 3 + sum(sizes) // size)
    fits = [
        n
        for n in range(size)
        if np.array_equal(np.flatnonzero(laid[n : n + 2 * size]), trace.losses((link,)).take(2 * size))
    ]
    assert fits
    taken = 0
    for num_packets in sizes:
        lost = losses.take(num_packets)
        for start in fits:
            np.testing.assert_array_equal(lost, np.flatnonzero(laid[start + taken : start + taken + num_packets]))
        assert lost.dtype == np.int64
        taken += num_packets
    assert losses.state_dict() == {"packets": taken}


def test_wraps_by_hand():
    trace = Trace(lost=[3], num_packets=10)
    losses = trace.losses(KEY)
    to_the_end = 10 - offset_of(trace, KEY)
    losses.take(to_the_end + 9)
    assert losses.take(1 + 4).tolist() == [4]


def test_every_offset_is_as_likely():
    trace = Trace(lost=[0], num_packets=20)
    offsets = [offset_of(trace, (link, "test")) for link in range(4000)]
    assert chisquare(np.bincount(offsets, minlength=20)).pvalue > 1e-4


def test_losses_stay_the_same_across_versions():
    assert Trace(lost=[0, 1, 5], num_packets=30).losses(KEY).take(60).tolist() == [17, 18, 22, 47, 48, 52]


@pytest.mark.parametrize(("recording", "lost"), [([0, 0], 0), ([0], 0), ([1], 100), ([1, 1, 1], 100)])
def test_a_recording_that_never_varies(recording, lost):
    losses = Trace.from_indicators(recording).losses(KEY)
    np.testing.assert_array_equal(losses.take(100), np.arange(lost))
    assert losses.take(0).tolist() == []


# Pieces, states, cost

some_trace = st.sampled_from(
    [
        Trace(lost=[0], num_packets=1),
        Trace(lost=[2, 3, 4], num_packets=7),
        Trace(lost=np.flatnonzero(np.random.default_rng(1).random(3000) < 0.1), num_packets=3000),
        Trace(lost=[], num_packets=5),
        Trace(lost=[10**6], num_packets=10**9),
    ]
)


@reproducible
@given(trace=some_trace, edges=partitions(40_000))
def test_any_pieces_lose_the_same_packets(trace, edges):
    assert_any_pieces_lose_the_same(trace, edges, KEY)


@reproducible
@given(trace=some_trace, edges=partitions(40_000), cut=st.integers(1, 12))
def test_a_saved_state_resumes_with_the_same_losses(trace, edges, cut):
    assert_a_saved_state_resumes(trace, edges[:cut], KEY)


def test_cost_is_that_of_the_losses():
    losses = Trace(lost=[1, 2, 3], num_packets=10**7).losses(KEY)
    before = time.perf_counter()
    assert len(losses.take(10**11)) == pytest.approx(30_000, abs=3)
    assert time.perf_counter() - before < 0.1


# What a trace is made of


def test_equal_content_is_equal():
    one, same = Trace(lost=[1, 3], num_packets=5), Trace.from_indicators(np.array([False, True, False, True, False]))
    others = [Trace(lost=[1, 3], num_packets=6), Trace(lost=[1, 2], num_packets=5), "trace"]
    assert one == same
    assert hash(one) == hash(same)
    assert all(one != other for other in others)
    assert "\n" not in repr(Trace.from_indicators(np.ones(10_000)))


def test_what_was_given_may_change_afterwards():
    lost = np.array([1, 3])
    trace = Trace(lost=lost, num_packets=5)
    lost[0] = 0
    assert trace.lost.tolist() == [1, 3]
    with pytest.raises(ValueError, match="read-only"):
        trace.lost[0] = 0


FILES = {"words.txt": "0 1 1\n0 0\n", "line.txt": "01100", "table.csv": "0,1,1\r\n0,0", "column.csv": "0\n1\n1\n0\n0\n"}


@pytest.mark.parametrize(("name", "text"), FILES.items(), ids=FILES)
def test_from_a_text_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert Trace.from_file(tmp_path / name) == Trace(lost=[1, 2], num_packets=5)
    assert Trace.from_file(str(tmp_path / name)) == Trace(lost=[1, 2], num_packets=5)


def test_from_a_measurement_whose_flows_follow_one_another(tmp_path):
    flows = {1: FlowTrace(lost=np.array([False, True])), 0: FlowTrace(lost=np.array([True, False, False]))}
    write_trace(tmp_path / "a.parquet", ProbeTrace(flows=flows))
    assert Trace.from_file(tmp_path / "a.parquet") == Trace.from_indicators([1, 0, 0, 0, 1])


def test_a_measurement_without_a_packet_is_refused(tmp_path):
    write_trace(tmp_path / "a.parquet", ProbeTrace(flows={0: FlowTrace(lost=np.array([], bool))}))
    with pytest.raises(ValueError, match=r"a\.parquet holds no packets"):
        Trace.from_file(tmp_path / "a.parquet")


def test_a_file_is_read_again_only_if_it_changed(tmp_path, monkeypatch):
    file = tmp_path / "drops.npy"
    np.save(file, np.array([0, 1, 1, 0, 0]))
    first = Trace.from_file(file)
    with monkeypatch.context() as context:
        context.setattr(np, "load", None)
        assert Trace.from_file(file) is first
    np.save(file, np.array([0, 1, 1, 0, 1]))
    os.utime(file, ns=(0, 0))
    assert Trace.from_file(file).lost.tolist() == [1, 2, 4]


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, np.float32])
def test_from_an_array_file(tmp_path, dtype):
    np.save(tmp_path / "drops.npy", np.array([0, 1, 1, 0, 0], dtype=dtype))
    assert Trace.from_file(tmp_path / "drops.npy") == Trace(lost=[1, 2], num_packets=5)


@pytest.mark.parametrize("shape", [(5, 1), (1, 5)])
def test_an_array_with_an_axis_of_one_is_one_flow(tmp_path, shape):
    np.save(tmp_path / "drops.npy", np.array([0, 1, 1, 0, 0]).reshape(shape))
    assert Trace.from_file(tmp_path / "drops.npy") == Trace(lost=[1, 2], num_packets=5)
    assert Trace.from_indicators(np.array([0, 1, 1, 0, 0]).reshape(5, 1)) == Trace(lost=[1, 2], num_packets=5)


@pytest.mark.parametrize(("text", "loud"), [("1 1 0", True), ("1 0", False)])
def test_a_recording_that_lost_more_than_half_is_said(tmp_path, capsys, text, loud):
    (tmp_path / "a.txt").write_text(text)
    Trace.from_file(tmp_path / "a.txt")
    assert ("a.txt: WARNING: 66.7%" in capsys.readouterr().err) == loud


HEADER = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000,), }\n"
HUGE = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(HEADER)) + HEADER + bytes(9)  # claims more than it holds


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"0 2", ["no packets"]),
        ("a.txt", b"lost\n0\n1", ["lossytp.probe import"]),
        ("a.txt", b"", ["no packets"]),
        ("a.txt", b"\xff\x00", ["no packets"]),
        ("a.txt", gzip.compress(b"01", mtime=0)[:-4], ["truncated"]),
        ("a.npy", b"no array", ["not an array"]),
        ("a.npy", b"", ["No data"]),
        ("a.npy", b"PK\x03\x04", ["not a zip file"]),  # half an .npz
        ("a.npy", HUGE, ["not an array"]),
    ],
)
def test_files_that_hold_no_trace_are_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(name)) as refusal:
        Trace.from_file(tmp_path / name)
    assert all(word in str(refusal.value) for word in words)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("path", ["nowhere.txt", "nowhere.npy", "nowhere.parquet", ".", "/dev/zero", 5])
def test_what_is_no_file_is_refused(path):
    with pytest.raises(ValueError, match=rf"{path} cannot be read .*: give the path of a file"):
        Trace.from_file(path)


@pytest.mark.parametrize(
    ("lost", "num_packets", "message"),
    [
        ([], 0, "num_packets = 0 is below 1: give 1 or more"),
        ([3], 10.5, "num_packets = 10.5 is not a whole number"),
        ([3, 1], 5, "rising"),
        ([1, 1], 5, "rising"),
        ([-1], 5, "rising"),
        ([0.5], 5, "rising"),
        ([[1]], 5, "rising"),
        (
            [True, False],
            5,
            r"lost = \[True, False\] is not a rising list of whole numbers from 0: give one, or use from_i",
        ),
        ("abc", 5, "lost = 'abc' is not a rising list"),
        (None, 5, "lost = None is not a rising list"),
        ([math.nan], 5, r"lost = \[nan\] is not a rising list"),
        ([1, 5], 5, "lost packet 5 is not among num_packets = 5"),
    ],
)
def test_impossible_traces_are_refused(lost, num_packets, message):
    with pytest.raises(ValueError, match=message) as refusal:
        Trace(lost=lost, num_packets=num_packets)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("is_lost", [[0, 2], [[0, 1]], [[0], [2]], 1, [0.5], []])
def test_indicators_are_zeros_and_ones(is_lost):
    with pytest.raises(ValueError, match=r"zeros and ones|below 1"):
        Trace.from_indicators(is_lost)


def test_links_start_apart():
    trace = Trace(lost=np.flatnonzero(np.random.default_rng(2).random(500) < 0.2), num_packets=500)
    for one, other in itertools.combinations(
        [trace.losses((0, "tp", src, 1)).take(100).tolist() for src in range(4)], 2
    ):
        assert one != other


@pytest.mark.parametrize(("packets", "wraps"), [(0, 0), (1, 0), (17, 0), (18, 1), (47, 1), (48, 2)])
def test_a_links_wraps_are_counted(packets: int, wraps: int):
    """The link of `KEY` starts at packet 13 of 30."""
    losses = Trace(lost=[0, 1, 5], num_packets=30).losses(KEY)
    losses.take(packets)
    assert losses.wraps == wraps


def test_a_networks_summary_says_how_often_its_recording_began_again():
    network = LossyNetwork({(0, 1): Trace(lost=[2], num_packets=5)}, default=Bernoulli(loss_rate=0.1))
    assert "wraps" not in network.summary("training")
    network.lost_packets(1, 0, 100)
    assert "wraps" not in network.summary("training")
    network.lost_packets(0, 1, 100)
    assert network.summary("training")["wraps"] in (19, 20)
    resumed = LossyNetwork({(0, 1): Trace(lost=[2], num_packets=5)}, default=Bernoulli(loss_rate=0.1))
    resumed.load_state_dict(network.state_dict())
    assert resumed.summary("training") == network.summary("training")
    with network.evaluation(1):
        network.lost_packets(0, 1, 100)
        assert "wraps" not in network.summary("evaluation")
