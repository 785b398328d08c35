import errno
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lossytp.training import logs
from lossytp.training.files import MARK, crc32_of, first_line, os_error, saving, sync
from lossytp.training.loop import run

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


def test_a_checksum_notices_a_flipped_bit_and_a_cut_end(tmp_path):
    file = tmp_path / "state"
    whole = bytes(range(256)) * 8192  # more than is read at once
    file.write_bytes(whole)
    sync(tmp_path)
    assert crc32_of(file) == zlib.crc32(whole)
    for place in (0, 2**20 - 1, 2**20, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        assert crc32_of(file) != zlib.crc32(whole)
    file.write_bytes(whole[:-1])
    assert crc32_of(file) != zlib.crc32(whole)
    file.unlink()
    with pytest.raises(OSError, match="No such file"):
        crc32_of(file)


@pytest.mark.parametrize(
    ("what", "values", "said"),
    [
        ("torch.save", {"checkpoint_steps": 1}, "step-1"),
        ("transformers.PreTrainedModel.save_pretrained", {"save_model": True}, "best"),
        ("tensorboard.summary.writer.record_writer.RecordWriter.write", {"tensorboard": True}, "tensorboard"),
        ("lossytp.training.files.os.replace", {"max_steps": 1}, r"record\.json"),
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
