"""What a tokenizer has to know, to be used at all and with a given model."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def check_tokenizer(whose: str, tokenizer: "PreTrainedTokenizerFast", vocab_size: int | None = None) -> None:
    """Raise ValueError where it knows no words, no end token, or more tokens than a model of `vocab_size`."""
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of a folder without one
        raise ValueError(f"{whose} holds no tokenizer: save the model's there, too")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{whose} holds a tokenizer without an end token: give it an eos_token")
    if vocab_size is not None and len(tokenizer) > vocab_size:
        raise ValueError(
            f"{whose} holds a tokenizer of {len(tokenizer)} tokens, above the model's vocab_size = {vocab_size}: save "
            "the model's own there"
        )
