"""Streams of the ranks' own: what each rank computes, what the models of them are, and how far apart they are."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from lossytp.parallel.own_streams import OwnStreams, SharedDropout, stream_distance
from tests.parallel.conftest import NUM_EXAMPLES, NUM_LAYERS, NUM_TOKENS, WIDTH, relative_error, tiny_batch, tiny_gpt2
from tests.parallel.sharing_modes import every_kind, logits_of, on_own_streams, parallel


@every_kind
@on_own_streams
def test_results_may_be_a_tuple(mode: str, kind: str) -> None:
    batch, dense = tiny_batch(kind), tiny_gpt2(kind)
    expected = parallel(dense, 0.1, mode)(**batch)
    loss, logits = parallel(dense, 0.1, mode)(**batch, return_dict=False)
    assert torch.equal(loss, expected.loss)
    assert torch.equal(logits, expected.logits)
    model = parallel(dense, 0.1, mode)
    (logits,) = model(batch["input_ids"], return_dict=False)
    assert torch.equal(logits, expected.logits)


@on_own_streams
def test_a_training_loss_over_a_given_number_of_tokens_is_the_mean_over_ranks(mode: str) -> None:
    """As a training loop asks for that accumulates gradients."""
    dense, batch = tiny_gpt2(), tiny_batch(padded=True)
    for number in (50, torch.tensor(50)):
        expected = dense(**batch, num_items_in_batch=number).loss
        actual = parallel(dense, 0.0, mode)(**batch, num_items_in_batch=number).loss
        assert actual.item() == pytest.approx(expected.item(), rel=1e-6)


@on_own_streams
@every_kind
def test_embeddings_may_be_given(kind: str, mode: str) -> None:
    dense = tiny_gpt2(kind)
    generator = torch.Generator().manual_seed(2)
    embeddings_BTD = torch.randn(NUM_EXAMPLES, NUM_TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    before = embeddings_BTD.clone()
    batch = {"inputs_embeds": embeddings_BTD.requires_grad_(), "labels": tiny_batch(kind)["labels"]}
    found = []
    for model in (dense, parallel(dense, 0.0, mode)):
        model(**batch).loss.backward()
        found.append((logits_of(model, batch)[-1], embeddings_BTD.grad))
        embeddings_BTD.grad = None
    assert relative_error(found[1][0], found[0][0]) < 1e-12
    assert relative_error(found[1][1], found[0][1]) < (1e-6 if kind == "language model" else 1e-12)
    assert torch.equal(embeddings_BTD, before)


@on_own_streams
def test_other_inputs_are_those_of_the_dense_model(mode: str) -> None:
    dense, batch = tiny_gpt2(), tiny_batch(padded=True)
    positions = torch.arange(NUM_TOKENS).flip(0)
    types = batch["input_ids"] % 5
    settings: list[dict[str, Any]] = [
        {"position_ids": positions.expand(NUM_EXAMPLES, -1)},
        {"position_ids": positions.unsqueeze(0)},
        {"token_type_ids": types},
        {"logits_to_keep": 2},
    ]
    model = parallel(dense, 0.0, mode)
    plain = dense(batch["input_ids"]).logits
    for setting in settings:
        expected = dense(batch["input_ids"], **setting).logits
        assert relative_error(model(batch["input_ids"], **setting).logits, expected) < 1e-12
        assert expected.shape != plain.shape or relative_error(expected, plain) > 0.01, "control"
    first = batch["input_ids"], None, batch["attention_mask"], types, positions.expand(NUM_EXAMPLES, -1)
    assert relative_error(model(*first).logits, dense(*first).logits) < 1e-12


def test_ranks_share_one_dropout_mask() -> None:
    dropout = SharedDropout(0.5, 4)
    x = torch.ones(8, 3, 5)
    each = dropout(x).view(4, 2, 3, 5)
    assert all(torch.equal(of_rank, each[0]) for of_rank in each)
    assert set(each.flatten().tolist()) == {0.0, 2.0}
    assert not torch.equal(each[0, 0], each[0, 1])
    assert torch.equal(dropout.eval()(x), x)
    assert torch.equal(SharedDropout(0.0, 4)(x), x)


def test_attentions_own_dropout_is_of_a_ranks_heads() -> None:
    model = parallel(tiny_gpt2(attn_pdrop=0.5, embd_pdrop=0.1, resid_pdrop=0.1), 0.0, "own streams")
    kinds = {name.split(".")[-1]: type(module) for name, module in model.named_modules() if "drop" in name}
    assert kinds == {
        "attn_dropout": nn.Dropout,
        "drop": SharedDropout,
        "resid_dropout": SharedDropout,
        "dropout": SharedDropout,
    }
    logits = model(**tiny_batch()).rank_logits
    assert relative_error(*logits[:2]) < 1e-12, "what heads give is summed over ranks"


def test_a_ranks_copy_works_on_its_own_stream_alone() -> None:
    """What a rank adds at the end of its last norm, and in its head, reaches its own logits only."""
    dense, batch = tiny_gpt2("classifier"), tiny_batch("classifier")
    model = parallel(dense, 0.0, "own copies")
    before = model(**batch).rank_logits
    with torch.no_grad():
        model.transformer.ln_f.bias[2] += 1
        model.score.weight[3] += 1
    after = model(**batch).rank_logits
    assert [relative_error(*pair) > 1e-3 for pair in zip(after, before, strict=True)] == [False, False, True, True]


# --- what the classes are


def test_the_models_are_transformers_own_with_streams() -> None:
    for kind in ("language model", "classifier"):
        dense = tiny_gpt2(kind)
        model = parallel(dense, 0.0, "own streams")
        assert isinstance(model, OwnStreams)
        assert isinstance(model, type(dense))
        assert type(model).__name__ == type(dense).__name__
        assert not isinstance(dense, OwnStreams)
        assert not isinstance(parallel(dense, 0.0, "shared"), OwnStreams)
        assert model.config.to_dict() == dense.config.to_dict()


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


def test_distance_needs_streams_of_the_ranks_own() -> None:
    for mode in ("shared", "sequence, lossy gather"):
        with (
            pytest.raises(ValueError, match="reliable_gather = False"),
            stream_distance(parallel(tiny_gpt2(), 0.1, mode)),
        ):
            pass
