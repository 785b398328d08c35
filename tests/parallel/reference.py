"""Collectives over lossy links, message by message and packet by packet: plain lists, loops and numbers of Python.

Ranks pass messages on, and each receiver does what the repair says with what arrives. Nothing of the library is used
but which packets each link loses, one call of `lose` after another, and the random signs of Hadamard's transform.
"""

import itertools
import math

from tests.parallel.reference_links import SWITCH, Links, Message, Numbers


class Reference(Links):
    """What the ranks do together, over their links; made as `Links` are."""

    def all_reduce(self, parts: list[Numbers], lossy_gather: bool) -> list[Numbers]:
        """Each rank's result."""
        self._begin("all_reduce reduce", parts[0])
        if self.algorithm in ("direct", "ring"):
            owned = [self._counted(total) for total in self._reduced_in_chunks(parts, unit=1)]
            total = [value for chunk in owned for value in chunk]
        else:
            total = self._counted(self._reduced_whole(parts))
        if not lossy_gather:
            return [list(total) for _ in self.ranks]
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
        """The ranks' chunks of the sum, side by side."""
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
