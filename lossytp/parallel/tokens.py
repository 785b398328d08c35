"""Tokens at known positions: where they are in a batch, and prefixes whose keys and values lose nothing.

Shapes: B sequences, T tokens of each in this call, P tokens of each in the cache.
"""

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from lossytp.network.checks import check_is
from lossytp.network.repairs import ProtectFirst
from lossytp.parallel.collectives import LossyCollective, collective_of


def needs_positions(collective: LossyCollective) -> bool:
    """Return whether what a message loses depends on its tokens' positions."""
    first = collective.comm.repair.part("select")
    return collective.network.scope.positions is not None or isinstance(first, ProtectFirst)


def positions_of(model: PreTrainedModel, *inputs: Any, **named: Any) -> np.ndarray:
    """Return the position of each token within its own sequence, (B * T,), or -1 for padding.

    Positions follow from `position_ids` if they are given, as for packed sequences, else from the mask and the cache.

    The arguments are those of the model's call.
    """
    given = inspect.signature(model.forward).bind(*inputs, **named).arguments
    given |= given.pop("kwargs", {})
    embeddings, tokens = given.get("inputs_embeds"), given.get("input_ids")
    if tokens is None:
        if embeddings is None:  # the model names what is missing
            return np.zeros(0, np.int64)
        tokens = embeddings[..., 0]
    tokens_BT = tokens.reshape(-1, tokens.shape[-1])  # rows of options, if there are several
    cache, ids, mask = (given.get(name) for name in ("past_key_values", "position_ids", "attention_mask"))
    past, length = 0 if cache is None else int(cache.get_seq_length()), tokens_BT.shape[1]
    positions_BT = torch.arange(past, past + length, device=tokens.device).expand_as(tokens_BT)
    mask_BT = mask.reshape(-1, mask.shape[-1]) if isinstance(mask, Tensor) and mask.ndim < 4 else None
    if mask_BT is not None:
        mask_BT = mask_BT[:, : past + length].bool()  # a static cache's mask may be longer
        positions_BT = mask_BT.cumsum(1)[:, -length:] - 1
    if ids is not None:
        positions_BT = ids.expand_as(tokens_BT)
    if mask_BT is not None:
        positions_BT = positions_BT.masked_fill(~mask_BT[:, -length:], -1)
    return positions_BT.reshape(-1).cpu().numpy()


def reliable_prefix(model: PreTrainedModel, input_ids: Tensor) -> Cache:
    """Return the cache of a fixed prefix, such as a system prompt, computed without losses.

    Give a copy of it to `generate` as `past_key_values`, with prompts that begin with the prefix. For several prompts,
    or beam search, call its `batch_repeat_interleave` first. No packet more is sent than without a cache.

    Args:
        model: a language model that `parallelize` returned.
        input_ids: (B, P) token ids, or (1, P) for one prompt.

    Raises:
        TypeError: if the model is not tensor-parallel, or `input_ids` is no tensor.
        ValueError: if `input_ids` has another shape.
    """
    collective = collective_of(model)
    if collective is None:
        raise TypeError(f"this {type(model).__name__} is not tensor-parallel: give what parallelize() returned")
    check_is("input_ids", input_ids, Tensor, "token ids of shape (1, tokens)")
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids is of shape {tuple(input_ids.shape)}: give token ids of shape (1, tokens)")
    with torch.no_grad(), collective.network.reliable():
        cache: Cache = model(input_ids=input_ids, use_cache=True).past_key_values
    return cache
