"""Check that a tokenizer is usable, alone and with a given model, and say what it puts before texts."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
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


def first_tokens(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Return the special tokens that the tokenizer puts before every text, such as a BOS; most put none.

    Models that were trained with them predict badly without: Gemma's cross-entropy rises by more than a nat.
    """
    encoded = tokenizer("a", return_special_tokens_mask=True)
    return list(encoded["input_ids"][: [*encoded["special_tokens_mask"], 0].index(0)])


def told_first_tokens(tokenizer: "PreTrainedTokenizerFast") -> dict[str, list[str]]:
    """Return a record's entry `first_tokens`, the names of these tokens, if there are any."""
    names = [str(tokenizer.convert_ids_to_tokens(each)) for each in first_tokens(tokenizer)]
    return {"first_tokens": names} if names else {}


def prompt(tokenizer: "PreTrainedTokenizerFast", text: str) -> "dict[str, Tensor]":
    """Return a text to continue, behind the first tokens, as ids (1, tokens) with their attention mask."""
    import torch

    ids = [*first_tokens(tokenizer), *tokenizer(text, add_special_tokens=False)["input_ids"]]
    input_ids = torch.tensor([ids], dtype=torch.int64)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
