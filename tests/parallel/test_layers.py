"""f and g in every mode: models against the dense one and ranks one by one, layers against what defines them.

Shapes: B examples, T tokens, D model width, R ranks, F outputs of one rank, K inputs of one rank.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lossytp as ltp
from lossytp.network.lossy_network import CommConfig
from lossytp.network.scope import Site
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup
from lossytp.parallel.layers import ColumnParallelLinear, RowParallelLinear
from lossytp.parallel.mappings import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region
from tests.parallel.conftest import (
    NUM_LAYERS,
    gradient_error,
    gradients,
    relative_error,
    tiny_batch,
    tiny_gpt2,
    training_losses,
)
from tests.parallel.rank_by_rank import RankByRank, Ranks, training_loss
from tests.parallel.sharing_modes import (
    ALGORITHMS,
    COMBINATIONS,
    MODES,
    WIRE,
    assert_equals_dense,
    by_rank,
    every_kind,
    fresh_gradients,
    logits_of,
    lossy,
    modes_mostly_slow,
    network_of,
    parallel,
)

WAYS = {  # of the reference, by mode
    "shared": "shared",
    "own streams": "own",
    "own copies": "own",
    "sequence": "sequence",
    "sequence, lossy gather": "sequence, lossy gather",
    "exact adjoint": "adjoint",
}


def small_batch(kind: str, padded: bool) -> dict[str, Tensor]:
    return {name: tensor[-3:] for name, tensor in tiny_batch(kind, padded=padded).items()}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("mode", "algorithm"), COMBINATIONS, ids=lambda value: value)
def test_with_losses_models_equal_ranks_one_by_one(mode, algorithm, size):
    """Each rank's logits; each shard's gradient of its own rank's training loss; replicated parameters' mean, or own.

    Over two steps, since links carry on.
    """
    kind, padded = ("language model", False) if size == 2 else ("classifier", True)
    dense, batch = tiny_gpt2(kind), small_batch(kind, padded)
    model = parallel(dense, 0.1, mode, size=size, seed=3, algorithm=algorithm)
    twin = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1), seed=3, wire=WIRE)
    mask_BT = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    for _ in range(2):
        reference = RankByRank(dense, Ranks(twin, algorithm, size, WAYS[mode]))
        expected = reference.logits(batch["input_ids"], mask_BT)
        sum(training_loss(logits, batch) for logits in expected).backward()

        output = model(**batch)
        actual = getattr(output, "rank_logits", output.logits.unsqueeze(0))
        assert len(actual) == len(expected)
        assert max(map(relative_error, actual, expected)) < 1e-12
        assert torch.equal(output.logits, actual[0])
        mean = torch.stack([training_loss(logits, batch) for logits in actual]).mean()
        assert output.loss.item() == pytest.approx(mean.item(), rel=1e-6 if kind == "language model" else 1e-12)
        found = fresh_gradients(model, mean)
        assert gradient_error(found, reference.gradients(own_copies=mode == "own copies")) < 1e-12
    assert network_of(model).state_dict()["links"] == twin.state_dict()["links"]


def test_without_its_own_losses_the_reference_is_another():
    """Control: neither another seed, nor another algorithm, nor another way is as near."""
    dense, batch = tiny_gpt2(), small_batch("language model", False)
    mask_BT = torch.ones_like(batch["input_ids"])
    logits = parallel(dense, 0.1, "own streams", algorithm="ring")(**batch).rank_logits
    for seed, algorithm, way in [(1, "ring", "own"), (0, "direct", "own"), (0, "ring", "shared"), (0, "ring", "own")]:
        twin = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1), seed=seed, wire=WIRE)
        expected = RankByRank(dense, Ranks(twin, algorithm, 4, way)).logits(batch["input_ids"], mask_BT)
        errors = [relative_error(logits[rank], expected[rank % len(expected)]) for rank in range(4)]
        assert (min(errors) > 1e-3) == ((seed, algorithm, way) != (0, "ring", "own"))
        assert relative_error(logits[0], logits[1]) > 1e-3


# --- one layer

B, T, D, F, K = 3, 4, 8, 5, 6


def randn(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return tensor.requires_grad_(grad)


def collective(loss_rate: float = 0.0, size: int = 4, **comm: Any) -> LossyCollective:
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=loss_rate), seed=4, wire=ltp.Wire(elements=2))
    return LossyCollective(network, RankGroup(size), CommConfig.named(**comm))


def column(all_reduce: LossyCollective, projections: int = 1) -> Any:
    width = projections * all_reduce.group.size * F
    weight, bias = nn.Parameter(randn(D, width, seed=11)), nn.Parameter(randn(width, seed=12))
    widths = [width // projections] * projections
    return ColumnParallelLinear(
        *weight.shape, dense=(weight, bias), widths=widths, collective=all_reduce, layer=0, module="mlp"
    )


def row(all_reduce: LossyCollective, *, own_bias: bool = False) -> Any:
    weight, bias = nn.Parameter(randn(all_reduce.group.size * K, D, seed=13)), nn.Parameter(randn(D, seed=14))
    return RowParallelLinear(
        *weight.shape, dense=(weight, bias), collective=all_reduce, layer=0, module="mlp", own_bias=own_bias
    )


@pytest.mark.parametrize("loss_rate", [0.0, 0.3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fused_layers_equal_f_and_g_written_out(algorithm, loss_rate):
    """y = g(f(x) A B): outputs, gradients of x and of both weights, and the links' states."""
    fused, plain = (collective(loss_rate, algorithm=algorithm) for _ in range(2))
    size = fused.group.size
    first = column(fused)
    last = RowParallelLinear(size * F, D, bias=False, collective=fused, layer=0, module="mlp").double()
    x = randn(B, T, D, seed=1, grad=True)
    y = last(first(x))
    y.backward(dy := randn(B, T, D, seed=2))

    a_RDF = torch.stack(first.weight.detach().chunk(size, 1)).requires_grad_()
    b_RFD = last.weight.detach().clone().requires_grad_()
    bias_R1F = first.bias.detach().view(size, 1, F)
    x_RTD = x.detach().view(1, -1, D).repeat(size, 1, 1).requires_grad_()
    hidden = copy_to_tensor_parallel_region(x_RTD, plain, Site(0, "mlp", "backward")) @ a_RDF + bias_R1F
    y_RTD = reduce_from_tensor_parallel_region(hidden @ b_RFD, plain, Site(0, "mlp", "forward"))
    y_RTD.backward(dy.view(1, -1, D).expand(size, -1, -1))

    for rank in range(size):
        assert relative_error(y_RTD[rank].view_as(y), y) < 1e-14
        assert relative_error(x_RTD.grad[rank].view_as(x), x.grad) < 1e-14
    assert relative_error(torch.cat([*a_RDF.grad], 1), first.weight.grad) < 1e-14
    assert relative_error(b_RFD.grad, last.weight.grad) < 1e-14
    assert fused.network.state_dict()["links"] == plain.network.state_dict()["links"]
    lossless = hidden.detach() @ b_RFD.detach()
    assert (relative_error(lossless.sum(0), y_RTD[0]) > 1e-3) == (loss_rate > 0)


def test_layers_built_from_sizes_hold_shards_of_a_linear_layer():
    """As in Megatron: (in_features, out_features). torch's generator draws the dense weights once."""
    torch.manual_seed(0)
    dense = nn.Linear(D, 4 * F), nn.Linear(4 * K, D)
    torch.manual_seed(0)
    first = ColumnParallelLinear(D, 4 * F, collective=collective(), layer=0, module="mlp")
    last = RowParallelLinear(4 * K, D, collective=collective(), layer=0, module="mlp")
    for layer, linear in zip((first, last), dense, strict=True):
        x = torch.randn(B, T, linear.in_features)
        torch.testing.assert_close(layer(x), linear(x))


@pytest.mark.parametrize("comm", [{}, {"reliable_gather": False}, {"sequence_parallel": True}], ids=str)
def test_layers_of_either_kind_pass_gradients_on_whatever_is_frozen(comm):
    all_reduce = collective(**comm)
    streams = 4 if all_reduce.comm.own_streams else 1
    expected = None
    for frozen in ([], ["weight"], ["bias"], ["weight", "bias"]):
        layers = column(all_reduce), row_after_column(all_reduce)
        for layer in layers:
            for name in frozen:
                getattr(layer, name).requires_grad_(False)
        x = randn(streams * B, T, D, seed=1, grad=True)
        layers[1](layers[0](x)).square().sum().backward()
        expected = x.grad if expected is None else expected
        assert torch.equal(x.grad, expected)
        for layer in layers:
            assert [name for name, parameter in layer.named_parameters() if parameter.grad is None] == frozen
    assert expected.any()


def row_after_column(all_reduce: LossyCollective) -> Any:
    weight, bias = nn.Parameter(randn(4 * F, D, seed=13)), nn.Parameter(randn(D, seed=14))
    return RowParallelLinear(*weight.shape, dense=(weight, bias), collective=all_reduce, layer=0, module="mlp")


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
@pytest.mark.parametrize("repair", ["zero", "rescale_counted"])
def test_weights_get_no_gradient_of_a_sum_that_a_rank_lacks(algorithm: str, repair: str, masked: bool) -> None:
    scope = ltp.Scope(phase="gather")
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.5), seed=4, wire=ltp.Wire(elements=2), scope=scope)
    comm = CommConfig.named(algorithm=algorithm, repair=repair, reliable_gather=False, masked_backward=masked)
    all_reduce = LossyCollective(network, RankGroup(4), comm)
    layer, upstream = row_after_column(all_reduce), randn(4 * B, T, D, seed=1)
    x = randn(4 * B, T, F, grad=True)
    y = layer(x)
    y.backward(upstream / 4)  # each rank's training loss is a quarter of the mean's
    arrived = (y != layer.bias).view(4, -1, D)
    assert 0.2 < arrived.double().mean() < 0.9
    dy_RTD = upstream.view(4, -1, D) * (arrived if masked else 1)
    torch.testing.assert_close(x.grad, torch.bmm(dy_RTD, layer.weight.transpose(1, 2)).view(x.shape))
    torch.testing.assert_close(layer.weight.grad, torch.bmm(x.detach().view(4, -1, F).transpose(1, 2), dy_RTD))
    torch.testing.assert_close(layer.bias.grad, upstream.sum((0, 1)) / 4)


@pytest.mark.parametrize("comm", [{}, {"reliable_gather": False}, {"sequence_parallel": True}], ids=str)
def test_an_input_that_needs_no_gradient_reduces_nothing_backward(comm):
    all_reduce = collective(**comm)
    layer = column(all_reduce)
    layer(randn(4 * B, T, D)).sum().backward()
    assert all_reduce.network.report().empty
    assert layer.weight.grad is not None


@pytest.mark.parametrize(
    "comm",
    [{}, {"reliable_gather": False}, {"sequence_parallel": True, "reliable_gather": False}, {"exact_adjoint": True}],
    ids=str,
)
def test_neither_inputs_nor_gradients_of_the_caller_are_modified(comm):
    all_reduce = collective(0.5, repair="rescale", wire_dtype="bf16", **comm)
    first, second = column(all_reduce, projections=1), row_after_column(all_reduce)
    x, upstream = randn(4 * B, T, D, grad=True), randn(4 * B, T, D, seed=1)
    between = first(x)
    kept = between.detach().clone()
    second(between).backward(upstream)
    assert torch.equal(x, randn(4 * B, T, D))
    assert torch.equal(upstream, randn(4 * B, T, D, seed=1))
    assert torch.equal(between, kept)
    assert torch.equal(second.weight, randn(4 * F, D, seed=13).view(4, F, D))


@pytest.mark.parametrize(
    ("comm", "sent"),
    [
        *((comm, [("all_reduce", "reduce")]) for comm in ({}, {"exact_adjoint": True})),
        ({"reliable_gather": False}, [("all_reduce", phase) for phase in ("reduce", "gather")]),
        ({"sequence_parallel": True}, [("reduce_scatter", "reduce")]),
        (
            {"sequence_parallel": True, "reliable_gather": False},
            [("reduce_scatter", "reduce"), ("all_gather", "gather")],
        ),
    ],
    ids=str,
)
def test_what_is_sent_is_counted_by_direction_operation_and_phase(comm, sent):
    """All of it B T D elements; two a packet, of a chunk to each of three others. The adjoint sends nothing."""
    all_reduce = collective(**comm)
    streams = 4 if all_reduce.comm.own_streams else 1
    x = randn(streams * B, T, D, grad=True)
    row_after_column(all_reduce)(column(all_reduce)(x)).sum().backward()
    table = all_reduce.network.report()
    packets = table.groupby(["direction", "operation", "phase"])["packets"].sum()
    assert sorted(packets.index) == sorted((way, *each) for way in ("forward", "backward") for each in sent)
    assert set(packets) == {3 * B * T * D // 2}


def test_when_everything_is_lost_g_still_passes_the_whole_gradient_and_f_none():
    sender = collective(1.0, algorithm="sender")
    last, x, upstream = row(sender), randn(B, T, 4 * K, seed=1, grad=True), randn(B, T, D)
    last(x).backward(upstream)
    torch.testing.assert_close(x.grad, upstream @ last.weight.view(4 * K, D).t())

    first, x, upstream = column(sender), randn(B, T, D, seed=1, grad=True), randn(B, T, 4 * F)
    first(x).backward(upstream)
    assert not x.grad.any()
    torch.testing.assert_close(first.weight.grad.view(D, -1), x.flatten(0, 1).t() @ upstream.flatten(0, 1))


def test_layers_take_any_leading_axes_and_strides():
    all_reduce = collective(algorithm="direct")
    first, last = column(all_reduce), row_after_column(all_reduce)
    x_DT = randn(D, T, grad=True)
    for x in (x_DT.t(), x_DT.t().expand(B, T, D), x_DT.t()[0]):
        result = last(first(x))
        dense = (x @ first.weight.view(D, -1) + first.bias.view(-1)) @ last.weight.view(-1, D) + last.bias
        assert relative_error(result, dense) < 1e-14
        gradients = (torch.autograd.grad(y.square().sum(), x_DT, retain_graph=True)[0] for y in (result, dense))
        assert relative_error(*gradients) < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_layers_compute_and_send_in_its_dtype(dtype):
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.0))
    all_reduce = LossyCollective(network, RankGroup(4), CommConfig.named(algorithm="sender"))
    first, last = column(all_reduce).float(), row_after_column(all_reduce).float()
    x = randn(7, 312, D).float().requires_grad_()  # 17,472 elements: 48 packets in fp32, 24 in half of it
    with torch.autocast("cpu", dtype=dtype):
        between = first(x)
        result = last(between)
    result.float().sum().backward()
    assert between.dtype == result.dtype == dtype
    assert x.grad.dtype == first.weight.grad.dtype == last.bias.grad.dtype == torch.float32
    assert network.report()["packets"].tolist() == [24] * 8


@every_kind
@pytest.mark.parametrize("size", [2, 4, 8])
@modes_mostly_slow
def test_without_losses_every_mode_equals_dense(mode, size, kind):
    dense = tiny_gpt2(kind)
    for padded in (False, True):
        assert_equals_dense(parallel(dense, 0.0, mode, size=size), dense, tiny_batch(kind, padded=padded))


REPAIRS = ["zero", "rescale", "rescale_counted", "stale", "local", "fec(5, 4)", "hadamard(8)", "retransmit(2)"]
REPAIRS += ["protect(0.1)", "protect(0.1) + hadamard(8)", "protect(0.1) + stale", "fec(5, 4) + rescale"]
REFUSED = [("sequence, lossy gather", "local"), ("exact adjoint", "local")]  # see test_lossy_network.py
WITH_REPAIRS = [(mode, repair) for mode in MODES for repair in REPAIRS if (mode, repair) not in REFUSED]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "repair"), WITH_REPAIRS, ids=lambda value: value)
def test_without_losses_every_repair_equals_dense(mode, repair):
    dense = tiny_gpt2("classifier")
    assert_equals_dense(parallel(dense, 0.0, mode, repair=repair), dense, tiny_batch("classifier"))


@every_kind
@modes_mostly_slow
def test_dropout_has_the_dense_models_masks(mode, kind):
    """Attention's own dropout aside, whose masks are of a rank's heads."""
    dense = tiny_gpt2(kind, embd_pdrop=0.2, resid_pdrop=0.3)
    assert_equals_dense(parallel(dense, 0.0, mode), dense, tiny_batch(kind, padded=True))


@every_kind
@modes_mostly_slow
def test_without_losses_ten_training_steps_equal_dense(mode, kind):
    dense, batch = tiny_gpt2(kind), tiny_batch(kind, padded=True)
    model = parallel(dense, 0.0, mode)
    expected = training_losses(dense, batch, steps=10)
    tolerance = 1e-6 if kind == "language model" else 1e-9
    assert training_losses(model, batch, steps=10) == pytest.approx(expected, abs=tolerance, rel=0)
    assert expected[-1] < 0.9 * expected[0], "ten steps must move the model"


@every_kind
@modes_mostly_slow
def test_with_losses_the_same_comparison_fails_by_far(mode, kind):
    """Control of everything above."""
    dense, batch = tiny_gpt2(kind), tiny_batch(kind)
    model = parallel(dense, 0.1, mode)
    found = by_rank(model, dense, gradients(model, batch))
    assert min(gradient_error(of_rank, gradients(dense, batch)) for of_rank in found) > 0.01
    assert min(relative_error(logits, dense(**batch).logits) for logits in logits_of(model, batch)) > 0.01


@every_kind
@modes_mostly_slow
def test_a_reliable_network_is_the_dense_model_too(mode, kind):
    dense, batch = tiny_gpt2(kind), tiny_batch(kind)
    model = parallel(dense, 0.3, mode, repair="stale")
    gradients(model, batch)  # fills what stale puts in
    before = network_of(model).state_dict()
    with network_of(model).reliable():
        assert_equals_dense(model, dense, batch)
    assert network_of(model).state_dict() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@modes_mostly_slow
def test_under_autocast_it_is_as_close_to_dense_as_autocast_is_to_itself(mode, dtype):
    dense, batch = tiny_gpt2("classifier", dtype=dtype), tiny_batch("classifier", padded=True)
    model, exact = parallel(dense, 0.0, mode), gradients(dense, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounding = gradient_error(gradients(dense, batch), exact)
        found = gradients(model, batch)
    assert {gradient.dtype for gradient in found.values()} == {dtype}
    for of_rank in by_rank(model, dense, found):
        assert gradient_error(of_rank, exact) < 2 * rounding + 1e-12
    assert (rounding > 1e-3) == (dtype == torch.float32), "autocast leaves float64 as it is"


@pytest.mark.parametrize("reliable_gather", [True, False])
def test_shards_are_rounded_for_their_gather_and_nothing_else(reliable_gather):
    """At p = 0 what each rank gathers is rounded, whether or not gathers may lose packets."""
    dense, batch = tiny_gpt2("classifier"), tiny_batch("classifier")
    logits = []
    for gather in (True, reliable_gather):
        how = {"sequence_parallel": True, "reliable_gather": gather, "wire_dtype": "bf16"}
        logits.append(parallel(dense, 0.0, "shared", **how)(**batch).logits)
    assert torch.equal(*logits)
    error = (logits[0] - dense(**batch).logits).abs().max() / dense(**batch).logits.abs().max()
    assert 1e-5 < error < 5e-2


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        *((torch.float32, {}), (torch.float64, {"attn_implementation": "eager"})),
        (torch.float64, {"embd_pdrop": 0.1, "attn_pdrop": 0.2, "resid_pdrop": 0.3}),
        *((torch.float64, {"scale_attn_by_inverse_layer_idx": True}), (torch.float64, {"scale_attn_weights": False})),
        (torch.float64, {"n_inner": 48, "activation_function": "relu"}),
        (torch.float64, {"tie_word_embeddings": False}),
        (torch.float32, {"reorder_and_upcast_attn": True, "attn_implementation": "eager"}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_without_losses_other_configurations_equal_dense(dtype, changes):
    dense = tiny_gpt2(dtype=dtype, **changes)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_equals_dense(lossy(dense, 0.0), dense, tiny_batch(padded=True), tolerance)


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_implementation": "eager"},
        *({name: 0.2} for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")),
        *({"scale_attn_by_inverse_layer_idx": True}, {"activation_function": "relu"}),
    ],
    ids=",".join,
)
def test_those_configurations_do_change_the_logits(changes):
    """Control: a setting that did nothing would prove nothing. Attention in eager mode alone is the same formula."""
    torch.manual_seed(5)
    batch = tiny_batch()
    with torch.no_grad():
        error = relative_error(tiny_gpt2(**changes)(**batch).logits, tiny_gpt2()(**batch).logits)
    assert (error > 1e-3) == ("attn_implementation" not in changes)


def test_hidden_states_and_attention_weights_equal_dense():
    dense = tiny_gpt2(attn_implementation="eager")
    settings = {"output_hidden_states": True, "output_attentions": True}
    expected, actual = (model(**tiny_batch(), **settings) for model in (dense, lossy(dense, 0.0)))
    assert (len(actual.hidden_states), len(actual.attentions)) == (NUM_LAYERS + 1, NUM_LAYERS)
    for name in ("hidden_states", "attentions"):
        assert all(relative_error(*pair) < 1e-12 for pair in zip(actual[name], expected[name], strict=True))


def test_one_rank_has_nobody_to_send_to():
    dense = tiny_gpt2()
    parallel = lossy(dense, 0.5, size=1, algorithm="direct")
    assert_equals_dense(parallel, dense, tiny_batch(), 1e-12)
    assert network_of(parallel).report().empty
