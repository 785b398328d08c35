"""Measure the rise of a language model's cross-entropy over lossy networks, without training.

The same blocks of text are scored without losses and with each draw of losses. A row's estimate is the mean over draws,
with Student's interval. Draws stop once this is narrow, so intervals of few draws are a little too narrow; equal
`min_draws` and `max_draws` avoid this. Shapes: N blocks, T tokens per block, S draws.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from lossytp.network.checks import check_at_most
from lossytp.parallel.convert import parallelize
from lossytp.study.analysis.real_model import COLLAPSE_NATS
from lossytp.study.statistics import Estimate, t_interval
from lossytp.tolerance.config import NO_REPAIR, Setup, ToleranceConfig, first_size
from lossytp.training.heads import GENERATION, answers
from lossytp.training.models import load_model, load_tokenizer
from lossytp.training.pretraining.blocks import all_blocks
from lossytp.training.pretraining.corpus import corpus
from lossytp.training.pretraining.token_losses import losses_by_block
from lossytp.training.progress import waiting
from lossytp.training.shapes import Shape, check_positions
from lossytp.training.tokenizer import check_tokenizer, told_first_tokens

ENOUGH = 0.2  # of the rise: a half-width at which a row is done
BLOCK_SIZE, TOKENS = 512, 2048  # of the text, if not given
HARMLESS = 0.01  # nats: below this, losses need no repair


class Row(NamedTuple):
    """One row of the table.

    Attributes:
        setup: the network and the repair.
        rise: rise of the cross-entropy, in nats a token.
        collapsed: the share of blocks whose cross-entropy rose by more than `COLLAPSE_NATS`.
        packets: packets sent in a draw, including those that the repair adds.
        rises: every draw's rise on every block (S, N).
    """

    setup: Setup
    rise: Estimate
    collapsed: float
    packets: float
    rises: list[list[float]]


class Measurement:
    """A model and a text, and `lossless`, their mean cross-entropy without losses.

    Raises:
        ValueError: if the model is not a language model, does not fit the tensor-parallel size or the block size, or
        if the text has too few blocks.
    """

    def __init__(self, config: ToleranceConfig) -> None:
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        tokenizer = load_tokenizer(config.model_name)
        self.dense: Any = load_model(config.model_name).eval()
        shape = self.dense.config
        if not answers(self.dense, GENERATION):
            raise ValueError(f"model_name = {config.model_name!r} is not a language model: give one")
        check_tokenizer(f"model_name = {config.model_name!r}", tokenizer, shape.vocab_size)
        positions = shape.max_position_embeddings
        block_size = config.block_size or min(BLOCK_SIZE, positions)
        check_positions(config.model_name, positions, block_size, setting="block_size")
        sizes = Shape.read(lambda setting: getattr(shape, setting, None))
        self.ranks = config.tensor_parallel_size or first_size(config.model_name, sizes)
        self.first_tokens = told_first_tokens(tokenizer)
        with waiting(f"{config.model_name}: reading the text, and scoring it without losses"):
            text, wanted = corpus(config.files(), split="validation"), config.blocks or max(1, TOKENS // block_size)
            blocks_NT = all_blocks(text, tokenizer, block_size=block_size, at_most=wanted)
            if config.blocks is not None:
                check_at_most(
                    "blocks", config.blocks, len(blocks_NT), f"no more than the text has, of {block_size} tokens"
                )
            self.blocks_NT = blocks_NT.to(self.device)
            self.lossless_N = self._score(self.dense.to(self.device))
        self.lossless = float(self.lossless_N.mean())

    def rows(self, done: dict[Setup, Row], drawn: Callable[[Setup, int], None]) -> Iterator[Row]:
        """Yield the rows. A repair is measured only where losses without one cost something.

        Args:
            done: rows that were measured before.
            drawn: called after every draw, with its number.
        """
        harmless = set()
        for setup in self.config.setups():
            if setup._replace(repair=NO_REPAIR) in harmless:
                continue
            with waiting(f"{setup.algorithm}, {setup.phase}, {setup.repair} at {setup.loss_rate:.3g}: scoring"):
                row = done.get(setup) or self._row(setup, drawn)
            if setup.repair == NO_REPAIR and row.rise.high < HARMLESS:
                harmless.add(setup)
            yield row

    def _row(self, setup: Setup, drawn: Callable[[Setup, int], None]) -> Row:
        config = self.config
        settings = config.network(setup)
        network = settings.network()
        model: Any = parallelize(self.dense, network, tensor_parallel_size=self.ranks, wiring=settings.wiring())
        rises_SN: list[np.ndarray] = []
        while len(rises_SN) < config.max_draws:
            with network.evaluation(len(rises_SN)):
                rises_SN.append(self._score(model) - self.lossless_N)
            drawn(setup, len(rises_SN))
            rise = t_interval(np.mean(rises_SN, axis=1))
            half = rise.high - rise.value
            if len(rises_SN) >= config.min_draws and half <= max(config.precision, ENOUGH * abs(rise.value)):
                break
        sent = float(network.summary("evaluation")["packets"]) / len(rises_SN)
        collapsed = float((np.array(rises_SN) > COLLAPSE_NATS).mean())
        return Row(setup, rise, collapsed, sent, [each.tolist() for each in rises_SN])

    def _score(self, model: Any) -> np.ndarray:
        """Return each block's mean cross-entropy of a token given the earlier ones (N,)."""
        on = self.device.type
        autocast = torch.autocast(on, dtype=torch.bfloat16) if self.config.bf16 else nullcontext()
        with autocast:
            return losses_by_block(model, self.blocks_NT).mean(1)
