"""Loss processes by name, and what makes an object one; with one of a reader's own."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from lossytp.network import (
    LOSS_PROCESSES,
    Bernoulli,
    Correlated,
    FourState,
    GilbertElliott,
    LossProcess,
    LossyNetwork,
    PerPacket,
    Trace,
    from_netem,
    gilbert_elliott_preset,
    loss_process_named,
)
from lossytp.network.losses import mean_burst
from lossytp.network.traces import FlowTrace, ProbeTrace, Replay, write_trace
from lossytp.training.command_line import parse
from lossytp.training.config import TrainConfig

PROCESSES = {
    "Bernoulli": Bernoulli(loss_rate=0.1),
    "GilbertElliott": gilbert_elliott_preset("default"),
    "FourState": FourState(0.02, 0.2, 0.1, 0.3, 0.01),
    "Trace": Trace(lost=[1, 2, 7], num_packets=30),
    "Replay": Replay((((0, 1), Trace(lost=[1, 2, 7], num_packets=30)),)),
    "Correlated": Correlated.from_loss_and_share(loss_rate=0.1, shared=0.5, mean_burst_packets=4),
    "PerPacket": PerPacket(lambda packets, uniforms: uniforms < 0.1),
}


@pytest.fixture
def registry(monkeypatch):
    """LOSS_PROCESSES, as it was again afterwards."""
    for name in ("mine", "tide", "bursts"):
        monkeypatch.setitem(LOSS_PROCESSES, name, None)
        del LOSS_PROCESSES[name]
    return LOSS_PROCESSES


# Any object with the members is a process


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_a_network_takes_it_and_resumes_it_through_json(process):
    assert isinstance(process, LossProcess)
    network, resumed = LossyNetwork({(0, 1): process}, default=process), LossyNetwork(process)
    assert len(network.lost_packets(0, 1, 700)) == pytest.approx(700 * process.loss_rate, abs=60)
    resumed.load_state_dict(json.loads(json.dumps(network.state_dict())))
    assert resumed.lost_packets(0, 1, 700).tolist() == network.lost_packets(0, 1, 700).tolist()


@pytest.mark.parametrize("given", [0.1, None, "ber", Bernoulli, GilbertElliott, PerPacket, Bernoulli.losses, object()])
def test_what_is_no_process_is_refused_in_one_line(given):
    for named in (given, {(0, 1): given}):
        with pytest.raises(
            ValueError, match=r"is not a loss process: give one, such as Bernoulli\(loss_rate="
        ) as refusal:
            LossyNetwork(named)
        assert "\n" not in str(refusal.value)


def test_mean_burst_from_the_rate_and_one_correlation():
    """At a rate of 1/2: alternating, independent, and never changing losses."""
    assert [mean_burst(0.5, correlation) for correlation in (-1, 0, 1)] == [1, 2, np.inf]
    assert mean_burst(0.0, 0.0) == 0


# Names


def test_each_name_is_built_as_its_class_is(tmp_path):
    (tmp_path / "drops.txt").write_text("0 1 0")
    link = FlowTrace(lost=np.array([True, False]), src="0", dst="1")
    write_trace(tmp_path / "links.parquet", ProbeTrace(flows={0: link}))
    expected = {
        "ber(loss_rate=0.1)": Bernoulli(loss_rate=0.1),
        "four_state(0.02, 0.2, p14=0.01)": FourState(0.02, 0.2, p14=0.01),
        "netem('loss gemodel 1% 20%')": from_netem("loss gemodel 1% 20%"),
        f"trace({str(tmp_path / 'drops.txt')!r})": Trace(lost=[1], num_packets=3),
        f"replay({str(tmp_path / 'links.parquet')!r})": Replay((((0, 1), Trace(lost=[0], num_packets=2)),)),
        "correlated(loss_rate=0.1, shared=0.5, switch='left')": Correlated.from_loss_and_share(
            loss_rate=0.1, shared=0.5, switch="left"
        ),
    }
    for text, process in expected.items():
        assert loss_process_named(text) == process
    assert {text.split("(")[0] for text in expected} | {"g-e"} == set(LOSS_PROCESSES)


def test_what_is_given_fills_in_what_the_text_leaves_open():
    correlated = Correlated.from_loss_and_share
    assert loss_process_named("g-e", loss_rate=0.1, mean_burst_packets=8) == GilbertElliott.from_loss_and_burst(
        loss_rate=0.1, mean_burst_packets=8
    )
    assert loss_process_named("correlated(shared=0.5)", loss_rate=0.1, mean_burst_packets=8) == correlated(
        loss_rate=0.1, shared=0.5, mean_burst_packets=8
    )
    assert loss_process_named("correlated(shared=0.5, mean_burst_packets=4)", loss_rate=0.1) == correlated(
        loss_rate=0.1, shared=0.5, mean_burst_packets=4
    )
    assert loss_process_named("correlated(shared=0.5)", loss_rate=0.0, mean_burst_packets=None) == correlated(
        loss_rate=0.0, shared=0.5
    )


def test_0_leaves_a_default_and_may_go_unused(registry):
    registry["mine"] = lambda loss_rate=0.25: Bernoulli(loss_rate=loss_rate)
    assert loss_process_named("mine", loss_rate=0.0).loss_rate == 0.25
    assert loss_process_named("mine", loss_rate=0.125).loss_rate == 0.125
    assert loss_process_named("mine(0.5)", loss_rate=0.0).loss_rate == 0.5
    assert loss_process_named("netem('loss 1%')", loss_rate=0.0).loss_rate == 0.01


@pytest.mark.parametrize(
    ("text", "given", "words"),
    [
        ("burst", {}, ["loss_type = 'burst' is unknown", "ber, g-e, correlated, four_state"]),
        ("four_state(0.1", {}, ["loss_type = 'four_state(0.1'", "not understood"]),
        ("four_state", {}, ["loss_type = 'four_state'", "p13", "four_state takes p13: float, p31: float"]),
        ("four_state(0.1, 0.2, p41=1)", {}, ["p41", "four_state takes"]),
        ("four_state(0.1, 2)", {}, ["p31 = 2", "[0, 1]"]),
        ("correlated(shared=0.5)", {}, ["correlated(shared=0.5)", "loss_rate"]),
        (
            "trace('drops.txt')",
            {"loss_rate": 0.1},
            ["loss_rate = 0.1 does not apply to", "trace takes path", "leave it out"],
        ),
        (
            "netem('loss 1%')",
            {"mean_burst_packets": 8.0},
            ["mean_burst_packets = 8.0 does not apply to", "netem takes text"],
        ),
        ("correlated(0.5)", {"loss_rate": 0.1}, ["positional"]),
        ("ber(loss_rate=0.2)", {"loss_rate": 0.1}, ["loss_rate = 0.1 is also given in", "ber(loss_rate=0.2)"]),
        ("trace('nowhere.npy')", {}, ["nowhere.npy", "cannot be read"]),
        ("netem('loss')", {}, ["'loss' is not understood", "loss state"]),
    ],
)
def test_what_does_not_go_is_refused_in_one_line(text, given, words):
    with pytest.raises(ValueError, match=r"take|give|choose|write") as refusal:
        loss_process_named(text, **given)
    assert all(word in str(refusal.value) for word in words)
    assert "\n" not in str(refusal.value)


# In a configuration


def test_a_configuration_takes_a_named_process():
    text = "correlated(shared=0.5)"
    config = parse(TrainConfig, None, ["--loss_type", text, "--loss_rate", "0.1", "--mean_burst_packets", "8"])
    assert config.process() == Correlated.from_loss_and_share(loss_rate=0.1, shared=0.5, mean_burst_packets=8)
    assert config.changes() == {"loss_type": text, "loss_rate": 0.1, "mean_burst_packets": 8.0}
    assert TrainConfig.from_dict(config.as_dict()) == config
    assert TrainConfig(loss_type="four_state(0.1, 0.2)").process() == FourState(0.1, 0.2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss_type": "four_state(0.1, 0.2)", "loss_rate": 0.1}, ["loss_rate = 0.1 does not apply to", "four_state"]),
        ({"loss_type": "four_state(0.1, 0.2)", "ge_config": "one"}, ["ge_config = 'one' needs loss_type = 'g-e'"]),
        ({"loss_type": "correlated"}, ["shared", "correlated takes"]),
        ({"loss_type": 5}, ["loss_type = 5", "wrong type"]),
        (
            {"loss_type": "ber", "mean_burst_packets": 8.0},
            ["mean_burst_packets = 8.0 needs loss_type = 'g-e', not 'ber'"],
        ),
        ({"loss_type": "g-e", "loss_rate": 0.1}, ["loss_type = 'g-e' needs ge_config, or loss_rate and mean_burst"]),
    ],
)
def test_what_a_configuration_refuses(values, words):
    with pytest.raises(ValueError, match=r"give|needs|take") as refusal:
        TrainConfig(**values)
    assert all(word in str(refusal.value) for word in words)


def test_a_readers_own_process_in_five_lines(registry):
    def tide(loss_rate, period=200):
        def is_lost(packets, uniforms):
            return uniforms < loss_rate * (1 - np.cos(2 * np.pi * packets / period))

        return PerPacket(is_lost)

    registry["tide"] = tide
    process = TrainConfig(loss_type="tide(period=100)", loss_rate=0.1).process()
    assert process.loss_rate == pytest.approx(0.1, abs=0.002)
    lost = LossyNetwork(process).lost_packets(0, 1, 100_000) % 100
    assert np.isin(lost, range(25, 75)).mean() == pytest.approx(0.5 + 1 / np.pi, abs=0.02)


def test_a_readers_own_class(registry):
    @dataclass(frozen=True, kw_only=True)
    class Bursts(Correlated):
        """Of which a network needs nothing but the members of a process."""

    registry["bursts"] = Bursts.from_loss_and_share
    process = TrainConfig(loss_type="bursts(shared=0.5)", loss_rate=0.1).process()
    assert isinstance(process, Bursts)
    assert len(LossyNetwork(process).lost_packets(0, 1, 1000)) == pytest.approx(100, abs=40)
