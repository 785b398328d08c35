"""Every way of sharing activations against the dense model, and back to it; streams of the ranks' own."""

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2LMHeadModel, PreTrainedModel

import lossytp as ltp
from lossytp.parallel.own_streams import (
    OwnStreams,
    PerRank,
    SharedDropout,
    stream_distance,
)
from tests.parallel.conftest import (
    NUM_EXAMPLES,
    NUM_LAYERS,
    NUM_TOKENS,
    VOCABULARY,
    WIDTH,
    gradient_error,
    gradients,
    relative_error,
    tiny_batch,
    tiny_gpt2,
    training_losses,
)
from tests.parallel.rank_by_rank import training_loss
from tests.parallel.sharing_modes import (
    COMBINATIONS,
    MODES,
    ON_OWN_STREAMS,
    by_rank,
    fresh_gradients,
    network_of,
    parallel,
    parameters,
)

KINDS = ["language model", "classifier"]
every_mode = pytest.mark.parametrize("mode", MODES)
new_modes = pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "shared"])  # see test_convert.py
every_kind = pytest.mark.parametrize("kind", KINDS)
on_own_streams = pytest.mark.parametrize("mode", ON_OWN_STREAMS)


def logits_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Of each stream: one, or a rank's each."""
    output = model(**batch)
    return getattr(output, "rank_logits", output.logits.unsqueeze(0))


def float64_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean over streams of the training loss; transformers casts a language model's logits to fp32."""
    return torch.stack([training_loss(logits, batch) for logits in logits_of(model, batch)]).mean()


def assert_equals_dense(model: PreTrainedModel, dense: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    """Logits of every rank, training loss, and every gradient of every copy; with the same dropout."""
    torch.manual_seed(5)
    expected = fresh_gradients(dense, float64_loss(dense, batch))
    torch.manual_seed(5)
    found = fresh_gradients(model, float64_loss(model, batch))
    for of_rank in by_rank(model, dense, found):
        assert gradient_error(of_rank, expected) < 1e-12
    torch.manual_seed(6)
    output = dense(**batch)
    torch.manual_seed(6)
    actual = model(**batch)
    each = getattr(actual, "rank_logits", actual.logits.unsqueeze(0))
    assert all(relative_error(logits, output.logits) < 1e-12 for logits in each)
    assert torch.equal(actual.logits, each[0])
    assert abs(actual.loss - output.loss) < 1e-6


# --- without losses it is the dense model


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


REFUSED = [("sequence, lossy gather", "local"), ("exact adjoint", "local")]  # see test_wiring.py
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


# --- a stream on each rank


@every_kind
@on_own_streams
def test_the_training_loss_is_the_mean_over_ranks_and_each_has_its_logits(mode: str, kind: str) -> None:
    batch = tiny_batch(kind, padded=True)
    output = parallel(tiny_gpt2(kind), 0.1, mode)(**batch)
    of_example = (NUM_TOKENS, VOCABULARY) if kind == "language model" else (3,)
    assert output.rank_logits.shape == (4, NUM_EXAMPLES, *of_example)
    assert torch.equal(output.logits, output.rank_logits[0])
    losses = [training_loss(logits, batch).item() for logits in output.rank_logits]
    assert max(losses) - min(losses) > 1e-4
    assert output.loss.item() == pytest.approx(sum(losses) / 4, rel=1e-6)


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


@on_own_streams
def test_hidden_states_are_the_ranks_along_the_batch(mode: str) -> None:
    dense, batch = tiny_gpt2(), tiny_batch()
    model = parallel(dense, 0.1, mode)
    hidden = model(**batch, output_hidden_states=True).hidden_states
    assert len(hidden) == NUM_LAYERS + 1
    for layer, states in enumerate(hidden):
        each = states.view(4, NUM_EXAMPLES, NUM_TOKENS, WIDTH)
        assert (relative_error(each[1], each[0]) > 1e-3) == (layer > 0), "apart from the first sum on"


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


def test_own_copies_hold_a_copy_for_each_rank_of_whatever_is_not_sharded() -> None:
    dense = tiny_gpt2("classifier")
    model = parallel(dense, 0.0, "own copies")
    own = [(name, module) for name, module in model.named_modules() if isinstance(module, PerRank)]
    assert {name for name, _ in own} == {
        "transformer.wte",
        "transformer.wpe",
        "transformer.ln_f",
        "score",
        *(f"transformer.h.{layer}.ln_{i}" for layer in range(NUM_LAYERS) for i in (1, 2)),
    }
    names, sharded = dict(dense.named_parameters()), (".c_attn.", ".c_fc.", "c_proj.weight")
    for name, parameter in model.named_parameters():
        if not any(part in name for part in sharded):
            assert torch.equal(parameter, names[name].expand(4, *names[name].shape)), name
    assert dict(model.named_parameters()).keys() == names.keys()
    assert parallel(dense, 0.0, "own streams").num_parameters() == dense.num_parameters()


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


@on_own_streams
def test_with_losses_copies_drift_only_where_they_are_own(mode: str) -> None:
    dense, batch = tiny_gpt2(), tiny_batch()
    model = parallel(dense, 0.1, mode)
    training_losses(model, batch, steps=2)
    each = by_rank(model, dense, parameters(model))
    assert len(each) == (4 if mode == "own copies" else 1)
    for of_rank in each[1:]:
        assert not torch.equal(of_rank["transformer.ln_f.weight"], each[0]["transformer.ln_f.weight"])
    assert model.lm_head.weight is model.transformer.wte.weight


# --- gradient checkpointing


@pytest.mark.parametrize(
    ("mode", "repair"),
    [
        *((mode, repair) for mode in MODES if mode != "shared" for repair in ("zero", "stale")),
        ("shared", "stale"),
        ("shared", "local"),
        ("own copies", "local"),
        ("own streams", "hadamard(8)"),
        ("sequence, lossy gather", "retransmit(1)"),
    ],
    ids=lambda value: value,
)
def test_checkpointing_replays_the_losses(mode: str, repair: str) -> None:
    dense, batch = tiny_gpt2("classifier", resid_pdrop=0.1), tiny_batch("classifier", padded=True)
    batch = {name: tensor[:3] for name, tensor in batch.items()}
    results = []
    for settings in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = parallel(dense, 0.1, mode, repair=repair)
        if settings is not None:
            model.activation_checkpointing_enable(settings)
        runs: list[int] = []
        model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        torch.manual_seed(3)
        results.append(([gradients(model, batch) for _ in range(3)], network_of(model).state_dict()))
        assert len(runs) == (3 if settings is None else 6)
    for steps, network in results[1:]:
        assert network == results[0][1]
        assert all(gradient_error(*pair) == 0 for pair in zip(steps, results[0][0], strict=True))
    first, second, _ = results[0][0]
    assert gradient_error(first, second) > 1e-3, "new losses at each step"


@pytest.mark.parametrize("mode", ["shared", "own streams"])
def test_recomputing_after_another_pass_puts_in_what_was_stale_in_its_own(mode: str) -> None:
    dense, batch = tiny_gpt2("classifier"), tiny_batch("classifier")
    halves = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    results = []
    for checkpointing in (False, True):
        model = parallel(dense, 0.1, mode, repair="stale")
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        for _ in range(3):  # so that there is something to put in
            losses = [model(**half, use_cache=False).loss for half in halves]
        model.zero_grad()
        sum(losses).backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(torch.equal(gradient, results[0][name]) for name, gradient in results[1].items())


# --- there and back


def assert_is_dense(back: PreTrainedModel, dense: PreTrainedModel) -> None:
    assert type(back) is type(dense)
    kinds = [
        [(name, type(module), module.training) for name, module in model.named_modules()] for model in (back, dense)
    ]
    assert kinds[0] == kinds[1]
    assert vars(back).keys() == vars(dense).keys()
    assert back.config.to_dict() == dense.config.to_dict()
    assert list(back.state_dict()) == list(dense.state_dict())
    for (name, parameter), expected in zip(back.named_parameters(), dense.parameters(), strict=True):
        assert parameter.requires_grad == expected.requires_grad, name
        assert parameter.dtype == expected.dtype, name
        assert torch.equal(parameter, expected), name


@every_kind
@every_mode
def test_gather_gives_the_dense_model_back_bitwise(mode: str, kind: str) -> None:
    for changes in ({}, {"tie_word_embeddings": False}):
        dense, batch = tiny_gpt2(kind, dtype=torch.float32, resid_pdrop=0.1, **changes), tiny_batch(kind)
        dense.transformer.ln_f.bias.requires_grad_(False)
        dense.transformer.h[0].eval()
        model = parallel(dense, 0.1, mode, size=2)
        back = ltp.gather(model)
        assert_is_dense(back, dense)
        assert torch.equal(back.eval()(**batch).logits, dense.eval()(**batch).logits)
        if kind == "language model":
            tied = not changes
            for each in (model, back):
                assert (each.lm_head.weight is each.transformer.wte.weight) == tied
        assert torch.is_tensor(model(**batch).logits), "the parallel model is as it was"


@every_mode
def test_gather_follows_what_happened_to_the_parallel_model(mode: str) -> None:
    """Its dtype, what was frozen since, whether it trains."""
    dense = tiny_gpt2("classifier")
    model = parallel(dense, 0.1, mode)
    for each in (dense, model):
        each.float().eval()
        each.transformer.wte.weight.requires_grad_(False)
        each.transformer.h[1].attn.c_attn.weight.requires_grad_(False)
        each.transformer.h[1].attn.c_proj.bias.requires_grad_(False)
    assert_is_dense(ltp.gather(model), dense)


@every_kind
def test_gather_after_training_takes_the_first_ranks_copies(kind: str) -> None:
    dense, batch = tiny_gpt2(kind), tiny_batch(kind)
    model = parallel(dense, 0.1, "own copies")
    training_losses(model, batch, steps=2)
    back, first = ltp.gather(model), by_rank(model, dense, parameters(model))[0]
    assert all(torch.equal(parameter, first[name]) for name, parameter in back.named_parameters())
    assert not torch.equal(back.transformer.wte.weight, dense.transformer.wte.weight)
    if kind == "language model":
        assert back.lm_head.weight is back.transformer.wte.weight
    assert model(**batch).rank_logits.shape[0] == 4


@every_mode
def test_a_copy_trains_independently(mode: str) -> None:
    batch = tiny_batch("classifier")
    model = parallel(tiny_gpt2("classifier"), 0.1, mode, repair="stale")
    training_losses(model, batch, steps=1)
    again, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    copied = training_losses(again, batch, steps=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert training_losses(model, batch, steps=2) == copied


@every_kind
@every_mode
def test_a_state_dict_goes_into_another_model_of_the_same_ranks(mode: str, kind: str) -> None:
    dense, batch = tiny_gpt2(kind), tiny_batch(kind)
    trained = parallel(dense, 0.1, mode)
    training_losses(trained, batch, steps=2)
    other = parallel(dense, 0.1, mode)
    other.load_state_dict(trained.state_dict())
    network_of(other).load_state_dict(network_of(trained).state_dict())
    assert training_losses(other, batch, steps=2) == training_losses(trained, batch, steps=2)


# --- text generation


def generate(model: Any, **settings: Any) -> Tensor:
    prompts = tiny_batch()["input_ids"][:3, :6].clone()
    mask = torch.ones_like(prompts)
    prompts[1, :2] = mask[1, :2] = 0
    torch.manual_seed(4)
    return model.generate(prompts, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, **settings)


CACHING: list[dict[str, Any]] = [{"use_cache": True}, {"use_cache": False}]
CACHING += [{"use_cache": True, "cache_implementation": "static"}]


@pytest.mark.parametrize("caching", CACHING, ids=["cache", "no cache", "static cache"])
@every_mode
def test_without_losses_generated_tokens_equal_dense(mode: str, caching: dict) -> None:
    dense = tiny_gpt2().eval()
    for search in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
        tokens = [generate(model, **search, **caching) for model in (dense, parallel(dense, 0.0, mode))]
        assert torch.equal(*tokens)


@on_own_streams
def test_with_losses_generate_writes_something_else(mode: str) -> None:
    dense = tiny_gpt2().eval()
    tokens = generate(parallel(dense, 0.3, mode), do_sample=False)
    assert tokens.shape == (3, 14)
    assert not torch.equal(tokens, generate(dense, do_sample=False))


@pytest.mark.parametrize("caching", CACHING, ids=["cache", "no cache", "static cache"])
@on_own_streams
def test_beam_search_is_refused_or_right(mode: str, caching: dict) -> None:
    """It reorders the rows of a cache as if they were the batch's; without a cache there is nothing to reorder."""
    dense = tiny_gpt2().eval()
    model = parallel(dense, 0.0, mode)
    if not caching["use_cache"]:
        assert torch.equal(*(generate(each, num_beams=3, do_sample=False, **caching) for each in (dense, model)))
        return
    line = "no beam search where ranks have streams of their own: sample, or search greedily"
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        generate(model, num_beams=3, do_sample=False, **caching)


@on_own_streams
def test_a_cache_goes_on_where_it_stopped(mode: str) -> None:
    """Also where nobody says at which positions; its rows are the ranks' along the batch."""
    ids_BT, dense = tiny_batch()["input_ids"], tiny_gpt2().eval()
    model, results = parallel(dense, 0.0, mode), []
    for each in (dense, model):
        cache = each(ids_BT[:, :5], use_cache=True).past_key_values
        results.append((cache, each(ids_BT[:, 5:], past_key_values=cache, use_cache=True).logits))
    assert relative_error(results[1][1], results[0][1]) < 1e-12
    assert relative_error(results[1][1], dense(ids_BT).logits[:, 5:]) < 1e-12
    keys = [cache.layers[0].keys for cache, _ in results]
    assert keys[1].shape == (4 * NUM_EXAMPLES, 8 // 4, *keys[0].shape[2:])


# --- how far apart streams are


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


class Mine(GPT2LMHeadModel):
    """A class of the caller's own."""


def test_a_class_of_the_callers_own_has_streams_too() -> None:
    mine = Mine(tiny_gpt2().config).double()
    mine.load_state_dict(tiny_gpt2().state_dict())
    model = parallel(mine, 0.1, "own streams")
    assert type(ltp.gather(model)) is Mine
    expected = parallel(tiny_gpt2(), 0.1, "own streams")(**tiny_batch())
    assert torch.equal(model(**tiny_batch()).rank_logits, expected.rank_logits)


def test_a_per_rank_module_is_each_ranks_own() -> None:
    linear = nn.Linear(3, 2).double()
    each = PerRank(linear, 3)
    with torch.no_grad():
        each.weight += torch.arange(3.0).view(3, 1, 1)
    x = torch.randn(6, 3, dtype=torch.float64)
    y = each(x)
    for rank in range(3):
        mine = slice(2 * rank, 2 * rank + 2)
        torch.testing.assert_close(y[mine], functional.linear(x[mine], linear.weight + rank, linear.bias))
    assert torch.equal(each.first().weight, linear.weight)
    assert each.first() is not linear


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
