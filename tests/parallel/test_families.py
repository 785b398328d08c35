"""Decoders of other families than GPT-2, by their own tensor-parallel plans, against transformers' dense ones."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

import lossytp as ltp
from lossytp.parallel.collectives import collective_of
from lossytp.parallel.data_parallel import data_parallel
from lossytp.parallel.group import Layout
from lossytp.parallel.replicas import clip_gradients_
from tests.parallel.conftest import bernoulli, gradient_error, gradients, relative_error, tiny_batch, training_losses
from tests.parallel.families import ALL, FEW_HEADS, MIXTURES, NUM_LAYERS, shifted, tiny
from tests.parallel.sharing_modes import MODES

pytestmark = pytest.mark.slow

KINDS = ["language model", "classifier"]
ONE_HEAD = {"granite", "olmoe"}  # no classifier in transformers
every_family = pytest.mark.parametrize("family", ALL)
SHARED_ALONE = {"qwen3", "qwen3, one key-value head", "gemma3_text, one key-value head", *MIXTURES}
REFUSED = {(family, "own copies") for family in SHARED_ALONE}  # test_plans.py shows it


@pytest.fixture
def float64_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in float64 what some families compute in float32: norms, and the weights of experts."""
    to, change, softmax = Tensor.to, Tensor.type, functional.softmax

    def wider(*values: Any) -> tuple[Any, ...]:
        return tuple(torch.float64 if value is torch.float32 else value for value in values)

    def named(values: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(values, wider(*values.values()), strict=True))

    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(Tensor, "to", lambda self, *args, **how: to(self, *wider(*args), **named(how)))
    monkeypatch.setattr(Tensor, "type", lambda self, *args: change(self, *wider(*args)))
    monkeypatch.setattr(functional, "softmax", lambda x, *args, **how: softmax(x, *args, **named(how)))


def lossy(dense: PreTrainedModel, loss_rate: float, *, size: int = 4, **how: Any) -> PreTrainedModel:
    return ltp.parallelize(dense, bernoulli(loss_rate, wire=ltp.Wire(mtu_bytes=108)), tensor_parallel_size=size, **how)


def heads_of(family: str) -> list[str]:
    return KINDS[:1] if family in ONE_HEAD else KINDS


@pytest.mark.usefixtures("float64_alone")
@pytest.mark.parametrize(("size", "padded"), [(2, True), (4, False), (8, True)])
@every_family
def test_without_losses_logits_and_gradients_equal_dense(family, size, padded):
    for kind in heads_of(family):
        dense, batch = tiny(family, kind), tiny_batch(kind, padded=padded)
        expected, logits = gradients(dense, batch), dense(**batch).logits
        parallel = lossy(dense, 0.0, size=size)
        assert relative_error(parallel(**batch).logits, logits) < 1e-9
        gradients(parallel, batch)
        assert gradient_error(shifted(parallel), expected) < 1e-9


@every_family
def test_without_losses_fp32_equals_dense_to_rounding(family):
    dense, batch = tiny(family, dtype=torch.float32), tiny_batch(padded=True)
    expected, logits = gradients(dense, batch), dense(**batch).logits
    parallel = lossy(dense, 0.0)
    assert relative_error(parallel(**batch).logits, logits) < 1e-5
    gradients(parallel, batch)
    assert gradient_error(shifted(parallel), expected) < 1e-5


@pytest.mark.usefixtures("float64_alone")
@pytest.mark.parametrize(
    ("family", "mode"),
    [(family, mode) for family in ALL for mode in MODES if mode != "shared" and (family, mode) not in REFUSED],
)
def test_without_losses_every_way_of_sharing_equals_dense(family, mode):
    for kind in heads_of(family):
        dense, batch = tiny(family, kind), tiny_batch(kind, padded=True)
        expected = gradients(dense, batch)
        parallel = lossy(dense, 0.0, **MODES[mode])
        assert relative_error(parallel(**batch).logits, dense(**batch).logits) < 1e-9
        if mode == "own copies":
            trained = training_losses(parallel, batch, steps=3)
            own_streams = lossy(tiny(family, kind), 0.0, **MODES["own streams"])
            assert trained[0] == pytest.approx(training_losses(own_streams, batch, steps=1)[0], abs=1e-9)
        else:
            gradients(parallel, batch)
            assert gradient_error(shifted(parallel), expected) < 1e-9


@every_family
def test_with_losses_the_same_comparison_fails_by_far(family):
    """Control of everything above."""
    dense, batch = tiny(family), tiny_batch()
    expected, logits = gradients(dense, batch), dense(**batch).logits
    parallel = lossy(dense, 0.1)
    assert relative_error(parallel(**batch).logits, logits) > 0.01
    gradients(parallel, batch)
    assert gradient_error(shifted(parallel), expected) > 0.01


@pytest.mark.parametrize("size", [2, 4])
@every_family
def test_gather_gives_the_dense_model_back_bitwise(family, size):
    for kind in heads_of(family):
        dense = tiny(family, kind, dtype=torch.float32)
        parallel = lossy(dense, 0.1, size=size)
        assert type(parallel).__name__ == type(dense).__name__
        back = ltp.gather(parallel)
        assert type(back) is type(dense)
        assert [(name, type(module)) for name, module in back.named_modules()] == [
            (name, type(module)) for name, module in dense.named_modules()
        ]
        assert list(back.state_dict()) == list(dense.state_dict())
        assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in dense.state_dict().items())
        if family not in FEW_HEADS:
            assert parallel.num_parameters() == dense.num_parameters(), "nothing is kept twice"


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize(
    ("family", "mode"),
    [(family, mode) for family in ("llama", "phi", "olmo2", "mixtral") for mode in ("shared", "own streams")],
)
def test_checkpointing_replays_the_losses(family, reentrant, mode):
    plain, checkpointed = (lossy(tiny(family), 0.1, **MODES[mode]) for _ in range(2))
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for _ in range(2):
        expected = gradients(plain, tiny_batch())
        assert gradient_error(gradients(checkpointed, tiny_batch()), expected) == 0


CACHES = {"none": {"use_cache": False}, "dynamic": {"use_cache": True}, "static": {"cache_implementation": "static"}}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        (family, mode)
        for family in ("llama", "gemma2", "gpt_neox", "olmo2", "qwen2", "mixtral", "gemma3_text, one key-value head")
        for mode in ("shared", "own streams", "own copies")
        if (family, mode) not in REFUSED
    ],
)
def test_without_losses_generated_tokens_equal_dense(family, mode, cache):
    """Gemma 2 and Qwen 2 make one mask for each kind of layer before a static cache is filled."""
    dense, prompts = tiny(family).eval(), tiny_batch()["input_ids"][:3, :6]
    how = {"do_sample": False, "min_new_tokens": 8, "max_new_tokens": 8, "use_cache": True, **CACHES[cache]}
    tokens = [
        model.generate(prompts, attention_mask=torch.ones_like(prompts), **how)
        for model in (dense, lossy(dense, 0.0, **MODES[mode]), lossy(dense, 0.5, **MODES[mode]))
    ]
    assert torch.equal(tokens[1], tokens[0])
    assert not torch.equal(tokens[2], tokens[0]), "control"


SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 2.0},
    "beam": {"do_sample": False, "num_beams": 3},
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("family", [*FEW_HEADS, *MIXTURES])
def test_without_losses_every_search_continues_left_padded_prompts_as_dense(family, search):
    dense, prompts = tiny(family).eval(), tiny_batch()["input_ids"][:3, :6]
    mask = torch.ones_like(prompts)
    mask[0, :3], mask[1, :1], prompts[0, :3], prompts[1, :1] = 0, 0, 0, 0
    tokens = []
    for model in (dense, *(lossy(dense, loss_rate, size=8) for loss_rate in (0.0, 0.5))):
        torch.manual_seed(0)
        how = {"attention_mask": mask, "min_new_tokens": 8, "max_new_tokens": 8, "use_cache": True}
        tokens.append(model.generate(prompts, **how, **SEARCHES[search]))
    assert torch.equal(tokens[1], tokens[0])
    assert not torch.equal(tokens[2], tokens[0]), "control"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_clipping_counts_each_key_value_head_once(size):
    dense, batch = tiny("qwen2, one key-value head"), tiny_batch()
    expected = torch.stack([each.square().sum() for each in gradients(dense, batch).values()]).sum().sqrt()
    network = bernoulli(0.0)
    parallel = ltp.parallelize(dense, network, tensor_parallel_size=size)
    gradients(parallel, batch)
    assert clip_gradients_(parallel, None, Layout(size), network) == pytest.approx(expected.item(), rel=1e-9)


def test_copies_of_key_value_heads_stay_equal_in_training_over_losses():
    parallel = lossy(tiny("qwen2, one key-value head"), 0.2)
    training_losses(parallel, tiny_batch(), steps=3)
    fused: Any = parallel.model.layers[1].self_attn.q_proj.layer
    for parameter in (fused.weight, fused.bias):
        _, keys, values = parameter.split([4 * width for width in fused.widths], -1)
        for copies in (keys, values):
            each = copies.unflatten(-1, (4, -1))
            assert torch.equal(each, each[..., :1, :].expand_as(each))


def test_fully_sharded_replicas_do_not_hold_copies_of_key_value_heads():
    parallel = lossy(tiny("llama, one key-value head"), 0.0)
    with pytest.raises(ValueError, match="data_parallel_type"):
        data_parallel(parallel, None, "fsdp")  # type: ignore[arg-type]


def test_a_mixture_sends_its_experts_outputs_in_one_sum():
    """Backward sends two messages: the gradients of the experts' input and of the router's weights."""
    parallel = lossy(tiny("mixtral"), 0.0)
    gradients(parallel, tiny_batch())
    report = collective_of(parallel).network.report()  # type: ignore[union-attr]
    packets = report[report.module == "mlp"].groupby(["layer", "direction"])["packets"].sum()
    tokens, width, top_k, room = 7 * 13, 64, 2, 8
    of_message = {"forward": tokens * width, "backward": tokens * width + tokens * top_k}
    for (_, direction), count in packets.items():
        assert count == pytest.approx(4 * 3 * of_message[direction] / 4 / room, rel=0.02)


@pytest.mark.parametrize("mode", ["shared", "own streams"])
def test_copies_and_pickles_train_alike(mode):
    parallel, batch = lossy(tiny("qwen2"), 0.1, **MODES[mode]), tiny_batch()
    parallel(**batch, output_hidden_states=True, output_attentions=True)  # transformers adds hooks that have no pickle
    parallel.model.layers[0].self_attn.q_proj(torch.randn(4, 1, 64, dtype=torch.float64))  # k and v were never asked
    others = [copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))]
    expected = training_losses(parallel, batch, steps=2)
    assert [training_losses(other, batch, steps=2) for other in others] == [expected, expected]
    assert all(len(other(**batch, output_hidden_states=True).hidden_states) == NUM_LAYERS + 1 for other in others)


def test_frozen_projections_stay_frozen_and_the_others_learn():
    dense = tiny("llama")
    dense.model.layers[0].self_attn.k_proj.requires_grad_(False)
    parallel = lossy(dense, 0.0)
    parallel(**tiny_batch()).loss.backward()
    back = ltp.gather(parallel)
    assert {name for name, each in back.named_parameters() if not each.requires_grad} == {
        "model.layers.0.self_attn.k_proj.weight"
    }
    dense(**tiny_batch()).loss.backward()
    want = {name: each.grad for name, each in dense.named_parameters() if each.grad is not None}
    have = shifted(parallel)
    assert gradient_error({name: have[name] for name in want}, want) < 1e-9
