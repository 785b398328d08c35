"""Test pretraining on several processes: it equals that on one, for GPT-2 and a gated Llama, and shares out memory."""

import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from transformers import AutoModelForCausalLM

from lossytp.parallel.replicas import local
from lossytp.pretrain import main
from lossytp.training import models, objectives
from lossytp.training import text as blocks
from lossytp.training.config import PretrainConfig
from lossytp.training.loop import Run, run
from tests.training.pretraining.tiny_runs import (
    NUMBERS,
    TINY,
    assert_same,
    losses,
    on_rank_train,
    validation_losses,
    weights,
)

pytestmark = pytest.mark.slow

LLAMA = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"intermediate_size": 24, "vocab_size": 320, "max_position_embeddings": 64}
TP, DDP = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
FSDP = {**DDP, "data_parallel_type": "fsdp"}
LAYOUTS = {"tp": (2, TP), "ddp": (2, DDP), "fsdp": (2, FSDP), "tp x ddp": (4, TP | DDP), "tp x fsdp": (4, TP | FSDP)}
CUSTOM = {"implementation": "custom"}
LAYOUTS |= {f"custom {name}": (LAYOUTS[name][0], LAYOUTS[name][1] | CUSTOM) for name in ("ddp", "fsdp", "tp x fsdp")}
STEPS = 30


def pretrained(folder, values):
    name = " ".join(f"{key} {value}" for key, value in values.items())
    defaults = {"batch_size": 8, "microbatch_size": 2, "block_size": 16, "learning_rate": 1e-2, "warmup_steps": 2}
    defaults |= {"total_steps": STEPS, "eval_steps": None, "checkpoint_steps": None, "save_model": False}
    config_of, held = Run.record, {}

    def recorded(self):
        record = config_of(self)
        parameters = list(self.engine.module.parameters())
        held["parameters"] = sum(local(each).numel() for each in parameters)
        held["moments"] = sum(local(self.optimizer.state[each]["exp_avg"]).numel() for each in parameters)
        return record

    with (
        patch.dict(os.environ, XDG_CACHE_HOME=str(folder / "cache")),
        patch.dict(models.PRESETS, {"gpt2-nano": {**TINY, "n_layer": 2, "n_head": 4}}),
        patch.dict(models.LLAMAS, {"llama-nano": LLAMA}),
        patch.object(blocks, "SHUFFLED_BLOCKS", 30),
        patch.object(Run, "record", recorded),
    ):
        text, output = str(folder / "text.txt"), str(folder / name)
        return run(PretrainConfig(**{**defaults, "data_glob": text, "output_dir": output, **values})), held


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretraining")
    text = "\n".join(" ".join(NUMBERS[int(digit)] for digit in str(number**3)) for number in range(300))
    (folder / "text.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def dense(folder):
    return {name: pretrained(folder, {"model_name": name}) for name in ("gpt2-nano", "llama-nano")}


@pytest.mark.parametrize("model", ["gpt2-nano", "llama-nano"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_curve_of_one_process(processes, folder, dense, model, layout):
    number, values = LAYOUTS[layout]
    found = processes(number, pretrained, folder, {"model_name": model, **values})
    (expected, whole), (record, _) = dense[model], found[0]
    assert losses(record) == pytest.approx(losses(expected), rel=1e-4)
    assert len(losses(record)) == STEPS
    assert losses(record)[-1] < 0.8 * losses(record)[0], "it learns"
    for name in ("cross_entropy_clean", "cross_entropy_lossy"):
        assert record["final"][name] == pytest.approx(expected["final"][name], rel=1e-4)
    assert record["curves"]["eval"][-1]["replica_drift"] < 1e-6, "copies had equal gradients on all ranks"
    assert record["processes"] == number
    custom = {True: "custom", False: "pytorch"}["custom" in layout]
    assert record.get("data_parallel_implementation") == (None if layout == "tp" else custom)
    tokens = STEPS * 8 * 16
    assert record["timing"]["tokens_per_second"] * record["timing"]["train_seconds"] == pytest.approx(tokens)
    for kind in ("parameters", "moments"):
        each = [held[kind] for _, held in found]
        if layout.endswith("fsdp") and "tp" not in layout:
            assert max(each) < 0.55 * whole[kind], "shards"
        elif "tp" in layout:
            assert max(each) < 0.9 * whole[kind], "blocks are halved, embeddings are not"
        else:
            assert set(each) == {whole[kind]}


OWN_FSDP = {**FSDP, **CUSTOM}


@pytest.mark.parametrize("implementation", ["custom", "pytorch"])
def test_sharded_replicas_train_as_if_one_had_drawn_the_model(pretrain, processes, implementation):
    values = {**OWN_FSDP, "implementation": implementation}
    whole, drawn = (pretrain(f"deferred {each}", deferred_init=each, **values) for each in (False, True))
    records = [processes(2, on_rank_train, each.as_dict())[0] for each in (whole, drawn)]
    assert_same(drawn, records[1], whole, records[0])


def on_rank_count_built(values):
    build = objectives.build_language_model
    with patch.object(objectives, "build_language_model", side_effect=build) as built:
        on_rank_train(values)
    return built.call_count


def test_only_the_process_that_writes_builds_a_whole_model_to_save(pretrain, processes):
    config = pretrain("saved", deferred_init=True, total_steps=2, **OWN_FSDP)
    assert processes(2, on_rank_count_built, config.as_dict()) == [2, 1]


def test_tensor_parallel_ranks_train_as_if_one_had_drawn_the_model(pretrain):
    values = {"tensor_parallel_size": 2, "save_model": False, "total_steps": 3}
    whole, drawn = (run(pretrain(f"deferred {each}", deferred_init=each, **values)) for each in (False, True))
    assert losses(drawn) == losses(whole)


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
    folder = Path(pretrain("processes", **values).output.output_dir)
    assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == "GPT2LMHeadModel"


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


@pytest.mark.parametrize(("values", "loses"), [({}, False), ({"tensor_parallel_size": 2, "loss_rate": 0.2}, True)])
def test_the_loss_over_the_lossy_network_is_printed_if_it_loses_packets(
    pretrain, tmp_path, capsys, monkeypatch, values, loses
):
    config = pretrain(total_steps=2, save_model=False, **values)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.changes()))
    monkeypatch.setattr(sys, "argv", ["pretrain", "--config", str(tmp_path / "run.yaml")])
    main()
    told = capsys.readouterr().out
    assert told.startswith("validation loss ")
    assert ("over the lossy network" in told) == loses
