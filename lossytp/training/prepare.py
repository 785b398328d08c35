"""Prepare a converted model for training: check that it computes what the dense model does, freeze blocks."""

from typing import Any

import torch
from transformers import PreTrainedModel

from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.plans import blocks_of
from lossytp.training.optimizer import is_norm


def check_same_function(
    dense: PreTrainedModel, parallel: PreTrainedModel, network: LossyNetwork, rounding: float = 1e-4
) -> None:
    """Raise ValueError unless `parallel` on its device computes without losses what `dense` does, up to `rounding`."""
    probe = torch.arange(1, 17).view(2, 8)
    training = dense.training, parallel.training
    with network.reliable(), torch.no_grad():
        expected, actual = (
            model.eval()(probe.to(next(model.parameters()).device)).logits.cpu().double() for model in (dense, parallel)
        )
    dense.train(training[0])
    parallel.train(training[1])
    error = (actual - expected).abs().max() / expected.abs().max()
    if not error < rounding:
        raise ValueError(
            f"the parallel model's logits differ from the dense model's by {error:.1e} of the largest one, above the "
            f"{rounding:g} of rounding: report this model, or choose another implementation"
        )


def freeze_(model: PreTrainedModel, blocks_trained: int) -> None:
    """Train only the last blocks, the last norm and the head. A head that is tied to the embeddings trains them too."""
    blocks: Any = blocks_of(model)
    whole: Any = model
    head = whole.score if hasattr(whole, "score") else whole.lm_head
    model.requires_grad_(False)
    within = {module for block in blocks for module in block.modules()}
    norms = [module for module in model.base_model.modules() if is_norm(module) and module not in within]
    for module in (*blocks[len(blocks) - blocks_trained :], *norms, head):
        module.requires_grad_(True)
