import matplotlib as mpl
import pandas as pd
import pytest

from paper.real_model import real_model_law, real_model_rises
from paper.real_training import real_model_after_training
from tests.paper.figures.test_main import marks

mpl.use("Agg")


def test_the_real_model_is_drawn_by_repair_and_rate():
    rows = [
        {"repair": repair, "loss_rate": rate, "rise": 1.0 + rate, "low": 0.9, "high": 1.2}
        | {"collapsed": 0.1, "collapsed_low": 0.05, "collapsed_high": 0.3}
        for repair in ("zero", "stale")
        for rate in (0.03, 0.1)
    ]
    rise, collapsed = real_model_rises(pd.DataFrame(rows)).axes
    assert [label.get_text() for label in rise.get_yticklabels()] == ["nothing", "stale"]
    assert [xs for xs, _ in marks(rise)] == [[1.03, 1.03], [1.1, 1.1]]
    assert [xs for xs, _ in marks(collapsed)] == [[10.0, 10.0], [10.0, 10.0]]
    for drawn in collapsed.containers:
        assert [sorted(bar[:, 0]) for bar in drawn.lines[2][0].get_segments()] == [pytest.approx([5, 30])] * 2
    (first, _), (second, _) = (ys for _, ys in marks(collapsed))
    assert second - first > 0.3, "marks of two rates do not hide each other"


def test_the_law_of_the_real_model_goes_through_the_fitted_networks():
    networks = pd.DataFrame(
        [
            {
                "algorithm": "direct",
                "phase": "reduce",
                "stream_error": 0.01,
                "median": 0.1,
                "median_by_stream_error": 0.1,
                "fitted": True,
            },
            {
                "algorithm": "direct",
                "phase": "reduce",
                "stream_error": 0.1,
                "median": 10.0,
                "median_by_stream_error": 10.0,
                "fitted": True,
            },
            {
                "algorithm": "ring",
                "phase": "both",
                "stream_error": 0.05,
                "median": 3.0,
                "median_by_stream_error": 2.5,
                "fitted": False,
            },
        ]
    )
    repaired = pd.DataFrame([{"repair": "rescale", "stream_error": 0.02, "median": 1.0}])
    (ax,) = real_model_law(networks, repaired).axes
    law, *_ = ax.lines
    assert list(law.get_ydata()) == [0.1, 2.5, 10.0]
    fills = [line.get_markerfacecolor() for line in ax.lines if line.get_marker() in ("o", "s")]
    assert [fill == "white" for fill in fills] == [False, True], "hollow marks were predicted"
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == [
        "ring, both phases",
        "repairs that do not spread",
    ]  # the fitted network is named where it has other loss rates


def test_each_task_has_a_panel_and_each_training_a_mark_at_each_repair():
    rows = [
        {"task": task, "trained_over": trained, "evaluated_with": repair}
        | {"fall": fall, "low": fall - 0.01, "high": fall + 0.01}
        for task, harder in (("sst2", 0.0), ("qnli", 0.02))
        for trained, fall in (("no loss", 0.06 + harder), ("zero", 0.07 + harder))
        for repair in ("zero", "hadamard(64)")
    ]
    figure = real_model_after_training(pd.DataFrame(rows))
    first, second = figure.axes
    assert [ax.get_title() for ax in figure.axes] == ["SST-2", "QNLI"]
    assert [label.get_text() for label in first.get_yticklabels()] == ["nothing", "hadamard(64)"]
    assert [xs for xs, _ in marks(first)] == [pytest.approx([6.0, 6.0]), pytest.approx([7.0, 7.0])]
    assert [xs for xs, _ in marks(second)] == [pytest.approx([8.0, 8.0]), pytest.approx([9.0, 9.0])]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["no loss", "losses, nothing"]
