"""Test the engine: the optimizer, microbatches, frozen blocks, recomputed activations, memory, and its check."""

import math
import platform
import subprocess
import sys
import weakref
from functools import partial
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

import pytest
import torch

import lossytp as ltp
from lossytp.parallel.group import Layout, rank_and_world_size
from lossytp.parallel.replicas import local
from lossytp.training import engine
from lossytp.training.config import FineTuningSettings, TrainConfig
from lossytp.training.engine import build_optimizer, connected_processes, learning_rate_factor, loss_terms, microbatches
from lossytp.training.loop import run
from lossytp.training.models import build_model, load_tokenizer
from tests.parallel.conftest import tiny_gpt2
from tests.parallel.families import tiny
from tests.training.killed_runs import DDP, FSDP, RELIABLE, result, started
from tests.training.parallel_runs import PARALLELISMS, curve, train, weights

pytestmark = pytest.mark.slow

OWN_STREAMS = {"tensor_parallel_size": 2, "reliable_gather": False}
OWN_COPIES = OWN_STREAMS | {"replicated_gradients": "none"}
SCHEDULES = get_args(get_type_hints(FineTuningSettings)["schedule"])
GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these options")


def factor(step, schedule, **values):
    return learning_rate_factor(step, schedule=schedule, warmup_steps=10, total_steps=110, **values)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_warms_up_linearly(schedule):
    assert factor(0, schedule) == pytest.approx(0.1)
    assert factor(9, schedule) == factor(10, schedule) == 1.0


def test_schedules_end_where_they_should():
    assert factor(35, "linear") == pytest.approx(0.75)
    assert factor(35, "cosine") == pytest.approx(0.8535534)  # (1 + cos(pi / 4)) / 2
    assert factor(60, "cosine", smallest=0.2) == pytest.approx(0.6)
    assert [factor(110, schedule) for schedule in SCHEDULES] == pytest.approx([0, 0, 1])


def test_a_run_follows_its_schedule(toy, tmp_path):
    curves = {}
    for schedule in SCHEDULES:
        record = run(toy(schedule=schedule, warmup_steps=2, output_dir=str(tmp_path / schedule)))
        curves[schedule] = curve(record)
    assert curves["linear"][:3] == curves["cosine"][:3] == curves["constant"][:3]
    assert len({curve[-1] for curve in curves.values()}) == 3


@pytest.mark.parametrize(
    "model", [tiny_gpt2, lambda: tiny("llama, biases"), lambda: tiny("qwen3"), lambda: tiny("olmo2")]
)
def test_matrices_alone_decay(model):
    parameters = model()
    decaying, others = build_optimizer(parameters, learning_rate=1.0, weight_decay=0.1).param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {parameter.ndim for parameter in decaying["params"]} == {2}
    assert {parameter.ndim for parameter in others["params"]} == {1}
    assert sum(len(group["params"]) for group in (decaying, others)) == len(list(parameters.parameters()))


def test_copies_of_norms_do_not_decay_as_norms_do_not():
    decaying = []
    for own_copies in (False, True):
        network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1))
        how = {"tensor_parallel_size": 2, "reliable_gather": False, "own_copies": own_copies}
        model = ltp.parallelize(tiny_gpt2(), network, **how)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        group, _ = build_optimizer(model, learning_rate=1.0, weight_decay=0.1).param_groups
        decaying.append({names[id(parameter)] for parameter in group["params"]})
    assert decaying[0] == decaying[1]
    assert not [name for name in decaying[1] if "ln_" in name]


def test_microbatches_hold_all_examples_and_weigh_by_predicted_tokens():
    batch = {"input_ids": torch.arange(14).view(7, 2), "labels": torch.arange(7)}
    pieces = list(microbatches(batch, 3))
    assert [len(piece["labels"]) for piece, _ in pieces] == [2, 2, 3]
    assert torch.equal(torch.cat([piece["input_ids"] for piece, _ in pieces]), batch["input_ids"])
    assert [share for _, share in pieces] == [2 / 7, 2 / 7, 3 / 7]
    assert len(list(microbatches(batch, 9))) == 7
    labels = torch.tensor([[5, -100, 6], [7, 8, 9]])
    assert loss_terms(labels) == 3  # a first token is never predicted
    assert [share for _, share in microbatches({"labels": labels}, 2)] == [1 / 3, 2 / 3]


@pytest.mark.parametrize("values", [{}, OWN_STREAMS, {"fp16": True}], ids=str)
def test_without_losses_microbatches_change_nothing(toy, tmp_path, monkeypatch, values):
    """Also for an epoch's small last batch: the last two of 50 examples."""
    values = {"max_samples": 50, "max_steps": 8, "gradient_clipping": 1.0, **values}
    scaler = partial(
        torch.amp.GradScaler, "cpu", init_scale=256.0
    )  # a larger scale skips first steps, not the same ones in each run
    monkeypatch.setattr("lossytp.training.loop._scaler", lambda _, enabled: scaler(enabled=enabled))
    curves = [
        curve(run(toy(gradient_accumulation_steps=number, output_dir=str(tmp_path / str(number)), **values)))
        for number in (1, 3, 8)
    ]
    rounding = 1e-3 if "fp16" in values else 1e-5
    assert curves[1] == pytest.approx(curves[0], rel=rounding)
    assert curves[2] == pytest.approx(curves[0], rel=rounding)


@pytest.mark.parametrize(("values", "times"), [(DDP, 1), (FSDP, 3), ({**DDP, "tensor_parallel_size": 2}, 1)], ids=str)
def test_replicas_split_batches_into_microbatches_too(tmp_path, values, times):
    """DDP averages gradients once a batch; FSDP gathers parameters and scatters gradients for each microbatch.

    Replicas' messages have the layer None.
    """
    packets, curves = [], []
    for number in (1, 3):
        folder = str(tmp_path / str(number))
        assert started(tmp_path, 2, **values, **RELIABLE, gradient_accumulation_steps=number, output_dir=folder) == [
            0,
            0,
        ]
        record = result(tmp_path, str(number))
        packets.append(record["network"]["training"]["by_layer"]["None"]["packets"])
        curves.append(curve(record))
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert packets[1] == times * packets[0] > 0


UNEVEN = {"max_samples": 17, "max_steps": 9}  # batches of 8, 8 and 1


@pytest.mark.parametrize("name", ["ddp", "fsdp", "gpipe", "1f1b", "lossytp and ddp"])
def test_the_last_batch_counts_as_in_one_process(processes, tmp_path, name):
    """It has a single example, for two replicas or four microbatches."""
    number, values = PARALLELISMS[name]
    one = train(tmp_path, UNEVEN)
    assert one["data"]["train_examples"] == 17
    for values_of_batch in (
        {},
        {"batch_size": 12, "pipeline_microbatches": 3},
    ):  # batches of 12 and 5; replicas share 5 as 2 and 3
        dense = train(tmp_path, UNEVEN | values_of_batch)
        record = processes(number, train, tmp_path / name, values | UNEVEN | values_of_batch)[0]
        assert curve(record) == pytest.approx(curve(dense), rel=1e-4)
        assert record["final"] == pytest.approx(dense["final"], rel=1e-4)


@pytest.mark.parametrize(("trained", "values"), [(0, {}), (1, {}), (2, OWN_STREAMS), (1, OWN_COPIES)], ids=str)
def test_only_the_last_blocks_norm_and_head_are_trained(toy, tmp_path, trained, values):
    values = {"loss_rate": 0.1, "save_model": True, **values}
    record = run(toy(unfreeze_last_layers=trained, **values))
    name = "gpt2-nano-scratch"
    settings = {"labels": ("first", "second"), "tokenizer": load_tokenizer(name), "dropout": 0.0, "seed": 0}
    dense = build_model(name, "classification", **settings)
    last = weights(tmp_path / "run" / "last")
    changed = {name for name, before in dense.state_dict().items() if not torch.equal(before, last[name])}
    expected = [f"transformer.h.{block}." for block in range(4 - trained, 4)] + ["transformer.ln_f.", "score."]
    assert changed == {name for name in last if name.startswith(tuple(expected))}
    whole = run(toy(output_dir=str(tmp_path / "whole"), **values))
    directions = [each["network"]["training"]["by_direction"] for each in (record, whole)]
    assert directions[0]["forward"]["packets"] == directions[1]["forward"]["packets"]
    frozen = directions[0].get("backward", {"packets": 0})["packets"]
    assert frozen == directions[1]["backward"]["packets"] * trained / 4
    with pytest.raises(ValueError, match="unfreeze_last_layers = 5"):
        run(toy(output_dir=str(tmp_path / "more"), **values, unfreeze_last_layers=5))


@pytest.mark.parametrize(
    ("processes", "values"),
    [
        *((1, {"tensor_parallel_size": 1, "loss_rate": 0.0}), (1, {"tensor_parallel_size": 4, "dropout": 0.1})),
        (1, {"tensor_parallel_size": 2, "repair": "stale", "max_length": 4}),
        *((1, {**OWN_STREAMS, "unfreeze_last_layers": 2}), (2, {"tensor_parallel_size": 2})),
        *((2, {**DDP, "tensor_parallel_size": 2}), (2, {"pipeline_parallel_size": 2})),
    ],
    ids=str,
)
def test_recomputed_activations_change_nothing(tmp_path, processes, values):
    records = []
    for name in ("kept", "recomputed"):
        more = {"gradient_checkpointing": name == "recomputed", "max_steps": 4, "output_dir": str(tmp_path / name)}
        assert started(tmp_path, processes, **values, **more) == [0] * processes
        records.append(result(tmp_path, name))
        del records[-1]["config"]
    assert records[0] == records[1]


FAULTS = """
import resource, sys, torch
from lossytp.training.engine import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(2**24)  # 64 MiB
before = faults()
for _ in range(20):
    torch.ones(2**24)
print(faults() - before)
"""


@GLIBC
def test_large_tensors_do_not_fault_their_pages_in_again():
    kept, returned = (
        int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, check=True).stdout)
        for how in ("kept", "returned")
    )
    assert kept < returned / 10


@pytest.mark.parametrize(
    ("precision", "factor", "error"),
    [("highest", 1.001, "1.0e-03"), ("highest", math.nan, "nan"), ("high", 1.1, "1.0e-01")],
)
def test_a_parallel_model_that_computes_something_else_is_refused(monkeypatch, precision, factor, error):
    """A GPU rounds more coarsely in TF32 (precision "high") than the CPU, where the dense model is."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    config, dense = TrainConfig(tensor_parallel_size=2, loss_rate=0.5), tiny_gpt2("classifier", dtype=torch.float32)
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.5))
    parts = config, dense, network, Layout(2), torch.device("cpu")
    assert engine.Engine(*parts).module.training, "losses are no other function"
    right = engine.Engine._tensor_parallel

    def wrong(self, dense):
        model = right(self, dense)
        model.score.weight = torch.nn.Parameter(factor * model.score.weight)
        return model

    monkeypatch.setattr(engine.Engine, "_tensor_parallel", wrong)
    with pytest.raises(ValueError, match=f"logits differ from the dense model's by {error} of the largest one, above"):
        engine.Engine(*parts)


def nbytes(model: torch.nn.Module) -> int:
    return sum(local(parameter).nbytes for parameter in model.parameters())


LAYOUTS: dict[str, dict[str, Any]] = {
    "lossytp": {"tensor_parallel_size": 2},
    "dtensor": {"tensor_parallel_size": 2, "implementation": "dtensor"},
    "fsdp": {"tensor_parallel_size": 1, "data_parallel_size": 2, "data_parallel_type": "fsdp"},
    "pipeline": {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
}


def moved_share(name: str) -> tuple[float, bool]:
    """Return the most bytes moved to this process's device at once, as a share of the dense model's.

    Also whether the dense model is freed.
    """
    config = TrainConfig(loss_rate=0.1, **LAYOUTS[name])
    layout, moved, move = config.layout(*rank_and_world_size()), {}, torch.nn.Module.to

    def spy(module: torch.nn.Module, *where: Any, **how: Any) -> torch.nn.Module:
        moved[id(module)] = nbytes(module)
        return move(module, *where, **how)

    with connected_processes(config, layout) as network:
        dense = tiny_gpt2("classifier", dtype=torch.float32)
        whole, weight = nbytes(dense), weakref.ref(dense.transformer.h[0].mlp.c_fc.weight)
        with patch.object(torch.nn.Module, "to", spy):
            built = engine.Engine(config, dense, network, layout, torch.device("cpu"))
        assert id(built.module) in moved
        del dense
        return max(moved.values()) / whole, weight() is None


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_device_receives_its_shard_alone(processes, name):
    for share, freed in processes(2, moved_share, name):
        assert share < 0.75
        assert freed
