"""Test training that computes activations again in backward."""

import pytest

from tests.training.killed_runs import DDP, result, started

OWN_STREAMS = {"tensor_parallel_size": 2, "reliable_gather": False}


@pytest.mark.parametrize(
    ("processes", "values"),
    [
        (1, {"tensor_parallel_size": 1, "loss_rate": 0.0}),
        (1, {"tensor_parallel_size": 4, "dropout": 0.1}),
        (1, {"tensor_parallel_size": 2, "repair": "stale", "max_length": 4}),
        (1, {**OWN_STREAMS, "unfreeze_last_layers": 2}),
        (2, {"tensor_parallel_size": 2}),
        (2, {**DDP, "tensor_parallel_size": 2}),
        (2, {"pipeline_parallel_size": 2}),
    ],
    ids=str,
)
def test_recomputed_activations_change_nothing(tmp_path, processes, values):
    """Nor do the packets sent and lost."""
    records = []
    for name in ("kept", "recomputed"):
        more = {"gradient_checkpointing": name == "recomputed", "max_steps": 4, "output_dir": str(tmp_path / name)}
        assert started(tmp_path, processes, **values, **more) == [0] * processes
        records.append(result(tmp_path, name))
        del records[-1]["config"]
    assert records[0] == records[1]
