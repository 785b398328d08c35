"""A converted GPT-2: its shards, what it sends and loses, what `parallelize` refuses, and a head of multiple choice."""

import copy
import pickle
import re
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2DoubleHeadsModel,
    GPT2ForSequenceClassification,
    GPT2Model,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

import lossytp as ltp
from lossytp.network.lossy_network import CommConfig
from lossytp.parallel import convert as multiple_choice
from lossytp.parallel.convert import GPT2ForMultipleChoice, assert_converted, multiple_choice_of
from lossytp.parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.parallel.conftest import (
    NUM_HEADS,
    NUM_LAYERS,
    VOCABULARY,
    WIDTH,
    bernoulli,
    gradient_error,
    gradients,
    relative_error,
    tiny_batch,
    tiny_gpt2,
    training_losses,
)
from tests.parallel.families import tiny
from tests.parallel.sharing_modes import MODES, every_size, lossy, network_of, unchanged


@every_size
def test_every_block_is_sharded(tensor_parallel_size: int) -> None:
    """An earlier study sharded nothing: it looked for `nn.Linear`, and GPT-2's blocks have `Conv1D`."""
    dense = tiny_gpt2()
    parallel = lossy(dense, 0.0, size=tensor_parallel_size)
    assert_converted(parallel)
    kinds = [type(module) for module in parallel.modules()]
    assert kinds.count(ColumnParallelLinear) == kinds.count(RowParallelLinear) == 2 * NUM_LAYERS
    assert Conv1D not in kinds
    for block in parallel.transformer.h:
        assert block.attn.c_attn.weight.shape == (WIDTH, 3 * WIDTH)
        assert block.attn.c_proj.weight.shape == (tensor_parallel_size, WIDTH // tensor_parallel_size, WIDTH)
        assert block.mlp.c_fc.weight.shape == (WIDTH, 4 * WIDTH)
        assert block.mlp.c_proj.weight.shape == (tensor_parallel_size, 4 * WIDTH // tensor_parallel_size, WIDTH)
    assert parallel.num_parameters() == dense.num_parameters(), "nothing is kept twice"


def test_a_rank_holds_whole_heads() -> None:
    dense = tiny_gpt2()
    shards, weight = lossy(dense, 0.0, size=2).transformer.h[1].attn.c_attn.weight, dense.transformer.h[1].attn.c_attn
    head = WIDTH // NUM_HEADS
    for rank, heads in enumerate([range(4), range(4, 8)]):
        for projection, name in enumerate("qkv"):
            columns = [projection * WIDTH + h * head + i for h in heads for i in range(head)]
            assert torch.equal(shards.view(WIDTH, 3, 2, -1)[:, projection, rank], weight.weight[:, columns]), name


def bert(**_: Any) -> PreTrainedModel:
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9)
    return BertForSequenceClassification(config)


@pytest.mark.parametrize(
    ("model", "how", "error", "message"),
    [
        (tiny_gpt2, {"tensor_parallel_size": 3}, ValueError, "tensor_parallel_size = 3"),
        (lambda: tiny_gpt2(n_inner=100), {"tensor_parallel_size": 8}, ValueError, "tensor_parallel_size = 8"),
        (tiny_gpt2, {"algorithm": "rings"}, ValueError, "algorithm = 'rings'"),
        (tiny_gpt2, {"repair": "magic"}, ValueError, "repair = 'magic'"),
        (tiny_gpt2, {"own_copies": True}, ValueError, "own_copies = True"),
        (tiny_gpt2, {"comm": CommConfig(), "repair": "zero", "seed": 1}, ValueError, "comm and repair, seed"),
        (bert, {}, TypeError, "BertForSequenceClassification has no tensor-parallel plan: give plan"),
        (lambda: GPT2Model(tiny_gpt2().config), {}, TypeError, "GPT2Model cannot"),
        (lambda: GPT2DoubleHeadsModel(tiny_gpt2().config), {}, TypeError, "GPT2DoubleHeadsModel cannot"),
        (lambda: lossy(tiny_gpt2(), 0.0), {}, TypeError, "the model is tensor-parallel already"),
        (lambda: tiny_gpt2(add_cross_attention=True), {}, ValueError, "add_cross_attention = True"),
        *(
            (tiny_gpt2, {name: value}, TypeError, f"{name} = {value!r} is ")
            for name, value in [
                *(("network", 0.1), ("group", 4), ("own_copies", "no"), ("reliable_gather", "no")),
                *(("tensor_parallel_size", "4"), ("repair", None), ("comm", "ring")),
            ]
        ),
    ],
)
def test_what_cannot_be_parallelized_is_refused(model: Any, how: dict, error: type[Exception], message: str) -> None:
    dense = model()
    with unchanged(dense), pytest.raises(error, match=f"^{re.escape(message)}"):
        ltp.parallelize(dense, **{"network": bernoulli(0.1), "tensor_parallel_size": 4} | how)


def half_converted(kind: type, name: str) -> PreTrainedModel:
    parallel = lossy(tiny_gpt2(), 0.0)
    parallel.transformer.h[1].set_submodule(name, kind(WIDTH, WIDTH))
    return parallel


def with_exchanged_layers() -> PreTrainedModel:
    parallel = lossy(tiny_gpt2(), 0.0)
    parallel.transformer.h[0].mlp.c_proj = parallel.transformer.h[0].mlp.c_fc
    return parallel


@pytest.mark.parametrize(
    "model",
    [
        tiny_gpt2,
        with_exchanged_layers,
        lambda: half_converted(Conv1D, "attn.c_attn"),
        lambda: half_converted(nn.Linear, "mlp.c_proj"),
    ],
)
def test_a_model_that_was_not_converted_whole_is_refused(model: Any) -> None:
    with pytest.raises(AssertionError, match=r"block \d was not converted"):
        assert_converted(model())


# --- what is lost, by seed, and what is not


# --- what is sent


def test_a_training_step_sends_four_messages_a_layer() -> None:
    """Attention and MLP, forward and backward: q, k and v share one backward message, the biases add none."""
    parallel = lossy(tiny_gpt2(dtype=torch.float32), 0.0)
    gradients(parallel, tiny_batch())
    table = network_of(parallel).report()
    sites = table.groupby(["layer", "module", "direction"])["packets"].agg(["count", "sum"])
    assert sorted(sites.index) == [
        (layer, module, direction)
        for layer in range(NUM_LAYERS)
        for module in ("attention", "mlp")
        for direction in ("backward", "forward")
    ]
    assert set(sites["count"]) == {4 * 3}  # links of four ranks
    assert set(table["packets"]) == {4}  # a quarter of B * T * D = 5,824 elements, 364 a packet


# --- determinism


def test_the_same_seed_gives_the_same_training_losses_bitwise() -> None:
    dense, batch = tiny_gpt2(dtype=torch.float32), tiny_batch()
    runs = [training_losses(lossy(dense, 0.1, seed=seed), batch, steps=4) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]


def test_training_draws_nothing_from_the_global_generators() -> None:
    parallel = lossy(tiny_gpt2(), 0.1)
    before, numpy_before = torch.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002
    training_losses(parallel, tiny_batch(), steps=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert repr(np.random.get_state()) == numpy_before  # noqa: NPY002
    training_losses(lossy(tiny_gpt2(resid_pdrop=0.1), 0.1), tiny_batch(), steps=1)
    assert not torch.equal(torch.get_rng_state(), before), "control: dropout does"


def train_and_evaluate(parallel: PreTrainedModel, context: Any) -> tuple[list[float], list[float]]:
    """Training losses of three steps, and the loss found after each within `context(network, step)`, if not None."""
    training, evaluations = [], []
    for step in range(3):
        training += training_losses(parallel, tiny_batch(), steps=1)
        if context is not None:
            with torch.no_grad(), context(network_of(parallel), step):
                evaluations.append(parallel(**tiny_batch()).loss.item())
    return training, evaluations


def test_evaluation_at_the_same_step_loses_the_same_packets() -> None:
    parallel, batch = lossy(tiny_gpt2(), 0.1), tiny_batch()
    losses = []
    for step in (10, 10, 20):
        with torch.no_grad(), network_of(parallel).evaluation(step):
            losses.append(parallel(**batch).loss.item())
    assert losses[0] == losses[1] != losses[2]


def test_evaluation_does_not_shift_the_losses_of_training() -> None:
    """As a control, evaluation outside of a block does."""
    dense = tiny_gpt2()
    alone, _ = train_and_evaluate(lossy(dense, 0.1), None)
    with_clean, clean = train_and_evaluate(lossy(dense, 0.1), lambda network, _: network.reliable())
    with_lossy, noisy = train_and_evaluate(lossy(dense, 0.1), lambda network, step: network.evaluation(step))
    assert with_clean == with_lossy == alone
    assert all(a != b for a, b in zip(clean, noisy, strict=True))
    shifted, _ = train_and_evaluate(lossy(dense, 0.1), lambda *_: nullcontext())
    assert (shifted[0] == alone[0], shifted[1] == alone[1]) == (True, False)


EXAMPLES, OPTIONS, TOKENS, RANKS = 5, 3, 9, 4


@pytest.fixture
def dense(monkeypatch):
    monkeypatch.setitem(tiny_gpt2.__globals__["MODELS"], "multiple choice", GPT2ForMultipleChoice)
    return tiny_gpt2("multiple choice", num_labels=1)


@pytest.fixture
def batch():
    """The last example has two options alone; sequences have lengths of their own."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (EXAMPLES, OPTIONS, TOKENS), generator=generator)
    lengths = torch.randint(2, TOKENS + 1, (EXAMPLES, OPTIONS, 1), generator=generator)
    mask = (torch.arange(TOKENS) < lengths).long()
    mask[-1, -1] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.tensor([0, 1, 2, 1, 0])}


def test_every_option_is_scored_as_if_it_were_alone(dense, batch):
    classifier = GPT2ForSequenceClassification(dense.config).double().eval()
    classifier.load_state_dict(dense.state_dict())
    logits = dense.eval()(**batch).logits
    for example in range(EXAMPLES):
        for option in range(OPTIONS):
            if not batch["attention_mask"][example, option].any():
                continue
            length = int(batch["attention_mask"][example, option].sum())
            alone = classifier(batch["input_ids"][example, option, :length].unsqueeze(0)).logits
            assert logits[example, option].item() == pytest.approx(alone.item(), abs=1e-12)


def test_an_option_that_is_none_is_never_chosen_and_moves_nothing(dense, batch):
    output = dense(**batch)
    assert output.logits[-1, -1] == -torch.inf
    present = torch.log_softmax(output.logits[-1, :2], 0)[0]
    others = torch.log_softmax(output.logits[:-1], 1)[range(EXAMPLES - 1), batch["labels"][:-1]]
    assert output.loss.item() == pytest.approx(-(present + others.sum()).item() / EXAMPLES, rel=1e-12)
    before = gradients(dense, batch)
    batch["input_ids"][-1, -1] = 5
    assert gradient_error(gradients(dense, batch), before) < 1e-12
    assert all(gradient.isfinite().all() for gradient in before.values())


@pytest.mark.parametrize("way", MODES)
def test_without_losses_it_is_the_dense_model(dense, batch, way):
    expected, expected_gradients = dense(**batch).logits, gradients(dense, batch)
    model = ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=RANKS, **MODES[way])
    output = model(**batch)
    finite = expected.isfinite()
    assert torch.equal(output.logits.isfinite(), finite)
    assert relative_error(output.logits[finite], expected[finite]) < 1e-12
    if "own" in way:
        assert output.rank_logits.shape == (RANKS, EXAMPLES, OPTIONS)
        assert relative_error(output.rank_logits[:, finite], expected[finite].expand(RANKS, -1)) < 1e-12
    output.loss.backward()
    dense_again = ltp.gather(model)
    assert type(dense_again) is GPT2ForMultipleChoice
    if "own" not in way:
        norm = dict(model.named_parameters())["transformer.ln_f.weight"].grad
        assert relative_error(norm, expected_gradients["transformer.ln_f.weight"]) < 1e-12


def test_any_family_chooses(batch):
    """Its classifier scores the options; copies, pickles and `gather` know the class."""
    classifier = tiny("qwen2", "classifier", num_labels=1)
    kind = multiple_choice_of(type(classifier))
    assert kind.__name__ == "Qwen2ForMultipleChoice"
    assert kind is multiple_choice.Qwen2ForMultipleChoice
    dense = kind(classifier.config).double()
    dense.load_state_dict(classifier.state_dict())
    expected = classifier(batch["input_ids"][0], attention_mask=batch["attention_mask"][0]).logits.view(-1)
    assert relative_error(dense(**batch).logits[0], expected) < 1e-12
    model = pickle.loads(pickle.dumps(ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=2)))
    assert relative_error(model(**batch).logits[0], expected) < 1e-12
    assert type(copy.deepcopy(ltp.gather(model))) is kind
    with pytest.raises(AttributeError, match="no attribute 'NobodysForMultipleChoice'"):
        multiple_choice.NobodysForMultipleChoice  # noqa: B018
