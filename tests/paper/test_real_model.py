"""The real model: what losses cost it in inference, the law that predicts it, and its fine-tuning under loss."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

from paper.comparisons import holm
from paper.real_model import (
    ADVISED,
    BEST,
    FEW,
    against_predicted,
    expected_round_trips,
    predict_medians,
    repaired,
    rises,
    strongest_packet,
    times_law,
)
from paper.real_training import CONTRASTS, contrasts, first_fall, gains_by_rate, outcomes


def write(folder, rows, **config):
    folder.mkdir(parents=True)
    record = {
        "config": {"model_name": "m", **config},
        "tensor_parallel_size": 3,
        "lossless_cross_entropy": 3.4,
        "rows": [{"algorithm": "direct", "phase": "reduce", "packets_a_draw": 960.0, **row} for row in rows],
    }
    (folder / "tolerance.json").write_text(json.dumps(record))


def test_intervals_are_over_draws_and_collapse_is_of_blocks(tmp_path):
    write(tmp_path / "one", [{"repair": "zero", "loss_rate": 0.1, "rises": [[0.1, 5.1], [0.1, 0.3], [3.2, 0.2]]}])
    write(tmp_path / "two", [{"repair": "stale", "loss_rate": 0.2, "rises": [[0.5, 0.5], [0.5, 0.5]]}])
    table = rises(tmp_path)
    assert list(table["repair"]) == ["zero", "stale"]
    row = table.iloc[0]
    assert (row["draws"], row["blocks"], row["packets"], row["ranks"], row["lossless"]) == (3, 2, 960, 3, 3.4)
    assert row["rise"] == pytest.approx((2.6 + 0.2 + 1.7) / 3)
    assert row["low"] < 0.2 < 2.6 < row["high"]
    assert row["collapsed"] == pytest.approx(2 / 6)
    assert (row["collapsed_low"], row["collapsed_high"]) == pytest.approx((0.097, 0.700), abs=1e-3), "Wilson's"
    assert table.iloc[1]["collapsed_high"] > 0.4, "none of four is no proof"
    assert row["largest"] == 5.1


def test_rises_name_what_strikes_packets_together_and_a_file_that_is_no_record(tmp_path):
    row = {"repair": "zero", "loss_rate": 0.1, "rises": [[0.1], [0.2]]}
    write(tmp_path / "one", [row], loss_type="ber")
    write(tmp_path / "three", [row], loss_type="correlated(shared=1.0)")
    write(tmp_path / "two", [row], loss_type="g-e", mean_burst_packets=8.0)
    assert list(rises(tmp_path)["losses"]) == ["single", "correlated(shared=1.0)", "bursts of 8"]
    (tmp_path / "one" / "tolerance.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"tolerance\.json"):
        rises(tmp_path)
    assert rises(tmp_path / "empty").empty


def row(algorithm, rate, median, phase="reduce", repair="zero", losses="single"):
    """Return a row of `rises`, with the columns that say which network it is."""
    network = {"algorithm": algorithm, "phase": phase, "losses": losses, "repair": repair, "loss_rate": rate}
    return network | {"median": median, "rise": 2 * median, "low": median, "high": 3 * median, "collapsed": 0.0}


MEASURED = pd.DataFrame(
    [
        row("direct", 0.03, 0.2),
        row("direct", 0.1, 0.8),
        row("direct", 0.1, 0.5, repair="protect(0.01)"),
        row("direct", 0.1, 5.0, losses="bursts of 8"),
        row("direct", 0.2, 1.7),
        row("ring", 0.1, 1.3),
    ]
)
ERRORS = pd.DataFrame(
    [
        {"algorithm": "direct", "phase": "reduce", "loss_rate": 0.03, "squared_error": 0.03, "stream_error": 0.01},
        {"algorithm": "direct", "phase": "reduce", "loss_rate": 0.1, "squared_error": 0.12, "stream_error": 0.02},
        {"algorithm": "direct", "phase": "both", "loss_rate": 0.1, "squared_error": 0.24, "stream_error": 0.03},
        {"algorithm": "ring", "phase": "reduce", "loss_rate": 0.1, "squared_error": 0.24, "stream_error": 0.04},
    ]
)


def test_a_power_law_through_two_loss_rates_predicts_other_networks():
    predicted = predict_medians(ERRORS, MEASURED)
    assert predicted["median_by_squared_error"].tolist() == pytest.approx([0.2, 0.8, 1.6, 1.6])  # proportional
    assert predicted["median_by_stream_error"].tolist() == pytest.approx([0.2, 0.8, 1.8, 3.2])  # the square


def test_predictions_stand_beside_what_was_measured_without_a_repair():
    measured = pd.concat([MEASURED, pd.DataFrame([row("direct", 0.1, 3.0, phase="both")])], ignore_index=True)
    table = against_predicted(measured, predict_medians(ERRORS, measured))
    assert table["fitted"].tolist() == [True, True, False, False]
    assert table["median"].tolist() == [0.2, 0.8, 3.0, 1.3]
    assert table["median_by_loss_rate"].tolist() == pytest.approx([0.2, 0.8, 0.8, 0.8])
    with pytest.raises(ValueError, match=r"direct, both, loss rate 0\.1 was predicted, but not measured"):
        against_predicted(MEASURED, predict_medians(ERRORS, MEASURED))
    assert repaired(MEASURED)["median"].tolist() == [0.8, 0.5], "repairs stand where they were tried"


def test_repairs_and_other_networks_are_held_against_the_law_of_no_repair():
    usual = {"algorithm": "direct", "phase": "reduce", "squared_error": 0.1}
    more = [{**usual, "loss_rate": 0.1, "repair": "protect(0.01)", "stream_error": 0.01}]
    more += [{**usual, "loss_rate": 0.2, "repair": "zero", "stream_error": 0.03}]
    errors = pd.concat([ERRORS.assign(repair="zero"), pd.DataFrame(more)])
    found = times_law(MEASURED, errors).set_index(["algorithm", "loss_rate", "repair"])["times_law"]
    assert found["direct", 0.03, "zero"] == pytest.approx(1)
    assert found["direct", 0.1, "protect(0.01)"] == pytest.approx(2.5), "the error is that of 3 %, where 0.2 are lost"
    assert found["ring", 0.1, "zero"] == pytest.approx(1.3 / 3.2)


def test_a_row_without_errors_is_named_and_not_left_out():
    with pytest.raises(ValueError, match=r"direct, reduce, loss rate 0\.1, protect\(0\.01\) was measured, but the err"):
        times_law(MEASURED.query("loss_rate != 0.2"), ERRORS.assign(repair="zero"))
    stale = pd.DataFrame([row("direct", 0.1, 0.9, repair="stale")])
    table = pd.concat([MEASURED.query("loss_rate != 0.2 and repair == 'zero'"), stale])
    assert (times_law(table, ERRORS.assign(repair="zero"))["repair"] == "zero").all(), "it needs earlier messages"


def test_the_strongest_packet_stands_beside_usual_ones(tmp_path):
    rows = ["layer,module,block,bin,src,dst,token,norm,rise"]
    for block, (norm, rise) in enumerate([(100.0, 8.0), (300.0, 12.0)]):
        rows += [f"3,mlp,{block},strongest,0,1,0,{norm},{rise}", f"3,mlp,{block},top 10 %,0,1,5,20,1.0"]
        rows += [f"3,mlp,{block},rest,0,1,{token},{token},0.0{token}" for token in (1, 2, 3)]
    file = tmp_path / "packets.csv"
    file.write_text("\n".join(rows))
    assert strongest_packet(file) == {
        "layer": 3, "module": "mlp", "blocks": 2, "norm": 200.0, "usual_norm": 3.0, "rise": 10.0, "least_rise": 8.0,
        "usual_rise": 0.03,
    }  # fmt: skip


# Fine-tuning

ACCURACY = {
    (trained, evaluated): accuracy
    for trained, row in {"no loss": (0.80, 0.78, 0.86), "zero": (0.81, 0.77, 0.85), BEST: (0.79, 0.78, 0.87)}.items()
    for evaluated, accuracy in zip(("zero", FEW, BEST), row, strict=True)
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
    lacking = table[(table["seed"] > 0) | (table["trained_at"] > 0)]  # one model's lossless seed
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
