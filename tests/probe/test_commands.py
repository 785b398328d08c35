"""The commands of `python -m lossyprobe`."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from lossyprobe import commands
from lossyprobe.commands import COMMANDS, flows_of, read
from lossyprobe.measure import measure
from lossyprobe.trace_file import FlowTrace, ProbeTrace, read_trace
from lossyprobe.wire import Plan
from lossytp.network import GilbertElliott, Trace, loss_process_named
from tests.ports import held_port
from tests.probe.loopback import HOST, served
from tests.probe.traces import trace_file


def probe(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "lossyprobe", *words], capture_output=True, text=True, check=False, timeout=60
    )


def test_help_lists_the_commands_and_an_unknown_one_is_refused_in_one_line() -> None:
    done = probe()
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)
    done = probe("sned")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: command = 'sned' is unknown: choose one of {', '.join(COMMANDS)}\n"


def test_a_measurement_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("new", "mine"):
        with held_port() as port, pytest.raises(ValueError, match="receive"):
            commands.send([HOST, "--port", str(port), "--output_dir", str(tmp_path / name)])
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_a_measurement_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with served() as receiver:
        words = ["--port", str(receiver.port), "--packets", "200", "--packet_bytes", "100", "--flows", "2"]
        commands.send([HOST, *words, "--rate", "2000", "--output_dir", str(tmp_path / "new")])
    (path,) = (tmp_path / "new").iterdir()
    printed = capsys.readouterr().out
    assert "flow 1, 127.0.0.1 to 127.0.0.1: 200 packets at" in printed
    assert printed.endswith(f"see {path}\n")
    trace = read_trace(path)
    assert [flow.num_packets for flow in trace.flows.values()] == [200, 200]
    assert trace.complete


def test_traces_of_one_second_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands.time, "strftime", lambda pattern: "now")
    for number, name in enumerate(("trace_now.parquet", "trace_now_2.parquet", "trace_now_3.parquet"), 1):
        trace = ProbeTrace(flows={0: FlowTrace(lost=np.zeros(number, np.bool_))})
        path = commands.write_new_trace(tmp_path, trace)
        assert path.name == name
        assert read_trace(path).flows[0].num_packets == number


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "10000"], "120 Mbit/s, above max_mbits = 100: send slower, or raise max_mbits"),
        *((["--packet_bytes", "43"], "packet_bytes = 43 is below 44"), (["--packets", "0"], "packets = 0 is below 1")),
        *((["--port", "65536"], "port = 65536 is not below 65536"), (["--pakets", "1"], "pakets")),
        (["here", "there"], "there"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_sent(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        commands.send(words)
    assert "\n" not in str(caught.value)


def test_what_came_in_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    waits = threading.Event()
    monkeypatch.setattr(commands, "say", lambda line: waits.set())
    with held_port() as port:
        words = ["--port", str(port), "--measurements", "1", "--output_dir", str(tmp_path)]
        thread = threading.Thread(target=commands.receive, args=(words,), daemon=True)
        thread.start()
        assert waits.wait(20)
        measure(Plan(packets=100, packet_bytes=100), HOST, port)
        thread.join(20)
    (path,) = tmp_path.iterdir()
    assert read_trace(path).flows[0].num_packets == 100
    printed = capsys.readouterr().out
    assert "flow 0, 127.0.0.1 to 127.0.0.1: 100 packets at" in printed
    assert printed.endswith(f"see {path}\n")


TRUTH = GilbertElliott(p_good_to_bad=0.01, p_bad_to_good=0.1, loss_bad=0.5, loss_good=0.002)


def simulated(length, seed):
    return np.isin(np.arange(length), TRUTH.losses((seed, "test")).take(length))


def test_prints_the_chosen_fit_as_netem_and_as_a_loss_type(tmp_path, capsys):
    path = trace_file(tmp_path, simulated(20_000, 1), simulated(20_000, 2))
    commands.fit_trace([str(path)])
    lines = capsys.readouterr().out
    assert "chosen: Gilbert-Elliott" in lines
    shown = float(re.search(r"p_bad_to_good +([\d.]+)", lines)[1])
    assert shown == pytest.approx(0.1, rel=0.2)
    netem = re.search(r"tc qdisc add dev DEVICE root netem (.*)", lines)[1]
    by_name, replayed = (loss_process_named(text) for text in re.findall('--loss_type "(.*)"', lines))
    assert by_name.to_netem() == netem
    assert by_name.loss_rate == pytest.approx(TRUTH.loss_rate, rel=0.1)
    assert isinstance(replayed, Trace)
    assert "does not describe" not in lines
    assert "at the same time" not in lines


def test_says_when_flows_lose_together_and_when_no_family_describes_the_trace(tmp_path, capsys):
    lost = simulated(5_000, 1)
    commands.fit_trace([str(trace_file(tmp_path, lost, lost))])
    assert "flows lose packets at the same time (correlation 1.00)" in capsys.readouterr().out
    commands.fit_trace([str(trace_file(tmp_path, ([0] * 93 + [1] * 7) * 100))])
    assert "the fit does not describe the trace: replay the trace itself" in capsys.readouterr().out


@pytest.mark.parametrize("lost", [[0, 0, 0], [1, 1, 1], [0, 1, 0]])
def test_small_and_unvaried_traces_are_fitted(tmp_path, capsys, lost):
    commands.fit_trace([str(trace_file(tmp_path, lost))])
    assert "chosen: Bernoulli; the 95 % intervals, by Clopper and Pearson, assume" in capsys.readouterr().out


def test_flows_are_independent_and_empty_ones_left_out(tmp_path):
    flows = flows_of(read(trace_file(tmp_path, [0, 1], [], [1])))
    assert [(flow.lost.tolist(), flow.num_packets) for flow in flows] == [([1], 2), ([0], 1)]


def test_no_packet_no_trace_and_no_word_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"trace\.parquet holds no packets: measure again$"):
        commands.fit_trace([str(trace_file(tmp_path, []))])
    (tmp_path / "a.txt").write_text("01")
    with pytest.raises(ValueError, match=r"is not a \.parquet file: convert it with python -m lossyprobe import"):
        commands.fit_trace([str(tmp_path / "a.txt")])
    with pytest.raises(ValueError, match="No such file"):
        commands.fit_trace([str(tmp_path / "b.parquet")])
    with pytest.raises(ValueError, match=r"^trace is missing: give it$"):
        commands.fit_trace([])


@pytest.mark.slow
def test_reports_from_the_losses_to_the_study(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times, it was the age of wisdom. " * 40)
    path = trace_file(tmp_path, [0] * 9 + [1], ([0] * 18 + [1, 1]) * 50)
    words = ["--text", str(text), "--block_size", "32", "--blocks", "2", "--repairs", "rescale"]
    commands.report([str(path), *words, "--output_dir", str(tmp_path / "out")])
    parts = [part.split("\n") for part in capsys.readouterr().out.split("\n\n")]
    titles = [part[0] for part in parts if part[0].isupper()]
    assert [title.split(",")[0] for title in titles] == ["MEASURED", "FIT", "YOUR MODEL OVER THIS TRACE", "THE STUDY"]
    record = json.loads((tmp_path / "out" / "tolerance.json").read_text())
    assert record["config"]["loss_type"] == f"trace('{path}')"
    assert record["reports"][0]["rate"] == pytest.approx(101 / 1010)
    study = next(part for part in parts if part[0] == "THE STUDY")
    assert "A loss rate of 0.1 in bursts of 1.98 packets" in study[1]
    assert any("hadamard(64)" in line and "?" in line for line in study)


@pytest.mark.parametrize(
    ("lost", "measured", "last"),
    [(0, "lost 0: 0.000%", "No packets were lost"), (1, "lost 3: 100.000%", "Every packet was lost")],
)
def test_nothing_or_everything_lost_ends_early(tmp_path, capsys, lost, measured, last):
    commands.report([str(trace_file(tmp_path, [lost] * 3))])
    shown = capsys.readouterr().out
    assert measured in shown
    assert shown.endswith(f"{last}, so there is no cost to estimate.\n")


def test_many_flows_are_summed_up(tmp_path):
    flows = {number: FlowTrace(lost=np.array([False, number == 0])) for number in range(20)}
    first, second, early, slow = commands.measured_lines(ProbeTrace(flows=flows, complete=False, own_losses=1))
    assert first == "20 flows, 40 packets"
    assert second.startswith("lost 1: 2.500%")
    assert ("ended early" in early, "too slow" in slow) == (True, True)
    together = {number: FlowTrace(lost=np.isin(np.arange(2000), np.arange(0, 2000, 37))) for number in range(9)}
    assert [line for line in commands.measured_lines(ProbeTrace(flows=together)) if "interval is too narrow" in line]


def test_wrong_traces_and_values_are_refused_before_anything_is_measured(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="holds no packets"):
        commands.report([str(trace_file(tmp_path, []))])
    with pytest.raises(ValueError, match="phases"):
        commands.report([str(trace_file(tmp_path, [0, 1])), "--phases", "neither"])
    monkeypatch.setattr(commands, "fit_all", None)  # fails if it fits
    with pytest.raises(ValueError, match="give a study's results"):
        commands.report([str(trace_file(tmp_path, [0, 1])), "--results_dir", str(tmp_path)])
    (tmp_path / "experiment_summary.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has no runs of 01_tolerance: give a study's results"):
        commands.report([str(trace_file(tmp_path, [0, 1])), "--results_dir", str(tmp_path)])


def test_writes_a_trace_and_says_what_is_in_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses.csv").write_text("flow,link,lost\n0,up,1\n0,up,0\n1,up,0\n1,down,1\n")
    commands.import_losses(["losses.csv", "--where", "link=up"])
    assert capsys.readouterr().out == (
        "imported from losses.csv, column lost with 1 for a loss: 2 flows, 3 packets, 1 lost; see losses.parquet\n"
    )
    assert [flow.lost.tolist() for flow in read_trace(tmp_path / "losses.parquet").flows.values()] == [
        [True, False],
        [False],
    ]


def test_more_than_half_lost_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.csv").write_text("state\n1\n1\n0\n")
    commands.import_losses(["log.csv"])
    assert "WARNING: 66.7%" in capsys.readouterr().out
    commands.import_losses(["log.csv", "--ones", "arrived"])
    assert "WARNING" not in capsys.readouterr().out
    assert read_trace(tmp_path / "log.parquet").all_lost().tolist() == [False, False, True]


@pytest.mark.parametrize("words", [["a.parquet"], ["a.csv", "--output", ""], ["a.csv"]])
def test_the_output_replaces_no_input_and_has_a_name(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").write_text("mine")
    (tmp_path / "a.csv").write_text("lost\n0\n1\n")
    with pytest.raises(ValueError, match="output = "):
        commands.import_losses(words)
    assert (tmp_path / "a.parquet").read_text() == "mine"
