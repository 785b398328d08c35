"""Collectives over lossy links, message by message and packet by packet: plain lists, loops and numbers of Python.

Ranks pass messages on, and each receiver does what the repair says with what arrives. Nothing of the library is used
but which packets each link loses, one call of `lose` after another, and the random signs of Hadamard's transform.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from inspect import signature

import lossytp as ltp
from lossytp.network.checks import parse
from lossytp.network.losses import Stream
from lossytp.network.repairs import REPAIRS

Numbers = list[float]
Lose = Callable[[int, int, int], list[int]]  # source, destination, packets -> those that are lost of them
SWITCH = -1
PRIME = 2**61 - 1


class Message:
    """What travels: values, how many ranks' parts each of them is the sum of, and whether it was given up upstream."""

    def __init__(self, values: Numbers, parts: list[int] | None = None, absent: list[bool] | None = None) -> None:
        self.values = values
        self.parts = parts or [1] * len(values)
        self.absent = absent or [False] * len(values)

    def __add__(self, other: "Message") -> "Message":
        values = [mine + theirs for mine, theirs in zip(self.values, other.values, strict=True)]
        return Message(values, [mine + theirs for mine, theirs in zip(self.parts, other.parts, strict=True)])

    def piece(self, start: int, stop: int) -> "Message":
        return Message(self.values[start:stop], self.parts[start:stop])


class Links:
    """The ranks, their links and what each receiver remembers; `signs` are of a hop's elements, for Hadamard."""

    def __init__(
        self,
        ranks: list[int],
        algorithm: str,
        repairs: list[tuple[str, dict]],
        elements_per_packet: int,
        lose: Lose,
        loss_rate: Callable[[int, int], float],
        signs: Numbers,
    ) -> None:
        self.ranks, self.algorithm = ranks, algorithm
        self.share = sum(options["share"] for name, options in repairs if name == "protect")
        delivering = [repair for repair in repairs if repair[0] in ("fec", "retransmit")]
        filling = [repair for repair in repairs if repair[0] not in ("protect", "fec", "retransmit")]
        self.delivery, self.options = delivering[0] if delivering else ("once", {})
        self.repair, self.blocks = filling[0] if filling else ("zero", {})
        self.capacity, self._lose, self._loss_rate, self._signs = elements_per_packet, lose, loss_rate, signs
        self.counts: dict[tuple, list[int]] = defaultdict(lambda: [0, 0, 0, 0])  # packets, lost, extra, missing
        self._memory: dict[tuple, Numbers] = {}
        self._sizes: dict[str, int] = {}
        self._operation = "send"

    # --- one message over one link

    def _begin(self, operation: str, message: Numbers) -> None:
        """Memories are of messages of one size."""
        if self._sizes.get(operation, len(message)) != len(message):
            self._memory = {place: last for place, last in self._memory.items() if place[0] != operation}
        self._sizes[operation] = len(message)
        self._operation = operation

    def _hop(self, src: int, dst: int, message: Message, what: str, own: Numbers | None = None) -> Message:
        """What the receiver has of the message; `own` is its own part of what the message carries, if it has one."""
        values = message.values
        if not values:
            return message
        protected, others = self._protected_and_others(values)
        rest = [values[place] if place < len(values) else 0.0 for place in others]
        block = self._block(len(rest)) if self.repair == "hadamard" else 1
        on_wire = self._encode(rest, block) if block > 1 else rest
        num_packets = math.ceil(len(on_wire) / self.capacity)
        missing = self._deliver(src, dst, num_packets, protected)
        self.counts[self._operation, src, dst][2] += num_packets - math.ceil(len(rest) / self.capacity)  # of padding
        arrives = [place // self.capacity not in missing for place in range(len(on_wire))]
        if block > 1:
            coefficients = [value if here else 0.0 for value, here in zip(on_wire, arrives, strict=True)]
            decoded = dict(zip(others, self._decode(coefficients, block), strict=False))
            return Message([decoded.get(place, value) for place, value in enumerate(values)])
        gone_places = {place for place, here in zip(others, arrives, strict=True) if not here}
        lost = [place in gone_places for place in range(len(values))]
        if self.repair == "local" and "gather" in self._operation:
            lost = [gone or before for gone, before in zip(lost, message.absent, strict=True)]
        instead = [0.0] * len(values)
        if self.repair == "local" and own is not None:
            instead = list(own)
        place = (self._operation, src, dst, what)
        if self.repair == "stale":
            instead = self._memory.get(place, instead)
        rate = self._loss_rate(src, dst)
        if self.delivery == "retransmit":
            rate **= self.options["budget"] + 1
        weight = 1 / (1 - rate) if self.repair == "rescale" and rate < 1 else 1.0
        at_risk = set(others)
        weights = [weight if place in at_risk else 1.0 for place in range(len(values))]
        crossed = [value * factor for value, factor in zip(values, weights, strict=True)]
        received = [other if gone else value for value, gone, other in zip(crossed, lost, instead, strict=True)]
        self._memory[place] = received
        parts = [0 if gone else count for count, gone in zip(message.parts, lost, strict=True)]
        return Message(received, parts, lost)

    def _protected_and_others(self, values: Numbers) -> tuple[int, list[int]]:
        """How many packets are protected, and the places of the values in the others, the last packet filled up."""
        packets = [values[first : first + self.capacity] for first in range(0, len(values), self.capacity)]
        count = math.ceil(self.share * len(packets))
        if not count:
            return 0, list(range(len(values)))
        strongest = sorted(range(len(packets)), key=lambda packet: -math.hypot(*packets[packet]))[:count]
        places = range(len(packets) * self.capacity)
        return count, [place for place in places if place // self.capacity not in strongest]

    def _deliver(self, src: int, dst: int, num_packets: int, protected: int) -> set[int]:
        counts = self.counts[self._operation, src, dst]

        def send(count: int, extra: int) -> list[int]:
            lost = self._lose(src, dst, count)
            counts[0] += count
            counts[1] += len(lost)
            counts[2] += extra
            return lost

        waiting = len(send(protected, 0))
        while waiting:
            waiting = len(send(waiting, waiting))
        if self.delivery == "retransmit":
            outstanding = [list(range(num_packets))[packet] for packet in send(num_packets, 0)]
            for _ in range(self.options["budget"]):
                if outstanding:
                    outstanding = [outstanding[packet] for packet in send(len(outstanding), len(outstanding))]
            missing = set(outstanding)
        elif self.delivery == "fec":
            missing = self._received_with_parity(num_packets, send)
        else:
            missing = set(send(num_packets, 0))
        counts[3] += len(missing)
        return missing

    # --- forward error correction, with packets that are numbers

    def _received_with_parity(self, num_packets: int, send: Callable[[int, int], list[int]]) -> set[int]:
        """Blocks are encoded, lost and decoded; packet number i carries the number (i + 1) ** 3."""
        k, parity = self.options["k"], self.options["n"] - self.options["k"]
        depth, xor = self.options.get("depth", 1), self.options.get("code") == "xor"
        wire: list[tuple[str, list[int], int, int]] = []  # kind, the packets of its block, its number there, payload
        numbers = list(range(num_packets))
        while numbers:
            run, numbers = numbers[: depth * k], numbers[depth * k :]
            num_blocks = min(depth, math.ceil(len(run) / k))
            blocks = [run[first::num_blocks] for first in range(num_blocks)]
            payloads = [[(packet + 1) ** 3 for packet in block] for block in blocks]
            for place in range(len(run) + parity * num_blocks):
                turn, block = divmod(place, num_blocks)
                if place < len(run):
                    wire.append(("own", blocks[block], turn, payloads[block][turn]))
                    continue
                made = turn - len(blocks[block])
                if xor:
                    total = 0
                    for payload in payloads[block][made::parity]:
                        total ^= payload
                else:
                    total = _polynomial_through(list(enumerate(payloads[block])), len(blocks[block]) + made)
                wire.append(("parity", blocks[block], made, total))
        lost = set(send(len(wire), len(wire) - num_packets))
        here = [packet for place, packet in enumerate(wire) if place not in lost]
        received: dict[int, int] = {}
        for kind, block, number, payload in here:
            if kind == "own":
                received[block[number]] = payload
        for block in {tuple(block): block for _, block, _, _ in wire}.values():
            parities = {number: payload for kind, of, number, payload in here if kind == "parity" and of == block}
            if xor:
                for made, total in parities.items():
                    covered = block[made::parity]
                    gone = [packet for packet in covered if packet not in received]
                    if len(gone) == 1:
                        for packet in covered:
                            total ^= received.get(packet, 0)
                        received[gone[0]] = total
                continue
            points = [(place, received[packet]) for place, packet in enumerate(block) if packet in received]
            points += [(len(block) + made, payload) for made, payload in parities.items()]
            if len(points) >= len(block):
                for place, packet in enumerate(block):
                    received.setdefault(packet, _polynomial_through(points[: len(block)], place))
        assert all(payload == (packet + 1) ** 3 for packet, payload in received.items()), "decoded wrongly"
        return set(range(num_packets)) - set(received)

    # --- Hadamard's transform

    def _block(self, num_elements: int) -> int:
        """The largest for which no packet holds two coefficients of one block."""
        block = self.blocks["block"]
        while block > 1:
            num_blocks = math.ceil(num_elements / block)
            if num_blocks >= self.capacity:
                return block
            block //= 2
        return 1

    def _encode(self, values: Numbers, block: int) -> Numbers:
        """Coefficient i of all blocks, then i + 1 of all."""
        num_blocks = math.ceil(len(values) / block)
        padded = values + [0.0] * (num_blocks * block - len(values))
        signed = [sign * value for sign, value in zip(self._signs, padded, strict=False)]
        blocks = [_walsh_hadamard(signed[j * block : (j + 1) * block]) for j in range(num_blocks)]
        return [blocks[j][i] for i in range(block) for j in range(num_blocks)]

    def _decode(self, coefficients: Numbers, block: int) -> Numbers:
        num_blocks = len(coefficients) // block
        blocks = [_walsh_hadamard(coefficients[j::num_blocks]) for j in range(num_blocks)]
        signed = [value for values in blocks for value in values]
        return [sign * value for sign, value in zip(self._signs, signed, strict=False)]


def _polynomial_through(points: list[tuple[int, int]], x: int) -> int:
    """The value at x of the polynomial of least degree through `points`, modulo a prime: Reed and Solomon's code."""
    total = 0
    for at, value in points:
        above = below = 1
        for other, _ in points:
            if other != at:
                above = above * (x - other) % PRIME
                below = below * (at - other) % PRIME
        total += value * above * pow(below, -1, PRIME)
    return total % PRIME


def _walsh_hadamard(values: Numbers) -> Numbers:
    """Sums and differences of pairs at distances 1, 2, 4, ..., divided by the root of the length."""
    values, distance = list(values), 1
    while distance < len(values):
        for first in range(0, len(values), 2 * distance):
            for i in range(first, first + distance):
                a, b = values[i], values[i + distance]
                values[i], values[i + distance] = a + b, a - b
        distance *= 2
    return [value / math.sqrt(len(values)) for value in values]


class Reference(Links):
    """What the ranks do together, over their links; made as `Links` are."""

    def all_reduce(self, parts: list[Numbers], lossy_gather: bool) -> list[Numbers]:
        total = self.reduced(parts)
        return self.gathered(total, parts) if lossy_gather else [list(total) for _ in self.ranks]

    def reduced(self, parts: list[Numbers]) -> Numbers:
        """The sum, wherever its parts are."""
        self._begin("all_reduce reduce", parts[0])
        if self.algorithm in ("direct", "ring"):
            return [value for total in self._reduced_in_chunks(parts, unit=1) for value in self._counted(total)]
        return self._counted(self._reduced_whole(parts))

    def gathered(self, total: Numbers, parts: list[Numbers]) -> list[Numbers]:
        self._begin("all_reduce gather", total)
        self._own = parts
        if self.algorithm in ("direct", "ring"):
            return self._gathered_in_chunks(total, unit=1)
        if self.algorithm == "switch":
            return [
                self._hop(SWITCH, rank, Message(total), "down", own=parts[place]).values
                for place, rank in enumerate(self.ranks)
            ]
        assert self.algorithm == "tree"
        results: dict[int, Numbers] = {0: list(total)}

        def hand_down(place: int, message: Message) -> None:
            for child in self._children(place):
                received = self._hop(self.ranks[place], self.ranks[child], message, "down", own=parts[child])
                results[child] = received.values
                hand_down(child, received)

        hand_down(0, Message(total))
        return [results[place] for place in range(len(self.ranks))]

    def reduce_scatter(self, parts: list[Numbers], unit: int) -> Numbers:
        self._begin("reduce_scatter reduce", parts[0])
        chunks = self._chunks(len(parts[0]), unit)
        if self.algorithm in ("direct", "ring"):
            owned = self._reduced_in_chunks(parts, unit)
        else:
            whole = self._reduced_whole(parts)
            owned = [whole.piece(*chunk) for chunk in chunks]
            if self.algorithm == "switch":
                for place, rank in enumerate(self.ranks):
                    own = parts[place][slice(*chunks[place])]
                    owned[place] = self._hop(SWITCH, rank, owned[place], "down", own=own)
            if self.algorithm == "tree":
                for owner in range(len(self.ranks)):
                    stations = self._from_the_root(owner)
                    for above, below in itertools.pairwise(stations):
                        own = parts[below][slice(*chunks[owner])]
                        above_rank, below_rank = self.ranks[above], self.ranks[below]
                        owned[owner] = self._hop(above_rank, below_rank, owned[owner], f"down {owner}", own=own)
        return [value for total in owned for value in self._counted(total)]

    def all_gather(self, x: Numbers, unit: int) -> list[Numbers]:
        """What each rank has of `x`, whose chunk c is rank c's."""
        self._begin("all_gather gather", x)
        self._own = None
        chunks = self._chunks(len(x), unit)
        size = len(self.ranks)
        if self.algorithm in ("direct", "ring"):
            return self._gathered_in_chunks(x, unit)
        mine = [Message(x[slice(*chunk)]) for chunk in chunks]
        if self.algorithm == "sender":
            sent = [self._hop(rank, SWITCH, mine[place], "up") for place, rank in enumerate(self.ranks)]
            return [[value for message in sent for value in message.values] for _ in self.ranks]
        have = [[mine[c] if c == place else None for c in range(size)] for place in range(size)]
        if self.algorithm == "switch":
            if size > 1:
                up = [self._hop(rank, SWITCH, mine[place], "up") for place, rank in enumerate(self.ranks)]
            for place, rank in enumerate(self.ranks):
                for c in range(size):
                    if c != place:
                        have[place][c] = self._hop(SWITCH, rank, up[c], f"down {c}")
        else:
            assert self.algorithm == "tree"
            at_the_root = []
            for owner in range(size):
                message, stations = mine[owner], self._from_the_root(owner)[::-1]
                for below, above in itertools.pairwise(stations):
                    message = self._hop(self.ranks[below], self.ranks[above], message, f"up {owner}")
                at_the_root.append(message)
            have[0] = list(at_the_root)

            def hand_down(place: int, messages: list) -> None:
                """What came from above, also where a rank had it on its way up; its own it keeps."""
                for child in self._children(place):
                    received = []
                    for owner in range(size):
                        wanted = [below for below in self._below(child) if below != owner]
                        link = self.ranks[place], self.ranks[child]
                        received.append(self._hop(*link, messages[owner], f"down {owner}") if wanted else None)
                    have[child] = [mine[c] if c == child else received[c] for c in range(size)]
                    hand_down(child, received)

            hand_down(0, at_the_root)
        return [[value for message in row for value in message.values] for row in have]

    # --- phases

    def _reduced_in_chunks(self, parts: list[Numbers], unit: int) -> list[Message]:
        """Each rank's chunk, summed at that rank."""
        chunks, size = self._chunks(len(parts[0]), unit), len(self.ranks)
        pieces = [[Message(part[slice(*chunk)]) for chunk in chunks] for part in parts]
        if self.algorithm == "direct":
            sums = [pieces[c][c] for c in range(size)]
            for c in range(size):
                for r in range(size):
                    if r != c:
                        own = pieces[c][c].values
                        sums[c] += self._hop(self.ranks[r], self.ranks[c], pieces[r][c], "up", own=own)
            return sums
        holds = [(r - 1) % size for r in range(size)]  # the chunk that a rank is to pass on
        running = [pieces[r][holds[r]] for r in range(size)]
        for _ in range(size - 1):
            arriving: list = [None] * size
            for r in range(size):
                right = (r + 1) % size
                own = pieces[right][holds[r]].values
                what = f"up {holds[r]}"
                arriving[right] = holds[r], self._hop(self.ranks[r], self.ranks[right], running[r], what, own=own)
            for r in range(size):
                holds[r], received = arriving[r]
                running[r] = received + pieces[r][holds[r]]
        assert holds == list(range(size))
        return running

    def _reduced_whole(self, parts: list[Numbers]) -> Message:
        """At the switch, or at the root."""
        if self.algorithm == "tree":
            return self._subtree_sum(0, parts)
        total = Message([0.0] * len(parts[0]), [0] * len(parts[0]))
        for rank, part in zip(self.ranks, parts, strict=True):
            total += self._hop(rank, SWITCH, Message(part), "up")
        return total

    def _subtree_sum(self, place: int, parts: list[Numbers]) -> Message:
        total = Message(parts[place])
        for child in self._children(place):
            below = self._subtree_sum(child, parts)
            total += self._hop(self.ranks[child], self.ranks[place], below, "up", own=parts[place])
        return total

    def _gathered_in_chunks(self, x: Numbers, unit: int) -> list[Numbers]:
        chunks, size = self._chunks(len(x), unit), len(self.ranks)
        results = [list(x) for _ in self.ranks]  # of which each rank's own chunk stays

        def own(r: int, c: int) -> Numbers | None:
            return None if self._own is None else self._own[r][slice(*chunks[c])]

        if self.algorithm == "direct":
            for c in range(size):
                for r in range(size):
                    if r != c:
                        message = Message(x[slice(*chunks[c])])
                        received = self._hop(self.ranks[c], self.ranks[r], message, "down", own=own(r, c))
                        results[r][slice(*chunks[c])] = received.values
            return results
        holds = list(range(size))
        running = [Message(x[slice(*chunks[c])]) for c in range(size)]
        for _ in range(size - 1):
            arriving: list = [None] * size
            for r in range(size):
                right, c = (r + 1) % size, holds[r]
                link = self.ranks[r], self.ranks[right]
                arriving[right] = c, self._hop(*link, running[r], f"down {c}", own=own(right, c))
            for r in range(size):
                holds[r], running[r] = arriving[r]
                results[r][slice(*chunks[holds[r]])] = running[r].values
        return results

    def _counted(self, total: Message) -> Numbers:
        """What is at an owner in the end, scaled if the repair is to count."""
        if self.repair != "rescale_counted":
            return total.values
        size = len(self.ranks)
        return [v * size / arrived if arrived else 0.0 for v, arrived in zip(total.values, total.parts, strict=True)]

    # --- shapes

    def _chunks(self, num_elements: int, unit: int) -> list[tuple[int, int]]:
        size = math.ceil(num_elements / unit / len(self.ranks)) * unit
        edges = [min(c * size, num_elements) for c in range(len(self.ranks) + 1)]
        return [(edges[c], edges[c + 1]) for c in range(len(self.ranks))]

    def _children(self, place: int) -> list[int]:
        return [child for child in range(1, len(self.ranks)) if (child - 1) // 2 == place]

    def _below(self, place: int) -> list[int]:
        return [place] + [below for child in self._children(place) for below in self._below(child)]

    def _from_the_root(self, place: int) -> list[int]:
        return [0] if place == 0 else [*self._from_the_root((place - 1) // 2), place]


def reference(
    network: ltp.LossyNetwork,
    ranks: list[int],
    algorithm: str,
    repair: str,
    elements_per_packet: int,
    group: str = "tp",
) -> Reference:
    """Take losses from `network`, packet by packet, and nothing else."""

    def named(part: str) -> tuple[str, dict]:
        name, given, options = parse("repair", part)
        bound = signature(REPAIRS[name]).bind(*given, **options)
        bound.apply_defaults()
        return name, bound.arguments

    return Reference(
        ranks,
        algorithm,
        [named(part) for part in repair.split(" + ")],
        elements_per_packet,
        lambda src, dst, count: network.lost_packets(src, dst, count, group=group).tolist(),
        lambda src, dst: network.process(src, dst).loss_rate,
        [-1.0 if uniform < 0.5 else 1.0 for uniform in Stream((network.seed, "hadamard")).uniforms(4096).tolist()],
    )
