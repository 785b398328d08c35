"""Check the table of implementations and parallelisms."""

import pandas as pd
import pytest

from lossytp.training.config import TrainConfig
from paper.parallelisms import (
    against_tensor_parallelism,
    compare,
    label,
    traffic_a_step,
    training_curves,
)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tensor_parallel_size": 1}, "one process"),
        ({"tensor_parallel_size": 2, "implementation": "dtensor"}, "tp 2 (dtensor)"),
        ({"tensor_parallel_size": 1, "data_parallel_size": 2}, "dp 2 (pytorch ddp)"),
        ({"tensor_parallel_size": 1, "pipeline_parallel_size": 4, "pipeline_schedule": "1f1b"}, "pp 4 (1f1b)"),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 2, "data_parallel_type": "fsdp"},
            "dp 2 (pytorch fsdp) x tp 2 (lossytp)",
        ),
        (
            {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "gradient_clipping": 1.0, "exact_adjoint": True},
            "pp 2 (gpipe), clipped, exact adjoint",
        ),
        ({"tensor_parallel_size": 2, "repair": "rescale"}, "tp 2 (lossytp), rescale"),
    ],
)
def test_label(sizes, expected):
    assert label(TrainConfig(**sizes)) == expected


def record(**values):
    config = TrainConfig(**values)
    return {
        "config": config.as_dict(),
        "implementation": config.parallelism.implementation,
        "processes": 2,
        "status": "finished",
        "curves": {
            "train_loss": [{"step": 5, "loss": 2.0}],
            "eval": [{"replica_drift": 0.0}, {"replica_drift": 0.25}],
        },
        "final": {"accuracy_clean": 0.75, "accuracy_lossy": 0.5},
        "timing": {"step_seconds": 0.125, "steps": 10, "tokens_per_second": 100.0},
        "environment": {"processor": "one"},
        "time_to_accuracy": None,
        "network": {
            "training": {
                "packets": 400,
                "lost": 40,
                "by_direction": {"forward": {"packets": 400, "lost": 40}},
                "by_operation": {"all_reduce": {"packets": 400, "lost": 40}},
                "messages": {"called": 7, "lossy": 3, "by_direction": {"forward": {"called": 7, "lossy": 3}}},
            }
        },
    }


def test_one_row_a_record_in_order():
    fallen_back = record(implementation="megatron") | {"implementation": "lossytp"}
    assert compare([fallen_back])["parallelism"].tolist() == ["tp 4 (lossytp)"], "without Megatron-core"
    table = compare([record(loss_rate=0.1), record(loss_rate=0.0, implementation="dtensor"), record(loss_rate=0.0)])
    assert table["parallelism"].tolist() == ["tp 4 (dtensor)", "tp 4 (lossytp)", "tp 4 (lossytp)"]
    assert table["loss_rate"].tolist() == [0.0, 0.0, 0.1]
    two = compare([record(dataset="sst2", loss_rate=0.0), record(loss_rate=0.1)])
    assert two["task"].tolist() == ["docstrings", "sst2"], "a task's rows stand together"
    row = table.iloc[-1]
    assert row["replica_drift"] == 0.25
    assert (row["machine_step_seconds"], row["forward_packets"], row["accuracy_lossy"]) == (0.125, 400, 0.5)
    assert (row["forward_called"], row["forward_lossy"]) == (7, 3)
    assert "backward_called" not in row, "nothing was sent that way"


def test_a_presets_losses_are_no_part_of_the_lossless_comparison():
    presets = [{"loss_type": "g-e", "ge_config": name} for name in ("default", "zero")]
    records = [record(**values) for values in (*presets, {"loss_rate": 0.1}, {"loss_rate": 0.0})]
    table = compare(records).sort_values("losses")
    assert table["loss_rate"].tolist() == [0.1, 0.1, 0.0, 0.0]
    names = ["10 %", "10 % in bursts of 2.22", "no losses", "no losses"]
    assert table["losses"].tolist() == names
    assert sorted(training_curves(records)["losses"]) == names


@pytest.mark.parametrize(("phases", "calls"), [(["reduce"], 80), (["reduce", "gather"], 160)])
def test_a_collective_that_loses_in_two_phases_is_one(phases, calls):
    run = record()
    run["network"]["training"] |= {
        "by_phase": {phase: {} for phase in phases},
        "by_direction": {"forward": {"packets": 400}, "backward": {"packets": 200}},
        "messages": {"by_direction": {direction: {"called": calls} for direction in ("forward", "backward")}},
    }
    assert traffic_a_step(run) == {
        "collectives_forward": 8, "packets_forward": 40, "collectives_backward": 8, "packets_backward": 20,
    }  # fmt: skip


def test_parallelisms_are_compared_at_equal_loss_and_repair():
    rows = [
        {"task": "t", "arm": arm, "repair": repair, "loss_rate": rate, "seed": seed}
        | {"accuracy_lossy": 0.7 + 0.1 * seed - fall}
        for arm, repair, rate, falls in (
            ("no loss", "zero", 0.0, (0.0, 0.0)),
            ("tp 2, zero", "zero", 0.1, (0.04, 0.06)),
            ("tp 2, rescale", "rescale", 0.1, (0.03, 0.03)),
            ("ddp 2, zero", "zero", 0.1, (0.01, 0.02)),
            ("ddp 2, rescale", "rescale", 0.1, (0.05, 0.05)),
            ("tp 2, fec(10, 8)", "fec(10, 8)", 0.1, (0.01, 0.01)),
            ("pp 2 clipped, zero", "zero", 0.1, (0.06, 0.05)),
        )
        for seed, fall in enumerate(falls)
    ]
    table = against_tensor_parallelism(pd.DataFrame(rows)).set_index(["arm", "repair"])["difference"]
    both = {(arm, repair) for arm in ("tp 2", "ddp 2") for repair in ("zero", "rescale")}
    assert set(table.index) == both | {("tp 2", "fec(10, 8)")}
    assert table["ddp 2", "zero"] == pytest.approx(0.035)
    assert table["ddp 2", "rescale"] == pytest.approx(-0.02)
