"""What gloo takes besides contiguous floats of one size, over the backend `lossy`."""

import torch
import torch.distributed as dist

import lossytp as ltp


def everything_lost() -> int:
    ltp.init_process_group(ltp.LossyNetwork(ltp.Bernoulli(loss_rate=1.0)))
    return dist.get_rank()


def sum_of_a_transposed_tensor() -> list[float]:
    x = torch.full((40, 50), 1.0 + 9 * everything_lost()).t()
    dist.all_reduce(x)
    assert not x.is_contiguous()
    return x.flatten().tolist()


def test_a_tensor_that_does_not_lie_in_order_is_sent_row_by_row(processes):
    """Of the (50, 40) elements each rank owns half of the rows, and keeps only what it put in itself."""
    assert processes(2, sum_of_a_transposed_tensor) == [[1.0] * 1000 + [10.0] * 1000] * 2


def sum_of_a_parameter() -> list[float]:
    everything_lost()
    weight = torch.nn.Parameter(torch.ones(1000))
    with torch.no_grad():
        dist.all_reduce(weight)
    return weight.tolist()


def test_a_parameter_can_be_summed(processes):
    assert processes(2, sum_of_a_parameter) == [[1.0] * 1000] * 2


def sum_of_what_needs_a_gradient() -> tuple[float, bool]:
    """Outside no_grad, as gloo takes it."""
    x = torch.full((40, 50), everything_lost() + 1.0).t().requires_grad_()
    dist.all_reduce(x)
    return x.sum().item(), x.is_leaf


def test_what_is_lost_is_no_step_of_autograd(processes):
    assert processes(2, sum_of_what_needs_a_gradient) == [(3000.0, True)] * 2


def coalesced_gather() -> list[list[float]]:
    rank = everything_lost()
    outputs = [[torch.empty(800), torch.empty(3)] for _ in range(2)]
    inputs = [torch.full((800,), rank + 1.0), torch.full((3,), rank + 1.0)]
    dist.all_gather_coalesced(outputs, inputs)
    return [[tensor.sum().item() for tensor in pair] for pair in outputs]


def test_a_coalesced_gather_loses_tensor_by_tensor(processes):
    """The other's 800 floats are lost, its three are less than a packet."""
    assert processes(2, coalesced_gather) == [[[800.0, 3.0], [0.0, 6.0]], [[0.0, 3.0], [1600.0, 6.0]]]


def reliable_pieces() -> list[float]:
    """Whole numbers, and floats within `reliable()`, are passed to gloo as they are."""
    everything_lost()
    total = torch.empty(500, dtype=torch.int64)
    dist.reduce_scatter(total, [torch.ones(500, dtype=torch.int64)] * 2)
    floats = torch.empty(500)
    with ltp.reliable():
        dist.reduce_scatter(floats, [torch.ones(500)] * 2)
    return [total.sum().item(), floats.sum().item()]


def test_reliable_pieces_arrive(processes):
    assert processes(2, reliable_pieces) == [[1000, 1000.0]] * 2
