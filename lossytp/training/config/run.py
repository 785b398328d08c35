"""What every training run needs beside its data, in fine-tuning and in pretraining. Importing this costs no torch."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lossytp.training.config.combinations import check_blocks, check_combinations
from lossytp.training.config.groups import ComputeSettings, OptimisationSettings, WatchingSettings
from lossytp.training.config.parallelism import ParallelismSettings
from lossytp.training.shapes import shape_of


@dataclass(frozen=True, kw_only=True)
class RunSettings(WatchingSettings, OptimisationSettings, ParallelismSettings, ComputeSettings):
    """The settings of one training run, whatever it trains on: the loop, the engine and checkpoints need no others.

    Subclasses add the data, and implement the properties below.
    """

    betas: ClassVar[tuple[float, float]] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    curve_points: ClassVar[int] = 50
    """Training losses in a record: this many, or up to twice as many."""

    model_name: str = "gpt2-nano"

    @property
    @abstractmethod
    def steps(self) -> int:
        """Return the number of optimizer steps."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Return the kind of task, such as "classification"."""

    @property
    @abstractmethod
    def task(self) -> str:
        """Return what the run trains on, as messages and tables name it."""

    @property
    @abstractmethod
    def microbatches(self) -> int:
        """Return into how many microbatches a batch is split."""

    @property
    def threads(self) -> int:
        """Return how many threads compute microbatches side by side; 0 if one after another."""
        return 0

    @property
    def smallest_rate(self) -> float:
        """Return the learning rate at the end of its decay, as a share of its peak."""
        return 0.0

    def differences(self, written: dict[str, Any]) -> list[str]:
        """Return the names of the settings that differ from those `written`.

        A subclass leaves out those that may change when a run goes on.
        """
        ours = self.result_settings()
        return [name for name in {**ours, **written} if name not in ours or ours[name] != written.get(name, ...)]

    def compared(self, names: Sequence[str], written: dict[str, Any]) -> str:
        """Return the settings `names` of an earlier run, each beside its value now: "loss_rate = 0.1, not 0.2"."""
        ours = self.result_settings()
        found = []
        for name in names:
            then, now = written.get(name), ours.get(name)
            if name not in written:
                found.append(f"no {name}")
            elif isinstance(then, dict) or isinstance(now, dict):
                found.append(f"another {name}")
            else:
                found.append(f"{name} = {then!r}, not {now!r}")
        return "; ".join(found)

    def check_run(self) -> None:
        """Raise ValueError, with the settings and the fix, if some do not go together or do not suit the model."""
        check_combinations(self)
        shape = shape_of(self.model_name)
        if shape is not None:
            check_blocks(self, shape.layers)
