import json
from pathlib import Path

import pandas as pd
import pytest

from lossytp.study.practice import as_markdown, practice

ROOT = Path(__file__).parents[2]


def compared(rows):
    columns = ["task", "arm", "loss_rate", "difference", "low", "high"]
    return pd.DataFrame(rows, columns=columns).assign(seeds=[3 + number for number in range(len(rows))])


def test_advice_is_as_sure_as_all_tasks_are():
    table = practice(
        compared(
            [
                ("a", "no loss", 0.0, None, None, None),
                ("a", "alone", 0.01, -0.001, -0.004, 0.002),
                ("a", "alone", 0.1, -0.02, -0.03, -0.011),
                ("b", "alone", 0.1, -0.015, -0.016, -0.009),
                ("a", "bursts", 0.1, -0.009, -0.011, -0.007),
                ("b", "bursts", 0.1, 0.002, -0.1, 0.1),
                ("a", "unsure", 0.1, -0.005, -0.006, -0.004),
                ("b", "unsure", 0.1, 0.0, -0.02, 0.02),  # may lose two points
                ("a", "one seed", 0.1, -0.005, None, None),
            ]
        )
    )
    assert [row["advice"] for row in table] == ["nothing", "repair", "undecided", "undecided", "undecided"]
    assert table[1]["falls"]["a"] == pytest.approx({"fall": 0.02, "low": 0.011, "high": 0.03})
    assert as_markdown(table).splitlines()[2:4] == [
        "| 1 % | alone | 4 | 0.1 (-0.2 to 0.4) | not run | nothing |",
        "| 10 % | alone | 5 | 2.0 (1.1 to 3.0) | 1.5 (0.9 to 1.6) | repair |",
    ]
    assert as_markdown(table).splitlines()[-1] == "| 10 % | one seed | 11 | 0.5 | not run | undecided |"


def test_the_readme_shows_what_the_committed_results_say():
    paper = json.loads((ROOT / "results" / "paper" / "paper.json").read_text())
    assert as_markdown(paper["practice"]) in (ROOT / "README.md").read_text()
