"""Logits of a split vocabulary whose gather loses packets in evaluation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lossytp as ltp
from lossytp.parallel.vocabulary import split_vocabulary_
from tests.parallel.conftest import tiny_batch, tiny_gpt2
from tests.parallel.distributed_models import WIRE

SIZE, TOKENS = 2, 97
COLUMNS = 49  # of each rank, padded


def evaluation(loss_rate: float, **options: Any) -> Any:
    lossy = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=loss_rate), seed=0, wire=WIRE)
    if options.pop("processes", False):
        ltp.init_process_group(lossy)
    model = ltp.parallelize(tiny_gpt2(), lossy, tensor_parallel_size=SIZE)
    split_vocabulary_(model, lossy_gather=True, **options)
    with torch.no_grad():
        return model.eval()(input_ids=tiny_batch()["input_ids"])


def dense_logits() -> Tensor:
    with torch.no_grad():
        return tiny_gpt2().eval()(input_ids=tiny_batch()["input_ids"]).logits


def test_without_losses_every_rank_has_the_dense_logits() -> None:
    output, expected = evaluation(0.0), dense_logits()
    assert output.rank_logits.shape == (SIZE, *expected.shape)
    for logits in (*output.rank_logits, output.logits):
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


def test_a_rank_lacks_packets_of_the_others_columns_and_none_of_its_own() -> None:
    first, second = evaluation(0.5).rank_logits  # sums lost packets too, for both ranks alike
    for logits, other, own in ((first, second, slice(COLUMNS)), (second, first, slice(COLUMNS, TOKENS))):
        assert (logits[..., own] != 0).all()
        arrived = other[..., own] != 0
        assert 0.4 < arrived.float().mean() < 0.6
        assert torch.equal(other[..., own][arrived], logits[..., own][arrived])


def on_rank_evaluate() -> tuple[Tensor, Tensor]:
    output = evaluation(0.5, processes=True)
    return output.rank_logits, output.logits


def test_processes_receive_what_virtual_ranks_receive_and_decide_by_the_first_ones_logits(processes: Callable) -> None:
    expected = evaluation(0.5).rank_logits
    for rank, (received, deciding) in enumerate(processes(SIZE, on_rank_evaluate)):
        torch.testing.assert_close(received[0], expected[rank], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(deciding, expected[0], rtol=1e-9, atol=1e-9)


def test_the_training_loss_gathers_no_logits() -> None:
    losses = []
    for lossy_gather in (False, True):
        lossy = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.5), seed=0, wire=WIRE)
        model = ltp.parallelize(tiny_gpt2(), lossy, tensor_parallel_size=SIZE)
        split_vocabulary_(model, lossy_gather=lossy_gather)
        output = model.train()(**tiny_batch())
        assert not hasattr(output, "rank_logits")
        losses.append(output.loss.item())
    assert losses[0] == losses[1]


def test_the_dense_model_gathers_nothing() -> None:
    lossy = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.5), seed=0, wire=WIRE)
    model = ltp.parallelize(tiny_gpt2(), lossy, tensor_parallel_size=SIZE)
    split_vocabulary_(model, lossy_gather=True)
    with torch.no_grad():
        output = ltp.gather(model).eval()(input_ids=tiny_batch()["input_ids"])
    assert not hasattr(output, "rank_logits")
    assert output.logits.numpy() == pytest.approx(dense_logits().numpy())
