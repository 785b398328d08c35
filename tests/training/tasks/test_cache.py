import pytest

from lossytp.training.rows import cache_folder, cached


def test_a_folder_is_built_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    times = []

    def build(folder):
        times.append((folder / "numbers").write_text("123"))

    assert cached("name", "key", build) == cached("name", "key", build) != cached("name", "other", build)
    assert (cached("name", "key", build) / "numbers").read_text() == "123"
    assert len(times) == 2


def test_a_build_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match="on purpose"):
        cached("other", "key", lambda _: (_ for _ in ()).throw(RuntimeError("on purpose")))
    assert [path for path in (tmp_path / "lossytp").iterdir() if path.is_dir()] == []


def test_a_cache_that_cannot_be_written_is_named(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        cache_folder()
