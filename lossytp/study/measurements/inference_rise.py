"""Measure, without training, how much a run's packet losses raise the pretrained model's cross-entropy.

It takes seconds an arm.

Shapes: N texts, B texts of a batch, T tokens a text, S draws of losses.
"""

from typing import Any

import numpy as np

from lossytp.network.checks import check_at_least
from lossytp.parallel.convert import parallelize
from lossytp.study.statistics import Estimate, t_interval
from lossytp.training.config import TrainConfig
from lossytp.training.models import load_model, load_tokenizer
from lossytp.training.pretraining.blocks import all_blocks
from lossytp.training.pretraining.corpus import corpus
from lossytp.training.pretraining.token_losses import token_losses


class InferenceProbe:
    """A pretrained language model, some texts, and its cross-entropy on them without losses.

    The texts form batches of the training run's shape, so that messages have as many packets as in training.

    Args:
        model_name: the model that runs start from.
        batch_size: B.
        length: T.
        batches: number of batches, so N = B * batches.
        text: files by pattern, of the kind that the model was pretrained on. (On text that it predicts badly, losses
            hardly show.)

    Raises:
        ValueError: if `batches` is below 1.
    """

    def __init__(self, model_name: str, *, batch_size: int, length: int, batches: int = 2, text: str) -> None:
        check_at_least("batches", batches, 1)
        self.dense: Any = load_model(model_name).eval()
        documents, number = corpus(text, split="validation"), batch_size * batches
        blocks_NT = all_blocks(documents, load_tokenizer(model_name), block_size=length, at_most=number)
        self.batches_BT = blocks_NT.split(batch_size)
        self.lossless = self._score(self.dense)

    def rise(self, config: TrainConfig, *, draws: int = 6) -> Estimate:
        """Return the rise of the cross-entropy over a run's network, in nats a token.

        The interval is Student's over S draws of losses.
        """
        return t_interval(self.rises(config, draws))

    def rises(self, config: TrainConfig, draws: int) -> np.ndarray:
        """Return the rise of each draw of losses, (S,)."""
        network = config.network()
        model: Any = parallelize(
            self.dense, network, tensor_parallel_size=config.tensor_parallel_size, wiring=config.wiring()
        )
        rises_S = []
        for draw in range(draws):
            with network.evaluation(draw):
                rises_S.append(self._score(model) - self.lossless)
        return np.array(rises_S)

    def _score(self, model: Any) -> float:
        """Return the mean cross-entropy of a token given the earlier ones, over texts and ranks."""
        return float(np.mean([token_losses(model, batch_BT).mean().item() for batch_BT in self.batches_BT]))
