"""Figures that notebooks draw of other measurements than the committed ones, which a byte comparison holds."""

from itertools import count, product

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

import lossytp as ltp
from notebooks.collectives import (
    completion_tails,
    error_maps,
    errors_of_sums,
    lost_pieces,
    who_lacks_what,
)
from paper.reproduction import reproduced_on_published

mpl.use("Agg")


def numbered(names, columns):
    """Return a row for each combination of the names, with a different number in every cell."""
    number = count(1)
    rows = [dict(zip(names, row, strict=True)) for row in product(*names.values())]
    return pd.DataFrame([{**row, **{column: float(next(number)) for column in columns}} for row in rows])


def test_completion_tails_are_the_tables_times_in_microseconds():
    names = {"algorithm": ["ring", "switch"], "transport": ["best effort", "repeat"], "process": ["p", "q"]}
    times = numbered(names, ["p50_s", "p99_s", "p999_s"])
    for ax, name in product(completion_tails(times).axes, names["transport"]):
        rows = times[(times["process"] == ax.get_title()) & (times["transport"] == name)]
        [medians] = [line for line in ax.lines if line.get_label() == name]
        assert medians.get_ydata() == pytest.approx(1e6 * rows["p50_s"].to_numpy())
        [tails] = [lines for lines in ax.collections if lines.get_segments()[0][0, 0] == medians.get_xdata()[0]]
        assert np.array(tails.get_segments())[:, :, 1] == pytest.approx(1e6 * rows[["p50_s", "p99_s"]].to_numpy())


def test_errors_of_sums_marks_measured_errors_and_bars_expected_ones():
    names = {"algorithm": ["ring", "switch"], "repair": ["zero", "stale"], "coherence": [0.0, 0.5]}
    errors = numbered(names, ["measured", "expected", "standard_error"])
    for ax, coherence in zip(errors_of_sums(errors).axes, names["coherence"], strict=True):
        bars = [line for line in ax.lines if line.get_marker() == "|"]
        for marks, bar in zip(ax.containers, bars, strict=True):
            rows = errors[(errors["algorithm"] == marks.get_label()) & (errors["coherence"] == coherence)]
            line, _, [intervals] = marks.lines
            assert line.get_xdata().tolist() == rows["measured"].tolist()
            assert bar.get_xdata().tolist() == rows["expected"].tolist()
            ends = [np.ptp(segment[:, 0]) for segment in intervals.get_segments()]
            assert ends == pytest.approx(4 * rows["standard_error"].to_numpy()), "two standard errors to either side"


def test_lost_pieces_are_drawn_by_algorithm_and_phase():
    some = ltp.Bernoulli(loss_rate=0.2)
    lacks = {name: who_lacks_what(name, some, ranks=2, num_elements=3640, seed=0) for name in ("ring", "sender")}
    drawn = [ax.images[0].get_array() for ax in lost_pieces(lacks).axes]
    expected = [lacks[name][phase] for name in lacks for phase in ("reduce", "gather")]
    assert all(np.array_equal(image, pieces) for image, pieces in zip(drawn, expected, strict=True))


def test_error_maps_stand_under_their_algorithm_beside_their_repair():
    pairs = [("ring", "zero"), ("sender", "zero"), ("sender", "stale")]
    *axes, _ = error_maps({pair: np.full((4, 6), number) for number, pair in enumerate(pairs, 1)}).axes
    assert [[np.unique(image.get_array()).item() for image in ax.images] for ax in axes] == [[1], [2], [], [3]]


def test_reproduced_on_published_draws_each_run_beside_that_of_its_rate_and_seed():
    rows = [(rate, seed, 0.7 - rate / 10 + seed / 100) for rate in (0.0, 0.1, 0.3) for seed in range(3)]
    published = pd.DataFrame(rows, columns=["loss_rate", "seed", "accuracy_lossy"])
    here = published[(published["seed"] < 2) & (published["loss_rate"] != 0.1)]
    here = here.assign(accuracy_lossy=here["accuracy_lossy"] + 0.002)
    ax = reproduced_on_published(published, here).axes[0]
    lines = {line.get_label(): line for line in ax.lines}
    for seed in (0, 1):
        line, mine = lines[f"here, seed {seed}"], here[here["seed"] == seed]["accuracy_lossy"]
        assert list(line.get_ydata()) == list(mine)
        assert list(ax.lines[ax.lines.index(line) - 1].get_ydata()) == list(mine - 0.002)
