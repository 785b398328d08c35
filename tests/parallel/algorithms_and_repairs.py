"""Every algorithm, repair and phase of lossy collectives, and which of them go together."""

import torch
from torch import Tensor

from lossytp.parallel.collectives import LossyCollective

ALGORITHMS = ["sender", "direct", "ring", "tree", "switch"]
REPAIR_LINES = [
    *("zero", "rescale", "rescale_counted", "stale", "local"),
    *("fec(n=3, k=2)", "fec(n=5, k=3, depth=2)", "fec(n=5, k=3, depth=2, code='xor')", "fec(n=4, k=2, code='xor')"),
    *("hadamard(block=4)", "hadamard(block=16)", "retransmit(budget=1)", "retransmit(budget=3)"),
    *("protect(share=0.2)", "protect(share=0.2) + rescale", "protect(share=0.3) + stale"),
    *("protect(share=0.1) + hadamard(block=4)", "protect(share=0.2) + fec(n=3, k=2) + stale"),
    *("retransmit(budget=1) + rescale", "fec(n=5, k=3) + hadamard(block=4)", "retransmit(budget=1) + local"),
]
PHASES = {
    "reliable gather": {"reliable_gather": True},
    "lossy gather": {"reliable_gather": False},
    "sequence-parallel": {"sequence_parallel": True, "reliable_gather": False},
}


def refused(algorithm: str, repair: str, phase: str) -> str | None:
    """Why the library refuses the combination, as `CommConfig` says it does."""
    if "local" in repair and algorithm == "sender":
        return "where every rank lacks what is lost"
    if "local" in repair and phase == "sequence-parallel":
        return "a rank has no part of what it gathers"
    if algorithm == "sender" and phase == "lossy gather":
        return "whose sum reaches every rank"
    return None


COMBINATIONS = [(algorithm, repair, phase) for algorithm in ALGORITHMS for repair in REPAIR_LINES for phase in PHASES]
ALLOWED = [combination for combination in COMBINATIONS if not refused(*combination)]


def run(collective: LossyCollective, parts_RN: Tensor, unit: int) -> Tensor:
    """Each local rank's result: of an all-reduce, or of a reduce-scatter and the all-gather behind it."""
    total = collective.sum_(parts_RN.clone(), unit=unit)
    if collective.comm.sequence_parallel:
        return torch.cat([total[None], collective.all_gather(total, unit=unit)])
    return total if collective.comm.own_streams else total.expand(len(parts_RN), -1)
