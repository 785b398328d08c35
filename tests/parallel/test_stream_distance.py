"""How far apart the ranks' streams are."""

import itertools
import re
from collections.abc import Callable

import pytest
import torch

from lossytp.parallel.own_streams import stream_distance
from tests.parallel.conftest import NUM_LAYERS, WIDTH, tiny_batch, tiny_gpt2
from tests.parallel.dense_comparison import on_own_streams
from tests.parallel.sharing_modes import network_of, parallel


@on_own_streams
def test_distance_is_zero_without_losses_and_grows_with_them(mode: str) -> None:
    dense, batch, found = tiny_gpt2(), tiny_batch(), []
    for loss_rate in (0.0, 0.01, 0.05, 0.2):
        model = parallel(dense, loss_rate, mode)
        with torch.no_grad(), stream_distance(model) as distance:
            for _ in range(3):
                model(**batch)
        found.append(distance())
    assert found[0] == [0.0] * NUM_LAYERS
    for less, more in itertools.pairwise(found):
        assert len(more) == NUM_LAYERS
        assert all(a < b for a, b in zip(less, more, strict=True))


def test_distance_is_zero_over_a_reliable_network() -> None:
    model = parallel(tiny_gpt2(), 0.3, "own streams")
    with network_of(model).reliable(), stream_distance(model) as distance:
        model(**tiny_batch())
    assert distance() == [0.0] * NUM_LAYERS


@pytest.mark.parametrize("checkpointing", [False, True])
def test_distance_is_that_of_the_streams_from_their_mean(checkpointing: bool) -> None:
    """Over two passes of different batches: squares add up."""
    model, squares = parallel(tiny_gpt2(), 0.1, "own streams"), torch.zeros(NUM_LAYERS, 2, dtype=torch.float64)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    with stream_distance(model) as distance:
        for batch in (tiny_batch(), {name: tensor[:2] for name, tensor in tiny_batch().items()}):
            output = model(**batch, output_hidden_states=True)
            for layer, hidden in enumerate(output.hidden_states[1:-1]):  # the last is behind ln_f
                each = hidden.detach().view(4, -1)
                mean = each.mean(0)
                squares[layer, 0] += sum((stream - mean).norm() ** 2 for stream in each) / 4
                squares[layer, 1] += mean.norm() ** 2
            if checkpointing:
                output.loss.backward()
    expected = (squares[:-1, 0] / squares[:-1, 1]).sqrt().tolist()
    assert distance()[:-1] == pytest.approx(expected, rel=1e-12)
    assert distance()[-1] > 0
    before = distance()
    model(**tiny_batch())
    assert distance() == before, "nothing is measured after the block"


def test_distance_of_two_ranks_by_hand() -> None:
    """Streams (3, 4) and (5, 4) throughout: their mean (4, 4), and both 1 from it."""
    model = parallel(tiny_gpt2(), 0.0, "own streams", size=2)
    hook: Callable = lambda _, __, ___: torch.tensor([[[3.0, 4.0]], [[5.0, 4.0]]]).double().repeat(1, 1, WIDTH // 2)  # noqa: E731
    handles = [block.register_forward_hook(hook) for block in model.transformer.h]
    with stream_distance(model) as distance:
        model(torch.tensor([[5]]))
    assert distance() == pytest.approx([1 / 32**0.5] * NUM_LAYERS, rel=1e-14)
    for handle in handles:
        handle.remove()


def test_distance_needs_streams_of_the_ranks_own() -> None:
    line = "all ranks share one stream: give reliable_gather = False to parallelize, or leave stream_distance out"
    for mode in ("shared", "sequence, lossy gather"):
        with pytest.raises(ValueError, match=f"^{re.escape(line)}$"), stream_distance(parallel(tiny_gpt2(), 0.1, mode)):
            pass
