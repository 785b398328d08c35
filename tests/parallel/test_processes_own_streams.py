"""Every way of sharing activations, ranks in processes against virtual ranks: the same curves, packets and copies."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossytp as ltp
from lossytp.network.scope import Counters
from lossytp.parallel.group import Layout
from lossytp.parallel.own_streams import stream_distance
from lossytp.parallel.replicas import (
    clip_gradients_,
    mean_over_processes,
    replica_drift,
    resynchronise_,
    synchronise_gradients_,
)
from tests.parallel.conftest import relative_error, tiny_batch, tiny_gpt2
from tests.parallel.distributed_models import join
from tests.parallel.sharing_modes import COMBINATIONS, MODES, ON_OWN_STREAMS, WIRE

pytestmark = pytest.mark.slow

NUM_STEPS = 20
# mode, and what else `parallelize` is told
RUNS: list[tuple[str, dict[str, Any]]] = [(mode, {"algorithm": algorithm}) for mode, algorithm in COMBINATIONS]
REPAIRS = {
    "shared": ["stale", "local", "rescale_counted", "protect(0.1) + hadamard(4)"],
    "own copies": ["stale", "local", "fec(3, 2)", "hadamard(4)", "rescale", "protect(0.1) + stale"],
    "sequence, lossy gather": ["stale", "retransmit(1)", "rescale_counted", "protect(0.1) + rescale"],
}
RUNS += [(mode, {"algorithm": "ring", "repair": repair}) for mode, repairs in REPAIRS.items() for repair in repairs]
RUNS += [("own copies", {"control": "noise"})]
# what is done to own copies before, or after, a step
RUNS += [("own copies", {"synchronising": how}) for how in ("reliable", "lossy", "resynchronise")]
RUNS += [("own copies", {"algorithm": "direct", "repair": "stale", "synchronising": "lossy"})]


def small_gpt2(**changes: Any) -> Any:
    return tiny_gpt2("classifier", n_embd=32, n_head=4, n_layer=1, **changes)


def small_batch() -> dict[str, torch.Tensor]:
    batch = tiny_batch("classifier", padded=True)
    return {name: tensor[:2, -9:] if tensor.ndim > 1 else tensor[:2] for name, tensor in batch.items()}


def train(layout: Layout, mode: str, *, synchronising: str = "none", steps: int = NUM_STEPS, **how: Any) -> dict:
    """Whatever must not depend on where the ranks live."""
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1), seed=2, wire=WIRE)
    size = layout.tensor_parallel_size
    dense = small_gpt2(embd_pdrop=0.1, resid_pdrop=0.1)
    group = layout.tensor_group()
    model: Any = ltp.parallelize(dense, network, tensor_parallel_size=size, group=group, **MODES[mode] | how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    results: dict[str, Any] = {"losses": [], "norms": []}
    torch.manual_seed(7)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**small_batch()).loss
        loss.backward()
        if mode == "own streams" or synchronising in ("reliable", "lossy"):
            synchronise_gradients_(model, layout, network, lossy=synchronising == "lossy")
        if step % 5 == 0:
            results["norms"].append(clip_gradients_(model, 1.0, layout, network))
        optimizer.step()
        if synchronising == "resynchronise" and step % 5 == 4:
            resynchronise_(model, layout, network)
        results["losses"].append(mean_over_processes(loss.item(), network))
    results["drift"] = replica_drift(model, layout, network)
    if mode in ON_OWN_STREAMS:
        with torch.no_grad(), stream_distance(model.eval()) as distance, network.evaluation(steps):
            output = model(**small_batch())
        results |= {"distance": distance(), "logits": output.logits, "rank_logits": output.rank_logits}
    results["gathered"] = ltp.gather(model).state_dict()
    results["network"] = network.state_dict()
    return results


def on_rank_train(size: int, runs: list) -> list[dict]:
    layout = join(ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.0)), tensor_parallel_size=size)
    return [train(layout, mode, **how) for mode, how in runs]


@pytest.mark.parametrize(("size", "runs"), [(2, RUNS[::4]), (4, RUNS)], ids=["2 ranks", "4 ranks"])
def test_processes_train_as_virtual_ranks_do(processes: Callable, size: int, runs: list) -> None:
    answers = processes(2, on_rank_train, size, runs)
    curves = []
    for number, (mode, how) in enumerate(runs):
        expected, case = train(Layout(size), mode, **how), (mode, how)
        curves.append(expected["losses"])
        for rank, results in enumerate(answer[number] for answer in answers):
            assert results["losses"] == pytest.approx(expected["losses"], rel=1e-9), case
            assert results["norms"] == pytest.approx(expected["norms"], rel=1e-9), case
            assert results["network"] == expected["network"], case
            assert results["drift"] == pytest.approx(expected["drift"], rel=1e-6), case
            for name, tensor in expected["gathered"].items():
                assert relative_error(results["gathered"][name], tensor) < 1e-6, (case, name)
            if mode in ON_OWN_STREAMS:
                assert results["distance"] == pytest.approx(expected["distance"], rel=1e-9), case
                here = size // 2
                assert len(results["rank_logits"]) == here
                mine = expected["rank_logits"][rank * here : (rank + 1) * here]
                assert relative_error(results["rank_logits"], mine) < 1e-9
                assert relative_error(results["logits"], expected["logits"]) < 1e-9
                assert min(expected["distance"]) > 1e-4, "control"
            lost = sum(row["lost"] for row in training_counts(results))
            assert lost > 10 or "control" in how, case
        drifts = mode == "own copies" and how.get("synchronising") in (None, "lossy")
        assert (expected["drift"] > 1e-6) == drifts, case
        first, second = (answer[number] for answer in answers)
        for name, tensor in first["gathered"].items():
            assert torch.equal(tensor, second["gathered"][name]), (case, name)
        assert "logits" not in first or torch.equal(first["logits"], second["logits"]), "what is decided by them"
    for number, curve in enumerate(curves):
        for other in range(number):
            same_mode = runs[number][0] == runs[other][0]
            if not same_mode or runs[number][1].get("algorithm") == "sender":
                continue  # some of them take the same way
            assert curve != pytest.approx(curves[other], rel=1e-7), f"control: {runs[number]}, {runs[other]}"


def training_counts(results: dict) -> list[dict]:
    counters = Counters()
    counters.load_state_dict(results["network"]["counters"])
    return counters.rows("training")


def generate(layout: Layout, mode: str) -> torch.Tensor:
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.2), seed=2, wire=WIRE)
    size = layout.tensor_parallel_size
    group = layout.tensor_group()
    model = ltp.parallelize(tiny_gpt2().eval(), network, tensor_parallel_size=size, group=group, **MODES[mode])
    prompts = tiny_batch()["input_ids"][:3, :6]
    settings = {"do_sample": False, "min_new_tokens": 8, "max_new_tokens": 8}
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)


def on_rank_generate() -> list[torch.Tensor]:
    layout = join(ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.0)), tensor_parallel_size=4)
    return [generate(layout, mode) for mode in MODES]


def test_processes_write_what_virtual_ranks_do(processes: Callable) -> None:
    """Each token is the first rank's choice, on every process."""
    expected = [generate(Layout(4), mode) for mode in MODES]
    for answer in processes(2, on_rank_generate):
        assert all(torch.equal(*pair) for pair in zip(answer, expected, strict=True))


def on_rank_backward() -> dict[str, Any]:
    """Gradients of replicated parameters before and after they are synchronised, one copy for two ranks here."""
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1), seed=2, wire=WIRE)
    layout = join(network, tensor_parallel_size=4)
    group = layout.tensor_group()
    model: Any = ltp.parallelize(small_gpt2(), network, tensor_parallel_size=4, group=group, **MODES["own streams"])
    model(**small_batch()).loss.backward()
    before = model.transformer.ln_f.bias.grad.clone(), model.transformer.h[0].attn.c_attn.weight.grad.clone()
    synchronise_gradients_(model, layout, network)
    after = model.transformer.ln_f.bias.grad, model.transformer.h[0].attn.c_attn.weight.grad
    try:
        synchronise_gradients_(model, layout, network, lossy=True)
    except ValueError as error:
        return {"before": before, "after": after, "rank": dist.get_rank(), "error": str(error)}
    raise AssertionError("lossy, where ranks share copies")


def test_a_process_has_the_mean_over_its_ranks_until_it_is_synchronised(processes: Callable) -> None:
    first, second = processes(2, on_rank_backward)
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1), seed=2, wire=WIRE)
    model: Any = ltp.parallelize(small_gpt2(), network, tensor_parallel_size=4, **MODES["own copies"])
    model(**small_batch()).loss.backward()
    own_4D, shards = model.transformer.ln_f.bias.grad, model.transformer.h[0].attn.c_attn.weight.grad
    for rank, answer in enumerate((first, second)):
        here = slice(2 * rank, 2 * rank + 2)
        torch.testing.assert_close(answer["before"][0], own_4D[here].mean(0))
        torch.testing.assert_close(answer["after"][0], own_4D.mean(0))
        torch.testing.assert_close(answer["before"][1].view(32, 3, 2, -1), shards.view(32, 3, 4, -1)[:, :, here])
        assert torch.equal(answer["after"][1], answer["before"][1])
        assert answer["error"].startswith("lossy = True needs ranks with copies of their own")
    assert relative_error(first["before"][0], second["before"][0]) > 1e-3
