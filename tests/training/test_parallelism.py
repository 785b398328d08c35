"""Test training over several processes: it equals one process's training, except for lost packets.

Functions named `on_rank_...` run in every process. A run that is already in its folder is not done again.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.parallel_runs import (
    PARALLELISMS,
    batches,
    curve,
    expected_links,
    expected_packets,
    settings,
    task_in,
    train,
)
from tests.training.test_loop import comparable

LOSSY = {"loss_rate": 0.1, "max_steps": 6}


def on_rank_import() -> None:
    """Import this module in every process, so that later calls need not wait for imports."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, processes: Callable) -> Path:
    """Return a folder for records and the task's data."""
    processes(4, on_rank_import)
    return tmp_path_factory.mktemp("parallelism")


@pytest.mark.parametrize("name", PARALLELISMS)
def test_without_losses_every_parallelism_trains_as_one_process_does(
    processes: Callable, folder: Path, dense: dict, name: str
) -> None:
    number, values = PARALLELISMS[name]
    records = processes(number, train, folder / name, values)
    assert all(comparable(record) == comparable(records[0]) for record in records)
    record = records[0]
    assert curve(record) == pytest.approx(curve(dense), rel=1e-4)
    assert record["final"] == pytest.approx(dense["final"], rel=1e-4)
    assert record["processes"] == number
    tensor_parallel = "tensor_parallel_size" in values
    assert record["implementation"] == (values.get("implementation", "lossytp") if tensor_parallel else "dense")
    evaluation = record["curves"]["eval"][-1]
    assert evaluation["score_spread_clean"] == evaluation["score_spread_lossy"] == 0
    assert evaluation["replica_drift"] == 0


@pytest.mark.parametrize("name", PARALLELISMS)
def test_losses_change_training_and_packets_follow_from_shapes_and_mtu(
    processes: Callable, folder: Path, dense: dict, name: str
) -> None:
    number, values = PARALLELISMS[name]
    record = processes(number, train, folder / name, values | LOSSY)[0]
    assert curve(record) != pytest.approx(curve(dense)[:6], rel=1e-2)
    traffic = record["network"]["training"]
    with task_in(folder):
        config = settings(folder, **values)
    shapes = [tuple(batch["input_ids"].shape) for batch in batches(folder, 6)]
    assert traffic["packets"] == expected_packets(shapes, number, config)
    links = [
        link.split(": ") for link in traffic["by_link"]
    ]  # the group comes first if several groups have such a link
    assert {link[-1] for link in links} == expected_links(number, config)
    assert any(len(link) > 1 for link in links) == (name == "virtual ranks and ddp")
    assert traffic["observed_loss_rate"] == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_replicas_of_either_implementation_train_alike_and_records_say_whose(
    processes: Callable, folder: Path, dense: dict, name: str
) -> None:
    number, values = PARALLELISMS[name]
    custom = values | {"implementation": "custom"}
    record = processes(number, train, folder / name, custom)[0]
    assert curve(record) == pytest.approx(curve(dense), rel=1e-4)
    assert record["final"] == pytest.approx(dense["final"], rel=1e-4)
    assert (record["implementation"], record["data_parallel_implementation"]) == ("dense", "custom")
    theirs = processes(number, train, folder / name, values)[0]  # of an earlier test
    assert theirs["data_parallel_implementation"] == "pytorch"
    lossy = processes(number, train, folder / name, custom | LOSSY | {"save_model": True, "gradient_clipping": 1.0})[0]
    assert lossy["network"]["training"]["observed_loss_rate"] == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("name", ["lossytp", "lossytp, two ranks a process"])
def test_with_losses_processes_train_as_virtual_ranks_do(processes: Callable, folder: Path, name: str) -> None:
    number, values = PARALLELISMS[name]
    values = values | {"loss_rate": 0.05, "max_steps": 8, "eval_steps": 4}
    here, there = train(folder / "virtual", values), processes(number, train, folder / name, values)[0]
    assert curve(there) == pytest.approx(curve(here), rel=1e-5)
    assert there["network"] == here["network"]
    assert there["final"] == pytest.approx(here["final"], rel=1e-4)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "gpipe"])
def test_evaluating_more_often_does_not_change_training(processes: Callable, folder: Path, name: str) -> None:
    number, values = PARALLELISMS[name]
    rare, often = (
        processes(number, train, folder / name, values | LOSSY | changes)[0] for changes in ({}, {"eval_steps": 2})
    )
    assert curve(often) == curve(rare)
    assert often["network"]["training"] == rare["network"]["training"]


def test_the_backend_has_the_algorithm_and_the_repair_of_the_configuration(processes: Callable, folder: Path) -> None:
    """`rescale` multiplies FSDP's parameters too; AdamW would hide a factor of DDP's gradients."""
    number, values = PARALLELISMS["fsdp"]
    zero, rescale = (
        processes(number, train, folder / "fsdp", values | LOSSY | {"algorithm": "sender", "repair": repair})[0]
        for repair in ("zero", "rescale")
    )
    assert zero["network"]["training"]["by_link"].keys() == {"0->-1", "1->-1"}
    assert zero["network"]["training"] == rescale["network"]["training"]
    assert curve(zero) != pytest.approx(curve(rescale), rel=1e-3)


def test_a_pipeline_has_the_adjoint_of_the_configuration(processes: Callable, folder: Path) -> None:
    """The first stage trains differently, with the same losses."""
    values = {"pipeline_parallel_size": 2, "loss_rate": 0.2, "max_steps": 4}
    plain, exact = (
        processes(2, train, folder / f"adjoint {known}", {**values, "exact_adjoint": known})[0]
        for known in (False, True)
    )
    assert plain["network"]["training"]["lost"] == exact["network"]["training"]["lost"] > 0
    assert curve(plain)[0] == curve(exact)[0]
    assert curve(plain)[1:] != curve(exact)[1:]


@pytest.mark.parametrize("name", ["lossytp", "megatron", "fsdp", "gpipe", "lossytp and fsdp"])
def test_clipped_gradients_are_those_of_one_process(processes: Callable, folder: Path, dense: dict, name: str) -> None:
    """The limit clips some steps only: AdamW would hide a factor that all steps share."""
    number, values = PARALLELISMS[name]
    clipped = {"gradient_clipping": 4.0, "max_steps": 8, "warmup_steps": 0}
    one = train(folder, clipped)
    assert curve(processes(number, train, folder / name, values | clipped)[0]) == pytest.approx(curve(one), rel=1e-4)
    for other in (
        {"gradient_clipping": 4.0 * 2**0.5},
        {"gradient_clipping": 4.0 / 2**0.5},
        {"gradient_clipping": None},
    ):
        assert curve(train(folder, clipped | other)) != pytest.approx(curve(one), rel=1e-3)
