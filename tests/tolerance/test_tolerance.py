"""Test what `python -m lossytp.tolerance` measures, keeps and says."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import lossytp as ltp
from lossytp.parallel.convert import parallelize
from lossytp.study.statistics import Estimate
from lossytp.tolerance import measure
from lossytp.tolerance.__main__ import measure_and_print
from lossytp.tolerance.config import Setup, ToleranceConfig, parts
from lossytp.tolerance.measure import Measurement, Row, advice, keep_advice, keep_rows, load_rows, write_rows
from lossytp.training.folder import exclusive_run
from lossytp.training.models import load_model, load_tokenizer
from tests.training.bos import BOS, with_bos

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of folly. "


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT * 40)
    return file


def settings(text, **values):
    small = {"text": str(text), "block_size": 32, "blocks": 3, "loss_rates": "0.1", "repairs": "zero", "precision": 9}
    return ToleranceConfig(**{**small, **values})


def rows(measurement, done=None):
    return list(measurement.rows(done or {}, lambda setup, number: None))


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


def test_every_block_stands_behind_the_token_that_the_tokenizer_asks_for(text, tmp_path, capsys):
    tokenizer, folder = load_tokenizer("gpt2-nano"), str(tmp_path / "model")
    load_model("gpt2-nano").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = settings(text, model_name=folder, blocks=2, output_dir=str(tmp_path))
    bare = Measurement(config)
    write_rows(bare, [], [])
    assert "first_tokens" not in json.loads((tmp_path / "tolerance.json").read_text())
    with_bos(tokenizer).save_pretrained(folder)
    asks = Measurement(config)
    bos = torch.full((2, 1), tokenizer.convert_tokens_to_ids(BOS))
    running = asks.blocks_NT[:, 1:].flatten()
    assert asks.blocks_NT[:, :1].equal(bos)
    assert running.equal(bare.blocks_NT.flatten()[: len(running)])
    assert asks.lossless != bare.lossless
    (tmp_path / "tolerance.json").unlink()
    measure_and_print(config.replace(min_draws=2, max_draws=2))
    assert json.loads((tmp_path / "tolerance.json").read_text())["first_tokens"] == [BOS]
    assert f"each block after {BOS}" in capsys.readouterr().out


def test_more_blocks_than_the_text_has_are_refused(text):
    with pytest.raises(ValueError, match=r"blocks = 1000000000 is above \d+: give no more than the text has, of 32 "):
        Measurement(settings(text, blocks=10**9))


def test_a_block_longer_than_the_usual_text_is_read(text, monkeypatch):
    monkeypatch.setattr(measure, "TOKENS", 31)
    assert Measurement(settings(text, blocks=None)).blocks_NT.shape == (1, 32)


def test_two_measurements_do_not_share_a_folder(text, tmp_path):
    config = settings(text, output_dir=str(tmp_path))
    with exclusive_run(str(tmp_path)), pytest.raises(ValueError, match="another run"):
        measure_and_print(config)


@pytest.mark.parametrize("phases", ["reduce", "both"])
def test_without_losses_nothing_rises(text, phases):
    for row in rows(Measurement(settings(text, loss_rates="0", phases=phases))):
        assert row.rise.value == pytest.approx(0, abs=1e-5)


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


def test_a_stopped_measurement_goes_on_and_another_is_not_overwritten(text, tmp_path):
    config = settings(text, loss_rates="0.05,0.1", output_dir=str(tmp_path))
    measurement = Measurement(config)
    finished = rows(measurement)
    write_rows(measurement, finished[:1], [])
    done = load_rows(config)
    assert done == {finished[0].setup: finished[0]}
    drawn = []
    again = list(measurement.rows(done, lambda setup, number: drawn.append(setup)))
    assert again == finished
    assert set(drawn) == {finished[1].setup}
    with pytest.raises(ValueError, match=r"was measured with mtu_bytes = 1500, not 600; seed = \d+, not 1: give"):
        load_rows(settings(text, loss_rates="0.05,0.1", output_dir=str(tmp_path), mtu_bytes=600, seed=1))
    (tmp_path / "tolerance.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a tolerance record"):
        load_rows(config)


def test_more_rates_and_repairs_join_the_rows_that_are_there(text, tmp_path, capsys):
    measure_and_print(settings(text, loss_rates="0.05,0.1", output_dir=str(tmp_path)))
    first = json.loads((tmp_path / "tolerance.json").read_text())["rows"]
    measure_and_print(settings(text, loss_rates="0.1", repairs="rescale", output_dir=str(tmp_path)))
    both = json.loads((tmp_path / "tolerance.json").read_text())["rows"]
    assert [(each["repair"], each["loss_rate"]) for each in both] == [("zero", 0.05), ("zero", 0.1), ("rescale", 0.1)]
    assert both[:2] == first


def test_a_stop_keeps_the_rows_that_are_still_to_come_again(text, tmp_path):
    measure_and_print(settings(text, loss_rates="0.05,0.1", output_dir=str(tmp_path)))
    config = settings(text, loss_rates="0.01,0.05,0.1", output_dir=str(tmp_path))
    measurement = Measurement(config)
    stopped = keep_rows(measurement, load_rows(config), lambda setup, number: None)
    next(stopped)
    stopped.close()
    assert {setup.loss_rate for setup in load_rows(config)} == {0.01, 0.05, 0.1}
    keep_advice(measurement, [])
    assert [setup.loss_rate for setup in load_rows(config)] == [0.01, 0.05, 0.1]


def kept(config):
    return list(keep_rows(Measurement(config), load_rows(config), lambda setup, number: None))


def test_rows_of_another_model_text_or_trace_are_not_mixed_in(text, tmp_path):
    notes, trace, folder = tmp_path / "notes.txt", tmp_path / "losses.npy", tmp_path / "record"
    notes.write_text(TEXT * 40)
    np.save(trace, np.arange(300) % 5 == 0)
    config = settings(str(notes), loss_type=f"trace('{trace}')", loss_rates=None, output_dir=str(folder))
    (first,) = kept(config)
    assert kept(config) == [first]
    file = folder / "tolerance.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lossless_cross_entropy": 2.0}))
    with pytest.raises(
        ValueError, match=r"of 2.0000 nats without losses, not .* model has changed; give another output"
    ):
        kept(config)
    notes.write_text(notes.read_text().replace("wisdom", "folly", 1))
    with pytest.raises(
        ValueError, match=r"the text, .* has changed since .*tolerance.json was written: give another output"
    ):
        kept(config)
    np.save(trace, np.arange(300) % 4 == 0)
    with pytest.raises(ValueError, match=r"the file of trace\(.* has changed since .*tolerance.json was written: give"):
        load_rows(config)


def test_a_record_from_before_a_setting_has_its_default(text, tmp_path):
    config = settings(text, loss_rates="0.1", output_dir=str(tmp_path))
    (first,) = kept(config)
    record = json.loads((tmp_path / "tolerance.json").read_text())
    del record["config"]["bf16"]
    (tmp_path / "tolerance.json").write_text(json.dumps(record))
    assert load_rows(config) == {first.setup: first}


def row(rate, value, half=0.001, repair="zero", packets=100.0):
    rise = Estimate(value, value - half, value + half)
    return Row(Setup("direct", "reduce", repair, rate), rise, 0.0, packets, 4 * [4 * [value]])


def test_advice_names_the_largest_rates_and_the_cheapest_repairs():
    measured = [
        row(0.001, 0.002),
        row(0.01, 0.05),
        row(0.01, 0.001, repair="retransmit(1)", packets=101.0),
        row(0.03, 0.3),
        row(0.03, 0.05, repair="retransmit(1)", packets=103.0),
        row(0.03, 0.09, repair="hadamard(64)"),
        row(0.1, 3.0),
        row(0.1, 2.0, repair="hadamard(64)"),
    ]
    where = "direct, losses in the reduce phase"
    unseen = "none of 16 blocks collapsed, but up to 19% of blocks may"  # Wilson: z^2 / (16 + z^2)
    assert advice(measured) == [
        f"{where}: up to a loss rate of 0.001, losses cost under 0.01 nats without a repair",
        f"{where}: up to a loss rate of 0.01, losses cost under 0.1 nats without a repair",
        f"{where}, 0.001: no repair is needed (0.002 nats); {unseen}",
        f"{where}, 0.01: no repair is needed (0.05 nats); {unseen}",
        f"{where}, 0.03: hadamard(64) holds (0.09 nats, with 0.0% more packets); {unseen}",
        f"{where}, 0.1: no measured repair holds the rise under 0.1 nats; hadamard(64) comes closest (2)",
    ]
    assert advice([row(0.01, 0.02)])[0] == f"{where}: no measured loss rate costs under 0.01 nats without a repair"
    assert "no measured loss rate" in advice([row(0.01, 0.009, half=0.002)])[0], "the whole interval counts"
    assert advice([row(0.01, 0.05)._replace(collapsed=0.1)])[-1].endswith("no repair is needed (0.05 nats)")


def test_lists_are_split_at_commas_outside_parentheses():
    assert parts("zero, fec(10, 8),hadamard(64),") == ["zero", "fec(10, 8)", "hadamard(64)"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss_rates": "0.1,x"}, "loss_rates = '0.1,x': 'x' is not a number: give shares, such as 0.01,0.1"),
        ({"loss_rates": "2"}, "loss_rates = 2.0 is not in"),
        ({"loss_rates": ","}, "loss_rates = ',' is empty"),
        (
            {"loss_rates": "0.1,1", "repairs": "protect(0.1)"},
            r"repair = 'protect\(0.1\)' cannot work, because the link 0>1 loses",
        ),
        ({"phases": "gather"}, "phases = 'gather' is unknown: choose one of reduce, both"),
        ({"repairs": "magic"}, "repair = 'magic' is unknown"),
        ({"algorithms": "rings"}, "algorithm = 'rings' is unknown"),
        ({"algorithms": ""}, "algorithms = '' is empty"),
        ({"phases": ","}, "phases = ',' is empty: give one, such as reduce"),
        ({"tensor_parallel_size": 1}, "tensor_parallel_size = 1 is below 2"),
        ({"max_draws": 2}, "max_draws = 2 is below min_draws = 3: give at least as many"),
        ({"block_size": 1}, "block_size = 1 is below 2"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size = 3 does not divide"),
    ],
)
def test_bad_values_are_one_line(text, values, message):
    with pytest.raises(ValueError, match=message) as error:
        settings(text, **values)
    assert "\n" not in str(error.value)


def test_the_size_follows_from_the_model(text):
    assert ToleranceConfig(model_name="smollm2-135m", text=str(text)).ranks() == 3
    assert settings(text).ranks() == 4
    with pytest.raises(ValueError, match="block_size = 129 is above gpt2-nano's 128 positions"):
        Measurement(settings(text, block_size=129))


@pytest.mark.slow
def test_the_command_prints_a_table_and_advice_and_writes_a_record_and_a_figure(text, tmp_path):
    command = [sys.executable, "-m", "lossytp.tolerance", "--text", str(text), "--block_size", "32", "--blocks", "2"]
    command += [
        "--loss_rates",
        "0.02",
        "--repairs",
        "protect(0.1) + hadamard(8)",
        "--precision",
        "9",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert outputs[0] == outputs[1]
    lines = outputs[0].splitlines()
    assert lines[0].startswith("gpt2-nano on 64 tokens of")
    assert [line.split()[2] for line in lines[2:5]] == ["repair", "zero", "protect(0.1)"]
    assert len({line.index("%") for line in lines[3:5]}) == 1, "the columns are aligned"
    record = json.loads((tmp_path / "out" / "tolerance.json").read_text())
    assert all(line in outputs[0] for line in record["advice"])
    assert len(record["rows"]) == 2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "tolerance.json",
        "tolerance.png",
        "tolerance.svg",
    }


@pytest.mark.slow
def test_the_command_refuses_in_one_line(tmp_path):
    command = [sys.executable, "-m", "lossytp.tolerance", "--text", "none/*.txt", "--output_dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "error: no file matches 'none/*.txt': give another pattern, or 'stdlib'"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    file = tmp_path_factory.mktemp("trace") / "losses.txt"
    file.write_text("0010000001" * 30)
    return file


def command(text, folder, *words):
    start = [sys.executable, "-m", "lossytp.tolerance", "--text", str(text), "--block_size", "32", "--blocks", "2"]
    return [*start, "--min_draws", "2", "--precision", "9", "--output_dir", str(folder), *words]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "rates"),
    [
        (["--loss_type", "trace({trace!r})"], [0.2]),
        (["--loss_type", "g-e", "--mean_burst_packets", "8", "--loss_rates", "0.1,0.2"], [0.1, 0.2]),
    ],
)
def test_recorded_and_bursty_losses_from_end_to_end_also_after_a_stop(text, trace, tmp_path, words, rates):
    words = [word.format(trace=str(trace)) for word in words]
    whole = subprocess.run(command(text, tmp_path, *words), capture_output=True, text=True, check=True).stdout
    file = tmp_path / "tolerance.json"
    finished = json.loads(file.read_text())
    assert list(dict.fromkeys(row["loss_rate"] for row in finished["rows"])) == rates
    assert max(row["rise"]["value"] for row in finished["rows"]) > 0.01
    kept = {**finished, "rows": finished["rows"][:1], "advice": []}
    kept["rows"][0]["packets_a_draw"] = 12345  # as no measurement gives it
    file.write_text(json.dumps(kept))
    again = subprocess.run(command(text, tmp_path, *words), capture_output=True, text=True, check=True).stdout
    assert [line for line in again.splitlines() if "±" in line] == [line for line in whole.splitlines() if "±" in line]
    rows = json.loads(file.read_text())["rows"]
    assert [row["rises"] for row in rows] == [row["rises"] for row in json.loads(json.dumps(finished))["rows"]]
    assert rows[0]["packets_a_draw"] == 12345, "the first row was not measured again"


def test_a_loss_type_with_a_rate_of_its_own_takes_none(text, trace, tmp_path):
    kind = f"trace({str(trace)!r})"
    config = settings(text, loss_type=kind, loss_rates=None)
    assert config.rates() == [0.2]
    assert config.network(config.setups()[0]).process() == ltp.Trace.from_file(trace)
    assert settings(text, loss_rates=None).rates() == [0.001, 0.01, 0.03, 0.1]
    assert settings(text, loss_type="netem('loss random 5%')", loss_rates=None).rates() == pytest.approx([0.05])
    assert settings(text, loss_type="correlated(shared=0.5)", mean_burst_packets=8.0).rates() == [0.1]
    words = ["--loss_type", kind, "--loss_rates", "0.1"]
    result = subprocess.run(command(text, tmp_path, *words), capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith("has its own loss rate, 0.2: leave out loss_rates")
    with pytest.raises(ValueError, match=r"none\.txt cannot be read"):
        settings(text, loss_type="trace('none.txt')", loss_rates=None)
    with pytest.raises(ValueError, match="loss_type = 'lossy' is unknown"):
        settings(text, loss_type="lossy")
