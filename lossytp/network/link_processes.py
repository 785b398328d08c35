"""Which loss process each link of a network has."""

from collections.abc import Mapping

from lossytp.network.bernoulli import Bernoulli
from lossytp.network.checks import shown
from lossytp.network.identity import process_described
from lossytp.network.links import Link, checked_link
from lossytp.network.loss_process import LossProcess, check_process
from lossytp.network.replay import Replay

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
