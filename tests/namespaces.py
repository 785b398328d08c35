"""Two machines on one: network namespaces that a veth pair joins, and real losses between them.

A thread enters a namespace, and the sockets that it opens belong there for good.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
OWN = "/proc/thread-self/ns/net"


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Machine(NamedTuple):
    """A namespace, and its address on the link to the other."""

    name: str
    address: str

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block, this thread is in the namespace."""
        before = os.open(OWN, os.O_RDONLY)
        try:
            self._enter(f"/var/run/netns/{self.name}")
            yield
        finally:
            if ctypes.CDLL(None, use_errno=True).setns(before, NEW_NETWORK):
                os._exit(3)  # this thread would go on in the wrong network
            os.close(before)

    @staticmethod
    def _enter(path: str) -> None:
        there = os.open(path, os.O_RDONLY)
        failed = ctypes.CDLL(None, use_errno=True).setns(there, NEW_NETWORK)
        os.close(there)
        if failed:
            raise OSError(ctypes.get_errno(), "setns")

    def run(self, *words: str) -> str:
        return _run("ip", "netns", "exec", self.name, *words)

    def drop(self, per_mille: int, protocol: str = "udp") -> Callable[[], int]:
        """Drop so many in 1000 of the packets that come in, at random; return a function that counts the dropped."""
        self.run("nft", "add", "table", "ip", "lossy")
        self.run("nft", "add chain ip lossy incoming { type filter hook input priority 0; }")
        rule = f"meta l4proto {protocol} numgen random mod 1000 < {per_mille} counter drop"
        self.run("nft", f"add rule ip lossy incoming {rule}")
        return lambda: int(re.findall(r"counter packets (\d+)", self.run("nft", "list table ip lossy"))[0])

    def congest(self, rate: str, limit: str) -> None:
        """Let what goes out queue at a slow link, whose queue holds so much and drops the rest."""
        self.run("tc", "qdisc", "add", "dev", "veth", "root", "tbf", "rate", rate, "burst", "5kb", "limit", limit)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two joined namespaces, which are gone after the block. Skips the test, and says why, where there can be none."""
    missing = [tool for tool in ("ip", "nft", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"real losses need {', '.join(missing)}: install iproute2 and nftables")
    machines = tuple(
        Machine(f"lossytp{os.getpid()}{end}", f"10.213.87.{number}") for number, end in ((1, "a"), (2, "b"))
    )
    try:
        _joined(*machines)
    except OSError as error:
        _removed(*machines)
        pytest.skip(f"real losses need network namespaces, which this machine does not allow ({error}): run as root")
    try:
        yield machines
    finally:
        _removed(*machines)


def _joined(one: Machine, other: Machine) -> None:
    if sys.platform != "linux":
        raise OSError("this is not Linux")
    for machine in (one, other):
        _run("ip", "netns", "add", machine.name)
    _run("ip", "-n", one.name, "link", "add", "veth", "type", "veth", "peer", "name", "veth", "netns", other.name)
    for machine in (one, other):
        _run("ip", "-n", machine.name, "address", "add", f"{machine.address}/30", "dev", "veth")
        for device in ("lo", "veth"):
            _run("ip", "-n", machine.name, "link", "set", device, "up")
        machine.run("nft", "list", "ruleset")
    with one.entered():
        assert Path("/proc/thread-self/net/dev").read_text().count("veth") == 1


def _removed(*machines: Machine) -> None:
    for machine in machines:
        subprocess.run(["ip", "netns", "delete", machine.name], capture_output=True, check=False)
