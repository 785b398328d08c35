"""Test the notebook that measures the real model, with a small model in its place."""

from pathlib import Path

import pandas as pd
import pytest

from lossytp.study.run import execute
from paper.real_model import rises

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "17_real_model.ipynb"


def test_the_notebook_measures_every_network_and_predicts_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # JupyterLab starts it in notebooks/, and papermill anywhere
    values = {"model_name": "gpt2-nano", "text": "stdlib", "results_dir": str(tmp_path), "blocks": 2, "draws": 2}
    execute(NOTEBOOK, tmp_path / "out.ipynb", {**values, "error_blocks": 1, "error_draws": 1})
    folder = tmp_path / "real_model"
    table, errors, predicted = rises(folder), *(pd.read_csv(folder / f"{x}.csv") for x in ("sum_errors", "predicted"))
    committed = rises(NOTEBOOK.parents[1] / "results" / "paper" / "real_model")
    key = ["algorithm", "phase", "losses", "repair"]
    rows, wanted = (set(each[key].itertuples(index=False, name=None)) for each in (table, committed))
    assert rows == wanted, "it measures what the paper shows"
    assert len(errors) == ((table["losses"] == "single") & ~table["repair"].str.contains("stale")).sum()
    assert set(predicted["phase"]) == {"reduce", "both"}
