"""Test settings of the ranks' messages where ranks are processes.

Functions named `on_rank_...` run in every process. A run with a record is not repeated.
"""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from lossytp.training.engine import Engine
from tests.training.parallel_runs import PARALLELISMS, curve, train
from tests.training.wiring_options import LOSSY, OPTIONS, OWN, SHORT, evaluations, traffic

APART = ("own streams", "own streams, lossy gradients", "own copies", "own copies, resynchronised")


def on_rank_import() -> None:
    """Import this module in every process, so that later calls need not wait for imports."""


@pytest.fixture(scope="module")
def four(processes: Callable) -> Callable:
    processes(4, on_rank_import)
    return processes


IN_PROCESSES = ("own streams", "own copies", "own streams, lossy gradients", "shards", "shards, lossy gather", "noise")


@pytest.mark.parametrize("name", [*IN_PROCESSES, "stale", "counted", "adjoint", "own streams by a tree, local"])
def test_processes_train_as_virtual_ranks_do(processes: Callable, folder: Path, name: str) -> None:
    """Each process has two of the four ranks, so that virtual and real ranks mix."""
    values = {"tensor_parallel_size": 4, "max_steps": 4, "eval_steps": 2, "loss_rate": 0.05, **OPTIONS[name]}
    here, there = train(folder / "virtual", values), processes(2, train, folder / "apart", values)[0]
    assert curve(there) == pytest.approx(curve(here), rel=1e-5)
    assert there["network"] == here["network"]
    assert there["final"] == pytest.approx(here["final"], rel=1e-4)
    for mine, theirs in zip(here["curves"]["eval"], there["curves"]["eval"], strict=True):
        assert theirs["stream_distance"] == (mine["stream_distance"] and pytest.approx(mine["stream_distance"], 1e-4))
        assert (theirs["replica_drift"] > 0) == (mine["replica_drift"] > 0)
        if name in APART or "local" in name:
            assert theirs["score_spread_lossy"] == pytest.approx(mine["score_spread_lossy"])


def on_rank_leave_gradients(folder: Path, values: dict) -> dict:
    with patch.object(Engine, "synchronise", lambda engine: None):
        return train(folder, values)


@pytest.mark.parametrize(
    "values",
    [{"data_parallel_size": 2}, {"data_parallel_size": 2, "data_parallel_type": "fsdp"}, {"pipeline_parallel_size": 2}],
    ids=["ddp", "fsdp", "pipeline"],
)
def test_tensor_parallel_ranks_stay_equal_though_each_has_its_own_losses(
    four: Callable, folder: Path, values: dict
) -> None:
    values = {**SHORT, **LOSSY, **values}
    record = four(4, train, folder / "equal", values)[0]
    assert evaluations(record, "replica_drift") == [0]
    control = four(4, on_rank_leave_gradients, folder / "control", values)[0]
    assert evaluations(control, "replica_drift")[0] > 1e-4


@pytest.mark.parametrize("name", ["dtensor", "megatron", "ddp"])
def test_over_the_backend_results_lose_packets_too_and_copies_drift(
    processes: Callable, folder: Path, name: str
) -> None:
    number, values = PARALLELISMS[name]
    values = {**values, **LOSSY, **OWN, "max_steps": 3, "algorithm": "ring"}
    if name != "ddp":  # it has one rank, which has no copies
        values["replicated_gradients"] = "none"
    record = processes(number, train, folder / "backend", values)[0]
    assert evaluations(record, "replica_drift")[0] > 1e-4
    phases = traffic(record)["by_phase"]
    assert phases["gather"]["packets"] == phases["reduce"]["packets"]
    kept = processes(
        number, train, folder / "backend", {**values, "reliable_gather": True} | {"replicated_gradients": "reliable"}
    )[0]
    assert evaluations(kept, "replica_drift") == [0]
    assert traffic(kept)["by_phase"].keys() == {"reduce"}
