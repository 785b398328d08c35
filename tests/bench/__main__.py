"""Ratios measured side by side in one run: `python -m tests.bench OUTPUT_FOLDER`.

Times alone mean little on a shared machine; the arms of a ratio take turns in an order drawn anew each round, on
one thread, and the ratio of their medians is reported beside both.
"""

import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedModel,
    logging,
)

import lossytp as ltp
from lossytp.training.files import write_atomically
from lossytp.training.models import load_model
from lossytp.training.shapes import PRESETS, gguf_file
from paper import timing as transport
from paper.timing import AllReduce, Channel, collective_times
from tests.bench.pretraining import pretraining_ratios

GPT2_SMALL = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


def interleaved(arms: dict[str, Callable[[], object]], rounds: int, label: str) -> dict[str, float]:
    """Median seconds of each arm; the arms run in turn, `rounds` times, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for count in tqdm(range(rounds + 1), desc=label, mininterval=5):
        for name, arm in random.sample(list(arms.items()), len(arms)):
            start = time.perf_counter()
            arm()
            if count:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def seconds_of_steps(
    models: dict[str, PreTrainedModel], tokens: torch.Tensor, labels: torch.Tensor, rounds: int, label: str
) -> dict[str, float]:
    """Median seconds of a training step of each model."""

    def step(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        model(tokens, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    arms: dict[str, Callable[[], object]] = {
        name: partial(step, model, torch.optim.AdamW(model.parameters())) for name, model in models.items()
    }
    return interleaved(arms, rounds, label)


def training_step_ratios(
    shape: dict, batch: int, length: int, rounds: int, ways: dict[str, dict], classes: int | None = None
) -> dict:
    """Virtual-rank training steps (TP 4, 1 % loss) against the dense transformers step; `ways` are their comms.

    The parallel models compute GPT-2's activation in one kernel, which the dense one does not: another arm, dense with
    that kernel, tells how much of the ratios is due to it. With `classes` they classify; without, they predict the
    next token, whose head each rank with a stream of its own computes for itself, at R times the cost.
    """
    torch.manual_seed(0)
    kind = GPT2ForSequenceClassification if classes else GPT2LMHeadModel
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "num_labels": classes or 2}
    dense = kind(GPT2Config(**shape, **ids))
    fused = kind(GPT2Config(**shape, **ids, activation_function="gelu_pytorch_tanh"))
    tokens = torch.randint(1, shape["vocab_size"], (batch, length))
    labels = torch.randint(classes, (batch,)) if classes else tokens

    networks = {name: ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.01)) for name in ways}
    models = {"dense": dense, "dense, one-kernel activation": fused} | {
        name: ltp.parallelize(dense, networks[name], tensor_parallel_size=4, **comm) for name, comm in ways.items()
    }
    seconds = seconds_of_steps(
        models, tokens, labels, rounds, f"step of {sum(p.numel() for p in dense.parameters()) / 1e6:.0f} M"
    )
    return {
        "parameters": sum(parameter.numel() for parameter in dense.parameters()),
        "tokens": batch * length,
        "seconds": seconds,
        "ratio to dense": {name: seconds[name] / seconds["dense"] for name in models},
        "targets": "direct at most 1.05, own streams at most 1.3",
        "observed_loss_rate": {
            name: network.counters.summary("training")["observed_loss_rate"] for name, network in networks.items()
        },
    }


def llama_step_ratio(rounds: int) -> dict:
    """A Llama's virtual-rank training step (TP 4, 1 % loss) against its own dense step."""
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA))
    tokens = torch.randint(1, LLAMA["vocab_size"], (8, 128))

    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.01))
    models = {"dense": dense, "direct": ltp.parallelize(dense, network, tensor_parallel_size=4)}
    seconds = seconds_of_steps(models, tokens, tokens, rounds, "step of a Llama")
    return {
        "parameters": dense.num_parameters(),
        "seconds": seconds,
        "ratio to dense": seconds["direct"] / seconds["dense"],
        "target": "at most 1.05",
    }


def smollm2_evaluation_ratio(rounds: int) -> dict | None:
    """The forward pass of smollm2-135m (TP 3, 1 % loss) against its dense one; None where it is not installed."""
    if gguf_file("smollm2-135m") is None:
        return None
    dense = load_model("smollm2-135m").eval()
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.01))
    models = {"dense": dense, "direct": ltp.parallelize(dense, network, tensor_parallel_size=3)}
    tokens = torch.randint(1, 40_000, (1, 256))

    def evaluate(model: PreTrainedModel) -> None:
        with torch.inference_mode():
            model(tokens, use_cache=False)

    seconds = interleaved({name: partial(evaluate, model) for name, model in models.items()}, rounds, "smollm2-135m")
    return {"seconds": seconds, "ratio to dense": seconds["direct"] / seconds["dense"], "target": "at most 1.15"}


LLAMA = {  # 14 M parameters
    "hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 16384, "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
DIRECT: dict[str, dict] = {"direct": {}}
STREAMS: dict[str, dict] = {
    **DIRECT,
    "direct, own streams": {"reliable_gather": False},
    "direct, own streams and copies": {"reliable_gather": False, "own_copies": True},
    "direct, sequence-parallel": {"reliable_gather": False, "sequence_parallel": True},
}
EVERY_WAY: dict[str, dict] = {
    **STREAMS,
    **{name: {"algorithm": name} for name in ("ring", "tree", "switch", "sender")},
    **{
        f"direct, {repair}": {"repair": repair}
        for repair in ("rescale", "rescale_counted", "stale", "local", "fec(10, 8)", "hadamard(64)", "retransmit(2)")
    },
}


def drawing_ratio() -> dict:
    """The losses of 10^9 packets at p = 10^-3 against one number a packet (2 * 10^7 of them, times fifty).

    One number a packet is drawn twice: by Philox, which the keyed streams are made of, and by numpy's default
    generator, the fastest there is but not one that a rank can compute for another's link.
    """
    rate = 1e-3
    generators = {"philox": np.random.Generator(np.random.Philox(0)), "pcg64": np.random.default_rng(0)}

    def one_number_a_packet(generator: np.random.Generator) -> list[np.ndarray]:
        return [np.flatnonzero(generator.random(10**6) < rate) for _ in range(20)]

    def gaps() -> int:
        network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=rate))
        return len(network.lost_packets(0, 1, 10**9))

    arms: dict[str, Callable[[], object]] = {
        f"one_number_a_packet_{name}_s": partial(one_number_a_packet, generator)
        for name, generator in generators.items()
    }
    seconds = interleaved({**arms, "gaps_s": gaps}, 15, "drawing losses")
    for name in arms:
        seconds[name] *= 50
    tracemalloc.start()
    lost = gaps()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "packets": 10**9,
        "lost": lost,
        **seconds,
        "ratio": seconds["one_number_a_packet_philox_s"] / seconds["gaps_s"],
        "ratio_to_pcg64": seconds["one_number_a_packet_pcg64_s"] / seconds["gaps_s"],
        "target": "at least 300",
        "peak_bytes_per_loss": peak_bytes / lost,
    }


def message_microseconds(process: object) -> float:
    """Microseconds to draw, count and return the losses of a message of 700 packets on one link."""
    network = ltp.LossyNetwork(process)
    messages = 20_000
    medians = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(messages):
            network.lost_packets(0, 1, 700)
        medians.append((time.perf_counter() - start) / messages * 1e6)
    return statistics.median(medians)


def timing_seconds() -> dict:
    """Seconds to time 10^6 collectives of about 1,000 packets at 1 %: a ring of 4, 24 messages of 42 packets each."""
    path = transport.Path(bandwidth_bits_per_s=100e9, round_trip_s=10e-6)
    senders = {
        "selective_repeat": transport.SelectiveRepeat(window_packets=256, timeout_s=40e-6),
        "go_back_n": transport.GoBackN(window_packets=256, timeout_s=40e-6),
        "best_effort": transport.BestEffort(deadline_s=50e-6),
    }
    processes = {
        "bernoulli": ltp.Bernoulli(loss_rate=0.01),
        "gilbert_elliott_burst_8": ltp.GilbertElliott.from_loss_and_burst(loss_rate=0.01, mean_burst_packets=8),
    }
    arms: dict[str, Callable[[], object]] = {
        f"{name}_{kind}_s": partial(
            collective_times,
            AllReduce(algorithm="ring", num_elements=4 * 42 * path.wire.elements_per_packet(4), ranks=4),
            Channel(path=path, transport=sender, process=process),
            samples=10**6,
        )
        for name, sender in senders.items()
        for kind, process in processes.items()
    }
    return {**interleaved(arms, 3, "timing 10^6 collectives"), "target": "under 10"}


def on_two_processes() -> dict:
    """The ratios of `tests.bench.processes`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "processes.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        subprocess.run([*launcher, "-m", "tests.bench.processes", str(file)], check=True)
        results: dict = json.loads(file.read_text(encoding="utf-8"))
    return results


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    burst = ltp.GilbertElliott.from_loss_and_burst(loss_rate=1e-3, mean_burst_packets=8)
    results = {
        "machine": {"processor": platform.machine(), "python": platform.python_version(), "torch": torch.__version__},
        "drawing": drawing_ratio(),
        "message_of_700_packets_us": {
            "bernoulli_0.001": message_microseconds(ltp.Bernoulli(loss_rate=1e-3)),
            "gilbert_elliott_0.001_burst_8": message_microseconds(burst),
            "target": "under 10",
        },
        "timing_of_10^6_collectives_of_1000_packets": timing_seconds(),
        "step_7M": training_step_ratios(PRESETS["gpt2-micro"], batch=8, length=128, rounds=15, ways=EVERY_WAY),
        "step_7M_classifier": training_step_ratios(
            PRESETS["gpt2-micro"], batch=8, length=128, rounds=15, ways=STREAMS, classes=8
        ),
        "step_llama": llama_step_ratio(rounds=15),
        "smollm2_evaluation": smollm2_evaluation_ratio(rounds=9),
        "pretraining": pretraining_ratios(),
        "on_two_processes": on_two_processes(),
        "step_124M": training_step_ratios(GPT2_SMALL, batch=4, length=64, rounds=9, ways=DIRECT),
    }
    text = json.dumps(results, indent=2)
    write_atomically(folder / "bench.json", text)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
