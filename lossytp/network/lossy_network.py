"""A network whose directed links lose packets.

A message is a tensor in row-major order. `direct` and `ring` cut it into as many chunks as ranks, of ceil(n / R)
elements; other algorithms send it whole (`lossytp.network.routes`). A link carries packets of whole elements
(`lossytp.network.routes`). A lost packet of a contribution is missing from the sum. A lost packet of a result is
missing on the ranks that it was sent to. All contributions are summed before any result is sent. The repair decides
what replaces missing elements (`lossytp.network.repairs`). Without a repair they are zero.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from lossytp.network.checks import check_at_least, check_bool, check_is, check_known, check_names, check_number, shown
from lossytp.network.losses import (
    NO_PACKETS,
    Bernoulli,
    LinkLosses,
    LossProcess,
    Normals,
    check_process,
    described,
    process_described,
)
from lossytp.network.repairs import ZERO, Repair, repair_named, stage_of
from lossytp.network.routes import ALGORITHMS, Algorithm, Hop, Hops, Link, Missing, Wire, algorithm_named, checked_link
from lossytp.network.scope import COUNTED, EVERYWHERE, Counters, LossTape, Scope, Site
from lossytp.network.traces import Replay

if TYPE_CHECKING:
    import pandas


# Which loss process each link of a network has.


LOSSLESS = Bernoulli(loss_rate=0.0)


class LinkProcesses:
    """One process for all links, or processes of named links and a default for the others.

    Arguments and errors are those of `LossyNetwork`.
    """

    def __init__(self, process: LossProcess | Mapping[Link, LossProcess], default: LossProcess | None) -> None:
        self.named: dict[Link, LossProcess] = {}
        if isinstance(process, Mapping):
            if not process and default is None:
                raise ValueError(
                    "process = {} names no link: name one, such as {(0, 1): process}, or give a process for all links"
                )
            self.named = {checked_link(key): value for key, value in process.items()}
            self.default = LOSSLESS if default is None else default
        elif default is not None:
            raise ValueError(
                f"default = {shown(default)} needs named links: give process = {{(0, 1): process}}, or leave "
                "default out"
            )
        else:
            self.default = process
        check_process("process" if default is None else "default", self.default)
        for (src, dst), given in self.named.items():
            check_process(f"process of {src}>{dst}", given)

    def of(self, src: int, dst: int) -> LossProcess:
        """Return the process of the link src -> dst."""
        return self.named.get((src, dst), self.default)

    def loss_rate(self, src: int, dst: int) -> float:
        """Return the loss rate of the link src -> dst, which differs from link to link in a recording of a mesh."""
        process = self.of(src, dst)
        return (process.of((src, dst)) if isinstance(process, Replay) else process).loss_rate

    def described(self) -> dict[str, str]:
        """Return the default process and those named processes that differ from it, in words."""
        default = process_described(self.default)
        named = {f"process of {src}>{dst}": process_described(process) for (src, dst), process in self.named.items()}
        return {"process": default} | {link: process for link, process in named.items() if process != default}


# The random streams of a network's links: those of training, and fresh ones for each evaluation.


TRAINING: tuple[str, int] = ("training", 0)
LinkOfGroup = tuple[str, int, int]  # group, src, dst


class LinkStreams:
    """Draw each link's losses and normal numbers from streams of its own.

    A link's stream begins when the link is first used. Training's streams go on from message to message. Each
    evaluation has streams that its step names.

    Args:
        processes: the links' loss processes.
        seed: the network's.
    """

    def __init__(self, processes: LinkProcesses, seed: int) -> None:
        self.processes, self.seed = processes, seed
        self.purpose = self.block = TRAINING
        self._evaluations = 0
        self._losses: dict[LinkOfGroup, LinkLosses] = {}
        self._normals: dict[LinkOfGroup, Normals] = {}
        self._of_training = self._losses, self._normals

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy holds: only training's streams, because nothing would end an evaluation in the copy."""
        losses, normals = self._of_training
        return self.__dict__ | {"purpose": TRAINING, "block": TRAINING, "_losses": losses, "_normals": normals}

    @property
    def of_training(self) -> bool:
        """Return whether the program is outside of all evaluations."""
        return self.purpose == TRAINING

    def take(self, group: str, src: int, dst: int, num_packets: int) -> np.ndarray:
        """Return which of the link's next `num_packets` packets are lost: sorted indices, int64 (num_lost,)."""
        losses = self._losses.get((group, src, dst))
        if losses is None:
            losses = self._losses[group, src, dst] = self._begun(self.purpose, (group, src, dst))
        return losses.take(num_packets)

    def _begun(self, purpose: tuple[str, int], link: LinkOfGroup) -> LinkLosses:
        return self.processes.of(*link[1:]).losses((self.seed, *purpose, *link))

    def normals(self, group: str, hop: Hop) -> np.ndarray:
        """Return a standard normal number for each element of the hop, float64 (elements,)."""
        link = (group, hop.src, hop.dst)
        if link not in self._normals:
            self._normals[link] = Normals((self.seed, *self.purpose, *link, "normals"))
        return self._normals[link].take(hop.stop - hop.start)

    @property
    def wraps(self) -> int | None:
        """Return the largest number of times that a link's trace has begun again; None if no link replays a trace."""
        found = [getattr(losses, "wraps", None) for losses in self._losses.values()]
        return max((wraps for wraps in found if wraps is not None), default=None)

    @contextmanager
    def evaluation(self, step: int) -> Iterator[None]:
        """Draw within the block from streams named by `step`, so that training's streams do not shift."""
        check_number("step", step, Integral, "the number of the training step")
        before = self.purpose, self.block, self._losses, self._normals
        self._evaluations += 1
        self.purpose, self.block = ("evaluation", index(step)), ("evaluation", self._evaluations)
        self._losses, self._normals = {}, {}
        try:
            yield
        finally:
            self.purpose, self.block, self._losses, self._normals = before

    def state_dict(self) -> dict[str, list]:
        """Return the positions of training's streams as JSON-ready values."""
        losses, normals = self._of_training
        return {
            "links": [[list(link), each.state_dict()] for link, each in losses.items()],
            "normals": [[list(link), each.position] for link, each in normals.items()],
        }

    def loaded(self, state: dict) -> "LinkStreams":
        """Return streams that go on from `state_dict()`."""
        again = LinkStreams(self.processes, self.seed)
        again._evaluations = self._evaluations  # so that a new evaluation never finds the memory of an earlier one
        for (group, src, dst), position in state["links"]:
            link = (group, src, dst)
            again._losses[link] = again._begun(TRAINING, link)
            again._losses[link].load_state_dict(position)
        for link, position in state["normals"]:
            again._normals[tuple(link)] = Normals((self.seed, *TRAINING, *link, "normals"), position)
        return again


SUSPENDING = threading.Lock()  # of all networks, since a network with a lock of its own could not be copied


class LossyNetwork:
    """Lose packets on directed links, reproducibly. Each link has its own loss process.

    A link's state starts stationary. It advances once per packet and carries over from message to message.

    A deep copy of the network, or of a model that uses it, has its own link states and counters. From then on, original
    and copy each lose and report their own packets. A copy that is made within `reliable()`, `evaluation()` or
    `recording()` is outside of these blocks.

    Args:
        process: the process of every link, or `{(src, dst): process}` for named links.
        default: the process of links that a mapping does not name. If left out, they are lossless.
        seed: selects the random streams. The same seed loses the same packets in any process layout.
        wire: packet geometry.
        scope: which messages may lose packets; all if left out.

    Raises:
        TypeError: if an argument is of another type, or a link is not a pair of ranks.
        ValueError: if a process is not a loss process, a mapping is empty and has no `default`, or `default` has no
            mapping.
    """

    carries_rows = False
    """Whether `send` needs the values of a message, because it really sends them."""

    def __init__(
        self,
        process: LossProcess | Mapping[Link, LossProcess],
        *,
        default: LossProcess | None = None,
        seed: int = 0,
        wire: Wire | None = None,
        scope: Scope = EVERYWHERE,
    ) -> None:
        processes = LinkProcesses(process, default)
        check_number("seed", seed, Integral, "one, such as 0")
        self.seed = index(seed)  # numpy's integers would select other streams
        self._streams = LinkStreams(processes, self.seed)
        self.wire = Wire() if wire is None else wire
        check_is("wire", self.wire, Wire, "one, such as Wire(mtu_bytes=1500)")
        check_is("scope", scope, Scope, 'one, such as Scope(direction="forward")')
        self.scope = scope
        self.counters = Counters()
        self._tape: LossTape | None = None
        self._suspended = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy holds. It is outside of all blocks, because nothing would end them in the copy."""
        return self.__dict__ | {"_suspended": 0, "_tape": None}

    def process(self, src: int, dst: int) -> LossProcess:
        """Return the loss process of the link src -> dst."""
        return self._streams.processes.of(src, dst)

    def loss_rate(self, src: int, dst: int) -> float:
        """Return the loss rate of the link src -> dst."""
        return self._streams.processes.loss_rate(src, dst)

    @property
    def named_links(self) -> tuple[Link, ...]:
        """Return the links that the mapping names."""
        return tuple(self._streams.processes.named)

    def lost_packets(
        self, src: int, dst: int, num_packets: int, *, group: str = "tp", site: Site | None = None
    ) -> np.ndarray:
        """Return which of the link's next `num_packets` packets are lost, and advance the link.

        Taking n packets at once or in pieces gives the same losses.

        Args:
            src: rank at the link's start.
            dst: rank at its end.
            num_packets: number of packets to send.
            group: name of the group of ranks. Each group has its own streams on a link, so its ranks need not know what
                other groups send.
            site: where in the model the packets are counted.

        Returns:
            Sorted indices, int64 (num_lost,).
        """
        src, dst, num_packets = index(src), index(dst), index(num_packets)
        check_at_least("num_packets", num_packets, 0)
        if self._is_reliable(site):
            return NO_PACKETS
        lost = self._streams.take(group, src, dst, num_packets)
        self.counters.add((self._streams.purpose[0], site, group, src, dst), num_packets, len(lost), 0, len(lost))
        return lost

    def send(
        self,
        hops: Hops,
        itemsize: int,
        *,
        repair: Repair = ZERO,
        group: str = "tp",
        site: Site | None = None,
        rows: np.ndarray | None = None,
    ) -> Missing:
        """Send one message of `itemsize`-byte elements over `hops`; return the packets that each hop lacks.

        A network that `carries_rows` sends this process's `rows`, and overwrites them with what arrived. Others need
        none.

        Within `reliable()`, and outside the network's scope, no link advances and nothing is counted. While a tape
        replays, the recorded losses are returned.
        """
        if self._tape is not None and self._tape.replaying:
            missing: Missing = self._tape.next()
            return missing
        reliable = self._is_reliable(site)
        missing = Missing([], reliable=True) if reliable else self._send(hops, itemsize, repair, group, site, rows)
        if self._tape is not None:
            self._tape.record(missing)
        return missing

    def _send(
        self, hops: Hops, itemsize: int, repair: Repair, group: str, site: Site | None, rows: np.ndarray | None
    ) -> Missing:
        capacity = self.wire.elements_per_packet(itemsize)
        missing = [self._send_over(hop, capacity, repair, group, site) for hop in hops]
        if hops:
            self.counters.add_message((self._streams.purpose[0], site, group), any(len(packets) for packets in missing))
        return Missing(missing)

    def _send_over(self, hop: Hop, capacity: int, repair: Repair, group: str, site: Site | None) -> np.ndarray:
        counts = [0, 0, 0]  # packets, lost, extra

        def send(count: int, extra: int = 0) -> np.ndarray:
            lost = self._streams.take(group, hop.src, hop.dst, count)
            counts[0] += count
            counts[1] += len(lost)
            counts[2] += extra
            return lost

        own, elements = hop.stop - hop.start, repair.elements_on_wire(hop.stop - hop.start, capacity)
        missing = repair.carry(own, capacity, send)
        packets, lost, extra = counts
        extra += -(-elements // capacity) - -(-own // capacity)  # the padding of a repair's blocks
        self.counters.add((self._streams.purpose[0], site, group, hop.src, hop.dst), packets, lost, extra, len(missing))
        return missing

    def normals(self, hops: Hops, *, group: str = "tp", site: Site | None = None) -> list[np.ndarray]:
        """Return standard normal numbers for the elements of each hop, each from its link's stream.

        Nothing is counted. The list is empty where the network is reliable. While a tape replays, the recorded numbers
        are returned.
        """
        if self._tape is not None and self._tape.replaying:
            recorded: list[np.ndarray] = self._tape.next()
            return recorded
        used = () if self._is_reliable(site) else hops
        numbers = [self._streams.normals(group, hop) for hop in used]
        if self._tape is not None:
            self._tape.record(numbers)
        return numbers

    def _is_reliable(self, site: Site | None) -> bool:
        return self.suspended or not self.scope.covers(site)

    @property
    def tape(self) -> LossTape | None:
        """Return the tape that records or replays within `recording()`."""
        return self._tape

    @property
    def block(self) -> tuple[str, int]:
        """Return ("training", 0), or ("evaluation", n) within the n-th block of `evaluation`, whatever its step."""
        return self._streams.block

    @property
    def suspended(self) -> bool:
        """Return whether the program is within `reliable()`."""
        return self._suspended > 0

    @contextmanager
    def reliable(self) -> Iterator[None]:
        """Lose nothing within the block: no link advances and nothing is counted.

        The block affects the whole network, so also messages that other threads send meanwhile.
        """
        self._suspend(1)
        try:
            yield
        finally:
            self._suspend(-1)

    def _suspend(self, change: int) -> None:
        """Count the blocks of `reliable()` that are under way: those of several threads may overlap."""
        with SUSPENDING:
            self._suspended += change

    def evaluation(self, step: int) -> AbstractContextManager[None]:
        """Draw losses within the block from streams named by `step`, so that training's streams do not shift."""
        return self._streams.evaluation(step)

    @contextmanager
    def recording(self, tape: LossTape) -> Iterator[None]:
        """Let `tape` record the losses of each collective within the block, or replay them if it has run before."""
        before, self._tape = self._tape, tape
        try:
            yield
        finally:
            self._tape = before
            tape.rewind()

    def report(self) -> "pandas.DataFrame":
        """Return packets, losses and observed rate by purpose, layer, module, direction, operation and link."""
        import pandas  # slow to import, and only a report needs it

        columns = ["purpose", *Site._fields, "group", "src", "dst", *COUNTED]
        table = pandas.DataFrame(self.counters.rows(), columns=columns)
        table["observed_loss_rate"] = table["lost"] / table["packets"]
        return table

    def summary(self, purpose: str) -> dict:
        """Return the totals of "training" or "evaluation", whole and grouped.

        Where this process's training links replay traces, `wraps` is the largest number of times that a link's trace
        has begun again.
        """
        summary = self.counters.summary(purpose)
        if purpose == "training" and self._streams.of_training and self._streams.wraps is not None:
            summary["wraps"] = self._streams.wraps
        return summary

    def state_dict(self) -> dict:
        """Return the state of every training link, all counters and the network's settings, as JSON-ready values.

        Raises:
            ValueError: within `evaluation()`.
        """
        if not self._streams.of_training:
            raise ValueError("state_dict() within evaluation(): call it after the block")
        return {
            "seed": self.seed,
            "settings": self._settings(),
            **self._streams.state_dict(),
            "counters": self.counters.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Resume from `state_dict()`. A state that is refused changes nothing.

        Of the settings, a state from an older version holds only the seed.

        Raises:
            TypeError: if `state` is not a dict.
            ValueError: if the state is of a network with another seed, process, wire or scope, if `state` is not what
                `state_dict()` returns, or within `evaluation()`.
        """
        if not self._streams.of_training:
            raise ValueError("load_state_dict() within evaluation(): call it after the block")
        check_is("state", state, dict, "what state_dict() returned")
        lacking = [name for name in ("seed", "links", "normals", "counters") if name not in state]
        if lacking:
            raise ValueError(f"state = {shown(state)} lacks {', '.join(lacking)}: give what state_dict() returned")
        if state["seed"] != self.seed:
            raise ValueError(f"the state is of seed {state['seed']}, this network of {self.seed}: give the same seed")
        self._check_settings(state.get("settings", self._settings()))
        try:
            streams, counters = self._streams.loaded(state), Counters()
            counters.load_state_dict(state["counters"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(
                f"state = {shown(state)} cannot be loaded ({reason}): give what state_dict() returned"
            ) from error
        self._streams, self.counters = streams, counters

    def _settings(self) -> dict[str, str]:
        """Return the settings that must be equal for a resumed network to lose the same packets."""
        return self._streams.processes.described() | {"wire": described(self.wire), "scope": described(self.scope)}

    def _check_settings(self, theirs: dict[str, str]) -> None:
        check_is("settings of the state", theirs, dict, "what state_dict() returned")
        mine = self._settings()
        for name in [*mine, *theirs]:
            one, other = (settings.get(name, settings.get("process")) for settings in (theirs, mine))
            if one != other:
                raise ValueError(
                    f"the state is of a network with {name} = {one}, this one has {other}: give the same {name}"
                )


# How ranks exchange messages: one object, made once from names and passed on whole.


WIRE_DTYPES = ("fp32", "bf16")
CONTROLS = ("noise",)


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How ranks exchange messages. `Wiring.named` makes one from the names that `parallelize` takes.

    Args:
        algorithm: the packets' routes.
        repair: what to do about lost packets.
        reliable_gather: False also loses packets of the results. Each rank then has its own residual stream or, with
            `sequence_parallel`, its own holes in the stream that it gathers.
        sequence_parallel: reduce-scatter and all-gather around a residual stream that is sharded over ranks.
        exact_adjoint: whether backward uses what forward lost, although no real sender knows it.
        wire_dtype: "fp32" or "bf16": round contributions and results to it for sending, but not partial sums on their
            way. None keeps the messages' own dtype.
        control: "noise" adds Gaussian noise with the losses' expected squared error, instead of losing packets.

    Raises:
        TypeError: if a value is of another type.
        ValueError: if a name is unknown, or two settings cannot be combined.
    """

    algorithm: Algorithm = ALGORITHMS["direct"]
    repair: Repair = ZERO
    reliable_gather: bool = True
    sequence_parallel: bool = False
    exact_adjoint: bool = False
    wire_dtype: str | None = None
    control: str | None = None

    @classmethod
    def named(cls, *, algorithm: str = "direct", repair: str = "zero", **settings: Any) -> Self:
        """Return the wiring of an algorithm and a repair by name, such as "ring" and "fec(10, 8)"."""
        check_names(settings, [field.name for field in fields(cls)])
        return cls(algorithm=algorithm_named(algorithm), repair=repair_named(repair), **settings)

    def __post_init__(self) -> None:
        check_is("algorithm", self.algorithm, Algorithm, 'one, or its name to Wiring.named, such as "ring"')
        check_is("repair", self.repair, Repair, 'one, or its name to Wiring.named, such as "rescale"')
        for name in ("reliable_gather", "sequence_parallel", "exact_adjoint"):
            check_bool(name, getattr(self, name))
        if self.wire_dtype is not None:
            check_known("wire_dtype", self.wire_dtype, WIRE_DTYPES)
        if self.control is not None:
            check_known("control", self.control, CONTROLS)
        if self.repair.uses_own_part:
            self._check_own_part()
        if self.exact_adjoint and (not self.reliable_gather or self.sequence_parallel):
            raise ValueError(
                "exact_adjoint does not work with lossy gathers or sequence_parallel, because the adjoint of a gather "
                "would be another lossy collective: leave reliable_gather True and sequence_parallel False"
            )
        if self.control == "noise":
            self._check_noise()
        if self.algorithm.sum_reaches_all and self.own_streams:
            raise ValueError(
                f"reliable_gather = False does not work with algorithm = {self.algorithm.name!r}, whose sum "
                "reaches every rank: choose another algorithm"
            )

    @property
    def own_streams(self) -> bool:
        """Return whether each rank has its own residual stream."""
        return not self.reliable_gather and not self.sequence_parallel

    @property
    def one_stream(self) -> bool:
        """Return whether all ranks share one residual stream that is not sharded."""
        return self.reliable_gather and not self.sequence_parallel

    def lossy_links(self, ranks: tuple[int, ...], phase: str | None) -> set[Link]:
        """Return the links over which messages of these ranks may lose packets, in one phase or, if None, in both."""
        reduce, gather = self.algorithm.pair(self.sequence_parallel)
        phases = {"reduce": reduce} | ({} if self.reliable_gather else {"gather": gather})
        routes = [of for name, of in phases.items() if phase in (None, name)]
        return {(hop.src, hop.dst) for of in routes for hop in of(len(ranks) ** 2, ranks)}

    def check_delivers(self, network: "LossyNetwork", ranks: tuple[int, ...]) -> None:
        """Raise ValueError if a link loses everything, so that what `protect` sends would never arrive."""
        if stage_of(self.repair, "select") == ZERO:
            return
        for src, dst in sorted(self.lossy_links(ranks, None)):
            if network.loss_rate(src, dst) == 1:
                raise ValueError(
                    f"repair = '{self.repair}' cannot work, because the link {src}>{dst} loses every packet: give it a "
                    "loss rate below 1, or choose another repair"
                )

    def _check_own_part(self) -> None:
        if not self.algorithm.has_receiving_ranks:
            raise ValueError(
                f"repair = '{self.repair}' does not work with algorithm = {self.algorithm.name!r}, where every rank "
                f"lacks what is lost, and none has a part to fill in: choose another algorithm"
            )
        if self.sequence_parallel and not self.reliable_gather:
            raise ValueError(
                f"repair = '{self.repair}' does not work with sequence_parallel and reliable_gather = False, because a "
                "rank has no part of what it gathers: choose another repair"
            )
        if self.exact_adjoint:
            raise ValueError(f"exact_adjoint does not work with repair = '{self.repair}': choose another repair")

    def _check_noise(self) -> None:
        fit = [name for name, other in ALGORITHMS.items() if other.hops_carry_one(self.sequence_parallel)]
        if not self.algorithm.hops_carry_one(self.sequence_parallel):
            raise ValueError(
                f"control = 'noise' does not work with algorithm = {self.algorithm.name!r}, whose hops carry several "
                f"ranks' parts: choose one of {', '.join(fit)}"
            )
        if self.repair != ZERO or self.exact_adjoint:
            raise ValueError(
                "control = 'noise' loses no packets that a repair or an adjoint could act on: leave both out"
            )
