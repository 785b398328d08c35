"""Tensor parallelism by this project, DTensor, Megatron-core and transformers: the same model, and its packets."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import lossytp as ltp
from lossytp.parallel.others import parallelize_dtensor, parallelize_megatron
from tests.parallel.conftest import (
    MODELS,
    NUM_EXAMPLES,
    NUM_LAYERS,
    NUM_TOKENS,
    WIDTH,
    FakeProcessGroup,
    gradient_error,
    gradients,
    relative_error,
    tiny_batch,
    tiny_gpt2,
)
from tests.parallel.distributed_models import IMPLEMENTATIONS, WIRE, join, network, spread, whole
from tests.parallel.families import tiny
from tests.parallel.sharing_modes import unchanged

OTHERS = IMPLEMENTATIONS[1:]


def traffic(lossy: ltp.LossyNetwork) -> dict[str, tuple[int, int]]:
    summary = lossy.counters.summary("training")["by_direction"]
    lossy.counters.load_state_dict({"packets": [], "messages": []})
    return {direction: (totals["packets"], totals["lost"]) for direction, totals in summary.items()}


def on_rank_compute(implementation: str, loss_rate: float, size: int, kinds: list[str]) -> dict[tuple[str, bool], dict]:
    lossy = network(loss_rate)
    layout = join(lossy, tensor_parallel_size=size)
    results = {}
    for kind in kinds:
        for padded in (False, True):
            dense, batch = tiny_gpt2(kind), tiny_batch(kind, padded=padded)
            model = spread(dense, lossy, layout, implementation)
            with torch.no_grad(), lossy.reliable():
                logits = model(**batch).logits
            model(**batch).loss.backward()
            found = whole(model, dense, lossy, layout, implementation)
            results[kind, padded] = {"logits": logits, "gradients": found, "traffic": traffic(lossy)}
    return results


def packets_each_way(size: int, itemsize: int) -> int:
    """Every block's attention and MLP sum one message, of which each rank sends each other one its chunk."""
    chunk = NUM_EXAMPLES * NUM_TOKENS * WIDTH // size
    room = (WIRE.mtu_bytes - WIRE.header_bytes) // itemsize
    return NUM_LAYERS * 2 * size * (size - 1) * (-(-chunk // room))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "kinds"), [(2, list(MODELS)), (4, ["classifier"])], ids=[2, 4])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logits_and_gradients_equal_the_dense_models_but_for_lost_packets(processes, implementation, number, kinds):
    for loss_rate in (0.0, 0.05):
        answers = processes(number, on_rank_compute, implementation, loss_rate, number, kinds)
        for (kind, padded), case in ((key, answer[key]) for answer in answers for key in answer):
            dense, batch = tiny_gpt2(kind), tiny_batch(kind, padded=padded)
            with torch.no_grad():
                assert relative_error(case["logits"], dense(**batch).logits) < 1e-12
            error = gradient_error(case["gradients"], gradients(dense, batch))
            assert error < 1e-12 if loss_rate == 0 else error > 0.01
            assert case["traffic"].keys() == {"forward", "backward"}
            for packets, lost in case["traffic"].values():
                assert packets == packets_each_way(number, itemsize=8)
                assert lost / packets == pytest.approx(loss_rate, rel=0.3)


def on_rank_autocast(implementation: str) -> dict[str, Any]:
    lossy = network(0.0)
    layout = join(lossy, tensor_parallel_size=2)
    dense, batch = tiny_gpt2(dtype=torch.float32), tiny_batch()
    model = spread(dense, lossy, layout, implementation)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**batch)
    output.loss.backward()
    found = whole(model, dense, lossy, layout, implementation)
    return {"logits": output.logits.detach(), "gradients": found, "traffic": traffic(lossy)}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_under_autocast_bfloat16_is_on_the_wire(processes, implementation):
    dense, batch = tiny_gpt2(dtype=torch.float32), tiny_batch()
    expected = gradients(dense, batch)
    logits = dense(**batch).logits
    for answer in processes(2, on_rank_autocast, implementation):
        assert answer["logits"].dtype == torch.bfloat16
        assert 1e-4 < relative_error(answer["logits"].float(), logits) < 0.05
        assert 1e-4 < gradient_error(answer["gradients"], expected) < 0.05
        assert {gradient.dtype for gradient in answer["gradients"].values()} == {torch.float32}
        # autocast casts the input behind DTensor's f, so that its gradient crosses in fp32
        sizes = {"forward": 2, "backward": 4 if implementation == "dtensor" else 2}
        expected_traffic = {way: (packets_each_way(2, itemsize), 0) for way, itemsize in sizes.items()}
        assert answer["traffic"] == expected_traffic


def on_rank_lose_all(implementation: str) -> tuple[Tensor, Tensor]:
    lossy = network(1.0)
    layout = join(lossy, tensor_parallel_size=2)
    dense = tiny_gpt2()
    with torch.no_grad():
        dense.transformer.h[0].mlp.c_proj.weight.zero_()
    row = spread(dense, lossy, layout, implementation).transformer.h[0].mlp.c_proj
    output = row(torch.ones(NUM_EXAMPLES, NUM_TOKENS, 2 * WIDTH, dtype=torch.float64))
    # the copy waits for the sum, which PyTorch leaves under way until its result is used
    return output.detach().clone(), dense.transformer.h[0].mlp.c_proj.bias.detach()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_only_pytorch_adds_the_bias_before_the_sum_and_loses_half_of_it(processes, implementation):
    for output, bias in processes(2, on_rank_lose_all, implementation):
        left = bias / 2 if implementation == "dtensor" else bias
        torch.testing.assert_close(output, left.expand_as(output))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_rank_hold(implementation: str) -> tuple[int, int]:
    """The elements in memory of a block's sharded layers, and how many they should be."""
    lossy = network(0.0)
    layout = join(lossy, tensor_parallel_size=2)
    dense, generator = tiny_gpt2(), torch.get_rng_state()
    with unchanged(dense):
        model = spread(dense, lossy, layout, implementation)
        assert torch.equal(torch.get_rng_state(), generator), "random numbers are drawn"
        with torch.no_grad():
            for parameter in model.parameters():
                local(parameter).add_(1)
    layers, dense_layers = (
        {name: each for name, each in one.transformer.h[1].named_parameters() if "c_" in name} for one in (model, dense)
    )
    stored = sum(local(each).untyped_storage().nbytes() // each.element_size() for each in layers.values())
    expected = {name: each.numel() // (1 if name.endswith("c_proj.bias") else 2) for name, each in dense_layers.items()}
    return stored, sum(expected.values())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_process_holds_its_shard_and_the_callers_model_is_left_alone(processes, implementation):
    for stored, expected in processes(2, on_rank_hold, implementation):
        assert stored == expected


@pytest.mark.slow
@pytest.mark.parametrize("parallelize", [parallelize_dtensor, parallelize_megatron])
def test_what_cannot_be_parallelized_is_refused(parallelize):
    with pytest.raises(ValueError, match=r"^tensor_parallel_size = 3 "):
        parallelize(tiny_gpt2(), FakeProcessGroup(3, 0))
    with pytest.raises(TypeError, match=r"^Linear "):
        parallelize(nn.Linear(2, 2), FakeProcessGroup(2, 0))
    with pytest.raises(TypeError, match=r"^implementation"):
        parallelize(tiny("llama"), FakeProcessGroup(2, 0))


STYLES = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel)
STYLES |= dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel)


def by_transformers(folder: str) -> Any:
    distributed = DistributedConfig(tp_size=2)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=distributed, dtype=torch.float32)


def by_pytorch(folder: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = [name for name, _ in model.named_modules()]
    plan = {name: style() for name in names for end, style in STYLES.items() if name.endswith(f".{end}")}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def on_rank_load(make: Callable, folder: str, loss_rate: float) -> dict:
    lossy = network(loss_rate)
    ltp.init_process_group(lossy)
    with ltp.reliable():
        model = make(folder)
    batch = tiny_batch()
    output = model(input_ids=batch["input_ids"], use_cache=False)
    logits = output.logits
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
    norms = {name: each.grad for name, each in model.named_parameters() if "norm" in name}
    return {"logits": logits.detach(), "norms": norms, "lost": int(lossy.report()["lost"].sum())}


@pytest.mark.parametrize("make", [by_transformers, by_pytorch])
@pytest.mark.parametrize("loss_rate", [0.0, 0.1])
def test_it_computes_the_dense_model_but_for_lost_packets(processes, tmp_path, loss_rate, make):
    dense, batch = tiny("llama", dtype=torch.float32), tiny_batch()
    dense.save_pretrained(tmp_path)
    expected = dense(input_ids=batch["input_ids"])
    dense(**batch).loss.backward()
    norms = {name: each.grad for name, each in dense.named_parameters() if "norm" in name}
    for answer in processes(2, on_rank_load, make, str(tmp_path), loss_rate):
        equal = relative_error(answer["logits"], expected.logits) < 1e-5
        equal_norms = gradient_error(answer["norms"], norms) < 1e-5
        assert (equal, equal_norms, answer["lost"] == 0) == (loss_rate == 0,) * 3
