"""Stages in processes: the dense model's gradients and logits, but for lost activations.

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
from lossytp.parallel.group import Layout
from lossytp.parallel.pipeline import Pipeline
from lossytp.parallel.replicas import clip_gradients_
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

pytestmark = pytest.mark.slow

NUM_MICROBATCHES = 3
ROOM = (WIRE.mtu_bytes - WIRE.header_bytes) // 8  # elements of float64 in a packet
# by stages and blocks: the first block of each stage and of the next
STAGES = {(2, 3): (0, 2, 3), (2, 2): (0, 1, 2), (3, 3): (0, 1, 2, 3), (3, 4): (0, 1, 3, 4)}


def batch_of(
    num_examples: int, num_tokens: int = NUM_TOKENS, *, padded: bool = False, kind: str = "classifier"
) -> dict[str, Tensor]:
    batch = {name: tensor[:num_examples] for name, tensor in tiny_batch(kind, padded=padded).items()}
    if kind == "language model":
        batch["labels"] = batch["labels"][:, :num_tokens]
    for name in ("input_ids", "attention_mask"):
        batch[name] = batch.get(name, torch.ones_like(batch["input_ids"]))[:, :num_tokens]
        if padded and kind == "classifier":  # to the left: behind a causal mask right padding would change nothing
            batch[name] = batch[name].flip(1)
    return batch


def batches_of(kind: str = "classifier") -> list[dict[str, Tensor]]:
    """Batches to train on, one after another.

    The third one is of the first one's shape, with other padding in each example and so, in each microbatch, with other
    numbers of tokens to predict. The microbatches do not divide the last.
    """
    sizes: list[Any] = [((6,), {}), ((3, 5), {}), ((6,), {"padded": True}), ((7,), {})]
    return [batch_of(*size, kind=kind, **how) for size, how in sizes]


BATCHES = batches_of()
EVALUATED = [batch_of(7, padded=True), batch_of(6), batch_of(7)]


def classifier(num_blocks: int) -> Any:
    return tiny_gpt2("classifier", n_layer=num_blocks)


@pytest.fixture(scope="module", autouse=True)
def _imported(processes: Callable) -> None:
    """Let every process import this module before others wait for it."""
    processes(3, on_rank_import)


def on_rank_import() -> None:
    """Import this module."""


def on_rank_train(schedule: str, num_blocks: int, loss_rate: float, kind: str = "classifier") -> dict[str, Any]:
    """Training losses and gradients of each batch, and then logits; rows sent after both."""
    lossy = network(loss_rate)
    ltp.init_process_group(lossy)
    dense, stages = tiny_gpt2(kind, n_layer=num_blocks), dist.group.WORLD
    layout = Layout(pipeline_parallel_size=stages.size(), rank=stages.rank(), world_size=stages.size())
    pipeline = Pipeline(dense, stages, schedule=schedule, num_microbatches=NUM_MICROBATCHES, device=torch.device("cpu"))
    first = STAGES[stages.size(), num_blocks][stages.rank()]
    results: dict[str, Any] = {"losses": [], "gradients": [], "norms": [], "last": pipeline.is_last, "order": ""}

    def note(pass_: str) -> Any:
        def hook(*_: Any) -> None:
            results["order"] += pass_

        return hook

    layer_norm = pipeline.stage.model.transformer.h[first].ln_1
    layer_norm.register_forward_hook(note("F"))
    layer_norm.register_full_backward_hook(note("B"))
    named = dict(pipeline.stage.model.named_parameters())
    for batch in batches_of(kind):
        pipeline.stage.zero_grad()
        loss = pipeline.forward_backward(batch)
        results["losses"].append(None if loss is None else (loss.item(), loss.requires_grad))
        results["gradients"].append({name: parameter.grad.clone() for name, parameter in named.items()})
        results["norms"].append(clip_gradients_(pipeline.stage, None, layout, lossy))
    results["sent"] = lossy.counters.rows()
    pipeline.stage.eval()
    results["logits"] = [pipeline.logits(batch) for batch in EVALUATED]
    logits = pipeline.logits(batches_of(kind)[2])
    results["evaluated"] = None if logits is None else pipeline._loss(logits, batches_of(kind)[2]["labels"])
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
        norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm().item()
        assert [answer["norms"][index] for answer in answers] == pytest.approx([norm] * num_stages, rel=1e-12)
    for index, batch in enumerate(EVALUATED):
        assert [answer["logits"][index] for answer in answers[:-1]] == [None] * (num_stages - 1)
        with torch.no_grad():
            logits = dense(**without(batch, "labels")).logits
        assert relative_error(answers[-1]["logits"][index], logits) < 1e-12


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_language_model_too_with_a_head_that_is_tied_to_the_embeddings(processes: Callable, schedule: str) -> None:
    kind = "language model"
    dense = tiny_gpt2(kind, n_layer=3)
    answers = processes(2, on_rank_train, schedule, 3, 0.0, kind)
    for index, batch in enumerate(batches_of(kind)):
        expected = gradients(dense, batch)
        loss = dense(**batch).loss.item()
        assert answers[1]["losses"][index] == (pytest.approx(loss, rel=1e-6), False)  # transformers computes it in fp32
        first, last = (answer["gradients"][index] for answer in answers)
        assert torch.equal(last.pop("lm_head.weight"), first["transformer.wte.weight"])
        assert gradient_error(first | last, expected) < 1e-6
        norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm().item()
        assert [answer["norms"][index] for answer in answers] == pytest.approx([norm, norm], rel=1e-6)
    with torch.no_grad():
        loss = dense(**batches_of(kind)[2]).loss
        logits = dense(**without(EVALUATED[1], "labels")).logits
    assert answers[0]["evaluated"] is None
    assert answers[1]["evaluated"] == pytest.approx(loss.item(), rel=1e-6)
    assert relative_error(answers[1]["logits"][1], logits) < 1e-12


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
    evaluated = sum(packets(batch, 1) for batch in [*EVALUATED, BATCHES[2]])
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


def test_too_few_microbatches_are_refused() -> None:
    message = "pipeline_microbatches = 2 is below the 3 stages, which 1f1b cannot keep busy: give 3 or more, or gpipe"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pipeline(classifier(3), 3, "1f1b", 2)


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
