"""Recorded losses, functions of the packets' numbers, correlated links, and processes by name."""

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

from lossyprobe.trace_file import FlowTrace, ProbeTrace, write_trace
from lossytp.network import (
    LOSS_PROCESSES,
    Bernoulli,
    Correlated,
    FourState,
    GilbertElliott,
    LossyNetwork,
    PerPacket,
    Trace,
    from_netem,
    loss_process_named,
)
from lossytp.network.losses import Stream
from lossytp.network.routes import ALGORITHMS
from tests.network.loss_statistics import reproducible
from tests.network.processes import OTHERS, shared_losses

KEY = (0, "test")
recordings = st.lists(st.booleans(), min_size=1, max_size=40)


def offset_of(trace, key):
    """Where a link starts, told from its losses alone, for a recording that no turn of the circle leaves the same."""
    is_lost = np.isin(np.arange(trace.num_packets), trace.losses(key).take(trace.num_packets))
    recorded = np.isin(np.arange(trace.num_packets), trace.lost)
    [offset] = [n for n in range(trace.num_packets) if np.array_equal(np.roll(recorded, -n), is_lost)]
    return offset


# Traces


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


@reproducible
@given(recording=recordings, sizes=st.lists(st.integers(0, 100), max_size=8), link=st.integers(0, 10))
def test_replays_the_recording_laid_end_to_end(recording, sizes, link):
    trace = Trace.from_indicators([*recording, True, False])
    losses, size = trace.losses((link,)), len(recording) + 2
    laid, first = np.tile([*recording, True, False], 3 + sum(sizes) // size), trace.losses((link,)).take(2 * size)
    fits = [n for n in range(size) if np.array_equal(np.flatnonzero(laid[n : n + 2 * size]), first)]
    assert fits
    taken = 0
    for num_packets in sizes:
        lost = losses.take(num_packets)
        for start in fits:
            np.testing.assert_array_equal(lost, np.flatnonzero(laid[start + taken : start + taken + num_packets]))
        taken += num_packets
    assert losses.state_dict() == {"packets": taken}


def test_every_offset_is_as_likely_and_links_start_apart():
    trace = Trace(lost=[0], num_packets=20)
    offsets = [offset_of(trace, (link, "test")) for link in range(4000)]
    assert chisquare(np.bincount(offsets, minlength=20)).pvalue > 1e-4
    long = Trace(lost=np.flatnonzero(np.random.default_rng(2).random(500) < 0.2), num_packets=500)
    links = [long.losses((0, "tp", src, 1)).take(100).tolist() for src in range(4)]
    assert all(one != other for one, other in itertools.combinations(links, 2))


@pytest.mark.parametrize(("packets", "wraps"), [(0, 0), (1, 0), (17, 0), (18, 1), (47, 1), (48, 2)])
def test_a_links_wraps_are_counted(packets: int, wraps: int):
    """The link of `KEY` starts at packet 13 of 30."""
    trace = Trace(lost=[0, 1, 5], num_packets=30)
    assert trace.losses(KEY).take(60).tolist() == [17, 18, 22, 47, 48, 52]
    losses = trace.losses(KEY)
    losses.take(packets)
    assert losses.wraps == wraps


def test_cost_is_that_of_the_losses():
    losses = Trace(lost=[1, 2, 3], num_packets=10**7).losses(KEY)
    before = time.perf_counter()
    assert len(losses.take(10**11)) == pytest.approx(30_000, abs=3)
    assert time.perf_counter() - before < 0.1


def test_equal_content_is_equal_and_what_was_given_may_change_afterwards():
    lost = np.array([1, 3])
    one, same = Trace(lost=lost, num_packets=5), Trace.from_indicators(np.array([False, True, False, True, False]))
    lost[0] = 0
    assert len({one, same}) == 1
    assert len({one, Trace(lost=[1, 3], num_packets=6), Trace(lost=[1, 2], num_packets=5)}) == 3
    with pytest.raises(ValueError, match="read-only"):
        one.lost[0] = 0


FILES = {"words.txt": "0 1 1\n0 0\n", "line.txt": "01100", "table.csv": "0,1,1\r\n0,0", "column.csv": "0\n1\n1\n0\n0\n"}
ARRAY = np.array([0, 1, 1, 0, 0])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *FILES.items(),
        *(("a.npy", ARRAY.astype(kind)) for kind in (bool, np.uint8, np.int64, np.float32)),
        *(("a.npy", ARRAY.reshape(shape)) for shape in ((5, 1), (1, 5))),
    ],
)
def test_from_a_file(tmp_path, name, content):
    np.save(tmp_path / name, content) if name == "a.npy" else (tmp_path / name).write_text(content)
    for path in (tmp_path / name, str(tmp_path / name)):
        assert Trace.from_file(path) == Trace(lost=[1, 2], num_packets=5)
    assert Trace.from_indicators(ARRAY.reshape(5, 1)) == Trace(lost=[1, 2], num_packets=5)


def test_from_a_measurement_whose_flows_follow_one_another(tmp_path):
    flows = {1: FlowTrace(lost=np.array([False, True])), 0: FlowTrace(lost=np.array([True, False, False]))}
    write_trace(tmp_path / "a.parquet", ProbeTrace(flows=flows))
    assert Trace.from_file(tmp_path / "a.parquet") == Trace.from_indicators([1, 0, 0, 0, 1])
    write_trace(tmp_path / "b.parquet", ProbeTrace(flows={0: FlowTrace(lost=np.array([], bool))}))
    with pytest.raises(ValueError, match=r"b\.parquet holds no packets"):
        Trace.from_file(tmp_path / "b.parquet")


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


@pytest.mark.parametrize(("text", "loud"), [("1 1 0", True), ("1 0", False)])
def test_a_recording_that_lost_more_than_half_is_said(tmp_path, capsys, text, loud):
    (tmp_path / "a.txt").write_text(text)
    Trace.from_file(tmp_path / "a.txt")
    assert ("a.txt: WARNING: 66.7%" in capsys.readouterr().err) == loud


HEADER = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000,), }\n"
HUGE = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(HEADER)) + HEADER + bytes(9)  # claims more than it holds


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("a.txt", content) for content in (b"0 2", b"lost\n0\n1", b"", b"\xff\x00")),
        ("a.txt", gzip.compress(b"01", mtime=0)[:-4]),
        *(("a.npy", content) for content in (b"no array", b"", b"PK\x03\x04", HUGE)),
    ],
)  # fmt: skip
def test_files_that_hold_no_trace_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(name)):
        Trace.from_file(tmp_path / name)


@pytest.mark.parametrize(
    ("lost", "num_packets", "name"),
    [
        *(([], 0, "num_packets"), ([3], 10.5, "num_packets")),
        *((lost, 5, "lost") for lost in ([3, 1], [1, 1], [-1], [0.5], [[1]], [True, False], "abc", None, [math.nan])),
        ([1, 5], 5, "num_packets"),
    ],
)
def test_impossible_traces_are_refused(lost, num_packets, name):
    with pytest.raises(ValueError, match=name):
        Trace(lost=lost, num_packets=num_packets)


# Functions of the packets' numbers


def test_packets_are_counted_from_0_and_each_has_one_number_of_its_own():
    losses = OTHERS["every tenth"].losses(KEY)
    assert losses.take(25).tolist() == [0, 10, 20]
    assert losses.take(25).tolist() == [5, 15]
    bernoulli = PerPacket(lambda packets, uniforms: uniforms < 0.2)
    by_hand = np.flatnonzero(Stream((*KEY, "packets")).uniforms(1000) < 0.2)
    np.testing.assert_array_equal(bernoulli.losses(KEY).take(1000), by_hand)
    assert PerPacket(lambda packets, uniforms: [bool(n < 0.5) for n in uniforms]).losses(KEY).take(0).tolist() == []


def test_measured_forms_of_known_laws():
    tenth, bernoulli = OTHERS["every tenth"], PerPacket(lambda packets, uniforms: uniforms < 0.2)
    assert tenth.loss_rate == pytest.approx(0.1, abs=1e-5)
    assert tenth.mean_burst_packets == pytest.approx(1, abs=1e-4)
    assert [tenth.autocorrelation(lag) for lag in (0, 1, 10)] == pytest.approx([1, -1 / 9, 1], abs=1e-4)
    assert bernoulli.loss_rate == pytest.approx(0.2, abs=0.0015)
    assert bernoulli.mean_burst_packets == pytest.approx(1.25, abs=0.005)
    assert bernoulli.autocorrelation(1) == pytest.approx(0, abs=0.004)


@pytest.mark.parametrize(
    "function",
    [
        *(lambda packets, uniforms: True, lambda packets, uniforms: uniforms),
        *(lambda packets, uniforms: np.flatnonzero(uniforms < 2)[:3], lambda packets, uniforms: uniforms[:500] < 0.1),
    ],
)
def test_a_function_that_gives_no_bool_for_each_packet_is_refused(function):
    with pytest.raises(ValueError, match="is_lost"):
        PerPacket(function).losses(KEY).take(501)


# Parts of correlated links


def test_parts_may_be_recorded():
    """The switch's recording starts at one offset for all its links."""
    one, other = (OTHERS["a recorded switch"].common.losses((*KEY, "switch", 0)).take(200).tolist() for _ in range(2))
    assert one == other
    common, private = Trace(lost=[0], num_packets=50), Trace(lost=[1], num_packets=10)
    inner = Correlated(common=Bernoulli(loss_rate=0), private=private)
    network = LossyNetwork(Correlated(common=common, private=inner))
    network.send(ALGORITHMS["direct"].reduce(100_000, (0, 1)), 4)
    packets = network.summary("training")["packets"] / 2
    assert abs(network.summary("training")["wraps"] - packets / 10) <= 1


# Processes by name, and of one's own


@pytest.fixture
def registry(monkeypatch):
    """LOSS_PROCESSES, as it was again afterwards."""
    for name in ("mine", "tide", "bursts"):
        monkeypatch.setitem(LOSS_PROCESSES, name, None)
        del LOSS_PROCESSES[name]
    return LOSS_PROCESSES


def test_each_name_is_built_as_its_class_is(tmp_path):
    (tmp_path / "drops.txt").write_text("0 1 0")
    expected = {
        "ber(loss_rate=0.1)": Bernoulli(loss_rate=0.1),
        "four_state(0.02, 0.2, p14=0.01)": FourState(0.02, 0.2, p14=0.01),
        "netem('loss gemodel 1% 20%')": from_netem("loss gemodel 1% 20%"),
        f"trace({str(tmp_path / 'drops.txt')!r})": Trace(lost=[1], num_packets=3),
        "correlated(loss_rate=0.1, shared=0.5, switch='left')": shared_losses(0.1, 0.5, switch="left"),
    }
    for text, process in expected.items():
        assert loss_process_named(text) == process
    assert {text.split("(")[0] for text in expected} | {"g-e"} == set(LOSS_PROCESSES)


def test_what_is_given_fills_in_what_the_text_leaves_open(registry):
    burst = GilbertElliott.from_loss_and_burst(loss_rate=0.1, mean_burst_packets=8)
    assert loss_process_named("g-e", loss_rate=0.1, mean_burst_packets=8) == burst
    for text, given_, process in (
        ("correlated(shared=0.5)", {"loss_rate": 0.1, "mean_burst_packets": 8}, shared_losses(0.1, 0.5, 8)),
        ("correlated(shared=0.5, mean_burst_packets=4)", {"loss_rate": 0.1}, shared_losses(0.1, 0.5, 4)),
        ("correlated(shared=0.5)", {"loss_rate": 0.0, "mean_burst_packets": None}, shared_losses(0.0, 0.5)),
        ("netem('loss 1%')", {"loss_rate": 0.0}, Bernoulli(loss_rate=0.01)),
    ):
        assert loss_process_named(text, **given_) == process
    registry["mine"] = lambda loss_rate=0.25: Bernoulli(loss_rate=loss_rate)
    rates = [loss_process_named("mine", loss_rate=rate).loss_rate for rate in (0.0, 0.125)]
    assert [*rates, loss_process_named("mine(0.5)", loss_rate=0.0).loss_rate] == [0.25, 0.125, 0.5]


@pytest.mark.parametrize(
    ("text", "given", "word"),
    [
        *(("burst", {}, "ber, g-e, correlated, four_state"), ("four_state(0.1", {}, "loss_type")),
        *(("four_state", {}, "four_state takes p13: float, p31: float"), ("four_state(0.1, 0.2, p41=1)", {}, "p41")),
        *(("four_state(0.1, 2)", {}, "p31 = 2"), ("correlated(shared=0.5)", {}, "loss_rate")),
        ("trace('drops.txt')", {"loss_rate": 0.1}, "loss_rate = 0.1 does not apply to"),
        ("correlated(0.5)", {"loss_rate": 0.1}, "positional"),
        ("ber(loss_rate=0.2)", {"loss_rate": 0.1}, "loss_rate = 0.1 is given twice"),
        *(("trace('nowhere.npy')", {}, "nowhere.npy"), ("netem('loss')", {}, "netem")),
    ],
)
def test_what_does_not_go_is_refused(text, given, word):
    with pytest.raises(ValueError, match=word):
        loss_process_named(text, **given)
