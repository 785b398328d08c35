"""`protect_layers`: the first and the last blocks lose nothing, and what they send again is counted."""

import re

import pytest

import lossytp as ltp
from lossytp.network.repairs import repair_named
from lossytp.parallel.collectives import collective_of
from lossytp.training.groups import BackendNetwork
from tests.parallel.conftest import bernoulli, relative_error, tiny_batch, tiny_gpt2
from tests.parallel.families import tiny
from tests.parallel.sharing_modes import MODES, WIRE, assert_equals_dense, parallel

BLOCKS, PACKETS = 4, 3 * 3 * 6 * 64 / 8  # of a sum: 3 of 4 ranks send each element of 3 sequences of 6 tokens
IDS = tiny_batch()["input_ids"][:3, :6]


def llama():
    return tiny("llama", num_hidden_layers=BLOCKS).eval()


def report_of(model):
    return collective_of(model).network.report()


@pytest.mark.parametrize("mode", ["shared", "own streams", "sequence, lossy gather", "exact adjoint"])
@pytest.mark.parametrize("others", ["", " + rescale", " + hadamard(4)", " + stale"])
def test_all_layers_protected_equal_the_dense_model(mode, others):
    dense = tiny_gpt2()
    ends = f"protect_layers(1, {dense.config.n_layer - 1})"
    assert_equals_dense(parallel(dense, 0.9, mode, repair=ends + others), dense, tiny_batch())


def test_only_the_ends_are_reliable_and_what_they_send_again_is_counted():
    dense = llama()
    models = [parallel(dense, 0.5, "shared", repair=repair) for repair in ("protect_layers(1, 2)", "zero")]
    for model in models:
        model(input_ids=IDS)
    ends, all_lossy = (report_of(model).groupby("layer").sum(numeric_only=True) for model in models)
    for layer in (0, 2, 3):
        assert ends["missing"][layer] == 0
        assert ends["packets"][layer] - ends["extra"][layer] == 2 * PACKETS
        assert ends["extra"][layer] == pytest.approx(2 * PACKETS, rel=0.2)  # 1 / (1 - p) - 1 for each
    assert (ends["packets"][1], ends["extra"][1]) == (2 * PACKETS, 0)
    assert ends["missing"][1] == pytest.approx(PACKETS, rel=0.2)
    assert all_lossy["missing"].min() > 0, "control"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_it_joins_other_repairs_in_any_place(order):
    repair = " + ".join(("protect_layers(1, 0)", "protect_first(2)")[each] for each in order)
    dense = llama()
    model = parallel(dense, 0.5, "shared", repair=repair)
    logits, expected = model(input_ids=IDS).logits, dense(input_ids=IDS).logits
    assert relative_error(logits[:, :2], expected[:, :2]) < 1e-9
    assert relative_error(logits[:, 2:], expected[:, 2:]) > 1e-3
    missing = report_of(model).groupby("layer")["missing"].sum()
    assert (missing > 0).tolist() == [False, True, True, True]
    assert str(repair_named(repair)) == repair


@pytest.mark.parametrize(
    ("repair", "loss_rate", "message"),
    [
        ("protect_layers(3, 2)", 0.1, "repair = 'protect_layers(3, 2)': first + last = 5 is above 4: give at most"),
        ("protect_layers(0, 0)", 0.1, "first + last = 0 is below 1"),
        ("protect_layers(-1, 2)", 0.1, "first = -1 is below 0"),
        ("protect_layers(1, 1) + protect_layers(2, 2)", 0.1, "cannot be joined"),
        ("protect_layers(2, 2)", 1.0, "loses all"),
    ],
)
def test_what_does_not_work_is_refused_in_one_line(repair, loss_rate, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        parallel(llama(), loss_rate, "shared", repair=repair)
    assert "\n" not in str(refusal.value)


def test_other_layers_and_positions_are_refused():
    with pytest.raises(ValueError, match="works only in this project's layers"):
        BackendNetwork(loss_rate=0.1, repair="protect_layers(1, 1)")
    network = bernoulli(0.1, wire=WIRE, scope=ltp.Scope(positions=(0, 2)))
    with pytest.raises(ValueError, match="does not work where only some positions"):
        ltp.parallelize(llama(), network, tensor_parallel_size=4, repair="protect_layers(1, 1)", **MODES["shared"])
