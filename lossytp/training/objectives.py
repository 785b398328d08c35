"""What a run trains on: fine-tuning on a task, or pretraining on text. Each has batches, scores and files."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lossytp.parallel.plans import deferred
from lossytp.parallel.replicas import gathered, local
from lossytp.training.batches import ANSWER_TOKENS, Dataset, evaluation_batches, load_dataset, training_batches
from lossytp.training.config import PretrainConfig, RunSettings, TrainConfig
from lossytp.training.engine import Engine
from lossytp.training.files import own_files, write_atomically
from lossytp.training.metrics import time_to_accuracy
from lossytp.training.models import (
    build_language_model,
    build_model,
    check_configuration,
    first_token_names,
    load_tokenizer,
    prompt,
)
from lossytp.training.progress import waiting
from lossytp.training.saved_models import (
    BEST,
    LAST,
    MODEL_FILES,
    TOKENIZER_FILES,
    check_folders,
    finetuned_on,
    model_card,
    save_in_bfloat16,
    save_model,
)
from lossytp.training.text import (
    PackedBlocks,
    all_blocks,
    in_background,
    text_sha256,
    tokenizer_for,
    training_text,
    validation_text,
)

if TYPE_CHECKING:
    import evaluate


Config = TypeVar("Config", bound=RunSettings)


class Objective(Generic[Config]):
    """The task of one run, for the training loop. Every process has one; all read the same data in the same order.

    A subclass adds `data_sha256` (the hash of the data that a configuration names), `check_folder` (raises ValueError
    if the user's files are where the run will write), `dense_model` (before it is made parallel), `batch` (of all
    replicas), `state_dict` and `load_state_dict` (the position in the data after a number of steps), `scores` (metrics
    over the current network, a dict for each rank that may differ) and `described` (the record's entry `data`).
    """

    name: ClassVar[str]
    """What progress messages call the run."""
    score: ClassVar[str]
    """The metric whose spread over ranks is recorded."""
    keeps_checkpoint: ClassVar[bool] = False
    """Whether a finished run keeps its last checkpoint, so that it can be continued."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def better(self, point: dict[str, Any]) -> float:
        """Return a number that grows as evaluations get better."""
        return float(point[f"{self.score}_lossy"])

    def patience_ends(self, since_best: int) -> bool:
        """Return whether the run ends after this many evaluations in a row without a better one."""
        return False

    def improved(self, engine: Engine) -> None:
        """Save, if wanted, a model that no earlier evaluation beats."""

    def round_weights_(self, engine: Engine) -> None:
        """Change the trained weights to what will be saved, before the last evaluation."""

    def position(self) -> dict[str, int]:
        """Return the position in the data, by name, for lines of progress; empty if it says nothing."""
        return {}

    def sample(self, engine: Engine) -> str:
        """Return a text that the model writes; "" if it writes none."""
        return ""

    def outcome(self, evaluations: list[dict]) -> dict[str, Any]:
        """Return further entries of the record, such as when scores were reached."""
        return {"time_to_accuracy": None, "times_to_targets": []}

    def leave(self, record: dict[str, Any]) -> None:
        """Write files that explain the record; the first process calls this."""


# Score a model on a task over the current network.
#
# Shapes: L ranks, B examples, C classes or options.


EVALUATION_BATCH = 64


def scores(engine: Engine, data: Dataset) -> list[dict[str, Any]]:
    """Compute the metrics on the test split and on each of its parts.

    Returns:
        One dict of metrics for each process that has results, or for each rank if ranks have their own streams.
    """
    score = _generated if data.task.kind == "generation" else _chosen
    return [each for theirs in gathered(score(engine, data), engine.network) for each in theirs]


def mean_over_ranks(everyones: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the mean over ranks of each metric of `scores`; None if a rank lacks the metric."""
    means: dict[str, float | None] = {}
    for metric in everyones[0]:
        values = [theirs[metric] for theirs in everyones]
        means[metric] = None if None in values else sum(values) / len(values)
    return means


def _chosen(engine: Engine, data: Dataset) -> list[dict[str, Any]]:
    logits: list[Tensor] = []
    order: list[int] = []
    for indices in evaluation_batches(data.test, batch_size=EVALUATION_BATCH):
        batch = data.test.batch(indices)
        del batch["labels"]
        answers = engine.logits(batch)  # (L, B, C)
        if answers is not None:
            order.extend(indices)
            logits.append(answers)
    if not logits:
        return []
    references = np.asarray(data.test.references)[order]
    options = max(each.shape[-1] for each in logits)  # batches may differ in their largest number of options
    padded = [torch.nn.functional.pad(each, (0, options - each.shape[-1]), value=-torch.inf) for each in logits]
    metric, parts = data.task.metric(), data.test.parts[order]
    return [_with_parts(metric, theirs.numpy(), references, parts) for theirs in torch.cat(padded, 1)]


def _with_parts(
    metric: "evaluate.Metric", predictions: np.ndarray, references: np.ndarray, parts: np.ndarray
) -> dict[str, Any]:
    """Return the metrics of all examples, and of each named part under names such as "accuracy_official"."""
    found = metric.compute(predictions=predictions, references=references)
    for part in filter(None, np.unique(parts)):
        of_part = metric.compute(predictions=predictions[parts == part], references=references[parts == part])
        found |= {f"{name}_{part}": value for name, value in of_part.items()}
    return found


def _generated(engine: Engine, data: Dataset) -> list[dict[str, Any]]:
    predictions: list[str] = []
    references: list[tuple[str, ...]] = []
    for indices in evaluation_batches(data.test, batch_size=EVALUATION_BATCH):
        prompts = data.test.prompts(indices)
        ids = engine.generate(prompts, new_tokens=ANSWER_TOKENS, tokenizer=data.tokenizer)
        answers = ids[:, prompts["input_ids"].shape[1] :]
        predictions += [text.strip() for text in data.tokenizer.batch_decode(answers, skip_special_tokens=True)]
        references += [data.test.answers[i] for i in indices]
    return [data.task.metric().compute(predictions=predictions, references=references)]


# Fine-tuning on a task: its examples in random order, its metrics, and its saved models.


def load_data(config: TrainConfig) -> Dataset:
    """Return the task's data as token ids."""
    return load_dataset(
        config.data.dataset,
        load_tokenizer(config.model_name),
        max_length=config.data.max_length,
        train_samples=config.data.max_samples,
        test_samples=config.compute.eval_samples,
        task=config.data.definition(),
    )


class FineTuning(Objective[TrainConfig]):
    """A task's examples, and the test split's metrics."""

    name = "training"
    score = "score"

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.data = load_data(config)
        self.tokenizer, self.sha256 = self.data.tokenizer, self.data.sha256
        self._batches = self._from(0)

    @staticmethod
    def data_sha256(config: TrainConfig) -> str:
        return load_data(config).sha256

    @staticmethod
    def check_folder(config: TrainConfig) -> None:
        if config.output.save_model:
            check_folders(Path(config.output.output_dir))

    def dense_model(self) -> PreTrainedModel:
        config, task = self.config, self.data.task
        check_configuration(
            config.model_name, self.tokenizer, config.network.tensor_parallel_size, config.data.max_length
        )
        dense: Any = build_model(
            config.model_name,
            task.kind,
            labels=getattr(task, "labels", ()),
            tokenizer=self.tokenizer,
            dropout=config.optimizer.dropout,
            seed=config.network.seed,
        )
        dense.config.update(finetuned_on(config))
        return dense

    def batch(self) -> dict[str, Tensor]:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        return {}  # the number of steps says it all

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        self._batches = self._from(steps)

    def scores(self, engine: Engine, *, last: bool) -> list[dict[str, Any]]:
        return scores(engine, self.data)

    def patience_ends(self, since_best: int) -> bool:
        return self.config.output.patience is not None and since_best >= self.config.output.patience

    def improved(self, engine: Engine) -> None:
        self._save(engine, BEST)

    def save(self, engine: Engine) -> None:
        self._save(engine, LAST)

    def described(self) -> dict[str, Any]:
        task, test = self.data.task, self.data.test
        chance = task.chance(list(test.references))
        return {
            "sha256": self.sha256,
            "train_examples": len(self.data.train),
            "test_examples": len(test),
            "kind": task.kind,
            "metric": task.metrics[0],
            "chance": chance["score"],
            "majority_share": chance.get("accuracy"),
            "subsets": [split for split in ("train", "test") if task.source.subset(split)],
            "cut_share": float(test.cut.mean()),
            **first_token_names(self.tokenizer),
            "incomplete_rows": {"train": self.data.train.incomplete, "test": test.incomplete},
        }

    def outcome(self, evaluations: list[dict]) -> dict[str, Any]:
        times = [time_to_accuracy(evaluations, target) for target in self.data.task.targets]
        return {
            "time_to_accuracy": time_to_accuracy(evaluations, self.config.output.target_accuracy),
            "times_to_targets": [time for time in times if time],
        }

    def _save(self, engine: Engine, name: str) -> None:
        if self.config.output.save_model:
            save_model(engine, Path(self.config.output.output_dir) / name, self.tokenizer)

    def _from(self, step: int) -> Iterator[dict[str, Tensor]]:
        config = self.config
        return training_batches(
            self.data.train, batch_size=config.optimizer.batch_size, seed=config.network.seed, skip=step
        )


# Pretraining: next-token prediction on packed blocks of text. It ends with a model that transformers reads.
#
# Shapes: B blocks, T tokens a block.


CARD = "README.md"
FILES = (CARD, *MODEL_FILES, *TOKENIZER_FILES)
VALIDATION_BLOCKS = 512  # during the run, if eval_samples is not given
HELD_OUT_TOKENS = 2**20  # at its end
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
            size = config.data.block_size
            self.blocks = PackedBlocks(
                train,
                self.tokenizer,
                block_size=size,
                seed=config.network.seed,
                streaming=config.data.streaming,
                num_proc=config.data.num_proc,
            )
            blocks = config.compute.eval_samples or max(1, HELD_OUT_TOKENS // size)
            self.validation = all_blocks(held_out, self.tokenizer, block_size=size, at_most=blocks)

    @property
    def sha256(self) -> str:
        with waiting("pretraining: hashing the text"):
            return self._hash.result()

    @staticmethod
    def data_sha256(config: PretrainConfig) -> str:
        with waiting("pretraining: hashing the text"):
            return text_sha256(config)

    @staticmethod
    def check_folder(config: PretrainConfig) -> None:
        if config.output.save_model:
            own_files(Path(config.output.output_dir), FILES)

    def dense_model(self) -> PreTrainedModel:
        dense: Any = deferred(self._build) if self.config.parallelism.deferred_init else self._build()
        length = prompt(self.tokenizer, self.config.data.prompt)["input_ids"].shape[1]
        positions = dense.config.max_position_embeddings
        if length >= positions:
            what = (
                f"prompt has {length} tokens, which leave none of {self.config.model_name}'s {positions} positions free"
            )
            raise ValueError(f"{what}: give a shorter one")
        self._parameters = dense.num_parameters()
        return dense

    def _build(self) -> PreTrainedModel:
        config = self.config
        return build_language_model(
            config.model_name,
            self.tokenizer,
            positions=config.data.block_size,
            dropout=config.optimizer.dropout,
            seed=config.network.seed,
        )

    def batch(self) -> dict[str, Tensor]:
        return _batch(self.blocks.batch(self.config.optimizer.batch_size))

    def state_dict(self) -> dict[str, Any]:
        return self.blocks.state_dict()

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        self.blocks.load_state_dict(state)

    def scores(self, engine: Engine, *, last: bool) -> list[dict[str, Any]]:
        config = self.config
        blocks = self.validation if last or config.compute.eval_samples else self.validation[:VALIDATION_BLOCKS]
        parts = blocks.split(config.optimizer.microbatch_size * config.parallelism.data_parallel_size)
        return [{"cross_entropy": each} for each in engine.cross_entropies(map(_batch, parts))]

    def better(self, point: dict[str, Any]) -> float:
        return -super().better(point)

    def round_weights_(self, engine: Engine) -> None:
        """Round the weights to bfloat16, as they are saved: the record then says how good the saved model is."""
        if self.config.output.save_model:
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    each = local(parameter)
                    each.copy_(each.to(torch.bfloat16))

    def save(self, engine: Engine) -> None:
        if self.config.output.save_model:
            save_in_bfloat16(engine, self._build, Path(self.config.output.output_dir), self.tokenizer)

    def position(self) -> dict[str, int]:
        """Return where the last block that was trained on begins."""
        return dict(zip(("pass", "file", "document"), self.blocks.position, strict=True))

    def sample(self, engine: Engine) -> str:
        start = prompt(self.tokenizer, self.config.data.prompt)
        room = engine.shape.max_position_embeddings - start["input_ids"].shape[1]
        with torch.random.fork_rng(), engine.network.reliable():
            torch.manual_seed(self.config.network.seed)
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
            **first_token_names(self.tokenizer),
            "vocabulary": len(self.tokenizer),
            "validation_tokens": self.validation.numel(),
        }

    def outcome(self, evaluations: list[dict]) -> dict[str, Any]:
        return {**super().outcome(evaluations), "parameters": self._parameters}

    def leave(self, record: dict[str, Any]) -> None:
        """Write the model's card."""
        if self.config.output.save_model and record["status"] == "finished":
            write_atomically(Path(self.config.output.output_dir) / CARD, model_card(record))


def _batch(blocks: Tensor) -> dict[str, Tensor]:
    return {"input_ids": blocks, "labels": blocks}


def objective_of(config: RunSettings) -> type[Any]:
    """Return the class of the run's objective."""
    return Pretraining if isinstance(config, PretrainConfig) else FineTuning
