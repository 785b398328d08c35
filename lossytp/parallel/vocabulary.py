"""Vocabulary parallelism: each rank holds the embeddings of its part of the vocabulary, and computes their logits.

Shoeybi et al., "Megatron-LM", 2019, section 3. The vocabulary is padded to a multiple of the ranks. A tied head shares
the embedding's shard.

Shapes: T is the product of all leading axes, D the model width. There are L ranks in this process. O counts the rows of
the vocabulary in this process, rank after rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from lossytp.network.checks import refuse_if
from lossytp.network.scope import Site
from lossytp.parallel.collectives import LossyCollective, collective_of
from lossytp.parallel.group import RankGroup
from lossytp.parallel.layers import Column, cast_for_autocast, outside_graphs
from lossytp.parallel.mappings import all_columns, gather_columns, with_backward
from lossytp.parallel.own_streams import first_ranks

# For the cross-entropy, ranks exchange three numbers per token instead of logits: the largest logit, the sum of
# exponentials and the target's logit. These messages mostly fit into a packet, and lose nothing.


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

    def __call__(self, logits: Tensor, labels: Tensor | None, vocab_size: int, **named: Any) -> Tensor:
        """Return the mean over tokens, or their sum over `num_items_in_batch`."""
        if not self.head.training:
            loss: Tensor = self.dense(logits, labels, vocab_size, **named)
            return loss
        ignored, shifted = named.get("ignore_index", IGNORED), named.get("shift_labels")
        if shifted is None:
            assert labels is not None
            shifted = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        targets_T = shifted.reshape(-1).to(logits.device)
        logits_TO = logits.reshape(len(targets_T), -1)
        if logits_TO.dtype != torch.float64:
            logits_TO = logits_TO.float()
        losses_T = cross_entropies(logits_TO, targets_T, self.head.collective.group, self.head.vocabulary)
        counted_T, items = targets_T != ignored, named.get("num_items_in_batch")
        return torch.where(counted_T, losses_T, 0).sum() / (counted_T.sum() if items is None else items)


FORWARD, BACKWARD = Site(None, None, "forward"), Site(None, None, "backward")


class VocabularyParallelEmbedding(nn.Module):
    """Embed tokens, (...) to (..., D): each rank looks up its own, fills in zero for the others, and the ranks sum.

    Forward: one lossy all-reduce. Backward: no communication.
    """

    sharded_over_ranks = ("weight",)

    def __init__(self, embedding: nn.Embedding, weight: nn.Parameter, collective: LossyCollective) -> None:
        super().__init__()
        self.vocabulary, self.padding_idx = embedding.num_embeddings, embedding.padding_idx
        self.weight, self.collective = weight, collective

    @outside_graphs
    def forward(self, ids: Tensor) -> Tensor:
        ids_T, ranks = ids.reshape(-1), self.collective.group.local
        rows = len(self.weight) // len(ranks)
        local_T = ids_T - ranks.start * rows
        here = ((local_T >= 0) & (local_T < len(self.weight))).nonzero().squeeze(1)
        trained = here if self.padding_idx is None else here[ids_T[here] != self.padding_idx]

        def look_up(weight_OD: Tensor) -> Tensor:
            parts_LTD = weight_OD.new_zeros(len(ranks), len(ids_T), weight_OD.shape[1])
            parts_LTD[local_T[here] // rows, here] = weight_OD[local_T[here]]
            return self.collective.sum_(parts_LTD, FORWARD)

        def backward(dy_TD: Tensor) -> Tensor:
            return dy_TD.new_zeros(self.weight.shape).index_add_(0, local_T[trained], dy_TD[trained])

        return with_backward(self.weight, look_up, backward).view(*ids.shape, -1)


class VocabularyParallelHead(nn.Module):
    """Compute logits: (..., D) to (..., O) in training, and to the whole vocabulary otherwise.

    Forward: no communication in training, otherwise a gather. It is reliable, so that all ranks decide alike, unless
    `lossy_gather`: then `received` (L, ..., V) has what each local rank received. Backward: one lossy all-reduce of the
    ranks' parts of dx.
    """

    sharded_over_ranks = ("weight", "bias")

    def __init__(
        self,
        head: nn.Linear,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        collective: LossyCollective,
        *,
        lossy_gather: bool = False,
    ) -> None:
        super().__init__()
        self.vocabulary = head.out_features
        self.weight, self.bias, self.collective = weight, bias, collective
        self.lossy_gather = lossy_gather
        self.received: Tensor | None = None

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = cast_for_autocast(x, self.weight, self.bias)
        widths = (len(weight) // len(self.collective.group.local),)
        with torch.autocast(x.device.type, enabled=False):
            y: Tensor = Column.apply(x, weight.t(), bias, widths, self.collective, BACKWARD)
        if self.training:
            return y
        logits = gather_columns(y, widths, self.collective)
        if self.lossy_gather:
            columns_first = logits.movedim(-1, 0).contiguous()  # so that a rank's columns are one chunk
            received = self.collective.all_gather(columns_first, FORWARD, reliable=False)
            self.received = received.movedim(1, -1)[..., : self.vocabulary]
        return logits[..., : self.vocabulary]


PARTS = (VocabularyParallelEmbedding, VocabularyParallelHead)


def split_vocabulary_(model: PreTrainedModel, *, lossy_gather: bool = False) -> None:
    """Split the vocabulary of a language model from `parallelize` over its ranks, in place.

    In training, the model's output has only this process's logits, and the loss of all ranks.

    Args:
        model: the model.
        lossy_gather: if True, the gather of logits in evaluation loses packets. The output then has each local rank's
            logits as `rank_logits` (L, B, ...), and the first rank's as `logits`, as if ranks had their own streams.

    Raises:
        TypeError: if the model has no plain embedding and head, or is not tensor-parallel.
        ValueError: if ranks have their own streams, the stream is sharded, or the algorithm has no gather to lose from.
    """
    changed: Any = model
    collective = collective_of(model)
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if collective is None or type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        what = f"{type(model).__name__} is not a tensor-parallel language model with a plain embedding and head"
        raise TypeError(f"{what}: give one that parallelize returned")
    if not collective.comm.one_stream:
        fix = "give reliable_gather = True and no sequence_parallel"
        raise ValueError(f"enable_loss_parallelism = True needs ranks with a common stream: {fix}")
    algorithm = collective.comm.algorithm
    fault = "has sums that reach every rank, and no gather that could lose logits: choose another"
    refuse_if(lossy_gather and algorithm.sum_reaches_all, "algorithm", algorithm.name, fault)
    weight = _shard(embedding.weight, collective.group)
    own = weight if head.weight is embedding.weight else _shard(head.weight, collective.group)
    bias = None if head.bias is None else _shard(head.bias, collective.group)
    parallel_head = VocabularyParallelHead(head, own, bias, collective, lossy_gather=lossy_gather)
    parallel_head.train(head.training)
    new = {embedding: VocabularyParallelEmbedding(embedding, weight, collective), head: parallel_head}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in new:
                setattr(parent, name, new[child])
    changed.loss_function = LossParallel(parallel_head, changed.loss_function)
    if lossy_gather:
        model.register_forward_hook(_with_received_logits)


def _with_received_logits(model: PreTrainedModel, inputs: Any, output: Any) -> None:
    """Give an evaluation's output the logits that each rank received."""
    head: Any = model.get_output_embeddings()
    received = getattr(head, "received", None)  # a dense head has none
    if received is not None:
        output.rank_logits = received
        output.logits = first_ranks(received[0], head.collective.group)
        head.received = None


def dense_vocabulary(model: PreTrainedModel) -> dict[int, Any]:
    """Return dense replacements, for `deepcopy`, of what `split_vocabulary_` made. Every process must call this."""
    replacements: dict[int, Any] = {}
    weights: dict[nn.Parameter, nn.Parameter] = {}
    for part in model.modules():
        if not isinstance(part, PARTS):
            continue
        group = part.collective.group
        with part.collective.network.reliable(), torch.device("meta"):  # on "meta" constructors draw no weights
            rows, width = part.vocabulary, part.weight.shape[1]
            if part.weight not in weights:
                weights[part.weight] = _whole(part.weight, rows, group)
            if isinstance(part, VocabularyParallelEmbedding):
                dense: Any = nn.Embedding(rows, width, part.padding_idx)
            else:
                dense = nn.Linear(width, rows, bias=part.bias is not None)
                if part.bias is not None:
                    dense.bias = _whole(part.bias, rows, group)
        dense.weight = weights[part.weight]
        replacements[id(part)] = dense.train(part.training)
    loss = getattr(model, "_loss_function", None)
    if isinstance(loss, LossParallel):
        replacements[id(loss)] = loss.dense
    return replacements


def _shard(dense: Tensor, group: RankGroup) -> nn.Parameter:
    rows = -(-len(dense) // group.size)
    first, stop = group.local.start * rows, group.local.stop * rows
    shard = dense.new_zeros(stop - first, *dense.shape[1:])
    part = dense.detach()[first:stop]
    shard[: len(part)] = part
    return nn.Parameter(shard, dense.requires_grad)


def _whole(shard: nn.Parameter, rows: int, group: RankGroup) -> nn.Parameter:
    each = len(shard) // len(group.local)
    columns = all_columns(shard.detach().t().contiguous(), (each,), group)
    return nn.Parameter(columns.t()[:rows].clone(memory_format=torch.contiguous_format), shard.requires_grad)
