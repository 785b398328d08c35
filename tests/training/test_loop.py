import copy
import json

import pytest
import torch

from lossytp.training import loop
from lossytp.training import objectives as finetuning
from lossytp.training.loop import run

pytestmark = pytest.mark.slow


def comparable(record):
    """Return a record without its seconds, which differ from run to run."""
    record = copy.deepcopy(record)
    del record["timing"]
    for point in record["curves"]["eval"]:
        del point["seconds"]
    return record


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


def test_a_finished_run_is_not_run_again_and_another_configuration_is_refused(toy, monkeypatch):
    first = run(toy())
    monkeypatch.setattr(loop, "Run", None)  # fails if the run starts
    assert run(toy()) == first
    with pytest.raises(ValueError, match="loss_rate"):
        run(toy(loss_rate=0.5))


def test_same_seed_same_record_other_seed_another(toy, tmp_path):
    records = [
        run(toy(loss_rate=0.2, output_dir=str(tmp_path / "a"), seed=0)),
        run(toy(loss_rate=0.2, output_dir=str(tmp_path / "b"), seed=0)),
        run(toy(loss_rate=0.2, output_dir=str(tmp_path / "c"), seed=1)),
    ]
    assert comparable(records[0]) == comparable(records[1])
    assert records[0]["curves"] != records[2]["curves"]


def test_without_losses_every_tensor_parallel_size_gives_the_dense_curve(toy, tmp_path):
    curves = []
    for size in (1, 2, 8):
        record = run(toy(tensor_parallel_size=size, output_dir=str(tmp_path / str(size))))
        curves.append([point["loss"] for point in record["curves"]["train_loss"]])
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[2] == pytest.approx(curves[0], rel=1e-5)
    lossy = run(toy(tensor_parallel_size=8, loss_rate=0.5, output_dir=str(tmp_path / "lossy")))
    assert [point["loss"] for point in lossy["curves"]["train_loss"]] != pytest.approx(curves[0], rel=1e-3)


def test_evaluating_more_often_does_not_change_training(toy, tmp_path):
    rare = run(toy(loss_rate=0.2, dropout=0.1, output_dir=str(tmp_path / "rare")))
    often = run(toy(loss_rate=0.2, dropout=0.1, eval_steps=1, output_dir=str(tmp_path / "often")))
    assert rare["curves"]["train_loss"] == often["curves"]["train_loss"]
    assert rare["final"] == often["final"]


def test_clean_and_lossy_evaluation_agree_only_without_losses(toy, tmp_path):
    final = run(toy(output_dir=str(tmp_path / "clean")))["final"]
    assert final["cross_entropy_clean"] == final["cross_entropy_lossy"]
    final = run(toy(loss_rate=0.3, output_dir=str(tmp_path / "lossy")))["final"]
    assert final["cross_entropy_clean"] != final["cross_entropy_lossy"]


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


def test_packet_losses_do_not_touch_global_generators(toy, tmp_path):
    """Dropout draws the same numbers with and without losses."""
    states = []
    for rate in (0.0, 0.5):
        run(toy(loss_rate=rate, dropout=0.1, output_dir=str(tmp_path / str(rate))))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_run_on_one_process_is_recorded_as_such(toy, tmp_path):
    record = run(toy(max_steps=1))
    assert (record["processes"], record["implementation"]) == (1, "lossytp")
    evaluation = record["curves"]["eval"][0]
    assert evaluation["replica_drift"] == evaluation["score_spread_clean"] == 0
    assert evaluation["score_spread_lossy"] == 0
    assert set(record["final"]) == {
        f"{name}_{how}" for name in ("score", "accuracy", "cross_entropy") for how in ("clean", "lossy")
    }
    dense = run(toy(max_steps=1, tensor_parallel_size=1, output_dir=str(tmp_path / "dense")))
    assert dense["implementation"] == "dense"


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


@pytest.mark.parametrize(("ranks", "times"), [(1, 1), (2, 2)])
def test_a_single_rank_is_evaluated_once_since_it_sends_nothing(toy, monkeypatch, ranks, times):
    calls, scores = [], finetuning.scores
    monkeypatch.setattr(finetuning, "scores", lambda *given: calls.append(given) or scores(*given))
    final = run(toy(tensor_parallel_size=ranks, loss_rate=0.0, max_steps=1, warmup_steps=1))["final"]
    assert len(calls) == times
    assert final["accuracy_lossy"] == final["accuracy_clean"]
