import json

import pytest

from lossytp.training.loop import run
from tests.training.parallel_runs import comparable

pytestmark = pytest.mark.slow


def test_a_record_has_its_documented_keys(toy, tmp_path):
    record = run(toy(loss_rate=0.1, eval_steps=3))
    for key in ("config", "seed", "commit", "environment", "curves", "final", "network", "time_to_accuracy", "timing"):
        assert key in record
    assert record == json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "finished"
    assert [point["step"] for point in record["curves"]["eval"]] == [3, 6]
    assert record["curves"]["train_loss"][-1]["step"] == 6
    training = record["network"]["training"]
    assert training["packets"] == sum(row["packets"] for row in training["by_link"].values())
    assert 0 < training["lost"] < training["packets"]
    assert set(training["by_direction"]) == {"forward", "backward"}
    assert 0.5 < record["data"]["real_token_share"] <= 1
    assert (record["processes"], record["implementation"]) == (1, "lossytp")
    evaluation = record["curves"]["eval"][0]
    assert evaluation["replica_drift"] == evaluation["score_spread_clean"] == evaluation["score_spread_lossy"] == 0
    names = ("score", "accuracy", "cross_entropy")
    assert set(record["final"]) == {f"{name}_{how}" for name in names for how in ("clean", "lossy")}
    dense = run(toy(max_steps=1, tensor_parallel_size=1, output_dir=str(tmp_path / "dense")))
    assert dense["implementation"] == "dense"


def test_same_seed_same_record_other_seed_another(toy, tmp_path):
    seeds = {"a": 0, "b": 0, "c": 1}
    records = [run(toy(loss_rate=0.2, output_dir=str(tmp_path / name), seed=seed)) for name, seed in seeds.items()]
    assert comparable(records[0]) == comparable(records[1])
    assert records[0]["curves"] != records[2]["curves"]


def test_the_toy_task_is_learnt_and_time_to_accuracy_recorded(toy, tmp_path):
    record = run(toy(max_steps=40, eval_steps=5, target_accuracy=0.9, learning_rate=3e-3))
    assert record["final"]["accuracy_clean"] == 1.0
    assert 5 <= record["time_to_accuracy"]["step"] <= 35
    assert record["times_to_targets"] == [record["time_to_accuracy"]]  # the task's other target is never reached
    never = run(toy(max_steps=2, eval_steps=1, target_accuracy=1.0, output_dir=str(tmp_path / "never")))
    assert never["time_to_accuracy"] is None


def test_patience_stops_early(toy):
    record = run(toy(max_steps=50, eval_steps=1, patience=2, learning_rate=0.0))
    assert record["status"] == "stopped early"
    assert record["curves"]["eval"][-1]["step"] == 3  # the first is the best, and two more do not beat it


def test_a_training_loss_that_is_not_finite_ends_the_run_with_a_record_that_says_so(toy, tmp_path):
    record = run(toy(learning_rate=1e30, max_steps=20, warmup_steps=0))
    assert record["status"] == "not finite"
    assert record["final"]["accuracy_lossy"] is None
    assert record["timing"]["steps"] < 20
    assert "NaN" not in (tmp_path / "run" / "record.json").read_text()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_halves_the_packets(toy, tmp_path, precision):
    full = run(toy(max_steps=2, output_dir=str(tmp_path / "full")))["network"]["training"]["packets"]
    half = run(toy(max_steps=2, output_dir=str(tmp_path / "half"), **{precision: True}))["network"]["training"][
        "packets"
    ]
    assert half < full
    assert half >= full / 2


def test_gradients_are_clipped_to_the_given_norm(toy, tmp_path):
    """A limit above all norms changes nothing, even if the training loss is scaled; a limit below them does."""
    curves = {}
    for fp16 in (False, True):
        for limit in (None, 100.0, 2.0):
            values = {"fp16": fp16, "gradient_clipping": limit, "warmup_steps": 0}
            record = run(toy(**values, output_dir=str(tmp_path / f"{fp16} {limit}")))
            curves[fp16, limit] = [point["loss"] for point in record["curves"]["train_loss"]]
        assert curves[fp16, None] == curves[fp16, 100.0]
        assert curves[fp16, None] != pytest.approx(curves[fp16, 2.0], rel=1e-3)
