"""A network whose directed links lose packets.

A message is a tensor in row-major order. An algorithm's hops (`lossytp.network.routes`) say which of its elements cross
which link, in packets of whole elements. A lost packet of a contribution is missing from the sum; a lost packet of a
result is missing on the ranks that it was sent to. All contributions are summed before any result is sent. The repair
(`lossytp.network.repairs`) decides what replaces missing elements. Without one they are zero.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from numbers import Integral, Real
from operator import index
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from lossytp.network.checks import (
    check_at_least,
    check_bool,
    check_is,
    check_known,
    check_names,
    check_number,
    refuse_if,
    shown,
)
from lossytp.network.losses import NO_PACKETS, Bernoulli, LinkLosses, LossProcess, check_process
from lossytp.network.random_numbers import Normals
from lossytp.network.repairs import ZERO, Protect, ProtectFirst, ProtectLayers, Repair, repair_named
from lossytp.network.routes import ALGORITHMS, Algorithm, Hop, Hops, Link, Missing, Wire, algorithm_named, checked_link
from lossytp.network.scope import COUNTED, EVERYWHERE, Counters, LossTape, Scope, Site
from lossytp.network.traces import most_wraps

if TYPE_CHECKING:
    import pandas

LOSSLESS = Bernoulli(loss_rate=0.0)
TRAINING: tuple[str, int] = ("training", 0)
LinkOfGroup = tuple[str, int, int]  # group, src, dst


@dataclass
class Streams:
    """How far each link has read its random numbers, in training or in one evaluation."""

    purpose: tuple[str, int]  # "training" and 0, or "evaluation" and its step: part of the streams' keys
    block: tuple[str, int]  # the same, but evaluations of equal steps differ
    losses: dict[LinkOfGroup, LinkLosses] = field(default_factory=dict)
    normals: dict[LinkOfGroup, Normals] = field(default_factory=dict)


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
        ranks_per_node: k, if links between ranks of a node, of equal global rank // k, are lossless. The switch is
            outside of all nodes: links to and from it may lose packets.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a process is not a loss process, a link is not a pair of ranks, `ranks_per_node` is below 1, or
            `default` is given, or needed, where it does not fit.
    """

    def __init__(
        self,
        process: LossProcess | Mapping[Link, LossProcess],
        *,
        default: LossProcess | None = None,
        seed: int = 0,
        wire: Wire | None = None,
        scope: Scope = EVERYWHERE,
        ranks_per_node: int | None = None,
    ) -> None:
        named = process if isinstance(process, Mapping) else {}
        if default is not None and process is not named:
            raise ValueError(f"default = {shown(default)} needs a mapping of named links: give one, or leave it out")
        self._named = {checked_link(link): given for link, given in named.items()}
        self._default: Any = default if default is not None else LOSSLESS if named else process
        for name, given in {"process": self._default, **{f"process of {link}": named[link] for link in named}}.items():
            check_process(name, given)
        check_number("seed", seed, Integral, "one, such as 0")
        self.seed = index(seed)  # numpy's integers would select other streams
        self.wire = Wire() if wire is None else wire
        check_is("wire", self.wire, Wire, "one, such as Wire(mtu_bytes=1500)")
        check_is("scope", scope, Scope, 'one, such as Scope(direction="forward")')
        self.scope = scope
        if ranks_per_node is not None:
            check_at_least("ranks_per_node", ranks_per_node, 1)
        self.ranks_per_node = ranks_per_node
        self.counters = Counters()
        self._training = self._streams = Streams(TRAINING, TRAINING)
        self._evaluations = 0
        self.tape: LossTape | None = None  # that records or replays within `recording()`
        self.positions: np.ndarray | None = None  # (T,), of a message's tokens in their sequences, -1 for padding
        self._suspended: list[None] = []  # one for each block of `reliable()`; appending is safe in threads

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy holds. It is outside of all blocks, because nothing would end them in the copy."""
        return self.__dict__ | {"_streams": self._training, "_suspended": [], "tape": None, "positions": None}

    def process(self, src: int, dst: int) -> LossProcess:
        """Return the loss process of the link src -> dst."""
        return LOSSLESS if self.within_node(src, dst) else self._named.get((src, dst), self._default)

    def within_node(self, src: int, dst: int) -> bool:
        """Return whether the link src -> dst stays within a node."""
        return self.ranks_per_node is not None and src // self.ranks_per_node == dst // self.ranks_per_node

    def loss_rate(self, src: int, dst: int) -> float:
        """Return the loss rate of the link src -> dst."""
        return self.process(src, dst).loss_rate

    @property
    def named_links(self) -> tuple[Link, ...]:
        """Return the links that the mapping names."""
        return tuple(self._named)

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
        lost = self._take((group, src, dst), num_packets)
        self.counters.add((self._streams.purpose[0], site, group, src, dst), num_packets, len(lost), 0, len(lost))
        return lost

    def _take(self, link: LinkOfGroup, num_packets: int) -> np.ndarray:
        """Drop packets: every packet that any message loses is drawn here."""
        losses = self._streams.losses.get(link)
        if losses is None:
            losses = self._streams.losses[link] = self._begun(self._streams.purpose, link)
        return losses.take(num_packets)

    def _begun(self, purpose: tuple[str, int], link: LinkOfGroup) -> LinkLosses:
        return self.process(*link[1:]).losses((self.seed, *purpose, *link))

    def send(
        self,
        hops: Hops,
        itemsize: int,
        block: int = 1,
        *,
        repair: Repair = ZERO,
        group: str = "tp",
        site: Site | None = None,
    ) -> Missing:
        """Send one message of `itemsize`-byte blocks of `block` elements; return the packets that each hop lacks.

        Within `reliable()`, and outside the network's scope, no link advances and nothing is counted. While a tape
        replays, the recorded losses are returned.
        """
        if self.tape is not None and self.tape.replaying:
            return self.tape.next()
        missing = Missing([], reliable=True)
        if not self._is_reliable(site):
            capacity = self.wire.elements_per_packet(itemsize, block)
            missing = self._send_all(hops, capacity, repair, group, site)
            if hops:
                self.counters.add_message((self._streams.purpose[0], site, group), missing.any)
        if self.tape is not None:
            self.tape.record(missing)
        return missing

    def _send_all(self, hops: Hops, capacity: int, repair: Repair, group: str, site: Site | None) -> Missing:
        first, layers = repair.part("select"), repair.part("layers")
        if site is not None and site.layer is not None:
            if isinstance(layers, ProtectLayers) and layers.covers(site.layer):
                for hop in hops:
                    self._send_over(hop, capacity, layers.choosing(hop.num_packets(capacity)), group, site)
                return Missing([], reliable=True)
            if isinstance(first, ProtectFirst):
                protected = self._packets_at((0, first.positions), hops, capacity)
                each = zip(hops, (repair.choosing(len(packets)) for packets in protected), strict=True)
                sent = [self._send_over(hop, capacity, repair, group, site) for hop, repair in each]
                return Missing(sent, protected=protected)
            if self.scope.positions is not None:
                sent = []
                for hop, packets in zip(hops, self._packets_at(self.scope.positions, hops, capacity), strict=True):
                    part = hop._replace(start=0, stop=len(packets) * capacity)
                    sent.append(packets[self._send_over(part, capacity, repair, group, site)])
                return Missing(sent)
        kind = type(repair)
        once = (kind.carry, kind.deliver, kind.num_protected) == (Repair.carry, Repair.deliver, Repair.num_protected)
        send = self._send_once if once else self._send_over
        return Missing([send(hop, capacity, repair, group, site) for hop in hops])

    def _packets_at(self, positions: tuple[int, int] | slice, hops: Hops, capacity: int) -> list[np.ndarray]:
        """Return for each hop the packets that hold a token at one of the positions, sorted.

        Raises:
            ValueError: if the positions of the message's tokens are not known.
        """
        elements, tokens = max((hop.stop for hop in hops), default=0), self.positions
        if tokens is None or not len(tokens) or elements % len(tokens):
            raise ValueError("the positions of a message's tokens are not known here: call the model itself")
        first, stop = positions  # type: ignore[misc]
        before = np.concatenate([[0], np.cumsum((tokens >= first) & (tokens < stop))])
        found, width = [], elements // len(tokens)
        for hop in hops:
            starts = np.arange(hop.start, hop.stop, capacity)
            last = np.minimum(starts + capacity, hop.stop) - 1
            found.append(np.flatnonzero(before[last // width + 1] > before[starts // width]))
        return found

    def _send_once(self, hop: Hop, capacity: int, repair: Repair, group: str, site: Site | None) -> np.ndarray:
        """Do what `_send_over` does for a repair that sends each packet once; every microsecond counts here."""
        src, dst, start, stop, _ = hop
        packets = -(-repair.elements_on_wire(stop - start, capacity) // capacity)
        lost = self._take((group, src, dst), packets)
        missing, padding = len(lost), packets + (start - stop) // capacity
        self.counters.add((self._streams.purpose[0], site, group, src, dst), packets, missing, padding, missing)
        return lost

    def _send_over(self, hop: Hop, capacity: int, repair: Repair, group: str, site: Site | None) -> np.ndarray:
        counts = [0, 0, 0]  # packets, lost, extra

        def send(count: int, extra: int = 0) -> np.ndarray:
            lost = self._take((group, hop.src, hop.dst), count)
            counts[0] += count
            counts[1] += len(lost)
            counts[2] += extra
            return lost

        own = hop.stop - hop.start
        missing = repair.carry(own, capacity, send)
        counts[2] += -(-repair.elements_on_wire(own, capacity) // capacity) - hop.num_packets(capacity)  # padding
        packets, lost, extra = counts
        self.counters.add((self._streams.purpose[0], site, group, hop.src, hop.dst), packets, lost, extra, len(missing))
        return missing

    def normals(self, hops: Hops, *, group: str = "tp", site: Site | None = None) -> list[np.ndarray]:
        """Return standard normal numbers for the elements of each hop, each from its link's stream.

        Nothing is counted. The list is empty where the network is reliable. While a tape replays, the recorded numbers
        are returned.
        """
        if self.tape is not None and self.tape.replaying:
            return self.tape.next()
        numbers = []
        for hop in () if self._is_reliable(site) else hops:
            link, streams = (group, hop.src, hop.dst), self._streams
            if link not in streams.normals:
                streams.normals[link] = Normals((self.seed, *streams.purpose, *link, "normals"))
            numbers.append(streams.normals[link].take(hop.stop - hop.start))
        if self.tape is not None:
            self.tape.record(numbers)
        return numbers

    def _is_reliable(self, site: Site | None) -> bool:
        return self.suspended or not self.scope.covers(site)

    @property
    def block(self) -> tuple[str, int]:
        """Return ("training", 0), or ("evaluation", n) within the n-th block of `evaluation`, whatever its step."""
        return self._streams.block

    @property
    def suspended(self) -> bool:
        """Return whether the program is within `reliable()`."""
        return bool(self._suspended)

    @contextmanager
    def at(self, positions: np.ndarray | None) -> Iterator[None]:
        """Send messages of layers within the block for tokens at these positions, (T,); -1 for padding."""
        before, self.positions = self.positions, positions
        try:
            yield
        finally:
            self.positions = before

    @contextmanager
    def reliable(self) -> Iterator[None]:
        """Lose nothing within the block: no link advances and nothing is counted.

        The block affects the whole network, so also messages that other threads send meanwhile.
        """
        self._suspended.append(None)
        try:
            yield
        finally:
            self._suspended.pop()

    @contextmanager
    def evaluation(self, step: int) -> Iterator[None]:
        """Draw losses within the block from streams named by `step`, so that training's streams do not shift."""
        check_number("step", step, Integral, "the number of the training step")
        self._evaluations += 1
        before = self._streams
        self._streams = Streams(("evaluation", index(step)), ("evaluation", self._evaluations))
        try:
            yield
        finally:
            self._streams = before

    @contextmanager
    def recording(self, tape: LossTape) -> Iterator[None]:
        """Let `tape` record the losses of each collective within the block, or replay them if it has run before."""
        before, self.tape = self.tape, tape
        try:
            yield
        finally:
            self.tape = before
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
        wraps = most_wraps(self._training.losses.values())
        return summary if purpose != "training" or wraps is None else summary | {"wraps": wraps}

    def state_dict(self) -> dict:
        """Return the state of every training link, all counters and the network's settings, as JSON-ready values.

        Raises:
            ValueError: within `evaluation()`.
        """
        self._check_training()
        return {
            "seed": self.seed,
            "settings": self._settings(),
            "links": [[list(link), each.state_dict()] for link, each in self._training.losses.items()],
            "normals": [[list(link), each.position] for link, each in self._training.normals.items()],
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
        self._check_training()
        check_is("state", state, dict, "what state_dict() returned")
        self._check_settings({"seed": str(state.get("seed"))} | state.get("settings", {}))
        streams, counters = Streams(TRAINING, TRAINING), Counters()
        try:
            for (group, src, dst), position in state["links"]:
                streams.losses[group, src, dst] = self._begun(TRAINING, (group, src, dst))
                streams.losses[group, src, dst].load_state_dict(position)
            for (group, src, dst), position in state["normals"]:
                key = (self.seed, *TRAINING, group, src, dst, "normals")
                streams.normals[group, src, dst] = Normals(key, position)
            counters.load_state_dict(state["counters"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"state = {shown(state)} cannot be loaded ({reason}): give a state_dict()") from error
        self._training = self._streams = streams
        self.counters = counters

    def _check_training(self) -> None:
        if self._streams is not self._training:
            raise ValueError("the state is training's: save and load it outside of evaluation()")

    def _settings(self) -> dict[str, str]:
        """Return the settings that must be equal for a resumed network to lose the same packets."""
        nodes = "" if self.ranks_per_node is None else f" between nodes of {self.ranks_per_node} ranks"
        default = process_described(self._default) + nodes
        named = {f"process of {src}>{dst}": process_described(process) for (src, dst), process in self._named.items()}
        different = {link: process for link, process in named.items() if process != default}
        scope = described(self.scope).replace(", positions=None", "")  # older states do not have it
        return {"process": default} | different | {"wire": described(self.wire), "scope": scope}

    def _check_settings(self, theirs: dict[str, str]) -> None:
        mine = {"seed": str(self.seed)} | self._settings()
        theirs = theirs if "process" in theirs else mine | theirs
        for name in [*mine, *theirs]:
            one, other = (settings.get(name, settings.get("process")) for settings in (theirs, mine))
            if one != other:
                raise ValueError(f"the state is of a network with {name} = {one}, not {other}: give the same {name}")


def described(value: object) -> str:
    """Return one line that describes settings: a saved state must be of a network with the same line.

    It gives a dataclass's fields and an array's hash. Of anything else, such as a function, it gives only the type.
    """
    if isinstance(value, Real):
        return f"{float(value):.12g}"
    if value is None or isinstance(value, str):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(described, value))})"
    if isinstance(value, np.ndarray):
        return hashlib.blake2b(value.tobytes(), digest_size=4).hexdigest()
    inside = ""
    if is_dataclass(value):
        inside = f"({', '.join(f'{field.name}={described(getattr(value, field.name))}' for field in fields(value))})"
    return type(value).__name__ + inside


def process_described(process: LossProcess) -> str:
    """Return one line that describes a loss process. Its rate tells functions apart; `described` does not."""
    return f"{described(process)} of loss rate {process.loss_rate:.6g}"


WIRE_DTYPES = {"fp32": (4, 1), "bf16": (2, 1), "int8": (34, 32), "fp8": (34, 32), "int4": (18, 32)}
"""The bytes and the elements of a block, of which a packet carries whole ones. Two of the bytes are a block's scale."""
CONTROLS = ("noise",)


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """How ranks exchange messages. `CommConfig.named` makes one from the names that `parallelize` takes.

    Args:
        algorithm: the packets' routes.
        repair: what to do about lost packets.
        reliable_gather: False also loses packets of the results. Each rank then has its own residual stream or, with
            `sequence_parallel`, its own holes in the stream that it gathers.
        sequence_parallel: reduce-scatter and all-gather around a residual stream that is sharded over ranks.
        exact_adjoint: whether backward uses what forward lost, although no real sender knows it.
        masked_backward: whether a rank with its own stream gives no gradient to the part of a sum that it did not
            receive. Each rank knows this part. If False, the weights that computed it get a gradient all the same.
        wire_dtype: "fp32", "bf16", "int8", "fp8" or "int4": round to it what is sent, in both directions, as
            `lossytp.parallel.collectives.quantised` says. None keeps the messages' own dtype.
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
    masked_backward: bool = False
    wire_dtype: str | None = None
    control: str | None = None

    @classmethod
    def named(cls, *, algorithm: str = "direct", repair: str = "zero", **settings: Any) -> Self:
        """Return the configuration with an algorithm and a repair by name, such as "ring" and "fec(10, 8)"."""
        check_names(settings, [field.name for field in fields(cls)])
        return cls(algorithm=algorithm_named(algorithm), repair=repair_named(repair), **settings)

    def __post_init__(self) -> None:
        check_is("algorithm", self.algorithm, Algorithm, 'one, or its name to CommConfig.named, such as "ring"')
        check_is("repair", self.repair, Repair, 'one, or its name to CommConfig.named, such as "rescale"')
        for name in ("reliable_gather", "sequence_parallel", "exact_adjoint", "masked_backward"):
            check_bool(name, getattr(self, name))
        check_known("wire_dtype", self.wire_dtype, (None, *WIRE_DTYPES))
        check_known("control", self.control, (None, *CONTROLS))
        for refused, why in self._conflicts():
            if refused:
                raise ValueError(why)

    def _conflicts(self) -> Iterator[tuple[bool, str]]:
        """Yield whether two settings cannot be combined, and why."""
        algorithm, repair = f"algorithm = {self.algorithm.name!r}", f"repair = '{self.repair}'"
        own_part, adjoint, noise = self.repair.uses_own_part, self.exact_adjoint, self.control == "noise"
        elsewhere, select = self.sequence_parallel and not self.reliable_gather, self.repair.part("select")
        several = noise and not self.algorithm.hops_carry_one(self.sequence_parallel)
        yield (
            own_part and not self.algorithm.has_receiving_ranks,
            f"{repair} does not work with {algorithm}, where every rank lacks what is lost: choose another algorithm",
        )
        yield (
            own_part and elsewhere,
            f"{repair} does not work, as a rank has no part of what it gathers: choose another repair",
        )
        yield own_part and adjoint, f"exact_adjoint does not work with {repair}: choose another repair"
        yield (
            adjoint and not self.one_stream,
            "exact_adjoint does not work with lossy gathers or sequence_parallel: leave reliable_gather True and "
            "sequence_parallel False",
        )
        yield (
            self.masked_backward and (own_part or not self.own_streams),
            "masked_backward has nothing to mask where ranks share a stream or fill in a part of their own: give "
            "reliable_gather = False and another repair, or leave it out",
        )
        fit = [name for name, other in ALGORITHMS.items() if several and other.hops_carry_one(self.sequence_parallel)]
        yield (
            several,
            f"control = 'noise' does not work with {algorithm}, whose hops carry several ranks' parts: choose one of "
            f"{', '.join(fit)}",
        )
        yield (
            noise and (self.repair != ZERO or adjoint or self.masked_backward),
            "control = 'noise' loses no packets that repair, exact_adjoint or masked_backward act on: leave them out",
        )
        yield (
            not isinstance(select, Protect | ProtectFirst) and select != ZERO,
            f"{repair} chooses packets, but is no subclass of Protect, whose choice a sender knows: make it one",
        )
        yield (
            self.own_streams and self.algorithm.sum_reaches_all,
            f"reliable_gather = False does not fit {algorithm}, whose sum reaches every rank: choose another algorithm",
        )

    def of_model(self, blocks: int) -> Self:
        """Return the configuration for a model of this many transformer blocks."""
        return replace(self, repair=self.repair.of_model(blocks))

    def block(self, itemsize: int) -> tuple[int, int]:
        """Return the bytes and elements of a block on the wire: one element of `itemsize` bytes without wire_dtype."""
        return WIRE_DTYPES[self.wire_dtype] if self.wire_dtype else (itemsize, 1)

    def check_fits(self, wire: Wire) -> None:
        """Raise ValueError unless a packet carries whole blocks, and so each block's scale."""
        itemsize, block = self.block(1)
        capacity = wire.elements_per_packet(itemsize, block)
        fault = f"holds no block of wire_dtype = {self.wire_dtype!r}: give {wire.header_bytes + itemsize} or more"
        refuse_if(capacity == 0, "mtu_bytes", wire.mtu_bytes, fault)
        fault = f"has blocks of {block} elements, and a packet has {capacity}: leave out this or control = 'elements'"
        refuse_if(capacity % block, "wire_dtype", self.wire_dtype, fault)

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

    def check_delivers(self, network: LossyNetwork, ranks: tuple[int, ...]) -> None:
        """Raise ValueError if a link loses everything, so that what `protect` sends would never arrive."""
        if self.repair.part("select") == self.repair.part("layers") == ZERO:
            return
        for src, dst in sorted(self.lossy_links(ranks, None)):
            fault = f"cannot work, because the link {src}>{dst} loses all: give it a rate below 1, or choose another"
            refuse_if(network.loss_rate(src, dst) == 1, "repair", str(self.repair), fault)
