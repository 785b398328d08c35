"""Training over packets that are really sent equals training over a simulated network that replays their losses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lossytp.network.traces import read_trace
from lossytp.training.loop import LOSSES
from tests.training.parallel_runs import curve, settings, task_in, train

STEPS = 10  # 100 steps agree too
OVER_UDP: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "transport": "udp",
    "max_steps": STEPS,
    "eval_samples": 4,
    "loss_rate": 0.02,
}


def on_rank_import() -> None:
    """Import this module in every process, so that the run need not wait for imports."""


def test_a_simulated_network_replays_what_udp_lost(processes: Callable, tmp_path: Path) -> None:
    processes(2, on_rank_import)
    folder = {name: {"output_dir": str(tmp_path / name)} for name in ("udp", "replayed", "lossless")}
    file = tmp_path / "udp" / LOSSES
    record = processes(2, train, tmp_path, OVER_UDP | folder["udp"])[0]
    flows = {(flow.src, flow.dst): flow for flow in read_trace(file).flows.values()}
    sent, lost = (sum(count) for count in zip(*((f.num_packets, f.lost.sum()) for f in flows.values()), strict=True))
    counted = record["network"]["training"]
    assert (counted["packets"], counted["lost"]) == (sent, lost)
    assert 0.015 < lost / sent < 0.025

    values = {name: value for name, value in OVER_UDP.items() if name not in ("transport", "loss_rate")}
    again = train(
        tmp_path, values | folder["replayed"] | {"loss_type": f"replay({str(file)!r})"}
    )  # virtual ranks, in one process
    assert again["trace_sha256"]
    assert again["network"]["training"]["by_link"] == counted["by_link"]
    assert len(curve(record)) == STEPS
    np.testing.assert_allclose(curve(again), curve(record), rtol=1e-5)

    lossless = train(tmp_path, values | folder["lossless"])
    assert np.abs(np.array(curve(lossless)) / curve(record) - 1).max() > 1e-3  # so the losses did matter


def test_it_needs_a_process_for_each_rank(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a process for each of 2 or more tensor-parallel ranks"):
        train(tmp_path, OVER_UDP)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm": "ring"}, "algorithm = 'ring' does not work with transport = 'udp'"),
        ({"repair": "rescale"}, "repair = 'rescale' does not work"),
        ({"reliable_gather": False}, "reliable_gather = False does not work"),
        ({"wire_dtype": "bf16"}, "wire_dtype = 'bf16' does not work"),
        ({"bf16": True}, "bf16 = True does not work with transport = 'udp', which carries only float32"),
        ({"implementation": "dtensor"}, "implementation = 'dtensor' does not work"),
        ({"data_parallel_size": 2}, "data_parallel_size = 2 does not work"),
    ],
)
def test_what_cannot_be_sent_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with task_in(tmp_path), pytest.raises(ValueError, match=message):
        settings(tmp_path, **OVER_UDP, **values)
