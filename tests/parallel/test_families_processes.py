"""Decoders of other families over processes against virtual ranks: the same curves and packets."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lossytp as ltp
from lossytp.parallel.group import Layout
from lossytp.parallel.replicas import clip_gradients_, mean_over_processes, replica_drift, synchronise_gradients_
from tests.parallel.conftest import relative_error, tiny_batch
from tests.parallel.distributed_models import join
from tests.parallel.families import tiny
from tests.parallel.sharing_modes import MODES

pytestmark = pytest.mark.slow

RUNS: list[tuple[str, str, dict[str, Any]]] = [("llama", mode, {"algorithm": "ring"}) for mode in MODES]
RUNS += [("llama", "own streams", {"algorithm": "tree", "repair": "stale"})]
RUNS += [("llama", "shared", {"algorithm": "direct", "repair": repair}) for repair in ("hadamard(4)", "retransmit(1)")]
RUNS += [("llama", "shared", {"algorithm": "tree", "repair": "protect(0.1) + hadamard(4)"})]
RUNS += [("llama", "own streams", {"algorithm": "ring", "repair": "protect(0.1) + stale"})]
RUNS += [("qwen3", mode, {}) for mode in ("shared", "own streams", "sequence, lossy gather")]
RUNS += [(family, "shared", {}) for family in ("gpt_neox", "gemma", "olmo2", "phi3", "glm")]
RUNS += [(family, "own streams", {}) for family in ("olmo2", "phi3", "glm")]
RUNS += [("qwen2, one key-value head", mode, {}) for mode in ("shared", "own streams")]
RUNS += [("llama", "shared", {"algorithm": "ring", "repair": "protect_first(2) + hadamard(4)"})]
RUNS += [("qwen2_moe", mode, {"algorithm": "ring"}) for mode in ("shared", "own streams", "sequence, lossy gather")]


def train(layout: Layout, family: str, mode: str, *, loss_rate: float = 0.1, **how: Any) -> dict:
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=loss_rate), seed=2, wire=ltp.Wire(mtu_bytes=108))
    size, group = layout.tensor_parallel_size, layout.tensor_group()
    dense = tiny(family, "classifier")
    model: Any = ltp.parallelize(dense, network, tensor_parallel_size=size, group=group, **MODES[mode] | how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    results: dict[str, Any] = {"losses": [], "norms": []}
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(**tiny_batch("classifier", padded=True)).loss
        loss.backward()
        if mode == "own streams":
            synchronise_gradients_(model, layout, network)
        results["norms"].append(clip_gradients_(model, 1.0, layout, network))
        optimizer.step()
        results["losses"].append(mean_over_processes(loss.item(), network))
    results["drift"] = replica_drift(model, layout, network)
    results["gathered"] = ltp.gather(model).state_dict()
    results["network"] = network.state_dict()
    return results


def on_rank_train(size: int, runs: list) -> list[dict]:
    layout = join(ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.0)), tensor_parallel_size=size)
    return [train(layout, family, mode, **how) for family, mode, how in runs]


@pytest.mark.parametrize("size", [2, 4], ids=["one rank a process", "two ranks a process"])
def test_processes_train_as_virtual_ranks_do(processes: Callable, size: int) -> None:
    answers = processes(2, on_rank_train, size, RUNS)
    for number, (family, mode, how) in enumerate(RUNS):
        case, expected = (family, mode, how), train(Layout(size), family, mode, **how)
        for results in (answer[number] for answer in answers):
            assert results["losses"] == pytest.approx(expected["losses"], rel=1e-8), case
            assert results["norms"] == pytest.approx(expected["norms"], rel=1e-8), case
            assert results["network"] == expected["network"], case
            assert results["drift"] == pytest.approx(expected["drift"], rel=1e-5), case
            for name, tensor in expected["gathered"].items():
                assert relative_error(results["gathered"][name], tensor) < 1e-6, (case, name)
        reliable = train(Layout(size), family, mode, loss_rate=0.0, **how)
        assert reliable["losses"] != pytest.approx(expected["losses"], rel=1e-5), f"control: {case}"
