"""Check what figures of made-up measurements draw, and where."""

from itertools import count, product

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

import lossytp as ltp
from paper.collectives import completion_tails, error_maps, errors_of_sums, lost_pieces, who_lacks_what

SOME = ltp.Bernoulli(loss_rate=0.2)


def numbered(names: dict[str, list], columns: list[str]) -> pd.DataFrame:
    """Return a row for each combination of the names, with a different number in every cell."""
    number = count(1)
    rows = [dict(zip(names, row, strict=True)) for row in product(*names.values())]
    return pd.DataFrame([{**row, **{column: float(next(number)) for column in columns}} for row in rows])


def at_ticks(positions: np.ndarray, ticks: list[Text]) -> list[str]:
    """Return the labels of the ticks nearest to the marks."""
    return [ticks[round(position)].get_text() for position in positions]


def test_tails_are_the_tables_times_in_microseconds() -> None:
    names = {"algorithm": ["ring", "switch", "tree"], "transport": ["best effort", "repeat"], "process": ["p", "q"]}
    times = numbered(names, ["p50_s", "p99_s", "p999_s"])
    axes = completion_tails(times).axes
    assert [ax.get_title() for ax in axes] == ["p", "q"]
    for ax, name in product(axes, names["transport"]):
        rows = times[(times["process"] == ax.get_title()) & (times["transport"] == name)]
        [medians] = [line for line in ax.lines if line.get_label() == name]
        assert medians.get_ydata() == pytest.approx(1e6 * rows["p50_s"].to_numpy())
        assert at_ticks(medians.get_xdata(), ax.get_xticklabels()) == rows["algorithm"].tolist()
        [crosses] = [line for line in ax.lines if line.get_color() == medians.get_color() and line is not medians]
        assert crosses.get_xydata() == pytest.approx(np.column_stack([medians.get_xdata(), 1e6 * rows["p999_s"]]))
        [tails] = [lines for lines in ax.collections if lines.get_segments()[0][0, 0] == medians.get_xdata()[0]]
        ends = 1e6 * rows[["p50_s", "p99_s"]].to_numpy()
        assert np.array(tails.get_segments())[:, :, 1] == pytest.approx(ends)


def test_marks_are_measured_errors_and_bars_expected_ones() -> None:
    names = {"algorithm": ["ring", "switch"], "repair": ["zero", "stale", "local"], "coherence": [0.0, 0.5]}
    errors = numbered(names, ["measured", "expected", "standard_error"])
    axes = errors_of_sums(errors).axes
    for ax, coherence in zip(axes, names["coherence"], strict=True):
        assert ax.get_title().endswith(f" {coherence:g}")
        assert [marks.get_label() for marks in ax.containers] == names["algorithm"]
        bars = [line for line in ax.lines if line.get_marker() == "|"]
        for marks, bar in zip(ax.containers, bars, strict=True):
            rows = errors[(errors["algorithm"] == marks.get_label()) & (errors["coherence"] == coherence)]
            line, _, [intervals] = marks.lines
            assert line.get_xdata().tolist() == rows["measured"].tolist()
            assert at_ticks(line.get_ydata(), axes[0].get_yticklabels()) == rows["repair"].tolist()
            assert bar.get_xdata().tolist() == rows["expected"].tolist()
            assert bar.get_ydata().tolist() == line.get_ydata().tolist()
            ends = [np.ptp(segment[:, 0]) for segment in intervals.get_segments()]
            assert ends == pytest.approx(4 * rows["standard_error"].to_numpy()), "two standard errors to either side"


def test_pieces_lost_are_drawn_by_algorithm_and_phase() -> None:
    lacks = {name: who_lacks_what(name, SOME, ranks=2, num_elements=3640, seed=0) for name in ("ring", "sender")}
    axes = lost_pieces(lacks).axes
    assert [ax.get_title().split(",")[0] for ax in axes] == ["contributions", "the sum", "", ""]
    assert [ax.get_ylabel() for ax in axes[::2]] == ["ring\nrank", "sender\nrank"]
    drawn = [ax.images[0].get_array() for ax in axes]
    expected = [lacks[name][phase] for name in lacks for phase in ("reduce", "gather")]
    assert len({pieces.tobytes() for pieces in expected}) == 4
    assert all(np.array_equal(image, pieces) for image, pieces in zip(drawn, expected, strict=True))


def test_maps_of_errors_stand_under_their_algorithm_beside_their_repair() -> None:
    pairs = [("ring", "zero"), ("sender", "zero"), ("sender", "stale")]
    maps = {pair: np.full((4, 6), number) for number, pair in enumerate(pairs, 1)}
    *axes, bar = error_maps(maps).axes
    assert [ax.get_title() for ax in axes] == ["ring", "sender", "", ""]
    assert [ax.get_ylabel() for ax in axes] == ["zero", "", "stale", ""]
    assert axes[2].texts[0].get_text() == "cannot be"
    drawn = [image for ax in axes for image in ax.images]
    assert [np.unique(image.get_array()).tolist() for image in drawn] == [[1], [2], [3]]
    assert {image.get_clim() for image in drawn} == {(0, 3)}, "one scale"
    assert bar.get_ylabel() == "error"
