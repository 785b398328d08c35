"""The configuration of a tolerance measurement. Importing this module costs no torch."""

import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import Field, model_validator

from lossytp.network.checks import check_known, check_probability, parse, refuse_if, split_outside_parentheses
from lossytp.network.traces import LOSS_PROCESSES
from lossytp.parallel.group import check_nodes, sizes_that_divide
from lossytp.training.groups import NetworkSettings
from lossytp.training.rows import DATA_VARIABLE
from lossytp.training.settings import Count, Positive, Seed, Settings
from lossytp.training.shapes import Shape, check_model, shape_of

STDLIB, WIKITEXT = "stdlib", "wikitext-2"

PHASES = ("reduce", "both")
SIZES = (4, 3, 2)  # tensor-parallel sizes to try if none is given
PREFILLS = ("lossy", "prefix", "reliable")
NO_REPAIR = "zero"
OTHER_FOLDER = "give another output_dir, or delete the file"
T = TypeVar("T")


class Setup(NamedTuple):
    """A network and a repair: those of one row of the table."""

    algorithm: str
    phase: str
    repair: str
    loss_rate: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Return the setup of a record's row."""
        return cls(*(row[name] for name in cls._fields))


class NetworksConfig(Settings):
    """A language model, and the networks and repairs to try it over: one row of a table for each."""

    model_name: str = "gpt2-nano"
    """A language model: a name such as smollm2-135m, a folder, or a .gguf file."""
    tensor_parallel_size: Annotated[int, Field(ge=2)] | None = None
    """Tensor-parallel ranks, at least 2. If left out, the first of 4, 3 and 2 that divides the model."""
    loss_rates: str | None = None
    """Packet loss rates of every link, separated by commas; 0.001,0.01,0.03,0.1 if left out. A loss type with its own
    rate, such as a trace, takes none."""
    algorithms: str = "direct"
    """Collective algorithms, separated by commas: direct, ring, tree, switch, sender."""
    phases: str = "reduce"
    """Where packets are lost, separated by commas: reduce (on the way to the sum), both (also on the way back)."""
    repairs: str = "hadamard(64),protect(0.1),retransmit(2)"
    """Repairs, separated by commas, such as "rescale,protect(0.01) + stale". zero, which repairs nothing, is always
    measured too."""
    loss_type: str = "ber"
    """Loss process, as in training: ber, g-e, or another such as "trace(losses.csv)"."""
    mean_burst_packets: float | None = None
    """Mean run of consecutive losses, for loss types that have one."""
    wire_dtype: str | None = None
    """Round messages for sending, as in training: fp32, bf16, int8, fp8, int4. At a loss rate of 0, a row has the cost
    of this alone."""
    ranks_per_node: Count | None = None
    """Links between ranks of one node (rank // this number) are reliable, as in training."""
    mtu_bytes: int = 1500
    """Packet size, headers included."""
    bf16: bool = False
    """Compute matrix products in bfloat16, and send bfloat16."""
    seed: Seed = 1234
    """Seed of the packet losses."""

    @model_validator(mode="after")
    def _check_networks(self) -> Self:
        rows, size = [self.network(setup) for setup in self.setups()], self.ranks()
        check_model(self.model_name, size or 1, 1)
        if size is not None:
            for row in rows:  # before hours go into earlier ones
                network, comm = row.build(), row.comm()
                check_nodes(network, comm, size)
                comm.check_delivers(network, tuple(range(size)))
        return self

    def ranks(self, shape: Shape | None = None) -> int | None:
        """Return the tensor-parallel size; None if it follows from a model that is not loaded yet.

        Args:
            shape: of the loaded model.

        Raises:
            ValueError: if none was given, and none of `SIZES` divides the model.
        """
        shape = shape or (None if self.tensor_parallel_size else shape_of(self.model_name))
        if self.tensor_parallel_size or shape is None:
            return self.tensor_parallel_size
        fits = sizes_that_divide(**shape.divided)
        if usual := [size for size in SIZES if size in fits]:
            return usual[0]
        fault = f"none of {', '.join(map(str, SIZES))} divides its heads and its MLP"
        fix = f"tensor_parallel_size = {fits[1]}" if fits[1:] else "another model"
        raise ValueError(f"model_name = {self.model_name!r}: {fault}: give {fix}")

    def own_rate(self) -> float | None:
        """Return the loss rate of a loss type that has its own, such as a trace; None for others.

        Raises:
            ValueError: if the loss type is unknown, or `loss_rates` are given too.
        """
        name, values, named = parse("loss_type", self.loss_type)
        check_known("loss_type", name, LOSS_PROCESSES)
        parameters = list(inspect.signature(LOSS_PROCESSES[name]).parameters)
        if "loss_rate" in set(parameters[len(values) :]) - set(named):
            return None
        settings = NetworkSettings(loss_type=self.loss_type, mean_burst_packets=self.mean_burst_packets)
        rate = settings.process().loss_rate
        fault = f"does not apply to loss_type = {self.loss_type!r}, which has its own loss rate, {rate:.3g}"
        refuse_if(self.loss_rates is not None, "loss_rates", self.loss_rates, f"{fault}: leave out loss_rates")
        return rate

    DEFAULT_RATES: ClassVar[str] = "0.001,0.01,0.03,0.1"

    def rates(self) -> list[float]:
        """Return the loss rates in ascending order."""
        own = self.own_rate()
        if own is not None:
            return [own]
        rates: list[float] = []
        for word in parts(self.DEFAULT_RATES if self.loss_rates is None else self.loss_rates):
            try:
                rates.append(float(word))
            except ValueError:
                fault = f"{word!r} is not a number: give shares, such as 0.01,0.1"
                raise ValueError(f"loss_rates = {self.loss_rates!r}: {fault}") from None
            check_probability("loss_rates", rates[-1])
        refuse_if(not rates, "loss_rates", self.loss_rates, "is empty: give 0.01,0.1")
        return sorted(set(rates))

    def listed(self, name: str, known: Iterable[str] = ()) -> list[str]:
        """Return the parts of a setting, each once.

        Raises:
            ValueError: if there are none, or one is not among the `known` ones.
        """
        text, default = getattr(self, name), self.defaults()[name]
        found = list(dict.fromkeys(parts(text)))
        refuse_if(not found, name, text, f"is empty: give one, such as {parts(default)[0]}")
        for each in found if known else ():
            check_known(name, each, known)
        return found

    def setups(self) -> list[Setup]:
        """Return the rows to measure, by algorithm, phase and rate; for each rate, the row without a repair first."""
        repairs = dict.fromkeys([NO_REPAIR, *parts(self.repairs)])
        rows = product(self.listed("algorithms"), self.listed("phases", PHASES), self.rates(), repairs)
        return [Setup(algorithm, phase, repair, rate) for algorithm, phase, rate, repair in rows]

    def network(self, setup: Setup) -> NetworkSettings:
        """Return the network of a row.

        Raises:
            ValueError: if a value is unknown, or values contradict each other.
        """
        same = ("loss_type", "mean_burst_packets", "wire_dtype", "ranks_per_node", "mtu_bytes", "seed")
        return NetworkSettings(
            **{name: getattr(self, name) for name in same},
            tensor_parallel_size=self.tensor_parallel_size or SIZES[0],
            loss_rate=setup.loss_rate if self.own_rate() is None else 0.0,
            algorithm=setup.algorithm,
            repair=setup.repair,
            reliable_gather=setup.phase == "reduce",
        )


class ToleranceConfig(NetworksConfig):
    """A model, a text, the networks to try, and the width of the intervals to reach."""

    DEFAULT_RATES: ClassVar[str] = "0.01,0.03"

    text: str | None = None
    """Text files by pattern, stdlib (the sources of Python's standard library), or wikitext-2 (its test text, under
    LOSSYTP_DATA). If left out, wikitext-2 if LOSSYTP_DATA has it, else stdlib."""
    loss_rates: str | None = None
    """Packet loss rates of every link, separated by commas: the first gives the slope, the others check that rises lie
    on a line, and repairs are measured at the largest. 0.01,0.03 if left out. A loss type with its own rate, such as a
    trace, takes none."""
    block_size: Annotated[int, Field(ge=2)] | None = None
    """Tokens of a sequence. If left out, 128, or the model's positions if these are fewer."""
    blocks: Annotated[int, Field(ge=2)] | None = None
    """Number of sequences, from the text's beginning. If left out, as many as have 4,096 tokens together."""
    batch_size: Count = 8
    """Sequences of one message. A message of one sequence has its first tokens always in the first rank's chunk."""
    min_draws: Count = 1
    """Smallest number of draws of losses for each row; their seeds follow from `seed`."""
    max_draws: Count = 6
    """Largest number of draws of losses for each row."""
    precision: Positive = 0.1
    """A row is done once its 95 % interval has this half-width, as a share of the rise without a repair."""
    decode: bool = False
    """Continue prompts token by token, in place of scoring blocks of text."""
    prefills: str = "lossy,prefix,reliable"
    """With decode, how prompts are read, separated by commas: lossy, prefix (the first tokens without losses), reliable
    (all tokens without losses)."""
    prefix_tokens: Count = 4
    """With decode, tokens of a reliable prefix."""
    prompts: Count = 4
    """With decode, number of prompts, from the text's beginning."""
    prompt_tokens: Annotated[int, Field(ge=2)] = 64
    """With decode, tokens of a prompt."""
    new_tokens: Annotated[int, Field(ge=4)] = 32
    """With decode, tokens of a continuation."""
    decode_draws: Annotated[int, Field(ge=2)] = 3
    """With decode, draws of losses for each row."""
    output_dir: str = "output/tolerance"
    """Folder for tolerance.json, or decoding.json, and the figure."""

    @model_validator(mode="after")
    def _check_tolerance(self) -> Self:
        few, many = f"is below min_draws = {self.min_draws}", f"is not below prompt_tokens = {self.prompt_tokens}"
        refuse_if(self.max_draws < self.min_draws, "max_draws", self.max_draws, f"{few}: give at least as many")
        if not self.decode and self.rates()[0] == 0:
            refuse_if(
                self.own_rate() == 0, "loss_type", self.loss_type, "lost no packet, so it has no slope: give another"
            )
            refuse_if(True, "loss_rates", 0, "has no slope: give rates above 0, such as 0.01")
        self.listed("prefills", PREFILLS)
        refuse_if(self.prefix_tokens >= self.prompt_tokens, "prefix_tokens", self.prefix_tokens, f"{many}: give fewer")
        return self

    def networks(self) -> list[tuple[str, str]]:
        """Return each algorithm with each phase."""
        return list(dict.fromkeys((setup.algorithm, setup.phase) for setup in self.setups()))

    def repair_names(self) -> list[str]:
        """Return the repairs to measure."""
        return [each for each in dict.fromkeys(parts(self.repairs)) if each != NO_REPAIR]

    def text_name(self) -> str:
        """Return the text, or the default one if none was given."""
        return self.text if self.text is not None else WIKITEXT if wikitext() else STDLIB

    def files(self) -> str:
        """Return the pattern of the text's files.

        Raises:
            ValueError: if wikitext-2 is not under LOSSYTP_DATA.
        """
        text, file = self.text_name(), wikitext()
        lacking = text == WIKITEXT and file is None
        refuse_if(lacking, "text", text, "is not under LOSSYTP_DATA: give stdlib, or your own files")
        return str(file) if text == WIKITEXT else text


def wikitext() -> Path | None:
    """Return WikiText-2's test text under LOSSYTP_DATA, if it is there."""
    file = Path(os.environ.get(DATA_VARIABLE, ""), "Salesforce/wikitext/wikitext-2-v1/test.txt").expanduser()
    return file if DATA_VARIABLE in os.environ and file.is_file() else None


def parts(text: str) -> list[str]:
    """Split a list at its commas, but not at those within parentheses."""
    return [part for part in split_outside_parentheses(text, ",") if part]


def read_record(file: Path, kind: str, read: Callable[[Any], T]) -> T | None:
    """Return what `read` takes from the record of an earlier measurement; None if there is no file.

    Raises:
        ValueError: if the file is no such record.
    """
    try:
        return read(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a {kind} ({error!r}): {OTHER_FOLDER}") from error
