"""Test pretraining with the vocabulary split over tensor-parallel ranks: the training of whole copies."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from lossytp.training.loop import run
from tests.training.pretraining.test_data_parallel import on_rank_train
from tests.training.pretraining.tiny_runs import losses, validation_losses, weights


def test_a_split_vocabulary_trains_as_a_whole_one(pretrain, processes):
    values = {"tensor_parallel_size": 2, "enable_loss_parallelism": True}
    in_processes = processes(2, on_rank_train, pretrain("processes", **values).as_dict())
    both = {**values, "data_parallel_size": 2, "data_parallel_type": "fsdp", "implementation": "custom"}
    sharded = processes(2, on_rank_train, pretrain("sharded", save_model=False, **both).as_dict())
    whole, virtual = run(pretrain("whole")), run(pretrain("virtual", **values))
    for record in (virtual, *in_processes, *sharded):
        assert losses(record) == pytest.approx(losses(whole), rel=1e-4)
        for found, expected in zip(validation_losses(record)[:2], validation_losses(whole)[:2], strict=True):
            assert found == pytest.approx(expected, rel=1e-4)
    mine, theirs = weights(pretrain("processes", **values)), weights(pretrain("whole"))
    assert mine.keys() == theirs.keys()
    assert max((mine[name] - theirs[name]).abs().max() for name in theirs) < 2**-6, "both are rounded to bfloat16"
    folder = Path(pretrain("processes", **values).output_dir)
    assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    "values",
    [{}, {"tensor_parallel_size": 2, "reliable_gather": False}, {"tensor_parallel_size": 2, "sequence_parallel": True}],
)
def test_it_needs_ranks_with_a_common_stream(pretrain, values):
    with pytest.raises(ValueError, match="enable_loss_parallelism = True needs tensor-parallel ranks with a common"):
        pretrain(enable_loss_parallelism=True, **values)


def test_if_logits_lose_packets_ranks_score_apart_and_the_record_says_by_how_much(pretrain):
    values = {"tensor_parallel_size": 2, "enable_loss_parallelism": True, "loss_rate": 0.3, "mtu_bytes": 200}
    reliable = run(pretrain("reliable", **values))["curves"]["eval"][-1]
    lossy = run(pretrain("lossy", lossy_logits=True, **values))["curves"]["eval"][-1]
    (spread,) = (name for name in lossy if name.endswith("_spread_lossy"))
    assert reliable[spread] == 0
    assert lossy[spread] > 0
    assert lossy[spread.replace("lossy", "clean")] == 0
    assert lossy["cross_entropy_clean"] == pytest.approx(reliable["cross_entropy_clean"], rel=1e-5)
    assert lossy["cross_entropy_lossy"] > reliable["cross_entropy_lossy"]


@pytest.mark.parametrize("values", [{}, {"enable_loss_parallelism": True, "algorithm": "sender"}])
def test_only_a_split_vocabulary_can_lose_logits(pretrain, values):
    with pytest.raises(ValueError, match="lossy_logits = True needs enable_loss_parallelism = True, and an algorithm"):
        pretrain(tensor_parallel_size=2, lossy_logits=True, **values)
