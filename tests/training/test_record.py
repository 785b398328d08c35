import json
import platform
from pathlib import Path

import pytest
import torch

from lossytp.training.config import PretrainConfig, TrainConfig
from lossytp.training.record import check_output_folder, environment, read_record, seconds_of, write_record


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


def seconds(tokens=114, compute_s=0.5, **values):
    """Return the simulated seconds of a step of gpt2-nano: 4 layers, width 128."""
    timing = {"tokens_per_second": 10.0 * tokens, "train_seconds": 1.0, "steps": 10, "step_seconds": compute_s}
    config = TrainConfig(tensor_parallel_size=4, **values).result_settings()
    return seconds_of({"config": config, "timing": timing}, link_gbits=10.0)


def test_without_losses_a_step_is_its_computation_and_all_reduces_of_known_length():
    """Sixteen all-reduces are two messages in turn each, of a chunk in packets of 364 float32 to each of 3 ranks."""
    packet_s, trip_s, packets = 1500 * 8 / 10e9, 50e-6, 3 * -(-114 * 128 // 4 // 364)
    assert seconds() == pytest.approx(0.5 + 16 * 2 * (packets * packet_s + trip_s), rel=1e-9)
    half = 3 * -(-114 * 128 // 4 // 728)
    assert seconds(bf16=True) == pytest.approx(0.5 + 32 * (half * packet_s + trip_s), rel=1e-9)
    assert seconds(bf16=True, wire_dtype="fp32") == seconds()
    int4 = 3 * -(-114 * 128 // 4 // 2560)  # 80 blocks of 18 bytes
    assert seconds(bf16=True, wire_dtype="int4") == pytest.approx(0.5 + 32 * (int4 * packet_s + trip_s), rel=1e-9)
    cut = seconds(912, 0.0, gradient_accumulation_steps=2)
    assert cut == pytest.approx(2 * seconds(456, 0.0), rel=1e-9)


def test_lost_packets_cost_a_round_trip_and_reliable_sums_more():
    lossless, all_lost = seconds(compute_s=0.0), seconds(compute_s=0.0, loss_rate=1.0, reliable_gather=False)
    assert all_lost - lossless == pytest.approx(16 * 2 * 100e-6, rel=1e-6)
    best_effort = seconds(compute_s=0.0, loss_rate=0.3, reliable_gather=False)
    assert lossless < best_effort < all_lost
    assert best_effort + 16 * 50e-6 < seconds(compute_s=0.0, loss_rate=0.3)


@pytest.mark.parametrize(
    "values",
    [
        {"data_parallel_size": 2},
        {"sequence_parallel": True},
        {"repair": "fec(10, 8)"},
        {"lossy_direction": "forward"},
        {"ranks_per_node": 2},
        {"control": "elements"},
        {"unfreeze_last_layers": 0},
        {"gradient_checkpointing": True},
        {"reliable_gather": False, "replicated_gradients": "lossy"},
        {"loss_rate": 0.95},  # sums that hardly ever return
    ],
    ids=str,
)
def test_what_timing_does_not_cover_has_no_seconds(values):
    assert seconds(**values) is None
