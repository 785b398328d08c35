"""Test two runs at once in one folder: the second is refused until the first ends, however it ends."""

import errno
import fcntl
import subprocess
import sys

import pytest

import lossytp as ltp
from lossytp.training.loop import LOCK, exclusive_run

HOLD = """
import sys, lossytp as ltp
from lossytp.training.loop import exclusive_run
with exclusive_run(sys.argv[1], ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.0))):
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
            with (
                pytest.raises(ValueError, match=r"output_dir = .*run' is in use by another run"),
                exclusive_run(name, network),
            ):
                pass
        with exclusive_run(str(tmp_path / "elsewhere"), network):
            pass
        other.kill()
        other.wait()
    with exclusive_run(str(folder), network):
        pass
    assert list(folder.iterdir()) == []


def test_the_cache_folder_makes_no_difference(tmp_path, network, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with exclusive_run(str(tmp_path / "run"), network):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
        with pytest.raises(ValueError, match="is in use by another run"), exclusive_run(str(tmp_path / "run"), network):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_lock_deleted_just_before_it_is_taken_is_made_again(tmp_path, network, monkeypatch):
    """Otherwise two runs would lock two files of one name."""
    lock, flock = tmp_path / LOCK, fcntl.flock

    def delete_first(handle, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        lock.unlink()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    with exclusive_run(str(tmp_path), network):
        assert lock.exists()
        with pytest.raises(ValueError, match="is in use by another run"), exclusive_run(str(tmp_path), network):
            pass


def test_a_file_system_without_locks_is_reported_and_used(tmp_path, network, monkeypatch, capsys):
    def refuse(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with exclusive_run(str(tmp_path), network):
        assert capsys.readouterr().err.endswith("without locks (No locks available): do not start a second run in it\n")
    assert list(tmp_path.iterdir()) == []


def test_partial_files_of_killed_runs_are_deleted_and_nothing_else(tmp_path, network):
    parts = {".record.json.12", ".probe.4", ".wandb_id.5"}
    kept = {".notes.json.12", ".record.json.12.txt", "record.json", ".record.json.", ".record.json"}
    for name in parts | kept:
        (tmp_path / name).touch()
    with exclusive_run(str(tmp_path), network):
        assert {path.name for path in tmp_path.iterdir()} == kept | {LOCK}


def test_a_failed_run_releases_the_lock(tmp_path, network, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="on purpose"), exclusive_run(str(tmp_path), network):
        raise RuntimeError("on purpose")
    with exclusive_run(f"{tmp_path}/../{tmp_path.name}", network):
        pass
