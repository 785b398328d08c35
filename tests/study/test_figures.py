import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from lossytp.study.figures import accuracy_against_loss, burst_distribution, save, set_style
from lossytp.study.records import tidy
from lossytp.study.statistics import t_interval
from lossytp.study.summary import with_arms

mpl.use("Agg")


def draw(study):
    set_style()
    return accuracy_against_loss(with_arms(tidy(study)), baseline={"bag of words": 0.9, "most frequent class": 0.3})


@pytest.fixture
def figure(study):
    return draw(study)


def test_the_curve_shows_means_and_intervals_over_seeds(figure, study):
    table = tidy(study)
    ax = figure.axes[0]
    line = next(line for line in ax.lines if line.get_label() == "Bernoulli")
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
    assert labels == {"Bernoulli", "Gilbert-Elliott, mean burst 8 packets", "bag of words", "most frequent class"}


def test_the_same_table_gives_the_same_files(tmp_path, study):
    first, second = (save(draw(study), tmp_path / name, "f") for name in "ab")
    assert first == second
    assert (tmp_path / "a" / "f.png").read_bytes() == (tmp_path / "b" / "f.png").read_bytes()
    assert save(draw(study[:-1]), tmp_path / "c", "f") != first


def test_burst_distribution_shows_shares():
    rows = {"process": "x", "burst_packets": [1, 2, 3], "measured": [0.5, 0.25, 0.0], "expected": [0.6, 0.3, 0.1]}
    lines = burst_distribution(pd.DataFrame(rows)).axes[0].lines
    assert [line.get_ydata().tolist() for line in lines] == [rows["expected"], rows["measured"]]
