"""The power laws that predict new arms, and how predictions are scored."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lossytp.training.config import TrainConfig
from paper.predictions import (
    InferenceProbe,
    committed,
    fit_predictor,
    predict_arms,
    score,
    shared_errors,
    with_interval,
    with_measured,
)

SCALE, EXPONENT = 0.6, 1.2
NOISE = 0.003


def arms(rng: np.random.Generator, number: int, scatter: float) -> tuple[np.ndarray, np.ndarray]:
    x = rng.uniform(0.02, 0.4, number)
    law = SCALE * x**EXPONENT
    return x, law * (1 + scatter * rng.standard_normal(number)) + NOISE * rng.standard_normal(number)


def test_fit_predictor_finds_the_law_and_the_scatter_of_the_arms() -> None:
    x, fall = arms(np.random.default_rng(1), 400, 0.3)
    assert fit_predictor(x, fall, np.full(400, NOISE)).scatter == pytest.approx(0.3, abs=0.04)
    found = fit_predictor(*arms(np.random.default_rng(0), 40, 0.0), np.full(40, NOISE))
    assert (found.scale, found.exponent) == pytest.approx((SCALE, EXPONENT), rel=0.05)
    assert found.scatter < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("scatter", [0.0, 0.3])
def test_intervals_hold_new_arms_as_often_as_they_say(scatter: float) -> None:
    rng = np.random.default_rng(2)
    inside = []
    for _ in range(60):
        law = fit_predictor(*arms(rng, 20, scatter), np.full(20, NOISE))
        x, fall = arms(rng, 40, scatter)
        predicted = with_interval(law.predict(x, np.zeros(40)), NOISE)
        inside += list((predicted["low"] <= fall) & (fall <= predicted["high"]))
    assert 0.92 < np.mean(inside) < 0.98


def test_an_uncertain_predictor_widens_the_interval() -> None:
    law = fit_predictor(*arms(np.random.default_rng(3), 20, 0.0), np.full(20, NOISE))
    known, unknown = (law.predict(np.array([0.2]), np.array([error])) for error in (0.0, 0.05))
    assert unknown["deviation"].iloc[0] > 3 * known["deviation"].iloc[0]


def test_a_rise_that_is_negative_by_chance_predicts_no_fall() -> None:
    law = fit_predictor(*arms(np.random.default_rng(4), 20, 0.0), np.full(20, NOISE))
    predicted = with_interval(law.predict(np.array([-0.001]), np.array([0.001])), NOISE).iloc[0]
    assert predicted["fall"] == pytest.approx(0)
    assert predicted["low"] < 0 < predicted["high"]


def predictions() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "arm": ["a", "b", "c"],
            "loss_rate": [0.1, 0.2, 0.1],
            "predictor": "law",
            "kind": ["reduce phase", "reduce phase", "both phases"],
            "fall": [0.02, 0.04, 0.1],
            "deviation": 0.0,
            "freedom": 1000,
            "seed_deviation": 0.01,
        }
    )


def test_predictions_meet_the_falls_of_their_own_arms_and_seeds() -> None:
    runs = pd.DataFrame(
        [
            {"task": "t", "model_name": "m", "max_steps": 1, "learning_rate": 1.0, "seed": seed}
            | {"arm": arm, "loss_rate": rate, "accuracy_lossy": 0.7 + 0.1 * seed - fall}
            for seed in range(4)
            for arm, rate, fall in (("no loss", 0.0, 0.0), ("a", 0.1, 0.03), ("b", 0.2, 0.01 * seed))
        ]
    )
    found = with_measured(predictions(), runs)
    assert found["arm"].to_list() == ["a", "b"]
    assert found["measured"].to_numpy() == pytest.approx([0.03, 0.015])
    assert (found["high"] - found["fall"]).to_numpy() == pytest.approx(1.962 * 0.01 / 2, rel=1e-3)


def test_scores_count_what_intervals_hold_by_class() -> None:
    measured = predictions().assign(measured=[0.025, 0.06, 0.1], seeds=4)
    scores = score(with_interval(measured, 0.005)).set_index("kind")
    assert scores["arms"].to_dict() == {"reduce phase": 2, "both phases": 1, "all": 3}
    assert scores["covered"].to_dict() == {"reduce phase": 1, "both phases": 1, "all": 2}
    assert scores.loc["reduce phase", "bias"] == pytest.approx(0.0125)
    assert scores.loc["reduce phase", "error"] == pytest.approx(np.sqrt((0.005**2 + 0.02**2) / 2))
    assert scores.loc["all", "noise"] == pytest.approx(0.005)


def test_predictors_are_compared_on_the_networks_that_both_predict() -> None:
    rows = [("a", "law", 0.02), ("a", "rise", 0.04), ("b", "law", 0.03), ("b", "rise", 0.03), ("c", "rise", 0.9)]
    table = pd.DataFrame(rows, columns=["arm", "predictor", "fall"]).assign(loss_rate=0.1, measured=0.02)
    errors = shared_errors(table)
    assert errors == pytest.approx({"law": 0.01 / 2**0.5, "rise": (0.0005 / 2) ** 0.5})


def finished_and_new_arms() -> tuple[pd.DataFrame, pd.DataFrame]:
    x, fall = arms(np.random.default_rng(5), 20, 0.0)
    known = pd.DataFrame({"kind": "reduce phase", "squared_error": x, "rise": x, "rise_error": 0.0, "fall": fall})
    return known.assign(standard_error=NOISE), known[:1].drop(columns="fall")


def test_arms_without_a_standard_error_fit_nothing() -> None:
    known, new = finished_and_new_arms()
    tied = known[:2].assign(fall=0.9, standard_error=[0.0, np.nan])
    pd.testing.assert_frame_equal(predict_arms(pd.concat([known, tied]), new), predict_arms(known, new))


def test_committed_predictions_are_kept_if_they_are_of_the_same_arms(tmp_path: Path) -> None:
    """A second run of the notebook would use arms that finished since, and would predict what is known by then."""
    new = pd.DataFrame({"arm": ["ring", "tree"], "loss_rate": [0.1, 0.1]})
    file = tmp_path / "predictions.csv"
    assert committed(file, new) is None
    predicted = pd.concat([new, new]).assign(fall=[0.1, 0.2, 0.3, 0.4])
    predicted.to_csv(file, index=False)
    pd.testing.assert_frame_equal(committed(file, new), predicted.reset_index(drop=True))
    with pytest.raises(ValueError, match=r"predictions.csv and the grid differ in 'tree' at 0.1: give another"):
        committed(file, new[:1])


# The rise of a pretrained model's cross-entropy over a run's network

BATCH, LENGTH = 4, 16
RUN = TrainConfig(model_name="gpt2-nano", loss_rate=0.3, tensor_parallel_size=4, batch_size=BATCH, max_length=LENGTH)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> InferenceProbe:
    text = tmp_path_factory.mktemp("text") / "river.txt"
    text.write_text("The river flows through the old town and into the sea near the harbour. " * 40, encoding="utf-8")
    return InferenceProbe("gpt2-nano", batch_size=BATCH, length=LENGTH, batches=1, text=str(text))


def test_without_losses_nothing_rises(probe: InferenceProbe) -> None:
    assert probe.rise(RUN.replace(loss_rate=0.0), draws=2).value == pytest.approx(0.0, abs=1e-5)


def test_losses_raise_the_cross_entropy_and_more_of_them_raise_it_more(probe: InferenceProbe) -> None:
    few, many = (probe.rise(RUN.replace(loss_rate=rate), draws=4) for rate in (0.02, 0.4))
    assert few.value < many.low
    assert many.low > 0.05


def test_draws_differ_from_each_other_and_not_from_run_to_run(probe: InferenceProbe) -> None:
    first, again = probe.rise(RUN, draws=3), probe.rise(RUN, draws=3)
    assert first == again
    assert first.high > first.low


def test_both_phases_cost_more_than_one(probe: InferenceProbe) -> None:
    one, both = (probe.rise(RUN.replace(reliable_gather=reliable), draws=4) for reliable in (True, False))
    assert both.value > one.value


def test_no_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="batches = 0"):
        InferenceProbe("gpt2-nano", batch_size=BATCH, length=LENGTH, batches=0, text="stdlib")
