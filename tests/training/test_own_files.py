import json
import os
from pathlib import Path

import pytest

from lossytp.training.files import MARK, claim, claim_files, mark, others, refuse, remove


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_empty_or_marked_folder_is_claimed(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty", "empty"):
        claim(tmp_path / name, ["step-*"])
        assert names(tmp_path / name) == [MARK]
        (tmp_path / name / "step-1").touch()
        assert others(tmp_path / name) == []
        remove(tmp_path / name)
        assert not (tmp_path / name).exists()


def test_a_folder_with_a_users_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis").write_text("x")
    (tmp_path / "step-1").write_text("y")
    with pytest.raises(ValueError, match=r"^.*step-1 \(and 1 more\) is in the way.*: move it elsewhere, or give an"):
        claim(tmp_path, ["step-*"])
    remove(tmp_path)
    assert names(tmp_path) == ["step-1", "thesis"]


def test_a_file_in_place_of_a_folder_is_in_the_way(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(ValueError, match=f"{name} is in the way"):
            refuse(others(tmp_path / name))
        remove(tmp_path / name)
    assert names(tmp_path) == ["file", "link"]


def test_only_own_files_are_removed_and_a_users_files_keep_their_folder(tmp_path):
    folder = tmp_path / "own"
    claim(folder, ["step-*"])
    (folder / "inner").mkdir()
    for name in ("step-1", ".step-1.77", "thesis", "inner/step-2"):
        (folder / name).touch()
    assert [path.name for path in others(folder)] == ["inner", "thesis"]
    remove(folder)
    assert names(folder) == ["inner", "thesis"]
    assert (folder / "inner" / "step-2").exists()


def test_own_files_beside_a_users_files_are_claimed_once_none_is_in_the_way(tmp_path):
    (tmp_path / "thesis").touch()
    claim_files(tmp_path, ["README.md"])
    (tmp_path / "README.md").touch()
    claim_files(tmp_path, ["README.md"])
    (tmp_path / MARK).unlink()
    with pytest.raises(ValueError, match=r"README\.md is in the way"):
        claim_files(tmp_path, ["README.md"])


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"files": 3}'])
def test_a_damaged_mark_is_one_line_and_deletes_nothing(tmp_path, text):
    mark(tmp_path, ["step-*"])
    assert json.loads((tmp_path / MARK).read_text()) == {"files": ["step-*"]}
    (tmp_path / "step-1").touch()
    (tmp_path / MARK).write_text(text)
    for act in (others, remove):
        with pytest.raises(ValueError, match=r"^.*\.lossytp\.json is damaged: delete .*, or give another output_dir$"):
            act(tmp_path)
    assert names(tmp_path) == [MARK, "step-1"]


def test_a_folder_that_another_process_makes_meanwhile_is_not_in_the_way(tmp_path, monkeypatch):
    new, is_dir = tmp_path / "new", Path.is_dir

    def made_right_after(path):
        found = is_dir(path)
        if path == new:
            os.makedirs(new, exist_ok=True)
        return found

    monkeypatch.setattr(Path, "is_dir", made_right_after)
    claim(new, ["*.pt"])
    assert names(new) == [MARK]
