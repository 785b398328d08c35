"""Pretraining: next-token prediction on packed blocks of text. It ends with a model that transformers reads.

Shapes: B blocks, T tokens a block.
"""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lossytp.parallel.deferred import deferred
from lossytp.parallel.replicas import local
from lossytp.training.config import PretrainConfig
from lossytp.training.files import write_atomically
from lossytp.training.models import build_language_model
from lossytp.training.objective import Objective
from lossytp.training.own_files import claim_files
from lossytp.training.pretraining.blocks import PackedBlocks, all_blocks, in_background, in_order
from lossytp.training.pretraining.model_card import model_card
from lossytp.training.pretraining.text import text_sha256, tokenizer_for, training_text, validation_text
from lossytp.training.pretraining.trigram import trigram_perplexity
from lossytp.training.progress import waiting
from lossytp.training.saved_models import MODEL_FILES, TOKENIZER_FILES, save_in_bfloat16
from lossytp.training.tokenizer import first_tokens, prompt, told_first_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lossytp.training.engine import Engine

CARD = "README.md"
FILES = (CARD, *MODEL_FILES, *TOKENIZER_FILES)
VALIDATION_BLOCKS = 512  # during the run, if eval_samples is not given
HELD_OUT_TOKENS = 2**20  # at its end
TRIGRAM_TOKENS = 2**26
SAMPLE_TOKENS = 40


class Pretraining(Objective[PretrainConfig]):
    """Packed blocks of text, and the cross-entropy of held-out ones."""

    name = "pretraining"
    score = "cross_entropy"
    keeps_checkpoint = True

    def __init__(self, config: PretrainConfig) -> None:
        super().__init__(config)
        train, held_out = training_text(config), validation_text(config)
        with waiting("pretraining: reading the text"):
            for text in (train, held_out):
                text.check()
            self._hash = in_background(text_sha256, config, daemon=True)  # needed by the first checkpoint
            self.tokenizer = tokenizer_for(config)
            size = config.block_size
            self.blocks = PackedBlocks(
                train,
                self.tokenizer,
                block_size=size,
                seed=config.seed,
                streaming=config.streaming,
                num_proc=config.num_proc,
            )
            blocks = config.eval_samples or max(1, HELD_OUT_TOKENS // size)
            self.validation = all_blocks(held_out, self.tokenizer, block_size=size, at_most=blocks)

    @property
    def sha256(self) -> str:  # type: ignore[override]
        with waiting("pretraining: hashing the text"):
            return self._hash.result()

    @staticmethod
    def data_sha256(config: PretrainConfig) -> str:
        with waiting("pretraining: hashing the text"):
            return text_sha256(config)

    @staticmethod
    def claim_folder(config: PretrainConfig) -> None:
        if config.save_model:
            claim_files(Path(config.output_dir), FILES)

    def dense_model(self) -> "PreTrainedModel":
        dense: Any = deferred(self._build) if self.config.deferred_init else self._build()
        length = prompt(self.tokenizer, self.config.prompt)["input_ids"].shape[1]
        positions = dense.config.max_position_embeddings
        if length >= positions:
            raise ValueError(
                f"prompt has {length} tokens, which leave none of {self.config.model_name}'s {positions} positions "
                "free: give a shorter one"
            )
        self._parameters = dense.num_parameters()
        return dense

    def _build(self) -> "PreTrainedModel":
        config = self.config
        return build_language_model(
            config.model_name, self.tokenizer, positions=config.block_size, dropout=config.dropout, seed=config.seed
        )

    def batch(self) -> dict[str, Tensor]:
        return _batch(self.blocks.batch(self.config.batch_size))

    def state_dict(self) -> dict[str, Any]:
        return self.blocks.state_dict()

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        self.blocks.load_state_dict(state)

    def scores(self, engine: "Engine", *, last: bool) -> list[dict[str, Any]]:
        config = self.config
        blocks = self.validation if last or config.eval_samples else self.validation[:VALIDATION_BLOCKS]
        parts = blocks.split(config.microbatch_size * config.data_parallel_size)
        return [{"cross_entropy": each} for each in engine.cross_entropies(map(_batch, parts))]

    def better(self, point: dict[str, Any]) -> float:
        return -super().better(point)

    def settle_(self, engine: "Engine") -> None:
        """Round the weights to bfloat16, as they are saved: the record then says how good the saved model is."""
        if self.config.save_model:
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    each = local(parameter)
                    each.copy_(each.to(torch.bfloat16))

    def save(self, engine: "Engine") -> None:
        if self.config.save_model:
            save_in_bfloat16(engine, self._build, Path(self.config.output_dir), self.tokenizer)

    def position(self) -> dict[str, int]:
        """Return where the last block that was trained on begins."""
        return dict(zip(("pass", "file", "document"), self.blocks.position, strict=True))

    def sample(self, engine: "Engine") -> str:
        start = prompt(self.tokenizer, self.config.prompt)
        room = engine.shape.max_position_embeddings - start["input_ids"].shape[1]
        with torch.random.fork_rng(), engine.network.reliable():
            torch.manual_seed(self.config.seed)
            ids = engine.generate(
                start, new_tokens=min(SAMPLE_TOKENS, room), tokenizer=self.tokenizer, do_sample=True, top_k=50
            )
        return str(self.tokenizer.decode(ids[0]))

    def described(self) -> dict[str, Any]:
        return {
            "sha256": self.sha256,
            "kind": self.config.kind,
            "metric": self.score,
            "majority_share": None,
            "subsets": [],
            "passes": self.blocks.passes,
            **told_first_tokens(self.tokenizer),
            "vocabulary": len(self.tokenizer),
            "validation_tokens": self.validation.numel(),
            **(self._trigram() if self.config.save_model else {}),
        }

    def outcome(self, evaluations: list[dict], simulated_step_s: float | None) -> dict[str, Any]:
        return {**super().outcome(evaluations, simulated_step_s), "parameters": self._parameters}

    def leave(self, record: dict[str, Any]) -> None:
        """Write the model's card."""
        if self.config.save_model and record["status"] == "finished":
            write_atomically(Path(self.config.output_dir) / CARD, model_card(record))

    def _trigram(self) -> dict[str, Any]:
        """Compute the perplexity of a trigram model of the training text, at most its first `TRIGRAM_TOKENS` tokens."""
        size, documents = self.config.block_size, self.blocks.text.documents()
        pieces = in_order((texts for _, texts in documents), self.tokenizer, size)
        number = min(TRIGRAM_TOKENS, self.config.tokens) // size
        with waiting("pretraining: counting trigrams, to compare the model with"):
            train = np.concatenate(list(islice(pieces, number)))
            held_out = self.validation[:, len(first_tokens(self.tokenizer)) :].numpy().ravel()
            perplexity = trigram_perplexity(train, held_out, len(self.tokenizer))
        return {"trigram_perplexity": perplexity, "trigram_tokens": len(train)}


def _batch(blocks: Tensor) -> dict[str, Tensor]:
    return {"input_ids": blocks, "labels": blocks}
