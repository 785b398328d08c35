import json
import platform
from pathlib import Path

import pytest
import torch

from lossytp.training.config import PretrainConfig, TrainConfig
from lossytp.training.record import check_output_folder, environment, read_record, write_record


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


def test_no_record_is_none_and_a_written_one_is_read(tmp_path):
    assert read_record(tmp_path) is None
    write_record(tmp_path, {"config": {}, "final": {"accuracy": 0.5}})
    assert read_record(tmp_path)["final"] == {"accuracy": 0.5}
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


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


def test_values_of_an_older_record_are_kept(toy, tmp_path):
    write_record(tmp_path, {"config": {"max_steps": 7, "of_old": 1}, "final": {}})
    config = read_record(tmp_path)["config"]
    assert (config["max_steps"], config["of_old"], config["seed"]) == (7, 1, TrainConfig().network.seed)
    assert list(config)[:2] == ["max_steps", "of_old"], "in the file's order, which tables show"


def test_a_processor_is_named_with_its_generation_if_known(monkeypatch):
    one = "processor\t: 0\nvendor_id\t: A\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: A Core: X\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"{one}\n{one.replace('17', '18')}")
    assert environment()["processor"] == "A Core: X, family 25, model 17"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "processor\t: 0\nFeatures\t: fp asimd\n")
    assert environment()["processor"] == platform.processor()


@pytest.mark.parametrize("gpu", [None, "A GPU X"])
def test_a_gpu_is_named_if_there_is_one(monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    assert environment().get("gpu") == gpu
