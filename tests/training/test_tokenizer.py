"""Test that a saved tokenizer encodes whole texts, whatever it did before, and what it puts first."""

import pytest

from lossytp.training.config import PretrainConfig
from lossytp.training.models import first_token_names, first_tokens, load_tokenizer
from lossytp.training.text import encode, tokenizer_for
from tests.training.bos import BOS, with_bos


@pytest.mark.parametrize("load", [load_tokenizer, lambda folder: tokenizer_for(PretrainConfig(tokenizer_path=folder))])
def test_texts_are_neither_cut_nor_padded(tmp_path, load):
    tokenizer, texts = load_tokenizer("gpt2-nano"), ["short", "one two three four five six seven eight nine ten"]
    whole = [ids.tolist() for ids in encode(tokenizer, texts)]
    tokenizer(texts, padding=True, truncation=True, max_length=8)
    assert {len(ids) for ids in encode(tokenizer, texts)} == {9}, "control: it remembers what it did last"
    tokenizer.save_pretrained(tmp_path)
    assert [ids.tolist() for ids in encode(load(str(tmp_path)), texts)] == whole


def test_the_tokens_before_every_text_are_those_that_the_tokenizer_asks_for(tmp_path):
    tokenizer = load_tokenizer("gpt2-nano")
    assert (first_tokens(tokenizer), first_token_names(tokenizer)) == ([], {}), "of the study's own models: none"
    with_bos(tokenizer).save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert first_tokens(loaded) == [loaded.convert_tokens_to_ids(BOS)], "and not the end token, which comes last"
    assert first_token_names(loaded) == {"first_tokens": [BOS]}
