"""Test two runs at once in one folder: the second is refused until the first ends, however it ends."""

import subprocess
import sys

import pytest

import lossytp as ltp
from lossytp.training.folder import LOCK, exclusive_run

HOLD = """
import sys, lossytp as ltp
from lossytp.training.folder import exclusive_run
with exclusive_run(sys.argv[1], ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.0))):
    print("in", flush=True)
    sys.stdin.read()
"""
NETWORK = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.0))


@pytest.mark.slow
def test_another_process_is_refused_until_this_one_is_killed(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "in\n"
        monkeypatch.chdir(tmp_path)
        for name in (str(folder), "run", f"{folder}/../run"):
            with pytest.raises(ValueError, match=r"output_dir = .*in use by another run"), exclusive_run(name):
                pass
        with exclusive_run(str(tmp_path / "elsewhere"), NETWORK):
            pass
        other.kill()
        other.wait()
    assert [path.name for path in folder.iterdir()] == [LOCK], "a killed run leaves its lock"
    with exclusive_run(str(folder), NETWORK):
        with pytest.raises(ValueError, match="in use by another run"), exclusive_run(str(folder)):
            pass
        assert [path.name for path in folder.iterdir()] == [LOCK]
    with pytest.raises(RuntimeError, match="on purpose"), exclusive_run(str(folder), NETWORK):
        raise RuntimeError("on purpose")
    assert list(folder.iterdir()) == [], "a failed run does not"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="output_dir"), exclusive_run(str(tmp_path / "file" / "run")):
        pass
