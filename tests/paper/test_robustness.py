"""Trainings with and without losses: evaluated at several rates, and compared by hand."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from lossytp.study.run import execute
from lossytp.training import evaluation
from lossytp.training.config import TrainConfig
from lossytp.training.record import read_record
from paper.robustness import evaluation_changes, gains, train_and_evaluate

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "41_robustness.ipynb"
RATES = [0.0, 0.3]
TINY = {"max_steps": 6, "max_length": 16, "max_samples": 300, "eval_samples": 80, "tensor_parallel_size": 2, "seed": 5}


def evaluations(accuracies, task="t"):
    """Return a row an evaluation: the n-th value at (trained_at, evaluated_at) is seed n's accuracy."""
    return pd.DataFrame(
        [
            {"task": task, "trained_at": trained, "evaluated_at": evaluated, "seed": seed, "accuracy": value}
            for (trained, evaluated), values in accuracies.items()
            for seed, value in enumerate(values)
        ]
    )


KNOWN = {
    (0.0, 0.0): [0.60, 0.61, 0.65],
    (0.3, 0.0): [0.59, 0.61, 0.62],
    (0.0, 0.3): [0.40, 0.45, 0.50],
    (0.3, 0.3): [0.50, 0.54, 0.61],
}


def test_gains_are_paired_by_seed_at_each_rate_of_evaluation():
    table = evaluations(KNOWN).sample(frac=1, random_state=1)
    result = gains(table).set_index(["task", "evaluated_at", "trained_at"])
    pairs = np.array([0.10, 0.09, 0.11])
    row = result.loc["t", 0.3, 0.3]
    half = stats.t.ppf(0.975, 2) * stats.sem(pairs)
    assert (row["difference"], row["low"], row["high"]) == pytest.approx((0.1, 0.1 - half, 0.1 + half))
    p_values = [stats.ttest_rel(KNOWN[0.3, rate], KNOWN[0.0, rate]).pvalue for rate in RATES]
    assert row["p_holm"] == pytest.approx(2 * p_values[1])  # the smaller of the two
    other = result.loc["t", 0.0, 0.3]
    assert (other["difference"], other["p_holm"]) == pytest.approx((-0.04 / 3, p_values[0]))
    assert (row["seeds"], row["mean"]) == (3, pytest.approx(0.55))
    assert result.xs(0.0, level="trained_at")["difference"].isna().all()
    assert len(result) == 4


def test_changes_are_each_models_own_and_say_whom_losses_harm_less():
    table = evaluations(KNOWN).sample(frac=1, random_state=1)
    result = gains(evaluation_changes(table)).set_index(["evaluated_at", "trained_at"]).sort_index()
    assert list(result.index) == [(0.3, 0.0), (0.3, 0.3)]
    assert result["mean"].tolist() == pytest.approx([-0.17, -0.17 / 3])  # -20, -16, -15 and -9, -7, -1 points
    pairs = np.array([0.11, 0.09, 0.14])
    row, half = result.loc[0.3, 0.3], stats.t.ppf(0.975, 2) * stats.sem(pairs)
    assert (row["difference"], row["low"], row["high"]) == pytest.approx((0.34 / 3, 0.34 / 3 - half, 0.34 / 3 + half))


def test_tasks_are_compared_apart_and_corrected_together():
    both = gains(pd.concat([evaluations(KNOWN), evaluations(KNOWN, task="other")])).dropna(subset=["difference"])
    alone = gains(evaluations(KNOWN)).dropna(subset=["difference"])
    assert both.groupby("task")["difference"].apply(list).tolist() == [alone["difference"].tolist()] * 2
    assert both["p_holm"].min() == pytest.approx(2 * alone["p_holm"].min())


def test_tables_that_cannot_be_paired_are_refused():
    with pytest.raises(ValueError, match=r"t is evaluated twice at 0\.3, trained at 0, seed 1: leave one out"):
        gains(pd.concat([evaluations(KNOWN), evaluations(KNOWN).iloc[[7]]]))
    with pytest.raises(ValueError, match=r"'trained at 0' is unknown: choose one of trained at 0\.3"):
        gains(evaluations({(0.3, 0.3): [0.5, 0.6]}))


# Tiny models, trained and evaluated at several rates


def config(folder, **values):
    return TrainConfig(**{**TINY, "save_model": True, "loss_rate": 0.3, "output_dir": str(folder), **values})


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Use one thread, as the notebook does, so that numbers agree to the last digit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Return the folder where the notebook ran two cells, one without losses."""
    folder = tmp_path_factory.mktemp("study")
    cells = [config(folder / "runs" / f"{rate:g}", loss_rate=rate).as_dict() for rate in RATES]
    parameters = {"cells": cells, "evaluated_at": RATES, "results_dir": str(folder)}
    execute(NOTEBOOK, folder / "out.ipynb", parameters)
    return folder


@pytest.fixture
def lossy_run(study, tmp_path):
    """Return a copy of the finished run that was trained with losses."""
    return Path(shutil.copytree(study / "runs" / "0.3", tmp_path / "run"))


def rows_at(study, rate):
    table = pd.read_csv(study / "robustness" / "evaluations.csv")
    return table[table["trained_at"] == rate].reset_index(drop=True)


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_notebook_evaluates_every_model_at_every_rate(study):
    kept = {path.relative_to(study / "runs" / "0.3").as_posix() for path in files(study / "runs" / "0.3")}
    assert kept == {"record.json", *(f"evaluated_at_{rate}/evaluation.json" for rate in RATES)}, "no models"
    table = pd.read_csv(study / "robustness" / "evaluations.csv")
    assert table[["task", "seed"]].drop_duplicates().to_numpy().tolist() == [["docstrings", 5]]
    rates = [(trained_at, evaluated_at) for trained_at in RATES for evaluated_at in RATES]
    assert list(zip(table["trained_at"], table["evaluated_at"], strict=True)) == rates
    assert table["cross_entropy"].nunique() == 4
    assert (table["packets"] > 0).all()
    lost = table["lost"].to_numpy()
    assert lost[0] == lost[2] == 0
    assert lost[1] == lost[3] > 0  # one seed and rate lose the same packets, whichever way a model was trained


@pytest.mark.slow
@pytest.mark.parametrize("trained_at", RATES)
def test_a_saved_model_without_losses_is_exactly_the_trained_one(study, trained_at):
    final = read_record(study / "runs" / f"{trained_at:g}")["final"]
    here = rows_at(study, trained_at).iloc[0]
    assert here["evaluated_at"] == 0
    assert (here["accuracy"], here["cross_entropy"]) == (final["accuracy_clean"], final["cross_entropy_clean"])
    there = rows_at(study, 0.3 - trained_at).iloc[0]
    assert there["cross_entropy"] != final["cross_entropy_clean"], "the control"


@pytest.mark.slow
def test_a_run_killed_between_evaluations_goes_on_and_ends_the_same(study, tmp_path, monkeypatch):
    killed, whole = config(tmp_path), evaluation.run

    def run(asked):
        if asked.network.loss_rate == RATES[1]:
            raise KeyboardInterrupt
        return whole(asked)

    monkeypatch.setattr(evaluation, "run", run)
    with pytest.raises(KeyboardInterrupt):
        train_and_evaluate(killed, RATES)
    before = files(tmp_path)
    assert (tmp_path / "last").is_dir()
    monkeypatch.setattr(evaluation, "run", whole)
    table = train_and_evaluate(killed, RATES)
    pd.testing.assert_frame_equal(table, rows_at(study, 0.3), check_exact=True)
    after = files(tmp_path)
    kept = {path for path in before if path.suffix == ".json" and path.parent.name not in ("best", "last")}
    assert {path: after[path] for path in kept} == {path: before[path] for path in kept}
    assert len(kept) == 2
    assert not [path for path in after if path.parent.name in ("best", "last")]


def test_a_finished_run_does_nothing_again_but_delete_its_models(study, lossy_run, monkeypatch):
    monkeypatch.setattr(evaluation, "run", None)
    before = files(lossy_run)
    for model in ("best", "last"):  # as when it was killed in the middle of deleting them
        (lossy_run / model).mkdir()
    table = train_and_evaluate(config(lossy_run), RATES)
    pd.testing.assert_frame_equal(table, rows_at(study, 0.3), check_exact=True)
    assert files(lossy_run) == before
    assert not (lossy_run / "last").exists()


def test_files_of_others_in_the_runs_folders_stay(lossy_run):
    for name in ("last", "evaluated_at_0.7"):
        (lossy_run / name).mkdir()
        (lossy_run / name / "thesis").write_text("x")
    train_and_evaluate(config(lossy_run), RATES)
    (lossy_run / "record.json").unlink()
    with pytest.raises(ValueError, match=r"last/thesis is in the way"):
        train_and_evaluate(config(lossy_run), RATES)
    for name in ("last", "evaluated_at_0.7"):
        assert (lossy_run / name / "thesis").read_text() == "x"


def test_an_evaluation_whose_model_was_deleted_is_refused_and_nothing_is_lost(lossy_run):
    before = files(lossy_run)
    with pytest.raises(ValueError, match=r"run has no evaluation at 0\.1, and its model was deleted: delete this fol"):
        train_and_evaluate(config(lossy_run), [0.0, 0.1])
    assert files(lossy_run) == before


@pytest.mark.slow
def test_evaluations_of_an_earlier_run_are_not_taken_for_this_ones(study, lossy_run):
    (lossy_run / "record.json").unlink()
    file = lossy_run / "evaluated_at_0.3" / "evaluation.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lossy": {"accuracy": 2.0, "cross_entropy": 0.0}}))
    table = train_and_evaluate(config(lossy_run), RATES)
    pd.testing.assert_frame_equal(table, rows_at(study, 0.3), check_exact=True)


def test_a_run_that_became_not_finite_answers_with_the_most_frequent_class(tmp_path):
    table = train_and_evaluate(config(tmp_path, learning_rate=1e30, warmup_steps=0), RATES)
    record = read_record(tmp_path)
    assert record["status"] == "not finite"
    assert table["accuracy"].tolist() == [record["data"]["majority_share"]] * 2
    assert table["cross_entropy"].isna().all()


@pytest.mark.parametrize(
    ("values", "rates", "message"),
    [
        ({"save_model": False}, RATES, "save_model"),
        ({"lossy_direction": "backward"}, RATES, "lossy_direction"),
        ({"loss_rate": 0.0, "loss_type": "g-e", "ge_config": "one"}, RATES, "ge_config"),
        *(({}, rates, "evaluated_at") for rates in ([0.1, 1.5], [], 0.1)),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_training(tmp_path, values, rates, message):
    with pytest.raises(ValueError, match=message):
        train_and_evaluate(config(tmp_path / "run", **values), rates)
    assert not (tmp_path / "run").exists()
