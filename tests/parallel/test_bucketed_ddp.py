"""The project's DDP: PyTorch's gradients and packets, sent while backward goes on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lossytp as ltp
from lossytp.parallel.data_parallel import Bucket, BucketedDDP
from tests.parallel.conftest import gradient_error, gradients, tiny_batch, tiny_gpt2
from tests.parallel.distributed_models import in_replicas, join, network, share, whole

SMALL_BYTES = 2**15  # about six buckets


def whole_batch() -> dict[str, Tensor]:
    return {name: tensor[:6] for name, tensor in tiny_batch("classifier").items()}


def tensors_of(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.module.named_parameters()}


def links(lossy: ltp.LossyNetwork) -> list[tuple]:
    return sorted(
        (row["operation"], row["src"], row["dst"], row["packets"], row["lost"]) for row in lossy.counters.rows()
    )


def on_rank_step(replicas: str, loss_rate: float) -> tuple[dict[str, Tensor], list[tuple]]:
    lossy = network(loss_rate)
    layout = join(lossy, data_parallel_size=2)
    model = in_replicas(tiny_gpt2("classifier"), layout, replicas)
    model(**share(whole_batch(), layout)).loss.backward()
    return tensors_of(model), links(lossy)


@pytest.mark.parametrize("loss_rate", [0.0, 0.05])
def test_gradients_and_packets_are_those_of_pytorch(processes: Callable, loss_rate: float) -> None:
    """Both send one message here, and lay gradients out in another order: the same packets, with other numbers."""
    dense = gradients(tiny_gpt2("classifier"), whole_batch())
    for own, pytorch in zip(
        *(processes(2, on_rank_step, replicas, loss_rate) for replicas in ("custom ddp", "ddp")), strict=True
    ):
        assert own[1] == pytorch[1]
        assert sum(lost for *_, lost in own[1]) > 0 if loss_rate else own[1]
        assert gradient_error(own[0], dense) > 0.01 if loss_rate else gradient_error(own[0], dense) < 1e-12
        if not loss_rate:
            assert all(torch.equal(own[0][name], pytorch[0][name]) for name in dense)


def on_rank_accumulate() -> tuple[int, int, dict[str, Tensor], dict[str, Tensor]]:
    """Packets during and after two passes in `no_sync`; this replica's sum, and what replicas have after a third."""
    lossy = network(0.0)
    layout = join(lossy, data_parallel_size=2)
    model = BucketedDDP(tiny_gpt2("classifier"), layout.process_group("dp"), bucket_bytes=SMALL_BYTES)
    batch = share(whole_batch(), layout)
    with model.no_sync():
        for row in (0, 1):
            model(**{name: tensor[row : row + 1] for name, tensor in batch.items()}).loss.backward()
    alone, sent = tensors_of(model), len(links(lossy))
    model(**{name: tensor[2:] for name, tensor in batch.items()}).loss.backward()
    return sent, len(links(lossy)), alone, tensors_of(model)


def test_no_sync_adds_up_until_the_next_backward_averages(processes: Callable) -> None:
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


def test_messages_leave_before_backward_has_ended(processes: Callable) -> None:
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


def test_a_parameter_without_a_gradient_is_named(processes: Callable) -> None:
    assert set(processes(2, on_rank_leave_out)) == {
        "backward gave no gradient to 2 parameters, such as unused.bias: freeze what the training loss does not use, "
        "with requires_grad_(False)"
    }


def on_rank_fail_once(replicas: str) -> dict[str, Tensor]:
    """Gradients of the pass after one whose backward failed in the first block."""
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
def test_a_failed_backward_leaves_nothing_behind(processes: Callable, replicas: str) -> None:
    dense = gradients(tiny_gpt2("classifier"), whole_batch())
    for answer in processes(2, on_rank_fail_once, replicas):
        assert gradient_error(answer, dense) < 1e-12


def test_a_bucket_lays_gradients_side_by_side() -> None:
    bucket = Bucket({"a": nn.Parameter(torch.ones(2, 3)), "b": nn.Parameter(torch.ones(4))})
    bucket.views["b"].fill_(2)
    assert bucket.views["a"].shape == (2, 3)
    assert bucket.flat.tolist() == [0] * 6 + [2] * 4
