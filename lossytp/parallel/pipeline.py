"""A decoder as a pipeline of stages, by `torch.distributed.pipelining`: GPipe and 1F1B.

Huang et al., "GPipe", NeurIPS 2019: a batch is split into microbatches, and all forwards come before all backwards.
Narayanan et al., "PipeDream", SOSP 2019, with a flush after each batch as in Megatron-LM (SC 2021): forwards and
backwards alternate. Activations and their gradients travel between stages, and lose packets over the backend `lossy`.

Shapes: B examples, T tokens, D model width, C classes, V words of the vocabulary.
"""

import copy
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import PreTrainedModel

from lossytp.network.checks import refuse_if
from lossytp.parallel.group import RankGroup
from lossytp.parallel.plans import blocks_of
from lossytp.parallel.vocabulary import IGNORED

PipelineSchedule = Literal["gpipe", "1f1b"]
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LANGUAGE_MODELS, CLASSIFIERS = ("LMHeadModel", "ForCausalLM"), "ForSequenceClassification"


class Stage(nn.Module):
    """One stage: its blocks, with the embeddings if it is the first, and the last norm and the head if it is the last.

    The model's own code runs on every stage, and each block keeps its number and its parameters' names. Stand-ins
    replace what comes before the stage's blocks, and return the hidden states that the stage has received. Another one
    follows the stage's last block and keeps the hidden states for the next stage. A head that is tied to the embeddings
    has its own copy, so its gradient and the embeddings' must be added up.

    It is number `index` of `num_stages`. The model and `exact_adjoint` are those of `Pipeline`.

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
        children, blocks = list(model.base_model.children()), blocks_of(model)
        listed = next((n for n, child in enumerate(children) if isinstance(child, nn.ModuleList)), None)
        if not (self.is_language_model or type(model).__name__.endswith(CLASSIFIERS)) or listed is None:
            kind = f"a {type(model).__name__}"
            fix = "give a classifier or a language model whose base model lists its blocks"
            raise TypeError(f"a pipeline of {kind} is not supported: {fix}")
        fault = f"is above the model's {len(blocks)} blocks: give fewer"
        refuse_if(len(blocks) < num_stages, "pipeline_parallel_size", num_stages, fault)
        self.index, self.is_first, self.is_last = index, index == 0, index == num_stages - 1
        self.exact_adjoint = exact_adjoint
        self.width, self.dtype = model.config.hidden_size, model.dtype
        self.num_logits = int((model.config.vocab_size if self.is_language_model else model.config.num_labels) or 0)
        self.tied_shape = None if num_stages == 1 else _tied_shape(model)
        first, stop = (round(stage * len(blocks) / num_stages) for stage in (index, index + 1))
        self.received, self.handed_on = _Received(), _HandedOn()
        after = [] if self.is_last else [self.handed_on]
        memo: dict[int, Any] = {  # deepcopy takes these in place of copies
            id(children[listed]): nn.ModuleList([self.received] * first + blocks[first:stop] + after)
        }
        if not self.is_first:
            before = [each for each in children[:listed] if isinstance(each, nn.Dropout) or _has_parameters(each)]
            memo |= {id(each): self.received for each in before}
        if not self.is_last:
            around = [child for child in model.children() if child is not model.base_model]
            memo |= {id(each): nn.Identity() for each in children[listed + 1 :] + around if _has_parameters(each)}
        self.model: Any = copy.deepcopy(model, memo)

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """Return this stage's copy of a matrix that is the first stage's embeddings and the last stage's head."""
        if self.tied_shape is None or not (self.is_first or self.is_last):
            return None
        holder: Any = self.model.get_input_embeddings() if self.is_first else self.model.get_output_embeddings()
        return holder.weight

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
    hidden: Tensor

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.hidden


class _HandedOn(nn.Module):
    hidden: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        self.hidden = hidden_states
        return hidden_states

    def take(self) -> Tensor:
        hidden, self.hidden = self.hidden, None
        assert hidden is not None
        return hidden


def _tied_shape(model: PreTrainedModel) -> torch.Size | None:
    decoder: Any = model
    embeddings, head = decoder.get_input_embeddings(), decoder.get_output_embeddings()
    tied = head is not None and head.weight is embeddings.weight and head.weight.requires_grad
    return embeddings.weight.shape if tied else None


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


class Pipeline:
    """One process's stage of a decoder, and its schedule.

    Args:
        model: the whole classifier or language model. This stage uses its blocks, so that memory holds them once.
        process_group: the stages, in order.
        schedule: "gpipe" or "1f1b".
        num_microbatches: number of microbatches of a training batch; for 1F1B at least the number of stages.
        device: the device of the model and the batches.
        exact_adjoint: whether a stage returns no gradient for elements that did not reach it. It knows which these are,
            unlike the sender of a sum. A lost token is normalised from zero, so its gradient would dwarf all others.

    Raises:
        TypeError: for a model with another head, or whose base model does not list its blocks.
        ValueError: for fewer blocks than stages, or too few microbatches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        process_group: ProcessGroup,
        *,
        schedule: PipelineSchedule,
        num_microbatches: int,
        device: torch.device,
        exact_adjoint: bool = False,
    ) -> None:
        self.process_group, self.device = process_group, device
        self.schedule, self.num_microbatches = schedule, num_microbatches
        self.index, self.num_stages = process_group.rank(), process_group.size()
        fault = f"is below {self.num_stages} stages, which 1f1b cannot keep busy: give {self.num_stages}, or gpipe"
        few = schedule == "1f1b" and num_microbatches < self.num_stages
        refuse_if(few, "pipeline_microbatches", num_microbatches, fault)
        self.stage = Stage(model, self.index, self.num_stages, exact_adjoint)
        self.is_last = self.stage.is_last
        # by "train" and "eval", the last batch's shape and schedule alone, which holds hidden states of a whole batch
        self._schedules: dict[str, tuple[torch.Size, Any]] = {}
        self._counted: Tensor | None = None  # tokens that a microbatch predicts, on average over the batch

    def forward_backward(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Compute the gradients of the mean training loss over `batch`.

        A batch that cannot be split evenly into microbatches, as at the end of an epoch, runs whole.

        Args:
            batch: input_ids (B, T); labels, (B,) of a classifier and (B, T) of a language model; and an attention_mask
                (B, T) if there is padding. Every stage needs all of them.

        Returns:
            The training loss on the last stage, None on the others.
        """
        microbatches = 1 if len(batch["input_ids"]) % self.num_microbatches else self.num_microbatches
        kind = ScheduleGPipe if microbatches == 1 else SCHEDULES[self.schedule]
        schedule = self._schedule_for(batch, "train", kind, microbatches)
        losses: list[Tensor] = []
        results = {"target": batch["labels"], "losses": losses} if self.is_last else {}
        if self.stage.is_language_model:
            self._counted = (batch["labels"][:, 1:] != IGNORED).sum() / microbatches
        first, rest = self._inputs(batch)
        schedule.step(*first, **rest, **results)
        self._sum_tied_gradients()
        return torch.stack(losses).detach().mean() if self.is_last else None

    @torch.no_grad()
    def logits(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Return logits, (B, C) or (B, T, V), on the last stage, None on the others."""
        schedule = self._schedule_for(batch, "eval", ScheduleGPipe, 1)
        first, rest = self._inputs(batch)
        return schedule.eval(*first, **rest)

    def _loss(self, output: Tensor, labels: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return the mean loss over examples; over predicted tokens, or their sum divided by `counted`."""
        if not self.stage.is_language_model:
            return F.cross_entropy(output, labels)
        return self.stage.model.loss_function(output, labels, output.shape[-1], num_items_in_batch=counted)

    def _sum_tied_gradients(self) -> None:
        """Add up, reliably, the gradients of the embedding and of the head that is tied to it, as Megatron-LM does."""
        if self.stage.tied_shape is None:
            return
        weight = self.stage.tied_weight
        gradient = None if weight is None else weight.grad
        if gradient is None:
            gradient = torch.zeros(self.stage.tied_shape, dtype=self.stage.dtype, device=self.device)
        RankGroup(self.num_stages, process_group=self.process_group).begin_sum_(gradient)()

    def _inputs(self, batch: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return the positional and named inputs of this stage."""
        names = ("attention_mask",) if self.index == 0 else ("attention_mask", "input_ids")
        first = (batch["input_ids"],) if self.index == 0 else ()
        return first, {name: batch[name] for name in names if name in batch}

    def _schedule_for(self, batch: dict[str, Tensor], use: str, kind: Any, microbatches: int) -> Any:
        """Return the schedule for batches of this shape, which stages get in advance so that no shape is sent."""
        shape = batch["input_ids"].shape
        if self._schedules.get(use, (None,))[0] == shape:
            return self._schedules[use][1]
        self._schedules.pop(use, None)  # before the next one needs memory
        ids = torch.zeros(shape[0] // microbatches, shape[1], dtype=torch.int64, device="meta")
        hidden = torch.zeros(*ids.shape, self.stage.width, device="meta", dtype=self.stage.dtype)
        rows = ids.shape if self.stage.is_language_model else ids.shape[:1]
        logits = torch.zeros(*rows, self.stage.num_logits, device="meta", dtype=self.stage.dtype)
        stage = PipelineStage(
            self.stage,
            self.index,
            self.num_stages,
            self.device,
            input_args=ids if self.index == 0 else hidden.requires_grad_(),
            output_args=(logits if self.is_last else hidden).requires_grad_(),
            group=self.process_group,
        )
        loss = {"loss_fn": lambda output, labels: self._loss(output, labels, self._counted)} if use == "train" else {}
        self._schedules[use] = shape, kind(stage, microbatches, **loss)
        return self._schedules[use][1]
