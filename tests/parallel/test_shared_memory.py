"""A model and its tensor-parallel copy that share the memory of their weights."""

from typing import Any

import pytest
import torch
from torch import nn

import lossytp as ltp
from lossytp.parallel.group import RankGroup
from tests.parallel.conftest import FakeProcessGroup, bernoulli, relative_error, tiny_batch, tiny_gpt2
from tests.parallel.families import tiny

SHARING = ["gpt2", "llama", "qwen2", "phi3", "gpt_neox", "llama, tied"]
PARTLY = ["qwen2, one key-value head", "mixtral"]  # copies of key-value heads, and experts, have their own memory


def memory_of(*models: nn.Module) -> int:
    """The bytes of the memory that holds the models' parameters, each counted once."""
    storages = [each.untyped_storage() for model in models for each in model.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def dense_of(family: str) -> Any:
    return (tiny_gpt2(dtype=torch.float32) if family == "gpt2" else tiny(family, dtype=torch.float32)).eval()


@pytest.mark.parametrize("family", [*SHARING, *PARTLY])
def test_sharing_memory_changes_no_result(family: str) -> None:
    given, batch = dense_of(family), tiny_batch()
    outputs = []
    for share_memory in (False, True, True):  # the second time, the dense weights are views already
        network = bernoulli(0.1, wire=ltp.Wire(mtu_bytes=108))
        model = ltp.parallelize(given, network, tensor_parallel_size=4, share_memory=share_memory)
        outputs.append(model(**batch).logits)
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(outputs[2], outputs[0])
    untouched = dense_of(family)
    assert relative_error(given(**batch).logits, untouched(**batch).logits) < 1e-5
    for name, weight in untouched.state_dict().items():
        assert torch.equal(given.state_dict()[name], weight)
        assert torch.equal(ltp.gather(model).state_dict()[name], weight)


@pytest.mark.parametrize("family", SHARING)
def test_both_together_are_hardly_larger_than_one(family: str) -> None:
    dense = dense_of(family)
    alone = memory_of(dense)
    own = ltp.parallelize(dense, bernoulli(0.1), tensor_parallel_size=4)
    assert memory_of(dense, own) == 2 * alone, "control"
    shared = ltp.parallelize(dense, bernoulli(0.1), tensor_parallel_size=4, share_memory=True)
    assert memory_of(dense, shared) < 1.05 * alone


def test_processes_cannot_share_memory() -> None:
    group = RankGroup(4, process_group=FakeProcessGroup(2, 0), first_rank=0)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"^share_memory = True does not work where 2 processes hold parts of the model: "
    ):
        ltp.parallelize(tiny_gpt2(), bernoulli(0.1), tensor_parallel_size=4, group=group, share_memory=True)
