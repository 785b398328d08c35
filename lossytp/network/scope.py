"""Say where in a model packets may be lost, to study where losses hurt: one part is lossy, the rest reliable."""

import re
from dataclasses import dataclass

from lossytp.network.checks import check_at_least, check_is, check_known
from lossytp.network.counters import NOWHERE, Site
from lossytp.network.links import Link, checked_link

DIRECTIONS = ("forward", "backward")
MODULES = ("attention", "mlp")
PHASES = ("reduce", "gather")


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The messages that may lose packets. All others are reliable, and not counted. None means no restriction.

    Args:
        direction: "forward" or "backward".
        module: "attention" or "mlp".
        layers: first transformer layer and the layer after the last, counted from 0.
        phase: "reduce" (contributions on their way to a sum) or "gather" (the sum on its way to the ranks).

    Messages that belong to no layer, such as data-parallel gradients, lie outside every range of layers and every
    module. To restrict links, name them: `LossyNetwork({(0, 1): process})`.
    """

    direction: str | None = None
    module: str | None = None
    layers: tuple[int, int] | None = None
    phase: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("direction", DIRECTIONS), ("module", MODULES), ("phase", PHASES)):
            if getattr(self, name) is not None:
                check_known(name, getattr(self, name), known)
        if self.layers is None:
            return
        check_is("layers", self.layers, (tuple, list), "the first layer and the layer after the last, such as (0, 2)")
        object.__setattr__(self, "layers", tuple(self.layers))
        for end in self.layers:
            check_at_least("layers", end, 0)
        if len(self.layers) != 2 or self.layers[0] >= self.layers[1]:
            raise ValueError(
                f"layers = {self.layers} is not a range: give the first layer and the layer after the last, such as "
                "(0, 2)"
            )

    def covers(self, site: Site | None) -> bool:
        """Return whether a message of this site may lose packets."""
        site = site or NOWHERE
        if self.layers is not None and (site.layer is None or not self.layers[0] <= site.layer < self.layers[1]):
            return False
        mine = (self.direction, self.module, self.phase)
        theirs = (site.direction, site.module, site.phase)
        return all(want is None or want == have for want, have in zip(mine, theirs, strict=True))


EVERYWHERE = Scope()


def links_named(text: str) -> list[Link]:
    """Return the directed links of a text such as ``0>1,2>-1``.

    Raises:
        ValueError: if the text has another form, names a link twice, or names an impossible link.
    """
    matches = [re.fullmatch(r"\s*(-1|\d+)\s*>\s*(-1|\d+)\s*", link) for link in text.split(",")]
    if not all(matches):
        raise ValueError(f"lossy_links = {text!r} is not understood: write source>destination, such as 0>1,2>3")
    links = [checked_link((int(match[1]), int(match[2]))) for match in matches if match]
    for src, dst in links:
        if links.count((src, dst)) > 1:
            raise ValueError(f"lossy_links = {text!r} names {src}>{dst} more than once: name each link once")
    return links


def layers_named(text: str) -> tuple[int, int]:
    """Return the first layer and the layer after the last of a text such as ``0:2``.

    Raises:
        ValueError: if the text has another form.
    """
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
    if not match:
        raise ValueError(
            f"lossy_layers = {text!r} is not understood: write first:stop, such as 0:2 (in YAML in quotes)"
        )
    return int(match[1]), int(match[2])
