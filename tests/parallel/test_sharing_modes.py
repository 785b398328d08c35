"""Every way of sharing activations against the dense model."""

import pytest
import torch

from tests.parallel.conftest import gradient_error, gradients, relative_error, tiny_batch, tiny_gpt2, training_losses
from tests.parallel.dense_comparison import KINDS, assert_equals_dense, every_kind, logits_of, new_modes
from tests.parallel.sharing_modes import COMBINATIONS, MODES, by_rank, network_of, parallel

pytestmark = pytest.mark.slow


@every_kind
@pytest.mark.parametrize("size", [2, 4, 8])
@new_modes
def test_without_losses_every_mode_equals_dense(mode: str, size: int, kind: str) -> None:
    dense = tiny_gpt2(kind)
    for padded in (False, True):
        assert_equals_dense(parallel(dense, 0.0, mode, size=size), dense, tiny_batch(kind, padded=padded))


@pytest.mark.parametrize(("mode", "algorithm"), COMBINATIONS, ids=lambda value: value)
def test_without_losses_every_algorithm_equals_dense(mode: str, algorithm: str) -> None:
    dense = tiny_gpt2("classifier")
    batch = tiny_batch("classifier", padded=True)
    assert_equals_dense(parallel(dense, 0.0, mode, algorithm=algorithm), dense, batch)


REPAIRS = ["rescale", "rescale_counted", "stale", "local", "fec(5, 4)", "hadamard(8)", "retransmit(2)"]
REPAIRS += ["protect(0.1)", "protect(0.1) + hadamard(8)", "protect(0.1) + stale", "fec(5, 4) + rescale"]


REFUSED = [("sequence, lossy gather", "local"), ("exact adjoint", "local")]  # see test_comm_config.py
WITH_REPAIRS = [(mode, repair) for mode in MODES for repair in REPAIRS if (mode, repair) not in REFUSED]


@pytest.mark.parametrize(("mode", "repair"), WITH_REPAIRS, ids=lambda value: value)
def test_without_losses_every_repair_equals_dense(mode: str, repair: str) -> None:
    dense = tiny_gpt2("classifier")
    assert_equals_dense(parallel(dense, 0.0, mode, repair=repair), dense, tiny_batch("classifier"))


@every_kind
@new_modes
def test_dropout_has_the_dense_models_masks(mode: str, kind: str) -> None:
    """Attention's own dropout aside, whose masks are of a rank's heads."""
    dense = tiny_gpt2(kind, embd_pdrop=0.2, resid_pdrop=0.3)
    assert_equals_dense(parallel(dense, 0.0, mode), dense, tiny_batch(kind, padded=True))


def test_dropout_does_change_the_result() -> None:
    """Control of the test above."""
    dense, batch = tiny_gpt2(embd_pdrop=0.2, resid_pdrop=0.3), tiny_batch()
    for model in (dense, parallel(dense, 0.0, "own streams")):
        torch.manual_seed(6)
        first, second = logits_of(model, batch), logits_of(model, batch)
        assert relative_error(first, second) > 0.01
        model.eval()
        assert torch.equal(logits_of(model, batch), logits_of(model, batch))


@every_kind
@new_modes
def test_without_losses_ten_training_steps_equal_dense(mode: str, kind: str) -> None:
    dense, batch = tiny_gpt2(kind), tiny_batch(kind, padded=True)
    model = parallel(dense, 0.0, mode)
    expected = training_losses(dense, batch, steps=10)
    tolerance = 1e-6 if kind == "language model" else 1e-9
    assert training_losses(model, batch, steps=10) == pytest.approx(expected, abs=tolerance, rel=0)
    assert expected[-1] < 0.9 * expected[0], "ten steps must move the model"


@every_kind
@new_modes
def test_with_losses_the_same_comparison_fails_by_far(mode: str, kind: str) -> None:
    """Control of everything above."""
    dense, batch = tiny_gpt2(kind), tiny_batch(kind)
    model = parallel(dense, 0.1, mode)
    found = by_rank(model, dense, gradients(model, batch))
    assert min(gradient_error(of_rank, gradients(dense, batch)) for of_rank in found) > 0.01
    assert min(relative_error(logits, dense(**batch).logits) for logits in logits_of(model, batch)) > 0.01


@pytest.mark.parametrize("kind", KINDS)
@new_modes
def test_a_reliable_network_is_the_dense_model_too(mode: str, kind: str) -> None:
    dense, batch = tiny_gpt2(kind), tiny_batch(kind)
    model = parallel(dense, 0.3, mode, repair="stale")
    gradients(model, batch)  # fills what stale puts in
    before = network_of(model).state_dict()
    with network_of(model).reliable():
        assert_equals_dense(model, dense, batch)
    assert network_of(model).state_dict() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@new_modes
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
