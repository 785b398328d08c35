import matplotlib as mpl
import pandas as pd
import pytest

from lossytp.study.figures.sizes import cost_against_size

mpl.use("Agg")


def test_both_costs_are_drawn_against_parameters():
    ends = {"low": 0.01, "high": 0.09}
    rises = [
        {"parameters": count, "loss_rate": rate, "rise": rate * count / 1e7, **ends}
        for rate in (0.1, 0.3)
        for count in (4_000_000, 1_000_000)
    ]
    falls = [{"parameters": count, "loss_rate": 0.3, "fall": 0.05, **ends} for count in (1_000_000, 4_000_000)]
    left, right = cost_against_size(pd.DataFrame(rises), pd.DataFrame(falls)).axes
    drawn = [(list(each.lines[0].get_xdata()), list(each.lines[0].get_ydata())) for each in left.containers]
    assert drawn == [([1e6, 4e6], pytest.approx([0.01, 0.04])), ([1e6, 4e6], pytest.approx([0.03, 0.12]))]
    ((line, *_),) = right.containers
    assert list(line.get_ydata()) == pytest.approx([5, 5]), "points"
    assert line.get_color() == left.containers[1].lines[0].get_color(), "a loss rate has one colour"
    assert [text.get_text() for text in left.texts] == ["10 %", "30 %"]
    assert [text.get_text() for text in right.get_xticklabels()] == ["1", "4"]
