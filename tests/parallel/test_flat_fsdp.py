"""The project's FSDP: PyTorch's training, where each replica holds a shard of parameters and optimizer's state."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import lossytp as ltp
from lossytp.parallel.data_parallel import FlatFSDP, FlatUnit, Member
from tests.parallel.conftest import (
    NUM_LAYERS,
    FakeProcessGroup,
    gradient_error,
    gradients,
    tiny_batch,
    tiny_gpt2,
    training_losses,
)
from tests.parallel.distributed_models import in_replicas, join, network, share, spread, whole, whole_of_pieces

NUM_STEPS = 5


def whole_batch() -> dict[str, Tensor]:
    return {name: tensor[:6] for name, tensor in tiny_batch("classifier").items()}


def trained_dense() -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    first = gradients(tiny_gpt2("classifier"), whole_batch())
    dense = tiny_gpt2("classifier")
    losses = training_losses(dense, whole_batch(), steps=NUM_STEPS)
    return first, losses, {name: parameter.detach() for name, parameter in dense.named_parameters()}


# tensor-parallel ranks, implementation, whether activations are checkpointed
WAYS = {"dense": (1, "dense", False), "dense, checkpointed": (1, "dense", True), "virtual ranks": (2, "lossytp", True)}


def on_rank_train(size: int, implementation: str, again: bool, loss_rate: float) -> dict[str, Any]:
    lossy = network(loss_rate)
    layout = join(lossy, data_parallel_size=2, tensor_parallel_size=size)
    batch = share(whole_batch(), layout)

    def built() -> FlatFSDP:
        model = spread(tiny_gpt2("classifier"), lossy, layout, implementation, "custom fsdp")
        if again:
            model.module.activation_checkpointing_enable({"use_reentrant": False})
        return model

    def put_together(part: Callable[[Tensor], Any]) -> dict[str, Tensor]:
        return whole(model, tiny_gpt2("classifier"), lossy, layout, implementation, part=part)

    model = built()
    with torch.no_grad():
        model(**batch)
    model(**batch).loss.backward()
    first, table = put_together(lambda parameter: parameter.grad), lossy.counters.rows()
    model = built()
    losses = training_losses(model, batch, steps=NUM_STEPS)
    return {"gradients": first, "losses": losses, "trained": put_together(lambda parameter: parameter), "table": table}


@pytest.mark.parametrize("way", WAYS)
def test_replicas_train_as_one_process_on_the_whole_batch(processes: Callable, way: str) -> None:
    first, losses, trained = trained_dense()
    answers = processes(2, on_rank_train, *WAYS[way], 0.0)
    together = torch.tensor([answer["losses"] for answer in answers], dtype=torch.float64).mean(0)
    assert together.tolist() == pytest.approx(losses, rel=1e-9)
    for answer in answers:
        assert gradient_error(answer["gradients"], first) < 1e-12
        assert gradient_error(answer["trained"], trained) < 1e-6  # a key bias has no gradient, but Adam moves it


@pytest.mark.slow
def test_two_by_two_trains_as_one_process(processes: Callable) -> None:
    first, _, trained = trained_dense()
    for answer in processes(4, on_rank_train, 2, "lossytp", False, 0.0):
        assert gradient_error(answer["gradients"], first) < 1e-12
        assert gradient_error(answer["trained"], trained) < 1e-6


def test_gathers_and_reduce_scatters_lose_packets(processes: Callable) -> None:
    first, _, _ = trained_dense()
    for answer in processes(2, on_rank_train, 1, "dense", False, 0.05):
        assert gradient_error(answer["gradients"], first) > 0.01
        lost = {(row["operation"], row["direction"]): row["lost"] for row in answer["table"]}
        assert lost.keys() == {("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")}
        assert all(lost.values())


def on_rank_compare(replicas: str) -> list[tuple]:
    lossy = network(0.0)
    layout = join(lossy, data_parallel_size=2)
    in_replicas(tiny_gpt2("classifier"), layout, replicas)(**share(whole_batch(), layout)).loss.backward()
    return traffic(lossy)


def traffic(lossy: ltp.LossyNetwork) -> list[tuple]:
    return [(row["operation"], row["direction"], row["src"], row["packets"]) for row in lossy.counters.rows()]


def test_traffic_is_that_of_pytorch_but_for_its_padding(processes: Callable) -> None:
    own, pytorch = (processes(2, on_rank_compare, replicas)[0] for replicas in ("custom fsdp", "fsdp"))
    assert [row[:3] for row in own] == [row[:3] for row in pytorch]
    for mine, theirs in zip(own, pytorch, strict=True):
        assert 0.99 * theirs[3] < mine[3] <= theirs[3]


class Chain(nn.Sequential):
    def forward(self, x: Tensor, *, again: bool) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x


def on_rank_checkpoint(again: bool) -> tuple[list[tuple], dict[str, Tensor]]:
    lossy = network(0.0)
    layout = join(lossy, data_parallel_size=2)
    torch.manual_seed(0)
    chain = Chain(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double() for _ in range(3)))
    model = FlatFSDP(chain, layout.process_group("dp"), blocks=list(chain))
    with set_checkpoint_early_stop(False):  # the block's last hooks run again too
        model(torch.ones(1, 8, dtype=torch.float64), again=again).square().sum().backward()
    return traffic(lossy), whole_of_pieces(model, lambda piece: piece.grad)


def test_computing_a_block_again_in_backward_gathers_nothing_again(processes: Callable) -> None:
    (once, gradients_once), (again, gradients_again) = (
        processes(2, on_rank_checkpoint, each)[0] for each in (False, True)
    )
    assert again == once
    assert gradient_error(gradients_again, gradients_once) < 1e-12


def on_rank_measure() -> dict[str, Any]:
    """Elements in memory before, within and after a step, of this replica."""
    layout = join(network(0.0), data_parallel_size=2)
    model = in_replicas(tiny_gpt2("classifier"), layout, "custom fsdp")
    optimizer = torch.optim.AdamW(model.parameters())
    gathered = lambda: [unit.flat_P.untyped_storage().nbytes() // 8 for unit in model.units]  # noqa: E731
    seen = []
    for block in model.module.transformer.h:
        block.mlp.register_forward_hook(lambda *_: seen.append(sum(n > 0 for n in gathered())))
    before = sum(gathered())
    loss = model(**share(whole_batch(), layout)).loss
    between = gathered()
    loss.backward()
    after = sum(gathered())
    optimizer.step()
    pieces = [(piece.numel(), piece.grad.numel()) for piece in model.parameters()]
    state = sum(tensor.numel() for each in optimizer.state.values() for tensor in (each["exp_avg"], each["exp_avg_sq"]))
    return {"before": before, "between": between, "after": after, "seen": seen, "pieces": pieces, "state": state}


def test_each_replica_holds_half_and_gathers_a_block_at_a_time(processes: Callable) -> None:
    dense = tiny_gpt2("classifier")
    total = sum(parameter.numel() for parameter in dense.parameters())
    block = sum(parameter.numel() for parameter in dense.transformer.h[0].parameters())
    rest = total - NUM_LAYERS * block
    answers = processes(2, on_rank_measure)
    for answer in answers:
        held = sum(parameters for parameters, _ in answer["pieces"])
        assert abs(held - total / 2) < 2 * (NUM_LAYERS + 1), "but for padding"
        assert sum(gradients for _, gradients in answer["pieces"]) == held
        assert answer["state"] == 2 * held
        assert answer["before"] == answer["after"] == 0
        assert answer["between"] == [rest + rest % 2, *[0] * NUM_LAYERS]
        assert answer["seen"] == [2] * NUM_LAYERS, "the rest and one block"
    assert sum(parameters for answer in answers for parameters, _ in answer["pieces"]) == total


def on_rank_gather() -> tuple[bool, ...]:
    layout = join(network(0.0), data_parallel_size=2)
    dense, model = (tiny_gpt2() for _ in range(2))
    sharded = in_replicas(model, layout, "custom fsdp")
    expected = dict(dense.named_parameters())
    wholes = whole_of_pieces(sharded, lambda piece: piece)
    return (
        wholes.keys() == expected.keys() and all(torch.equal(wholes[name], expected[name]) for name in expected),
        all(piece.ndim == 1 for piece in sharded.parameters()),
    )


def test_whole_gathers_every_parameter_from_its_pieces(processes: Callable) -> None:
    assert processes(2, on_rank_gather) == [(True,) * 2] * 2


def unit_of(rank: int, replicas: int = 3, shapes: tuple = ((2, 5), (1,), (4,))) -> FlatUnit:
    parameters, start = [], 0
    for number, shape in enumerate(shapes):
        values = torch.arange(start, start := start + math.prod(shape), dtype=torch.float64)
        parameters.append((Member(f"p{number}", []), nn.Parameter(values.view(shape))))
    return FlatUnit(parameters, FakeProcessGroup(replicas, rank))  # type: ignore[arg-type]


def test_pieces_cut_parameters_where_shards_end() -> None:
    """Fifteen elements in three shards of five."""
    pieces = [[piece.tolist() for piece in unit_of(rank).pieces] for rank in range(3)]
    assert pieces == [[[0, 1, 2, 3, 4], [], []], [[5, 6, 7, 8, 9], [], []], [[], [10], [11, 12, 13, 14]]]
    pieces = [[piece.tolist() for piece in unit_of(rank, 2).pieces] for rank in range(2)]
    assert pieces == [[[0, 1, 2, 3, 4, 5, 6, 7], [], []], [[8, 9], [10], [11, 12, 13, 14]]]


def test_one_unit_has_one_dtype() -> None:
    parameters = [
        (Member(name, []), nn.Parameter(torch.ones(2, dtype=dtype)))
        for name, dtype in (("a", torch.float32), ("b", torch.float64))
    ]
    with pytest.raises(ValueError, match=r"b is torch.float64 and a torch.float32: convert the model to one dtype"):
        FlatUnit(parameters, FakeProcessGroup(2, 0))  # type: ignore[arg-type]


def test_a_models_units_go_to_the_default_device_one_after_the_other() -> None:
    """So that the whole model need not fit there; "meta" stands for an accelerator."""
    dense: Any = tiny_gpt2("classifier")
    with torch.device("meta"):
        sharded = FlatFSDP(dense, FakeProcessGroup(2, 0), blocks=dense.transformer.h)  # type: ignore[arg-type]
    assert {parameter.device.type for parameter in sharded.parameters()} == {"meta"}
    assert sum(unit.flat_P.untyped_storage().nbytes() for unit in sharded.units) == 0
