"""Stages of every family, run one after the other in one process: the dense model's logits and gradients.

Shapes: B examples, T tokens.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import lossytp as ltp
from lossytp.parallel.pipeline import Stage
from lossytp.parallel.plans import blocks_of
from tests.parallel.conftest import (
    NUM_TOKENS,
    WIDTH,
    bernoulli,
    gradient_error,
    gradients,
    relative_error,
    tiny_batch,
    tiny_gpt2,
)
from tests.parallel.families import FAMILIES, GATHERING, tiny

BLOCKS = 3  # on two stages, one has two of them


def decoder(family: str, kind: str) -> Any:
    return tiny_gpt2(kind, n_layer=BLOCKS) if family == "gpt2" else tiny(family, kind, num_hidden_layers=BLOCKS)


def stages_of(model: Any, number: int) -> list[Stage]:
    return [Stage(copy.deepcopy(model), index, number) for index in range(number)]


def run(stages: list[Stage], batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    x = stages[0](inputs.pop("input_ids"), **inputs)
    for stage in stages[1:]:
        x = stage(x, input_ids=batch["input_ids"], **inputs)
    return x


def loss_of(dense: Any, logits: Tensor, batch: dict[str, Tensor], kind: str) -> Tensor:
    if kind == "classifier":
        return cross_entropy(logits, batch["labels"])
    return dense.loss_function(logits, batch["labels"], logits.shape[-1])


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "language model") for family in ("gpt2", *FAMILIES, *GATHERING)),
        *((family, "classifier") for family in ("gpt2", "llama", "gemma2", "phi")),
    ],
)
def test_stages_one_after_the_other_compute_what_the_dense_model_does(family: str, kind: str) -> None:
    dense, batch = decoder(family, kind), tiny_batch(kind, padded=True)
    expected = gradients(dense, batch)
    stages = stages_of(dense, 2)
    logits = run(stages, batch)
    assert relative_error(logits, dense(**batch).logits) < 1e-12
    loss_of(dense, logits, batch, kind).backward()
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            assert name not in found, "each parameter lies on one stage"
            found[name] = parameter.grad
    first, last = (stage.tied_weight for stage in (stages[0], stages[-1]))
    tied = kind == "language model" and dense.get_input_embeddings().weight is dense.get_output_embeddings().weight
    assert (first is None, last is None) == (not tied, not tied)
    if tied:  # the head's copy has a name that the dense model does not list
        (head,) = found.keys() - expected.keys()
        assert found[head] is last.grad
        first.grad += found.pop(head)
    assert gradient_error(found, expected) < 1e-12


@pytest.mark.parametrize("number", [1, BLOCKS])
def test_from_one_stage_to_as_many_as_blocks(number: int) -> None:
    dense, batch = decoder("gemma2", "language model"), tiny_batch()  # its blocks take turns in what they attend to
    assert relative_error(run(stages_of(dense, number), batch), dense(**batch).logits) < 1e-12


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_checkpointed_stage_recomputes_each_microbatch_with_what_it_received(family: str) -> None:
    """Both microbatches go forward before either goes backward, as in GPipe."""
    plain, checkpointed = (Stage(decoder(family, "classifier"), 1, 2) for _ in range(2))
    checkpointed.model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = tiny_batch()["input_ids"]
    found = []
    for stage in (plain, checkpointed):
        generator = torch.Generator().manual_seed(0)
        received = [
            torch.randn(*ids.shape, WIDTH, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2)
        ]
        outputs = [stage(each, input_ids=ids) for each in received]
        for output in outputs:
            output.square().sum().backward()
        found.append([*(each.grad for each in received), *(each.grad for each in stage.model.parameters())])
    for gradient, other in zip(*found, strict=True):
        assert torch.equal(gradient, other)


def test_a_tensor_parallel_decoder_is_cut_into_stages_too() -> None:
    dense, batch = decoder("llama", "language model"), tiny_batch(padded=True)
    parallel = ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=4)
    assert relative_error(run(stages_of(parallel, 2), batch), dense(**batch).logits) < 1e-12


def test_a_stage_takes_its_blocks_over_and_leaves_the_others() -> None:
    """Nothing holds two copies of them."""
    model = decoder("llama", "classifier")
    kept = {id(parameter) for parameter in Stage(model, 1, 3).parameters()}
    for number, block in enumerate(blocks_of(model)):
        assert all((id(parameter) in kept) == (number == 1) for parameter in block.parameters())
    assert len(kept) == len(list(model.model.layers[1].parameters())), "no embedding, norm or head"


def test_the_exact_adjoint_sends_no_gradient_for_what_did_not_arrive() -> None:
    ids = tiny_batch()["input_ids"]
    hidden_BTD = torch.randn(
        len(ids), NUM_TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    hidden_BTD[:, 1] = 0
    hidden_BTD[0, 2, : WIDTH // 2] = 0
    gradients, outputs = [], []
    for exact_adjoint in (False, True):
        received = hidden_BTD.clone().requires_grad_()
        stage = Stage(decoder("gpt2", "classifier"), 1, 2, exact_adjoint)
        outputs.append(stage(received, torch.ones_like(ids), ids))
        outputs[-1].square().sum().backward()
        gradients.append(received.grad)
    as_is, exact = gradients
    assert torch.equal(*outputs)
    assert as_is[:, 1].abs().min() > 0
    assert torch.equal(exact, as_is * (hidden_BTD != 0))


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: decoder("llama", "classifier").model, TypeError, "a pipeline of a LlamaModel is not"),
        (lambda: decoder("llama", "classifier"), ValueError, "pipeline_parallel_size = 4"),
    ],
    ids=["no head", "too few blocks"],
)
def test_what_cannot_be_cut_is_refused(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        Stage(model(), 0, 4)
