"""Stages of a classifier in processes: the dense model's gradients and logits, but for lost activations.

Shapes: B examples, T tokens.
"""

import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

import lossytp as ltp
from lossytp.parallel.pipeline import Pipeline, _Stage
from tests.parallel.conftest import (
    NUM_TOKENS,
    WIDTH,
    FakeProcessGroup,
    gradient_error,
    gradients,
    relative_error,
    tiny_batch,
    tiny_gpt2,
)
from tests.parallel.distributed_models import WIRE, network

NUM_MICROBATCHES = 3
ROOM = (WIRE.mtu_bytes - WIRE.header_bytes) // 8  # elements of float64 in a packet
# blocks, and the first one of each stage and of the next
STAGES = {(2, 3): (0, 2, 3), (2, 2): (0, 1, 2), (3, 3): (0, 1, 2, 3), (3, 4): (0, 1, 3, 4)}


def batch_of(num_examples: int, num_tokens: int = NUM_TOKENS, *, padded: bool = False) -> dict[str, Tensor]:
    batch = {name: tensor[:num_examples] for name, tensor in tiny_batch("classifier", padded=padded).items()}
    for name in ("input_ids", "attention_mask"):
        batch[name] = batch.get(name, torch.ones_like(batch["input_ids"]))[:, :num_tokens]
        if padded:  # to the left: behind a causal mask padding to the right would change nothing
            batch[name] = batch[name].flip(1)
    return batch


# trained on one after another; the third batch is of the first one's shape, other examples having other padding, and
# the last is not a multiple of the microbatches
BATCHES = [batch_of(6), batch_of(3, 5), batch_of(6, padded=True), batch_of(7)]
EVALUATED = [batch_of(7, padded=True), batch_of(6), batch_of(7)]


def classifier(num_blocks: int) -> Any:
    return tiny_gpt2("classifier", n_layer=num_blocks)


def on_rank_train(schedule: str, num_blocks: int, loss_rate: float) -> dict[str, Any]:
    """Training losses and gradients of each batch, and then logits; rows sent after both."""
    lossy = network(loss_rate)
    ltp.init_process_group(lossy)
    dense, stages = classifier(num_blocks), dist.group.WORLD
    pipeline = Pipeline(dense, stages, schedule=schedule, num_microbatches=NUM_MICROBATCHES, device=torch.device("cpu"))
    first = STAGES[stages.size(), num_blocks][stages.rank()]
    results: dict[str, Any] = {"losses": [], "gradients": [], "last": pipeline.is_last, "order": ""}

    def note(pass_: str) -> Any:
        def hook(*_: Any) -> None:
            results["order"] += pass_

        return hook

    layer_norm = pipeline.stage.model.transformer.h[0].ln_1
    layer_norm.register_forward_hook(note("F"))
    layer_norm.register_full_backward_hook(note("B"))
    named = {
        re.sub(r"\.h\.(\d+)\.", lambda match: f".h.{int(match[1]) + first}.", name): parameter
        for name, parameter in pipeline.stage.model.named_parameters()
    }
    for batch in BATCHES:
        pipeline.stage.zero_grad()
        loss = pipeline.forward_backward(batch)
        results["losses"].append(None if loss is None else (loss.item(), loss.requires_grad))
        results["gradients"].append({name: parameter.grad.clone() for name, parameter in named.items()})
    results["sent"] = lossy.counters.rows()
    pipeline.stage.eval()
    results["logits"] = [pipeline.logits(batch) for batch in EVALUATED]
    gc.collect()
    results["stages"] = sum(isinstance(kept, PipelineStage) for kept in gc.get_objects())
    results["sent in all"] = lossy.counters.rows()
    return results


def without(batch: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name not in names}


@pytest.mark.parametrize(("num_stages", "num_blocks"), STAGES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_without_losses_losses_gradients_and_logits_equal_dense(
    processes: Callable, schedule: str, num_stages: int, num_blocks: int
) -> None:
    dense = classifier(num_blocks)
    answers = processes(num_stages, on_rank_train, schedule, num_blocks, 0.0)
    assert [answer["last"] for answer in answers] == [False] * (num_stages - 1) + [True]
    assert [answer["stages"] for answer in answers] == [2] * num_stages, (
        "of training and of evaluation, the last batch's"
    )
    assert answers[-1]["order"][: 2 * NUM_MICROBATCHES] == {"gpipe": "FFFBBB", "1f1b": "FBFBFB"}[schedule]
    for index, batch in enumerate(BATCHES):
        expected = gradients(dense, batch)
        loss = dense(**batch).loss.item()
        assert [answer["losses"][index] for answer in answers[:-1]] == [None] * (num_stages - 1)
        assert answers[-1]["losses"][index] == (pytest.approx(loss, rel=1e-12), False)
        parts = [answer["gradients"][index] for answer in answers]
        assert sum(map(len, parts)) == len(expected), "each parameter on one stage"
        found = {name: gradient for part in parts for name, gradient in part.items()}
        assert gradient_error(found, expected) < 1e-12
    for index, batch in enumerate(EVALUATED):
        assert [answer["logits"][index] for answer in answers[:-1]] == [None] * (num_stages - 1)
        with torch.no_grad():
            logits = dense(**without(batch, "labels")).logits
        assert relative_error(answers[-1]["logits"][index], logits) < 1e-12


def packets(batch: dict[str, Tensor], num_microbatches: int) -> int:
    """Of one batch's activations on one link: each microbatch is a message of its own."""
    examples, tokens = batch["input_ids"].shape
    return num_microbatches * -(-(examples // num_microbatches * tokens * WIDTH) // ROOM)


@pytest.mark.parametrize(("num_stages", "num_blocks"), [(2, 3), (3, 4)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_activations_lose_packets_on_the_way_up_and_their_gradients_on_the_way_down(
    processes: Callable, schedule: str, num_stages: int, num_blocks: int
) -> None:
    dense = classifier(num_blocks)
    answers = processes(num_stages, on_rank_train, schedule, num_blocks, 0.1)
    trained = sum(packets(batch, NUM_MICROBATCHES) for batch in BATCHES[:-1]) + packets(BATCHES[-1], 1)
    evaluated = sum(packets(batch, 1) for batch in EVALUATED)
    for stage, answer in enumerate(answers):
        ways = {("forward", stage + 1): trained, ("backward", stage - 1): trained}
        expected = {way: number for way, number in ways.items() if 0 <= way[1] < num_stages}
        assert {(row["direction"], row["dst"]): row["packets"] for row in answer["sent"]} == expected
        assert {(row["operation"], row["src"]) for row in answer["sent"]} == {("send", stage)}
        assert all(0.05 < row["lost"] / row["packets"] < 0.15 for row in answer["sent"])
        if stage < num_stages - 1:
            expected["forward", stage + 1] += evaluated
        assert {(row["direction"], row["dst"]): row["packets"] for row in answer["sent in all"]} == expected
    for index, batch in enumerate(BATCHES):
        expected_gradients = gradients(dense, batch)
        for answer in answers:
            part = answer["gradients"][index]
            assert gradient_error(part, {name: expected_gradients[name] for name in part}) > 0.01
    with torch.no_grad():
        logits = dense(**without(EVALUATED[1], "labels")).logits
    assert relative_error(answers[-1]["logits"][1], logits) > 0.01


# --- what is refused


def pipeline(model: Any, num_stages: int, schedule: str = "gpipe", num_microbatches: int = 4) -> Pipeline:
    stages: Any = FakeProcessGroup(num_stages, num_stages - 1)
    device = torch.device("cpu")
    return Pipeline(model, stages, schedule=schedule, num_microbatches=num_microbatches, device=device)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        (
            lambda: pipeline(tiny_gpt2(), 2),
            TypeError,
            "a pipeline of a GPT2LMHeadModel is not supported: give a classifier",
        ),
        (
            lambda: pipeline(classifier(2), 3),
            ValueError,
            "pipeline_parallel_size = 3 is above the model's 2 blocks: give fewer",
        ),
        (
            lambda: pipeline(classifier(3), 3, "1f1b", 2),
            ValueError,
            "pipeline_microbatches = 2 is below the 3 stages, which 1f1b cannot keep busy: give 3 or more, or gpipe",
        ),
    ],
    ids=["language model", "too few blocks", "too few microbatches"],
)
def test_what_cannot_be_a_pipeline_is_refused(refused: Callable, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        refused()


def test_a_stage_takes_its_blocks_over_and_leaves_the_others() -> None:
    """Nothing holds two copies of them."""
    model = classifier(2)
    stage = pipeline(model, 2).stage
    kept = {id(parameter) for parameter in stage.parameters()}
    assert all(id(parameter) in kept for parameter in model.transformer.h[1].parameters())
    assert not any(id(parameter) in kept for parameter in model.transformer.h[0].parameters())


def test_as_many_blocks_as_stages_and_few_microbatches_are_fine() -> None:
    """Control of the refusals: the bounds themselves are allowed."""
    assert pipeline(classifier(3), 3, "1f1b", 3).is_last
    assert pipeline(classifier(3), 3, "gpipe", 1).is_last


def test_a_token_that_is_lost_whole_has_a_gradient_orders_of_magnitude_larger() -> None:
    """It is zero where the next stage normalises it, whose derivative there is 1 / sqrt(eps)."""

    def norm_of_its_gradient(kept: float) -> float:
        dense, received = classifier(2), []

        def hand_on(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden_BTD = inputs[0].detach().clone()
            hidden_BTD[:, 1] *= kept
            received.append(hidden_BTD.requires_grad_())
            return (hidden_BTD, *inputs[1:])

        with dense.transformer.h[1].register_forward_pre_hook(hand_on):
            dense(**batch_of(6)).loss.backward()
        return float(received[0].grad[:, 1].norm())

    assert norm_of_its_gradient(0.0) > 100 * norm_of_its_gradient(1.0)


def test_the_exact_adjoint_sends_no_gradient_for_what_did_not_arrive() -> None:
    batch = batch_of(6)
    hidden_BTD = torch.randn(6, NUM_TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hidden_BTD[:, 1] = 0
    hidden_BTD[0, 2, : WIDTH // 2] = 0
    gradients, outputs = [], []
    for exact_adjoint in (False, True):
        received = hidden_BTD.clone().requires_grad_()
        stage = _Stage(classifier(2), 1, 2, exact_adjoint)
        outputs.append(stage(received, torch.ones_like(batch["input_ids"]), batch["input_ids"]))
        outputs[-1].square().sum().backward()
        gradients.append(received.grad)
    as_is, exact = gradients
    assert torch.equal(*outputs)
    assert as_is[:, 1].abs().min() > 0
    assert torch.equal(exact, as_is * (hidden_BTD != 0))
