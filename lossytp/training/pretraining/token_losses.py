"""The cross-entropy of a language model, token by token, in nats.

Shapes: N blocks of text, B blocks of one batch, T tokens each, L local ranks.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def token_losses(model: Any, ids_BT: Tensor) -> Tensor:
    """Return the cross-entropy of every token but the first, given those before it: (B, T - 1), fp32.

    If ranks have their own streams, it is the mean over local ranks.
    """
    with torch.inference_mode():
        output = model(input_ids=ids_BT, use_cache=False)
        logits_LBTV = getattr(output, "rank_logits", output.logits.unsqueeze(0))
        targets = ids_BT[:, 1:].flatten()
        losses = [cross_entropy(each[:, :-1].flatten(0, 1).float(), targets, reduction="none") for each in logits_LBTV]
        return torch.stack(losses).mean(0).view(len(ids_BT), -1)


def losses_by_block(model: Any, blocks_NT: Tensor) -> np.ndarray:
    """Return the cross-entropy of every token but the first of each block: (N, T - 1), fp64.

    Blocks pass the model one by one, so that each is a message of its own.
    """
    losses = [token_losses(model, ids_1T).cpu().numpy() for ids_1T in blocks_NT.split(1)]
    return np.concatenate(losses).astype(np.float64)
