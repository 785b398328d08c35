import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from lossytp.study.statistics import t_interval
from lossytp.study.style import set_style
from lossytp.study.tables import tidy
from paper.collectives import burst_distribution
from paper.robustness import accuracy_against_evaluated_loss
from paper.tolerance import accuracy_against_loss

mpl.use("Agg")


def draw(table):
    set_style()
    return accuracy_against_loss(table)


@pytest.fixture
def figure(study, curves):
    return draw(curves(study))


def test_the_curve_shows_means_and_intervals_over_seeds(figure, study):
    table = tidy(study)
    ax = figure.axes[0]
    line = next(line for line in ax.lines if line.get_label() == "alone")
    runs = table[(table["loss_type"] == "ber") & (table["loss_rate"] == 0.1)]["accuracy_lossy"].to_numpy()
    mean, low, high = t_interval(runs)
    assert line.get_xdata().tolist() == [0, 0.1, 0.2]
    assert line.get_ydata()[1] == pytest.approx(mean)
    edges = ax.collections[0].get_paths()[0].vertices
    assert sorted(set(np.round(edges[np.isclose(edges[:, 0], 0.1), 1], 9))) == pytest.approx([low, high])


def test_axes_are_labelled_and_the_legend_names_all(figure):
    assert all(ax.get_xlabel() for ax in figure.axes)
    assert figure.axes[0].get_ylabel() == "test accuracy"
    labels = {text.get_text() for text in figure.legends[0].texts}
    assert labels == {"alone", "bursts"}


def test_each_task_has_its_row(study, record, curves):
    other = [record(loss_rate=rate, seed=seed, accuracy=0.8, dataset="sst2") for rate in (0.0, 0.1) for seed in (0, 1)]
    figure = draw(curves([*study, *other]))
    assert len(figure.axes) == 4
    assert [ax.get_title() for ax in figure.axes[::2]] == [
        "docstrings, evaluated with losses",
        "SST-2, evaluated with losses",
    ]
    line = next(line for line in figure.axes[2].lines if line.get_label() == "alone")
    assert line.get_ydata().tolist() == [0.8, 0.8]
    assert not [line for line in figure.axes[2].lines if line.get_label() == "bursts"]


def test_each_rate_in_training_is_a_line_over_the_rates_in_evaluation():
    rows = [
        {"task": task, "trained_at": trained, "evaluated_at": rate, "seed": seed, "accuracy": 0.6 - rate + 0.1 * seed}
        for task in ("a", "b")
        for trained in (0.0, 0.3)
        for rate in (0.0, 0.01, 0.3)
        for seed in (0, 1)
    ]
    figure = accuracy_against_evaluated_loss(pd.DataFrame(rows))
    assert [ax.get_title() for ax in figure.axes] == ["a", "b"]
    assert [text.get_text() for text in figure.legends[0].texts] == ["no loss", "30 % loss"]
    for ax in figure.axes:
        assert [line.get_xdata().tolist() for line in ax.lines] == [[0, 0.01, 0.3]] * 2
        assert ax.lines[1].get_ydata() == pytest.approx([0.65, 0.64, 0.35])
        assert len(ax.collections) == 2  # the bands
        assert len({line.get_marker() for line in ax.lines}) == 2


def test_burst_distribution_shows_shares():
    rows = {"process": "x", "burst_packets": [1, 2, 3], "measured": [0.5, 0.25, 0.0], "expected": [0.6, 0.3, 0.1]}
    lines = burst_distribution(pd.DataFrame(rows)).axes[0].lines
    assert [line.get_ydata().tolist() for line in lines] == [rows["expected"], rows["measured"]]
