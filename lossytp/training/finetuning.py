"""Fine-tuning on a task: its examples in random order, its metrics, and its saved models."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lossytp.training.config import TrainConfig
from lossytp.training.finetuned import finetuned_on
from lossytp.training.models import build_model, check_configuration, load_tokenizer
from lossytp.training.objective import Objective
from lossytp.training.saved_models import BEST, LAST, check_folders, save_model
from lossytp.training.scoring import scores
from lossytp.training.tasks.data import Dataset, load_dataset, training_batches
from lossytp.training.tasks.metrics import time_to_accuracy
from lossytp.training.tokenizer import told_first_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lossytp.training.engine import Engine


def load_data(config: TrainConfig) -> Dataset:
    """Return the task's data as token ids."""
    return load_dataset(
        config.dataset,
        load_tokenizer(config.model_name),
        max_length=config.max_length,
        train_samples=config.max_samples,
        test_samples=config.eval_samples,
        task=config.definition(),
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
    def claim_folder(config: TrainConfig) -> None:
        if config.save_model:
            check_folders(Path(config.output_dir))

    def dense_model(self) -> "PreTrainedModel":
        config, task = self.config, self.data.task
        check_configuration(config.model_name, self.tokenizer, config.tensor_parallel_size, config.max_length)
        dense: Any = build_model(
            config.model_name,
            task.kind,
            labels=getattr(task, "labels", ()),
            tokenizer=self.tokenizer,
            dropout=config.dropout,
            seed=config.seed,
        )
        dense.config.update(finetuned_on(config))
        return dense

    def batch(self) -> dict[str, Tensor]:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        return {}  # the number of steps says it all

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        self._batches = self._from(steps)

    def scores(self, engine: "Engine", *, last: bool) -> list[dict[str, Any]]:
        return scores(engine, self.data)

    def patience_ends(self, since_best: int) -> bool:
        return self.config.patience is not None and since_best >= self.config.patience

    def improved(self, engine: "Engine") -> None:
        self._save(engine, BEST)

    def save(self, engine: "Engine") -> None:
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
            **told_first_tokens(self.tokenizer),
            "incomplete_rows": {"train": self.data.train.incomplete, "test": test.incomplete},
        }

    def outcome(self, evaluations: list[dict], simulated_step_s: float | None) -> dict[str, Any]:
        times = [time_to_accuracy(evaluations, target, simulated_step_s) for target in self.data.task.targets]
        return {
            "time_to_accuracy": time_to_accuracy(evaluations, self.config.target_accuracy, simulated_step_s),
            "times_to_targets": [time for time in times if time],
        }

    def _save(self, engine: "Engine", name: str) -> None:
        if self.config.save_model:
            save_model(engine, Path(self.config.output_dir) / name, self.tokenizer)

    def _from(self, step: int) -> Iterator[dict[str, Tensor]]:
        config = self.config
        return training_batches(self.data.train, batch_size=config.batch_size, seed=config.seed, skip=step)
