"""The sharded linear layers against a rank-by-rank reference with explicit masks, in plain autograd.

Shapes: B examples, T tokens, D model width, R ranks, P projections, F outputs of one projection and rank, K inputs of
one rank.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lossytp as ltp
from lossytp.network import Site
from lossytp.network.lossy_network import CommConfig
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup
from lossytp.parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.parallel.conftest import bernoulli, delivered, relative_error

ALGORITHMS, REPAIRS = ["sender", "direct"], ["zero", "rescale"]
WIRE = ltp.Wire(mtu_bytes=60)  # two float64 elements a packet
B, T, D, F, K = 2, 5, 24, 3, 6
LOSS_RATE = 0.3


def randn(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return tensor.requires_grad_(grad)


def collective(network: ltp.LossyNetwork, num_ranks: int, *names: str) -> LossyCollective:
    return LossyCollective(
        network, RankGroup(num_ranks), CommConfig.named(**dict(zip(("algorithm", "repair"), names, strict=False)))
    )


def column_layer(weight: Tensor, bias: Tensor, num_projections: int, all_reduce: LossyCollective) -> Any:
    weight, bias = nn.Parameter(weight), nn.Parameter(bias)
    return ColumnParallelLinear(
        *weight.shape,
        dense=(weight, bias),
        widths=[len(bias) // num_projections] * num_projections,
        collective=all_reduce,
        layer=0,
        module="attention",
    )


def row_layer(weight: Tensor, bias: Tensor, all_reduce: LossyCollective) -> Any:
    weight, bias = nn.Parameter(weight), nn.Parameter(bias)
    return RowParallelLinear(*weight.shape, dense=(weight, bias), collective=all_reduce, layer=0, module="mlp")


def mask_of(network: ltp.LossyNetwork, algorithm: str, repair: str, num_ranks: int) -> Tensor:
    """What one message of B * T * D float64 elements is multiplied by on its way to the sum: (R, B, T, D)."""
    arrives_RN = delivered(network, algorithm, num_ranks, B * T * D, 8)
    if repair == "zero":
        return arrives_RN.double().view(-1, B, T, D)
    scale_RN = torch.full_like(arrives_RN, 1 / (1 - LOSS_RATE), dtype=torch.float64)
    if algorithm == "direct":  # an owner's own chunk crosses no link
        chunk = -(-B * T * D // num_ranks)
        for rank in range(num_ranks):
            scale_RN[rank, rank * chunk : (rank + 1) * chunk] = 1
    return (arrives_RN * scale_RN).view(-1, B, T, D)


@pytest.mark.parametrize("num_projections", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_column_parallel_equals_ranks_with_masked_input_gradients(
    algorithm: str, repair: str, num_ranks: int, num_projections: int
) -> None:
    network, reference = (bernoulli(LOSS_RATE, seed=2, wire=WIRE) for _ in range(2))
    width = num_projections * num_ranks * F
    weight, bias, x = randn(D, width, grad=True), randn(width, seed=1, grad=True), randn(B, T, D, seed=2, grad=True)
    layer = column_layer(weight, bias, num_projections, collective(network, num_ranks, algorithm, repair))
    for message in range(2):  # links carry on from one message to the next
        upstream = randn(B, T, width, seed=3 + message)
        for tensor in (weight, bias, x):
            tensor.grad = None
        mask_RBTD = mask_of(reference, algorithm, repair, num_ranks)
        y = torch.empty(B, T, num_projections, num_ranks, F, dtype=torch.float64)
        for rank in range(num_ranks):
            x_of_rank = x.detach() + mask_RBTD[rank] * (x - x.detach())  # its value x, its gradient masked
            for projection in range(num_projections):
                first = (projection * num_ranks + rank) * F
                shard = weight[:, first : first + F]
                y[:, :, projection, rank] = x_of_rank @ shard + bias[first : first + F]
        y.flatten(2).backward(upstream)
        expected = [tensor.grad for tensor in (x, weight, bias)]

        x_again = x.detach().clone().requires_grad_()
        layer.zero_grad()
        result = layer(x_again)
        result.backward(upstream)
        actual = [x_again.grad, layer.weight.grad.view(D, width), layer.bias.grad.view(width)]
        torch.testing.assert_close(result, y.flatten(2), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert network.state_dict()["links"] == reference.state_dict()["links"]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_row_parallel_equals_ranks_with_masked_products(algorithm: str, repair: str, num_ranks: int) -> None:
    network, reference = (bernoulli(LOSS_RATE, seed=2, wire=WIRE) for _ in range(2))
    inputs = num_ranks * K
    weight, bias, x = randn(inputs, D, grad=True), randn(D, seed=1, grad=True), randn(B, T, inputs, seed=2, grad=True)
    layer = row_layer(weight, bias, collective(network, num_ranks, algorithm, repair))
    for message in range(2):
        upstream = randn(B, T, D, seed=3 + message)
        for tensor in (weight, bias, x):
            tensor.grad = None
        mask_RBTD = mask_of(reference, algorithm, repair, num_ranks)
        y = bias
        for rank in range(num_ranks):
            mine = slice(rank * K, (rank + 1) * K)
            product = x[:, :, mine] @ weight[mine]
            y = y + product + (mask_RBTD[rank] * product - product).detach()  # masked, its gradient not
        y.backward(upstream)
        expected = [tensor.grad for tensor in (x, weight, bias)]

        x_again = x.detach().clone().requires_grad_()
        layer.zero_grad()
        result = layer(x_again)
        result.backward(upstream)
        actual = [x_again.grad, layer.weight.grad.view(inputs, D), layer.bias.grad]
        torch.testing.assert_close(result, y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert network.state_dict()["links"] == reference.state_dict()["links"]


def test_losses_change_what_the_layers_compute() -> None:
    """Control: the masks of the two tests above are not all ones, and each rank's is its own."""
    for algorithm in ALGORITHMS:
        mask_RBTD = mask_of(bernoulli(LOSS_RATE, seed=2, wire=WIRE), algorithm, "zero", 4)
        assert all((mask_RBTD[rank] == 0).any() for rank in range(4))
        assert all(not torch.equal(mask_RBTD[rank], mask_RBTD[other]) for rank in range(4) for other in range(rank))


def test_a_column_shard_has_the_columns_of_its_rank_in_every_projection() -> None:
    weight, bias = randn(D, 3 * 4 * F), randn(3 * 4 * F)
    layer = column_layer(weight, bias, 3, collective(bernoulli(0.0), 4))
    for projection in range(3):
        for rank in range(4):
            first = projection * 4 * F + rank * F
            assert torch.equal(layer.weight.view(D, 3, 4, F)[:, projection, rank], weight[:, first : first + F])
            assert torch.equal(layer.bias.view(3, 4, F)[projection, rank], bias[first : first + F])


def test_a_row_shard_has_the_rows_of_its_rank() -> None:
    weight = randn(4 * K, D)
    layer = row_layer(weight, randn(D), collective(bernoulli(0.0), 4))
    assert all(torch.equal(layer.weight[rank], weight[rank * K : (rank + 1) * K]) for rank in range(4))


@pytest.mark.parametrize("loss_rate", [0.0, 1.0])
def test_the_row_bias_is_added_once(loss_rate: float) -> None:
    """An earlier study added it on every rank before the sum, and so as many times as there were ranks."""
    weight, bias = randn(8 * K, D), randn(D, seed=1)
    network = bernoulli(loss_rate)
    layer = row_layer(weight, bias, collective(network, 8, "sender"))
    no_product = randn(B, T, 8 * K) * (loss_rate == 1)  # either zeros come in, or nothing gets through
    assert torch.equal(layer(no_product), bias.expand(B, T, D))


def test_when_everything_is_lost_g_still_passes_the_whole_gradient_and_f_none() -> None:
    sender = collective(bernoulli(1.0), 4, "sender")
    upstream = randn(B, T, 4 * K)
    row, x = row_layer(randn(4 * K, 4 * K), randn(4 * K), sender), randn(B, T, 4 * K, seed=1, grad=True)
    row(x).backward(upstream)
    torch.testing.assert_close(x.grad, upstream @ row.weight.view(4 * K, 4 * K).t())

    column, x = column_layer(randn(D, 4 * K), randn(4 * K), 1, sender), randn(B, T, D, seed=1, grad=True)
    column(x).backward(upstream)
    assert not x.grad.any()
    torch.testing.assert_close(column.weight.grad.view(D, -1), x.flatten(0, 1).t() @ upstream.flatten(0, 1))


def test_q_k_and_v_share_one_backward_all_reduce() -> None:
    """An earlier study sent three."""
    network = bernoulli(0.0)
    layer = column_layer(randn(D, 3 * 4 * F), randn(3 * 4 * F), 3, collective(network, 4, "sender"))
    result = layer(randn(B, T, D, grad=True))
    assert network.report().empty, "a column-parallel layer sends nothing forward"
    result.sum().backward()
    one_message = -(-B * T * D // 182)
    assert network.report()[["src", "packets"]].values.tolist() == [[rank, one_message] for rank in range(4)]
    assert set(network.report()["direction"]) == {"backward"}


def test_a_row_parallel_layer_sends_one_message_forward_and_none_backward() -> None:
    network = bernoulli(0.0)
    layer = row_layer(randn(4 * K, D), randn(D), collective(network, 4, "sender"))
    result = layer(randn(B, T, 4 * K, grad=True))
    table = network.report()
    assert table["packets"].tolist() == [-(-B * T * D // 182)] * 4
    assert set(table["direction"]) == {"forward"}
    result.sum().backward()
    assert network.report().equals(table)


def test_layers_name_their_site() -> None:
    all_reduce = collective(bernoulli(0.0), 2)
    column = ColumnParallelLinear(D, 8, collective=all_reduce, layer=5, module="mlp")
    row = RowParallelLinear(8, D, collective=all_reduce, layer=6, module="attention")
    assert (column.site, row.site) == (Site(5, "mlp", "backward"), Site(6, "attention", "forward"))


@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_callers_tensors_are_not_modified(algorithm: str, repair: str) -> None:
    """An earlier study dropped packets from the tensor it was given."""
    all_reduce = collective(bernoulli(0.5, wire=WIRE), 4, algorithm, repair)
    column_weight, row_weight = randn(D, 4 * F), randn(4 * F, D)
    column, row = column_layer(column_weight, randn(4 * F), 1, all_reduce), row_layer(row_weight, randn(D), all_reduce)
    x, upstream = randn(B, T, D, grad=True), randn(B, T, D, seed=1)
    between = column(x)
    kept_between = between.detach().clone()
    row(between).backward(upstream)
    assert torch.equal(x, randn(B, T, D))
    assert torch.equal(upstream, randn(B, T, D, seed=1))
    assert torch.equal(between, kept_between)
    assert torch.equal(column.weight.view(D, -1), column_weight)
    assert torch.equal(row.weight.view(-1, D), row_weight)


def test_layers_keep_copies_of_the_dense_weights() -> None:
    weight, bias = randn(D, 4 * F), randn(4 * F)
    layer = column_layer(weight, bias, 1, collective(bernoulli(0.0), 4))
    weight.zero_()
    bias.zero_()
    assert torch.equal(layer.dense()[0], randn(D, 4 * F))
    assert torch.equal(layer.dense()[1], randn(4 * F))


def test_an_input_that_needs_no_gradient_sends_nothing_backward() -> None:
    network = bernoulli(0.0)
    layer = column_layer(randn(D, 4 * F), randn(4 * F), 1, collective(network, 4))
    layer(randn(B, T, D)).sum().backward()
    assert network.report().empty
    assert layer.weight.grad is not None


def test_frozen_shards_get_no_gradient_and_pass_one_on() -> None:
    all_reduce = collective(bernoulli(0.0), 4)
    column = column_layer(randn(D, 4 * F), randn(4 * F), 1, all_reduce)
    row = row_layer(randn(4 * F, D), randn(D), all_reduce)
    for parameter in (*column.parameters(), *row.parameters()):
        parameter.requires_grad_(False)
    x = randn(B, T, D, grad=True)
    row(column(x)).sum().backward()
    assert all(parameter.grad is None for parameter in (*column.parameters(), *row.parameters()))
    dense = column.weight.view(D, -1) @ row.weight.view(-1, D)
    torch.testing.assert_close(x.grad, dense.sum(1).expand(B, T, D))


def test_layers_take_any_leading_axes_and_strides() -> None:
    all_reduce = collective(bernoulli(0.0), 4)
    column = column_layer(randn(D, 4 * F), randn(4 * F), 1, all_reduce)
    row = row_layer(randn(4 * F, D), randn(D), all_reduce)
    x_DT = randn(D, T, grad=True)
    for x in (x_DT.t(), x_DT.t().expand(B, T, D), x_DT.t()[0]):
        result = row(column(x))
        dense = (x @ column.weight.view(D, -1) + column.bias.view(-1)) @ row.weight.view(-1, D) + row.bias
        assert relative_error(result, dense) < 1e-14
        gradients = (torch.autograd.grad(y.square().sum(), x_DT, retain_graph=True)[0] for y in (result, dense))
        assert relative_error(*gradients) < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_layers_compute_and_send_in_its_dtype(dtype: torch.dtype) -> None:
    network = bernoulli(0.0)
    all_reduce = collective(network, 2, "sender")
    column = column_layer(randn(D, 4 * F).float(), randn(4 * F).float(), 1, all_reduce)
    row = row_layer(randn(4 * F, D).float(), randn(D).float(), all_reduce)
    x = randn(7, 104, D).float().requires_grad_()  # 17,472 elements: 48 packets in fp32, 24 in half of it
    with torch.autocast("cpu", dtype=dtype):
        between = column(x)
        result = row(between)
    result.float().sum().backward()
    assert between.dtype == result.dtype == dtype
    assert x.grad.dtype == column.weight.grad.dtype == row.bias.grad.dtype == torch.float32
    assert network.report()["packets"].tolist() == [24] * 4
