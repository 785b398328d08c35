"""Check that a tokenizer can be used at all, and with a given model, and let it encode whole texts."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def check_tokenizer(whose: str, tokenizer: "PreTrainedTokenizerFast", vocab_size: int | None = None) -> None:
    """Check a tokenizer.

    Args:
        whose: where it comes from, for the message.
        tokenizer: the tokenizer.
        vocab_size: the vocabulary of the model to use it with, if any.

    Raises:
        ValueError: if it has no words or no end token, or more tokens than `vocab_size`.
    """
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes such a one for a folder without any
        raise ValueError(f"{whose} holds no tokenizer: save the model's own there")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{whose} holds a tokenizer without an end token: give it an eos_token")
    if vocab_size is not None and len(tokenizer) > vocab_size:
        raise ValueError(
            f"{whose} holds a tokenizer of {len(tokenizer)} tokens, above the model's vocab_size = {vocab_size}: save "
            "the model's own there"
        )


def encode_whole_texts_(tokenizer: "PreTrainedTokenizerFast") -> None:
    """Neither cut nor pad texts. A tokenizer that has done so once is saved with it, in its tokenizer.json."""
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
