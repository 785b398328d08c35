"""Test that every kind of task is learnt, in one process and in several."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from lossytp.training import tasks
from tests.training.tasks_of_all_kinds import OWN_STREAMS, TABLE, TASKS, evaluate, losses, train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["classification", "regression", "choice"])
def test_an_easy_pattern_is_learnt(tmp_path, kind):
    values = {"max_steps": 60, "loss_rate": 0.02, "eval_samples": 15, "save_model": False}
    record = train(tmp_path, kind, **values)
    assert record["final"]["score_clean"] > 0.9
    assert record["final"]["score_lossy"] > 0.8
    assert record["data"]["chance"] < 0.7


def test_generating_the_answer_is_learnt(tmp_path):
    record = train(tmp_path, "generation", max_steps=80, loss_rate=0.02, save_model=False, learning_rate=1e-2)
    assert record["final"]["score_clean"] > 0.6
    assert record["curves"]["eval"][-1]["f1_clean"] >= record["final"]["score_clean"]


@pytest.mark.parametrize("kind", ["choice", "generation"])
def test_two_processes_train_and_evaluate_as_virtual_ranks_do(processes, tmp_path, kind):
    values = {"tensor_parallel_size": 2, **OWN_STREAMS}
    folders = [tmp_path / "here", tmp_path / "there"]
    here = train(folders[0], kind, **values)
    there = processes(2, _train, folders[1], kind, values)[0]
    assert losses(there) == pytest.approx(losses(here), rel=1e-4)
    assert there["network"] == here["network"]
    mine = evaluate(folders[0], loss_rate=0.3, **values)
    theirs = processes(2, _evaluate, folders[0], {"loss_rate": 0.3, **values})
    assert theirs[0] == theirs[1]
    assert theirs[0]["network"] == mine["network"]
    for network in ("clean", "lossy"):
        assert theirs[0][network] == pytest.approx(mine[network], rel=1e-4, abs=1e-6)


def test_replicas_of_a_generation_task_count_by_tokens(processes, tmp_path):
    """Answers have one word or ten, so replicas predict different numbers of tokens; one process predicts all."""
    values = {"tensor_parallel_size": 1, "loss_rate": 0.0, "save_model": False, "batch_size": 6, "max_steps": 6}
    with patch.dict(TASKS, uneven=_uneven()):
        here = train(tmp_path / "here", "uneven", **values)
    for number in (1, 2):
        there = processes(
            2,
            _train,
            tmp_path / f"there {number}",
            "uneven",
            {**values, "data_parallel_size": 2, "gradient_accumulation_steps": number},
        )[0]
        assert losses(there) == pytest.approx(losses(here), rel=1e-4)


def _uneven():
    def with_answers(row):
        return {**row, "colour": [" ".join(row["colour"] * (1 if row["label"] else 10))]}

    table = tasks.Table(train=[with_answers(row) for row in TABLE.train], test=TABLE.test)
    return replace(TASKS["generation"], source=table)


def _train(folder, kind, values):
    with patch.dict(TASKS, uneven=_uneven()):
        return train(folder, kind, **values)


def _evaluate(folder, values):
    return evaluate(folder, **values)
