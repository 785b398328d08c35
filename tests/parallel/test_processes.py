"""Ranks in processes against virtual ranks: the same training losses, lost packets and weights, and only a shard."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

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
from tests.parallel.conftest import NUM_EXAMPLES, NUM_LAYERS, NUM_TOKENS, WIDTH, relative_error, tiny_batch, tiny_gpt2
from tests.parallel.distributed_models import join
from tests.parallel.families import tiny
from tests.parallel.sharing_modes import COMBINATIONS, MODES, ON_OWN_STREAMS, WIRE

NUM_STEPS = 10


class Spy:
    def __init__(self, group: Any) -> None:
        self.group, self.sums = group, []

    def allreduce(self, tensors: list[Tensor]) -> Any:
        self.sums += [tensor.numel() for tensor in tensors]
        return self.group.allreduce(tensors)

    def shutdown(self) -> None:
        self.group.shutdown()


def on_rank_send(size: int) -> list[int]:
    lossy = network()
    join(lossy, tensor_parallel_size=size)
    parallel = ltp.parallelize(tiny_gpt2(), lossy, tensor_parallel_size=size)
    dist.group.WORLD.wrapped = Spy(dist.group.WORLD.wrapped)
    parallel(**tiny_batch()).loss.backward()
    return dist.group.WORLD.wrapped.sums


@pytest.mark.parametrize("size", [2, 4])
def test_each_module_sums_once_each_way(processes, size):
    """In backward that is one message for q, k and v together."""
    assert processes(2, on_rank_send, size) == [[NUM_EXAMPLES * NUM_TOKENS * WIDTH] * 4 * NUM_LAYERS] * 2


BERNOULLI = ltp.Bernoulli(loss_rate=0.1)
BURSTS = ltp.GilbertElliott.from_loss_and_burst(loss_rate=0.1, mean_burst_packets=4)
# mode, and further arguments of `parallelize`
RUNS: list[tuple[str, dict[str, Any]]] = [(mode, {"algorithm": algorithm}) for mode, algorithm in COMBINATIONS]
REPAIRS = {
    "shared": ["stale", "local", "rescale", "rescale_counted", "protect(0.1) + hadamard(4)"],
    "own copies": ["stale", "local", "fec(3, 2)", "hadamard(4)", "rescale", "protect(0.1) + stale"],
    "sequence, lossy gather": ["stale", "retransmit(1)", "rescale_counted", "protect(0.1) + rescale"],
}
RUNS += [(mode, {"algorithm": "ring", "repair": repair}) for mode, repairs in REPAIRS.items() for repair in repairs]
RUNS += [("own copies", {"control": "noise"})]
RUNS += [("shared", {"wire_dtype": wire_dtype}) for wire_dtype in ("int8", "fp8", "int4")]
RUNS += [(mode, {"algorithm": "direct", "process": BURSTS}) for mode in ("shared", "own streams")]
# what is done to own copies before, or after, a step
RUNS += [("own copies", {"synchronising": how}) for how in ("reliable", "lossy", "resynchronise")]
RUNS += [("own copies", {"algorithm": "direct", "repair": "stale", "synchronising": "lossy"})]


RUNS = [("gpt2", *run) for run in RUNS]
# of other families
LLAMA = [(mode, {"algorithm": "ring"}) for mode in MODES] + [("own streams", {"algorithm": "tree", "repair": "stale"})]
LLAMA += [("shared", {"algorithm": "direct", "repair": repair}) for repair in ("hadamard(4)", "retransmit(1)")]
LLAMA += [("shared", {"algorithm": "tree", "repair": "protect(0.1) + hadamard(4)"})]
LLAMA += [("own streams", {"algorithm": "ring", "repair": "protect(0.1) + stale"})]
LLAMA += [("shared", {"algorithm": "ring", "repair": "protect_first(2) + hadamard(4)"})]
FAMILIES = [("llama", *run) for run in LLAMA]
FAMILIES += [("qwen3", mode, {}) for mode in ("shared", "own streams", "sequence, lossy gather")]
FAMILIES += [("qwen2_moe", mode, {"algorithm": "ring"}) for mode in ("shared", "own streams", "sequence, lossy gather")]
FAMILIES += [(family, "shared", {}) for family in ("gpt_neox", "gemma", "olmo2", "phi3", "glm")]
FAMILIES += [(family, "own streams", {}) for family in ("olmo2", "phi3", "glm")]
MASKED = {"masked_backward": True}
FAMILIES += [
    ("llama", "own streams", {"algorithm": "ring", "repair": repair, **MASKED}) for repair in ("stale", "hadamard(4)")
]
FAMILIES += [("qwen2_moe", "own streams", MASKED), ("llama", "own copies", MASKED)]
FAMILIES += [("qwen2, one key-value head", mode, {}) for mode in ("shared", "own streams")]


def small(family: str) -> Any:
    if family != "gpt2":
        return tiny(family, "classifier")
    return tiny_gpt2("classifier", n_embd=32, n_head=4, n_layer=1, embd_pdrop=0.1, resid_pdrop=0.1)


def small_batch() -> dict[str, torch.Tensor]:
    batch = tiny_batch("classifier", padded=True)
    return {name: tensor[:2, -9:] if tensor.ndim > 1 else tensor[:2] for name, tensor in batch.items()}


def train_in_mode(
    layout: Layout, family: str, mode: str, *, synchronising: str = "none", process: Any = BERNOULLI, **how: Any
) -> dict:
    """Whatever must not depend on where the ranks live."""
    num_steps = NUM_STEPS if family == "gpt2" else 5
    network = ltp.LossyNetwork(process, seed=2, wire=ltp.Wire(elements=32) if "wire_dtype" in how else WIRE)
    size = layout.tensor_parallel_size
    group = layout.tensor_group()
    model: Any = ltp.parallelize(small(family), network, tensor_parallel_size=size, group=group, **MODES[mode] | how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    results: dict[str, Any] = {"losses": [], "norms": []}
    torch.manual_seed(7)
    for step in range(num_steps):
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
        with torch.no_grad(), stream_distance(model.eval()) as distance, network.evaluation(num_steps):
            output = model(**small_batch())
        results |= {"distance": distance(), "logits": output.logits, "rank_logits": output.rank_logits}
    results["gathered"] = ltp.gather(model).state_dict()
    results["network"] = network.state_dict()
    return results


def on_rank_train_in_modes(size: int, runs: list) -> list[dict]:
    layout = join(ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.0)), tensor_parallel_size=size)
    return [train_in_mode(layout, family, mode, **how) for family, mode, how in runs]


@pytest.mark.parametrize(
    ("size", "runs"),
    [(2, RUNS[::4]), (4, RUNS), (2, FAMILIES), (4, FAMILIES)],
    ids=["GPT-2, 2 ranks", "GPT-2, 4 ranks", "families, 2 ranks", "families, 4 ranks"],
)
def test_processes_train_as_virtual_ranks_do(processes, size, runs):
    answers = processes(2, on_rank_train_in_modes, size, runs)
    curves = []
    for number, (family, mode, how) in enumerate(runs):
        expected, case = train_in_mode(Layout(size), family, mode, **how), (family, mode, how)
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
            same_mode = runs[number][:2] == runs[other][:2]
            if not same_mode or runs[number][2].get("algorithm") == "sender":
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


def test_processes_write_what_virtual_ranks_do(processes):
    expected = [generate(Layout(4), mode) for mode in MODES]
    for answer in processes(2, on_rank_generate):
        assert all(torch.equal(*pair) for pair in zip(answer, expected, strict=True))


def network() -> ltp.LossyNetwork:
    return ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.05), wire=ltp.Wire(mtu_bytes=300))
