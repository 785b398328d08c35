"""What a rank ends up with over the backend `lossy`, in plain Python, and the network that takes packets from it."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import lossytp as ltp

WIRE = ltp.Wire(mtu_bytes=76)  # 32 bytes of payload: 8 elements of fp32, 4 of float64, 16 of bfloat16
LOSS_RATE = 0.2


def network(loss_rate: float = LOSS_RATE, seed: int = 3) -> ltp.LossyNetwork:
    return ltp.LossyNetwork(ltp.Bernoulli(loss_rate=loss_rate), seed=seed, wire=WIRE)


def uneven(num_ranks: int, each: int) -> list[list[int]]:
    """[i][j]: how much of R * each goes from position i to position j; most to the next one."""
    most = num_ranks * each - (num_ranks - 1)
    return [[most if j == (i + 1) % num_ranks else 1 for j in range(num_ranks)] for i in range(num_ranks)]


class Reference:
    """What this rank ends up with, packet by packet in plain Python, over a network of its own of the same seed.

    Messages are lists of numbers, by position in the group; algorithms are played step by step, rank by rank.
    """

    def __init__(
        self, seed: int, group: ProcessGroup, algorithm: str, repair: str, reliable_gather: bool = True
    ) -> None:
        self.network, self.room = network(seed=seed), 32 // torch.float32.itemsize
        self.ranks, self.me = dist.get_process_group_ranks(group), dist.get_rank()
        self.name = f"{group.group_name}@{self.ranks[0]}"
        self.algorithm, self.repair, self.reliable_gather = algorithm, repair, reliable_gather
        self.weight = 1.25 if repair == "rescale" else 1.0
        self.size = len(self.ranks)

    def missing(self, num_packets: int, take: Callable[[int], list[int]]) -> set[int]:
        """Which packets of a message lack in the end, those on the wire being lost as `take` says."""
        if self.repair == "retransmit(1)":
            lost = take(num_packets)
            return {lost[again] for again in take(len(lost))}
        if self.repair == "fec(3, 2)":
            missing = set()
            for first in range(0, num_packets, 2):
                block = [*range(first, min(first + 2, num_packets)), -1]  # the last is parity
                lost = [block[place] for place in take(len(block))]
                missing |= set(lost) - {-1} if len(lost) > 1 else set()
            return missing
        return set(take(num_packets))

    def cross(self, src: int, dst: int, values: list, suffix: str = "", instead: list | None = None) -> list:
        """What arrives of the values, with zeros, or what is to stand `instead`, for what does not."""

        def take(count: int) -> list[int]:
            return self.network.lost_packets(src, dst, count, group=self.name + suffix).tolist()

        lost = self.missing(math.ceil(len(values) / self.room), take)
        other = instead if instead and self.repair == "local" else [0.0] * len(values)
        return [other[i] if i // self.room in lost else self.weight * value for i, value in enumerate(values)]

    def hop(self, src: int, dst: int, values: list, own: list | None = None) -> list:
        """The same between positions, -1 being the switch; `own` is what the receiver has at those places."""
        ranks = [*self.ranks, -1]
        return self.cross(ranks[src], ranks[dst], values, instead=own)

    def chunks(self, values: list) -> list[list]:
        each = math.ceil(len(values) / self.size)
        return [values[first * each : (first + 1) * each] for first in range(self.size)]

    def reduce(self, messages: list[list]) -> list:
        """The sum, wherever its parts are; contributions are complex, their imaginary part counts them."""
        total = self._add_up([[value + 1j for value in values] for values in messages])
        if self.repair == "rescale_counted":
            return [self.size * value.real / value.imag if value.imag else 0.0 for value in total]
        return [value.real for value in total]

    def _add_up(self, messages: list[list]) -> list:
        if self.algorithm == "tree":
            sums = list(messages)
            for child in range(self.size - 1, 0, -1):
                parent = (child - 1) // 2
                sums[parent] = _plus(sums[parent], self.hop(child, parent, sums[child], messages[parent]))
            return sums[0]
        if self.algorithm in ("switch", "sender"):
            arrived = [self.hop(position, -1, values) for position, values in enumerate(messages)]
            return [sum(column) for column in zip(*arrived, strict=True)]
        parts = [self.chunks(values) for values in messages]
        sums = [list(own) for own in parts]
        if self.algorithm == "direct":
            for src in range(self.size):
                for dst in range(self.size):
                    if src != dst:
                        sums[dst][dst] = _plus(sums[dst][dst], self.hop(src, dst, parts[src][dst], parts[dst][dst]))
        else:
            for step in range(self.size - 1):  # of a ring
                for src in range(self.size):
                    chunk, dst = (src - step - 1) % self.size, (src + 1) % self.size
                    arrived = self.hop(src, dst, sums[src][chunk], parts[dst][chunk])
                    sums[dst][chunk] = _plus(parts[dst][chunk], arrived)
        return [value for chunk in range(self.size) for value in sums[chunk][chunk]]

    def hand_out(self, total: list, owns: list[list]) -> list:
        """This rank's copy of a sum; `owns` are what the ranks have that may stand for it."""
        held: dict[int, list] = {}
        if self.algorithm == "tree":
            held[0] = [[value, True] for value in total]  # and whether it came all the way
            for child in range(1, self.size):
                held[child] = self._pass_on((child - 1) // 2, child, held[(child - 1) // 2])
        elif self.algorithm == "switch":
            held = {dst: self._pass_on(-1, dst, [[value, True] for value in total]) for dst in range(self.size)}
        elif self.algorithm == "sender":
            return total
        else:
            pieces = {(chunk, chunk): [[v, True] for v in part] for chunk, part in enumerate(self.chunks(total))}
            self._all_to_all_others(pieces)
            for dst in range(self.size):
                held[dst] = [value for chunk in range(self.size) for value in pieces[dst, chunk]]
        me = self.ranks.index(self.me)
        stand_in = owns[me] if self.repair == "local" else [0.0] * len(total)
        return [value if came else other for (value, came), other in zip(held[me], stand_in, strict=True)]

    def _pass_on(self, src: int, dst: int, held: list) -> list:
        """What arrives; what is lost, or was lost before, is marked so."""
        arrived = self.hop(src, dst, [1.0] * len(held))
        return [[value * self.weight, came and bool(there)] for (value, came), there in zip(held, arrived, strict=True)]

    def _all_to_all_others(self, pieces: dict[tuple[int, int], list]) -> None:
        """From each chunk's owner to everyone, by `direct` or around the ring."""
        if self.algorithm == "direct":
            for src in range(self.size):
                for dst in range(self.size):
                    if src != dst:
                        pieces[dst, src] = self._pass_on(src, dst, pieces[src, src])
            return
        for step in range(self.size - 1):
            for src in range(self.size):
                chunk, dst = (src - step) % self.size, (src + 1) % self.size
                pieces[dst, chunk] = self._pass_on(src, dst, pieces[src, chunk])

    def sums(self, several: list[list[list]]) -> list[list]:
        """All-reduces in one call: all of them up, then all down."""
        totals = [self.reduce(messages) for messages in several]
        if self.reliable_gather:
            return totals
        return [self.hand_out(total, messages) for total, messages in zip(totals, several, strict=True)]

    def sum(self, messages: list[list]) -> list:
        return self.sums([messages])[0]

    def mean(self, messages: list[list]) -> list:
        total = [value / len(messages) for value in self.reduce(messages)]
        return total if self.reliable_gather else self.hand_out(total, messages)

    def scatter(self, messages: list[list]) -> list:
        me = self.ranks.index(self.me)
        if self.algorithm not in ("switch", "tree"):
            return self.chunks(self.reduce(messages))[me]
        total = self._add_up([[value + 1j for value in values] for values in messages])
        mine = []
        for owner, chunk in enumerate(self.chunks(total)):
            path = [owner] if owner else []
            while self.algorithm == "tree" and path and path[0] > 2:
                path.insert(0, (path[0] - 1) // 2)
            if self.algorithm == "switch":
                path = [owner]
            src = -1 if self.algorithm == "switch" else 0
            for dst in path:
                own = [value + 1j for value in self.chunks(messages[dst])[owner]]
                chunk, src = self.hop(src, dst, chunk, own), dst
            mine = chunk if owner == me else mine
        if self.repair == "rescale_counted":
            return [self.size * value.real / value.imag if value.imag else 0.0 for value in mine]
        return [value.real for value in mine]

    def gather(self, messages: list[list]) -> list:
        me, own = self.ranks.index(self.me), [[[value, True] for value in shard] for shard in messages]
        if self.algorithm == "sender":
            return [value for position, shard in enumerate(messages) for value in self.hop(position, -1, shard)]
        pieces = {(owner, owner): shard for owner, shard in enumerate(own)}
        if self.algorithm in ("direct", "ring"):
            self._all_to_all_others(pieces)
        else:
            root = -1 if self.algorithm == "switch" else 0
            for owner, shard in enumerate(own):
                src = owner
                while src > 0 or (src == 0 and root == -1):
                    dst = -1 if root == -1 else (src - 1) // 2
                    shard, src = self._pass_on(src, dst, shard), dst
                pieces[root, owner] = shard
            for child in range(1 if root == 0 else 0, self.size):
                parent = (child - 1) // 2 if root == 0 else -1
                leaf = root == -1 or 2 * child + 1 >= self.size
                for owner in range(self.size):
                    if owner != child or not leaf:  # a leaf wants nobody's but others'
                        pieces[child, owner] = self._pass_on(parent, child, pieces[parent, owner])
            pieces[me, me] = own[me]
        mine = [value for owner in range(self.size) for value in pieces[me, owner]]
        return [value if came else 0.0 for value, came in mine]

    def even(self, messages: list[list]) -> list:
        return self._exchange(messages, [[len(messages[0]) // len(messages)] * len(messages)] * len(messages))

    def uneven_pairs(self, messages: list[list]) -> list:
        counts = uneven(len(messages), len(messages[0]) // len(messages))
        pairs = [[value for value in values for _ in range(2)] for values in messages]
        return self._exchange(pairs, [[2 * count for count in row] for row in counts])

    def _exchange(self, messages: list[list], counts: list[list[int]]) -> list:
        me, result = self.ranks.index(self.me), []
        for src, values, sent in zip(self.ranks, messages, counts, strict=True):
            part = values[sum(sent[:me]) : sum(sent[: me + 1])]
            result += part if src == self.me else self.cross(src, self.me, part, f" from {src}")
        return result

    def ring(self, messages: list[list]) -> list:
        position = self.ranks.index(self.me) - 1
        return self.cross(self.ranks[position], self.me, messages[position], f" from {self.ranks[position]}")


def _plus(one: list, other: list) -> list:
    return [a + b for a, b in zip(one, other, strict=True)]
