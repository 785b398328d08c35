"""Test the rows of the published records: what `python -m paper.inference` measures and keeps."""

import json

import numpy as np
import pytest
import torch

from lossytp.parallel.convert import parallelize
from lossytp.training.folder import exclusive_run
from paper.inference import InferenceConfig, Measurement, load_rows, measured

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of folly. "


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT * 40)
    return file


def settings(text, **values):
    small = {"text": str(text), "block_size": 32, "blocks": 3, "loss_rates": "0.1", "repairs": "zero", "precision": 9}
    return InferenceConfig(**{**small, **values})


def rows(measurement):
    return list(measurement.rows({}))


def test_a_rise_is_the_mean_over_draws_of_the_cross_entropy_over_the_lossless_one(text):
    config = settings(text, min_draws=2)
    measurement = Measurement(config)
    (row,) = rows(measurement)
    blocks = measurement.blocks_NT
    assert blocks.shape == (3, 32)
    network = config.network(row.setup).build()
    model = parallelize(measurement.dense, network, tensor_parallel_size=4)
    for draw, rises in enumerate(row.rises):
        with network.evaluation(draw), torch.no_grad():
            lossy = [model(input_ids=block[None], labels=block[None]).loss.item() for block in blocks]
        with torch.no_grad():
            clean = [measurement.dense(input_ids=block[None], labels=block[None]).loss.item() for block in blocks]
        assert rises == pytest.approx(np.subtract(lossy, clean), abs=1e-5)
    assert row.rise.value == pytest.approx(np.mean(row.rises))
    assert row.rise.value > 0.01
    assert row.packets == network.summary("evaluation")["packets"] / 2


def test_two_measurements_do_not_share_a_folder(text, tmp_path):
    with exclusive_run(str(tmp_path)), pytest.raises(ValueError, match="another run"):
        measured(settings(text, output_dir=str(tmp_path)))


def test_losses_on_the_way_back_cost_more(text):
    config = settings(text, phases="reduce,both", loss_rates="0.05", min_draws=6)
    reduce, both = rows(Measurement(config))
    assert both.rise.value > reduce.rise.value


def test_draws_end_when_the_interval_is_narrow_enough(text):
    wide = rows(Measurement(settings(text, precision=1e-9, max_draws=5, loss_rates="0.01")))
    narrow = rows(Measurement(settings(text, precision=9.0, max_draws=5, loss_rates="0.01")))
    assert [len(row.rises) for row in wide + narrow] == [5, 3]


def test_repairs_are_left_out_where_losses_cost_nothing(text):
    config = settings(text, loss_rates="0,0.2", repairs="rescale,hadamard(8)")
    assert [row.setup[2:] for row in rows(Measurement(config))] == [
        ("zero", 0.0),
        ("zero", 0.2),
        ("rescale", 0.2),
        ("hadamard(8)", 0.2),
    ]


def test_a_stopped_measurement_goes_on_and_more_rows_join_it(text, tmp_path):
    both = settings(text, loss_rates="0.05,0.1", output_dir=str(tmp_path))
    finished = measured(both)
    file = tmp_path / "tolerance.json"
    record = json.loads(file.read_text())
    record["rows"] = record["rows"][:1]
    record["rows"][0]["packets_a_draw"] = 12345.0  # as no measurement gives it
    del record["config"]["bf16"]  # as in records from before the setting
    file.write_text(json.dumps(record))
    again = measured(both)
    assert again == [finished[0]._replace(packets=12345.0), finished[1]]
    more = measured(settings(text, loss_rates="0.1", repairs="rescale", output_dir=str(tmp_path)))
    assert [row.setup[2:] for row in more] == [("zero", 0.05), ("zero", 0.1), ("rescale", 0.1)]
    assert more[:2] == again
    with pytest.raises(ValueError, match=r"was measured with mtu_bytes = 1500, not 600; seed = \d+, not 1: give"):
        load_rows(settings(text, loss_rates="0.05,0.1", output_dir=str(tmp_path), mtu_bytes=600, seed=1))
    file.write_text("[]")
    with pytest.raises(ValueError, match="is not a tolerance record"):
        load_rows(both)


def test_rows_of_another_model_text_or_trace_are_not_mixed_in(text, tmp_path):
    notes, trace, folder = tmp_path / "notes.txt", tmp_path / "losses.npy", tmp_path / "record"
    notes.write_text(TEXT * 40)
    np.save(trace, np.arange(300) % 5 == 0)
    config = settings(str(notes), loss_type=f"trace('{trace}')", loss_rates=None, output_dir=str(folder))
    (first,) = measured(config)
    assert measured(config) == [first]
    file = folder / "tolerance.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lossless_cross_entropy": 2.0}))
    with pytest.raises(ValueError, match=r"of 2.0000 nats without losses, not .* model has changed; give another"):
        measured(config)
    notes.write_text(notes.read_text().replace("wisdom", "folly", 1))
    with pytest.raises(ValueError, match=r"the text, .* has changed since .*tolerance.json was written: give another"):
        measured(config)
    np.save(trace, np.arange(300) % 4 == 0)
    with pytest.raises(ValueError, match=r"the file of trace\(.* has changed since .*tolerance.json was written: give"):
        load_rows(config)
