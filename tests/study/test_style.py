import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from lossytp.study.style import estimates, save, set_style
from paper.study import loss_rate_axis

mpl.use("Agg")


def test_save_writes_the_same_bytes_for_the_same_values(tmp_path):
    set_style()
    for name, values in {"a": [1, 2], "b": [1, 2], "c": [1, 3]}.items():
        figure, ax = plt.subplots()
        ax.plot(values, label="values")
        ax.legend()
        save(figure, tmp_path / name, "f")
    for file in ("f.png", "f.svg"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        assert (tmp_path / "a" / file).read_bytes() != (tmp_path / "c" / file).read_bytes()


def test_loss_rate_axis_leaves_out_names_that_would_overlap():
    figure, ax = plt.subplots()
    loss_rate_axis(ax, pd.Series([0.0, 0.01, 0.03, 0.05, 0.2, 0.3]))
    figure.canvas.draw()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "", "5", "", "30"]
    plt.close(figure)


@pytest.mark.parametrize(("across", "sign"), [(False, 1), (True, -1)])
def test_estimates_reach_the_ends_of_intervals_in_any_order_and_leave_out_infinite_ones(across, sign):
    figure, ax = plt.subplots()
    values = sign * np.array([[2.0, 1.5, 4.0], [3.0, 2.0, 3.5], [1.0, -np.inf, np.inf]])
    estimates(ax, [10, 20, 30], values, 1, across=across)
    line, _, (bars,) = ax.containers[0].lines
    along = 0 if across else 1
    assert line.get_xydata()[:, along].tolist() == values[:, 0].tolist()
    assert line.get_xydata()[:, 1 - along].tolist() == [10, 20, 30]
    ends = [segment[:, along].tolist() for segment in bars.get_segments() if len(segment)]
    assert ends == np.sort(values[:2, 1:]).tolist()
    figure.canvas.draw()
    assert np.isfinite(ax.get_ylim()).all()
    plt.close(figure)
