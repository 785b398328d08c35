"""The real model: what losses cost its texts, and how long messages wait for retransmissions."""

import json

import pytest

from paper.real_model import rises, strongest_packet


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
    assert table.iloc[1]["collapsed"] == 0
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


def test_the_strongest_packet_stands_beside_usual_ones(tmp_path):
    rows = ["layer,module,block,bin,src,dst,token,norm,rise"]
    for block, (norm, rise) in enumerate([(100.0, 8.0), (300.0, 12.0)]):
        rows += [f"3,mlp,{block},strongest,0,1,0,{norm},{rise}", f"3,mlp,{block},top 10 %,0,1,5,20,1.0"]
        rows += [f"3,mlp,{block},rest,0,1,{token},{token},0.0{token}" for token in (1, 2, 3)]
    rows += ["3,mlp,0,top 1 %,0,1,7,400,0.01", "3,mlp,1,top 1 %,0,1,7,400,0.2"]  # as strong, and harmless or not
    file = tmp_path / "packets.csv"
    file.write_text("\n".join(rows))
    assert strongest_packet(file) == {
        "layer": 3, "module": "mlp", "blocks": 2, "norm": 200.0, "usual_norm": 3.0, "rise": 10.0, "least_rise": 8.0,
        "usual_rise": 0.03, "harmless": 1,
    }  # fmt: skip
