"""Test pretraining of a tiny model on a few hundred made-up documents."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from lossytp.training import loop, models
from lossytp.training import objectives as objective
from lossytp.training.engine import Engine
from lossytp.training.loop import run
from lossytp.training.record import read_record
from lossytp.training.text import all_blocks, validation_text
from tests.training.pretraining.tiny_runs import STEPS, assert_same, losses

pytestmark = pytest.mark.slow

FIRST_LOSSES = [5.691550135612488, 5.59971821308136, 5.350060224533081]  # of the edition that trained the base models


def test_it_learns_and_writes_its_record(pretrain, capfd):
    config = pretrain(total_steps=60, eval_steps=30)
    record = run(config)
    told = capfd.readouterr().err
    data, final = record["data"], record["final"]
    first, last = losses(record)[0], losses(record)[-1]
    assert first == pytest.approx(math.log(data["vocabulary"]), rel=0.05)
    assert last < 0.6 * first
    assert final["cross_entropy_clean"] == final["cross_entropy_lossy"] < 0.6 * first
    assert final["accuracy_clean"] is final["score_lossy"] is None
    tokens = 60 * 8 * 16
    line = rf"pretraining: step 30 of 60, loss \d\.\d+, {tokens // 2:,} tokens, [\d,]+ tokens/s, "
    assert re.search(line + r"learning rate \d\.\d+e-03, pass \d, file [01], document \d+\n", told)
    assert re.search(r"evaluation: step 30 of 60, cross_entropy_clean \d\.\d+, cross_entropy_lossy .*\nsample: '", told)
    assert json.loads((Path(config.output.output_dir) / "record.json").read_text()) == record
    assert record["config"]["data_glob"].endswith("data/train-*.parquet")
    assert not Path(record["config"]["data_glob"]).is_absolute()
    assert (record["timing"]["steps"], len(losses(record))) == (60, 60)
    assert [point["step"] for point in record["curves"]["eval"]] == [30, 60]
    assert data["passes"] in (3, 4)  # the last pass has only begun
    assert data["real_token_share"] == 1


def test_numbers_position_and_samples_are_written_while_it_runs_and_for_tensorboard(pretrain):
    config = pretrain(total_steps=4, eval_steps=2, prompt="four", tensorboard=True)
    run(config)
    board = EventAccumulator(str(Path(config.output.output_dir) / "tensorboard"))
    board.Reload()
    for name in ("train/loss", "train/tokens_per_second", "train/gradient_norm", "train/learning_rate", "train/tokens"):
        assert [event.step for event in board.Scalars(name)] == [1, 2, 3, 4]
    assert [event.step for event in board.Scalars("eval/cross_entropy_clean")] == [2, 4]
    assert "eval/sample/text_summary" in board.Tags()["tensors"]
    lines = [
        json.loads(line) for line in (Path(config.output.output_dir) / "statistics.jsonl").read_text().splitlines()
    ]
    assert [(line["step"], "train/loss" in line) for line in lines] == [
        *((1, True), (2, True), (2, False)),
        *((3, True), (4, True), (4, False)),
    ]
    assert lines[3]["train/tokens"] == 3 * 8 * 16
    assert {"train/pass", "train/file", "train/document", "train/waiting_seconds"} <= lines[0].keys()
    assert all(line["eval/sample"].startswith("four") for line in lines if "train/loss" not in line)
    quiet = pretrain("quiet", total_steps=2, statistics=False)
    run(quiet)
    assert not (Path(quiet.output.output_dir) / "statistics.jsonl").exists()


def test_it_validates_on_part_of_the_held_out_blocks_and_at_its_end_on_all(pretrain, monkeypatch):
    validated = []
    entropies = Engine.cross_entropies

    def counted(self, batches):
        batches = list(batches)
        validated.append(sum(len(batch["labels"]) for batch in batches))
        return entropies(self, batches)

    monkeypatch.setattr(Engine, "cross_entropies", counted)
    monkeypatch.setattr(objective, "VALIDATION_BLOCKS", 2)
    record = run(pretrain(total_steps=2, eval_steps=1))
    during, at_end = validated
    assert (during, 16 * at_end) == (2, record["data"]["validation_tokens"])
    assert at_end > 3
    record = run(pretrain("some", total_steps=2, eval_steps=1, eval_samples=3))
    assert validated[2:] == [3, 3]
    assert record["data"]["validation_tokens"] == 3 * 16


def test_it_begins_as_the_edition_that_trained_the_base_models(pretrain, monkeypatch):
    """A step differs by rounding: norms of all gradients are now computed in double precision.

    That edition did not pad vocabularies. The base models' 4,096 tokens need no padding.
    """
    monkeypatch.setattr(models, "VOCABULARY_MULTIPLE", 1)
    assert losses(run(pretrain(total_steps=3, save_model=False))) == pytest.approx(FIRST_LOSSES, rel=1e-6)


def test_the_exported_folder_is_read_by_transformers_and_gives_the_cards_loss(pretrain):
    config = pretrain()
    record = run(config)
    folder = Path(config.output.output_dir)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    blocks = all_blocks(validation_text(config), tokenizer, block_size=16)
    assert blocks.numel() == record["data"]["validation_tokens"]
    with torch.no_grad():
        loss = model.eval()(blocks, labels=blocks).loss.item()
    assert loss == pytest.approx(record["final"]["cross_entropy_clean"], rel=1e-5)
    card = (folder / "README.md").read_text()
    assert f"{loss:.4f} nats a token, perplexity {math.exp(loss):.2f}" in card
    for part in ("# gpt2-nano", "data/train-*.parquet", f"{STEPS * 8 * 16:,} tokens: {STEPS} steps of 8 blocks"):
        assert part in card
    assert f"commit {record['commit']}" in card
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters" in card
    assert str(folder.parent) not in card + json.dumps(record)


def test_threads_change_no_bit_and_microbatches_only_rounding(pretrain):
    config = pretrain()
    first = run(config)
    for number in (1, 4):
        other = pretrain(f"threads {number}", threads=number)
        assert_same(other, run(other), config, first)
    for size in (8, 3):  # a batch of eight blocks is no multiple of three
        other = run(pretrain(f"microbatch {size}", microbatch_size=size))
        assert losses(other) == pytest.approx(losses(first), rel=1e-5)
        assert other["final"]["cross_entropy_clean"] == pytest.approx(first["final"]["cross_entropy_clean"], rel=1e-3)


def test_virtual_ranks_train_as_the_dense_model_and_losses_count(pretrain):
    dense = run(pretrain())
    for size in (1, 2):
        values = {"tensor_parallel_size": size, "loss_rate": 0.0, "dropout": 0.0, "threads": 1}
        virtual = run(pretrain(f"virtual {size}", **values))
        assert losses(virtual) == pytest.approx(losses(dense), rel=1e-4)
    lossy = run(pretrain("lossy", tensor_parallel_size=2, loss_rate=0.3, reliable_gather=False, mtu_bytes=100))
    assert losses(lossy) != pytest.approx(losses(dense), rel=1e-3)
    assert lossy["final"]["cross_entropy_lossy"] != lossy["final"]["cross_entropy_clean"]
    for purpose in ("training", "evaluation"):
        assert lossy["network"][purpose]["observed_loss_rate"] == pytest.approx(0.3, abs=0.03)
    last = lossy["curves"]["eval"][-1]
    assert last["cross_entropy_spread_clean"] == pytest.approx(0, abs=1e-6)
    assert last["cross_entropy_spread_lossy"] > 1e-4, "each rank computes on a stream of its own"
    assert last["stream_distance"][0] > 0


@pytest.mark.parametrize("evaluated", [{"eval_steps": 1}, {"total_steps": 1, "warmup_steps": 0}])
def test_an_evaluation_that_is_not_finite_ends_the_run_with_a_record_and_exports_nothing(pretrain, evaluated):
    """The first step's loss is finite, and leaves weights that are not."""
    config = pretrain(learning_rate=1e37, gradient_clipping=None, **evaluated)
    record = run(config)
    assert (record["status"], record["timing"]["steps"]) == ("not finite", 1)
    (point,) = record["curves"]["eval"]
    assert point["cross_entropy_clean"] is None
    assert record["final"]["cross_entropy_clean"] is None
    folder = Path(config.output.output_dir)
    assert read_record(folder) == record
    assert not [name for name in ("model.safetensors", "README.md") if (folder / name).exists()]


def test_a_users_tokenizer(pretrain):
    first = pretrain()
    run(first)
    other = pretrain("other", tokenizer_path=first.output.output_dir, learning_rate=2e-3)
    assert run(other)["data"]["vocabulary"] == len(AutoTokenizer.from_pretrained(first.output.output_dir))
    with pytest.raises(ValueError, match="tokenizer_path = '/nowhere'"):
        run(pretrain("third", tokenizer_path="/nowhere"))


def test_the_learning_rate_warms_up_and_decays_to_the_smallest(pretrain, monkeypatch):
    rates = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: rates.append(self.param_groups[0]["lr"]) or step(self))
    run(pretrain(learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=2, total_steps=8, save_model=False))
    shares = [step / 6 for step in range(6)]
    decay = [1e-3 + 9e-3 * (1 + math.cos(math.pi * share)) / 2 for share in shares]
    assert rates == pytest.approx([5e-3, 1e-2, *decay])


def test_the_optimizer_and_clipping_are_those_of_the_settings(pretrain, monkeypatch):
    """`test_engine.py` shows that matrices alone decay."""
    clipped, groups = [], []
    clip, build = loop.clip_gradients_, loop.build_optimizer

    def built(model, **settings):
        groups.extend((optimizer := build(model, **settings)).param_groups)
        return optimizer

    monkeypatch.setattr(loop, "clip_gradients_", lambda *given: clipped.append(given[1]) or clip(*given))
    monkeypatch.setattr(loop, "build_optimizer", built)
    run(pretrain(warmup_steps=1, total_steps=1, gradient_clipping=0.5, weight_decay=0.2))
    assert clipped == [0.5]
    assert [(group["weight_decay"], group["betas"]) for group in groups] == [(0.2, (0.9, 0.95)), (0.0, (0.9, 0.95))]
