from types import SimpleNamespace

import numpy as np
import pytest

from lossytp.network.traces import FlowTrace, ProbeTrace, write_trace
from lossytp.training import record as simulated
from lossytp.training.config import TrainConfig
from lossytp.training.loop import run
from lossytp.training.record import simulated_step_seconds

NANO = SimpleNamespace(hidden_size=128, num_hidden_layers=4)
LINK = {"link_gbits": 10.0, "round_trip_us": 100.0, "tensor_parallel_size": 4}
PACKET_S, TRIP_S = 1500 * 8 / 10e9, 50e-6
TOKENS = 364 * 4 * 10 / 128  # a rank's chunk is then ten packets of 364 float32


def seconds(compute_s=0.5, tokens=None, **values):
    return simulated_step_seconds(TrainConfig(**{**LINK, **values}), NANO, tokens or TOKENS, compute_s)


def test_without_loss_a_step_is_its_computation_and_sixteen_all_reduces_of_known_length():
    """Each all-reduce is two messages in turn, of 10 packets to each of 3 ranks."""
    tokens = round(TOKENS)
    packets = 3 * -(-tokens * 128 // 4 // 364)
    expected = 0.5 + 16 * 2 * (packets * PACKET_S + TRIP_S)
    assert seconds(tokens=tokens) == pytest.approx(expected, rel=1e-9)
    half = 3 * -(-tokens * 128 // 4 // 728)
    assert seconds(tokens=tokens, bf16=True) == pytest.approx(0.5 + 32 * (half * PACKET_S + TRIP_S), rel=1e-9)
    assert seconds(tokens=tokens, bf16=True, wire_dtype="fp32") == seconds(tokens=tokens)


def test_microbatches_are_more_and_shorter_messages():
    whole, cut = seconds(0.0, tokens=912), seconds(0.0, tokens=912, gradient_accumulation_steps=2)
    assert cut == pytest.approx(2 * seconds(0.0, tokens=456), rel=1e-9)
    assert cut > whole


def test_a_missing_last_packet_costs_a_round_trip():
    lossless, all_lost = seconds(0.0), seconds(0.0, loss_rate=1.0, reliable_gather=False)
    assert all_lost - lossless == pytest.approx(16 * 2 * 100e-6, rel=1e-6)
    assert lossless < seconds(0.0, loss_rate=0.1, reliable_gather=False) < all_lost


def test_sums_that_return_reliably_are_waited_for():
    """Half of the messages are retransmitted until delivered; best effort waits at most a round trip for each."""
    most = 16 * 2 * 100e-6
    for rate in (0.05, 0.3):
        best_effort = seconds(0.0, loss_rate=rate, reliable_gather=False)
        assert best_effort < seconds(0.0) + most
        assert best_effort + most / 4 < seconds(0.0, loss_rate=rate)
    one_way = seconds(0.0, loss_rate=0.3, algorithm="sender")  # its sum reaches all ranks at once
    assert one_way < seconds(0.0, algorithm="sender") + most / 2


@pytest.mark.parametrize(
    "values",
    [
        {"link_gbits": None},
        {"tensor_parallel_size": 1},
        {"data_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"sequence_parallel": True},
        {"repair": "fec(10, 8)"},
        {"repair": "retransmit(1)"},
        {"lossy_direction": "forward"},
        {"lossy_links": "0>1"},
        {"control": "elements"},
        {"unfreeze_last_layers": 1},
        {"gradient_checkpointing": True},
        {"reliable_gather": False, "replicated_gradients": "lossy"},
        {"loss_rate": 1.0},  # sums that never return
        {"loss_rate": 0.95},  # sums that hardly ever return
    ],
    ids=str,
)
def test_configurations_that_timing_does_not_cover_are_null(values):
    assert seconds(**values) is None


def test_a_recording_of_each_link_is_not_timed(tmp_path):
    lost = np.array([False, True])
    flows = {0: FlowTrace(lost=lost, src="0", dst="1"), 1: FlowTrace(lost=lost, src="1", dst="0")}
    write_trace(tmp_path / "a.parquet", ProbeTrace(flows=flows))
    assert seconds(tensor_parallel_size=2, loss_rate=0.1) is not None
    assert seconds(tensor_parallel_size=2, loss_type=f"replay({str(tmp_path / 'a.parquet')!r})") is None


def test_more_losses_than_can_be_timed_in_minutes_are_null(monkeypatch):
    packets = 20 * 16 * 4 * 2 * 3 * 10  # in 20 steps of 16 all-reduces: 2 messages on 4 links, 10 packets to 3 ranks
    monkeypatch.setattr(simulated, "MOST_LOSSES", packets // 4 + 1)
    assert seconds(loss_rate=0.2, tokens=113) is not None
    assert seconds(loss_rate=0.21, tokens=113) is None
    assert seconds(loss_rate=0.21, tokens=113, reliable_gather=False) is not None


def test_a_record_has_simulated_seconds_to_accuracy(toy, tmp_path):
    values = {"max_steps": 40, "eval_steps": 5, "target_accuracy": 0.9, "learning_rate": 3e-3}
    record = run(toy(**values, link_gbits=1.0))
    reached, timing = record["time_to_accuracy"], record["timing"]
    assert reached["simulated_seconds"] == reached["step"] * timing["simulated_step_seconds"]
    assert timing["simulated_step_seconds"] > timing["step_seconds"]
