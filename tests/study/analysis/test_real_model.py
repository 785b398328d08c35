import json

import pytest

from lossytp.study.analysis.real_model import rises


def write(folder, rows):
    folder.mkdir(parents=True)
    record = {
        "config": {"model_name": "m"},
        "tensor_parallel_size": 3,
        "lossless_cross_entropy": 3.4,
        "rows": [{"algorithm": "direct", "phase": "reduce", **row} for row in rows],
    }
    (folder / "tolerance.json").write_text(json.dumps(record))


def test_intervals_are_over_draws_and_collapse_is_of_blocks(tmp_path):
    write(tmp_path / "one", [{"repair": "zero", "loss_rate": 0.1, "rises": [[0.1, 5.1], [0.1, 0.3], [3.2, 0.2]]}])
    write(tmp_path / "two", [{"repair": "stale", "loss_rate": 0.2, "rises": [[0.5, 0.5], [0.5, 0.5]]}])
    table = rises(tmp_path)
    assert list(table["repair"]) == ["zero", "stale"]
    row = table.iloc[0]
    assert (row["draws"], row["blocks"], row["ranks"], row["lossless"]) == (3, 2, 3, 3.4)
    assert row["rise"] == pytest.approx((2.6 + 0.2 + 1.7) / 3)
    assert row["low"] < 0.2 < 2.6 < row["high"]
    assert row["collapsed"] == pytest.approx(2 / 6)


def test_a_file_that_is_no_record_is_named(tmp_path):
    (tmp_path / "tolerance.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"tolerance\.json is not a tolerance record \(KeyError\('config'\)\)"):
        rises(tmp_path)
    assert rises(tmp_path / "empty").empty
