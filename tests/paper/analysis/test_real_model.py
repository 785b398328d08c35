import json

import pandas as pd
import pytest

from paper.real_model import (
    against_predicted,
    predict_medians,
    repaired,
    rises,
    strongest_packet,
    times_law,
)


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


def test_what_strikes_packets_together_is_named(tmp_path):
    row = {"repair": "zero", "loss_rate": 0.1, "rises": [[0.1], [0.2]]}
    write(tmp_path / "one", [row], loss_type="ber")
    write(tmp_path / "three", [row], loss_type="correlated(shared=1.0)")
    write(tmp_path / "two", [row], loss_type="g-e", mean_burst_packets=8.0)
    assert list(rises(tmp_path)["losses"]) == ["single", "correlated(shared=1.0)", "bursts of 8"]


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


def test_a_prediction_without_a_measurement_is_an_error_and_not_left_out():
    with pytest.raises(ValueError, match=r"direct, both, loss rate 0\.1 was predicted, but not measured: run"):
        against_predicted(MEASURED, predict_medians(ERRORS, MEASURED))


def test_repairs_are_compared_where_they_were_tried():
    assert repaired(MEASURED)["median"].tolist() == [0.8, 0.5]


def test_a_file_that_is_no_record_is_named(tmp_path):
    (tmp_path / "tolerance.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"tolerance\.json is not a tolerance record \(KeyError\('config'\)\)"):
        rises(tmp_path)
    assert rises(tmp_path / "empty").empty


def test_the_strongest_packet_stands_beside_usual_ones(tmp_path):
    rows = ["layer,module,block,bin,src,dst,token,norm,rise"]
    for block, (norm, rise) in enumerate([(100.0, 8.0), (300.0, 12.0)]):
        rows += [f"3,mlp,{block},strongest,0,1,0,{norm},{rise}", f"3,mlp,{block},top 10 %,0,1,5,20,1.0"]
        rows += [f"3,mlp,{block},rest,0,1,{token},{token},0.0{token}" for token in (1, 2, 3)]
    file = tmp_path / "packets.csv"
    file.write_text("\n".join(rows))
    assert strongest_packet(file) == {
        "layer": 3,
        "module": "mlp",
        "blocks": 2,
        "norm": 200.0,
        "usual_norm": 3.0,
        "rise": 10.0,
        "least_rise": 8.0,
        "usual_rise": 0.03,
    }
