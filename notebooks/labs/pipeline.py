"""Pipeline parallelism: each rank holds some of a transformer's blocks, and microbatches flow through the ranks.

torchrun --standalone --nproc_per_node 2 notebooks/labs/pipeline.py
torchrun --standalone --nproc_per_node 2 notebooks/labs/pipeline.py --pipeline_schedule 1f1b --loss_rate 0.02

Huang et al., "GPipe", NeurIPS 2019. Each rank is a stage. It receives hidden states from the stage before it, computes
its blocks, and sends the result on. In backward, gradients travel the other way. A batch is split into microbatches, so
that stages work at the same time. At the start of a batch, later stages wait for the first microbatch, and at its end,
earlier stages wait for the last gradients: this idle time is the bubble.

The transformer is a small GPT-2. It reads an image of 4 x 4 pixels as 16 tokens of 17 grey levels, and classifies the
digit at the last token. The last stage computes the training loss. Gradients reach every stage, and all of them train.
"""

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2ForSequenceClassification

from lab import BackendLabConfig, Model, Size, check_splits, load_digits, place, train
from lossytp.parallel.backend import this_device
from lossytp.parallel.pipeline import Pipeline, PipelineSchedule
from lossytp.training.command_line import parse, run_as_command
from lossytp.training.engine import connected_processes
from lossytp.training.settings import FASTEST, Count

GREY_LEVELS = 17
HEADS = 4


class PipelineLabConfig(BackendLabConfig):
    """A transformer on handwritten digits, and the network between its stages."""

    input_dim: Size | None = 16
    """Pixels per image after scaling, a square number. Each pixel is a token."""
    hidden_dim: Size = 64
    """Width of the transformer."""
    learning_rate: Annotated[float, Field(gt=0, le=FASTEST)] = 3e-3
    """Learning rate of Adam."""
    num_layers: Annotated[int, Field(ge=1, le=100)] = 4
    """Number of the transformer's blocks."""
    pipeline_schedule: PipelineSchedule = "gpipe"
    """Order of the microbatches' passes."""
    pipeline_microbatches: Count = 4
    """Number of microbatches in a batch."""


def transformer(config: PipelineLabConfig, pixels: int) -> GPT2ForSequenceClassification:
    """Return the whole model. Its weights depend only on the seed."""
    check_splits("hidden_dim", config.hidden_dim, HEADS, "heads")
    settings: dict[str, Any] = {
        "vocab_size": GREY_LEVELS + 1,
        "pad_token_id": GREY_LEVELS,  # no pixel has this level, since no image is padded
        "bos_token_id": None,
        "eos_token_id": None,
        "n_positions": pixels,
        "n_embd": config.hidden_dim,
        "n_layer": config.num_layers,
        "n_head": HEADS,
        "num_labels": config.num_classes,
        "use_cache": False,
    }
    no_dropout: dict[str, Any] = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return GPT2ForSequenceClassification(GPT2Config(**settings, **no_dropout))


def batch_of(images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
    """Return images (B, I) as tokens, and their labels."""
    tokens = (images * (GREY_LEVELS - 1)).round().long()
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return batch if labels is None else {**batch, "labels": labels}


def run(config: PipelineLabConfig) -> dict[str, Any]:
    """Train this process's stage of the transformer; return the result."""
    layout = place(config, needs_processes="pipeline")
    check_splits("batch_size", config.batch_size, config.pipeline_microbatches, "microbatches")
    device = this_device(layout.rank)
    with connected_processes(config, layout) as network:
        digits = load_digits(config, device)
        stages = init_device_mesh(device.type, (layout.world_size,)).get_group()

        def build() -> Model:
            whole: Any = transformer(config, digits.train[0].shape[1])
            pipeline = Pipeline(
                whole.to(device),
                stages,
                schedule=config.pipeline_schedule,
                num_microbatches=config.pipeline_microbatches,
                device=device,
            )

            def training_loss(images: Tensor, labels: Tensor) -> float | None:
                loss = pipeline.forward_backward(batch_of(images, labels))
                return None if loss is None else loss.item()

            return Model(pipeline.stage, training_loss, lambda images: pipeline.logits(batch_of(images)))

        return train("pipeline", config, digits, build, network)


def main() -> None:
    """Run the lab from the command line."""
    run(parse(PipelineLabConfig, __doc__))


if __name__ == "__main__":
    run_as_command(main)
