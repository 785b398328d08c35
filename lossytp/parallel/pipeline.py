"""GPT-2 as a pipeline of stages, by `torch.distributed.pipelining`: GPipe and 1F1B.

Huang et al., "GPipe", NeurIPS 2019: a batch is split into microbatches, and all forwards come before all backwards.
Narayanan et al., "PipeDream", SOSP 2019, with a flush after each batch as in Megatron-LM (SC 2021): forwards and
backwards alternate. Activations and their gradients travel between stages, and lose packets over the backend `lossy`.

Shapes: B examples, T tokens, D model width, C classes.
"""

import copy
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import GPT2ForSequenceClassification, PreTrainedModel

from lossytp.parallel.plans import blocks_of

PipelineSchedule = Literal["gpipe", "1f1b"]
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Pipeline:
    """One process's stage of a classifier, and its schedule.

    Args:
        model: the whole classifier. This stage uses the model's own blocks, so that memory holds them once.
        process_group: the stages, in order.
        schedule: "gpipe" or "1f1b".
        num_microbatches: number of microbatches of a training batch; for 1F1B at least the number of stages.
        device: the device of the model and the batches.
        exact_adjoint: whether a stage returns no gradient for elements that did not reach it. It knows which these are,
            unlike the sender of a sum. A lost token is normalised from zero, so its gradient would dwarf all others.

    Raises:
        TypeError: for a model with another head.
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
        if not isinstance(model, GPT2ForSequenceClassification):
            raise TypeError(f"a pipeline of a {type(model).__name__} is not supported: give a classifier")
        self.process_group = process_group
        self.schedule = schedule
        self.num_microbatches = num_microbatches
        self.device = device
        self.index, self.num_stages = process_group.rank(), process_group.size()
        if schedule == "1f1b" and num_microbatches < self.num_stages:
            raise ValueError(
                f"pipeline_microbatches = {num_microbatches} is below the {self.num_stages} stages, which 1f1b cannot "
                f"keep busy: give {self.num_stages} or more, or gpipe"
            )
        self.stage = _Stage(model, self.index, self.num_stages, exact_adjoint)
        # only the last batch's schedule, by examples and tokens: it holds the hidden states of a whole batch
        self._training: dict[tuple[int, int], Any] = {}
        self._evaluation: dict[tuple[int, int], Any] = {}

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def forward_backward(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Compute the gradients of the mean training loss over `batch`.

        A batch that cannot be split evenly into microbatches, as at the end of an epoch, runs whole.

        Returns:
            The training loss on the last stage, None on the others.
        """
        examples, tokens = batch["input_ids"].shape
        if (examples, tokens) not in self._training:
            self._training.clear()
            microbatches = 1 if examples % self.num_microbatches else self.num_microbatches
            kind = ScheduleGPipe if microbatches == 1 else SCHEDULES[self.schedule]
            stage = self._stage_for(examples // microbatches, tokens)
            self._training[examples, tokens] = kind(stage, microbatches, loss_fn=F.cross_entropy)
        losses: list[Tensor] = []
        results = {"target": batch["labels"], "losses": losses} if self.is_last else {}
        self._training[examples, tokens].step(*self._first(batch), **self._rest(batch), **results)
        return torch.stack(losses).detach().mean() if self.is_last else None

    @torch.no_grad()
    def logits(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Return logits (B, C) on the last stage, None on the others."""
        examples, tokens = batch["input_ids"].shape
        if (examples, tokens) not in self._evaluation:
            self._evaluation.clear()
            self._evaluation[examples, tokens] = ScheduleGPipe(self._stage_for(examples, tokens), 1)
        output: Tensor | None = self._evaluation[examples, tokens].eval(*self._first(batch), **self._rest(batch))
        return output

    def _first(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (batch["input_ids"],) if self.index == 0 else ()

    def _rest(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = {} if self.index == 0 else {"input_ids": batch["input_ids"]}
        return {"attention_mask": batch["attention_mask"], **ids}

    def _stage_for(self, examples: int, tokens: int) -> PipelineStage:
        """Return the stage for microbatches of this shape. It is known in advance, so that stages send no shapes."""
        ids = torch.zeros(examples, tokens, dtype=torch.int64, device=self.device)
        hidden = torch.zeros(*ids.shape, self.stage.width, device=self.device, dtype=self.stage.dtype)
        logits = torch.zeros(examples, self.stage.num_classes, device=self.device, dtype=self.stage.dtype)
        return PipelineStage(
            self.stage,
            self.index,
            self.num_stages,
            self.device,
            input_args=ids if self.index == 0 else hidden.requires_grad_(),
            output_args=(logits if self.is_last else hidden).requires_grad_(),
            group=self.process_group,
        )


class _Stage(nn.Module):
    """The model of transformers with the blocks of one stage. The hidden states it receives replace its embeddings."""

    def __init__(self, model: PreTrainedModel, index: int, num_stages: int, exact_adjoint: bool = False) -> None:
        super().__init__()
        blocks = blocks_of(model)
        if len(blocks) < num_stages:
            raise ValueError(
                f"pipeline_parallel_size = {num_stages} is above the model's {len(blocks)} blocks: give fewer"
            )
        bounds = [round(stage * len(blocks) / num_stages) for stage in range(num_stages + 1)]
        transformer: Any = model.transformer
        memo: dict[int, Any] = {id(transformer.h): nn.ModuleList(blocks[bounds[index] : bounds[index + 1]])}
        if index > 0:
            memo |= {
                id(transformer.wte): _Received(exact_adjoint),
                id(transformer.wpe): _Nothing(),
                id(transformer.drop): nn.Identity(),
            }
        self.is_last = index == num_stages - 1
        if not self.is_last:
            memo |= {id(transformer.ln_f): nn.Identity(), id(model.score): nn.Identity()}
        self.model: Any = copy.deepcopy(model, memo)
        self.width, self.dtype = model.config.hidden_size, model.dtype
        self.num_classes = int(model.config.num_labels or 0)

    def forward(self, x: Tensor, attention_mask: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """Map token ids (B, T), or hidden states (B, T, D) after the first stage, to the same or logits (B, C)."""
        if input_ids is None:
            input_ids = x
        else:
            self.model.transformer.wte.hidden = x
        if self.is_last:
            return self.model(input_ids, attention_mask=attention_mask).logits.to(self.dtype)
        return self.model.transformer(input_ids, attention_mask=attention_mask).last_hidden_state


class _Received(nn.Module):
    """Replace the token embedding: return what the previous stage has sent."""

    hidden: Tensor

    def __init__(self, exact_adjoint: bool) -> None:
        super().__init__()
        self.exact_adjoint = exact_adjoint

    def forward(self, input_ids: Tensor) -> Tensor:
        if not self.exact_adjoint:
            return self.hidden
        return self.hidden * (self.hidden != 0)  # lost elements are exactly zero, others hardly ever


class _Nothing(nn.Module):
    """Replace the position embedding, which the first stage has added already."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)
