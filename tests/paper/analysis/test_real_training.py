import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

from paper.comparisons import holm
from paper.real_model import ADVISED, BEST, FEW, expected_round_trips
from paper.real_training import CONTRASTS, contrasts, first_fall, gains_by_rate, outcomes

ACCURACY = {
    ("no loss", "zero"): 0.80,
    ("no loss", FEW): 0.78,
    ("no loss", BEST): 0.86,
    ("zero", "zero"): 0.81,
    ("zero", FEW): 0.77,
    ("zero", BEST): 0.85,
    (BEST, "zero"): 0.79,
    (BEST, FEW): 0.78,
    (BEST, BEST): 0.87,
}


@pytest.fixture
def table():
    return pd.DataFrame(
        {
            "task": task,
            "seed": seed,
            "trained_at": 0.0 if trained == "no loss" else 0.1,
            "trained_with": "zero" if trained == "no loss" else trained,
            "evaluated_with": evaluated,
            "accuracy": accuracy + seed / 100 - harder,
            "clean": (0.9 if trained == "no loss" else 0.88) + seed / 100 - harder,
            "strongest": 1000.0 + seed,
        }
        for task, harder in (("sst2", 0.0), ("qnli", 0.1))
        for seed in range(3)
        for (trained, evaluated), accuracy in ACCURACY.items()
    )


def of_one_task(rows, task="sst2"):
    return {row["contrast"]: row for row in rows if row["task"] == task}


def test_falls_are_against_the_model_without_any_losses_paired_by_seed(table):
    rows = outcomes(table).set_index(["task", "trained_over", "evaluated_with"])
    assert len(rows) == 2 * len(ACCURACY)
    for task in ("sst2", "qnli"):
        for where, accuracy in ACCURACY.items():
            row = rows.loc[(task, *where)]
            assert row["fall"] == pytest.approx(0.9 - accuracy)
            assert row["high"] - row["low"] == pytest.approx(0, abs=1e-9), "seeds cancel"
        found = rows.loc[(task, "zero", "zero"), ["clean_fall", "clean_low", "clean_high", "strongest", "weakest"]]
        assert found.tolist() == pytest.approx([0.02, 0.02, 0.02, 1001, 1000])
        assert rows.loc[(task, "zero", "zero"), "seeds"] == 3


def test_a_model_without_its_lossless_seed_does_not_count(table):
    lacking = table[(table["seed"] > 0) | (table["trained_at"] > 0)]
    assert (outcomes(lacking)["seeds"] == 2).all()


def test_gains_compare_one_model_or_one_repair(table):
    assert [row["task"] for row in contrasts(table)] == ["sst2"] * len(CONTRASTS) + ["qnli"] * len(CONTRASTS)
    gains = of_one_task(contrasts(table))
    assert set(gains) == set(CONTRASTS)
    assert gains["training under loss"]["value"] == pytest.approx(0.01)
    assert gains["a tenth"]["value"] == pytest.approx(0.06)
    assert gains["a hundredth"]["value"] == pytest.approx(-0.02)
    assert gains["a tenth, not a hundredth"]["value"] == pytest.approx(0.08)
    assert gains["a tenth"]["seeds"] == 3


def test_gains_leave_out_a_seed_that_one_side_lacks_and_their_intervals_are_over_seeds(table):
    table.loc[(table["seed"] == 1) & (table["trained_with"] == "zero"), "accuracy"] += 0.04
    table.loc[(table["seed"] == 1) & (table["trained_at"] == 0), "accuracy"] -= 0.04
    gain = of_one_task(contrasts(table[(table["seed"] < 2) | (table["trained_at"] == 0)]))["training under loss"]
    assert gain["seeds"] == 2
    assert gain["value"] == pytest.approx((0.01 + 0.05) / 2)
    assert gain["high"] - gain["value"] == pytest.approx(12.706 * 0.04 / 2, rel=1e-3)


def test_contrasts_are_corrected_together(table):
    table["accuracy"] += np.random.default_rng(0).normal(0, 0.02, len(table))
    gains = pd.DataFrame(contrasts(table))
    assert gains["p_holm"].tolist() == pytest.approx(holm(gains["p"].to_numpy()).tolist())
    first = table[(table["task"] == "sst2") & (table["evaluated_with"] == "zero")].set_index("seed")
    first = first[first["trained_with"] == "zero"]
    pairs = [first.loc[first["trained_at"] == rate, "accuracy"] for rate in (0.1, 0.0)]
    assert gains["p"][0] == pytest.approx(ttest_rel(*pairs).pvalue)


def test_a_message_waits_for_the_last_protected_packet_of_any_link():
    traffic = {"packets": 2 * 100 + 30, "extra": 30, "messages": {"called": 2}}
    record = {"config": {"loss_rate": 0.5}, "network": {"training": traffic}}
    tries = np.random.default_rng(0).geometric(0.5, (20_000, 10)).max(1) - 1  # of 10 packets a message
    assert expected_round_trips(record, "protect(0.1)") == pytest.approx(tries.mean(), rel=0.02)


def test_gains_at_a_rate_are_paired_by_seed():
    gains = {0.1: [0.05, 0.06, 0.07], 0.2: [0.10, 0.20, 0.03]}
    runs = [
        {"loss_rate": rate, "repair": repair, "seed": seed, "accuracy_lossy": 0.5 + seed / 10 + (repair == BEST) * gain}
        for rate, each in gains.items()
        for seed, gain in enumerate(each)
        for repair in ("zero", BEST)
    ]
    alone = {"seed": 3, "accuracy_lossy": 0.1, "repair": "zero"}
    runs += [{"loss_rate": rate, **alone} for rate in (0.0, 0.1, 0.3)]  # no protected run to compare with
    table = pd.DataFrame(runs).assign(run=[str(number) for number in range(len(runs))])
    clear, vague = gains_by_rate(pd.concat([table, table.head(4)]))  # runs that experiments share count once
    assert [(row["loss_rate"], row["seeds"]) for row in (clear, vague)] == [(0.1, 3), (0.2, 3)]
    assert [row["value"] for row in (clear, vague)] == pytest.approx([0.06, 0.11])
    assert vague["low"] < 0 < clear["low"] == pytest.approx(0.06 - 4.303 * 0.01 / 3**0.5, abs=1e-5)  # Student's t of 2


def test_the_first_seeds_fall_is_not_that_of_all():
    falls = [0.01, 0.02, 0.03, 0.5, 0.5]
    runs = [
        {"arm": arm, "seed": seed, "accuracy_lossy": 0.9 - (arm != "no loss") * fall}
        for seed, fall in enumerate(falls)
        for arm in ("no loss", ADVISED)
    ]
    value, low, high = first_fall(pd.DataFrame(runs[::-1]), seeds=3)
    assert value == pytest.approx(2.0)
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=0.001)  # Student's t of 2
    assert first_fall(pd.DataFrame(runs[:1]), seeds=3) == first_fall(pd.DataFrame(), seeds=3) == []
