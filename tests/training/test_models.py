"""Test models with the heads that tasks need, and folders that hold no usable one."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import lossytp as ltp
from lossytp.training import models
from lossytp.training.config import PretrainConfig
from lossytp.training.models import build_language_model, build_model, check_configuration, load_model, load_tokenizer
from lossytp.training.record import check_output_folder, read_record
from lossytp.training.shapes import Shape, shape_of
from lossytp.training.text import train_tokenizer
from tests.parallel.families import SIZES

pytestmark = pytest.mark.slow

TINY = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
LABELS = ("a", "b", "c")
BATCH = {
    "classification": {"input_ids": torch.arange(12).view(3, 4), "labels": torch.tensor([0, 2, 1])},
    "regression": {"input_ids": torch.arange(12).view(3, 4), "labels": torch.tensor([0.5, 2.0, 1.0])},
    "multiple choice": {"input_ids": torch.arange(24).view(3, 2, 4), "labels": torch.tensor([0, 1, 1])},
    "generation": {"input_ids": torch.arange(12).view(3, 4), "labels": torch.arange(12).view(3, 4)},
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some words"], size=260)


@pytest.fixture
def folder(tmp_path, tokenizer):
    torch.manual_seed(3)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **TINY)).save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    return tmp_path / "lm"


def build(name, kind="classification", *, tokenizer, seed=0):
    return build_model(
        str(name), kind, labels=LABELS if kind == "classification" else (), tokenizer=tokenizer, dropout=0.0, seed=seed
    )


def bodies_equal(model, other):
    mine, theirs = model.transformer.state_dict(), other.transformer.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_shapes_by_name(folder):
    assert shape_of("gpt2-nano") == shape_of("gpt2-nano-scratch") == Shape(128, 4, 8, 128)
    sizes = {"nano-wide": (256, 4), "nano-deep": (128, 8), "micro": (256, 8), "3m": (192, 6), "14m": (320, 10)}
    for name, (width, layers) in sizes.items():
        assert shape_of(f"gpt2-{name}-scratch") == Shape(width, layers, 8, 128)
    assert shape_of("gpt2-xl") == shape_of("openai-community/gpt2-xl") == Shape(1600, 48, 25, 1024)
    assert shape_of("distilgpt2-scratch") == shape_of("distilbert/distilgpt2") == Shape(768, 6, 12, 1024)
    assert shape_of(str(folder)) == shape_of(f"{folder}-scratch") == Shape(16, 2, 2, 32)
    assert shape_of("somebody/some-gpt2") is None


def test_the_sizes_of_an_unknown_one_are_checked_before_its_weights_are_there(folder, monkeypatch, tokenizer):
    monkeypatch.setattr(models, "_location", lambda name, weights: pytest.fail("loaded") if weights else str(folder))
    with pytest.raises(ValueError, match="tensor_parallel_size = 4"):
        check_configuration("some/one", tokenizer, tensor_parallel_size=4, max_length=8)
    with pytest.raises(ValueError, match="max_length = 33 is above some/one's 32 positions: give at most 32"):
        check_configuration("some/one", tokenizer, tensor_parallel_size=2, max_length=33)


def test_random_weights_depend_on_the_seed_and_leave_torchs_generator_alone(folder, tokenizer):
    for name in (f"{folder}-scratch", str(folder)):
        torch.manual_seed(9)
        expected = torch.rand(2)
        torch.manual_seed(9)
        first = build(name, tokenizer=tokenizer)
        assert torch.rand(2).equal(expected)
        again, other = build(name, tokenizer=tokenizer), build(name, tokenizer=tokenizer, seed=1)
        assert all(torch.equal(weight, again.state_dict()[key]) for key, weight in first.state_dict().items())
        assert not torch.equal(first.score.weight, other.score.weight)
        assert bodies_equal(first, other) == (name == str(folder))


@pytest.mark.parametrize("before", BATCH)
@pytest.mark.parametrize("kind", BATCH)
def test_a_model_trained_on_one_kind_of_task_can_be_trained_on_another(folder, tmp_path, tokenizer, before, kind):
    """Even if transformers has written the kind of training loss into the configuration."""
    first = build(folder, before, tokenizer=tokenizer)
    first(**BATCH[before])
    first.save_pretrained(tmp_path / before)
    second = build(tmp_path / before, kind, tokenizer=tokenizer)
    assert bodies_equal(second, first)
    logits = second(**BATCH[kind]).logits
    assert logits.shape == {"classification": (3, 3), "regression": (3, 1), "multiple choice": (3, 2)}.get(
        kind, (3, 4, len(tokenizer))
    )
    second(**BATCH[kind]).loss.backward()
    expected = build(folder, kind, tokenizer=tokenizer)(**BATCH[kind]).loss
    assert second(**BATCH[kind]).loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("kind", BATCH)
def test_a_model_saved_in_half_precision_is_trained_in_float32(tmp_path, tokenizer, family, dtype, kind):
    config = AutoConfig.for_model(family, **{**SIZES, "vocab_size": len(tokenizer)})
    saved = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    saved.save_pretrained(tmp_path)
    for name in (tmp_path, f"{tmp_path}-scratch"):
        model = build(name, kind, tokenizer=tokenizer)
        parallel = ltp.parallelize(model, ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1)), tensor_parallel_size=2)
        for each in (model, parallel):
            each(**BATCH[kind]).loss.backward()
            assert {parameter.dtype for parameter in each.parameters()} == {torch.float32}
    assert load_model(str(tmp_path)).dtype == torch.float32
    kept = build(tmp_path, kind, tokenizer=tokenizer)
    kept.save_pretrained(tmp_path / "kept")
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["dtype"] == "float32"
    before, after = (each.get_input_embeddings().weight for each in (saved, kept))
    assert torch.equal(before.float(), after)


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_models_head_is_kept(tmp_path, tokenizer, tied):
    sizes = {**SIZES, "vocab_size": len(tokenizer), "tie_word_embeddings": tied}
    saved = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    saved.save_pretrained(tmp_path)
    for model in (
        build(tmp_path, "generation", tokenizer=tokenizer),
        build_language_model(str(tmp_path), tokenizer, positions=8, dropout=0.0, seed=1),
    ):
        assert torch.equal(model.lm_head.weight, saved.lm_head.weight)


def test_a_model_without_weights_or_a_known_head_cannot_be_evaluated(folder):
    with pytest.raises(ValueError, match="gpt2-nano-scratch' is untrained"):
        load_model("gpt2-nano-scratch")
    config = json.loads((folder / "config.json").read_text())
    for named in (["GPT2Model"], 5, "GPT2LMHeadModel", [["GPT2LMHeadModel"]], {"GPT2LMHeadModel": 1}, None):
        (folder / "config.json").write_text(json.dumps({**config, "architectures": named}))
        with pytest.raises(ValueError, match=re.escape(f"architectures = {named}")):
            load_model(str(folder))


@pytest.mark.parametrize("kind", BATCH)
def test_a_folder_that_lacks_weights_is_refused(folder, tmp_path, tokenizer, kind):
    """Training and evaluation refuse a body without some weights; only evaluation refuses a missing head."""
    model = build(folder, kind, tokenizer=tokenizer)
    whole = model.state_dict()
    body = {name: weight for name, weight in whole.items() if ".h.1." not in name}
    model.save_pretrained(tmp_path / "body", state_dict=body)
    for load in (load_model, lambda name: build(name, kind, tokenizer=tokenizer)):
        with pytest.raises(ValueError, match=r"body lacks 12 of its weights, such as .*h\.1\..*: save them all$"):
            load(str(tmp_path / "body"))
    if kind != "generation":  # its head is tied to the body
        headless = {name: weight for name, weight in whole.items() if name != "score.weight"}
        model.save_pretrained(tmp_path / "headless", state_dict=headless)
        assert bodies_equal(build(tmp_path / "headless", kind, tokenizer=tokenizer), model)
        with pytest.raises(ValueError, match=r"headless lacks 1 of its weights, such as score\.weight"):
            load_model(str(tmp_path / "headless"))


def test_a_tokenizer_that_the_model_cannot_be_used_with_is_refused(folder, tokenizer):
    larger = train_tokenizer(["some more words"], size=270)
    with pytest.raises(ValueError, match=f"a tokenizer of {len(larger)} tokens, above the model's vocab_size = 260"):
        build(folder, tokenizer=larger)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    with pytest.raises(ValueError, match="lm holds a tokenizer without an end token: give it an eos_token"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("name", ["gpt2-nano", "gpt2-micro"])
def test_the_committed_bases_are_what_their_cards_say(name):
    folder = models.MODELS / name
    assert sum(file.stat().st_size for file in folder.iterdir()) < 16e6
    card = (folder / "README.md").read_text()
    model = build(name, tokenizer=load_tokenizer(name))
    assert f"A GPT-2 of {sum(parameter.numel() for parameter in model.transformer.parameters()):,} parameters" in card
    assert shape_of(name) == Shape(model.config.n_embd, model.config.n_layer, model.config.n_head, 128)
    report = json.loads((folder / "pretrain.json").read_text())
    assert report["validation_loss"] < 4.6  # uniform guesses have log(4096) = 8.3
    record = read_record(folder)
    assert record["final"]["cross_entropy_clean"] == report["validation_loss"]
    values = {**record["config"], "output_dir": str(folder), "data_glob": f"/elsewhere/{record['config']['data_glob']}"}
    assert check_output_folder(PretrainConfig(**values)) == record, "./run_all.sh pretrain does not train it again"


@pytest.mark.parametrize(("name", "gated"), [("gpt2-nano", False), ("llama-nano", True)])
def test_a_model_to_pretrain_has_room_for_its_blocks_and_a_padded_vocabulary(name, gated):
    tokenizer = load_tokenizer("gpt2-nano")
    tokenizer.add_tokens(["<extra>"])  # 4,097
    model = build_language_model(name, tokenizer, positions=300, dropout=0.0, seed=0)
    assert model.config.vocab_size == model.get_output_embeddings().weight.shape[0] == 4160
    assert model.config.max_position_embeddings == 300
    assert any("gate_proj" in each for each, _ in model.named_modules()) == gated
    again = build_language_model(name, tokenizer, positions=8, dropout=0.0, seed=0)
    assert again.config.max_position_embeddings == 128


def test_a_tokenizer_without_padding_pads_with_its_end(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": None}))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_gpt2s_own_tokenizer_and_its_shape_from_random_weights():
    where = Path(os.environ.get("LOSSYTP_DATA", "")) / "openai-community" / "gpt2"
    if "LOSSYTP_DATA" not in os.environ or not where.is_dir():
        pytest.skip("GPT-2's tokenizer is not under LOSSYTP_DATA")
    tokenizer = load_tokenizer("gpt2-scratch")
    assert tokenizer("Hello world")["input_ids"] == [15496, 995]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 50256
    model = build("gpt2-scratch", "generation", tokenizer=tokenizer)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    assert model.config.pad_token_id == 50256
