"""Make tokenizers that put a token before every text."""

from tokenizers.processors import TemplateProcessing

BOS = "<|pad|>"  # of the project's own vocabularies, so that no model needs a larger one


def with_bos(tokenizer):
    """Make a tokenizer put `BOS` before every text, and its end token behind, as some of the hub's do."""
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A {end}", special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in (BOS, end)]
    )
    return tokenizer
