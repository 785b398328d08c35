"""Compute the cross-entropy of logits whose vocabulary is split over the ranks, without gathering the logits.

Shoeybi et al., "Megatron-LM", 2019, section 3: instead of logits, ranks exchange three numbers per token: the largest
logit, the sum of exponentials and the target's logit. These messages mostly fit into a packet, and lose nothing.

Shapes: T tokens, O tokens of the vocabulary in this process.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lossytp.parallel.group import RankGroup

IGNORED = -100  # label of a token that training does not predict, as in transformers


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits_TO: Tensor, targets_T: Tensor, group: RankGroup, vocabulary: int) -> Tensor:
        columns = logits_TO.shape[1]
        first = group.local.start * columns // len(group.local)
        logits_TO = logits_TO.clone()
        logits_TO[:, max(0, vocabulary - first) :] = -torch.inf  # rows of padding are not tokens
        largest_T = logits_TO.amax(1)
        group.max_(largest_T)
        exponentials_TO = (logits_TO - largest_T.unsqueeze(1)).exp()
        total_T = exponentials_TO.sum(1)
        group.begin_sum_(total_T)()
        here_T = (targets_T >= first) & (targets_T < first + columns)
        index_T = (targets_T - first).clamp(0, columns - 1)
        target_T = torch.where(here_T, logits_TO.gather(1, index_T.unsqueeze(1)).squeeze(1), 0)
        group.begin_sum_(target_T)()
        ctx.save_for_backward(exponentials_TO / total_T.unsqueeze(1), here_T, index_T)
        return total_T.log() + largest_T - target_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        softmax_TO, here_T, index_T = ctx.saved_tensors
        dloss_T = gradients[0]
        dlogits_TO = softmax_TO * dloss_T.unsqueeze(1)
        dlogits_TO.scatter_add_(1, index_T.unsqueeze(1), -(dloss_T * here_T).unsqueeze(1))
        return dlogits_TO, None, None, None


def cross_entropies(logits_TO: Tensor, targets_T: Tensor, group: RankGroup, vocabulary: int) -> Tensor:
    """Return the cross-entropy (T,) of each token, the same on every rank.

    Args:
        logits_TO: this process's columns. Each of its ranks has equally many.
        targets_T: token ids of the whole vocabulary. For any other number the result has no meaning, and no gradient
            may flow back from it.
        group: the ranks.
        vocabulary: number of tokens. Columns beyond it are padding.
    """
    return _CrossEntropy.apply(logits_TO, targets_T, group, vocabulary)


class LossParallel:
    """A language model's training loss, in place of transformers' `ForCausalLMLoss`.

    Args:
        head: the vocabulary-parallel head. In training it computes this process's logits, otherwise all.
        dense: the loss for all logits.
    """

    def __init__(self, head: Any, dense: Callable) -> None:
        self.head, self.dense = head, dense

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        *,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Return the mean over tokens, or their sum over `num_items_in_batch`."""
        if not self.head.training:
            named = {"ignore_index": ignore_index, "shift_labels": shift_labels, **others}
            loss: Tensor = self.dense(logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, **named)
            return loss
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets_T = shift_labels.reshape(-1).to(logits.device)
        logits_TO = logits.reshape(len(targets_T), -1)
        group = self.head.collective.group
        if logits_TO.dtype != torch.float64:
            logits_TO = logits_TO.float()
        losses_T = cross_entropies(logits_TO, targets_T, group, self.head.vocabulary)
        counted_T = targets_T != ignore_index
        total = torch.where(counted_T, losses_T, 0).sum()
        return total / (counted_T.sum() if num_items_in_batch is None else num_items_in_batch)
