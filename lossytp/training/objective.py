"""Define the interface of what a run trains on: its batches, its evaluation, and the files that it writes."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch import Tensor

from lossytp.training.config import RunSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from lossytp.training.engine import Engine

Config = TypeVar("Config", bound=RunSettings)


class Objective(ABC, Generic[Config]):
    """The task of one run, for the training loop. Every process has one, and all read the same data in the same order.

    Args:
        config: the run's configuration.

    Raises:
        ValueError: if the data or the tokenizer cannot be used.
    """

    name: ClassVar[str]
    """What progress messages call the run."""
    score: ClassVar[str]
    """The metric whose spread over ranks is recorded."""
    keeps_checkpoint: ClassVar[bool] = False
    """Whether a finished run keeps its last checkpoint, so that it can be continued."""
    tokenizer: "PreTrainedTokenizerFast"
    sha256: str
    """The hash of the data."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @staticmethod
    @abstractmethod
    def data_sha256(config: Any) -> str:
        """Return the hash of the data that `config` names, as a record holds it."""

    @staticmethod
    @abstractmethod
    def claim_folder(config: Any) -> None:
        """Raise ValueError if the user's files are where the run will write; the first process calls this."""

    @abstractmethod
    def dense_model(self) -> "PreTrainedModel":
        """Return the model to train, before it is made parallel."""

    @abstractmethod
    def batch(self) -> dict[str, Tensor]:
        """Return the next batch of all replicas: `input_ids`, `labels` and what else the model takes."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, after the last batch: tensors, numbers, and lists of them."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """Continue from `state_dict()`, which was taken after the batch of step `steps`."""

    @abstractmethod
    def scores(self, engine: "Engine", *, last: bool) -> list[dict[str, Any]]:
        """Return the metrics over the current network, a dict for each rank that may differ.

        Args:
            engine: the model.
            last: whether the run ends here.
        """

    def better(self, point: dict[str, Any]) -> float:
        """Return a number that grows as evaluations get better."""
        return float(point[f"{self.score}_lossy"])

    def patience_ends(self, since_best: int) -> bool:
        """Return whether the run ends after this many evaluations in a row without a better one."""
        return False

    def improved(self, engine: "Engine") -> None:
        """Save, if wanted, a model that no earlier evaluation beats."""

    def settle_(self, engine: "Engine") -> None:
        """Change the trained weights to what will be saved, before the last evaluation."""

    def save(self, engine: "Engine") -> None:
        """Save the trained model, if wanted."""

    def position(self) -> dict[str, int]:
        """Return the position in the data, by name, for lines of progress; empty if it says nothing."""
        return {}

    def sample(self, engine: "Engine") -> str:
        """Return a text that the model writes; "" if it writes none."""
        return ""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Return the record's entry `data`."""

    def outcome(self, evaluations: list[dict], simulated_step_s: float | None) -> dict[str, Any]:
        """Return further entries of the record, such as when scores were reached."""
        return {"time_to_accuracy": None, "times_to_targets": []}

    def leave(self, record: dict[str, Any]) -> None:
        """Write files that explain the record; the first process calls this."""
