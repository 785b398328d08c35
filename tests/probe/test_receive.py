import threading
from pathlib import Path

import pytest

from lossytp.network.traces import read_trace
from lossytp.probe import receive
from lossytp.probe.datagrams import udp_socket
from lossytp.probe.measure import measure
from lossytp.probe.wire import Plan
from tests.ports import held_port
from tests.probe.measuring.loopback import HOST


def test_what_came_in_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    waits = threading.Event()
    monkeypatch.setattr(receive, "_say", lambda line: waits.set())
    with held_port() as port:
        words = ["--port", str(port), "--measurements", "1", "--output_dir", str(tmp_path)]
        thread = threading.Thread(target=receive.main, args=(words,), daemon=True)
        thread.start()
        assert waits.wait(20)
        measure(Plan(packets=100, packet_bytes=100), HOST, port)
        thread.join(20)
    (path,) = tmp_path.iterdir()
    assert read_trace(path).flows[0].num_packets == 100
    printed = capsys.readouterr().out
    assert "flow 0, 127.0.0.1 to 127.0.0.1: 100 packets at" in printed
    assert printed.endswith(f"see {path}\n")


def test_a_port_in_use_is_named() -> None:
    with udp_socket(HOST) as held:
        port = held.getsockname()[1]
        with pytest.raises(ValueError, match=f"port = {port} is in use on {HOST}: give another, or end the program"):
            receive.main(["--port", str(port)])
