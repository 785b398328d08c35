"""The figure of predicted and measured falls."""

import numpy as np
import pandas as pd

from lossytp.study.figures.predictions import predicted_and_measured


def test_each_arm_stands_where_it_was_predicted_and_measured() -> None:
    table = pd.DataFrame(
        {
            "predictor": ["law", "law", "probe"],
            "kind": ["one phase", "one phase", "both phases"],
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
