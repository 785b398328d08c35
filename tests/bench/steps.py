"""Lines in one process: steps, decoding, evaluation, drawing, memory, import and the reproduction."""

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedModel,
)

import lossytp as ltp
from lossytp.training.models import load_model
from lossytp.training.shapes import PRESETS, gguf_file
from tests.bench.measure import Arms, Measured, NotHere, in_turns, line, one_thread

IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
GPT2_7M = PRESETS["gpt2-micro"]
GPT2_124M = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
LLAMA_15M = {
    "hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 16384, "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
MIXTURE = LLAMA_15M | {"intermediate_size": 448, "num_hidden_layers": 4, "num_local_experts": 4}
Way = tuple[float, int, dict[str, Any]]  # loss rate, ranks, settings of `parallelize`
LOSSES: dict[str, Way] = {
    "TP 4, no loss": (0.0, 4, {}),
    "TP 4, 0.1 %": (0.001, 4, {}),
    "TP 4, 1 %": (0.01, 4, {}),
    "TP 4, 10 %": (0.1, 4, {}),
    "TP 2, 1 %": (0.01, 2, {}),
    "TP 8, 1 %": (0.01, 8, {}),
}
OF_STEPS = dict.fromkeys(LOSSES, "at most 1.02") | {"TP 4, 10 %": "at most 1.10"}
ALGORITHMS = ("direct", "ring", "tree", "switch", "sender")
REPAIRS = ("rescale", "rescale_counted", "stale", "local", "fec(10, 8)", "retransmit(2)", "hadamard(64)")
REPAIRS += ("protect(0.01)", "protect_first(1)", "protect_layers(1, 1)")
WIRES = ("bf16", "int8", "fp8", "int4")
STREAMS: dict[str, dict[str, Any]] = {
    "own streams": {"reliable_gather": False},
    "own streams and copies": {"reliable_gather": False, "own_copies": True},
    "sequence-parallel, lossy gather": {"reliable_gather": False, "sequence_parallel": True},
}


def at_one_percent(ways: dict[str, dict[str, Any]]) -> dict[str, Way]:
    """Return ways of 4 ranks that lose 1 %."""
    return {name: (0.01, 4, settings) for name, settings in ways.items()}


def training_step(model: PreTrainedModel, tokens: Tensor, labels: Tensor) -> Callable[[], None]:
    """Return a function that takes a step of AdamW on one batch."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def parallel(dense: PreTrainedModel, ways: dict[str, Way]) -> dict[str, PreTrainedModel]:
    """Return the tensor-parallel copies of `dense`, of virtual ranks."""
    return {
        name: ltp.parallelize(
            dense, ltp.LossyNetwork(ltp.Bernoulli(loss_rate=rate)), tensor_parallel_size=ranks, **settings
        )
        for name, (rate, ranks, settings) in ways.items()
    }


def steps(
    dense: PreTrainedModel,
    ways: dict[str, Way],
    targets: dict[str, str],
    *,
    batch: tuple[int, int] = (8, 128),
    classes: int | None = None,
    others: dict[str, PreTrainedModel] | None = None,
) -> Measured:
    """Measure training steps of virtual ranks against the step of `dense`."""
    tokens = torch.randint(1, dense.config.vocab_size, batch)
    labels = torch.randint(classes, batch[:1]) if classes else tokens
    models = {"dense": dense} | (others or {}) | parallel(dense, ways)
    arms: Arms = {name: training_step(model, tokens, labels) for name, model in models.items()}
    return Measured(in_turns(arms), "dense", targets)


def gpt2(shape: dict[str, Any], **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**shape, **IDS, **changes))


def causal(family: str, shape: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
    return model


@line("Training step, GPT-2 7 M", "dense")
def step_gpt2_7m() -> Measured:
    """The sharded GPT-2 computes its activation in one kernel; one arm is the dense model with this kernel."""
    others = {"dense, one-kernel activation": gpt2(GPT2_7M, activation_function="gelu_pytorch_tanh")}
    return steps(gpt2(GPT2_7M), LOSSES, OF_STEPS, others=others)


@line("Training step, Llama 15 M", "dense")
def step_llama_15m() -> Measured:
    return steps(causal("llama", LLAMA_15M), LOSSES, OF_STEPS, batch=(4, 128))


@line("Training step, mixture of 4 experts", "dense")
def step_mixture() -> Measured:
    return steps(causal("mixtral", MIXTURE), LOSSES, OF_STEPS, batch=(4, 128))


@line("Training step, GPT-2 124 M", "dense")
def step_gpt2_124m() -> Measured:
    name = "TP 4, 1 %"
    return steps(gpt2(GPT2_124M), {name: LOSSES[name]}, {name: OF_STEPS[name]}, batch=(2, 64))


@line("Algorithms, GPT-2 7 M, TP 4, 1 %", "dense")
def algorithms() -> Measured:
    return steps(gpt2(GPT2_7M), at_one_percent({name: {"algorithm": name} for name in ALGORITHMS}), {})


@line("Repairs, GPT-2 7 M, TP 4, 1 %", "dense")
def repairs() -> Measured:
    targets = {"hadamard(64)": "at most 1.25"}
    return steps(gpt2(GPT2_7M), at_one_percent({name: {"repair": name} for name in REPAIRS}), targets)


@line("Quantised wire, GPT-2 7 M, TP 4, 1 %", "dense")
def quantised_wire() -> Measured:
    return steps(gpt2(GPT2_7M), at_one_percent({name: {"wire_dtype": name} for name in WIRES}), {})


@line("Own streams, language model GPT-2 7 M, TP 4, 1 %", "dense")
def own_streams_language_model() -> Measured:
    """Each rank computes the head for itself, at 4 times the cost."""
    return steps(gpt2(GPT2_7M), at_one_percent(STREAMS), {"own streams": "at most 1.30"})


@line("Own streams, classifier GPT-2 7 M, TP 4, 1 %", "dense")
def own_streams_classifier() -> Measured:
    torch.manual_seed(0)
    dense = GPT2ForSequenceClassification(GPT2Config(**GPT2_7M, **IDS, num_labels=8))
    return steps(dense, at_one_percent(STREAMS), {"own streams": "at most 1.15"}, classes=8)


@line("Decoding 24 tokens, GPT-2 7 M", "dense")
def decoding() -> Measured:
    dense = gpt2(GPT2_7M).eval()
    ways = {name: LOSSES[name] for name in ("TP 4, no loss", "TP 4, 1 %", "TP 4, 10 %")}
    prompt = torch.randint(1, dense.config.vocab_size, (1, 32))

    def decode(model: Any) -> None:
        with torch.inference_mode():
            model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=24,
                           max_new_tokens=24, pad_token_id=0)  # fmt: skip

    models = {"dense": dense} | parallel(dense, ways)
    return Measured(in_turns({name: partial(decode, model) for name, model in models.items()}, 15), "dense", {})


@line("Forward pass of smollm2-135m", "dense")
def evaluation() -> Measured:
    if gguf_file("smollm2-135m") is None:
        raise NotHere("smollm2-135m is not installed: run ./run_all.sh models")
    dense = load_model("smollm2-135m").eval()
    tokens = torch.randint(1, 40_000, (1, 128))

    def forward(model: PreTrainedModel) -> None:
        with torch.inference_mode():
            model(tokens, use_cache=False)

    name = "TP 3, 1 %"
    models = {"dense": dense} | parallel(dense, {name: (0.01, 3, {})})
    return Measured(
        in_turns({each: partial(forward, model) for each, model in models.items()}), "dense", {name: "at most 1.15"}
    )


def drawn_one_by_one(generator: np.random.Generator, rate: float) -> None:
    for _ in range(4):
        np.flatnonzero(generator.random(10**6) < rate)


def drawn_by_gaps(rate: float, packets: int) -> None:
    ltp.LossyNetwork(ltp.Bernoulli(loss_rate=rate)).lost_packets(0, 1, packets)


@line("Drawing the losses of 10^9 packets", "gaps")
def drawing() -> Measured:
    """Two generators draw one number a packet, for 4 * 10^6 packets.

    Philox makes the keyed streams. PCG64 is numpy's fastest, but no rank can compute another's numbers with it. The
    ratio tells how many times as long they take for a packet.
    """
    generators = {"Philox": np.random.Generator(np.random.Philox(0)), "PCG64": np.random.default_rng(0)}
    seconds: dict[str, list[float]] = {}
    targets, bases = {}, {}
    for rate in (1e-4, 1e-3, 1e-2, 1e-1):
        packets = round(min(10**9, 10**5 / rate))
        arms: Arms = {name: partial(drawn_one_by_one, each, rate) for name, each in generators.items()}
        arms["gaps"] = partial(drawn_by_gaps, rate, packets)
        of_rate = in_turns(arms, 11)
        scales = {name: 10**9 / (packets if name == "gaps" else 4 * 10**6) for name in of_rate}
        seconds |= {f"{name}, {rate:g}": [each * scales[name] for each in of_rate[name]] for name in of_rate}
        bases |= {f"{name}, {rate:g}": f"gaps, {rate:g}" for name in generators}
        if rate == 1e-3:
            targets = {f"{name}, {rate:g}": "at least 300" for name in generators}
    return Measured(seconds, bases, targets)


IMPORTS = """
import time
start = time.perf_counter()
import torch, transformers
from transformers import PreTrainedModel
middle = time.perf_counter()
import lossytp
lossytp.parallelize
print(middle - start, time.perf_counter() - start)
"""


@line("Importing lossytp with torch and transformers", "torch and transformers alone")
def importing() -> Measured:
    """The target is 0.3 s."""
    base, name = "torch and transformers alone", "and lossytp.parallelize"
    seconds: dict[str, list[float]] = {base: [], name: []}
    for _ in range(7):
        printed = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True).stdout
        for found, number in zip(seconds.values(), printed.split(), strict=True):
            found.append(float(number))
    return Measured(seconds, base, {name: "at most 0.3 s more"})


def peak_megabytes(way: Way | None) -> float:
    """Return the most memory that three steps of a process take, less what it had before."""
    one_thread()
    before = getrusage(RUSAGE_SELF).ru_maxrss
    model = gpt2(GPT2_7M)
    if way is not None:
        model = parallel(model, {"": way})[""]
    tokens = torch.randint(1, model.config.vocab_size, (8, 128))
    step = training_step(model, tokens, tokens)
    for _ in range(3):
        step()
    return (getrusage(RUSAGE_SELF).ru_maxrss - before) / 1024


@line("Peak memory of a training step, GPT-2 7 M (MB)", "dense")
def memory() -> Measured:
    name = "TP 4, 1 %"
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.bench.steps"])
    found: dict[str, list[float]] = {"dense": [], name: []}
    for _ in range(7):
        for arm, way in {"dense": None, name: LOSSES[name]}.items():
            with processes.Pool(1) as pool:
                found[arm].append(pool.apply(peak_megabytes, (way,)))
    return Measured(found, "dense", {name: "at most 1.15"})


@line("Reproduction by ./run_all.sh: the processor's time (s)", "published")
def reproduction() -> Measured:
    """The runs' own seconds, on one thread each, from the records."""
    runs = sorted(Path("results/laptop/runs").glob("*/record.json"))
    if not runs:
        raise NotHere("results/laptop has no runs: run ./run_all.sh")
    seconds = [
        sum(json.loads((folder / each.parent.name / each.name).read_text())["timing"]["total_seconds"] for each in runs)
        for folder in (Path("results/paper/runs"), Path("results/laptop/runs"))
    ]
    return Measured({"published": seconds[:1], f"{len(runs)} runs here": seconds[1:]}, "published", {})
