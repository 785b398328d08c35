"""Every way of sharing activations against the dense model: equal without losses, and far from it with them."""

import pytest
import torch

from tests.parallel.conftest import (
    NUM_LAYERS,
    gradient_error,
    gradients,
    relative_error,
    tiny_batch,
    tiny_gpt2,
    training_losses,
)
from tests.parallel.sharing_modes import (
    COMBINATIONS,
    MODES,
    assert_equals_dense,
    by_rank,
    every_kind,
    logits_of,
    lossy,
    modes_mostly_slow,
    network_of,
    parallel,
)


@every_kind
@pytest.mark.parametrize("size", [2, 4, 8])
@modes_mostly_slow
def test_without_losses_every_mode_equals_dense(mode: str, size: int, kind: str) -> None:
    dense = tiny_gpt2(kind)
    for padded in (False, True):
        assert_equals_dense(parallel(dense, 0.0, mode, size=size), dense, tiny_batch(kind, padded=padded))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "algorithm"), COMBINATIONS, ids=lambda value: value)
def test_without_losses_every_algorithm_equals_dense(mode: str, algorithm: str) -> None:
    dense = tiny_gpt2("classifier")
    batch = tiny_batch("classifier", padded=True)
    assert_equals_dense(parallel(dense, 0.0, mode, algorithm=algorithm), dense, batch)


REPAIRS = ["zero", "rescale", "rescale_counted", "stale", "local", "fec(5, 4)", "hadamard(8)", "retransmit(2)"]
REPAIRS += ["protect(0.1)", "protect(0.1) + hadamard(8)", "protect(0.1) + stale", "fec(5, 4) + rescale"]
REFUSED = [("sequence, lossy gather", "local"), ("exact adjoint", "local")]  # see test_lossy_network.py
WITH_REPAIRS = [(mode, repair) for mode in MODES for repair in REPAIRS if (mode, repair) not in REFUSED]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "repair"), WITH_REPAIRS, ids=lambda value: value)
def test_without_losses_every_repair_equals_dense(mode: str, repair: str) -> None:
    dense = tiny_gpt2("classifier")
    assert_equals_dense(parallel(dense, 0.0, mode, repair=repair), dense, tiny_batch("classifier"))


@every_kind
@modes_mostly_slow
def test_dropout_has_the_dense_models_masks(mode: str, kind: str) -> None:
    """Attention's own dropout aside, whose masks are of a rank's heads."""
    dense = tiny_gpt2(kind, embd_pdrop=0.2, resid_pdrop=0.3)
    assert_equals_dense(parallel(dense, 0.0, mode), dense, tiny_batch(kind, padded=True))


@every_kind
@modes_mostly_slow
def test_without_losses_ten_training_steps_equal_dense(mode: str, kind: str) -> None:
    dense, batch = tiny_gpt2(kind), tiny_batch(kind, padded=True)
    model = parallel(dense, 0.0, mode)
    expected = training_losses(dense, batch, steps=10)
    tolerance = 1e-6 if kind == "language model" else 1e-9
    assert training_losses(model, batch, steps=10) == pytest.approx(expected, abs=tolerance, rel=0)
    assert expected[-1] < 0.9 * expected[0], "ten steps must move the model"


@every_kind
@modes_mostly_slow
def test_with_losses_the_same_comparison_fails_by_far(mode: str, kind: str) -> None:
    """Control of everything above."""
    dense, batch = tiny_gpt2(kind), tiny_batch(kind)
    model = parallel(dense, 0.1, mode)
    found = by_rank(model, dense, gradients(model, batch))
    assert min(gradient_error(of_rank, gradients(dense, batch)) for of_rank in found) > 0.01
    assert min(relative_error(logits, dense(**batch).logits) for logits in logits_of(model, batch)) > 0.01


@every_kind
@modes_mostly_slow
def test_a_reliable_network_is_the_dense_model_too(mode: str, kind: str) -> None:
    dense, batch = tiny_gpt2(kind), tiny_batch(kind)
    model = parallel(dense, 0.3, mode, repair="stale")
    gradients(model, batch)  # fills what stale puts in
    before = network_of(model).state_dict()
    with network_of(model).reliable():
        assert_equals_dense(model, dense, batch)
    assert network_of(model).state_dict() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@modes_mostly_slow
def test_under_autocast_it_is_as_close_to_dense_as_autocast_is_to_itself(mode: str, dtype: torch.dtype) -> None:
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
def test_shards_are_rounded_for_their_gather_and_nothing_else(reliable_gather: bool) -> None:
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
        (torch.float32, {}),
        (torch.float64, {"attn_implementation": "eager"}),
        (torch.float64, {"embd_pdrop": 0.1, "attn_pdrop": 0.2, "resid_pdrop": 0.3}),
        (torch.float64, {"scale_attn_by_inverse_layer_idx": True}),
        (torch.float64, {"scale_attn_weights": False}),
        (torch.float64, {"n_inner": 48, "activation_function": "relu"}),
        (torch.float64, {"tie_word_embeddings": False}),
        (torch.float32, {"reorder_and_upcast_attn": True, "attn_implementation": "eager"}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_without_losses_other_configurations_equal_dense(dtype: torch.dtype, changes: dict) -> None:
    dense = tiny_gpt2(dtype=dtype, **changes)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_equals_dense(lossy(dense, 0.0), dense, tiny_batch(padded=True), tolerance)


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_implementation": "eager"},
        *({name: 0.2} for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")),
        {"scale_attn_by_inverse_layer_idx": True},
        {"activation_function": "relu"},
    ],
    ids=",".join,
)
def test_those_configurations_do_change_the_logits(changes: dict) -> None:
    """Control: a setting that did nothing would prove nothing. Attention in eager mode alone is the same formula."""
    torch.manual_seed(5)
    batch = tiny_batch()
    with torch.no_grad():
        error = relative_error(tiny_gpt2(**changes)(**batch).logits, tiny_gpt2()(**batch).logits)
    assert (error > 1e-3) == ("attn_implementation" not in changes)


def test_hidden_states_and_attention_weights_equal_dense() -> None:
    dense = tiny_gpt2(attn_implementation="eager")
    settings = {"output_hidden_states": True, "output_attentions": True}
    expected, actual = (model(**tiny_batch(), **settings) for model in (dense, lossy(dense, 0.0)))
    assert (len(actual.hidden_states), len(actual.attentions)) == (NUM_LAYERS + 1, NUM_LAYERS)
    for name in ("hidden_states", "attentions"):
        assert all(relative_error(*pair) < 1e-12 for pair in zip(actual[name], expected[name], strict=True))


def test_one_rank_has_nobody_to_send_to() -> None:
    dense = tiny_gpt2()
    parallel = lossy(dense, 0.5, size=1, algorithm="direct")
    assert_equals_dense(parallel, dense, tiny_batch(), 1e-12)
    assert network_of(parallel).report().empty
