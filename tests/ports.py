"""A port for processes that find each other by its number."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Give a port of this machine that only those get, within the block, who ask for its number.

    A port that is merely free may be somebody else's by the time it is used. A bound socket keeps it, and one that does
    not listen leaves it to others who bind with SO_REUSEADDR too, as torch's stores do.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
