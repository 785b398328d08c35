"""Plans: a family that nobody listed, plans by hand, what a plan cannot do; models deferred until they are sharded."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

import lossytp as ltp
from lossytp.parallel.plans import GPT2_PLAN, deferred, plan_of, values_of
from tests.parallel.conftest import bernoulli, gradient_error, gradients, relative_error, tiny_batch, tiny_gpt2
from tests.parallel.families import FAMILIES, SIZES, shifted, tiny

WIDTH, HEADS, VOCABULARY = 32, 4, 97


class StrangerConfig(PreTrainedConfig):
    """A family with names of its own; its plan is all that the library knows of it."""

    model_type = "stranger"
    base_model_tp_plan = {  # noqa: RUF012
        **{f"stages.*.{name}": "colwise" for name in ("attending.ask", "attending.tell", "thinking.wide")},
        **{f"stages.*.{name}": "rowwise" for name in ("attending.out", "thinking.narrow")},
    }
    num_attention_heads = HEADS


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ask, self.tell = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        keys_values = self.tell(x).unflatten(-1, (-1, 2, WIDTH // HEADS)).transpose(1, 2)
        queries = self.ask(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        mixed = scaled_dot_product_attention(queries, keys_values[..., 0, :], keys_values[..., 1, :], is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Thinking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.tanh(self.wide(x)))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attending, self.thinking = Attending(), Thinking()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attending(x)
        return x + self.thinking(x)


class StrangerModel(PreTrainedModel):
    config_class = StrangerConfig
    base_model_prefix = "body"

    def __init__(self, config: StrangerConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.stages = nn.ModuleList(Stage() for _ in range(3))
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for stage in self.stages:
            x = stage(x)
        return x


class StrangerForCausalLM(PreTrainedModel):
    config_class = StrangerConfig
    base_model_prefix = "body"

    def __init__(self, config: StrangerConfig) -> None:
        super().__init__(config)
        self.body = StrangerModel(config)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Any = None, return_dict: bool = True, **_: Any) -> CausalLMOutput:
        logits = self.lm_head(self.body(input_ids))
        loss = None if labels is None else cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def stranger() -> PreTrainedModel:
    torch.manual_seed(0)
    return StrangerForCausalLM(StrangerConfig()).double()


@pytest.mark.parametrize("how", [{}, {"reliable_gather": False}, {"sequence_parallel": True}], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_a_family_that_nobody_listed_works_by_its_plan(size, how):
    dense, batch = stranger(), tiny_batch()
    expected, logits = gradients(dense, batch), dense(**batch).logits
    for loss_rate, close in ((0.0, True), (0.1, False)):
        parallel = ltp.parallelize(dense, bernoulli(loss_rate), tensor_parallel_size=size, **how)
        assert (relative_error(parallel(**batch).logits, logits) < 1e-9) == close
        gradients(parallel, batch)
        assert (gradient_error(shifted(parallel), expected) < 1e-9) == close
    again = ltp.gather(ltp.parallelize(dense, bernoulli(0.1), tensor_parallel_size=size, **how))
    assert type(again) is StrangerForCausalLM
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in dense.state_dict().items())


def test_a_projection_is_computed_anew_if_input_or_weight_changed():
    parallel = ltp.parallelize(tiny("qwen2"), bernoulli(0.0), tensor_parallel_size=2)
    attention, x = parallel.model.layers[0].self_attn, torch.randn(2, 5, 64, dtype=torch.float64)
    fused = attention.q_proj.layer

    def double(tensor: Tensor) -> None:
        with torch.no_grad():
            tensor.mul_(2)

    changes = (lambda: double(x), lambda: double(fused.weight), lambda: double(fused.bias))
    for change in (*changes, lambda: setattr(fused, "weight", nn.Parameter(3 * fused.weight.detach()))):
        attention.q_proj(x)
        change()
        assert torch.equal(attention.k_proj(x), attention.k_proj(x.clone()))
    with torch.no_grad():
        attention.q_proj(x)
    assert attention.k_proj(x).requires_grad, "what was computed without a graph has no gradient"
    with torch.inference_mode():
        x = x.clone()
        assert torch.equal(attention.q_proj(x), attention.q_proj(x.clone()))


STABLELM = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


def test_a_plan_by_hand_shards_a_model_that_carries_none():
    dense, batch = tiny("stablelm", hidden_dropout=0.0), tiny_batch()
    with pytest.raises(TypeError, match="StableLmForCausalLM has no tensor-parallel plan: give plan, such as"):
        ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=2)
    expected = gradients(dense, batch)
    parallel = ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=2, plan=STABLELM)
    gradients(parallel, batch)
    assert gradient_error(shifted(parallel), expected) < 1e-9


@pytest.mark.parametrize("how", [{}, {"reliable_gather": False}], ids=str)
def test_half_a_plan_shards_half_a_model(how):
    mlp = {pattern: style for pattern, style in GPT2_PLAN.items() if ".mlp." in pattern}
    dense, batch = tiny_gpt2(), tiny_batch()
    parallel = ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=4, plan=mlp, **how)
    assert relative_error(parallel(**batch).logits, dense(**batch).logits) < 1e-12
    network = parallel.transformer.h[0].mlp.c_fc.collective.network
    assert set(network.report()["module"]) == {"mlp"}


def test_a_plan_for_the_mlp_alone_asks_nothing_of_heads():
    mlp = {pattern: style for pattern, style in plan_of(tiny("llama")).items() if ".mlp." in pattern}
    dense, batch = tiny("llama", num_key_value_heads=2), tiny_batch()
    parallel = ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=4, plan=mlp)
    assert relative_error(parallel(**batch).logits, dense(**batch).logits) < 1e-12
    with pytest.raises(ValueError, match="tensor_parallel_size = 5 does not divide the model's MLP of 96: choose one"):
        ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=5, plan=mlp)


GEMMA4 = {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}


KINDS = ["sliding_attention", "full_attention"]
EARLIER_KEYS = {"num_key_value_heads": 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": KINDS * 2}
FEW_KEYS = {"num_key_value_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "layer_types": KINDS}


@pytest.mark.parametrize(
    ("size", "few"), [*((size, EARLIER_KEYS) for size in (2, 4, 8)), *((size, FEW_KEYS) for size in (2, 4))]
)
def test_blocks_may_use_the_keys_of_an_earlier_one_or_have_other_numbers_of_key_value_heads(size, few):
    dense = tiny("gemma4_text", **GEMMA4 | few).eval()
    parallel, ids = ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=size), tiny_batch()["input_ids"]
    assert relative_error(parallel(input_ids=ids).logits, dense(input_ids=ids).logits) < 1e-6
    assert relative_error(ltp.gather(parallel)(input_ids=ids).logits, dense(input_ids=ids).logits) == 0


def test_attention_that_ignores_the_number_of_key_value_heads_has_no_copies():
    dense = tiny("hrm_text", num_key_value_heads=2).eval()
    parallel = ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=8)
    ids = tiny_batch()["input_ids"]
    assert relative_error(parallel(input_ids=ids).logits, dense(input_ids=ids).logits) < 1e-9


MIXTRAL = {"layers.*.mlp.experts": "moe_tp_experts", "layers.*.mlp.experts.gate_up_proj": "packed_rowwise"}
UNEVEN = {**MIXTRAL, "layers.*.mlp.experts.gate_up_proj": "colwise", "layers.*.mlp.experts.down_proj": "rowwise"}
STREAMS = {"reliable_gather": False}


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        ("auto", TypeError, "plan = 'auto' is of type str"),
        ({"layers.*.mlp.up_proj": ColwiseParallel()}, TypeError, "is of type ColwiseParallel, not str"),
        ({1: "colwise"}, TypeError, "plan's pattern = 1 is of type int"),
        ({f"model.{pattern}": style for pattern, style in STABLELM.items()}, ValueError, "and without 'model.'"),
        ({**STABLELM, "layers.*.mlp.gate": "colwise"}, ValueError, "the plan's pattern 'layers.*.mlp.gate'"),
        ({}, ValueError, "names no module of LlamaForCausalLM"),
        ({"layers.*.mlp.up_proj": "colwise"}, ValueError, "not both by outputs and by inputs"),
        ({"layers.*.input_layernorm": "replicated_with_grad_allreduce"}, ValueError, "not both by outputs and by in"),
        *(({**STABLELM, "layers.*.mlp.up_proj": f"colwise:{x}"}, ValueError, f"style = 'colwise:{x}'") for x in "x0"),
        ({"layers.*.mlp.act_fn": "colwise"}, TypeError, "layers.0.mlp.act_fn is of type SiLUActivation"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ltp.parallelize(tiny("llama"), bernoulli(0.0), tensor_parallel_size=2, plan=plan)


@pytest.mark.parametrize(
    ("family", "changes", "how", "message"),
    [
        ("mixtral", {}, {"plan": {"layers.*.mlp.experts": "ep_dispatch_experts"}}, "style = 'ep_dispatch_"),
        ("mixtral", {}, {"plan": MIXTRAL}, "style = 'packed_rowwise' of layers.0.mlp.experts.gate_up_proj"),
        ("mixtral", {}, {"plan": UNEVEN}, "slices of different units of layers.0.mlp.experts"),
        ("mixtral", {"intermediate_size": 97}, {}, "tensor_parallel_size = 2 does not divide the 97 units"),
        ("mixtral", {}, {"repair": "stale"}, "repair = 'stale' does not work with a mixture of experts"),
        *((family, {}, {**STREAMS, "own_copies": True}, "own_copies = True") for family in ("mixtral", "qwen3")),
        ("doge", {}, {}, "layers.0.self_attn of DogeForCausalLM has parameters of its own (A)"),
        ("llama", {"num_attention_heads": 12, "hidden_size": 96}, {"tensor_parallel_size": 6}, "one of 2, 4, 12"),
        ("starcoder2", {"residual_dropout": 0.1}, STREAMS, "residual_dropout = 0.1"),
    ],
)
def test_what_a_plan_cannot_do_is_refused(family, changes, how, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ltp.parallelize(tiny(family, **changes), bernoulli(0.0), **{"tensor_parallel_size": 2} | how)


def test_slices_of_experts_that_torch_cannot_multiply_are_refused():
    dense = tiny("mixtral", intermediate_size=84, dtype=torch.float32)
    ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=2)
    dense.config._experts_implementation = "grouped_mm"  # transformers' default
    with pytest.raises(ValueError, match=r"tensor_parallel_size = 2 gives slices of 42 units .* a multiple of 4"):
        ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=2)


def with_adapters() -> PreTrainedModel:
    model = tiny("llama")
    model.model.layers[0].self_attn.q_proj.lora_A = nn.ModuleDict()
    return model


@pytest.mark.parametrize("model", [with_adapters, lambda: tiny("llama").model])
def test_models_with_adapters_or_without_a_head_are_refused(model):
    with pytest.raises(TypeError, match=r"^Llama(ForCausalLM has adapters|Model cannot)"):
        ltp.parallelize(model(), bernoulli(0.0), tensor_parallel_size=2)


DEFERRED = ["gpt2", "llama", "llama, tied", "phi"]


def build(family: str) -> PreTrainedModel:
    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=8, vocab_size=97, n_positions=64))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family.partition(",")[0], **SIZES | FAMILIES[family]))


def both(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A dense model and a deferred one, after each of which torch's generator goes on alike."""
    models, following = [], []
    for make in (lambda: build(family), lambda: deferred(lambda: build(family))):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            models.append(make())
            following.append(torch.rand(4))
    assert torch.equal(*following)
    return models[0], models[1]


@pytest.mark.parametrize("family", DEFERRED)
def test_a_deferred_model_draws_the_dense_models_weights(family):
    dense, model = both(family)
    expected = dict(dense.named_parameters())
    before = torch.get_rng_state()
    for name, parameter in model.named_parameters():
        assert parameter.is_meta
        assert torch.equal(values_of(parameter), expected.pop(name))
    assert not expected
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(*pair) for pair in zip(dense.buffers(), model.buffers(), strict=True))


@pytest.mark.parametrize("family", DEFERRED)
def test_tensor_parallel_shards_are_the_dense_models(family):
    dense, model = both(family)
    sharded = ltp.parallelize(model, bernoulli(0.0), tensor_parallel_size=2)
    assert not any(parameter.is_meta for parameter in sharded.parameters())
    whole = dict(ltp.gather(sharded).named_parameters())
    assert all(torch.equal(whole[name], parameter) for name, parameter in dense.named_parameters())
    batch = tiny_batch()
    assert torch.equal(
        sharded.eval()(**batch).loss,
        ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=2).eval()(**batch).loss,
    )


class Replaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = None
        for _ in range(50):
            self.layer = nn.Linear(100, 100)
            self.layer = None
            self.layer = nn.Linear(3, 3)


def test_a_weight_is_not_drawn_as_one_that_was_dropped_before_it():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        dense = Replaced()
        torch.manual_seed(3)
        model = deferred(Replaced)
    for parameter, expected in zip(model.parameters(), dense.parameters(), strict=True):
        assert len(parameter.changes) == 1
        assert torch.equal(values_of(parameter), expected)
