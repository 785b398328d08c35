"""Test files that survive a full disk, and that the user's own are neither overwritten nor deleted."""

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lossytp.training.files import (
    MANIFEST,
    first_line,
    others,
    own_files,
    refuse,
    remove,
    saving,
    write_atomically,
    write_manifest,
)
from lossytp.training.loop import run

FULL = OSError(errno.ENOSPC, "No space left on device")


def fails_on_a_full_disk(*_: object, **__: object) -> None:
    raise FULL


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_full_disk_is_one_line_and_other_errors_stay():
    with pytest.raises(ValueError, match=r"^file cannot be written \(No space left.*: make room"), saving(Path("file")):
        raise RuntimeError("of a library") from FULL
    with pytest.raises(ValueError, match=r"\(Permission denied\): fix this"), saving(Path("file")):
        raise PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(FileNotFoundError), saving(Path("file"), reads_too=True):
        raise FileNotFoundError(errno.ENOENT, "none")
    with pytest.raises(RuntimeError), saving(Path("file")):
        raise RuntimeError("of a library")


def test_a_rust_librarys_error_is_the_operating_systems(tmp_path):
    file = tmp_path / "nowhere" / "file"
    with pytest.raises(ValueError, match=r"^.*file cannot be written \(.*os error 2\)"), saving(file):
        save_file({"a": torch.zeros(2)}, file)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "file"
    write_atomically(file, "old")
    monkeypatch.setattr("os.replace", fails_on_a_full_disk)
    with pytest.raises(ValueError, match=r"file cannot be written"):
        write_atomically(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("what", "values", "said"),
    [
        ("torch.save", {"checkpoint_steps": 1}, "step-1"),
        ("transformers.PreTrainedModel.save_pretrained", {"save_model": True}, "best"),
        ("tensorboard.summary.writer.record_writer.RecordWriter.write", {"tensorboard": True}, "tensorboard"),
        ("lossytp.training.files.os.replace", {"max_steps": 1}, r"record\.json"),
        ("lossytp.training.batches.pickle.dumps", {}, r"toy-train-\w+"),
    ],
)
def test_a_full_disk_is_one_line_whatever_is_written(toy, tmp_path, monkeypatch, what, values, said):
    monkeypatch.setattr(what, fails_on_a_full_disk)
    with pytest.raises(ValueError, match=rf"^.*{said} cannot be written \(No space left on device\)") as error:
        run(toy(**{"max_steps": 2, **values}))
    assert "\n" not in str(error.value)
    left = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert not {name for name in left if name != MANIFEST and "tfevents" not in name}


def test_the_first_line_of_an_error_has_words():
    """Some errors begin with an empty line."""
    assert first_line(ImportError("\nwhy\nand how")) == "ImportError: why"
    assert first_line(KeyError()) == "KeyError: "
    assert first_line(TypeError("of field 'n_embd':\n    got str\nmore")) == "TypeError: of field 'n_embd': got str"


def test_a_new_empty_or_marked_folder_is_claimed(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty", "empty"):
        own_files(tmp_path / name, ["own-*"])
        assert names(tmp_path / name) == [MANIFEST]
        (tmp_path / name / "own-1").touch()
        assert others(tmp_path / name) == []
        remove(tmp_path / name)
        assert not (tmp_path / name).exists()


def test_a_users_files_in_a_folder_or_in_its_place_are_refused_and_left_alone(tmp_path):
    for name in ("thesis", "own-1"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is in the way"):
        own_files(tmp_path, ["own-*"])
    for name in ("own-1", "link"):
        with pytest.raises(ValueError, match=f"{name} is in the way"):
            refuse(others(tmp_path / name))
        remove(tmp_path / name)
    remove(tmp_path)
    assert names(tmp_path) == ["link", "own-1", "thesis"]


def test_only_own_files_are_removed_and_a_users_files_keep_their_folder(tmp_path):
    folder = tmp_path / "own"
    own_files(folder, ["own-*"])
    (folder / "inner").mkdir()
    for name in ("own-1", "thesis", "inner/own-2"):
        (folder / name).touch()
    assert [path.name for path in others(folder)] == ["inner", "thesis"]
    remove(folder)
    assert names(folder) == ["inner", "thesis"]
    assert names(folder / "inner") == ["own-2"]


def test_own_files_among_a_users_files_are_claimed_once_none_is_in_the_way(tmp_path):
    (tmp_path / "thesis").touch()
    own_files(tmp_path, ["README.md"])
    (tmp_path / "README.md").touch()
    own_files(tmp_path, ["README.md"])
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"README\.md is in the way"):
        own_files(tmp_path, ["README.md"])


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"files": 3}'])
def test_a_damaged_mark_is_one_line_and_deletes_nothing(tmp_path, text):
    write_manifest(tmp_path, ["own-*"])
    assert json.loads((tmp_path / MANIFEST).read_text()) == {"files": ["own-*"]}
    (tmp_path / "own-1").touch()
    (tmp_path / MANIFEST).write_text(text)
    for act in (others, remove):
        with pytest.raises(ValueError, match=r"\.lossytp\.json is damaged"):
            act(tmp_path)
    assert names(tmp_path) == [MANIFEST, "own-1"]
