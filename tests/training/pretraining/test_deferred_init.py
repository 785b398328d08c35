"""Test pretraining of a model that is drawn shard by shard: it is that of the same seed."""

from unittest.mock import patch

import pytest

from lossytp.training import objectives as objective
from lossytp.training.loop import run
from tests.training.pretraining.test_data_parallel import on_rank_train
from tests.training.pretraining.tiny_runs import assert_same, losses

FSDP = {"data_parallel_size": 2, "data_parallel_type": "fsdp", "implementation": "custom"}


@pytest.mark.parametrize("implementation", ["custom", "pytorch"])
def test_sharded_replicas_train_as_if_one_had_drawn_the_model(pretrain, processes, implementation):
    values = {**FSDP, "implementation": implementation}
    whole, drawn = (pretrain(f"deferred {each}", deferred_init=each, **values) for each in (False, True))
    records = [processes(2, on_rank_train, each.as_dict())[0] for each in (whole, drawn)]
    assert_same(drawn, records[1], whole, records[0])


def on_rank_count_built(values):
    """Train, and return how often this process built the model, deferred or whole."""
    build = objective.build_language_model
    with patch.object(objective, "build_language_model", side_effect=build) as built:
        on_rank_train(values)
    return built.call_count


def test_only_the_process_that_writes_builds_a_whole_model_to_save(pretrain, processes):
    config = pretrain("saved", deferred_init=True, total_steps=2, **FSDP)
    assert processes(2, on_rank_count_built, config.as_dict()) == [2, 1]


def test_tensor_parallel_ranks_train_as_if_one_had_drawn_the_model(pretrain):
    values = {"tensor_parallel_size": 2, "save_model": False, "total_steps": 3}
    whole, drawn = (run(pretrain(f"deferred {each}", deferred_init=each, **values)) for each in (False, True))
    assert losses(drawn) == losses(whole)


@pytest.mark.parametrize("values", [{}, {**FSDP, "data_parallel_type": "ddp"}])
def test_it_needs_shards(pretrain, values):
    with pytest.raises(ValueError, match="deferred_init = True needs shards to draw: give tensor_parallel_size above"):
        pretrain(deferred_init=True, **values)
