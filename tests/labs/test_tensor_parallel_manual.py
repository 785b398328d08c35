"""Check tensor parallelism by hand against the dense perceptron, and processes against virtual ranks."""

import json

import pytest

import tensor_parallel_manual
from lab import LabConfig, perceptron
from tensor_parallel_manual import run
from tests.labs.dense import SMALL, dense_losses, run_lab


@pytest.fixture
def config(tmp_path):
    return LabConfig(**SMALL, output_dir=str(tmp_path))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_without_losses_it_trains_as_the_dense_perceptron(tmp_path, config, ranks):
    result = run(LabConfig(**SMALL, tensor_parallel_size=ranks, output_dir=str(tmp_path)))
    assert result["without_losses"]["losses"] == pytest.approx(dense_losses(config, perceptron(config, 64)), rel=1e-5)
    written = json.loads((tmp_path / "tensor_parallel_manual.json").read_text())
    assert written == {"config": written["config"], **result}
    assert result.keys() == {"dataset", "without_losses"}


def test_a_sum_in_forward_alone_trains_another_model(config, monkeypatch):
    """Layers before f then get one rank's part of their gradient, as with an in-place all-reduce outside autograd."""
    monkeypatch.setattr(tensor_parallel_manual, "copy_to_tensor_parallel_region", lambda x, collective, site: x)
    expected = dense_losses(config, perceptron(config, 64))
    assert run(config)["without_losses"]["losses"] != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("reliable_gather", [True, False])
def test_processes_lose_the_packets_of_virtual_ranks(processes, tmp_path, reliable_gather):
    values = {**SMALL, "loss_rate": 0.2, "reliable_gather": reliable_gather, "output_dir": str(tmp_path)}
    virtual = run(LabConfig(**values))
    for rank in processes(2, run_lab, "tensor_parallel_manual", "LabConfig", values):
        assert rank["with_losses"]["losses"] == pytest.approx(virtual["with_losses"]["losses"], rel=1e-5)
        assert rank["network"]["by_direction"] == virtual["network"]["by_direction"]


def test_both_passes_send_and_lose_packets(tmp_path):
    """Of B * H floats in halves of 2 packets of 364, and B * 10 in halves of 1, with B = 16 and H = 64."""
    result = run(LabConfig(**SMALL, loss_rate=0.2, output_dir=str(tmp_path)))
    packets = {direction: each["packets"] for direction, each in result["network"]["by_direction"].items()}
    assert packets == {"forward": SMALL["steps"] * (4 + 2), "backward": SMALL["steps"] * 4}
    assert all(each["lost"] > 0 for each in result["network"]["by_direction"].values())
