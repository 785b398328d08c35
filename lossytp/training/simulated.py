"""How long a training step would take on the link that a configuration describes."""

from typing import Any

from lossytp.network.algorithms import algorithm_named
from lossytp.network.fec import Fec
from lossytp.network.packets import Wire
from lossytp.network.repair import Retransmit
from lossytp.network.repairs import repair_named
from lossytp.network.timing import step_seconds
from lossytp.network.transport import BestEffort, Path
from lossytp.training.config import TrainConfig

SAMPLES = 20  # of a step, each of some dozen collectives


def simulated_step_seconds(config: TrainConfig, shape: Any, tokens: float, compute_s: float) -> float | None:
    """Expected seconds of a step of `tokens`, padding included, that takes `compute_s` without a network.

    Messages are best-effort and patient, as training's are: nothing is late that training did not lose. `compute_s` is
    a measured step: on virtual ranks all ranks' work in one process, under torchrun the real messages too.

    None where no link is described, and where `lossytp.network.timing` does not know what is sent: other parallelisms
    than the tensor-parallel one, sequence parallelism, algorithms without a schedule, repairs that send packets of
    their own, links that differ, losses in a part of the traffic, frozen blocks.

    Args:
        shape: the model's configuration, as transformers has it.
    """
    algorithm, ranks = algorithm_named(config.algorithm), config.tensor_parallel_size
    scope = (config.lossy_direction, config.lossy_module, config.lossy_layers, config.lossy_phase, config.lossy_links)
    if (
        config.link_gbits is None
        or ranks == 1
        or config.data_parallel_size * config.pipeline_parallel_size > 1
        or config.sequence_parallel
        or config.control is not None
        or config.unfreeze_last_layers is not None
        or any(value is not None for value in scope)
        or isinstance(repair_named(config.repair), Fec | Retransmit)
        or algorithm.schedule is None
    ):
        return None
    path = Path(
        bandwidth_bits_per_s=config.link_gbits * 1e9,
        round_trip_s=config.round_trip_us * 1e-6,
        wire=Wire(mtu_bytes=config.mtu_bytes),
    )
    half = config.bf16 or config.fp16 or config.wire_dtype == "bf16"
    portions, itemsize = config.gradient_accumulation_steps, 2 if half else 4
    elements = max(1, round(tokens / portions)) * shape.hidden_size
    num_packets = algorithm.schedule.num_packets(elements, itemsize, ranks, path.wire)
    seconds = step_seconds(
        config.algorithm,
        num_layers=shape.num_hidden_layers * portions,
        tokens=elements // shape.hidden_size,
        width=shape.hidden_size,
        compute_s=compute_s,
        itemsize=itemsize,
        ranks=ranks,
        path=path,
        transport=BestEffort.patient(num_packets, path),
        process=config.process(),
        samples=SAMPLES,
        seed=config.seed,
    )
    return float(seconds.mean())
