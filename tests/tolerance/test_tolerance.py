"""Test what `python -m lossytp.tolerance` measures, keeps and says."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import lossytp as ltp
from lossytp.parallel.convert import parallelize
from lossytp.study.statistics import Estimate, t_interval
from lossytp.tolerance.__main__ import measure_and_print
from lossytp.tolerance.config import Setup, ToleranceConfig
from lossytp.tolerance.measure import Account, Lossless, Measured, Measurement, Record, Rises, estimate_of, measure
from lossytp.tolerance.packets import Found, Packet
from lossytp.tolerance.report import budget, lines, report_of, table
from lossytp.training.folder import exclusive_run
from lossytp.training.models import load_model, load_tokenizer
from tests.tolerance.planted import MTU_BYTES, RANKS, TOKENS, save_planted
from tests.tolerance.planted import TEXT as PLANTED_TEXT
from tests.training.bos import BOS, with_bos

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of folly. "


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT * 100)
    return file


def settings(text, **values):
    small = {"text": str(text), "block_size": 32, "blocks": 6, "batch_size": 4, "loss_rates": "0.05,0.1"}
    return ToleranceConfig(**{**small, "repairs": "", "max_draws": 2, "precision": 9, **values})


def measured(config):
    return list(measure(Measurement(config), Record(config), lambda name: None))


def test_the_slope_is_that_of_a_direct_measurement(text, tmp_path):
    config = settings(text, blocks=16, min_draws=8, max_draws=8, output_dir=str(tmp_path))
    (found,) = measured(config)
    assert found.found.critical == []
    report, measurement = report_of(found, config), Measurement(config)
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.05), seed=7)
    model = parallelize(measurement.dense, network, tensor_parallel_size=4)
    rises = []
    for number in range(8):
        with network.evaluation(number), torch.no_grad():
            for ids in measurement.messages:
                each = [
                    measurement.dense(input_ids=ids, labels=ids).loss.item(),
                    model(input_ids=ids, labels=ids).loss.item(),
                ]
                rises.append((each[1] - each[0]) / 0.05)
    direct = t_interval(np.array(rises))
    both = math.hypot(report.slope.half_width, direct.half_width)
    assert abs(report.slope.value - direct.value) < both < 0.35 * direct.value, "so half as much again would differ"
    assert report.slope.low > 0.5
    assert list(report.checks) == [0.1]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    (folder / "text.txt").write_text(PLANTED_TEXT)
    config = ToleranceConfig(
        model_name=save_planted(folder / "model"),
        text=str(folder / "text.txt"),
        block_size=TOKENS,
        blocks=16,
        tensor_parallel_size=RANKS,
        mtu_bytes=MTU_BYTES,
        loss_rates="0.05,0.1",
        repairs="hadamard(8),retransmit(1),protect(0.1)",
        min_draws=20,
        max_draws=20,
        output_dir=str(folder / "out"),
    )
    return config, measured(config)[0]


def test_lost_and_delivered_critical_packets_differ_as_the_arithmetic_says(planted):
    config, found = planted
    report = report_of(found, config)
    assert report.critical == (0.75, 1.0)
    assert report.where == ["layer 0's mlp, token 0, rank 3: 12"]
    lost = report.slope_with(0.75)
    assert lost.value == pytest.approx(report.slope.value + 0.75 * report.damage.value)
    assert lost.value > 3 * report.slope.high
    account = Account(Measurement(config), "direct", "reduce")
    as_they_fall = account.rises("zero", 0.05, found.lossless, [], lambda: None)
    direct = estimate_of(as_they_fall.rises, config)
    assert abs(direct.value - 0.05 * lost.value) < math.hypot(direct.half_width, 0.05 * lost.half_width)
    assert direct.low > 0.05 * report.slope.high, "control: the packet costs much"
    alone = account.measurement
    one = Account(Measurement(config.replace(batch_size=1)), "direct", "reduce")
    assert len(one.find(one.lossless()).critical) == 16, "in messages of one sequence, none is spared"
    assert len(alone.messages) == 2


def test_repairs_that_choose_no_packets_have_the_critical_ones_delivered(planted):
    config, found = planted
    delivered = {row.setup.repair: row.delivered for row in found.rows}
    assert delivered == {"zero": True, "hadamard(8)": True, "retransmit(1)": True, "protect(0.1)": False}
    report = report_of(found, config)
    errors = {each.repair: each.predicted.value / report.repaired[0].predicted.value for each in report.repaired}
    assert errors["zero"] == 1
    assert 0.5 < errors["hadamard(8)"] < 1.5
    assert errors["retransmit(1)"] < 0.2
    text = "\n".join([*lines(report, config), *table(report)])
    assert "0.75 a sequence with 8 in a message, 1.00 with one" in text
    assert "* critical packets are lost as the repair lets them" in text


def invented(rises, damage=(), checks=()):
    packet = Packet(1, "mlp", 0, 0, 0, 2, 0, 0, 0, 1000.0, 100.0)
    alone = [packet._replace(sequence=number) for number in range(4)] + [packet._replace(norm=999.0)]
    rows = [
        Rises(Setup("direct", "reduce", "zero", rate), [each], 100.0, True) for rate, each in [(0.01, rises), *checks]
    ]
    critical = [(packet._replace(sequence=number), each) for number, each in enumerate(damage)]
    return Measured(
        "direct",
        "reduce",
        Lossless([3.0] * 4, [packet for packet, _ in critical], alone),
        Found(critical, [], 0),
        rows,
        {"zero": 1.0},
        None,
    )


def test_rates_follow_from_slope_and_damage():
    config = ToleranceConfig(text="stdlib")
    report = report_of(invented([0.05, 0.06, 0.07, 0.06], damage=[9.0, 11.0]), config)
    assert report.slope.value == pytest.approx(6)
    assert report.critical == (0.5, 1.0)
    assert report.slope_with(1.0).value == pytest.approx(16)
    half = math.hypot(report.slope.half_width, report.damage.half_width)
    assert report.slope_with(1.0).half_width == pytest.approx(half)
    assert budget(0.1, Estimate(5.0, 4.0, 8.0)) == Estimate(0.02, 0.0125, 0.025)
    assert budget(0.1, Estimate(1.0, -1.0, 3.0)).high == 1.0, "the slope may be nil"
    values = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert values["rates"]["0.1"]["lost_alone"]["value"] == pytest.approx(0.1 / 16)
    text = "\n".join(lines(report, config))
    assert "1 % of loss costs 0.06 (0.047 to 0.073) nats a token, 6.18 (4.81 to 7.57) % of perplexity" in text
    assert "0.50 a sequence with 8 in a message, 1.00 with one; each costs its sequence 10 (" in text
    assert "layer 1's mlp, token 0, rank 2: 2" in text


def test_a_second_rate_says_whether_rises_lie_on_a_line():
    config, rises = ToleranceConfig(text="stdlib"), [0.05, 0.06, 0.07, 0.06]
    on = report_of(invented(rises, checks=[(0.02, [0.11, 0.13, 0.12, 0.12])]), config)
    off = report_of(invented(rises, checks=[(0.02, [0.21, 0.23, 0.22, 0.22])]), config)
    assert (
        "at 2 % loss, each 1 % costs 0.06 (0.0535 to 0.0665) nats, 1.00 times as much: on the line"
        in lines(on, config)[3]
    )
    assert lines(off, config)[3].endswith("1.83 times as much: off the line")
    assert "no critical packet in 4 sequences, so at most 49% of sequences have one" in "\n".join(lines(on, config))
    assert "beyond the rates measured" not in "\n".join(lines(on, config)), "0.1 nats are at 1.7 %"


def test_intervals_are_over_texts_and_in_bursts_also_over_draws(text):
    rises = [[0.1, 0.2, 0.3], [0.3, 0.4, 0.5]]
    assert estimate_of(rises, settings(text)) == t_interval(np.array([0.2, 0.3, 0.4]))
    bursts = settings(text, loss_type="g-e", mean_burst_packets=8.0)
    assert estimate_of(rises, bursts).half_width > t_interval(np.array([0.2, 0.3, 0.4])).half_width


def test_every_sequence_stands_behind_the_token_that_the_tokenizer_asks_for(text, tmp_path, capsys):
    tokenizer, folder = load_tokenizer("gpt2-nano"), str(tmp_path / "model")
    load_model("gpt2-nano").save_pretrained(folder)
    with_bos(tokenizer).save_pretrained(folder)
    config = settings(text, model_name=folder, loss_rates="0.1", output_dir=str(tmp_path))
    ids = Measurement(config).blocks_NT
    assert ids[:, :1].equal(torch.full((6, 1), tokenizer.convert_tokens_to_ids(BOS)))
    measure_and_print(config)
    assert json.loads((tmp_path / "tolerance.json").read_text())["first_tokens"] == [BOS]
    assert f", each after {BOS}; 4 tensor-parallel ranks, 4 sequences a message" in capsys.readouterr().out


def test_what_rounding_costs_is_told_apart(text, tmp_path):
    config = settings(text, wire_dtype="int4", loss_rates="0.1", output_dir=str(tmp_path))
    (found,) = measured(config)
    assert found.rounding.value > 0.01
    report = report_of(found, config)
    assert "of it, rounding to int4 costs" in lines(report, config)[2]
    plain = measured(config.replace(wire_dtype=None, output_dir=str(tmp_path / "plain")))[0]
    assert plain.rounding is None
    assert report.lossless - report_of(plain, config).lossless == pytest.approx(found.rounding.value, abs=1e-5)


def test_a_stopped_measurement_goes_on_and_more_steps_join(text, tmp_path):
    config = settings(text, output_dir=str(tmp_path))
    (first,) = measured(config)
    file = tmp_path / "tolerance.json"
    record = json.loads(file.read_text())
    assert list(record["steps"]) == [
        f"direct, reduce: {name}"
        for name in ("without losses", "critical packets", "squared errors at 0.1: ", "zero at 0.05", "zero at 0.1")
    ]
    record["steps"]["direct, reduce: zero at 0.05"]["packets"] = 12345.0  # as no measurement gives it
    del record["steps"]["direct, reduce: zero at 0.1"]
    file.write_text(json.dumps(record))
    (again,) = measured(config)
    assert again.rows == [first.rows[0]._replace(packets=12345.0), first.rows[1]]
    (more,) = measured(config.replace(repairs="rescale"))
    assert more.rows[:2] == again.rows
    assert more.rows[2].setup == Setup("direct", "reduce", "rescale", 0.1)


def test_another_model_text_or_setting_is_not_mixed_in(text, tmp_path):
    notes, file = tmp_path / "notes.txt", tmp_path / "out" / "tolerance.json"
    notes.write_text(TEXT * 100)
    config = settings(str(notes), output_dir=str(tmp_path / "out"))
    measured(config)
    with pytest.raises(ValueError, match=r"was measured with mtu_bytes = 1500, not 600; seed = \d+, not 1: give"):
        Record(config.replace(mtu_bytes=600, seed=1))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"first_cross_entropy": 2.0}))
    with pytest.raises(
        ValueError, match=r"of 2.0000 nats without losses, not .* model has changed; give another output"
    ):
        measured(config)
    notes.write_text(notes.read_text().replace("wisdom", "folly", 1))
    with pytest.raises(ValueError, match=r"the text, .* has changed since .*tolerance.json was written: give another"):
        measured(config)
    file.write_text("[]")
    with pytest.raises(ValueError, match="is not a tolerance record"):
        Record(config)


def test_two_measurements_do_not_share_a_folder(text, tmp_path):
    with exclusive_run(str(tmp_path)), pytest.raises(ValueError, match="another run"):
        measure_and_print(settings(text, output_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss_rates": "0.1,x"}, "loss_rates = '0.1,x': 'x' is not a number: give shares, such as 0.01,0.1"),
        ({"loss_rates": "2"}, "loss_rates = 2.0 is not in"),
        ({"loss_rates": "0,0.1"}, "loss_rates = 0 has no slope: give rates above 0"),
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
        ({"max_draws": 2, "min_draws": 3}, "max_draws = 2 is below min_draws = 3: give at least as many"),
        *(({"block_size": 1}, "block_size = 1 is below 2"), ({"blocks": 1}, "blocks = 1 is below 2")),
        ({"batch_size": 0}, "batch_size = 0 is below 1"),
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
    with pytest.raises(ValueError, match=r"blocks = 1000000000 is above \d+: give no more than the text has, of 32 "):
        Measurement(settings(text, blocks=10**9))
    text.with_name("short.txt").write_text(TEXT[:150])
    with pytest.raises(ValueError, match=r"short.txt' has one sequence of 32 tokens, which shows no interval"):
        Measurement(settings(text.with_name("short.txt"), blocks=None))


def test_a_rate_at_which_nothing_is_lost_says_so(text, tmp_path):
    config = settings(text, loss_rates="1e-9", repairs="hadamard(64)", output_dir=str(tmp_path))
    (found,) = measured(config)
    assert found.errors == {}
    report = report_of(found, config)
    assert lines(report, config)[-1].startswith("  no draw lost a packet that shows: give more min_draws")
    assert table(report)[-1].split()[-4:] == ["0.000", "±", "0.000", "+0.0%"]


@pytest.mark.slow
def test_the_command_prints_a_screen_and_refuses_in_one_line(text, tmp_path):
    words = [sys.executable, "-m", "lossytp.tolerance", "--block_size", "32", "--blocks", "4", "--precision", "9"]
    mine = [
        *words,
        "--output_dir",
        str(tmp_path / "out"),
        "--text",
        str(text),
        "--phases",
        "reduce,both",
        "--repairs",
        "stale",
    ]
    outputs = [subprocess.run(mine, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("gpt2-nano on 4 sequences of 32 tokens of")
    assert max(map(len, outputs[0].splitlines())) < 160
    assert "\ndirect, losses on both ways\n" in outputs[0]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tolerance.json", "tolerance_direct_reduce.png", "tolerance_direct_both.svg"} <= names
    wrong = [*words, "--output_dir", str(tmp_path / "other"), "--text", "none/*.txt"]
    result = subprocess.run(wrong, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: no file matches 'none/*.txt': give another pattern")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    file = tmp_path_factory.mktemp("trace") / "losses.txt"
    file.write_text("0010000001" * 30)
    return file


def test_a_loss_type_with_a_rate_of_its_own_takes_none(text, trace, tmp_path):
    kind = f"trace({str(trace)!r})"
    config = settings(text, loss_type=kind, loss_rates=None, output_dir=str(tmp_path), max_draws=4)
    assert config.rates() == [0.2]
    assert config.network(config.setups()[0]).process() == ltp.Trace.from_file(trace)
    assert settings(text, loss_rates=None).rates() == [0.01, 0.03]
    assert settings(text, loss_type="netem('loss random 5%')", loss_rates=None).rates() == pytest.approx([0.05])
    (found,) = measured(config)
    assert len(found.rows[0].rises) == 3, "sequences share a trace's losses, so several draws are needed"
    report = report_of(found, config)
    assert (report.rate, report.checks) == (0.2, {})
    with pytest.raises(ValueError, match=r"has its own loss rate, 0\.2: leave out loss_rates"):
        settings(text, loss_type=kind)
    with pytest.raises(ValueError, match=r"none\.txt cannot be read"):
        settings(text, loss_type="trace('none.txt')", loss_rates=None)
    trace.with_name("none.txt").write_text("0" * 300)
    with pytest.raises(ValueError, match=r"loss_type = .* lost no packet, so it has no slope: give another"):
        settings(text, loss_type=f"trace({str(trace.with_name('none.txt'))!r})", loss_rates=None)
    with pytest.raises(ValueError, match="loss_type = 'lossy' is unknown"):
        settings(text, loss_type="lossy")
