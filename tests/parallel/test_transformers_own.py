"""Others' tensor parallelism of a Llama over the backend `lossy`: transformers' and PyTorch's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import lossytp as ltp
from tests.parallel.conftest import gradient_error, relative_error, tiny_batch
from tests.parallel.distributed_models import network
from tests.parallel.families import tiny

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
def test_it_computes_the_dense_model_but_for_lost_packets(
    processes: Callable, tmp_path: Path, loss_rate: float, make: Callable
) -> None:
    dense, batch = tiny("llama", dtype=torch.float32), tiny_batch()
    dense.save_pretrained(tmp_path)
    expected = dense(input_ids=batch["input_ids"])
    dense(**batch).loss.backward()
    norms = {name: each.grad for name, each in dense.named_parameters() if "norm" in name}
    for answer in processes(2, on_rank_load, make, str(tmp_path), loss_rate):
        equal = relative_error(answer["logits"], expected.logits) < 1e-5
        equal_norms = gradient_error(answer["norms"], norms) < 1e-5
        assert (equal, equal_norms, answer["lost"] == 0) == (loss_rate == 0,) * 3
