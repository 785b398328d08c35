"""Test that a saved tokenizer encodes whole texts, whatever it did before it was saved."""

import pytest

from lossytp.training.config import PretrainConfig
from lossytp.training.models import load_tokenizer
from lossytp.training.pretraining.blocks import encode
from lossytp.training.pretraining.text import tokenizer_for


@pytest.mark.parametrize(
    "load", [load_tokenizer, lambda folder: tokenizer_for(PretrainConfig(tokenizer_path=folder), "")]
)
def test_texts_are_neither_cut_nor_padded(tmp_path, load):
    tokenizer, texts = load_tokenizer("gpt2-nano"), ["short", "one two three four five six seven eight nine ten"]
    whole = [ids.tolist() for ids in encode(tokenizer, texts)]
    tokenizer(texts, padding=True, truncation=True, max_length=8)
    assert {len(ids) for ids in encode(tokenizer, texts)} == {9}, "control: it remembers what it did last"
    tokenizer.save_pretrained(tmp_path)
    assert [ids.tolist() for ids in encode(load(str(tmp_path)), texts)] == whole
