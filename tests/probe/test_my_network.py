"""The notebook that says what a measured network costs."""

from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest

from lossytp.study.run import execute
from tests.probe.traces import trace_file

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "61_my_network.ipynb"
FIGURES = ["net-4", "net-7", "net-10", "net-17"]


def run_notebook(tmp_path, *flows):
    """Run the notebook over a trace of these flows with a few small cells; return its cells by name."""
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times, it was the age of wisdom. " * 40)
    values = {"trace": str(trace_file(tmp_path, *flows)), "text": str(text), "block_size": 32}
    values |= {"blocks": 2, "algorithms": "direct", "repairs": "rescale", "seeds": [0, 1]}
    values |= {"cell": {"max_steps": 2, "max_length": 16, "max_samples": 200, "eval_samples": 40}}
    execute(NOTEBOOK, tmp_path / "out.ipynb", values | {"output_dir": str(tmp_path / "out")})
    return {cell["id"]: cell for cell in nbformat.read(tmp_path / "out.ipynb", as_version=4).cells}


def test_the_notebook_reports_and_compares_the_trace_with_its_fits(tmp_path):
    losses = np.random.default_rng(0).random(2000) < 0.2
    cells = run_notebook(tmp_path, losses, losses[:500])
    for name in FIGURES:
        assert any("image/png" in output.get("data", {}) for output in cells[name].outputs), name
    replays = pd.read_csv(tmp_path / "out" / "replays.csv")
    assert replays["arm"].tolist() == ["no loss", "recorded trace", "fitted Gilbert-Elliott", "Bernoulli of equal rate"]
    rate = np.concatenate([losses, losses[:500]]).mean()
    np.testing.assert_allclose(replays["loss_rate"], [0, rate, rate, rate], rtol=0.02)
    assert (replays["mean_low"] <= replays["mean_high"]).all()
    costs = pd.read_csv(tmp_path / "out" / "expected_costs.csv")
    assert set(costs["algorithm"]) == {"direct", "ring", "switch", "tree"}


def test_a_trace_without_losses_is_reported_and_trains_nothing(tmp_path):
    cells = run_notebook(tmp_path, np.zeros(2000, bool))
    assert "the trace's loss rate is 0: nothing is trained" in str(cells["net-15"].outputs)
    assert not (tmp_path / "out" / "cells").exists()
    costs = pd.read_csv(tmp_path / "out" / "expected_costs.csv")
    assert (costs["cost"] == 0).all()
    assert not costs["extrapolated"].any()
