"""Test that what takes long is said."""

import time

import pytest

from lossytp.training import progress
from lossytp.training.progress import waiting


@pytest.mark.parametrize(("rank", "seconds", "told"), [(0, 0.3, True), (1, 0.3, False), (0, 0.0, False)])
def test_one_process_says_what_takes_long_until_it_ends(monkeypatch, capsys, rank, seconds, told):
    monkeypatch.setattr(progress, "SECONDS_OF_SILENCE", 0.05)
    monkeypatch.setattr(progress, "rank_and_world_size", lambda: (rank, 2))
    with waiting("reading"):
        time.sleep(seconds)
    lines = capsys.readouterr().err.splitlines()
    assert bool(lines) == told
    assert all(line.startswith("reading: ") for line in lines)
    time.sleep(0.15)
    assert capsys.readouterr().err == ""


def test_nothing_is_silent_for_more_than_five_seconds():
    assert max(progress.SECONDS_OF_SILENCE, progress.SECONDS_BETWEEN_LINES) <= 5
