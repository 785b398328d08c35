"""Sections of the paper about what predicts the cost, from made-up runs."""

from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pytest

from lossytp.study.tables import tidy
from lossytp.training.config import TrainConfig
from paper.comparisons import drops_and_gains
from paper.law import law
from paper.study import HEADLINE

mpl.use("Agg")
RATES = (0.0, 0.05, 0.1, 0.2, 0.3)


@pytest.fixture
def study(record):
    """Return a function that makes a study of a headline, given its loss rates, seeds and noise of accuracies."""

    def make(rates, seeds, noise=0.001):
        rng = np.random.default_rng(0)
        records = [
            record(loss_rate=rate, seed=seed, accuracy=0.7 - rate / 5 + rng.normal(0, noise), loss_type="ber")
            for rate in rates
            for seed in range(seeds)
        ]
        table = tidy(records)
        table.insert(0, "arm", ["single losses" if rate else "no loss" for rate in table["loss_rate"]])
        configs = [TrainConfig.from_dict(each["config"]) for each in records[::seeds]]
        return SimpleNamespace(
            records={HEADLINE: records},
            comparisons={HEADLINE: drops_and_gains(table, reference=None)},
            configs=lambda name: configs,
            baselines={"docstrings": {"coherence": {"4": 0.0}}},
            draw=lambda figure, name: None,
        )

    return make


def test_the_law_is_fitted_to_arms_with_standard_errors(study):
    found = law(study(RATES, seeds=3))
    assert len(found["law_arms"]) == 4
    assert found["law"]["docstrings"]["scale"] == pytest.approx(0.2 / 0.75, rel=0.2)


@pytest.mark.parametrize(("rates", "seeds", "noise"), [(RATES, 1, 0.001), (RATES, 3, 0.0), (RATES[:3], 3, 0.001)])
def test_there_is_no_law_without_enough_arms_with_standard_errors(study, rates, seeds, noise):
    assert law(study(rates, seeds, noise)) == {}
