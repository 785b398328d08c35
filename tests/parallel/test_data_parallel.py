"""DDP and FSDP2, of the dense model and of tensor-parallel ones: one process's training, but for lost packets."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.parallel.conftest import (
    NUM_LAYERS,
    gradient_error,
    gradients,
    tiny_batch,
    tiny_gpt2,
    training_losses,
)
from tests.parallel.distributed_models import WIRE, join, network, share, spread, whole

pytestmark = pytest.mark.slow

KINDS = ["ddp", "fsdp"]
NUM_STEPS = 10
# processes, TP ranks, implementation
DENSE, VIRTUAL, TWO_BY_TWO = (2, 1, "dense"), (2, 2, "lossytp"), (4, 2, "lossytp")
ROOM = (WIRE.mtu_bytes - WIRE.header_bytes) // 8  # elements of float64 in a packet


def whole_batch() -> dict[str, torch.Tensor]:
    """Of a classifier: transformers computes a language model's training loss in fp32."""
    return {name: tensor[:6] for name, tensor in tiny_batch("classifier").items()}


def on_rank_train(kind: str, loss_rate: float, size: int, implementation: str) -> dict[str, Any]:
    lossy = network(loss_rate)
    layout = join(lossy, data_parallel_size=2, tensor_parallel_size=size)
    batch = share(whole_batch(), layout)
    model = spread(tiny_gpt2("classifier"), lossy, layout, implementation, kind)
    model(**batch).loss.backward()
    first = whole(model, tiny_gpt2("classifier"), lossy, layout, implementation)
    table = lossy.counters.rows()
    model = spread(tiny_gpt2("classifier"), lossy, layout, implementation, kind)
    losses = training_losses(model, batch, steps=NUM_STEPS)
    trained = whole(model, tiny_gpt2("classifier"), lossy, layout, implementation, part=lambda parameter: parameter)
    sharded = [isinstance(parameter, DTensor) for parameter in model.parameters()]
    return {"gradients": first, "losses": losses, "trained": trained, "table": table, "sharded": sharded}


def mean_losses(answers: list[dict]) -> list[float]:
    return torch.tensor([answer["losses"] for answer in answers], dtype=torch.float64).mean(0).tolist()


def trained_dense() -> tuple[dict, list[float], dict]:
    dense = tiny_gpt2("classifier")
    first = gradients(dense, whole_batch())
    dense = tiny_gpt2("classifier")
    losses = training_losses(dense, whole_batch(), steps=NUM_STEPS)
    return first, losses, {name: parameter.detach() for name, parameter in dense.named_parameters()}


@pytest.mark.parametrize("how", [DENSE, VIRTUAL, TWO_BY_TWO], ids=["dense", "virtual ranks", "TP in processes"])
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_train_as_one_process_on_the_whole_batch_but_for_lost_packets(
    processes: Callable, kind: str, how: tuple[int, int, str]
) -> None:
    number, *rest = how
    first, losses, trained = trained_dense()
    assert losses[-1] < 0.9 * losses[0], "ten steps must move the model"
    answers = processes(number, on_rank_train, kind, 0.0, *rest)
    assert mean_losses(answers) == pytest.approx(losses, rel=1e-9)
    assert answers[0]["losses"] != answers[-1]["losses"], "each replica has examples of its own"
    for answer in answers:
        assert gradient_error(answer["gradients"], first) < 1e-12
        assert gradient_error(answer["trained"], trained) < 1e-6  # a key bias has no gradient, but Adam moves it
        assert all(answer["sharded"]) if kind == "fsdp" else not any(answer["sharded"])
    answers = processes(number, on_rank_train, kind, 0.05, *rest)
    for answer in answers:
        assert gradient_error(answer["gradients"], first) > 0.01
        assert sum(row["lost"] for row in answer["table"]) > 0
    assert mean_losses(answers) != pytest.approx(losses, rel=1e-4)


def packets(num_elements: int) -> int:
    """Of a message that two ranks sum or gather, on one link: half of it."""
    return -(-(num_elements // 2 + num_elements % 2) // ROOM)


def packets_by_link(answer: dict) -> dict[tuple, int]:
    return {(row["operation"], row["direction"], row["src"], row["dst"]): row["packets"] for row in answer["table"]}


def test_ddp_sends_all_gradients_once(processes: Callable) -> None:
    elements = sum(parameter.numel() for parameter in tiny_gpt2("classifier").parameters())
    for answer in processes(2, on_rank_train, "ddp", 0.0, 1, "dense"):
        each = packets(elements)
        assert packets_by_link(answer) == {("all_reduce", "backward", *link): each for link in ((0, 1), (1, 0))}


def padded(parameters: Any) -> int:
    """FSDP makes the first axis a multiple of the two processes."""
    return sum((len(parameter) + len(parameter) % 2) * parameter[0].numel() for parameter in parameters)


def test_fsdp_gathers_each_block_twice_the_rest_once_and_scatters_all_gradients_once(processes: Callable) -> None:
    dense = tiny_gpt2("classifier")
    block = packets(padded(dense.transformer.h[0].parameters()))
    rest = packets(padded(parameter for name, parameter in dense.named_parameters() if ".h." not in name))
    expected = {
        ("all_gather", "forward"): NUM_LAYERS * block + rest,
        ("all_gather", "backward"): NUM_LAYERS * block,
        ("reduce_scatter", "backward"): NUM_LAYERS * block + rest,
    }
    for answer in processes(2, on_rank_train, "fsdp", 0.0, 1, "dense"):
        assert packets_by_link(answer) == {(*key, *link): n for key, n in expected.items() for link in ((0, 1), (1, 0))}


def test_two_by_two_loses_packets_along_both_axes(processes: Callable) -> None:
    """Tensor-parallel ranks 0, 1 and 2, 3; replicas of a shard are 0, 2 and 1, 3."""
    answers = processes(4, on_rank_train, "fsdp", 0.3, 2, "lossytp")
    for rank, answer in enumerate(answers):
        lost = {(row["operation"], row["src"], row["dst"]): row["lost"] for row in answer["table"]}
        first = rank // 2 * 2
        sums = {key[1:] for key in lost if key[0] == "all_reduce"}
        others = {key[1:] for key in lost if key[0] != "all_reduce"}
        assert sums == {(first, first + 1), (first + 1, first)}
        assert others == {(rank % 2, rank % 2 + 2), (rank % 2 + 2, rank % 2)}
        assert all(lost.values())
