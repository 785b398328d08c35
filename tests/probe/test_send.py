from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from lossytp.network.traces import FlowTrace, ProbeTrace, read_trace
from lossytp.probe import send
from tests.probe.measuring.loopback import HOST, served


def test_a_measurement_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with served() as receiver:
        words = ["--port", str(receiver.port), "--packets", "200", "--packet_bytes", "100", "--flows", "2"]
        send.main([HOST, *words, "--rate", "2000", "--output_dir", str(tmp_path / "new")])
    (path,) = (tmp_path / "new").iterdir()
    printed = capsys.readouterr().out
    assert "flow 1, 127.0.0.1 to 127.0.0.1: 200 packets at" in printed
    assert printed.endswith(f"see {path}\n")
    trace = read_trace(path)
    assert [flow.num_packets for flow in trace.flows.values()] == [200, 200]
    assert trace.complete


def test_traces_of_one_second_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send.time, "strftime", lambda pattern: "now")
    for number, name in enumerate(("trace_now.parquet", "trace_now_2.parquet", "trace_now_3.parquet"), 1):
        trace = ProbeTrace(flows={0: FlowTrace(lost=np.zeros(number, np.bool_))})
        path = send.write_new_trace(tmp_path, trace)
        assert path.name == name
        assert read_trace(path).flows[0].num_packets == number


def test_a_trace_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "write_trace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(ValueError, match="No space left on device"):
        send.write_new_trace(tmp_path, ProbeTrace(flows={}))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "10000"], "120 Mbit/s, above max_mbits = 100: send slower, or raise max_mbits"),
        (["--packet_bytes", "43"], "packet_bytes = 43 is below 44"),
        (["--packets", "0"], "packets = 0 is below 1"),
        (["--port", "65536"], "port = 65536 is not below 65536"),
        (["--pakets", "1"], "pakets"),
        (["here", "there"], "there"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_sent(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        send.main(words)
    assert "\n" not in str(caught.value)
