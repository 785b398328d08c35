"""The command that says what a measured network would cost."""

import json

import numpy as np
import pytest

from lossytp.network.traces import FlowTrace, ProbeTrace
from lossytp.probe import report
from tests.probe.traces import trace_file


@pytest.mark.slow
def test_reports_from_the_losses_to_the_study(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times, it was the age of wisdom. " * 40)
    path = trace_file(tmp_path, [0] * 9 + [1], ([0] * 18 + [1, 1]) * 50)
    words = ["--text", str(text), "--block_size", "32", "--blocks", "2", "--repairs", "rescale"]
    report.main([str(path), *words, "--output_dir", str(tmp_path / "out")])
    parts = [part.split("\n") for part in capsys.readouterr().out.split("\n\n")]
    titles = [part[0] for part in parts if part[0].isupper()]
    assert [title.split(",")[0] for title in titles] == ["MEASURED", "FIT", "YOUR MODEL OVER THIS TRACE", "THE STUDY"]
    record = json.loads((tmp_path / "out" / "tolerance.json").read_text())
    assert record["config"]["loss_type"] == f"trace('{path}')"
    assert record["rows"][0]["loss_rate"] == pytest.approx(101 / 1010)
    study = next(part for part in parts if part[0] == "THE STUDY")
    assert "A loss rate of 0.1 in bursts of 1.98 packets" in study[1]
    assert any("hadamard(64)" in line and "?" in line for line in study)


@pytest.mark.parametrize(
    ("lost", "measured", "last"),
    [(0, "lost 0: 0.000%", "No packets were lost"), (1, "lost 3: 100.000%", "Every packet was lost")],
)
def test_nothing_or_everything_lost_ends_early(tmp_path, capsys, lost, measured, last):
    report.main([str(trace_file(tmp_path, [lost] * 3))])
    shown = capsys.readouterr().out
    assert measured in shown
    assert shown.endswith(f"{last}, so there is no cost to estimate.\n")


def test_a_flow_without_packets_is_left_out(tmp_path):
    lines = list(report.measured_lines(report.read(trace_file(tmp_path, [0, 1], [], [1]))))
    assert [line.partition(",")[0] for line in lines if line.startswith("flow")] == ["flow 0", "flow 2"]


def test_many_flows_are_summed_up(tmp_path):
    flows = {number: FlowTrace(lost=np.array([False, number == 0])) for number in range(20)}
    first, second, early, slow = report.measured_lines(ProbeTrace(flows=flows, complete=False, own_losses=1))
    assert first == "20 flows, 40 packets"
    assert second.startswith("lost 1: 2.500%")
    assert ("ended early" in early, "too slow" in slow) == (True, True)


def test_results_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ValueError, match="give a study's results"):
        list(report.study_lines(str(tmp_path), 0.1, 1.1))


def test_wrong_traces_and_values_are_refused_before_anything_is_measured(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="holds no packets"):
        report.main([str(trace_file(tmp_path, []))])
    with pytest.raises(ValueError, match="phases"):
        report.main([str(trace_file(tmp_path, [0, 1])), "--phases", "neither"])
    monkeypatch.setattr(report, "fit_all", None)  # fails if it fits
    with pytest.raises(ValueError, match="give a study's results"):
        report.main([str(trace_file(tmp_path, [0, 1])), "--results_dir", str(tmp_path)])
