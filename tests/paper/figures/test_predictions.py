"""The figure of predicted and measured falls."""

import numpy as np
import pandas as pd

from paper.law import PowerLaw, falls_of_small_packets
from paper.predictions import predicted_and_measured


def test_each_arm_stands_where_it_was_predicted_and_measured() -> None:
    table = pd.DataFrame(
        {
            "predictor": ["law", "law", "probe"],
            "kind": ["reduce phase", "reduce phase", "both phases"],
            "fall": [0.02, 0.04, 0.03],
            "low": [0.0, 0.03, 0.01],
            "high": [0.04, 0.05, 0.05],
            "measured": [0.03, 0.08, 0.02],
        }
    )
    law, probe = predicted_and_measured(table).axes
    assert (law.get_title(), probe.get_title()) == ("law", "probe")
    inside, outside = (marks for marks in law.collections[:2])
    np.testing.assert_allclose(inside.get_offsets(), [[2.0, 3.0]])
    np.testing.assert_allclose(outside.get_offsets(), [[4.0, 8.0]])
    assert outside.get_facecolor().tolist() == [[1.0, 1.0, 1.0, 1.0]]  # hollow: outside of its interval
    assert inside.get_facecolor().tolist() != [[1.0, 1.0, 1.0, 1.0]]


def test_small_packets_stand_beside_a_law_of_another_scale() -> None:
    rows = {"squared_error": [0.1, 0.2], "fall": [0.02, 0.05], "low": [0.01, 0.04], "high": [0.03, 0.06]}
    arms = pd.DataFrame(rows | {"repair": "zero", "predicted": [0.02, 0.04], "known": [True, False]})
    (ax,) = falls_of_small_packets(arms, PowerLaw(0.5, 1.0, 4, 0.99, 1.0)).axes
    usual, small = (line for line in ax.lines if len(line.get_xdata()) > 2)
    assert usual.get_ydata()[-1] == 10.0
    np.testing.assert_allclose(small.get_ydata()[-1], 4.0)
    assert {label for label in ax.get_legend_handles_labels()[1] if "packets" not in label} == {"fixes the scale"}
