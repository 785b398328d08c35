"""Test pretraining of a tiny model on a few hundred made-up documents."""

import copy
import errno
import json
import math
import multiprocessing
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lossytp.training import models
from lossytp.training.command_line import parse
from lossytp.training.config import PretrainConfig
from lossytp.training.exclusive_run import exclusive_run
from lossytp.training.own_files import MARK
from lossytp.training.pretraining import corpus as corpora
from lossytp.training.pretraining import run as pretraining
from lossytp.training.pretraining.corpus import all_blocks
from lossytp.training.pretraining.folder import CHECKPOINT, STATISTICS, validation_text
from lossytp.training.pretraining.run import run

TINY = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 320, "n_positions": 64}
STEPS = 8
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture
def pretrain(tmp_path, monkeypatch):
    """Return a function that makes the configuration of a short run in the output folder `folder`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(models.PRESETS, "gpt2-nano", TINY)
    monkeypatch.setattr(corpora, "SHUFFLED_BLOCKS", 30)
    monkeypatch.setattr(pretraining, "SECONDS_BETWEEN_LINES", 0.0)
    data = tmp_path / "data"
    data.mkdir()
    for split, first, last in (("train-0", 0, 200), ("train-1", 200, 300), ("validation-0", 1000, 1020)):
        texts = [" ".join(NUMBERS[int(digit)] for digit in str(number**3)) for number in range(first, last)]
        pa.parquet.write_table(pa.table({"text": texts}), data / f"{split}.parquet")

    def config(folder="run", **values):
        defaults = {
            "data_glob": str(data / "train-*.parquet"),
            "validation_glob": str(data / "validation-*.parquet"),
            "batch_size": 8,
            "microbatch_size": 2,
            "block_size": 16,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "total_steps": STEPS,
            "eval_steps": 3,
            "output_dir": str(tmp_path / folder),
        }
        return PretrainConfig(**{**defaults, **values})

    return config


def losses(statistics):
    return [point["loss"] for point in statistics["curves"]["train_loss"]]


def validation_losses(statistics):
    return [(point["step"], point["validation_loss"]) for point in statistics["curves"]["eval"]]


def weights(config):
    return AutoModelForCausalLM.from_pretrained(config.output_dir).state_dict()


def assert_same(config, statistics, other, other_statistics):
    """Assert that losses and weights are equal to the last bit."""
    assert losses(statistics) == losses(other_statistics)
    assert validation_losses(statistics) == validation_losses(other_statistics)
    assert statistics["validation_loss"] == other_statistics["validation_loss"]
    mine, theirs = weights(config), weights(other)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def stopped(config, at_step):
    """Run, and interrupt the run before a step."""
    step = pretraining._Pretraining._step

    def stops(self, number, pool):
        if number == at_step:
            raise KeyboardInterrupt
        return step(self, number, pool)

    with patch.object(pretraining._Pretraining, "_step", stops), pytest.raises(KeyboardInterrupt):
        run(config)


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


@pytest.mark.parametrize("at_step", [2, 4, STEPS])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_run_stopped_before_any_step_and_resumed_equals_an_unbroken_one(pretrain, at_step, streaming):
    unbroken, broken = pretrain("unbroken", streaming=streaming), pretrain("broken", streaming=streaming)
    stopped(broken, at_step)
    assert (Path(broken.output_dir) / CHECKPOINT).exists() == (at_step > 3)
    assert_same(broken, run(broken), unbroken, run(unbroken))


def test_a_run_killed_and_resumed_equals_an_unbroken_one(pretrain, tmp_path):
    """SIGKILL comes first while a checkpoint is half written, then in the middle of a step."""
    unbroken, broken = pretrain("unbroken"), pretrain("broken")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    for kill in (("save", 6), ("step", 5)):
        process = context.Process(target=_killed, args=(broken.as_dict(), *kill))
        process.start()
        process.join(200)
        assert process.exitcode == -signal.SIGKILL
    assert torch.load(Path(broken.output_dir) / CHECKPOINT)["losses"]
    assert_same(broken, run(broken), unbroken, run(unbroken))


def _killed(values, where, at_step):
    torch.set_num_threads(1)
    step, save = pretraining._Pretraining._step, torch.save
    steps = []

    def end():
        os.kill(os.getpid(), signal.SIGKILL)

    def stepped(self, number, pool):
        steps.append(number)
        loss = step(self, number, pool)
        if where == "step" and number == at_step:
            end()
        return loss

    def half(state, file):
        save(state, file)
        if where == "save" and steps[-1] == at_step:
            file.flush()
            os.truncate(file.name, file.tell() // 2)
            end()

    with (
        patch.dict(models.PRESETS, {"gpt2-nano": TINY}),
        patch.object(corpora, "SHUFFLED_BLOCKS", 30),
        patch.object(pretraining._Pretraining, "_step", stepped),
        patch.object(torch, "save", half),
    ):
        run(PretrainConfig(**values))


def test_a_finished_run_is_not_repeated_and_another_configuration_is_refused(pretrain, monkeypatch):
    config = pretrain()
    statistics = run(config)
    monkeypatch.setattr(pretraining, "_Pretraining", None)  # fails if it runs
    assert run(config) == statistics
    assert run(pretrain(num_proc=1, eval_steps=5)) == statistics
    with pytest.raises(ValueError, match="holds a model with different learning_rate: give another folder"):
        run(pretrain(learning_rate=1e-3))


def change_text(config):
    """Change one document of the training text."""
    file = Path(config.data_glob.replace("*", "1"))
    texts = pa.parquet.read_table(file)["text"].to_pylist()
    pa.parquet.write_table(pa.table({"text": [*texts[:-1], "nine"]}), file)


def test_a_finished_model_of_text_that_has_changed_is_refused(pretrain):
    config = pretrain()
    statistics = run(config)
    change_text(config)
    with pytest.raises(
        ValueError, match=r"pretrain\.json is of a run on other text, and the files have changed since: put"
    ):
        run(config)
    Path(config.data_glob.replace("*", "1")).unlink()
    Path(config.data_glob.replace("*", "0")).unlink()
    assert run(config) == statistics, "a finished model is read without its text"


def test_a_checkpoint_of_text_that_has_changed_is_refused(pretrain):
    config = pretrain()
    stopped(config, 5)
    change_text(config)
    with pytest.raises(
        ValueError, match=r"checkpoint\.pt is of a run on other text, and the files have changed since: put"
    ):
        run(config)


def test_a_second_run_in_the_folder_is_refused_and_writes_nothing(pretrain):
    config = pretrain()
    with exclusive_run(config.output_dir), pytest.raises(ValueError, match="is in use by another run"):
        run(config)
    assert list(Path(config.output_dir).iterdir()) == []


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors", "tokenizer.json", "checkpoint.pt"])
def test_a_users_files_are_refused_before_the_first_step_and_stay(pretrain, monkeypatch, name):
    config = pretrain()
    file = Path(config.output_dir) / name
    file.parent.mkdir()
    file.write_text("x")
    (file.parent / "thesis").touch()
    monkeypatch.setattr(pretraining, "_Pretraining", None)  # fails if it runs
    with pytest.raises(ValueError, match=rf"^{file} is (in the way.*: move it|no checkpoint .*: delete it)"):
        run(config)
    assert file.read_text() == "x"
    assert sorted(path.name for path in file.parent.iterdir()) == sorted([name, "thesis"])


def test_a_checkpoint_of_a_version_without_marks_is_resumed(pretrain):
    config = pretrain()
    stopped(config, 5)
    (Path(config.output_dir) / MARK).unlink()
    assert losses(run(config)) == losses(run(pretrain("unbroken")))


def test_a_flipped_bit_in_a_checkpoint_is_noticed(pretrain):
    config = pretrain()
    stopped(config, 5)
    file = Path(config.output_dir) / CHECKPOINT
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 4
    file.write_bytes(damaged)
    torch.load(file, weights_only=True)
    with pytest.raises(
        ValueError, match=r"checkpoint\.pt is no checkpoint of this command \(it is damaged: .*: delete it"
    ):
        run(config)


def test_a_checkpoint_of_another_network_is_one_line(pretrain):
    config = pretrain()
    stopped(config, 5)
    file = Path(config.output_dir) / CHECKPOINT
    state = torch.load(file, weights_only=True)
    name = "transformer.wpe.weight"
    optimizer = copy.deepcopy(state["optimizer"])
    optimizer["state"][0]["exp_avg"] = torch.zeros(3)
    for change in (
        {"model": {**state["model"], name: torch.zeros(1)}},
        {"model": {key: value for key, value in state["model"].items() if key != name}},
        {"optimizer": {}},
        {"optimizer": {**state["optimizer"], "state": {}}},
        {"optimizer": optimizer},
        {"blocks": {"start": 3}},
    ):
        torch.save({**state, **change}, file)
        with pytest.raises(ValueError, match=r"^the checkpoint in .* is not of this run \(.*\): delete it to") as error:
            run(config)
        assert "\n" not in str(error.value)


def test_on_a_full_disk_the_previous_checkpoint_stays(pretrain, monkeypatch):
    config = pretrain()
    save, saved = torch.save, []

    def second_is_too_large(state, file):
        saved.append(1)
        if len(saved) == 2:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, file)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", second_is_too_large)
        with pytest.raises(
            ValueError, match=r"checkpoint\.pt cannot be written \(No space left on device\): make room"
        ):
            run(config)
    assert len(torch.load(Path(config.output_dir) / CHECKPOINT)["losses"]) == 3
    assert not (Path(config.output_dir) / f".{CHECKPOINT}.part").exists()
    assert losses(run(config)) == losses(run(pretrain("unbroken")))


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


def test_a_parameter_that_a_finished_model_lacks_has_its_default(pretrain):
    config = pretrain()
    statistics = run(config)
    del statistics["config"]["gradient_clipping"]
    (Path(config.output_dir) / STATISTICS).write_text(json.dumps(statistics))
    assert run(config) == statistics
    with pytest.raises(ValueError, match="holds a model with different gradient_clipping: give another folder"):
        run(pretrain(gradient_clipping=0.5))


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"config": 3}', '{"config": {"colour": 1}}'])
def test_a_foreign_file_in_place_of_the_statistics_is_one_line(pretrain, text):
    config = pretrain()
    file = Path(config.output_dir) / STATISTICS
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"^{file} was not written by this command \(.*\): delete it") as error:
        run(config)
    assert "\n" not in str(error.value)


def test_statistics_that_lack_what_the_command_prints_are_one_line(pretrain):
    config = pretrain()
    file = Path(config.output_dir) / STATISTICS
    file.parent.mkdir()
    for numbers in ({}, {"validation_loss": 1.0, "perplexity": 2.0, "tokens": "3"}):
        file.write_text(json.dumps({"config": config.as_dict(), **numbers}))
        with pytest.raises(ValueError, match=rf"^{file} was not written by this command \(.*\): delete it"):
            run(config)


def test_a_folder_that_cannot_be_written_is_one_line(pretrain):
    with pytest.raises(ValueError, match=r"^output_dir = '/dev/null/x' cannot be written \(Not a directory\)"):
        run(pretrain(output_dir="/dev/null/x"))


def test_it_resumes_from_a_file_or_the_newest_in_a_folder(pretrain, tmp_path):
    unbroken = pretrain("unbroken")
    expected = run(unbroken)
    stopped(pretrain("older"), 4)
    stopped(pretrain("both/newer"), 7)
    torch.save({}, tmp_path / "both" / "oldest.pt")
    os.utime(tmp_path / "both" / "oldest.pt", (0, 0))
    started = []
    step = pretraining._Pretraining._step
    for name, path, first in (
        ("from file", tmp_path / "older" / CHECKPOINT, 4),
        ("from folder", tmp_path / "both", 7),
    ):
        config = pretrain(name, checkpoint_path=str(path))
        with patch.object(
            pretraining._Pretraining, "_step", lambda self, n, pool: started.append(n) or step(self, n, pool)
        ):
            statistics = run(config)
        assert started.pop(0) == first
        started.clear()
        assert_same(config, statistics, unbroken, expected)


def test_a_checkpoint_that_cannot_be_used_is_one_line(pretrain, tmp_path):
    (tmp_path / "empty").mkdir()
    stopped(pretrain("run"), 5)
    checkpoint = tmp_path / "run" / CHECKPOINT
    torch.save({"parameters": 1}, tmp_path / "other.pt")
    torch.save({"config": pretrain("run").as_dict(), "model": {}}, tmp_path / "part.pt")
    (tmp_path / "corrupt.pt").write_bytes(checkpoint.read_bytes()[:1000])
    for values, message in (
        ({"checkpoint_path": str(tmp_path / "none.pt")}, r"none\.pt' does not exist: leave it out"),
        ({"checkpoint_path": str(tmp_path / "empty")}, r"empty' has no \*\.pt file: leave it out"),
        ({"checkpoint_path": str(tmp_path / "corrupt.pt")}, r"corrupt\.pt is no checkpoint of this command \("),
        ({"checkpoint_path": str(tmp_path / "other.pt")}, r"other\.pt is no checkpoint of this command \("),
        (
            {"checkpoint_path": str(tmp_path / "part.pt")},
            r"part\.pt is no checkpoint .*it lacks optimizer, blocks, ",
        ),
        ({"seed": 3, "batch_size": 4}, "is of a run with different batch_size, seed: give another folder"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            run(pretrain(**values))
        assert "\n" not in str(error.value)


def test_the_tokenizer_of_a_run_without_a_checkpoint_is_not_used(pretrain, tmp_path):
    (tmp_path / "other.txt").write_text("quick brown foxes " * 50)
    stopped(pretrain(data_glob=str(tmp_path / "other.txt")), 1)
    assert run(pretrain())["curves"]["train_loss"] == run(pretrain("fresh"))["curves"]["train_loss"]


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


def test_the_earlier_studys_command_line():
    words = "--tokenizer-path tok --checkpoint-path last --data-glob data/*.parquet --batch-size 6 --block-size 64"
    words += " --learning-rate 6e-4 --min-learning-rate 6e-5 --warmup-steps 10 --total-steps 250 --weight-decay 0.1"
    words += " --no-streaming --num-proc 4 --trust-remote-code"
    expected = {
        "tokenizer_path": "tok",
        "checkpoint_path": "last",
        "data_glob": "data/*.parquet",
        "batch_size": 6,
        "block_size": 64,
        "learning_rate": 6e-4,
        "min_learning_rate": 6e-5,
        "warmup_steps": 10,
        "total_steps": 250,
        "streaming": False,
        "num_proc": 4,
        "trust_remote_code": True,
    }
    assert parse(PretrainConfig, None, words.split()).changes() == expected
    assert (
        parse(PretrainConfig, None, words.replace("-", "_").replace("__", "--").replace("e_", "e-").split()).changes()
        == expected
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_size": 129}, "block_size = 129 is not from 2 to gpt2-nano's 128 positions"),
        ({"model_name": "gpt2"}, "model_name = 'gpt2'"),
        ({"batch_size": 0}, "batch_size = 0 is below 1"),
        ({"learning_rate": -1.0}, "learning_rate = -1.0 is below 0"),
        ({"warmup_steps": 9, "total_steps": 8}, "warmup_steps = 9 is above total_steps = 8: give as many or fewer"),
    ],
)
def test_impossible_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        PretrainConfig(**values)
