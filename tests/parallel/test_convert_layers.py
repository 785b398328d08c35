"""Every block of a converted GPT-2 is sharded, and a model that is not is refused."""

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lossytp.parallel.convert import assert_converted
from lossytp.parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.parallel.conftest import NUM_HEADS, NUM_LAYERS, WIDTH, tiny_gpt2
from tests.parallel.converted_gpt2 import every_size, lossy


@every_size
def test_every_block_is_sharded(tensor_parallel_size: int) -> None:
    """An earlier study sharded nothing: it looked for `nn.Linear`, and GPT-2's blocks have `Conv1D`."""
    dense = tiny_gpt2()
    parallel = lossy(dense, 0.0, size=tensor_parallel_size)
    assert_converted(parallel)
    kinds = [type(module) for module in parallel.modules()]
    assert kinds.count(ColumnParallelLinear) == kinds.count(RowParallelLinear) == 2 * NUM_LAYERS
    assert Conv1D not in kinds
    for block in parallel.transformer.h:
        assert block.attn.c_attn.weight.shape == (WIDTH, 3 * WIDTH)
        assert block.attn.c_proj.weight.shape == (tensor_parallel_size, WIDTH // tensor_parallel_size, WIDTH)
        assert block.mlp.c_fc.weight.shape == (WIDTH, 4 * WIDTH)
        assert block.mlp.c_proj.weight.shape == (tensor_parallel_size, 4 * WIDTH // tensor_parallel_size, WIDTH)
    assert parallel.num_parameters() == dense.num_parameters(), "nothing is kept twice"


def test_a_rank_holds_whole_heads() -> None:
    dense = tiny_gpt2()
    shards, weight = lossy(dense, 0.0, size=2).transformer.h[1].attn.c_attn.weight, dense.transformer.h[1].attn.c_attn
    head = WIDTH // NUM_HEADS
    for rank, heads in enumerate([range(4), range(4, 8)]):
        for projection, name in enumerate("qkv"):
            columns = [projection * WIDTH + h * head + i for h in heads for i in range(head)]
            assert torch.equal(shards.view(WIDTH, 3, 2, -1)[:, projection, rank], weight.weight[:, columns]), name


def test_parallelize_checks_its_own_result(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[PreTrainedModel] = []
    monkeypatch.setattr("lossytp.parallel.convert.assert_converted", lambda model, plan: checked.append(model))
    parallel = lossy(tiny_gpt2(), 0.0)
    assert len(checked) == 1
    assert checked[0] is parallel


@pytest.mark.parametrize("name", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"])
@pytest.mark.parametrize("kind", [Conv1D, nn.Linear])
def test_a_half_converted_model_is_refused(kind: type, name: str) -> None:
    parallel = lossy(tiny_gpt2(), 0.0)
    parallel.transformer.h[1].set_submodule(name, kind(WIDTH, WIDTH))
    with pytest.raises(AssertionError, match=r"block 1 was not converted: .* left as they were; correct the plan's"):
        assert_converted(parallel)


def test_layers_that_changed_places_are_refused() -> None:
    parallel = lossy(tiny_gpt2(), 0.0)
    parallel.transformer.h[0].mlp.c_proj = parallel.transformer.h[0].mlp.c_fc
    with pytest.raises(AssertionError, match=r"block 0 was not converted: \['mlp.c_proj'\] left as they were"):
        assert_converted(parallel)


def test_the_dense_model_is_not_taken_for_a_converted_one() -> None:
    with pytest.raises(AssertionError, match="block 0 was not converted"):
        assert_converted(tiny_gpt2())
