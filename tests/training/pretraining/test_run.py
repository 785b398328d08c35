"""Test pretraining of a tiny model on a few hundred made-up documents."""

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lossytp.training.pretraining import run as pretraining
from lossytp.training.pretraining.corpus import all_blocks
from lossytp.training.pretraining.folder import STATISTICS, validation_text
from lossytp.training.pretraining.run import run
from tests.training.pretraining.tiny_runs import STEPS, assert_same, losses


def test_it_learns_and_writes_its_statistics(pretrain, capfd):
    config = pretrain(total_steps=60, eval_steps=30)
    statistics = run(config)
    told = capfd.readouterr().err
    first, last = losses(statistics)[0], losses(statistics)[-1]
    assert first == pytest.approx(math.log(statistics["vocabulary"]), rel=0.05)
    assert last < 0.6 * first
    assert statistics["perplexity"] == math.exp(statistics["validation_loss"])
    assert statistics["validation_loss"] < 0.6 * first
    tokens = 60 * 8 * 16
    line = rf"step 30 of 60, loss \d\.\d+, {tokens // 2:,} tokens, learning rate \d\.\d+e-03, pass \d, file [01], "
    assert re.search(line + r"document \d+" + r", validation loss \d\.\d+, '.+'\n", told)
    assert re.search(r"step 31 of 60, loss [^']+\n", told)
    written = json.loads((Path(config.output_dir) / STATISTICS).read_text())
    assert written == statistics
    assert written["config"]["data_glob"].endswith("data/train-*.parquet")
    assert not Path(written["config"]["data_glob"]).is_absolute()
    assert (written["tokens"], written["steps"], len(written["curves"]["train_loss"])) == (tokens, 60, 60)
    assert [point["step"] for point in written["curves"]["eval"]] == [30, 60]
    assert written["trigram_tokens"] == tokens
    assert 1 < written["trigram_perplexity"] < 100
    assert written["passes"] in (3, 4)  # the last pass has only begun


def test_the_exported_folder_is_read_by_transformers_and_gives_the_cards_loss(pretrain):
    config = pretrain()
    statistics = run(config)
    folder = Path(config.output_dir)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    blocks = all_blocks(validation_text(config), tokenizer, block_size=16)
    assert blocks.numel() == statistics["validation_tokens"]
    with torch.no_grad():
        loss = model.eval()(blocks, labels=blocks).loss.item()
    assert loss == pytest.approx(statistics["validation_loss"], rel=1e-5)
    card = (folder / "README.md").read_text()
    assert f"{loss:.4f} nats a token, perplexity {math.exp(loss):.2f}" in card
    for part in ("# gpt2-nano", "data/train-*.parquet", f"{STEPS * 8 * 16:,} tokens: {STEPS} steps of 8 blocks"):
        assert part in card
    assert f"commit {statistics['commit']}" in card
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters" in card
    assert str(folder.parent) not in card + json.dumps(statistics)


def test_threads_change_no_bit_and_microbatches_only_rounding(pretrain):
    config = pretrain()
    first = run(config)
    for number in (1, 4):
        other = pretrain(f"threads {number}", num_proc=number)
        assert_same(other, run(other), config, first)
    for size in (8, 3):  # a batch of eight blocks is no multiple of three
        other = run(pretrain(f"microbatch {size}", microbatch_size=size))
        assert losses(other) == pytest.approx(losses(first), rel=1e-5)
        assert other["validation_loss"] == pytest.approx(first["validation_loss"], rel=1e-3)


def test_the_seed_draws_weights_and_order_and_leaves_torchs_generator_alone(pretrain):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = run(pretrain())
    assert torch.rand(3).equal(expected)
    again, other = run(pretrain("again")), run(pretrain("other", seed=1))
    assert losses(again) == losses(first)
    assert losses(other)[0] != losses(first)[0]


def test_the_number_of_torchs_threads_is_restored(pretrain):
    """Also in Python threads started later: they inherit any thread's last setting, and a run's threads set one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(pretrain())
        with ThreadPoolExecutor(1) as later:
            assert (torch.get_num_threads(), later.submit(torch.get_num_threads).result()) == (2, 2)
    finally:
        torch.set_num_threads(before)


def test_several_processes_are_refused(pretrain, monkeypatch):
    for name, value in (
        ("RANK", "1"),
        ("LOCAL_RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "x"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    config = pretrain()
    with pytest.raises(ValueError, match="runs in one process, not 2: start it with python -m loss"):
        run(config)
    assert not Path(config.output_dir).exists()


def test_a_loss_that_is_not_finite_ends_it_with_one_line(pretrain):
    with pytest.raises(ValueError, match=r"the training loss is not finite at step \d: lower learning_rate = 1e\+30"):
        run(pretrain(learning_rate=1e30))


def test_without_validation_files_some_documents_are_held_out(pretrain):
    config = pretrain(validation_glob=None, batch_size=2)
    statistics = run(config)
    held_out = list(validation_text(config).texts())
    assert 1 <= len(held_out) <= 20
    assert statistics["validation_tokens"] >= 16


def test_a_users_tokenizer(pretrain, tmp_path):
    first = pretrain()
    run(first)
    other = pretrain("other", tokenizer_path=first.output_dir, learning_rate=2e-3)
    assert run(other)["vocabulary"] == len(AutoTokenizer.from_pretrained(first.output_dir))
    with pytest.raises(ValueError, match="tokenizer_path = '/nowhere'"):
        run(pretrain("third", tokenizer_path="/nowhere"))
    settings = json.loads((tmp_path / "run" / "tokenizer_config.json").read_text())
    for content, message in (([], "holds no tokenizer"), ({**settings, "eos_token": None}, "without an end token")):
        (tmp_path / "run" / "tokenizer_config.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"tokenizer_path = .*run' .*{message}") as error:
            run(pretrain("third", tokenizer_path=first.output_dir))
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"^.*run, the checkpoint's folder, holds a tokenizer without an end token"):
        run(pretrain("third", checkpoint_path=str(tmp_path / "run" / "checkpoint.pt")))


def test_the_learning_rate_warms_up_and_decays_to_the_smallest(pretrain, monkeypatch):
    rates = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: rates.append(self.param_groups[0]["lr"]) or step(self))
    run(pretrain(learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=2, total_steps=8))
    shares = [step / 6 for step in range(6)]
    decay = [1e-3 + 9e-3 * (1 + math.cos(math.pi * share)) / 2 for share in shares]
    assert rates == pytest.approx([5e-3, 1e-2, *decay])


def test_only_matrices_decay_and_gradients_are_clipped(pretrain, monkeypatch):
    clipped, decays = [], {}
    clip, build = torch.nn.utils.clip_grad_norm_, pretraining.build_optimizer

    def built(model, **settings):
        optimizer = build(model, **settings)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            decays.update({names[id(parameter)]: group["weight_decay"] for parameter in group["params"]})
        return optimizer

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda p, norm: clipped.append(norm) or clip(p, norm))
    monkeypatch.setattr(pretraining, "build_optimizer", built)
    run(pretrain(warmup_steps=1, total_steps=1, gradient_clipping=0.5, weight_decay=0.2))
    assert clipped == [0.5]
    matrices = ("wte", "wpe", "h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.mlp.c_fc", "h.0.mlp.c_proj")
    norms = ("h.0.ln_1", "h.0.ln_2", "ln_f")
    expected = {f"transformer.{name}.weight": 0.2 for name in matrices}  # the head is tied to wte
    expected |= {f"transformer.{name}.bias": 0.0 for name in matrices[2:]}
    expected |= {f"transformer.{norm}.{part}": 0.0 for norm in norms for part in ("weight", "bias")}
    assert decays == expected
