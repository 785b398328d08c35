"""Test the errors of a model's sums against their closed form, the model's own streams, and hand-made losses."""

import numpy as np
import pytest
import torch

from lossytp.parallel.collectives import all_reduce
from lossytp.training.groups import NetworkSettings
from paper.sums import _squared_streams, contributions, sum_errors, sums_of
from paper.theory import expected_squared_error
from tests.parallel.conftest import tiny_gpt2
from tests.parallel.families import VOCABULARY, tiny

RANKS = 4


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def dense(request):
    return (tiny_gpt2() if request.param == "gpt2" else tiny("llama")).eval()


@pytest.fixture(scope="module")
def blocks():
    return torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))


def settings(**changed):
    return NetworkSettings(**{"tensor_parallel_size": RANKS, "mtu_bytes": 200, "loss_rate": 0.1, **changed})


def test_errors_are_those_of_the_same_losses_drawn_by_hand(dense, blocks):
    network, ratios, relative = settings().build(), [], []
    for ids in blocks:
        sums = sums_of(dense, RANKS)
        streams = _squared_streams(dense, ids, sums)
        for (_, parts), stream in zip(contributions(dense, ids, sums, RANKS), streams, strict=True):
            total = parts.sum(0)
            errors = (all_reduce(parts, network)[0] - total).view(len(ids), -1).square().sum(1)
            ratios.append(float(errors.sum() / total.square().sum()))
            relative.append(float((errors / stream).mean()))
    table = sum_errors(dense, blocks, [settings()], draws=1)
    assert table["squared_error"].item() == pytest.approx(np.mean(ratios))
    assert table["stream_error"].item() == pytest.approx(np.mean(relative))


def test_the_stream_after_a_layer_is_its_hidden_state(dense, blocks):
    with torch.no_grad():
        hidden = dense(input_ids=blocks[:1], output_hidden_states=True).hidden_states
        sums = sums_of(dense, RANKS)
        streams = _squared_streams(dense, blocks[0], sums)
    assert [(split.layer, split.module) for split in sums[:2]] == [(0, "attention"), (0, "mlp")]
    torch.testing.assert_close(streams[1], hidden[1][0].square().sum(1))


def test_the_mean_error_is_the_closed_form_with_the_parts_coherence(dense, blocks):
    sums = sums_of(dense, RANKS)
    expected = []
    for ids in blocks:
        for _, parts in contributions(dense, ids, sums, RANKS):
            coherence = (float(parts.sum(0).square().sum() / parts.square().sum()) - 1) / (RANKS - 1)
            expected.append(expected_squared_error(settings().comm(), RANKS, 0.1, coherence))
    table = sum_errors(dense, blocks, [settings()], draws=60)
    assert table["squared_error"].item() == pytest.approx(np.mean(expected), rel=0.1)


def test_hadamard_keeps_the_error_and_protection_lowers_it(dense, blocks):
    networks = [settings(repair=repair) for repair in ("zero", "hadamard(8)", "protect(0.3)")]
    errors = sum_errors(dense, blocks, networks, draws=30)["squared_error"].to_numpy()
    assert errors[1] == pytest.approx(errors[0], rel=0.15)
    assert errors[2] < 0.9 * errors[0]
    both = sum_errors(dense, blocks, [settings(reliable_gather=False)], draws=30)["squared_error"].item()
    assert both > 1.3 * errors[0], "losses on the way back add to the error"


def test_only_the_sums_in_scope_lose_packets(dense, blocks):
    networks = [settings(**scope) for scope in ({}, {"lossy_layers": "0:1"}, {"lossy_direction": "forward"})]
    whole, first, forward = sum_errors(dense, blocks, networks, draws=20)["squared_error"]
    assert forward == whole
    assert 0.3 * whole < first < 0.7 * whole, "one layer of two"
    with pytest.raises(ValueError, match="lossy_direction = 'backward' loses nothing in an evaluation: leave it out"):
        sum_errors(dense, blocks, [settings(lossy_direction="backward")])


def test_no_loss_is_no_error(dense, blocks):
    assert (sum_errors(dense, blocks, [settings(loss_rate=0.0)]).to_numpy() == 0).all()


def test_stale_is_refused_by_name(dense, blocks):
    with pytest.raises(ValueError, match=r"repair = 'stale' does not work .*: choose another"):
        sum_errors(dense, blocks, [settings(repair="stale")])


def test_networks_of_two_sizes_and_models_with_norms_behind_their_sums_are_refused(dense, blocks):
    with pytest.raises(ValueError, match=r"networks = \[\] is not a list of at least one value"):
        sum_errors(dense, blocks, [])
    with pytest.raises(ValueError, match=r"networks have tensor_parallel_size 2 and 4: give one size"):
        sum_errors(dense, blocks, [settings(), settings(tensor_parallel_size=2)])
    with pytest.raises(ValueError, match=r"Olmo2ForCausalLM does not add each sum to its residual stream"):
        sum_errors(tiny("olmo2").eval(), blocks, [settings()])
