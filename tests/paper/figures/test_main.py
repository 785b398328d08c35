import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from lossytp.study.statistics import t_interval
from lossytp.study.style import MARKERS
from lossytp.study.tables import with_lossless
from paper.law import PowerLaw, collapse
from paper.packet_size import cost_against_bytes
from paper.tolerance import fall_against_loss
from paper.training_length import delayed_or_lost

mpl.use("Agg")
FALLS = {"fall": 0.02, "low": 0.01, "high": 0.03}


def marks(ax):
    """Return the x and y of each drawn series of marks."""
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines if line.get_marker() in [*MARKERS]]


@pytest.fixture
def runs():
    rows = [
        (arm, rate, seed, 0.7 + seed / 100 - rate * (1 + seed / 10))
        for arm, rates in (("no loss", [0.0]), ("reduce phase", [0.1, 0.2]))
        for rate in rates
        for seed in range(3)
    ]
    table = pd.DataFrame(rows, columns=["arm", "loss_rate", "seed", "accuracy_lossy"])
    return with_lossless(pd.concat([table.assign(task=task) for task in ("docstrings", "sst2_held_out")]))


def test_falls_are_paired_by_seed_and_lines_are_named(runs):
    figure = fall_against_loss(runs)
    assert [ax.get_title() for ax in figure.axes] == ["docstrings", "SST-2"]
    for ax in figure.axes:
        ((rates, falls),) = marks(ax)
        assert rates == [0.0, 0.1, 0.2]
        assert falls == pytest.approx([0, 11, 22])
        low = ax.collections[0].get_paths()[0].vertices[:, 1].min()
        assert low == pytest.approx(100 * t_interval(0.1 * np.array([1, 1.1, 1.2])).low)
    assert "reduce phase" in [text.get_text() for text in figure.axes[-1].texts]


def test_the_collapse_draws_every_arm_and_the_law():
    rows = [
        {"task": "docstrings", "squared_error": 0.1, "ranks": 4, "algorithm": "direct", "repair": "zero"},
        {"task": "docstrings", "squared_error": 0.2, "ranks": 8, "algorithm": "direct", "repair": "zero"},
        {"task": "docstrings", "squared_error": 0.3, "ranks": 4, "algorithm": "ring", "repair": "zero"},
        {"task": "docstrings", "squared_error": 0.4, "ranks": 4, "algorithm": "direct", "repair": "fec(10, 8)"},
        {"task": "docstrings", "squared_error": 0.5, "ranks": 4, "algorithm": "direct", "repair": "zero"},
    ]
    arms = pd.DataFrame([row | FALLS | {"both_phases": number == 4} for number, row in enumerate(rows)])
    law = PowerLaw(0.5, 1.0, 4, 0.99, 1.0)
    ax = collapse(arms, {"docstrings": law}).axes[0]
    assert sorted(x for xs, _ in marks(ax) for x in xs) == [0.1, 0.2, 0.3, 0.4, 0.5]
    curve = next(line for line in ax.lines if line.get_marker() == "None")
    assert curve.get_xdata()[-1] == pytest.approx(0.4), "the law is fitted to the reduce phase"
    assert curve.get_ydata()[-1] == pytest.approx(20)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert set(labels) == {
        "direct, 4 ranks",
        "2 or 8 ranks",
        "ring, tree, switch",
        "FEC, retransmission",
        "both phases",
    }


def test_the_cost_is_drawn_against_bytes():
    rows = [{"task": "docstrings", "loss_rate": 0.2, "bytes": size, **FALLS} for size in (4, 1500)]
    ax = cost_against_bytes(pd.DataFrame(rows)).axes[0]
    assert marks(ax) == [([4, 1500], [2.0, 2.0])]
    assert ax.get_xscale() == "log"


def test_lengths_are_drawn_by_network():
    rows = [{"task": "docstrings", "network": "10 %", "max_steps": steps, **FALLS} for steps in (200, 600)]
    figure = delayed_or_lost(pd.DataFrame(rows))
    assert marks(figure.axes[0]) == [([200, 600], [2.0, 2.0])]
    assert [text.get_text() for text in figure.axes[-1].get_legend().get_texts()] == ["10 %"]


def test_dotted_lines_mark_the_budgets_within_the_tried_rates():
    rates = [0.0, 0.01, 0.1]
    table = pd.DataFrame(
        [
            {"task": "docstrings", "arm": arm, "loss_rate": rate, "seed": seed, "accuracy_lossy": 0.7 - drop * rate}
            for arm, drop in (("weak", 0.2), ("strong", 0.05))
            for rate in rates
            for seed in range(3)
        ]
    )
    figure = fall_against_loss(table)
    labels = [text.get_text().strip() for text in figure.axes[0].texts]
    assert "5 %" in labels  # 0.2 per unit of loss rate: one point at 5 %
    assert len([label for label in labels if label.endswith("%")]) == 1  # the strong one never falls by a point
