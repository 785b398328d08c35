"""Where in a model packets may be lost: a study of where it hurts makes one part lossy and the rest reliable."""

import re
from dataclasses import dataclass

from lossytp.network.checks import check_at_least, check_known
from lossytp.network.counters import NOWHERE, Site

DIRECTIONS = ("forward", "backward")
MODULES = ("attention", "mlp")
PHASES = ("reduce", "gather")


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Messages that may lose packets; a part left out is not restricted. All others are reliable, and not counted.

    Args:
        direction: "forward" or "backward".
        module: "attention" or "mlp".
        layers: first transformer layer and the one after the last, counted from 0.
        phase: "reduce" (contributions on their way to a sum) or "gather" (the sum on its way to the ranks).

    Messages that belong to no layer, such as a data-parallel gradient's, lie outside any range of layers or module.
    Links are restricted by name, `LossyNetwork({(0, 1): process})`.
    """

    direction: str | None = None
    module: str | None = None
    layers: tuple[int, int] | None = None
    phase: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("direction", DIRECTIONS), ("module", MODULES), ("phase", PHASES)):
            if getattr(self, name) is not None:
                check_known(name, getattr(self, name), known)
        for end in self.layers or ():
            check_at_least("layers", end, 0)
        if self.layers is not None and (len(self.layers) != 2 or self.layers[0] >= self.layers[1]):
            raise ValueError(f"layers = {self.layers} is no range: give the first and the one after the last")

    def covers(self, site: Site | None) -> bool:
        """Whether a message of this site may lose packets."""
        site = site or NOWHERE
        if self.layers is not None and (site.layer is None or not self.layers[0] <= site.layer < self.layers[1]):
            return False
        mine = (self.direction, self.module, self.phase)
        theirs = (site.direction, site.module, site.phase)
        return all(want is None or want == have for want, have in zip(mine, theirs, strict=True))


EVERYWHERE = Scope()


def links_named(text: str) -> list[tuple[int, int]]:
    """Directed links from ``0>1,2>-1``; ValueError where the text is another."""
    matches = [re.fullmatch(r"\s*(-1|\d+)\s*>\s*(-1|\d+)\s*", link) for link in text.split(",")]
    if not all(matches):
        raise ValueError(f"lossy_links = {text!r} is not understood: write source>destination, as in 0>1,2>3")
    return [(int(match[1]), int(match[2])) for match in matches if match]


def layers_named(text: str) -> tuple[int, int]:
    """The first layer and the one after the last from ``0:2``; ValueError where the text is another."""
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
    if not match:
        raise ValueError(
            f"lossy_layers = {text!r} is not understood: write first:stop, such as 0:2 (in YAML in quotes)"
        )
    return int(match[1]), int(match[2])
