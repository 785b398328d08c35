"""Deferred models: on the meta device first, then shard by shard the dense model of the same seed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

import lossytp as ltp
from lossytp.parallel.data_parallel import FlatFSDP
from lossytp.parallel.plans import blocks_of, deferred, values_of
from tests.parallel.conftest import bernoulli, tiny_batch
from tests.parallel.distributed_models import join, network, whole_of_pieces
from tests.parallel.families import FAMILIES, SIZES

NAMES = ["gpt2", "llama", "llama, tied", "phi"]


def build(family: str) -> PreTrainedModel:
    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=8, vocab_size=97, n_positions=64))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family.partition(",")[0], **SIZES | FAMILIES[family]))


def both(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A dense model and a deferred one, after each of which torch's generator goes on alike."""
    models, following = [], []
    for make in (lambda: build(family), lambda: deferred(lambda: build(family))):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            models.append(make())
            following.append(torch.rand(4))
    assert torch.equal(*following)
    return models[0], models[1]


@pytest.mark.parametrize("family", NAMES)
def test_a_deferred_model_draws_the_dense_models_weights(family: str) -> None:
    dense, model = both(family)
    expected = dict(dense.named_parameters())
    before = torch.get_rng_state()
    for name, parameter in model.named_parameters():
        assert parameter.is_meta
        assert torch.equal(values_of(parameter), expected.pop(name))
    assert not expected
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(*pair) for pair in zip(dense.buffers(), model.buffers(), strict=True))


@pytest.mark.parametrize("family", NAMES)
def test_tensor_parallel_shards_are_the_dense_models(family: str) -> None:
    dense, model = both(family)
    sharded = ltp.parallelize(model, bernoulli(0.0), tensor_parallel_size=2)
    assert not any(parameter.is_meta for parameter in sharded.parameters())
    whole = dict(ltp.gather(sharded).named_parameters())
    assert all(torch.equal(whole[name], parameter) for name, parameter in dense.named_parameters())
    batch = tiny_batch()
    assert torch.equal(
        sharded.eval()(**batch).loss,
        ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=2).eval()(**batch).loss,
    )


class Replaced(nn.Module):
    """Makes weights and drops them, as a model whose layers are exchanged while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = None
        for _ in range(50):
            self.layer = nn.Linear(100, 100)
            self.layer = None
            self.layer = nn.Linear(3, 3)


def test_a_weight_is_not_drawn_as_one_that_was_dropped_before_it() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        dense = Replaced()
        torch.manual_seed(3)
        model = deferred(Replaced)
    for parameter, expected in zip(model.parameters(), dense.parameters(), strict=True):
        assert len(parameter.changes) == 1
        assert torch.equal(values_of(parameter), expected)


def on_rank_shard(family: str) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The whole parameters, and this replica's pieces."""
    layout = join(network(0.0), data_parallel_size=2)
    _, model = both(family)
    sharded = FlatFSDP(model, layout.process_group("dp"), blocks=blocks_of(model))
    return whole_of_pieces(sharded, lambda piece: piece), [unit.shard for unit in sharded.units]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_replicas_hold_different_shards_of_the_dense_model(processes: Callable, family: str) -> None:
    dense, _ = both(family)
    (wholes, first), (_, second) = processes(2, on_rank_shard, family)
    assert all(torch.equal(wholes[name], parameter) for name, parameter in dense.named_parameters())
    assert not any(torch.equal(*pair) for pair in zip(first, second, strict=True))


def on_rank_shard_tensors() -> torch.Tensor:
    ltp.init_process_group(lossy := network(0.0))
    return ltp.parallelize(both("gpt2")[1], lossy, tensor_parallel_size=2).transformer.h[0].mlp.c_fc.weight.detach()


def test_tensor_parallel_processes_hold_different_shards(processes: Callable) -> None:
    """An earlier study gave all ranks the same ones."""
    shards = processes(2, on_rank_shard_tensors)
    assert torch.equal(torch.cat(shards, 1), both("gpt2")[0].transformer.h[0].mlp.c_fc.weight)
    assert not torch.equal(*shards)


def test_a_model_on_the_meta_device_alone_is_refused() -> None:
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"how to draw it is not known: build with deferred\(\)"):
        values_of(layer.weight)
