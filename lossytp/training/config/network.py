"""The settings of a lossy network: its loss process, its traffic, and the repair."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from lossytp.network.bernoulli import Bernoulli
from lossytp.network.checks import check_probability
from lossytp.network.gilbert_elliott import GilbertElliott
from lossytp.network.loss_process import LossProcess
from lossytp.network.loss_processes import loss_process_named
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.packets import Wire
from lossytp.network.presets import gilbert_elliott_preset
from lossytp.network.scope import Scope, layers_named, links_named
from lossytp.network.udp.network import UdpNetwork
from lossytp.network.wiring import Wiring
from lossytp.training.config.bounds import Count
from lossytp.training.config.settings import Settings

ON_UDP = {
    "algorithm": "direct",
    "repair": "zero",
    "reliable_gather": True,
    "sequence_parallel": False,
    "wire_dtype": None,
    "control": None,
}
"""The only values with which packets can really be sent."""


@dataclass(frozen=True, kw_only=True)
class NetworkSettings(Settings):
    """The tensor-parallel ranks, the network between them, and the seed of its losses."""

    tensor_parallel_size: Count = 4
    """Tensor-parallel ranks: spread over the processes under torchrun, otherwise virtual ranks."""
    loss_type: str = "ber"
    """Loss process: ber (Bernoulli), g-e (Gilbert-Elliott) or another of LOSS_PROCESSES: "correlated(shared=0.5)"."""
    loss_rate: float = 0.0
    """Stationary packet loss rate of every link, in [0, 1]."""
    mean_burst_packets: float | None = None
    """Mean run of consecutive losses, for loss types that have one: g-e, correlated."""
    ge_config: str | None = None
    """A Gilbert-Elliott preset by its id, instead of loss_rate and mean_burst_packets."""
    algorithm: str = "direct"
    """Collective algorithm: direct, ring, tree, switch or sender."""
    repair: str = "zero"
    """zero, rescale, rescale_counted, stale, local, fec(n, k), hadamard(block), retransmit(budget), protect(share), or
    several joined by +."""
    reliable_gather: bool = True
    """False also loses packets of sums on their way back. Each rank then has its own residual stream. FSDP's
    all-gathers and a pipeline's sends always lose packets."""
    sequence_parallel: bool = False
    """Reduce-scatter and all-gather around a sharded residual stream; lossytp layers only."""
    wire_dtype: str | None = None
    """Round messages to fp32 or bf16 for sending. If left out, keep their dtype. Lossytp layers only."""
    control: Literal["elements", "noise"] | None = None
    """Instead of packets, lose single elements (elements), or add Gaussian noise of equal squared error (noise)."""
    lossy_direction: str | None = None
    """Lose packets only in forward or backward."""
    lossy_module: str | None = None
    """Lose packets only in attention or mlp."""
    lossy_layers: str | None = None
    """Lose packets only in these transformer layers: first:stop, counted from 0."""
    lossy_phase: str | None = None
    """Lose packets only in the reduce or the gather phase."""
    lossy_links: str | None = None
    """Links that lose packets, such as 0>1,2>3, in every group of ranks; all if left out; -1 is the switch."""
    mtu_bytes: int = 1500
    """Packet size, headers included."""
    transport: Literal["simulated", "udp"] = "simulated"
    """udp really sends the packets, one rank per process; loss_type's losses come on top of the path's. Slow."""
    timeout_s: Annotated[float, Gt(0), Le(1e6)] = 1800.0
    """Seconds that a process waits for the others, at the start and in each exchange."""
    seed: Annotated[int, Ge(0), Lt(2**63)] = 1234
    """Seed of initial weights, data order, dropout and packet losses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("loss_rate", self.loss_rate)
        self.wiring()
        self.network()
        if self.transport == "udp":
            for name, needed in ON_UDP.items():
                if getattr(self, name) != needed:
                    raise ValueError(
                        f"{name} = {getattr(self, name)!r} does not work with transport = 'udp', which is built for "
                        f"{needed!r} alone: leave one out"
                    )

    def process(self) -> LossProcess:
        """Return the loss process of every link.

        Raises:
            ValueError: if the settings contradict each other.
        """
        if self.loss_type == "ber":
            for name in ("mean_burst_packets", "ge_config"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} = {getattr(self, name)!r} needs loss_type = 'g-e', not 'ber': change one")
            return Bernoulli(loss_rate=self.loss_rate)
        if self.loss_type != "g-e":
            if self.ge_config is not None:
                raise ValueError(
                    f"ge_config = {self.ge_config!r} needs loss_type = 'g-e', not {self.loss_type!r}: change one"
                )
            return loss_process_named(
                self.loss_type, loss_rate=self.loss_rate, mean_burst_packets=self.mean_burst_packets
            )
        if self.ge_config is not None:
            if self.loss_rate or self.mean_burst_packets is not None:
                raise ValueError(
                    f"ge_config = {self.ge_config!r} sets rate and burst: leave out loss_rate and mean_burst_packets"
                )
            return gilbert_elliott_preset(self.ge_config)
        if self.mean_burst_packets is None:
            raise ValueError("loss_type = 'g-e' needs ge_config, or loss_rate and mean_burst_packets: give one of them")
        return GilbertElliott.from_loss_and_burst(loss_rate=self.loss_rate, mean_burst_packets=self.mean_burst_packets)

    @property
    def process_rate(self) -> float:
        """Return the stationary loss rate of every link, also if a preset or a trace sets it, and not `loss_rate`."""
        return float(f"{self.process().loss_rate:.12g}")  # drops a closed form's last digits

    def check_forward(self) -> None:
        """Raise ValueError if only backward loses packets, so that an evaluation loses none."""
        if self.lossy_direction == "backward":
            raise ValueError("lossy_direction = 'backward' loses nothing in an evaluation: leave it out")

    def wiring(self) -> Wiring:
        """Return how the tensor-parallel ranks exchange messages."""
        return Wiring.named(
            algorithm=self.algorithm,
            repair=self.repair,
            reliable_gather=self.reliable_gather,
            sequence_parallel=self.sequence_parallel,
            wire_dtype=self.wire_dtype,
            control=None if self.control == "elements" else self.control,
        )

    def network(self) -> LossyNetwork:
        """Return a new network with these settings."""
        process = self.process()
        kind = UdpNetwork if self.transport == "udp" else LossyNetwork
        return kind(
            process if self.lossy_links is None else dict.fromkeys(links_named(self.lossy_links), process),
            seed=self.seed,
            wire=Wire(mtu_bytes=self.mtu_bytes, elements=1 if self.control == "elements" else None),
            scope=Scope(
                direction=self.lossy_direction,
                module=self.lossy_module,
                layers=None if self.lossy_layers is None else layers_named(self.lossy_layers),
                phase=self.lossy_phase,
            ),
        )
