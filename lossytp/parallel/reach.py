"""Check that a network can lose some of a group's packets, so that no setting is silently ignored."""

from lossytp.network.links import Link, check_links_within
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.wiring import Wiring
from lossytp.parallel.group import RankGroup

MOST_SHOWN = 8  # links in a message


def check_reaches(network: LossyNetwork, group: RankGroup, wiring: Wiring) -> None:
    """Raise ValueError if the network's scope or named links cover nothing that the group may lose.

    Other axes of parallelism send other messages. So if the group is not the whole world, only links to or from ranks
    that do not exist are refused.
    """
    wiring.check_delivers(network, group.ranks)
    phase, named = network.scope.phase, set(network.named_links)
    if phase is None and not named:
        return
    check_links_within(network.named_links, group.num_global_ranks)
    lossy = wiring.lossy_links(group.ranks, phase)
    if group.num_global_ranks > group.size or not wiring.lossy_links(group.ranks, None):
        return
    if not lossy:
        raise ValueError(
            f"scope = Scope(phase={phase!r}) loses nothing, because the gather phase is reliable: give "
            "reliable_gather = False and an algorithm whose sum can be lost on its way back, or leave phase out"
        )
    if named and not named & lossy:
        raise ValueError(
            f"the network names {_text(named)}, over which {wiring.algorithm.name!r} of {group.size} "
            f"ranks sends nothing that may be lost: name some of {_text(lossy)}"
        )


def check_layers(network: LossyNetwork, blocks: int) -> None:
    """Raise ValueError if the network's scope names layers above the model's `blocks`."""
    layers = network.scope.layers
    if layers is not None and layers[1] > blocks:
        raise ValueError(f"layers = {layers} ends above the model's {blocks} blocks: stop at {blocks}")


def _text(links: set[Link]) -> str:
    named = [f"{src}>{dst}" for src, dst in sorted(links)]
    return ", ".join(named[:MOST_SHOWN]) + (", ..." if len(named) > MOST_SHOWN else "")
