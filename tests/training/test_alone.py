"""Two runs at once in one folder: the second is refused, until the first has ended, however it ends."""

import subprocess
import sys

import pytest

import lossytp as ltp
from lossytp.training.alone import alone_in

HOLD = """
import sys, lossytp as ltp
from lossytp.training.alone import alone_in
with alone_in(sys.argv[1], ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.0))):
    print("in", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def network():
    return ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.0))


def test_another_process_is_refused_until_this_one_is_killed(tmp_path, network, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "in\n"
        monkeypatch.chdir(tmp_path)
        for name in (str(folder), "run"):
            with pytest.raises(ValueError, match=r"output_dir = .*run' is another run's"), alone_in(name, network):
                pass
        with alone_in(str(tmp_path / "elsewhere"), network):
            pass
        other.kill()
        other.wait()
    with alone_in(str(folder), network):
        pass
    assert not folder.exists()


def test_a_run_that_fails_lets_go(tmp_path, network, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="on purpose"), alone_in(str(tmp_path), network):
        raise RuntimeError("on purpose")
    with alone_in(f"{tmp_path}/../{tmp_path.name}", network):
        pass
