"""The settings of parallelism beyond the tensor-parallel ranks: replicas, pipeline stages and implementation."""

from dataclasses import dataclass, replace
from typing import Literal

from lossytp.network.wiring import Wiring
from lossytp.parallel.layout import Layout
from lossytp.training.config.bounds import Count
from lossytp.training.config.network import NetworkSettings


@dataclass(frozen=True, kw_only=True)
class ParallelismSettings(NetworkSettings):
    """The layout of a training run over ranks, and how replicated parameters stay equal."""

    implementation: Literal["lossytp", "dtensor", "megatron", "custom", "pytorch"] = "lossytp"
    """Tensor-parallel layers of this project, of PyTorch (dtensor) or of Megatron-core; the last two need a process for
    each rank. Or whose DDP and FSDP: custom for this project's, pytorch for PyTorch's, which is the default."""
    data_parallel_size: Count = 1
    """Replicas that share each batch; needs torchrun."""
    data_parallel_type: Literal["ddp", "fsdp"] = "ddp"
    """Replicate the parameters, or shard them over the replicas."""
    pipeline_parallel_size: Count = 1
    """Pipeline stages; needs torchrun."""
    pipeline_schedule: Literal["gpipe", "1f1b"] = "gpipe"
    """Order in which a pipeline runs its microbatches."""
    pipeline_microbatches: Count = 4
    """Microbatches of a batch in a pipeline."""
    replicated_gradients: Literal["reliable", "lossy", "none"] = "reliable"
    """How ranks with their own streams average the gradients of replicated parameters; none lets copies drift."""
    resync_every: Count | None = None
    """Steps between resynchronisations, which set drifting copies to their mean."""
    exact_adjoint: bool = False
    """Let backward use what forward lost. In lossytp layers this is an ablation, since no sender knows what was lost.
    Between pipeline stages it is a repair, since the receiver knows. A run that has both uses it in both."""

    def layout(self, rank: int, world_size: int) -> Layout:
        """Return the run's layout over `world_size` processes, with this process's rank.

        Raises:
            ValueError: if the sizes need more or fewer processes.
        """
        layout = Layout(
            self.tensor_parallel_size, self.data_parallel_size, self.pipeline_parallel_size, rank, world_size
        )
        if self.tensor_parallel_layers != "lossytp" and layout.tensor_processes != self.tensor_parallel_size:
            needed = self.tensor_parallel_size * self.data_parallel_size * self.pipeline_parallel_size
            raise ValueError(
                f"implementation = {self.implementation!r} needs a process for each tensor-parallel rank: start with "
                f"torchrun --standalone --nproc_per_node {needed}"
            )
        if self.transport == "udp" and (world_size != self.tensor_parallel_size or world_size == 1):
            raise ValueError(
                "transport = 'udp' needs a process for each of 2 or more tensor-parallel ranks, and no others: start "
                f"with torchrun --standalone --nproc_per_node {max(2, self.tensor_parallel_size)}"
            )
        own_copies = self.replicated_gradients != "reliable" and layout.tensor_processes != self.tensor_parallel_size
        if own_copies and self.fully_sharded:
            raise ValueError(
                f"replicated_gradients = {self.replicated_gradients!r} does not work with fsdp, which would shard the "
                "axis on which a process holds its ranks' copies: choose ddp, or start with torchrun --standalone "
                f"--nproc_per_node {self.tensor_parallel_size * self.data_parallel_size}"
            )
        return layout

    @property
    def tensor_parallel_layers(self) -> str:
        """Return whose tensor-parallel layers run."""
        return "lossytp" if self.implementation in ("custom", "pytorch") else self.implementation

    @property
    def data_parallel_implementation(self) -> str | None:
        """Return whose DDP or FSDP replicas run, "custom" or "pytorch"; None without replicas."""
        if self.data_parallel_size == 1:
            return None
        return "custom" if self.implementation == "custom" else "pytorch"

    @property
    def loses_logits(self) -> bool:
        """Return whether evaluation's gather of vocabulary-parallel logits loses packets."""
        return False

    @property
    def splits_vocabulary(self) -> bool:
        """Return whether tensor-parallel ranks also share the vocabulary, and compute the training loss together."""
        return False

    @property
    def fully_sharded(self) -> bool:
        """Return whether replicas shard the parameters, and gather them over the lossy network."""
        return self.data_parallel_size > 1 and self.data_parallel_type == "fsdp"

    def wiring(self) -> Wiring:
        """Return how the tensor-parallel ranks exchange messages."""
        return replace(super().wiring(), exact_adjoint=self.exact_adjoint)
