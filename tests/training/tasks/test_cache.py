import os
import tempfile
from pathlib import Path

import pytest

from lossytp.training.rows import cache_folder, cached


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Return a function that asks for a cached folder, and a list that grows with each build."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    times = []

    def build(folder: Path) -> None:
        times.append(1)
        (folder / "numbers").write_text("123")
        (folder / "words").write_text("abc")

    return lambda: cached("name", "key", build), times


@pytest.mark.parametrize("damage", ["flipped", "cut", "lost", "added", "no sums", "half sums"])
def test_a_damaged_folder_is_rebuilt(built, damage):
    ask, times = built
    folder = ask()
    assert ask() == folder
    assert len(times) == 1
    if damage == "lost":
        (folder / "words").unlink()
    elif damage == "no sums":
        (folder / "SHA256SUMS.json").unlink()
    else:
        name, text = {
            "flipped": ("numbers", "124"),
            "cut": ("numbers", ""),
            "added": ("more", "x"),
            "half sums": ("SHA256SUMS.json", '{"numbers": "'),
        }[damage]
        (folder / name).write_text(text)
    assert ask() == folder
    assert len(times) == 2
    assert ((folder / "numbers").read_text(), (folder / "words").read_text()) == ("123", "abc")
    ask()
    assert len(times) == 2


def test_a_build_that_fails_leaves_nothing(built, tmp_path):
    with pytest.raises(RuntimeError, match="on purpose"):
        cached("other", "key", lambda _: (_ for _ in ()).throw(RuntimeError("on purpose")))
    assert [path for path in (tmp_path / "lossytp").iterdir() if path.is_dir()] == []


@pytest.fixture
def no_home(tmp_path, monkeypatch):
    """Return the folder below the temporary folder that is used if home cannot be written."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"lossytp-{os.getuid()}"


def test_without_a_home_the_cache_is_a_private_folder(no_home):
    for _ in range(2):
        assert cache_folder() == no_home
        assert no_home.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("whose", ["others may write", "link", "owner", "file"])
def test_a_folder_that_others_could_have_made_is_refused(no_home, tmp_path, monkeypatch, whose):
    if whose == "link":
        (tmp_path / "mine").mkdir(mode=0o700)
        no_home.symlink_to(tmp_path / "mine")
    elif whose == "file":
        no_home.touch()
    else:
        no_home.mkdir()
        no_home.chmod(0o777 if whose == "others may write" else 0o700)
    if whose == "owner":
        uid = os.getuid()
        other = tmp_path / f"lossytp-{uid + 1}"
        no_home.rename(other)
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(ValueError, match=r"lossytp-\d+ (can be written by other users: set XDG|cannot be written)"):
        cache_folder()
