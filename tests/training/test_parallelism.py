"""Test training over several processes: it equals one process's, except for lost packets, and all ranks agree.

Functions named `on_rank_...` run in every process. A run that is already in its folder is not done again.
"""

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lossytp.training import loop
from lossytp.training.engine import Engine
from tests.training.parallel_runs import (
    PARALLELISMS,
    batches,
    comparable,
    curve,
    expected_links,
    expected_packets,
    settings,
    spied,
    task_in,
    train,
)

pytestmark = pytest.mark.slow

LOSSY = {"loss_rate": 0.1, "max_steps": 6}


@pytest.mark.parametrize("name", PARALLELISMS)
def test_without_losses_every_parallelism_trains_as_one_process_does(processes, folder, dense, name):
    number, values = PARALLELISMS[name]
    records = processes(number, train, folder / name, values)
    assert all(comparable(record) == comparable(records[0]) for record in records)
    record = records[0]
    assert curve(record) == pytest.approx(curve(dense), rel=1e-4)
    assert record["final"] == pytest.approx(dense["final"], rel=1e-4)
    assert (record["processes"], record["environment"]["backend"]) == (number, "gloo")
    tensor_parallel = "tensor_parallel_size" in values
    assert record["implementation"] == (values.get("implementation", "lossytp") if tensor_parallel else "dense")
    evaluation = record["curves"]["eval"][-1]
    assert evaluation["score_spread_clean"] == evaluation["score_spread_lossy"] == 0
    assert evaluation["replica_drift"] == 0


@pytest.mark.parametrize("name", PARALLELISMS)
def test_losses_change_training_and_packets_follow_from_shapes_and_mtu(processes, folder, dense, name):
    number, values = PARALLELISMS[name]
    record = processes(number, train, folder / name, values | LOSSY)[0]
    assert curve(record) != pytest.approx(curve(dense)[:6], rel=1e-2)
    traffic = record["network"]["training"]
    with task_in(folder):
        config = settings(folder, **values)
    shapes = [tuple(batch["input_ids"].shape) for batch in batches(folder, 6)]
    assert traffic["packets"] == expected_packets(shapes, number, config)
    links = [
        link.split(": ") for link in traffic["by_link"]
    ]  # the group comes first if several groups have such a link
    assert {link[-1] for link in links} == expected_links(number, config)
    assert any(len(link) > 1 for link in links) == (name == "virtual ranks and ddp")
    assert traffic["observed_loss_rate"] == pytest.approx(0.1, abs=0.02)


def test_the_backend_has_the_algorithm_and_the_repair_of_the_configuration(processes, folder):
    """`rescale` multiplies FSDP's parameters too; AdamW would hide a factor of DDP's gradients."""
    number, values = PARALLELISMS["fsdp"]
    zero, rescale = (
        processes(number, train, folder / "fsdp", values | LOSSY | {"algorithm": "sender", "repair": repair})[0]
        for repair in ("zero", "rescale")
    )
    assert zero["network"]["training"]["by_link"].keys() == {"0->-1", "1->-1"}
    assert zero["network"]["training"] == rescale["network"]["training"]
    assert curve(zero) != pytest.approx(curve(rescale), rel=1e-3)


def test_a_pipeline_has_the_adjoint_of_the_configuration(processes, folder):
    """The first stage trains differently, with the same losses."""
    values = {"pipeline_parallel_size": 2, "loss_rate": 0.2, "max_steps": 4}
    plain, exact = (
        processes(2, train, folder / f"adjoint {known}", {**values, "exact_adjoint": known})[0]
        for known in (False, True)
    )
    assert plain["network"]["training"]["lost"] == exact["network"]["training"]["lost"] > 0
    assert curve(plain)[0] == curve(exact)[0]
    assert curve(plain)[1:] != curve(exact)[1:]


@pytest.mark.parametrize("name", ["lossytp", "megatron", "fsdp", "gpipe", "lossytp and fsdp"])
def test_clipped_gradients_are_those_of_one_process(processes, folder, dense, name):
    """The limit clips some steps only: AdamW would hide a factor that all steps share."""
    number, values = PARALLELISMS[name]
    clipped = {"gradient_clipping": 4.0, "max_steps": 8, "warmup_steps": 0}
    one = train(folder, clipped)
    assert curve(processes(number, train, folder / name, values | clipped)[0]) == pytest.approx(curve(one), rel=1e-4)
    for limit in (4.0 * 2**0.5, 4.0 / 2**0.5, None):
        assert curve(train(folder, clipped | {"gradient_clipping": limit})) != pytest.approx(curve(one), rel=1e-3)


def on_rank_see(folder: Path, values: dict) -> list[list[int]]:
    seen = []

    def look(module: Any, arguments: tuple, named: dict) -> None:
        if module.training:
            seen.append(named["labels"].tolist() + named["input_ids"].flatten().tolist())

    begin = Engine.__init__

    def watched(engine: Engine, *arguments: Any) -> None:
        begin(engine, *arguments)
        engine.module.register_forward_pre_hook(look, with_kwargs=True)

    with patch.object(Engine, "__init__", watched):
        train(folder, values)
    return seen


def test_replicas_see_different_shares_of_each_batch_and_tensor_parallel_ranks_the_same(processes, folder):
    number, values = PARALLELISMS["lossytp and ddp"]
    seen = processes(number, on_rank_see, folder / "seen", values | {"max_steps": 3})
    shares = [
        [
            batch["labels"][half].tolist() + batch["input_ids"][half].flatten().tolist()
            for batch in batches(folder / "seen", 3)
        ]
        for half in (slice(0, 4), slice(4, 8))
    ]
    assert seen == [shares[0], shares[0], shares[1], shares[1]]


def on_rank_look(folder: Path, values: dict) -> tuple[int, set[str]]:
    looked = []

    def after(engine: Engine, scaler: torch.amp.GradScaler) -> None:
        schedules = [engine.pipeline._schedules["train"][1]] if engine.pipeline else []
        looked.append((torch.initial_seed(), {type(schedule).__name__ for schedule in schedules}))

    with spied(after=after):
        train(folder, values)
    return looked[-1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lossytp and ddp", [(5, set()), (5, set()), (6, set()), (6, set())]),
        ("gpipe", [(5, {"ScheduleGPipe"}), (6, {"ScheduleGPipe"})]),
        ("1f1b", [(5, {"Schedule1F1B"}), (6, {"Schedule1F1B"})]),
    ],
)
def test_only_tensor_parallel_ranks_share_dropout_and_a_pipeline_has_its_schedule(processes, folder, name, expected):
    number, values = PARALLELISMS[name]
    assert processes(number, on_rank_look, folder / "look", values | {"max_steps": 1, "seed": 5}) == expected


def test_all_ranks_stop_at_the_same_evaluation_though_their_accuracies_differ(processes, folder):
    """FSDP's ranks lose different packets of gathered parameters."""
    _, values = PARALLELISMS["fsdp"]
    changes = {"loss_rate": 0.4, "max_steps": 12, "eval_steps": 1, "patience": 2, "learning_rate": 0.0}
    records = processes(2, train, folder / "patience", values | changes)
    assert comparable(records[0]) == comparable(records[1])
    assert records[0]["status"] == "stopped early"
    evaluations = records[0]["curves"]["eval"]
    assert max(evaluation["score_spread_lossy"] for evaluation in evaluations) > 0
    assert max(evaluation["score_spread_clean"] for evaluation in evaluations) == 0


def on_rank_overflow(folder: Path, values: dict) -> tuple[list[float], list[float]]:
    """Return each step's loss scale and sum of weights. In the third step only rank 1 has an infinite gradient."""
    scales: list[float] = []
    weights: list[float] = []

    def before(engine: Engine) -> None:
        weights.append(sum(parameter.double().sum().item() for parameter in engine.module.parameters()))

    def after(engine: Engine, scaler: torch.amp.GradScaler) -> None:
        scales.append(scaler.get_scale())
        if len(scales) == 3 and dist.get_rank() == 1:
            next(engine.module.parameters()).grad[0] = torch.inf

    with spied(before, after):
        train(folder, values)
    return scales, weights


def test_all_ranks_skip_a_step_if_one_overflows(processes, folder):
    _, values = PARALLELISMS["lossytp"]
    answers = processes(2, on_rank_overflow, folder / "fp16", values | {"fp16": True, "max_steps": 5})
    assert answers[0][0] == answers[1][0]
    for scales, weights in answers:
        assert scales[3] == scales[2] / 2
        assert weights[3] == weights[2]
        assert scales[4] == scales[3]
        assert weights[4] != weights[3]


def on_rank_again(folder: Path, values: dict) -> dict | tuple[str, str, str]:
    printed = io.StringIO()
    with patch.object(loop, "Run", None), contextlib.redirect_stderr(printed):
        try:
            return train(folder, values)
        except (ValueError, SystemExit) as error:
            return type(error).__name__, str(error), printed.getvalue()


def test_a_finished_run_is_not_run_again_and_another_configuration_is_refused_once(processes, folder):
    _, values = PARALLELISMS["ddp"]
    values = values | {"output_dir": str(folder / "again"), "max_steps": 2}
    first = processes(2, train, folder, values)
    assert processes(2, on_rank_again, folder, values) == [first[0], first[0]]
    refused, quiet = processes(2, on_rank_again, folder, values | {"max_steps": 3})
    assert refused[0] == "ValueError"
    assert "holds a run with max_steps = " in refused[1]
    assert quiet == ("SystemExit", "2", "")


def on_rank_train_otherwise(folder: Path, values: dict) -> str:
    with pytest.raises(ValueError, match="on rank 0 and") as error:
        train(folder, values | {"learning_rate": 1e-3 + dist.get_node_local_rank()})
    return str(error.value)


def test_runs_whose_ranks_have_other_settings_do_not_start(processes, folder):
    _, values = PARALLELISMS["ddp"]
    values = values | {"output_dir": str(folder / "otherwise")}
    for error in processes(2, on_rank_train_otherwise, folder, values):
        assert error.startswith("learning_rate = 0.001 on rank 0 and 1.001 on rank 1")
    assert not (folder / "otherwise").exists()


def on_rank_miss_megatron(folder: Path, values: dict) -> tuple[dict, str]:
    find_spec, told = importlib.util.find_spec, io.StringIO()

    def none_of_megatron(name: str, package: str | None = None) -> Any:
        return None if name.startswith("megatron") else find_spec(name, package)

    with patch.object(importlib.util, "find_spec", none_of_megatron), contextlib.redirect_stderr(told):
        return train(folder, values), told.getvalue()


def test_without_megatron_the_projects_layers_run_and_one_line_says_how_to_get_it(processes, folder, dense):
    _, values = PARALLELISMS["megatron"]
    answers = processes(2, on_rank_miss_megatron, folder / "missing", values | LOSSY)
    (record, told), (_, silence) = answers
    assert record["implementation"] == "lossytp"
    assert curve(record) == curve(processes(2, train, folder / "lossytp", PARALLELISMS["lossytp"][1] | LOSSY)[0])
    assert told.count("pip install megatron-core") == 1
    assert silence == ""
