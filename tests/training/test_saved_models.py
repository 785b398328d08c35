"""Test a run's models, `best` and `last`, in folders that may hold the user's files."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from lossytp.training import saved_models
from lossytp.training.loop import run
from tests.training.killed_runs import DDP, FSDP, RELIABLE, started
from tests.training.parallel_runs import settings, task_in, weights

pytestmark = pytest.mark.slow

TP = {"tensor_parallel_size": 2}
PLACES = ("best", "last", ".best.part", ".last.part", "checkpoint")


@pytest.mark.parametrize("place", PLACES[:4])
def test_a_users_files_are_refused_before_the_first_step_and_stay(toy, tmp_path, place, monkeypatch):
    monkeypatch.setattr("lossytp.training.loop.Run", None)  # fails if the run starts
    thesis = tmp_path / "run" / place / "thesis"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("x")
    with pytest.raises(ValueError, match=rf"^{thesis} is in the way.*: move it elsewhere, or give another"):
        run(toy(max_steps=1, save_model=True))
    assert thesis.read_text() == "x"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [place]


@pytest.mark.parametrize("place", ["mark", "weights", "removed", "renamed"])
def test_a_run_killed_while_it_saves_resumes(tmp_path, place):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    for where, code in ((place, -signal.SIGKILL), (None, 0)):
        process = context.Process(target=_train, args=(tmp_path, where))
        process.start()
        process.join(120)
        assert process.exitcode == code
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["best", "last", "record.json"]
    for name in ("best", "last"):
        assert (tmp_path / "run" / name / "model.safetensors").exists()


def _train(folder: Path, place: str | None) -> None:
    torch.set_num_threads(1)
    values = {"max_steps": 2, "eval_steps": 1, "eval_samples": 12, "save_model": True, "tensor_parallel_size": 1}
    with task_in(folder):
        if place is not None:
            _die_at(place)
        run(settings(folder, output_dir=str(folder / "run"), **values))


def _die_at(place: str) -> None:
    def dying(function, die_before=False):
        def call(*arguments, **named):
            if die_before:
                os.kill(os.getpid(), signal.SIGKILL)
            function(*arguments, **named)
            os.kill(os.getpid(), signal.SIGKILL)

        return call

    if place == "mark":
        saved_models.own_files = dying(saved_models.own_files)
    if place == "weights":
        saved_models.write_manifest = dying(saved_models.write_manifest, die_before=True)
    if place == "removed":
        Path.rename = dying(Path.rename, die_before=True)
    if place == "renamed":
        Path.rename = dying(Path.rename)


def score_next(monkeypatch, *scores):
    coming = iter(scores)

    def evaluate(self, step):
        score = next(coming)
        return {"step": step, "score_clean": score, "score_lossy": score, "seconds": 0.0}

    monkeypatch.setattr("lossytp.training.loop.Run._evaluate", evaluate)


def test_the_best_and_the_last_model_are_kept(toy, tmp_path, monkeypatch):
    score_next(monkeypatch, 0.5, 0.9, 0.7, 0.5, 0.9)
    values = {"eval_steps": 2, "schedule": "constant", "save_model": True}
    run(toy(max_steps=6, **values))
    run(toy(max_steps=4, output_dir=str(tmp_path / "shorter"), **values))
    best, last = weights(tmp_path / "run" / "best"), weights(tmp_path / "run" / "last")
    shorter = weights(tmp_path / "shorter" / "last")
    assert all(torch.equal(best[name], shorter[name]) for name in best)
    assert not torch.equal(best["score.weight"], last["score.weight"])
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"best", "last", "record.json"}


def test_a_run_that_goes_on_from_anothers_checkpoint_keeps_a_best_model_of_its_own(toy, tmp_path, monkeypatch):
    score_next(monkeypatch, 0.9, 0.5, 0.7, 0.6)
    values = {"eval_steps": 2, "checkpoint_steps": 2, "schedule": "constant", "max_steps": 4, "save_model": True}
    run(toy(output_dir=str(tmp_path / "first"), keep_checkpoints=2, **values))
    assert (tmp_path / "first" / "checkpoint" / "step-2").exists(), "several checkpoints stay"
    first = str(tmp_path / "first" / "checkpoint" / "step-2")
    run(toy(output_dir=str(tmp_path / "second"), checkpoint_path=first, **values))
    assert (tmp_path / "second" / "best").is_dir()


@pytest.mark.parametrize(
    "values",
    [
        {"pipeline_parallel_size": 2},
        *({**replicas, **how} for replicas in (DDP, FSDP) for how in ({}, TP, {"implementation": "custom"})),
        *({**TP, "implementation": name} for name in ("lossytp", "dtensor", "megatron")),
    ],
    ids=str,
)
def test_processes_save_the_model_that_one_process_trains(tmp_path, values):
    common = {**RELIABLE, "save_model": True, "max_steps": 3}
    assert started(tmp_path, 2, **values, **common) == [0, 0]
    assert started(tmp_path, 1, output_dir=str(tmp_path / "dense"), **common) == [0]
    whole, expected = weights(tmp_path / "run" / "last"), weights(tmp_path / "dense" / "last")
    for name, weight in expected.items():
        torch.testing.assert_close(whole[name], weight, rtol=1e-3, atol=2e-4)
