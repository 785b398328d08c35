"""Measure what losses do to a language model that continues prompts, token by token, with a cache.

Each prompt is decoded alone, so an all-reduce carries one token: D elements, in one packet or a few on each link. The
lossless continuation is the dense model's greedy one. Over a lossy network, the model continues the prompt greedily,
and then it scores the lossless continuation. Each estimate is the mean over draws of losses, with Student's interval,
for these prompts. Shapes: N prompts of P tokens, C tokens of a continuation, S draws.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lossytp.parallel.collectives import collective_of
from lossytp.parallel.convert import reliable_prefix
from lossytp.parallel.plans import blocks_of
from lossytp.study.statistics import t_interval
from lossytp.tolerance.config import Setup, ToleranceConfig, read_record
from lossytp.tolerance.measure import Measurement, check_same_settings, settings_of
from lossytp.training.files import write_atomically
from lossytp.training.progress import waiting
from lossytp.training.record import commit, environment

DECODING = "decoding.json"
GRAM = 4  # tokens of a sequence that is repeated in a degenerate continuation
REPEATED = 0.5  # share of a degenerate continuation's 4-grams that it had before


def degenerates(tokens: list[int]) -> bool:
    """Return whether at least half of a continuation's 4-grams occurred in it before."""
    grams = [tuple(tokens[first : first + GRAM]) for first in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) >= REPEATED


class Decoder(Measurement):
    """A model, prompts from a text, and their lossless continuations."""

    def __init__(self, config: ToleranceConfig) -> None:
        super().__init__(config)
        with waiting(f"{config.model_name}: continuing the prompts without losses"):
            self.continuations_NC = [self._continued(self.dense, prompt)[0] for prompt in self.blocks_NT]
            self.lossless_N = np.array([self._continued(self.dense, *given)[1] for given in self._pairs()])
        self.degenerate = float(np.mean([degenerates(each) for each in self.continuations_NC]))

    def _pairs(self) -> Iterator[tuple[Tensor, list[int]]]:
        return zip(self.blocks_NT, self.continuations_NC, strict=True)

    def rows(self, done: dict[tuple[Setup, str], dict], drawn: Callable[[], object]) -> Iterator[dict]:
        """Yield the rows as JSON-ready values, and write the record after each.

        Args:
            done: rows of an earlier run, from `load_decoded`.
            drawn: called after every draw.
        """
        rows = dict(done)
        for setup in self.config.setups():
            for prefill in self.config.listed("prefills"):
                with waiting(f"{setup.algorithm}, {setup.phase}, {setup.repair} at {setup.loss_rate:.3g}: decoding"):
                    rows[setup, prefill] = done.get((setup, prefill)) or self._row(setup, prefill, drawn)
                record = {
                    "config": settings_of(self.config),
                    "tensor_parallel_size": self.ranks,
                    "lossless": {"cross_entropy": float(self.lossless_N.mean()), "degenerate": self.degenerate},
                    "message": self.message_of_a_token(),
                    **self.first_tokens,
                    "rows": list(rows.values()),
                    "commit": commit(),
                    "environment": environment(),
                }
                text = json.dumps(record, indent=1, allow_nan=False) + "\n"
                write_atomically(Path(self.config.output_dir) / DECODING, text)
                yield rows[setup, prefill]

    def _row(self, setup: Setup, prefill: str, drawn: Callable[[], object]) -> dict[str, Any]:
        """Return a row of the table. Its estimates are named for what they count.

        `same`: tokens of a greedy continuation before it differs from the lossless one, at most C; `degenerate`: share
        of the greedy continuations that degenerate; `rise`: of the lossless continuation's cross-entropy, in nats a
        token; `packets`: sent for each token of a continuation, including those that the repair adds.
        """
        model, network = self.over(self.config.network(setup))
        same_SN, degenerate_SN, rise_SN = list[list[int]](), list[list[bool]](), list[np.ndarray]()
        for draw in range(self.config.decode_draws):
            with network.evaluation(draw):
                greedy = [self._continued(model, prompt, prefill=prefill) for prompt in self.blocks_NT]
                scores = [self._continued(model, *given, prefill=prefill)[1] for given in self._pairs()]
            pairs = zip(greedy, self.continuations_NC, strict=True)
            same_SN.append([first_difference(tokens, lossless) for (tokens, _), lossless in pairs])
            degenerate_SN.append([degenerates(tokens) for tokens, _ in greedy])
            rise_SN.append(np.array(scores) - self.lossless_N)
            drawn()
        counted: dict[str, Any] = {"same": same_SN, "degenerate": degenerate_SN, "rise": rise_SN}
        estimates = {name: t_interval(np.mean(each, axis=1)).as_json() for name, each in counted.items()}
        tokens = len(self.blocks_NT) * self.config.new_tokens * 2 * self.config.decode_draws
        sent = network.summary("evaluation")["packets"] / tokens
        row = {**setup._asdict(), "prefill": prefill, **estimates}
        return row | {"packets": sent, "draws": self.config.decode_draws}

    def _continued(
        self, model: Any, prompt_P: Tensor, given: list[int] | None = None, *, prefill: str = "lossy"
    ) -> tuple[list[int], float]:
        """Return a continuation of a prompt, greedy or `given`, and its mean cross-entropy in nats a token."""
        tokens, total = list[int](), 0.0
        with torch.no_grad(), self.autocast():
            ids_1P, collective, cache = prompt_P.unsqueeze(0), collective_of(model), None
            if prefill == "prefix" and collective is not None:
                cache = reliable_prefix(model, ids_1P[:, : self.config.prefix_tokens])
                ids_1P = ids_1P[:, self.config.prefix_tokens :]
            with collective.network.reliable() if collective and prefill == "reliable" else nullcontext():
                output = model(input_ids=ids_1P, past_key_values=cache, use_cache=True)
            logits_V, cache = output.logits[0, -1], output.past_key_values
            for number in range(self.config.new_tokens):
                log_probabilities_V = logits_V.double().log_softmax(0)
                tokens.append(int(log_probabilities_V.argmax()) if given is None else given[number])
                total -= float(log_probabilities_V[tokens[-1]])
                if number + 1 < self.config.new_tokens:
                    last = torch.tensor([[tokens[-1]]], device=self.device)
                    logits_V = model(input_ids=last, past_key_values=cache, use_cache=True).logits[0, -1]
        return tokens, total / len(tokens)

    def message_of_a_token(self) -> str:
        """Return in words how many packets a token is, by width, dtype and ranks."""
        setup = max(self.config.setups(), key=lambda each: each.phase == "both")  # the first, if none loses both ways
        settings = self.config.network(setup)
        comm, width = settings.comm(), self.dense.config.hidden_size
        size, block = comm.block(2 if self.config.bf16 else 4)
        capacity = settings.build().wire.elements_per_packet(size, block)
        ways = [each(width, tuple(range(self.ranks)), 1) for each in (comm.algorithm.reduce, comm.algorithm.gather)]
        links, packets = map(len, ways), [sum(hop.num_packets(capacity) for hop in hops) for hops in ways]
        there, back = (f"{hops} links, in {number} packets" for hops, number in zip(links, packets, strict=True))
        reliable = "" if setup.phase == "both" else ", which are neither lost nor counted"
        messages = 2 * len(blocks_of(self.dense))
        unit = f"{size} bytes" if block == 1 else f"{size / block:.3g} bytes"
        return (
            f"A token's message has {width} elements of {unit}. {setup.algorithm} sends it to the sum over {there} of "
            f"at most {capacity} elements, and the sum back over {back}{reliable}. A token has {messages} messages."
        )


def first_difference(tokens: list[int], lossless: list[int]) -> int:
    """Return how many tokens two continuations have in common at their beginning."""
    pairs = zip(tokens, lossless, strict=True)
    return next((number for number, (ours, theirs) in enumerate(pairs) if ours != theirs), len(tokens))


def load_decoded(config: ToleranceConfig) -> dict[tuple[Setup, str], dict]:
    """Return the rows of an earlier run in `output_dir`, which may have had other rates, repairs and prefills.

    Raises:
        ValueError: if the file is not such a record, or differs in other settings.
    """
    file = Path(config.output_dir) / DECODING

    def read(record: Any) -> tuple[dict[str, Any], dict[tuple[Setup, str], dict]]:
        return dict(record["config"]), {(Setup.of(row), row["prefill"]): row for row in record["rows"]}

    if (found := read_record(file, "record of decoding", read)) is None:
        return {}
    check_same_settings(config, found[0], file)
    return found[1]
