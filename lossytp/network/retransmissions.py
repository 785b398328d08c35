"""Compute when senders that retransmit lost packets finish, by selective repeat or go-back-N, on many links at once.

The unit of time is a gap, the time between the starts of two consecutive packets. A sender starts at most one packet
per gap. It idles only while it may send nothing, and only losses cause that. So a message takes the time of its packets
plus the idle time, and the functions step from loss to loss, not from packet to packet.

All functions take the same arguments:
    lost: for each link, the sorted indices of its lost packets among all that it sends; int64 (num_lost,).
    num_packets, num_messages: each link carries `num_messages` messages of `num_packets` packets, one after another.
        A message starts when the one before it is complete, and its times count from its start.
    window: packet n may leave only after all packets up to n - window are acknowledged.
    timeout: gaps from the start of a lost packet until it is due again, at least 1.
They return:
    starts: time at which the packet that completes each message starts, in gaps: float64 (links, messages).
    sent: number of packets that each link sent, with retransmissions: float64 (links,).
Whole and dyadic times are exact, so rounding never decides which of two simultaneous events is first.
"""

import numpy as np

from lossytp.network.bernoulli import NEVER


class _Links:
    """The state of the links that are not done. A link has sent `sent` packets, and its next loss is `lost[cursor]`."""

    def __init__(self, lost: list[np.ndarray], num_packets: int, num_messages: int) -> None:
        never = np.array([NEVER], dtype=np.float64)  # ends each link's losses, so that the cursor always points at one
        self.lost = np.concatenate([piece for losses in lost for piece in (losses, never)])
        lengths = np.array([len(losses) + 1 for losses in lost])
        self.cursor = np.cumsum(lengths) - lengths
        self.sent = np.zeros(len(lost))
        self.message = np.zeros(len(lost), dtype=np.int64)
        self.row = np.arange(len(lost))
        self.time = np.zeros(len(lost))  # when the next packet may start, from the message's start
        self.next = np.zeros(len(lost))  # selective repeat: first packet not sent yet; go-back-N: not yet accepted
        self.starts = np.full((len(lost), num_messages), num_packets - 1.0)
        self.all_sent = np.zeros(len(lost))
        self.num_packets, self.num_messages = num_packets, num_messages

    def begin(self, which: np.ndarray) -> None:
        """Begin the next message that loses a packet. Skip the messages before it, which take one gap per packet."""
        unharmed = (self.lost[self.cursor[which]] - self.sent[which]) // self.num_packets
        unharmed = np.minimum(unharmed, self.num_messages - self.message[which])
        self.message[which] += unharmed.astype(np.int64)
        self.sent[which] += unharmed * self.num_packets
        self.time[which] = self.next[which] = 0

    def finish(self, which: np.ndarray, starts: np.ndarray) -> np.ndarray | None:
        """Record the ends of these links' messages, and begin the next ones. Return `still_at_work()`."""
        self.starts[self.row[which], self.message[which]] = starts
        self.message[which] += 1
        self.begin(which)
        return self.still_at_work()

    def still_at_work(self) -> np.ndarray | None:
        """Return a mask of the links with messages left, or None if all have some. Record what the others sent."""
        working = self.message < self.num_messages
        if working.all():
            return None
        self.all_sent[self.row[~working]] = self.sent[~working]
        return working

    def keep(self, working: np.ndarray) -> None:
        """Drop the links that are done."""
        for name in ("cursor", "sent", "message", "row", "time", "next"):
            setattr(self, name, getattr(self, name)[working])


def go_back_n(
    lost: list[np.ndarray], num_packets: int, num_messages: int, *, window: int, timeout: float
) -> tuple[np.ndarray, np.ndarray]:
    """Time go-back-N (Bertsekas and Gallager, "Data networks", 2nd ed. 1992, 2.4.2): receivers take packets in order.

    After a lost packet, the sender continues until that packet's timeout or the end of the window, and the receiver
    discards all of it. The sender then finishes the current packet, and sends everything again from the lost packet on.
    """
    links = _Links(lost, num_packets, num_messages)
    links.begin(np.arange(len(lost)))
    in_vain = min(np.ceil(timeout), window) - 1
    apart = links.lost[links.lost < NEVER].max(initial=0) + 2  # offset between links, so that one array sorts them all
    in_order = np.minimum(links.lost, apart - 1) + np.repeat(links.row * apart, [len(losses) + 1 for losses in lost])
    working = links.still_at_work()
    while True:
        if working is not None:
            links.keep(working)
            working = None
        if not len(links.row):
            return links.starts, links.all_sent
        run = links.lost[links.cursor] - links.sent  # packets that arrive before the next loss
        left = num_packets - links.next
        ends = np.flatnonzero(run >= left)
        breaks = np.flatnonzero(run < left)
        run, first = run[breaks], links.next[breaks]
        wasted = np.minimum(in_vain, left[breaks] - run - 1)
        links.sent[breaks] += run + 1 + wasted
        links.time[breaks] += run + np.maximum(timeout, wasted + 1)
        links.next[breaks] = first + run
        # skip this loss, and the losses among the discarded packets
        sent = np.minimum(links.sent[breaks], apart - 1)
        links.cursor[breaks] = np.searchsorted(in_order, links.row[breaks] * apart + sent)
        if len(ends):
            left = left[ends]
            links.sent[ends] += left
            working = links.finish(ends, links.time[ends] + left - 1)


def selective_repeat(
    lost: list[np.ndarray], num_packets: int, num_messages: int, *, window: int, timeout: float, acknowledged: float
) -> tuple[np.ndarray, np.ndarray]:
    """Time selective repeat (Bertsekas and Gallager, "Data networks", 2nd ed. 1992, 2.4.3): senders repeat losses only.

    Each packet has its own timer. A packet that is due again goes before new ones, even outside the window. The
    acknowledgement of a delivered packet comes `acknowledged` gaps after its start, at most `window` and `timeout`.

    All timeouts are equal, so packets fall due in the order of their losses: retransmission k repeats loss k. In each
    round, every link sends new packets until one of three events: its next loss occurs, its oldest loss is due again,
    or the window ends at a packet that is not acknowledged.
    """
    links = _Links(lost, num_packets, num_messages)
    losses = len(links.lost)
    due = np.full(losses, np.inf)  # when the retransmission of each loss may start; inf before the loss occurs
    packet = np.full(losses, np.inf)  # which packet of the message was lost
    first_loss = np.arange(losses)  # the loss in which the same packet was lost first
    # When a packet is acknowledged, at its first loss; inf while unknown. At its later losses: -inf
    settled = np.full(losses, np.inf)
    links.begin(np.arange(len(lost)))
    oldest = links.cursor.copy()  # the loss that is retransmitted next
    base = links.cursor.copy()  # the loss that holds the window's start back, if it has occurred
    working = links.still_at_work()
    while True:
        if working is not None:
            links.keep(working)
            oldest, base = oldest[working], base[working]
            working = None
        if not len(links.row):
            return links.starts, links.all_sent
        due_next, limit = due[oldest], packet[base] + window
        new = np.minimum(limit, num_packets) - links.next
        np.minimum(new, np.ceil(due_next - links.time), out=new)
        np.minimum(new, links.lost[links.cursor] + 1 - links.sent, out=new)
        np.maximum(new, 0, out=new)
        links.sent += new
        links.next += new
        links.time += new
        meets_loss = links.lost[links.cursor] < links.sent
        exhausted = links.next == num_packets
        ends = exhausted & (due_next == np.inf) & ~meets_loss
        waits = (links.next >= limit) & ~exhausted & (settled[base] <= due_next) & ~meets_loss
        repeats = np.flatnonzero(~(meets_loss | ends | waits))

        which = np.flatnonzero(meets_loss)
        loss = links.cursor[which]
        due[loss] = links.time[which] - 1 + timeout
        packet[loss] = links.next[which] - 1
        links.cursor[which] += 1

        which = np.flatnonzero(waits)
        links.time[which] = np.maximum(links.time[which], settled[base[which]])
        base[which] += 1

        loss, again = oldest[repeats], links.cursor[repeats]
        start = np.maximum(links.time[repeats], due[loss])
        fails = links.lost[again] == links.sent[repeats]
        settled[first_loss[loss[~fails]]] = start[~fails] + acknowledged
        loss, again = loss[fails], again[fails]
        due[again] = start[fails] + timeout
        packet[again], first_loss[again], settled[again] = packet[loss], first_loss[loss], -np.inf
        links.cursor[repeats] += fails
        links.sent[repeats] += 1
        links.time[repeats] = start + 1
        oldest[repeats] += 1

        which = np.flatnonzero(ends)
        if len(which):
            working = links.finish(which, links.time[which] - 1)
            base[which] = links.cursor[which]
