"""What of a group's traffic a network can lose, so that no setting is ignored without a word."""

from lossytp.network.algorithms import algorithm_named
from lossytp.network.links import Link, check_links_within
from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.group import RankGroup
from lossytp.parallel.wiring import Wiring

MOST_SHOWN = 8  # links in a message


def check_reaches(network: LossyNetwork, group: RankGroup, wiring: Wiring) -> None:
    """Raise ValueError where the network's scope or named links lie outside all that the group may lose.

    Other axes of parallelism send other messages, so a group that is not the whole world is checked for links of ranks
    that do not exist, and for nothing else.
    """
    phase, named = network.scope.phase, set(network.named_links)
    if phase is None and not named:
        return
    check_links_within(network.named_links, group.world_size)
    lossy = lossy_links(wiring, group.ranks, phase)
    if group.world_size > group.size or not lossy_links(wiring, group.ranks, None):
        return
    if not lossy:
        raise ValueError(
            f"scope = Scope(phase={phase!r}) where the gather phase is reliable: give reliable_gather = False and an "
            "algorithm whose sum can be lost on its way back, or leave phase out"
        )
    if named and not named & lossy:
        raise ValueError(
            f"the network names {_text(named)}, over which {wiring.algorithm!r} of {group.size} "
            f"ranks sends nothing that may be lost: name some of {_text(lossy)}"
        )


def check_layers(network: LossyNetwork, blocks: int) -> None:
    """Raise ValueError where the network's scope names layers above those of a model of so many blocks."""
    layers = network.scope.layers
    if layers is not None and layers[1] > blocks:
        raise ValueError(f"layers = {layers} ends above the model's {blocks} blocks: stop at {blocks}")


def lossy_links(wiring: Wiring, ranks: tuple[int, ...], phase: str | None) -> set[Link]:
    """Return the links over which messages of these ranks may lose packets, in one phase or in both."""
    reduce, gather = algorithm_named(wiring.algorithm).pair(wiring.sequence_parallel)
    phases = {"reduce": reduce} | ({} if wiring.reliable_gather else {"gather": gather})
    routes = [of for name, of in phases.items() if phase in (None, name)]
    return {(hop.src, hop.dst) for of in routes for hop in of(len(ranks) ** 2, ranks)}


def _text(links: set[Link]) -> str:
    named = [f"{src}>{dst}" for src, dst in sorted(links)]
    return ", ".join(named[:MOST_SHOWN]) + (", ..." if len(named) > MOST_SHOWN else "")
