from typing import get_args, get_type_hints

import pytest

from lossytp.training.config import TrainConfig
from lossytp.training.engine import build_optimizer, learning_rate_factor
from lossytp.training.loop import run
from tests.parallel.conftest import tiny_gpt2
from tests.parallel.families import tiny

SCHEDULES = get_args(get_type_hints(TrainConfig)["schedule"])


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
    """All schedules agree up to the end of the warm-up."""
    curves = {}
    for schedule in SCHEDULES:
        record = run(toy(schedule=schedule, warmup_steps=2, output_dir=str(tmp_path / schedule)))
        curves[schedule] = [point["loss"] for point in record["curves"]["train_loss"]]
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
