"""Simulate how long a training step would take on the link that a configuration describes."""

from typing import Any

import numpy as np

from lossytp.network.packets import Wire
from lossytp.network.replay import Replay
from lossytp.network.timing import AllReduce, Channel, step_seconds
from lossytp.network.transport import BestEffort, Path, SelectiveRepeat, Transport
from lossytp.training.config import RunSettings

SAMPLES = 20  # simulated steps, each with a few dozen collectives
MOST_LOST, MOST_LOSSES = 0.9, 2**27  # loss rate, and losses in all samples, above which timing takes minutes


def simulated_step_seconds(config: RunSettings, shape: Any, tokens: float, compute_s: float) -> float | None:
    """Return the expected seconds of a training step over the configured link.

    Messages that may lose packets are best-effort, with a deadline so late that only lost packets are missing. If sums
    return reliably, the other half of the messages is retransmitted until delivered, by ideal selective repeat.

    Args:
        config: the run's configuration.
        shape: the model's configuration, as in transformers.
        tokens: mean tokens of a step, padding included.
        compute_s: measured seconds of a step. With virtual ranks they hold the work of all ranks in one process; under
            torchrun they hold the real messages too.

    Returns:
        The seconds; None if no link is configured, and in these cases, which `lossytp.network.timing` does not cover:

        - data, pipeline or sequence parallelism, or a control;
        - an algorithm without a schedule, a repair that sends extra packets, or a recording of each link;
        - losses limited to a direction, module, layer range, phase or some links;
        - frozen blocks, or gradient checkpointing, which repeats forward messages;
        - a lossy all-reduce of the gradients of copies (a reliable one is not counted);
        - retransmission at a loss rate above `MOST_LOST`, or with more losses than `MOST_LOSSES`.
    """
    wiring, ranks, process = config.wiring(), config.tensor_parallel_size, config.process()
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
        or isinstance(process, Replay)
    ):
        return None
    sent_again = config.reliable_gather and not algorithm.sum_reaches_all and process.loss_rate > 0
    if sent_again and process.loss_rate > MOST_LOST:
        return None
    path = Path(
        bandwidth_bits_per_s=config.link_gbits * 1e9,
        round_trip_s=config.round_trip_us * 1e-6,
        wire=Wire(mtu_bytes=config.mtu_bytes),
    )
    computed = "bf16" if config.bf16 or config.fp16 else "fp32"
    microbatches, itemsize = config.microbatches, 4 if (config.wire_dtype or computed) == "fp32" else 2
    elements = max(1, round(tokens / microbatches)) * shape.hidden_size
    schedule, layers = algorithm.schedule, shape.num_hidden_layers * microbatches
    num_packets = schedule.num_packets(elements, itemsize, ranks, path.wire)
    transports: list[Transport] = [BestEffort.patient(num_packets, path)]
    if sent_again:
        packets = SAMPLES * 4 * layers * schedule.links(ranks) * schedule.messages(ranks) * num_packets
        if packets * process.loss_rate / (1 - process.loss_rate) > MOST_LOSSES:
            return None
        transports.append(SelectiveRepeat.prompt(path))
    seconds = [
        step_seconds(
            AllReduce(algorithm=config.algorithm, num_elements=elements, itemsize=itemsize, ranks=ranks),
            Channel(path=path, transport=transport, process=process),
            num_layers=layers,
            compute_s=compute_s,
            samples=SAMPLES,
            seed=config.seed,
        )
        for transport in transports
    ]
    return float(np.mean(seconds))
