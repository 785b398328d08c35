"""Test that pretraining on several processes equals that on one, for GPT-2 and a gated Llama, and shares out memory."""

import os
from unittest.mock import patch

import pytest

from lossytp.parallel.replicas import local
from lossytp.training import models
from lossytp.training import text as blocks
from lossytp.training.config import PretrainConfig
from lossytp.training.loop import Run, run
from tests.training.pretraining.tiny_runs import NUMBERS, TINY, losses

LLAMA = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 320,
    "max_position_embeddings": 64,
}
TP, DDP = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
FSDP = {**DDP, "data_parallel_type": "fsdp"}
LAYOUTS = {"tp": (2, TP), "ddp": (2, DDP), "fsdp": (2, FSDP), "tp x ddp": (4, TP | DDP), "tp x fsdp": (4, TP | FSDP)}
CUSTOM = {"implementation": "custom"}
LAYOUTS |= {f"custom {name}": (LAYOUTS[name][0], LAYOUTS[name][1] | CUSTOM) for name in ("ddp", "fsdp", "tp x fsdp")}
STEPS = 30


def pretrained(folder, values):
    """Pretrain on this process, alone or as one of several; return the record and the elements that it holds."""
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


def test_losses_on_two_processes_are_those_of_virtual_ranks(processes, folder):
    values = {"tensor_parallel_size": 2, "loss_rate": 0.2, "mtu_bytes": 100, "total_steps": 6}
    (record, _), (virtual, _) = processes(2, pretrained, folder, values)[0], pretrained(folder, {**values, "seed": 0})
    assert record["network"] == virtual["network"]
    assert record["network"]["training"]["lost"] > 100
    assert losses(record) == pytest.approx(losses(virtual), rel=1e-5)
    for name in ("cross_entropy_clean", "cross_entropy_lossy"):
        assert record["final"][name] == pytest.approx(virtual["final"][name], rel=1e-5)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_of_replicas_lose_packets(processes, folder, dense, kind):
    values = {**DDP, "data_parallel_type": kind, "loss_rate": 0.2, "mtu_bytes": 100, "total_steps": 6}
    record, _ = processes(2, pretrained, folder, values)[0]
    assert record["network"]["training"]["observed_loss_rate"] == pytest.approx(0.2, abs=0.02)
    assert losses(record) != pytest.approx(losses(dense["gpt2-nano"][0])[:6], rel=1e-4)
