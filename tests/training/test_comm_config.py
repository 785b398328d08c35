"""Test settings of the tensor-parallel ranks' messages, from the first step to the record, also over processes.

A run with a record is not repeated. Functions named `on_rank_...` run in every process.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lossytp.training.batches import evaluation_batches
from lossytp.training.engine import Engine
from lossytp.training.loop import run
from tests.training.parallel_runs import BLOCKS, PARALLELISMS, curve, task_in, the_data, train

pytestmark = pytest.mark.slow

SHORT = {"tensor_parallel_size": 2, "max_steps": 4}
LOSSY = {"loss_rate": 0.1}
OWN = {"reliable_gather": False}
DRIFTING = {**OWN, "replicated_gradients": "none"}
OPTIONS: dict[str, dict[str, Any]] = {
    "own streams": OWN,
    "own streams, lossy gradients": {**OWN, "replicated_gradients": "lossy"},
    "own copies": DRIFTING,
    "own copies, resynchronised": {**DRIFTING, "resync_every": 2},
    "own streams, masked backward": {**OWN, "masked_backward": True},
    "own streams by a tree, local": {**OWN, "algorithm": "tree", "repair": "local"},
    "shards, lossy gather": {"sequence_parallel": True, **OWN},
    "adjoint": {"exact_adjoint": True},
    "forward": {"lossy_direction": "forward"},
    **{name: {"control": name} for name in ("elements", "noise")},
    "stale": {"repair": "stale"},
}


def short(folder: Path, **values: Any) -> dict[str, Any]:
    return train(folder, {**SHORT, **values})


def traffic(record: dict[str, Any]) -> dict[str, Any]:
    return record["network"]["training"]


def evaluations(record: dict[str, Any], name: str) -> list[Any]:
    return [point[name] for point in record["curves"]["eval"]]


@pytest.mark.parametrize("name", OPTIONS)
def test_without_losses_options_change_nothing_and_with_losses_each_matters(folder, name):
    """But for stale, without earlier values since lengths differ."""
    plain, record = short(folder), short(folder, **OPTIONS[name])
    assert curve(record) == pytest.approx(curve(plain), rel=1e-6)
    assert record["final"] == pytest.approx(plain["final"], rel=1e-5)
    lossy = short(folder, **LOSSY, **OPTIONS[name])
    assert curve(lossy) != pytest.approx(curve(plain), rel=1e-3)
    if name != "stale":
        assert curve(lossy) != pytest.approx(curve(short(folder, **LOSSY)), rel=1e-4)
    for point in record["curves"]["eval"]:
        assert point["score_spread_clean"] == point["score_spread_lossy"] == 0
        assert point["replica_drift"] == pytest.approx(0, abs=1e-6)
        assert point["stream_distance"] == (pytest.approx([0] * BLOCKS, abs=1e-6) if "own" in name else None)


def train_toy(toy: Callable, where: Path, **values: Any) -> dict[str, Any]:
    return run(toy(output_dir=str(where), **values))


@pytest.mark.parametrize(("wire_dtype", "share"), [("bf16", 0.6), ("int4", 0.4)])
def test_a_model_learns_over_a_narrower_wire(toy, tmp_path, wire_dtype, share):
    learning = {"max_steps": 40, "learning_rate": 3e-3, "loss_rate": 0.01}
    full, narrow = (train_toy(toy, tmp_path / str(dtype), wire_dtype=dtype, **learning) for dtype in (None, wire_dtype))
    packets = [traffic(record)["by_direction"]["backward"]["packets"] for record in (narrow, full)]
    assert packets[0] < share * packets[1]
    assert curve(narrow) != curve(full)
    assert narrow["final"]["accuracy_clean"] == 1.0
    assert narrow["config"]["wire_dtype"] == wire_dtype


@pytest.mark.parametrize("name", ["stale", "noise", "own copies", "shards, lossy gather"])
def test_evaluating_never_shifts_training(toy, tmp_path, name):
    """Nor does it change the values of stale, the random numbers of noise, or dropout."""
    rare, often = (
        train_toy(toy, tmp_path / str(each), loss_rate=0.2, dropout=0.1, eval_steps=each, **OPTIONS[name])
        for each in (None, 1)
    )
    assert curve(often) == curve(rare)
    assert traffic(often) == traffic(rare)
    assert often["final"] == rare["final"]


def test_copies_drift_unless_their_gradients_are_reliable_and_resynchronising_limits_it(folder):
    each_step = {**LOSSY, **OWN, "eval_steps": 1}
    drifts = {
        name: evaluations(short(folder, **each_step, **values), "replica_drift")
        for name, values in {
            "reliable": {},
            "lossy": {"replicated_gradients": "lossy"},
            "none": {"replicated_gradients": "none"},
            "resync": {"replicated_gradients": "none", "resync_every": 2},
        }.items()
    }
    assert drifts["reliable"] == [0] * 4
    assert all(drift > 0 for drift in drifts["none"])
    assert drifts["lossy"][-1] > 0  # in an early step all of the few nonzero gradients may arrive
    assert drifts["resync"][:2] == drifts["none"][:2]  # measured before the copies are resynchronised
    assert all(0 < less < more for less, more in zip(drifts["resync"][2:], drifts["none"][2:], strict=True))


def test_streams_that_are_not_finite_are_recorded_so(folder):
    record = short(folder, **LOSSY, **OWN, learning_rate=1e30, eval_steps=1, warmup_steps=0)
    assert record["status"] == "not finite"
    assert evaluations(record, "stream_distance")[-1] == [None] * BLOCKS


def test_accuracy_is_the_mean_over_ranks_and_its_spread_is_recorded(folder):
    seen: list[torch.Tensor] = []
    logits = Engine.logits

    def look(engine: Engine, batch: dict) -> torch.Tensor | None:
        seen.append(logits(engine, dict(batch)))
        return seen[-1]

    values = {"loss_rate": 0.4, "max_steps": 3, "tensor_parallel_size": 4, **OWN}
    with patch.object(Engine, "logits", look):
        record = short(folder / "scored", **values)
    clean, lossy = seen
    assert clean.shape == lossy.shape == (4, 30, 2)
    with task_in(folder / "scored"):
        test = the_data().test
    labels = torch.cat([test.batch(indices)["labels"] for indices in evaluation_batches(test, batch_size=64)])
    right = (lossy.argmax(-1) == labels).double().mean(-1)
    point = record["curves"]["eval"][-1]
    assert point["accuracy_lossy"] == pytest.approx(right.mean().item(), abs=1e-12)
    assert point["score_spread_lossy"] == pytest.approx((right.max() - right.min()).item(), abs=1e-12)
    assert point["score_spread_lossy"] > 0
    assert point["score_spread_clean"] == 0
    entropy = torch.nn.functional.cross_entropy(lossy.double().flatten(0, 1), labels.repeat(4))
    assert point["cross_entropy_lossy"] == pytest.approx(entropy.item(), rel=1e-6)


def on_rank_leave_gradients(folder: Path, values: dict) -> dict:
    with patch.object(Engine, "synchronise", lambda engine: None):
        return train(folder, values)


@pytest.mark.parametrize(
    "values",
    [{"data_parallel_size": 2}, {"data_parallel_size": 2, "data_parallel_type": "fsdp"}, {"pipeline_parallel_size": 2}],
    ids=["ddp", "fsdp", "pipeline"],
)
def test_tensor_parallel_ranks_stay_equal_though_each_has_its_own_losses(processes, folder, values):
    values = {**SHORT, **LOSSY, **values}
    record = processes(4, train, folder / "equal", values)[0]
    assert evaluations(record, "replica_drift") == [0]
    control = processes(4, on_rank_leave_gradients, folder / "control", values)[0]
    assert evaluations(control, "replica_drift")[0] > 1e-4


@pytest.mark.parametrize("name", ["dtensor", "megatron", "ddp"])
def test_over_the_backend_results_lose_packets_too_and_copies_drift(processes, folder, name):
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
