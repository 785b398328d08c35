"""DDP and FSDP, PyTorch's and the project's, of dense and tensor-parallel models: one process's training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tests.parallel.conftest import NUM_LAYERS, gradient_error, gradients, tiny_batch, tiny_gpt2, training_losses
from tests.parallel.distributed_models import REPLICAS, WIRE, in_replicas, join, network, share, spread, whole
from tests.parallel.families import tiny

NUM_STEPS = 10
ROOM = (WIRE.mtu_bytes - WIRE.header_bytes) // 8  # elements of float64 in a packet


def whole_batch() -> dict[str, torch.Tensor]:
    """Of a classifier: transformers computes a language model's training loss in fp32."""
    return {name: tensor[:6] for name, tensor in tiny_batch("classifier").items()}


def packets(num_elements: int) -> int:
    """Of a message that two ranks sum or gather, on one link: half of it."""
    return -(-(num_elements // 2 + num_elements % 2) // ROOM)


def packets_by_link(answer: dict) -> dict[tuple, int]:
    return {(row["operation"], row["direction"], row["src"], row["dst"]): row["packets"] for row in answer["table"]}


def test_ddp_sends_all_gradients_once(processes: Callable) -> None:
    elements = sum(parameter.numel() for parameter in tiny_gpt2("classifier").parameters())
    for answer in processes(2, on_rank_train, "ddp", 0.0, *WAYS["dense"][1:]):
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
    for answer in processes(2, on_rank_train, "fsdp", 0.0, *WAYS["dense"][1:]):
        assert packets_by_link(answer) == {(*key, *link): n for key, n in expected.items() for link in ((0, 1), (1, 0))}


def test_two_by_two_loses_packets_along_both_axes(processes: Callable) -> None:
    """Tensor-parallel ranks 0, 1 and 2, 3; replicas of a shard are 0, 2 and 1, 3."""
    answers = processes(4, on_rank_train, "fsdp", 0.3, *WAYS["TP in processes"][1:])
    for rank, answer in enumerate(answers):
        lost = {(row["operation"], row["src"], row["dst"]): row["lost"] for row in answer["table"]}
        first = rank // 2 * 2
        sums = {key[1:] for key in lost if key[0] == "all_reduce"}
        others = {key[1:] for key in lost if key[0] != "all_reduce"}
        assert sums == {(first, first + 1), (first + 1, first)}
        assert others == {(rank % 2, rank % 2 + 2), (rank % 2 + 2, rank % 2)}
        assert all(lost.values())


# processes, tensor-parallel ranks, implementation, whether activations are checkpointed
WAYS = {
    "dense": (2, 1, "dense", False),
    "virtual ranks": (2, 2, "lossytp", True),
    "TP in processes": (4, 2, "lossytp", False),
}


def on_rank_train(replicas: str, loss_rate: float, size: int, implementation: str, again: bool) -> dict[str, Any]:
    lossy = network(loss_rate)
    layout = join(lossy, data_parallel_size=2, tensor_parallel_size=size)
    batch = share(whole_batch(), layout)

    def built() -> Any:
        dense = tiny_gpt2("classifier")
        if again:
            dense.activation_checkpointing_enable({"use_reentrant": False})
        return spread(dense, lossy, layout, implementation, replicas)

    def put_together(part: Callable[[Tensor], Any]) -> dict[str, Tensor]:
        return whole(model, tiny_gpt2("classifier"), lossy, layout, implementation, part=part)

    model = built()
    if replicas == "custom fsdp":
        with torch.no_grad():
            model(**batch)
    lossy.counters.load_state_dict({"packets": [], "messages": []})
    model(**batch).loss.backward()
    first, table = put_together(lambda parameter: parameter.grad), lossy.counters.rows()
    model = built()
    losses = training_losses(model, batch, steps=NUM_STEPS)
    sharded = {isinstance(parameter, DTensor) or parameter.ndim == 1 for parameter in model.parameters()}
    trained = put_together(lambda parameter: parameter)
    return {"gradients": first, "losses": losses, "trained": trained, "table": table, "sharded": sharded == {True}}


def mean_losses(answers: list[dict]) -> list[float]:
    return torch.tensor([answer["losses"] for answer in answers], dtype=torch.float64).mean(0).tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_replicas_train_as_one_process_on_the_whole_batch_but_for_lost_packets(
    processes: Callable, replicas: str, way: str
) -> None:
    number, *how = WAYS[way]
    first, dense = gradients(tiny_gpt2("classifier"), whole_batch()), tiny_gpt2("classifier")
    losses = training_losses(dense, whole_batch(), steps=NUM_STEPS)
    trained = {name: parameter.detach() for name, parameter in dense.named_parameters()}
    answers = processes(number, on_rank_train, replicas, 0.0, *how)
    assert mean_losses(answers) == pytest.approx(losses, rel=1e-9)
    assert answers[0]["losses"] != answers[-1]["losses"], "each replica has examples of its own"
    for answer in answers:
        assert gradient_error(answer["gradients"], first) < 1e-12
        assert gradient_error(answer["trained"], trained) < 1e-6  # a key bias has no gradient, but Adam moves it
        assert answer["sharded"] == ("fsdp" in replicas)
    answers = processes(number, on_rank_train, replicas, 0.05, *how)
    for answer in answers:
        assert gradient_error(answer["gradients"], first) > 0.01
        lost = {(row["operation"], row["direction"]): row["lost"] for row in answer["table"]}
        if "fsdp" in replicas:
            assert {
                ("all_gather", "forward"),
                ("all_gather", "backward"),
                ("reduce_scatter", "backward"),
            } <= lost.keys()
        assert all(lost.values())
    assert mean_losses(answers) != pytest.approx(losses, rel=1e-4)


def shape(family: str) -> PreTrainedModel:
    return tiny_gpt2(dtype=torch.float32) if family == "gpt2" else tiny(family, dtype=torch.float32)


def on_rank_train_in_float32(family: str) -> dict[str, list[float]]:
    layout = join(network(0.0), data_parallel_size=2)
    return {
        replicas: training_losses(
            in_replicas(shape(family), layout, replicas),
            share({name: tensor[:6] for name, tensor in tiny_batch().items()}, layout),
            steps=30,
        )
        for replicas in REPLICAS
    }


@pytest.mark.parametrize("family", ["gpt2", "llama", "llama, tied"])
def test_every_way_has_the_single_process_curve(processes: Callable, family: str) -> None:
    expected = training_losses(shape(family), {name: tensor[:6] for name, tensor in tiny_batch().items()}, steps=30)
    assert expected[-1] < 0.7 * expected[0]
    answers = processes(2, on_rank_train_in_float32, family)
    for replicas in REPLICAS:
        mean = torch.tensor([answer[replicas] for answer in answers]).mean(0)
        assert mean.tolist() == pytest.approx(expected, rel=1e-4), replicas
