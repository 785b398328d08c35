"""The vocabulary split over ranks: the dense model's loss, logits and gradients; what a lossy gather lacks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

import lossytp as ltp
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup
from lossytp.parallel.vocabulary import VocabularyParallelEmbedding, cross_entropies, split_vocabulary_
from tests.parallel.conftest import VOCABULARY, bernoulli, gradient_error, tiny_batch, tiny_gpt2
from tests.parallel.distributed_models import WIRE, network
from tests.parallel.families import shifted, tiny

FAMILIES = ["gpt2", "llama", "llama, tied", "phi"]  # tied, untied, tied, with a bias; 97 tokens, and Llamas' padding 0


def dense_model(family: str) -> PreTrainedModel:
    return tiny_gpt2() if family == "gpt2" else tiny(family)


def split(dense: PreTrainedModel, lossy: ltp.LossyNetwork, size: int) -> Any:
    model = ltp.parallelize(dense, lossy, tensor_parallel_size=size)
    split_vocabulary_(model)
    return model


def dense_loss_and_gradients(family: str) -> tuple[float, Tensor, dict[str, Tensor]]:
    """In float64; transformers would compute the loss in float32."""
    dense, batch = dense_model(family), tiny_batch(padded=True)
    logits = dense(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.backward()
    return loss.item(), logits.detach(), {name: p.grad.clone() for name, p in dense.named_parameters()}


def parallel_loss_and_gradients(
    family: str, lossy: ltp.LossyNetwork, size: int
) -> tuple[float, int, Tensor, dict[str, Tensor]]:
    model, batch = split(dense_model(family), lossy, size), tiny_batch(padded=True)
    output = model(**batch)
    output.loss.backward()
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return output.loss.item(), output.logits.shape[-1], logits, shifted(model)


def assert_dense(family: str, loss: float, logits: Tensor, found: dict[str, Tensor]) -> None:
    expected_loss, expected_logits, expected = dense_loss_and_gradients(family)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    real = tiny_batch(padded=True)["attention_mask"].bool()
    assert torch.allclose(logits[real], expected_logits[real], rtol=1e-9, atol=1e-9)
    assert gradient_error({name: found[name].detach() for name in expected}, expected) < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_virtual_ranks_have_the_dense_models_loss_and_gradients(family):
    loss, width, logits, found = parallel_loss_and_gradients(family, bernoulli(0.0), 4)
    assert width == 100, "97 tokens, padded for four ranks"
    assert_dense(family, loss, logits, found)


def on_rank_train(families: list[str], size: int) -> list[tuple]:
    lossy = network(0.0)
    ltp.init_process_group(lossy)
    return [parallel_loss_and_gradients(family, lossy, size) for family in families]


@pytest.mark.parametrize("size", [2, 4])
def test_processes_have_the_dense_models_loss_and_gradients(processes, size):
    for answer in processes(2, on_rank_train, FAMILIES, size):
        for family, (loss, width, logits, found) in zip(FAMILIES, answer, strict=True):
            assert width == (49 if size == 2 else 50)
            assert_dense(family, loss, logits, found)


def on_rank_lose(size: int) -> tuple[float, dict[str, Tensor]]:
    lossy = network(0.1)
    ltp.init_process_group(lossy)
    loss, _, _, found = parallel_loss_and_gradients("gpt2", lossy, size)
    return loss, {name: gradient.detach() for name, gradient in found.items()}


def test_processes_and_virtual_ranks_lose_the_same_packets(processes):
    expected_loss, _, _, expected = parallel_loss_and_gradients("gpt2", bernoulli(0.1, wire=WIRE), 2)
    dense_loss, *_ = dense_loss_and_gradients("gpt2")
    assert expected_loss != pytest.approx(dense_loss, rel=1e-3)
    for loss, found in processes(2, on_rank_lose, 2):
        assert loss == pytest.approx(expected_loss, rel=1e-9)
        assert gradient_error(found, {name: expected[name].detach() for name in found}) < 1e-9


def test_embeddings_and_head_send_what_their_sums_need():
    """One sum of embeddings in forward and one of the head's input gradients in backward; losses need no layer."""
    lossy = bernoulli(0.0, wire=WIRE)
    split(tiny_gpt2(), lossy, 2)(**tiny_batch()).loss.backward()
    rows = [row for row in lossy.counters.rows() if row["layer"] is None and row["src"] == 0]
    elements = tiny_batch()["input_ids"].numel() * 64
    assert [(row["direction"], row["packets"]) for row in rows] == [
        (direction, elements // 2 // 8) for direction in ("forward", "backward")
    ]


def test_gather_returns_the_dense_model():
    for family in FAMILIES:
        dense = dense_model(family)
        model = ltp.parallelize(dense, bernoulli(0.5), tensor_parallel_size=4)
        split_vocabulary_(model, lossy_gather=True)
        whole = ltp.gather(model)
        expected = dict(dense.named_parameters())
        assert all(torch.equal(parameter, expected.pop(name)) for name, parameter in whole.named_parameters())
        assert not expected
        assert whole.loss_function is dense.loss_function
        assert not hasattr(whole.eval()(input_ids=tiny_batch()["input_ids"]), "rank_logits")
        tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
        assert tied == dense.config.tie_word_embeddings


def test_generation_is_the_dense_models():
    dense = tiny_gpt2().eval()
    ids = tiny_batch()["input_ids"][:2]
    model = split(dense, bernoulli(0.0), 2).eval()
    expected, found = (each.generate(ids, max_new_tokens=5, do_sample=False) for each in (dense, model))
    assert torch.equal(found, expected)


def test_the_padding_tokens_embedding_is_not_trained():
    embedding = nn.Embedding(5, 3, padding_idx=1).double()
    collective = LossyCollective(bernoulli(0.0), RankGroup(2))
    weight = nn.Parameter(F.pad(embedding.weight.detach(), (0, 0, 0, 1)))
    parallel = VocabularyParallelEmbedding(embedding, weight, collective)
    ids = torch.tensor([[1, 4, 1], [0, 4, 2]])
    assert torch.equal(parallel(ids), embedding(ids))
    for module in (embedding, parallel):
        (module(ids) + 1).square().sum().backward()
    assert torch.equal(weight.grad[:5], embedding.weight.grad)


def test_the_largest_logits_do_not_overflow():
    logits_TO = torch.tensor([[1e4, 0.0, -1e4, 5.0]], dtype=torch.float64, requires_grad=True)
    loss = cross_entropies(logits_TO, torch.tensor([1]), RankGroup(2), 3)
    assert loss.tolist() == [1e4]
    loss.sum().backward()
    assert logits_TO.grad is not None
    assert logits_TO.grad.tolist() == [[1, -1, 0, 0]]


def test_what_cannot_be_split_is_refused():
    with pytest.raises(TypeError, match="GPT2LMHeadModel is not"):
        split_vocabulary_(tiny_gpt2())
    with pytest.raises(TypeError, match="GPT2ForSequenceClassification is not"):
        split(tiny_gpt2("classifier"), bernoulli(0.0), 2)
    streams = ltp.parallelize(tiny_gpt2(), bernoulli(0.0), tensor_parallel_size=2, reliable_gather=False)
    with pytest.raises(ValueError, match="enable_loss_parallelism"):
        split_vocabulary_(streams)
    sender = ltp.parallelize(tiny_gpt2(), bernoulli(0.0), tensor_parallel_size=2, algorithm="sender")
    with pytest.raises(ValueError, match="algorithm = 'sender' has sums that reach every rank"):
        split_vocabulary_(sender, lossy_gather=True)


COLUMNS = 49  # of each rank, padded


def evaluation(loss_rate: float, **options: Any) -> Any:
    lossy = network(loss_rate)
    if options.pop("processes", False):
        ltp.init_process_group(lossy)
    model = ltp.parallelize(tiny_gpt2(), lossy, tensor_parallel_size=2, **options)
    split_vocabulary_(model, lossy_gather=True)
    with torch.no_grad():
        return model.eval()(input_ids=tiny_batch()["input_ids"])


def dense_logits() -> Tensor:
    with torch.no_grad():
        return tiny_gpt2().eval()(input_ids=tiny_batch()["input_ids"]).logits


def test_without_losses_every_rank_has_the_dense_logits():
    output, expected = evaluation(0.0, exact_adjoint=True), dense_logits()
    assert output.rank_logits.shape == (2, *expected.shape)
    for logits in (*output.rank_logits, output.logits):
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


def test_a_rank_lacks_packets_of_the_others_columns_and_none_of_its_own():
    first, second = evaluation(0.5).rank_logits  # sums lost packets too, for both ranks alike
    for logits, other, own in ((first, second, slice(COLUMNS)), (second, first, slice(COLUMNS, VOCABULARY))):
        assert (logits[..., own] != 0).all()
        arrived = other[..., own] != 0
        assert 0.4 < arrived.float().mean() < 0.6
        assert torch.equal(other[..., own][arrived], logits[..., own][arrived])


def on_rank_evaluate() -> tuple[Tensor, Tensor]:
    output = evaluation(0.5, processes=True)
    return output.rank_logits, output.logits


def test_processes_receive_what_virtual_ranks_receive_and_decide_by_the_first_ones_logits(processes):
    expected = evaluation(0.5).rank_logits
    for rank, (received, deciding) in enumerate(processes(2, on_rank_evaluate)):
        torch.testing.assert_close(received[0], expected[rank], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(deciding, expected[0], rtol=1e-9, atol=1e-9)


def test_the_training_loss_gathers_no_logits():
    losses = []
    for lossy_gather in (False, True):
        lossy = network(0.5)
        model = ltp.parallelize(tiny_gpt2(), lossy, tensor_parallel_size=2)
        split_vocabulary_(model, lossy_gather=lossy_gather)
        output = model.train()(**tiny_batch())
        assert not hasattr(output, "rank_logits")
        losses.append(output.loss.item())
    assert losses[0] == losses[1]
