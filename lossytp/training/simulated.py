"""How long a training step would take on the link that a configuration describes."""

from typing import Any

import numpy as np

from lossytp.network.packets import Wire
from lossytp.network.timing import step_seconds
from lossytp.network.transport import BestEffort, Path, SelectiveRepeat, Transport
from lossytp.training.config import TrainConfig

SAMPLES = 20  # of a step, each of some dozen collectives
MOST_LOST, MOST_LOSSES = 0.9, 2**27  # share of the packets, and losses in all samples: beyond, timing takes minutes


def simulated_step_seconds(config: TrainConfig, shape: Any, tokens: float, compute_s: float) -> float | None:
    """Expected seconds of a step of `tokens`, padding included, that takes `compute_s` without a network.

    Messages that may lose packets are best-effort and patient: nothing is late that training did not lose. Where sums
    return reliably, the other half of the messages is sent again until it is there, by selective repeat at its best.
    `compute_s` is a measured step: on virtual ranks all ranks' work in one process, under torchrun the real messages
    too.

    None where no link is described, and where `lossytp.network.timing` does not know what is sent: other parallelisms
    than the tensor-parallel one, sequence parallelism, algorithms without a schedule, repairs that send packets of
    their own, links that differ, losses in a part of a phase, frozen blocks, forward sums that are sent again to
    recompute activations, gradients of copies whose all-reduce loses packets (one that loses none is not counted); and
    where what is sent again is lost more than `MOST_LOST`, or so often that timing it would take minutes.

    Args:
        shape: the model's configuration, as transformers has it.
    """
    wiring, ranks = config.wiring(), config.tensor_parallel_size
    algorithm = wiring.algorithm
    scope = (config.lossy_direction, config.lossy_module, config.lossy_layers, config.lossy_phase, config.lossy_links)
    if (
        config.link_gbits is None
        or ranks == 1
        or config.data_parallel_size * config.pipeline_parallel_size > 1
        or config.sequence_parallel
        or config.control is not None
        or config.unfreeze_last_layers is not None
        or config.gradient_checkpointing
        or config.replicated_gradients == "lossy"
        or any(value is not None for value in scope)
        or wiring.repair.sends_more
        or algorithm.schedule is None
    ):
        return None
    process = config.process()
    sent_again = config.reliable_gather and not algorithm.sum_reaches_all and process.loss_rate > 0
    if sent_again and process.loss_rate > MOST_LOST:
        return None
    path = Path(
        bandwidth_bits_per_s=config.link_gbits * 1e9,
        round_trip_s=config.round_trip_us * 1e-6,
        wire=Wire(mtu_bytes=config.mtu_bytes),
    )
    computed = "bf16" if config.bf16 or config.fp16 else "fp32"
    portions, itemsize = config.gradient_accumulation_steps, 4 if (config.wire_dtype or computed) == "fp32" else 2
    elements = max(1, round(tokens / portions)) * shape.hidden_size
    schedule, layers = algorithm.schedule, shape.num_hidden_layers * portions
    num_packets = schedule.num_packets(elements, itemsize, ranks, path.wire)
    transports: list[Transport] = [BestEffort.patient(num_packets, path)]
    if sent_again:
        packets = SAMPLES * 4 * layers * schedule.links(ranks) * schedule.messages(ranks) * num_packets
        if packets * process.loss_rate / (1 - process.loss_rate) > MOST_LOSSES:
            return None
        transports.append(SelectiveRepeat.prompt(path))
    seconds = [
        step_seconds(
            config.algorithm,
            num_layers=layers,
            tokens=elements // shape.hidden_size,
            width=shape.hidden_size,
            compute_s=compute_s,
            itemsize=itemsize,
            ranks=ranks,
            path=path,
            transport=transport,
            process=process,
            samples=SAMPLES,
            seed=config.seed,
        )
        for transport in transports
    ]
    return float(np.mean(seconds))
