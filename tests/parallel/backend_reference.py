"""What a rank ends up with over the backend `lossy`, in plain Python, and the network that takes packets from it."""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import lossytp as ltp
from tests.parallel.reference import Message, reference
from tests.parallel.reference import Reference as Links

WIRE = ltp.Wire(mtu_bytes=76)  # 32 bytes of payload: 8 elements of fp32, 4 of float64, 16 of bfloat16
LOSS_RATE = 0.2


def network(loss_rate: float = LOSS_RATE, seed: int = 3) -> ltp.LossyNetwork:
    return ltp.LossyNetwork(ltp.Bernoulli(loss_rate=loss_rate), seed=seed, wire=WIRE)


def uneven(num_ranks: int, each: int) -> list[list[int]]:
    """[i][j]: how much of R * each goes from position i to position j; most to the next one."""
    most = num_ranks * each - (num_ranks - 1)
    return [[most if j == (i + 1) % num_ranks else 1 for j in range(num_ranks)] for i in range(num_ranks)]


class Reference:
    """What this rank ends up with, packet by packet, over a network of its own of the same seed.

    Messages are lists of numbers, by position in the group.
    """

    def __init__(
        self, seed: int, group: ProcessGroup, algorithm: str, repair: str, reliable_gather: bool = True
    ) -> None:
        self.network, self.room = network(seed=seed), 32 // torch.float32.itemsize
        self.ranks, self.rank = dist.get_process_group_ranks(group), dist.get_rank()
        self.me, self.size = self.ranks.index(self.rank), len(self.ranks)
        self.name = f"{group.group_name}@{self.ranks[0]}"
        self.how, self.lossy_gather = (algorithm, repair), not reliable_gather and algorithm != "sender"

    def links(self, suffix: str = "") -> Links:
        return reference(self.network, self.ranks, *self.how, self.room, self.name + suffix)

    def sums(self, several: list[list[list]], divisor: int = 1) -> list[list]:
        """All-reduces in one call: all of them up, then all down."""
        links = self.links()
        totals = [[value / divisor for value in links.reduced(messages)] for messages in several]
        if not self.lossy_gather:
            return totals
        return [links.gathered(total, parts)[self.me] for total, parts in zip(totals, several, strict=True)]

    def sum(self, messages: list[list]) -> list:
        return self.sums([messages])[0]

    def mean(self, messages: list[list]) -> list:
        return self.sums([messages], self.size)[0]

    def scatter(self, messages: list[list]) -> list:
        each = len(messages[0]) // self.size
        return self.links().reduce_scatter(messages, unit=1)[self.me * each :][:each]

    def gather(self, messages: list[list]) -> list:
        return self.links().all_gather([value for shard in messages for value in shard], unit=1)[self.me]

    def cross(self, src: int, values: list) -> list:
        """What arrives here of the values from rank `src`."""
        return self.links(f" from {src}")._hop(src, self.rank, Message(values), "").values if values else []

    def even(self, messages: list[list]) -> list:
        return self._exchange(messages, [[len(messages[0]) // self.size] * self.size] * self.size)

    def uneven_pairs(self, messages: list[list]) -> list:
        counts = uneven(self.size, len(messages[0]) // self.size)
        pairs = [[value for value in values for _ in range(2)] for values in messages]
        return self._exchange(pairs, [[2 * count for count in row] for row in counts])

    def _exchange(self, messages: list[list], counts: list[list[int]]) -> list:
        result: list = []
        for src, values, sent in zip(self.ranks, messages, counts, strict=True):
            part = values[sum(sent[: self.me]) : sum(sent[: self.me + 1])]
            result += part if src == self.rank else self.cross(src, part)
        return result

    def ring(self, messages: list[list]) -> list:
        return self.cross(self.ranks[self.me - 1], messages[self.me - 1])
