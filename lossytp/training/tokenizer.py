"""Check that a tokenizer is usable, alone and with a given model, and keep it from truncating or padding texts."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_of_this_process: list["Tokenizer"] = []


def check_tokenizer(whose: str, tokenizer: "PreTrainedTokenizerFast", vocab_size: int | None = None) -> None:
    """Check a tokenizer.

    Args:
        whose: where it comes from, for the message.
        tokenizer: the tokenizer.
        vocab_size: the vocabulary of the model to use it with, if any.

    Raises:
        ValueError: if it has no words or no end token, or more tokens than `vocab_size`.
    """
    # transformers makes an empty tokenizer for a folder without one
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(f"{whose} holds no tokenizer: save the model's own there")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{whose} holds a tokenizer without an end token: give it an eos_token")
    if vocab_size is not None and len(tokenizer) > vocab_size:
        raise ValueError(
            f"{whose} holds a tokenizer of {len(tokenizer)} tokens, above the model's vocab_size = {vocab_size}: save "
            "the model's own there"
        )


def encode_whole_texts_(tokenizer: "PreTrainedTokenizerFast") -> None:
    """Turn truncation and padding off. A tokenizer that has truncated or padded keeps these settings when saved."""
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()


def take_tokenizer(tokenizer: "Tokenizer") -> None:
    """Begin a process that only tokenises, with a thread of its own, and without importing torch."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _of_this_process.append(tokenizer)


def token_ids(text: str) -> list[int]:
    """Return the token ids of a text, in a process that `take_tokenizer` began."""
    ids: list[int] = _of_this_process[0].encode(text, add_special_tokens=False).ids
    return ids
