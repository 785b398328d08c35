"""Cut a decoder of transformers between its blocks into the stages of a pipeline.

The model's own code runs on every stage. Its list of blocks reaches to the stage's last block, so that each block keeps
its number, and its parameters keep their names. Stand-ins replace the blocks of earlier stages, and what comes before
all blocks: they return the hidden states that this stage has received. Another stand-in follows the stage's last block
and keeps the hidden states for the next stage.

Shapes: B examples, T tokens, D model width, C classes, V words of the vocabulary.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lossytp.parallel.plans import blocks_of

LANGUAGE_MODELS, CLASSIFIERS = ("LMHeadModel", "ForCausalLM"), "ForSequenceClassification"


class Stage(nn.Module):
    """One stage: its blocks, with the embeddings if it is the first, and the last norm and the head if it is the last.

    A head that is tied to the embeddings has its own copy, so its gradient and the embeddings' must be added up.

    Args:
        model: the whole decoder; the stage takes over its blocks, and copies what else it needs.
        index: number of the stage.
        num_stages: number of stages.
        exact_adjoint: whether no gradient goes back for elements that did not arrive.

    Attributes:
        is_language_model: whether it predicts tokens; else it classifies texts.
        num_logits: C or V.
        tied_shape: shape of the embeddings, (V, D), if another stage holds the head that is tied to them; else None.

    Raises:
        TypeError: for a model with another head, or whose base model does not list its blocks.
        ValueError: for fewer blocks than stages.
    """

    def __init__(self, model: PreTrainedModel, index: int, num_stages: int, exact_adjoint: bool = False) -> None:
        super().__init__()
        self.is_language_model = type(model).__name__.endswith(LANGUAGE_MODELS)
        children = list(model.base_model.children())
        blocks = blocks_of(model)
        place = next((n for n, child in enumerate(children) if isinstance(child, nn.ModuleList)), None)
        if not (self.is_language_model or type(model).__name__.endswith(CLASSIFIERS)) or place is None:
            raise TypeError(
                f"a pipeline of a {type(model).__name__} is not supported: give a classifier or a language model, "
                "whose base model lists its blocks"
            )
        if len(blocks) < num_stages:
            raise ValueError(
                f"pipeline_parallel_size = {num_stages} is above the model's {len(blocks)} blocks: give fewer"
            )
        self.index, self.is_first, self.is_last = index, index == 0, index == num_stages - 1
        self.exact_adjoint = exact_adjoint
        self.width, self.dtype = model.config.hidden_size, model.dtype
        self.num_logits = int((model.config.vocab_size if self.is_language_model else model.config.num_labels) or 0)
        self.tied_shape = None if num_stages == 1 else _tied_shape(model)
        first, stop = (round(stage * len(blocks) / num_stages) for stage in (index, index + 1))
        self.received, self.handed_on = _Received(), _HandedOn()
        after = [] if self.is_last else [self.handed_on]
        memo: dict[int, Any] = {  # deepcopy takes these in place of copies
            id(children[place]): nn.ModuleList([self.received] * first + blocks[first:stop] + after)
        }
        if not self.is_first:
            before = [each for each in children[:place] if isinstance(each, nn.Dropout) or _has_parameters(each)]
            memo |= {id(each): self.received for each in before}
        if not self.is_last:
            around = [child for child in model.children() if child is not model.base_model]
            memo |= {id(each): nn.Identity() for each in children[place + 1 :] + around if _has_parameters(each)}
        self.model: Any = copy.deepcopy(model, memo)

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """Return this stage's copy of a matrix that is the first stage's embeddings and the last stage's head."""
        if self.tied_shape is None or not (self.is_first or self.is_last):
            return None
        holder: Any = self.model.get_input_embeddings() if self.is_first else self.model.get_output_embeddings()
        weight: nn.Parameter = holder.weight
        return weight

    @property
    def counted_by_first_stage(self) -> nn.Parameter | None:
        """Return the last stage's copy of tied embeddings, which norms skip because the first stage counts them."""
        return None if self.is_first else self.tied_weight

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, input_ids: Tensor | None = None) -> Tensor:
        """Map token ids (B, T), or hidden states (B, T, D) after the first stage, to the same or logits.

        Args:
            x: what the stage before sends; the token ids on the first.
            attention_mask: (B, T), if there is padding.
            input_ids: (B, T), after the first stage.

        Returns:
            Hidden states (B, T, D); on the last stage logits, (B, C) or (B, T, V).
        """
        if input_ids is None:
            input_ids = x
        else:
            self.received.hidden = x * (x != 0) if self.exact_adjoint else x  # lost elements are 0, hardly any others
        model = self.model if self.is_last else self.model.base_model
        output = model(input_ids, attention_mask=attention_mask, use_cache=False)
        return output.logits.to(self.dtype) if self.is_last else self.handed_on.take()


class _Received(nn.Module):
    """Stand in for what comes before the stage's blocks: return what the stage before has sent."""

    hidden: Tensor

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.hidden


class _HandedOn(nn.Module):
    """Stand in for the next stage's first block: keep what the next stage receives."""

    hidden: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        self.hidden = hidden_states
        return hidden_states

    def take(self) -> Tensor:
        hidden, self.hidden = self.hidden, None
        assert hidden is not None
        return hidden


def _tied_shape(model: PreTrainedModel) -> torch.Size | None:
    embeddings, head = (getattr(model, name)() for name in ("get_input_embeddings", "get_output_embeddings"))
    tied = head is not None and head.weight is embeddings.weight and head.weight.requires_grad
    return embeddings.weight.shape if tied else None


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
