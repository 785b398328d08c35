"""Check what figures of made-up comparisons draw, and where."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from paper.comparisons import drops_and_gains
from paper.repairs import drops_against, drops_by_arm, replica_divergence

mpl.use("Agg")


def test_falls_are_the_contrasts_in_points_filled_where_they_are_sure(study, curves):
    table = curves(study)
    table = table[table["loss_rate"].isin([0.0, 0.2])]
    table = table.assign(arm=table["arm"].where(table["loss_rate"] > 0, "no loss")).drop_duplicates(["arm", "seed"])
    noisy = table["accuracy_lossy"] + 0.001 * table["seed"] ** 2 * (table["arm"] == "bursts")
    noisy += 0.2 * table["seed"] ** 2 * (table["arm"] == "alone")
    entropy = 1 + 0.1 * (table["arm"] == "alone") + 0.01 * table["seed"]
    table = table.assign(accuracy_lossy=noisy, cross_entropy_lossy=entropy + 0.001 * noisy)
    figure = drops_by_arm(drops_and_gains(table, reference=None))
    ax, beside = figure.axes
    (dots,) = [each for each in ax.collections if len(each.get_offsets()) == 2 and each.get_facecolors().size]
    falls = dict(zip([text.get_text() for text in ax.get_yticklabels()], dots.get_offsets()[:, 0], strict=True))
    assert falls == pytest.approx({"alone": 4 - 20 * 5 / 3, "bursts": 8 - 0.1 * 5 / 3})
    assert dots.get_facecolors()[:, :3].tolist() == [[1, 1, 1], list(mpl.colors.to_rgb("C0"))]
    (dots,) = [each for each in beside.collections if len(each.get_offsets()) == 2 and each.get_facecolors().size]
    assert dots.get_offsets()[:, 0].tolist() == pytest.approx([0.1, 0.0], abs=0.01), "nats"


def compared(falls, task="t"):
    """Return a comparison of arms with given drops in points and intervals of one point to either side."""
    rows = [{"arm": "none", "loss_rate": 0.0, "difference": np.nan, "low": np.nan, "high": np.nan, "p_holm": np.nan}]
    for arm, rate, fall, cost in falls:
        ends = {"low": (-fall - 1) / 100, "high": (-fall + 1) / 100}
        ends |= {"rise": fall, "rise_low": fall - 1, "rise_high": fall + 1, "rise_p_holm": 0.5}
        rows.append({"arm": arm, "loss_rate": rate, "difference": -fall / 100, "p_holm": 0.5, "cost": cost, **ends})
    return pd.DataFrame(rows).assign(task=task, model_name="m", max_steps=1, learning_rate=1.0)


def test_cross_entropy_stands_beside_with_an_interval_and_a_test_of_its_own():
    table = compared([("a", 0.2, 1.0, 0), ("b", 0.2, 2.0, 0)])
    table.loc[table["arm"] == "b", ["rise_low", "rise_high", "rise_p_holm"]] = [1.5, 4.0, 0.01]
    _, beside = drops_by_arm(table).axes
    segments = beside.containers[0][2][0].get_segments()
    assert [segment[:, 0].tolist() for segment in segments] == [pytest.approx([0.0, 2.0]), pytest.approx([1.5, 4.0])]
    (dots,) = [each for each in beside.collections if len(each.get_offsets()) == 2 and each.get_facecolors().size]
    assert dots.get_facecolors()[:, :3].tolist() == [[1, 1, 1], list(mpl.colors.to_rgb("C0"))]


def test_loss_rates_are_written_in_percent():
    ax = drops_against(compared([("a", 0.01, 1.0, 0), ("a", 0.2, 2.0, 0)]), {"loss_rate": "x"}).axes[0]
    ax.figure.draw_without_rendering()
    assert [text.get_text() for text in ax.get_xticklabels()] == ["1 %", "20 %"]


def test_arms_of_one_loss_rate_stand_side_by_side_around_it():
    arms = [(arm, rate, 1.0, 0) for arm in "ab" for rate in (0.01, 0.2)]
    drawn = drops_against(compared(arms), {"loss_rate": "x"}).axes[0].containers
    rates = [each.lines[0].get_xdata() for each in drawn]
    assert (rates[0] < rates[1]).all()
    assert rates[0] * rates[1] == pytest.approx([0.01**2, 0.2**2])


def test_measured_values_are_drawn_in_place():
    arms = [(arm, rate, 1.0, 100 * rate) for arm in "ab" for rate in (0.01, 0.2)]
    containers = drops_against(compared(arms), {"loss_rate": "x", "cost": "y"}).axes[1].containers
    assert len(containers) == 2
    for drawn in containers:
        assert drawn.lines[0].get_xdata().tolist() == [1.0, 20.0]


def test_an_arm_of_several_rates_has_a_row_for_each():
    figure = drops_by_arm(compared([("a", 0.1, 1.0, 0), ("a", 0.2, 2.0, 0), ("b", 0.2, 3.0, 0)]))
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels == ["a, 10 %", "a, 20 %", "b"]


def test_falls_stand_over_their_costs_and_the_front_leaves_out_what_is_worse_in_both():
    falls = [("free", 0.2, 4.0, 0.0), ("worse", 0.2, 5.0, 0.1), ("dear", 0.2, 1.0, 0.5)]
    both = pd.concat([compared(falls), compared(falls, task="u")])
    figure = drops_against(both, {"cost": "what it costs"}, front=True)
    assert len(figure.axes) == 2
    assert figure.axes[-1].get_xlabel() == "what it costs"
    assert [text.get_text() for text in figure.legends[0].texts] == ["free", "worse", "dear"]
    front = max(figure.axes[0].lines, key=lambda line: len(line.get_xdata()))
    assert front.get_xydata().tolist() == [[0.0, 4.0], [0.5, 1.0]]
    interval = drops_against(compared(falls), {"cost": "x"}).axes[0].containers[0][2][0].get_segments()[0]
    assert interval.ravel() == pytest.approx([0.0, 3.0, 0.0, 5.0])


def test_an_arm_whose_cost_is_not_known_is_not_drawn():
    figure = drops_against(compared([("known", 0.2, 4.0, 0.1), ("unknown", 0.2, 5.0, np.nan)]), {"cost": "x"})
    assert [text.get_text() for text in figure.legends[0].texts] == ["known"]


def test_divergence_is_the_mean_over_seeds_by_layer_at_the_end_and_by_step():
    where = {"task": "t", "arm": "a"}
    streams = [
        {**where, "seed": seed, "step": step, "layer": layer, "distance": seed + layer + step}
        for seed in (0, 1)
        for step in (10, 20)
        for layer in (1, 2)
    ]
    copies = [{**where, "seed": seed, "step": step, "spread": seed + step} for seed in (0, 1) for step in (10, 20)]
    figure = replica_divergence(pd.DataFrame(streams), pd.DataFrame(copies))
    assert figure.axes[0].lines[0].get_ydata().tolist() == [21.5, 22.5]
    assert figure.axes[1].lines[0].get_xydata().tolist() == [[10, 10.5], [20, 20.5]]
