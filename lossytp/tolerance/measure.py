"""Measure the rise of a language model's cross-entropy over lossy networks, without training.

Sequences of text are scored without losses and with each draw of losses. Several share a message, as they do in a
batch. Critical packets are found first (`lossytp.tolerance.packets`), and delivered while losses are drawn: they are
few and cost much, so whether a draw hits one would decide its result. What they cost follows by arithmetic.

Shapes: N sequences, B of them in one message, T tokens of each; R ranks, M elements of a message, D model width; S
draws.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lossytp.network.checks import check_at_most, refuse_if
from lossytp.network.repairs import repair_named
from lossytp.network.scope import Site
from lossytp.parallel.collectives import LossyCollective, Message
from lossytp.parallel.convert import parallelize
from lossytp.parallel.group import RankGroup
from lossytp.parallel.plans import blocks_of
from lossytp.study.statistics import Estimate, crossed_interval, t_interval
from lossytp.tolerance.config import NO_REPAIR, OTHER_FOLDER, NetworksConfig, Setup, ToleranceConfig, read_record
from lossytp.tolerance.packets import Found, Packet, SelectiveNetwork, Watch, chosen_in, search, standing_out
from lossytp.training.corpus import corpus
from lossytp.training.files import write_atomically
from lossytp.training.groups import NetworkSettings
from lossytp.training.models import GENERATION, answers, check_tokenizer, first_token_names, load_model, load_tokenizer
from lossytp.training.progress import waiting
from lossytp.training.record import check_same_trace, commit, environment, trace_sha256
from lossytp.training.shapes import Shape, check_positions
from lossytp.training.text import all_blocks, token_losses

INDEPENDENT, FEWEST = "ber", 3  # the loss type whose packets are lost independently, and draws of the others
ERROR_DRAWS = 2  # of losses, for the squared errors of repairs
NORMALISED = 0.5  # of a block's sums: how far its output may be from them and its input, if it adds them as they are


def language_model(config: NetworksConfig) -> tuple[Any, Any, int]:
    """Return the tokenizer, the dense model, on a GPU if there is one, and the number of tensor-parallel ranks.

    Raises:
        ValueError: if the model is not a language model, or does not fit the tensor-parallel size.
    """
    tokenizer = load_tokenizer(config.model_name)
    dense: Any = load_model(config.model_name).eval()
    if not answers(dense, GENERATION):
        raise ValueError(f"model_name = {config.model_name!r} is not a language model: give one")
    check_tokenizer(f"model_name = {config.model_name!r}", tokenizer, dense.config.vocab_size)
    ranks: Any = config.ranks(Shape.read(lambda setting: getattr(dense.config, setting, None)))
    return tokenizer, dense.to("cuda" if torch.cuda.is_available() else "cpu"), ranks


class Measurement:
    """A model and a text, of N blocks.

    Raises:
        ValueError: if the model is not a language model, does not fit the tensor-parallel size or the block size, or
        if the text has too few blocks.
    """

    BLOCK_SIZE, TOKENS = 128, 4096  # if not given

    def __init__(self, config: ToleranceConfig) -> None:
        self.config = config
        tokenizer, self.dense, self.ranks = language_model(config)
        self.device, shape = self.dense.device, self.dense.config
        positions = shape.max_position_embeddings
        block_size = config.prompt_tokens if config.decode else config.block_size or min(self.BLOCK_SIZE, positions)
        longest = block_size + config.new_tokens if config.decode else block_size
        setting = "prompt_tokens + new_tokens" if config.decode else "block_size"
        check_positions(config.model_name, positions, longest, setting=setting)
        self.first_tokens = first_token_names(tokenizer)
        name, asked = ("prompts", config.prompts) if config.decode else ("blocks", config.blocks)
        with waiting(f"{config.model_name}: reading the text"):
            text = corpus(config.files(), split="validation")
            wanted = asked or max(2, config.batch_size, self.TOKENS // block_size)
            blocks_NT = all_blocks(text, tokenizer, block_size=block_size, at_most=wanted)
            if asked is not None:
                check_at_most(name, asked, len(blocks_NT), f"no more than the text has, of {block_size} tokens")
            one = (
                f"has one sequence of {block_size} tokens, which shows no interval: give more, or a smaller block_size"
            )
            refuse_if(len(blocks_NT) < 2 and not config.decode, "text", config.text_name(), one)
            self.blocks_NT = blocks_NT.to(self.device)
        self.messages = self.blocks_NT.split(config.batch_size)

    @cached_property
    def first_B(self) -> np.ndarray:
        """Return the cross-entropies of the first message's sequences in the dense model."""
        with waiting(f"{self.config.model_name}: scoring the first sequences without losses"):
            return self.score(self.dense, self.messages[0])

    def rounding(self, lossless: "Lossless") -> Estimate:
        """Return what rounding for sending costs alone, in nats a token."""
        dense = [self.first_B, *(self.score(self.dense, ids_BT) for ids_BT in self.messages[1:])]
        return t_interval(np.array(lossless.scores) - np.concatenate(dense))

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which models run, for `bf16`."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.config.bf16 else nullcontext()

    def score(self, model: Any, ids_BT: Tensor) -> np.ndarray:
        """Return each sequence's mean cross-entropy of a token given the earlier ones, (B,)."""
        with self.autocast():
            return token_losses(model, ids_BT).cpu().numpy().astype(np.float64).mean(1)

    def over(self, settings: NetworkSettings, **changes: Any) -> tuple[Any, SelectiveNetwork]:
        """Return the model over a network, and the network. `changes` are those of how ranks exchange messages."""
        network: Any = settings.build(SelectiveNetwork)
        comm = replace(settings.comm(), **changes)
        how: dict[str, Any] = {"tensor_parallel_size": self.ranks, "comm": comm, "share_memory": True}
        return parallelize(self.dense, network, **how).eval(), network


class Rises(NamedTuple):
    """What draws of losses cost, with the critical packets delivered if the repair lets them be chosen.

    Attributes:
        setup: the network and the repair.
        rises: every draw's rise on every sequence (S, N), in nats a token.
        packets: packets sent in a draw, including those that the repair adds.
        delivered: whether the critical packets were delivered.
    """

    setup: Setup
    rises: list[list[float]]
    packets: float
    delivered: bool


def estimate_of(rises: Any, config: ToleranceConfig) -> Estimate:
    """Return the mean of rises (S, N), and its interval for other losses and other texts.

    Every sequence has its own packets. If losses are independent, so are the sequences' means over draws, whose spread
    has both variances. In bursts and traces, sequences of one draw share losses.
    """
    rises_SN = np.asarray(rises)
    return t_interval(rises_SN.mean(0)) if config.loss_type == INDEPENDENT else crossed_interval(rises_SN)


class Lossless(NamedTuple):
    """What a pass without losses shows.

    Attributes:
        scores: the sequences' cross-entropies (N,), with what is sent rounded if there is a `wire_dtype`.
        packets: those that stand out.
        alone: those that would stand out if each sequence were a message of its own.
    """

    scores: list[float]
    packets: list[Packet]
    alone: list[Packet]


class Account:
    """A model over one algorithm, with losses in one phase or in both."""

    def __init__(self, measurement: Measurement, algorithm: str, phase: str) -> None:
        self.measurement, self.algorithm, self.phase = measurement, algorithm, phase
        self.config = measurement.config
        self._settings_watched = self._settings(NO_REPAIR, self.config.rates()[0], "reduce")
        self._routes = self._settings_watched.comm().algorithm.reduce

    @cached_property
    def _over_watched(self) -> tuple[Any, SelectiveNetwork]:
        """Return the model whose packets are looked at, and its network. `rises` lets it go: two fill the memory."""
        return self.measurement.over(self._settings_watched, repair=Watch())

    def _settings(self, repair: str, rate: float, phase: str | None = None) -> NetworkSettings:
        return self.config.network(Setup(self.algorithm, phase or self.phase, repair, rate))

    def lossless(self) -> Lossless:
        """Score the text without losses, and look at every packet."""
        (model, network), tokens = self._over_watched, self.measurement.blocks_NT.shape[1]
        packets, alone = list[Packet](), list[Packet]()
        network.alone, network.chosen, scores = True, {}, []
        for number, ids_BT in enumerate(self.measurement.messages):

            def see(message: Message, site: Site, number: int = number, sequences: int = len(ids_BT)) -> None:
                shape = (sequences, tokens)
                packets.extend(standing_out(message, site, self._routes, number=number, shape=shape))
                for sequence, rows_RM in enumerate(message.rows_LN.chunk(sequences, 1)):
                    single = message._replace(rows_LN=rows_RM)
                    found = standing_out(single, site, self._routes, number=number, shape=(1, tokens))
                    alone.extend(packet._replace(sequence=sequence) for packet in found)

            network.see = see
            scores.append(self.measurement.score(model, ids_BT))
        network.see = None
        return Lossless(np.concatenate(scores).tolist(), packets, alone)

    def squared_errors(self) -> dict[str, float]:
        """Return the squared error that each repair leaves at the largest loss rate, over that of no repair.

        Every sum of the first message is lost alone, with lossless contributions. If none lost a packet, there are no
        errors.
        """
        repairs = [NO_REPAIR, *(each for each in self.config.repair_names() if not repair_named(each).remembers)]
        networks = [self._settings(repair, self.config.rates()[-1]) for repair in repairs]
        ids_BT = self.measurement.messages[0]
        model, network = self._over_watched
        errors = SquaredErrors(networks, self.measurement.ranks, len(blocks_of(model)), ids_BT)
        network.alone, network.chosen, network.see = True, {}, errors.see
        with ExitStack() as hooks:
            for block in blocks_of(model):
                hooks.callback(block.register_forward_hook(errors.end_block, with_kwargs=True).remove)
            self.measurement.score(model, ids_BT)
        network.see = None
        mean_K = torch.stack(errors.of_sums_K).mean(0).double()
        return dict(zip(repairs, (mean_K / mean_K[0]).tolist(), strict=True)) if mean_K[0] > 0 else {}

    def find(self, lossless: Lossless) -> Found:
        """Find the critical packets."""
        (model, network), size = self._over_watched, self.config.batch_size
        network.alone = True

        def lose(packets: Sequence[Packet]) -> dict[tuple[int, int], float]:
            rises = {}
            for number in sorted({packet.message for packet in packets}):
                network.chosen = chosen_in(packets, number)
                scores_B = self.measurement.score(model, self.measurement.messages[number])
                for sequence in {packet.sequence for packet in packets if packet.message == number}:
                    rises[number, sequence] = float(scores_B[sequence]) - lossless.scores[number * size + sequence]
            return rises

        return search(lossless.packets, lose)

    def rises(
        self,
        repair: str,
        rate: float,
        lossless: Lossless,
        critical: Sequence[Packet],
        drawn: Callable[[], object],
        scale: float = 0.0,
    ) -> Rises:
        """Draw losses until the interval is narrow, compared with the rise or `scale`; critical packets arrive."""
        config = self.config
        self.__dict__.pop("_over_watched", None)
        chosen = f"protect_first(1) + {repair}" if critical else repair
        try:
            settings = self._settings(chosen, rate)
        except ValueError:  # the repair chooses packets itself, or must know what others choose
            settings = self._settings(repair, rate)
        model, network = self.measurement.over(settings)
        network.delivers = bool(critical) and settings.repair == chosen
        chosen_by_message = [chosen_in(critical, number) for number in range(len(self.measurement.messages))]
        rises_SN: list[np.ndarray] = []
        while len(rises_SN) < config.max_draws:
            scores = []
            with network.evaluation(len(rises_SN)):
                for chosen_here, ids_BT in zip(chosen_by_message, self.measurement.messages, strict=True):
                    network.chosen = chosen_here if network.delivers else {}
                    scores.append(self.measurement.score(model, ids_BT))
            rises_SN.append(np.concatenate(scores) - lossless.scores)
            drawn()
            rise, fewest = estimate_of(rises_SN, config), 1 if config.loss_type == INDEPENDENT else FEWEST
            narrow = rise.half_width <= config.precision * max(abs(rise.value), scale)
            if narrow and len(rises_SN) >= max(config.min_draws, fewest):
                break
        sent = float(network.summary("evaluation")["packets"]) / len(rises_SN)
        setup = Setup(self.algorithm, self.phase, repair, rate)
        return Rises(setup, [each.tolist() for each in rises_SN], sent, network.delivers or not critical)


class SquaredErrors:
    """The squared errors (K,) of K networks in each of a model's sums.

    An error is relative to what the next layer divides by, token by token: the residual stream after the block, or the
    sum itself in a model that normalises it first.
    """

    def __init__(self, networks: Sequence[NetworkSettings], ranks: int, blocks: int, ids_BT: Tensor) -> None:
        group = RankGroup(ranks)
        self._collectives = [LossyCollective(each.build(), group, each.comm().of_model(blocks)) for each in networks]
        self._positions = np.tile(np.arange(ids_BT.shape[1]), len(ids_BT))
        self._of_block: list[tuple[Tensor, Tensor]] = []  # errors (K, B * T), and the sum (B * T, D)
        self.of_sums_K: list[Tensor] = []

    def see(self, message: Message, site: Site) -> None:
        """Send the contributions over each network, and keep each token's squared error."""
        rows_RM, errors = message.rows_LN, []
        total_M = rows_RM.sum(0)
        for collective in self._collectives:
            with collective.network.at(self._positions):
                results = [collective.sum_(rows_RM.clone(), site).view(-1, len(total_M)) for _ in range(ERROR_DRAWS)]
            error_M = torch.cat(results).sub_(total_M).square_().mean(0)
            errors.append(error_M.view(len(self._positions), -1).sum(1))
        self._of_block.append((torch.stack(errors), total_M.view(len(self._positions), -1)))

    def end_block(self, block: Any, given: tuple, named: dict[str, Any], output: Any) -> None:
        """End the errors of a block's sums: a forward hook."""
        states = (given or named["hidden_states"], output)
        before, after = (each[0] if isinstance(each, tuple) else each for each in states)
        added_TD = (after - before).flatten(0, 1)
        sums_TD = sum((total for _, total in self._of_block), torch.zeros_like(added_TD))
        as_they_are = (added_TD - sums_TD).norm() <= NORMALISED * sums_TD.norm()
        for errors_KT, total_TD in self._of_block:
            divisor_T = (after.flatten(0, 1) if as_they_are else total_TD).square().sum(1)
            self.of_sums_K.append((errors_KT / divisor_T).mean(1))
        self._of_block.clear()


RECORD = "tolerance.json"
CHOOSE_ROWS = ("loss_rates", "algorithms", "phases", "repairs", "prefills")  # they choose the rows, not their values
SAME_NATS = 1e-3  # by which a model's cross-entropy may differ between two processors


class Record:
    """The file that keeps each finished step, so that a stopped measurement goes on, and others join it.

    Raises:
        ValueError: if the file is not a tolerance record, or differs in settings, model or text.
    """

    def __init__(self, config: ToleranceConfig) -> None:
        self.config, self.file = config, Path(config.output_dir) / RECORD

        def read(values: Any) -> dict[str, Any]:
            return {**values, "config": dict(values["config"]), "steps": dict(values["steps"])}

        values = read_record(self.file, "tolerance record", read)
        self.values: dict[str, Any] = values or {"steps": {}}
        self.steps: dict[str, Any] = self.values["steps"]
        if values:
            check_same_settings(config, values["config"], self.file)
        if (trace := self.values.get("trace_sha256")) is not None:
            check_same_trace(config.network(config.setups()[0]), trace, str(self.file), OTHER_FOLDER)

    def begin(self, measurement: Measurement) -> None:
        """Check that model and text are those of the record, and note them."""
        trace = trace_sha256(self.config.network(self.config.setups()[0]))
        ours: dict[str, Any] = {
            "config": settings_of(self.config),
            "tensor_parallel_size": measurement.ranks,
            "first_cross_entropy": float(measurement.first_B.mean()),
            "text_sha256": hashlib.sha256(measurement.blocks_NT.cpu().numpy().astype("<i8").tobytes()).hexdigest(),
            **measurement.first_tokens,
            **({"trace_sha256": trace} if trace else {}),
            "commit": commit(),
            "environment": environment(),
        }
        if self.steps and self.values.get("text_sha256") != ours["text_sha256"]:
            fault = f"has changed since {self.file} was written"
            raise ValueError(f"the text, or what stands before it, {fault}: {OTHER_FOLDER}")
        now = ours["first_cross_entropy"]
        then = self.values.get("first_cross_entropy", now)
        if abs(now - then) > SAME_NATS:
            fault = f"a cross-entropy of {then:.4f} nats without losses, not {now:.4f}: the model has changed"
            raise ValueError(f"{self.file} was measured with {fault}; {OTHER_FOLDER}")
        self.values = ours

    def step(self, drawn: Callable[[str], object], name: str, compute: Callable[[], Any]) -> Any:
        """Return a step's JSON-ready result. It is computed once. `drawn` is called with its name before."""
        drawn(name)
        if name not in self.steps:
            with waiting(name):
                result = compute()
            self.steps[name] = json.loads(json.dumps(result._asdict() if hasattr(result, "_asdict") else result))
            self.write()
        return self.steps[name]

    def write(self, **more: Any) -> None:
        """Write what is known."""
        self.values |= more
        values = self.values | {"steps": self.steps}
        write_atomically(self.file, json.dumps(values, indent=1, allow_nan=False) + "\n")


def check_same_settings(config: ToleranceConfig, settings: dict[str, Any], file: Path) -> None:
    """Raise ValueError if a record's settings differ from ours in more than the choice of rows."""
    ours = {name: value for name, value in settings_of(config).items() if name not in CHOOSE_ROWS}
    then = {name: settings.get(name, config.defaults()[name]) for name in ours}  # older records lack some
    differ = [f"{name} = {then[name]!r}, not {value!r}" for name, value in ours.items() if then[name] != value]
    if differ:
        raise ValueError(f"{file} was measured with {'; '.join(differ)}: {OTHER_FOLDER}")


def settings_of(config: ToleranceConfig) -> dict[str, Any]:
    """Return the settings of a record."""
    values = config.as_dict() | {"text": config.text_name()}
    return {name: value for name, value in values.items() if name != "output_dir"}


class Measured(NamedTuple):
    """What is measured of one algorithm and phase.

    Attributes:
        algorithm, phase: the network.
        lossless: the pass without losses.
        found: the critical packets.
        rows: no repair at each loss rate, and the repairs at the largest.
        errors: each repair's squared error, over that of no repair.
        rounding: what rounding for sending costs alone; None if nothing is rounded.
    """

    algorithm: str
    phase: str
    lossless: Lossless
    found: Found
    rows: list[Rises]
    errors: dict[str, float]
    rounding: Estimate | None


def measure(measurement: Measurement, record: Record, drawn: Callable[[str], object]) -> Iterator[Measured]:
    """Yield what is measured of each algorithm and phase. Finished steps come from the record.

    Args:
        measurement: a model and a text.
        record: of the same configuration.
        drawn: called before every step with its name, and after every draw.
    """
    record.begin(measurement)
    config = measurement.config
    for algorithm, phase in config.networks():
        account, where = Account(measurement, algorithm, phase), f"{algorithm}, {phase}: "
        step = partial(record.step, drawn)
        values = step(f"{where}without losses", account.lossless)
        packets, alone = ([Packet(*each) for each in values[name]] for name in ("packets", "alone"))
        lossless = Lossless(values["scores"], packets, alone)
        rounded = config.wire_dtype and step(f"{where}rounding", partial(measurement.rounding, lossless))
        values = step(f"{where}critical packets", partial(account.find, lossless))
        found = Found(**values | {"critical": [(Packet(*packet), rise) for packet, rise in values["critical"]]})
        critical, repairs = [packet for packet, _ in found.critical], config.repair_names()
        bare = [(rate, NO_REPAIR) for rate in config.rates()]
        largest = bare[-1][0]
        errors = step(f"{where}squared errors at {largest:g}: {', '.join(repairs)}", account.squared_errors)
        rows: list[Rises] = []
        for rate, repair in [*bare, *((largest, repair) for repair in repairs)]:
            scale = next((abs(float(np.mean(row.rises))) for row in rows if row.setup.loss_rate == rate), 0.0)
            rises = partial(account.rises, repair, rate, lossless, critical, partial(drawn, ""), scale)
            values = step(f"{where}{repair} at {rate:g}", rises)
            rows.append(Rises(**values | {"setup": Setup(*values["setup"])}))
        yield Measured(algorithm, phase, lossless, found, rows, errors, Estimate(**rounded) if rounded else None)
