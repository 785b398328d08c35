"""Test which text and tokenizer a pretraining run reads."""

import os
from pathlib import Path

import pytest

from lossytp.training.config import PretrainConfig
from lossytp.training.corpus import HELD_OUT_END
from lossytp.training.text import tokenizer_for, training_text, validation_text


def text_of(corpus):
    return "".join(corpus.texts())


def test_a_single_file_is_split_by_position(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{number}\n" for number in range(1000)))
    config = PretrainConfig(data_glob=str(tmp_path / "*.txt"))
    train, held_out = text_of(training_text(config)), text_of(validation_text(config))
    assert train + held_out == (tmp_path / "a.txt").read_text()
    assert len(held_out) == pytest.approx(HELD_OUT_END * len(train + held_out), abs=1)
    (tmp_path / "b.txt").write_text("other")
    both = PretrainConfig(data_glob=str(tmp_path / "a.txt"), validation_glob=str(tmp_path / "b.txt"))
    assert text_of(training_text(both)) == train + held_out
    assert text_of(validation_text(both)) == "other"


@pytest.mark.parametrize("validation", ["a.txt", "*.txt", "link.txt"])
def test_a_file_to_train_on_is_not_validated_on(tmp_path, validation):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "link.txt").symlink_to("a.txt")
    values = {"data_glob": str(tmp_path / "a.*"), "validation_glob": str(tmp_path / validation)}
    with pytest.raises(ValueError, match=r"validation_glob = .* names .*a\.txt"):
        validation_text(PretrainConfig(**values))
    validation_text(PretrainConfig(data_glob="stdlib", validation_glob="stdlib"))  # split by file


def test_text_of_the_hub_is_read_from_its_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("LOSSYTP_DATA", str(tmp_path))
    copy = tmp_path / "karpathy" / "tiny_shakespeare"
    copy.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"dataset = 'shakespeare': .* holds no \.parquet or \.txt file: put one"):
        training_text(PretrainConfig(dataset="shakespeare"))
    (copy / "input.txt").write_text("a" * 90 + "b" * 10)
    for name in ("shakespeare", "karpathy/tiny_shakespeare"):
        config = PretrainConfig(dataset=name)
        assert (text_of(training_text(config)), text_of(validation_text(config))) == ("a" * 90, "b" * 10)
        assert config.task == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shakspeare", "dataset = 'shakspeare'.*shakespeare"),
        (
            "openwebtext",
            r"dataset = 'openwebtext' is neither in LOSSYTP_DATA .* nor available from the hub \(",
        ),
    ],
)
def test_text_that_is_not_there_is_one_line(tmp_path, monkeypatch, name, words):
    monkeypatch.setenv("LOSSYTP_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=words) as error:
        training_text(PretrainConfig(dataset=name))
    assert "\n" not in str(error.value)


def test_gpt2s_own_tokenizer_is_used_where_it_is_there(monkeypatch):
    where = Path(os.environ.get("LOSSYTP_DATA", "")) / "openai-community" / "gpt2"
    if "LOSSYTP_DATA" not in os.environ or not where.is_dir():
        pytest.skip("GPT-2's tokenizer is not under LOSSYTP_DATA")
    assert len(tokenizer_for(PretrainConfig(model_name="gpt2", block_size=1024))) == 50257
