"""Stages of every family in one process, and in processes: the dense model's gradients and logits, but for losses.

Shapes: B examples, T tokens.
"""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import cross_entropy

import lossytp as ltp
from lossytp.parallel.group import Layout
from lossytp.parallel.pipeline import Pipeline, Stage
from lossytp.parallel.plans import blocks_of
from lossytp.parallel.replicas import clip_gradients_
from tests.parallel.conftest import (
    NUM_TOKENS,
    WIDTH,
    FakeProcessGroup,
    bernoulli,
    gradient_error,
    gradients,
    relative_error,
    tiny_batch,
    tiny_gpt2,
)
from tests.parallel.distributed_models import network
from tests.parallel.families import FAMILIES, GATHERING, tiny

BLOCKS = 3  # on two stages, one has two of them


def decoder(family: str, kind: str) -> Any:
    return tiny_gpt2(kind, n_layer=BLOCKS) if family == "gpt2" else tiny(family, kind, num_hidden_layers=BLOCKS)


def stages_of(model: Any, number: int) -> list[Stage]:
    return [Stage(copy.deepcopy(model), index, number) for index in range(number)]


def run_stages(stages: list[Stage], batch: dict[str, Tensor]) -> Tensor:
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
def test_stages_one_after_the_other_compute_what_the_dense_model_does(family, kind):
    dense, batch = decoder(family, kind), tiny_batch(kind, padded=True)
    expected = gradients(dense, batch)
    stages = stages_of(dense, 2)
    logits = run_stages(stages, batch)
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
def test_from_one_stage_to_as_many_as_blocks(number):
    dense, batch = decoder("gemma2", "language model"), tiny_batch()  # its blocks take turns in what they attend to
    assert relative_error(run_stages(stages_of(dense, number), batch), dense(**batch).logits) < 1e-12


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_checkpointed_stage_recomputes_each_microbatch_with_what_it_received(family):
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


def test_a_tensor_parallel_decoder_is_cut_into_stages_too():
    dense, batch = decoder("llama", "language model"), tiny_batch(padded=True)
    parallel = ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=4)
    assert relative_error(run_stages(stages_of(parallel, 2), batch), dense(**batch).logits) < 1e-12


def test_a_stage_takes_its_blocks_over_and_leaves_the_others():
    model = decoder("llama", "classifier")
    kept = {id(parameter) for parameter in Stage(model, 1, 3).parameters()}
    for number, block in enumerate(blocks_of(model)):
        assert all((id(parameter) in kept) == (number == 1) for parameter in block.parameters())
    assert len(kept) == len(list(model.model.layers[1].parameters())), "no embedding, norm or head"


def test_the_exact_adjoint_sends_no_gradient_for_what_did_not_arrive():
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


NUM_MICROBATCHES = 3
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
    """The third is of the first's shape, with other padding: so with other numbers of tokens in a microbatch."""
    sizes: list[Any] = [((6,), {}), ((3, 5), {}), ((6,), {"padded": True}), ((7,), {})]
    return [batch_of(*size, kind=kind, **how) for size, how in sizes]


BATCHES = batches_of()
EVALUATED = [batch_of(7, padded=True), batch_of(6), batch_of(7)]


def classifier(num_blocks: int) -> Any:
    return tiny_gpt2("classifier", n_layer=num_blocks)


@pytest.fixture(scope="module", name="processes")
def _that_imported(processes: Callable) -> Callable:
    """Let every process import this module before others wait for it."""
    processes(3, on_rank_import)
    return processes


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
def test_without_losses_losses_gradients_and_logits_equal_dense(processes, schedule, num_stages, num_blocks):
    dense = classifier(num_blocks)
    answers = processes(num_stages, on_rank_train, schedule, num_blocks, 0.0)
    assert [answer["last"] for answer in answers] == [False] * (num_stages - 1) + [True]
    assert [answer["stages"] for answer in answers] == [2] * num_stages, "of training and of evaluation"
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
def test_a_language_model_too_with_a_head_that_is_tied_to_the_embeddings(processes, schedule):
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


@pytest.mark.parametrize(("num_stages", "num_blocks"), [(2, 3), (3, 4)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_with_losses_the_same_comparison_fails_by_far(processes, schedule, num_stages, num_blocks):
    """`training/test_parallelism.py` counts the packets of training; evaluation sends activations alone."""
    dense = classifier(num_blocks)
    answers = processes(num_stages, on_rank_train, schedule, num_blocks, 0.1)
    for stage, answer in enumerate(answers):
        ways = {("forward", stage + 1), ("backward", stage - 1)}
        assert {(row["direction"], row["dst"]) for row in answer["sent"]} == {
            way for way in ways if 0 <= way[1] < num_stages
        }
        rows = [{row["direction"]: row["packets"] for row in answer[name]} for name in ("sent", "sent in all")]
        assert {way for way, number in rows[1].items() if number > rows[0][way]} == (
            {"forward"} if stage < num_stages - 1 else set()
        )
    for index, batch in enumerate(BATCHES):
        expected = gradients(dense, batch)
        for part in (answer["gradients"][index] for answer in answers):
            assert gradient_error(part, {name: expected[name] for name in part}) > 0.01
    with torch.no_grad():
        logits = dense(**without(EVALUATED[1], "labels")).logits
    assert relative_error(answers[-1]["logits"][1], logits) > 0.01


def pipeline(model: Any, num_stages: int, schedule: str = "gpipe", num_microbatches: int = 4) -> Pipeline:
    stages: Any = FakeProcessGroup(num_stages, num_stages - 1)
    device = torch.device("cpu")
    return Pipeline(model, stages, schedule=schedule, num_microbatches=num_microbatches, device=device)  # type: ignore[arg-type]


def test_too_few_microbatches_are_refused():
    with pytest.raises(ValueError, match=r"^pipeline_microbatches = 2 "):
        pipeline(classifier(3), 3, "1f1b", 2)
    assert pipeline(classifier(3), 3, "1f1b", 3).is_last, "control: the bounds themselves are allowed"
    assert pipeline(classifier(3), 3, "gpipe", 1).is_last
