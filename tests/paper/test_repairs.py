from pathlib import Path

import pandas as pd
import pytest

from paper.repairs import advise, helpful_repairs, with_retests

ROOT = Path(__file__).parents[2]


def compared(rows):
    columns = ["task", "arm", "loss_rate", "difference", "low", "high"]
    table = pd.DataFrame(rows, columns=columns).assign(seeds=[3 + number for number in range(len(rows))])
    return table.assign(gain=None, gain_p_holm=None, extra_packet_share=0.0)


def test_advice_is_as_sure_as_all_tasks_are():
    table = advise(
        {
            "01_tolerance": compared(
                [
                    ("a", "no loss", 0.0, None, None, None),
                    ("a", "single losses", 0.01, -0.001, -0.004, 0.002),
                    ("b", "single losses", 0.01, -0.001, -0.004, 0.002),
                    ("a", "single losses", 0.1, -0.02, -0.03, -0.011),
                    ("b", "single losses", 0.1, -0.015, -0.016, -0.009),
                    ("a", "single losses", 0.2, -0.009, -0.011, -0.007),
                    ("b", "single losses", 0.2, 0.002, -0.1, 0.1),
                    ("a", "single losses", 0.3, -0.005, None, None),  # one seed
                    ("b", "single losses", 0.3, 0.0, -0.001, 0.001),
                ]
            ),
            "02_structure": compared(
                [
                    ("a", "bursts of 16", 0.2, -0.005, -0.006, -0.004),  # not run in b, which may lose more
                    ("a", "bursts of 100", 0.2, -0.05, -0.06, -0.04),
                    ("b", "bursts of 100", 0.3, -0.05, -0.06, -0.04),  # a rate of its own
                    ("a", "bursts of 16 whole messages", 0.2, -0.5, -0.6, -0.4),  # no network
                ]
            ),
            "03_algorithms": compared(
                [
                    ("a", "direct, 8 ranks", 0.2, -0.5, -0.6, -0.4),
                    ("a", "ring, 4 ranks", 0.2, -0.1, -0.12, -0.08),
                    ("a", "ring, 8 ranks", 0.2, -0.5, -0.6, -0.4),  # more ranks than the others'
                ]
            ),
            "02_shared": compared(
                [("a", "losses all shared", 0.2, -0.2, -0.3, -0.1), ("a", "single losses", 0.2, -0.1, -0.12, -0.08)]
            ),
            "03_rings": compared([("a", "ring, both phases", 0.1, -0.2, -0.3, -0.1)]),
            "01_tolerance_of_both_phases": compared([("a", "both phases", 0.2, -0.1, -0.12, -0.08)]),
            "06_repair": repairs([("cheap", 0.2, 0.001, 0.1), ("dear", 0.02, 0.02, 1.0)]),
            "06_repair_again": repairs([("free", 0.1, 0.02, 0.0)]),
            "06_repair_of_bursts": repairs([("dear of bursts", 0.2, 0.001, 1.0)]),
            "06_repair_of_bursts_again": repairs([("interleaved", 0.2, 0.001, 0.1)]),
            "06_repair_of_both_phases": repairs([("of both", 0.2, 0.001, 0.1)]),
            "06_repair_of_rings": repairs([("of rings", 0.2, 0.001, 0.1)]),
        }
    )
    advice = [(row["losses"], row["algorithm"], row["loss_rates"], row["advice"], row["repair"]) for row in table]
    assert advice == [
        ("single losses", "direct", [0.01], "nothing", None),
        ("single losses", "direct", [0.1], "repair", "free"),
        ("single losses", "direct", [0.2], "undecided", None),
        ("single losses", "direct", [0.3], "undecided", None),
        ("bursts of 16", "direct", [0.2], "undecided", None),
        ("bursts of 100", "direct", [0.2, 0.3], "repair", "interleaved"),
        ("losses all shared", "direct", [0.2], "repair", None),
        ("both phases", "direct", [0.2], "repair", "of both"),
        ("single losses", "ring", [0.2], "repair", None),
        ("both phases", "ring", [0.1], "repair", "of rings"),
    ]
    assert table[-2]["falls"] == {"a": pytest.approx({"fall": 0.1, "low": 0.08, "high": 0.12})}
    assert table[1]["falls"]["a"] == pytest.approx({"fall": 0.02, "low": 0.011, "high": 0.03})


def test_a_network_of_two_grids_is_refused():
    twice = compared([("a", "bursts of 8", 0.2, -0.1, -0.2, 0.0)])
    with pytest.raises(ValueError, match=r"\(0.2, 'bursts of 8', 'direct'\) is in two grids"):
        advise({"01_tolerance": twice, "02_structure": twice})


def repairs(rows):
    """Build a comparison from rows of arm, gain, p-value after Holm, and extra packet share."""
    table = compared([("a", arm, 0.2, -0.01, -0.02, -0.001) for arm, *_ in rows])
    for number, name in enumerate(("gain", "gain_p_holm", "extra_packet_share"), 1):
        table[name] = [row[number] for row in rows]
    return table


def test_helpful_repairs_gain_somewhere_hurt_nowhere_and_come_cheapest_first():
    a = [("p", 0.1, 0.001, 1.0), ("q", 0.02, 0.01, 0.0), ("r", 0.05, 0.02, 0.0), ("s", 0.3, 0.06, 0.0)]
    a += [("t", -0.1, 0.01, 0.0)]
    b = [("p", 0.0, 1.0, 1.5), ("q", 0.01, 1.0, 0.0), ("r", 0.0, 1.0, 0.0), ("s", 0.1, 0.2, 0.0), ("t", 0.1, 0.01, 0.0)]
    both = pd.concat([repairs(a), repairs(b).assign(task="b")])
    assert helpful_repairs(both) == [{"arm": "q", "extra": 0.0}, {"arm": "r", "extra": 0.0}, {"arm": "p", "extra": 1.5}]
    hurting = pd.concat([repairs(a), repairs([("q", -0.1, 0.01, 0.0)]).assign(task="b")])
    assert [each["arm"] for each in helpful_repairs(hurting)] == ["r", "p"]
    assert [each["arm"] for each in helpful_repairs(hurting, {"a"})] == ["r", "p"], "it hurts elsewhere"
    assert helpful_repairs(both, {"b"}) == helpful_repairs(both, set()) == []


def test_a_retest_on_fresh_seeds_replaces_the_first_test():
    first = repairs([("p", 0.1, 0.01, 0.0), ("q", 0.1, 0.01, 0.0), ("r", 0.0, 0.5, 0.0)])
    tables = {"06_repair": first, "06_repair_again": repairs([("p", -0.1, 0.5, 0.0), ("r", 0.1, 0.01, 0.0)])}
    assert {each["arm"] for each in helpful_repairs(with_retests(tables, "06_repair"))} == {"q", "r"}
    assert {each["arm"] for each in helpful_repairs(with_retests({"06_repair": first}, "06_repair"))} == {"p", "q"}
    assert with_retests(tables, None) is with_retests(tables, "06_repair_of_bursts") is None
    elsewhere = {**tables, "06_repair_again": tables["06_repair_again"].assign(task="b")}
    rows = with_retests(elsewhere, "06_repair")
    assert rows[["task", "arm"]].to_numpy().tolist() == [["a", arm] for arm in "pqr"] + [["b", "p"], ["b", "r"]]
