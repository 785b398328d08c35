import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lossytp.training import logs
from lossytp.training.files import check_whole, first_line, os_error, saving, sync
from lossytp.training.loop import run
from lossytp.training.own_files import MARK

FULL = OSError(errno.ENOSPC, "No space left on device")


def fails_on_a_full_disk(*_: object, **__: object) -> None:
    raise FULL


def test_a_full_disk_is_one_line_and_other_errors_stay():
    with (
        pytest.raises(ValueError, match=r"^file cannot be written \(No space left.*: make room, "),
        saving(Path("file")),
    ):
        raise RuntimeError("of a library") from FULL
    with pytest.raises(ValueError, match=r"\(Permission denied\): fix this, then start"), saving(Path("file")):
        raise PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(FileNotFoundError), saving(Path("file"), reads_too=True):
        raise FileNotFoundError(errno.ENOENT, "none")
    with pytest.raises(RuntimeError), saving(Path("file")):
        raise RuntimeError("of a library")


def test_a_rust_librarys_error_is_the_operating_systems():
    with pytest.raises(Exception, match="os error") as raised:
        save_file({"a": torch.zeros(2)}, "/proc/nowhere/file")
    cause = os_error(raised.value)
    assert cause is not None
    assert cause.errno == errno.ENOENT


def test_a_bit_flipped_anywhere_is_noticed_or_changes_nothing(tmp_path):
    file = tmp_path / "state.pt"
    state = {"a": torch.arange(50.0), "b": [1, "text"]}
    torch.save(state, file)
    sync(tmp_path)
    check_whole(file)
    whole, noticed = file.read_bytes(), 0
    for place in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        try:
            check_whole(file)
            read = torch.load(file)
        except (ValueError, RuntimeError):
            noticed += 1
        else:
            assert torch.equal(read["a"], state["a"])
            assert read["b"] == state["b"]
    assert noticed > len(whole) / 6


@pytest.mark.parametrize(
    ("what", "values", "said"),
    [
        ("torch.save", {"checkpoint_steps": 1}, r"step-1\.rank-0\.pt"),
        ("transformers.PreTrainedModel.save_pretrained", {"save_model": True}, "best"),
        ("tensorboard.summary.writer.record_writer.RecordWriter.write", {"tensorboard": True}, "tensorboard"),
        ("lossytp.training.record.os.replace", {"max_steps": 1}, r"record\.json"),
        ("numpy.savez", {}, r"toy-train-\w+"),
    ],
)
def test_a_full_disk_is_one_line_on_stderr_whatever_is_written(toy, tmp_path, monkeypatch, capfd, what, values, said):
    monkeypatch.setattr(what, fails_on_a_full_disk)
    with pytest.raises(
        ValueError, match=rf"^.*{said} cannot be written \(No space left on device\): make room"
    ) as error:
        run(toy(**{"max_steps": 2, **values}))
    assert "\n" not in str(error.value)
    assert "Traceback" not in capfd.readouterr().err
    left = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert not {name for name in left if name not in (MARK,) and "tfevents" not in name}


def test_tracebacks_of_threads_are_shown_again_afterwards(toy, tmp_path):
    before = logs.threading.excepthook
    written = logs.Logs(toy(tensorboard=True))
    assert logs.threading.excepthook is not before
    written.close()
    assert logs.threading.excepthook is before


def test_the_first_line_of_an_error_has_words():
    """Some errors begin with an empty line."""
    assert first_line(ImportError("\nwhy\nand how")) == "ImportError: why"
    assert first_line(KeyError()) == "KeyError: "
    assert first_line(TypeError("of field 'n_embd':\n    got str\nmore")) == "TypeError: of field 'n_embd': got str"
