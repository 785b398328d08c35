"""The figure of a tolerance measurement."""

import pytest

from lossytp.study.statistics import Estimate
from lossytp.tolerance.config import Setup
from lossytp.tolerance.measure import Row, draw


def row(algorithm, repair, rate, rise):
    return Row(Setup(algorithm, "reduce", repair, rate), Estimate(rise, rise - 0.1, rise + 0.2), 0.0, 100.0, [])


def test_several_rates_are_curves(tmp_path):
    rows = [row("direct", repair, rate, rate * 10) for repair in ("zero", "stale") for rate in (0.01, 0.1)]
    (ax,) = draw(rows, "a model", tmp_path).axes
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["zero", "stale"]
    assert ax.get_title() == "a model"
    assert (tmp_path / "tolerance.png").is_file()
    assert (tmp_path / "tolerance.svg").is_file()


def test_one_rate_is_a_line_for_each_repair(tmp_path):
    rows = [row("direct", "zero", 0.0657, 0.5), row("ring", "zero", 0.0657, 0.9)]
    (ax,) = draw(rows, "a model", tmp_path).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["direct, reduce, zero", "ring, reduce, zero"]
    assert ax.lines[0].get_xdata() == pytest.approx([0.5, 0.9])
    assert ax.figure.get_suptitle() == "a model, packet loss rate 0.0657"


def test_nothing_is_cut_off_beside_a_long_repair(tmp_path):
    figure = draw(
        [row("direct", "protect(0.01) + hadamard(64)", 0.0657, 0.5), row("ring", "zero", 0.0657, 1)], "", tmp_path
    )
    label = figure.axes[0].xaxis.label.get_window_extent()
    assert label.x0 >= 0
    assert label.x1 <= figure.bbox.x1
