"""DDP and FSDP, PyTorch's and the project's, of dense and tensor-parallel models: one process's training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import lossytp as ltp
from lossytp.parallel.data_parallel import BucketedDDP, FlatFSDP, FlatUnit, Member
from tests.parallel.conftest import (
    NUM_LAYERS,
    FakeProcessGroup,
    gradient_error,
    gradients,
    tiny_batch,
    tiny_gpt2,
    training_losses,
)
from tests.parallel.distributed_models import (
    REPLICAS,
    in_replicas,
    join,
    network,
    share,
    spread,
    whole,
    whole_of_pieces,
)

NUM_STEPS = 10


def whole_batch() -> dict[str, torch.Tensor]:
    """Of a classifier: transformers computes a language model's training loss in fp32."""
    return {name: tensor[:6] for name, tensor in tiny_batch("classifier").items()}


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
def test_replicas_train_as_one_process_on_the_whole_batch_but_for_lost_packets(processes, replicas, way):
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


SMALL_BYTES = 2**15  # about six buckets


def tensors_of(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.module.named_parameters()}


def on_rank_accumulate() -> tuple[int, int, dict[str, Tensor], dict[str, Tensor]]:
    """Packets during and after two passes in `no_sync`; this replica's sum, and what replicas have after a third."""
    lossy = network(0.0)
    layout = join(lossy, data_parallel_size=2)
    model = BucketedDDP(tiny_gpt2("classifier"), layout.process_group("dp"), bucket_bytes=SMALL_BYTES)
    batch = share(whole_batch(), layout)
    with model.no_sync():
        for row in (0, 1):
            model(**{name: tensor[row : row + 1] for name, tensor in batch.items()}).loss.backward()
    alone, sent = tensors_of(model), len(traffic(lossy))
    model(**{name: tensor[2:] for name, tensor in batch.items()}).loss.backward()
    return sent, len(traffic(lossy)), alone, tensors_of(model)


def test_no_sync_adds_up_until_the_next_backward_averages(processes):
    dense = tiny_gpt2("classifier")
    expected = {name: torch.zeros_like(parameter) for name, parameter in dense.named_parameters()}
    for row in range(6):
        for name, gradient in gradients(dense, {k: v[row : row + 1] for k, v in whole_batch().items()}).items():
            expected[name] += gradient / 2  # the mean over replicas of three examples' sum
    answers = processes(2, on_rank_accumulate)
    assert gradient_error(answers[0][2], answers[1][2]) > 0.01, "two passes leave each replica its own sum"
    for sent, sent_at_last, _, averaged in answers:
        assert (sent, sent_at_last) == (0, 2)
        assert gradient_error(averaged, expected) < 1e-12


def on_rank_watch() -> tuple[int, list[int], list[Tensor]]:
    """Buckets; how many were under way as each gradient of the first block came; the parameters after joining."""
    lossy = network(0.0)
    layout = join(lossy, data_parallel_size=2)
    dense = tiny_gpt2("classifier")
    with torch.no_grad():
        dense.transformer.wpe.weight += layout.data_index  # the replicas start apart
    model = BucketedDDP(dense, layout.process_group("dp"), bucket_bytes=SMALL_BYTES)
    started = [parameter.detach().clone() for parameter in model.parameters()]
    under_way: list[int] = []
    for parameter in dense.transformer.h[0].parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: under_way.append(sum(bucket.work is not None for bucket in model.buckets))
        )
    model(**share(whole_batch(), layout)).loss.backward()
    assert all(bucket.work is None for bucket in model.buckets), "backward waits for all at its end"
    return len(model.buckets), under_way, started


def test_messages_leave_before_backward_has_ended(processes):
    answers = processes(2, on_rank_watch)
    for buckets, under_way, _ in answers:
        assert buckets > 4
        assert 0 < min(under_way) < max(under_way) < buckets
    assert all(torch.equal(*pair) for pair in zip(answers[0][2], answers[1][2], strict=True)), "all start as the first"


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = (nn.Linear(3, 3) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.used(x))


def on_rank_leave_out() -> str:
    layout = join(network(0.0), data_parallel_size=2)
    model = BucketedDDP(Half(), layout.process_group("dp"))
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 3)).sum().backward()
    return str(error.value)


def test_a_parameter_without_a_gradient_is_named(processes):
    assert all("unused.bias" in message for message in processes(2, on_rank_leave_out))


def on_rank_fail_once(replicas: str) -> dict[str, Tensor]:
    lossy = network(0.0)
    layout = join(lossy, data_parallel_size=2)
    model = in_replicas(tiny_gpt2("classifier"), layout, replicas)

    def fail(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    mlp = model.module.transformer.h[0].mlp
    hook = mlp.register_forward_hook(lambda module, given, output: output.register_hook(fail) and None)
    with pytest.raises(KeyboardInterrupt):
        model(**share(whole_batch(), layout)).loss.backward()
    hook.remove()
    model.zero_grad()
    model(**share(whole_batch(), layout)).loss.backward()
    return whole(model, tiny_gpt2("classifier"), lossy, layout, "dense")


@pytest.mark.parametrize("replicas", ["custom ddp", "custom fsdp"])
def test_a_failed_backward_leaves_nothing_behind(processes, replicas):
    dense = gradients(tiny_gpt2("classifier"), whole_batch())
    for answer in processes(2, on_rank_fail_once, replicas):
        assert gradient_error(answer, dense) < 1e-12


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_traffic_is_that_of_pytorch_but_for_its_padding(processes, kind):
    """`training/test_parallelism.py` works out PyTorch's from shapes."""
    own, pytorch = (
        processes(2, on_rank_train, replicas, 0.0, *WAYS["dense"][1:])[0]["table"]
        for replicas in (f"custom {kind}", kind)
    )
    for mine, theirs in zip(own, pytorch, strict=True):
        assert all(mine[name] == theirs[name] for name in ("operation", "direction", "src"))
        assert 0.99 * theirs["packets"] < mine["packets"] <= theirs["packets"]


def traffic(lossy: ltp.LossyNetwork) -> list[tuple]:
    return [(row["operation"], row["direction"], row["src"], row["packets"]) for row in lossy.counters.rows()]


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


def test_computing_a_block_again_in_backward_gathers_nothing_again(processes):
    (once, gradients_once), (again, gradients_again) = (
        processes(2, on_rank_checkpoint, each)[0] for each in (False, True)
    )
    assert again == once
    assert gradient_error(gradients_again, gradients_once) < 1e-12


def on_rank_measure() -> dict[str, Any]:
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


def test_each_replica_holds_half_and_gathers_a_block_at_a_time(processes):
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


def test_one_unit_has_one_dtype():
    parameters = [
        (Member(name, []), nn.Parameter(torch.ones(2, dtype=dtype)))
        for name, dtype in (("a", torch.float32), ("b", torch.float64))
    ]
    with pytest.raises(ValueError, match="one dtype"):
        FlatUnit(parameters, FakeProcessGroup(2, 0))  # type: ignore[arg-type]


def test_a_models_units_go_to_the_default_device_one_after_the_other():
    """So that the whole model need not fit there; "meta" stands for an accelerator."""
    dense: Any = tiny_gpt2("classifier")
    with torch.device("meta"):
        sharded = FlatFSDP(dense, FakeProcessGroup(2, 0), blocks=dense.transformer.h)  # type: ignore[arg-type]
    assert {parameter.device.type for parameter in sharded.parameters()} == {"meta"}
    assert sum(unit.flat_P.untyped_storage().nbytes() for unit in sharded.units) == 0
