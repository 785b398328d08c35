"""Test files that survive a full disk, the user's own, which are left alone, records, and two runs in one folder."""

import errno
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import lossytp as ltp
from lossytp.training.config import PretrainConfig, TrainConfig
from lossytp.training.files import MANIFEST, others, own_files, refuse, remove, saving, write_atomically
from lossytp.training.folder import LOCK, exclusive_run
from lossytp.training.loop import run
from lossytp.training.record import check_output_folder, environment, read_record, write_record

FULL = OSError(errno.ENOSPC, "No space left on device")


def fails_on_a_full_disk(*_: object, **__: object) -> None:
    raise FULL


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_full_disk_is_one_line_and_other_errors_stay(tmp_path):
    with pytest.raises(ValueError, match=r"^file cannot be written \(No space left.*: make room"), saving(Path("file")):
        raise RuntimeError("of a library") from FULL
    with pytest.raises(ValueError, match=r"\(Permission denied\): fix this"), saving(Path("file")):
        raise PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(FileNotFoundError), saving(Path("file"), reads_too=True):
        raise FileNotFoundError(errno.ENOENT, "none")
    with pytest.raises(RuntimeError), saving(Path("file")):
        raise RuntimeError("of a library")
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


@pytest.mark.parametrize("text", ["{half", "[]", "{}", '{"config": [], "final": {}}', '{"config": {}, "final": 3}'])
def test_a_damaged_record_is_no_result_and_its_file_is_named(tmp_path, text):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(ValueError, match=r"record\.json .*delete it"):
        read_record(tmp_path)


@pytest.mark.parametrize(("kind", "other"), [(TrainConfig, PretrainConfig), (PretrainConfig, TrainConfig)])
def test_the_folder_of_another_kind_of_run_is_refused_in_one_line(tmp_path, kind, other):
    config = other(output_dir=str(tmp_path))
    write_record(tmp_path, {"config": config.result_settings(), "final": {}})
    assert check_output_folder(config) is not None
    name = other.__name__.removesuffix("Config").lower()
    with pytest.raises(ValueError, match=rf"output_dir .*lossytp\.{name}"):
        check_output_folder(kind(output_dir=str(tmp_path)))


def test_nan_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_record(tmp_path, {"final": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_another_configurations_folder_is_refused_and_left_alone(toy, tmp_path):
    done = {"config": {**toy().as_dict(), "max_steps": 7}, "final": {}}
    del done["config"]["output_dir"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_text(json.dumps(done))
    with pytest.raises(ValueError, match="max_steps"):
        check_output_folder(toy())
    assert json.loads((tmp_path / "run" / "record.json").read_text()) == done
    done["config"] |= {"max_steps": toy().optimizer.max_steps, "a_parameter_that_is_gone": 1}
    (tmp_path / "run" / "record.json").write_text(json.dumps(done))
    with pytest.raises(ValueError, match="a_parameter_that_is_gone"):
        check_output_folder(toy())


def test_parameters_that_an_older_record_lacks_have_their_defaults(toy, tmp_path):
    """So it is the record of today's configuration if that keeps those defaults."""
    done = {"config": toy().as_dict(), "final": {}}
    for name in ("output_dir", "gradient_clipping", "data_parallel_size", "implementation"):
        del done["config"][name]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_text(json.dumps(done))
    record = read_record(tmp_path / "run")
    config = record["config"]
    assert sorted(record["newer_settings"]) == ["data_parallel_size", "gradient_clipping", "implementation"]
    assert "output_dir" not in config
    assert TrainConfig.from_dict(config) == TrainConfig.from_dict({**toy().as_dict(), "output_dir": "output"})
    assert check_output_folder(toy())["config"] == config
    with pytest.raises(ValueError, match=r"data_parallel_size.*gradient_clipping"):
        check_output_folder(toy(data_parallel_size=2, gradient_clipping=1.0))


def test_a_processor_is_named_with_its_generation_if_known(monkeypatch):
    one = "processor\t: 0\nvendor_id\t: A\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: A Core: X\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"{one}\n{one.replace('17', '18')}")
    assert environment()["processor"] == "A Core: X, family 25, model 17"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "processor\t: 0\nFeatures\t: fp asimd\n")
    assert environment()["processor"] == platform.processor()


def test_a_finished_run_on_other_data_is_refused(toy, tmp_path, monkeypatch):
    done = run(toy(max_steps=1))
    record = tmp_path / "run" / "record.json"
    changed = {**done, "data": {**done["data"], "sha256": "another"}}
    record.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"the data of toy has changed since .*record\.json was written: put "):
        run(toy(max_steps=1))
    monkeypatch.setattr("lossytp.training.objectives.load_dataset", lambda *_, **__: (_ for _ in ()).throw(ValueError))
    assert run(toy(max_steps=1)) == changed  # the data is not on this machine


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
