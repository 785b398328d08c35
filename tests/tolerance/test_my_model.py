"""Test the notebook that measures a model of your own and draws where losses damage it."""

from pathlib import Path

import nbformat
import pandas as pd
import pytest

from lossytp.study.run import execute

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "60_my_model.ipynb"
FIGURES = ["my-5", "my-7", "my-9", "my-11"]


def test_the_notebook_draws_tolerance_and_damage(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times, it was the age of wisdom. " * 40)
    values = {"text": str(text), "block_size": 32, "blocks": 2, "loss_rates": "0.1", "repairs": "rescale"}
    values |= {"layers": [0, 3], "draws": 2, "output_dir": str(tmp_path / "out")}
    execute(NOTEBOOK, tmp_path / "out.ipynb", values)
    cells = {cell["id"]: cell for cell in nbformat.read(tmp_path / "out.ipynb", as_version=4).cells}
    for name in FIGURES:
        assert any("image/png" in output.get("data", {}) for output in cells[name].outputs), name
    tables = {path.stem: pd.read_csv(path) for path in (tmp_path / "out").glob("[dp]*.csv")}
    assert tables["damage_by_site"]["layer"].tolist() == [0, 0, 3, 3]
    assert tables["damage_by_position"]["last"].tolist() == [1, 3, 7, 15, 31]
    assert len(tables["packet_norms"]) == 4
    assert "no critical packet" in str(cells["my-13"].outputs)
    assert (tmp_path / "out" / "tolerance.json").is_file()
