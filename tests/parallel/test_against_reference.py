"""Lossy collectives against the reference that passes on every packet by itself."""

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lossytp as ltp
from lossytp.network.checks import parse
from lossytp.network.losses import Stream
from lossytp.network.lossy_network import CommConfig
from lossytp.network.repairs import REPAIRS
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup
from tests.parallel.algorithms_and_repairs import ALGORITHMS, ALLOWED, COMBINATIONS, PHASES, REPAIR_LINES, refused, run
from tests.parallel.reference import Reference

pytestmark = pytest.mark.slow

PROCESSES = {
    "bernoulli": ltp.Bernoulli(loss_rate=0.25),
    "bursts": ltp.GilbertElliott.from_loss_and_burst(loss_rate=0.25, mean_burst_packets=3),
}
CAPACITY = 3
WIRE = ltp.Wire(mtu_bytes=44 + 8 * CAPACITY + 7)  # of float64
FIRST_RANK = 3
# none, fewer than ranks, one packet, no multiple of a packet or a chunk; some twice, for what is remembered
SIZES = [0, 1, CAPACITY, 37, 37, 5, 36, 64]
DELIVERING = ("fec", "retransmit", "protect")
by_combination = pytest.mark.parametrize(("algorithm", "repair", "phase"), ALLOWED)


def lossy_network(process: str, seed: int = 0) -> ltp.LossyNetwork:
    """Links of a rate each, so that a weight of another link is seen."""
    if process == "bursts":
        return ltp.LossyNetwork(PROCESSES[process], seed=seed, wire=WIRE)
    links = permutations(range(-1, FIRST_RANK + 8), 2)
    named = {(src, dst): ltp.Bernoulli(loss_rate=0.15 + 0.02 * ((3 * src + dst) % 11)) for src, dst in links}
    return ltp.LossyNetwork(named, seed=seed, wire=WIRE)


def reference(network: ltp.LossyNetwork, num_ranks: int, algorithm: str, repair: str) -> Reference:
    """Takes its losses from `network`, packet by packet, and nothing else."""
    repairs = [(name, options) for name, _, options in (parse("repair", part) for part in repair.split(" + "))]
    return Reference(
        list(range(FIRST_RANK, FIRST_RANK + num_ranks)),
        algorithm,
        repairs,
        CAPACITY,
        lambda src, dst, count: network.lost_packets(src, dst, count, group="some").tolist(),
        lambda src, dst: network.process(src, dst).loss_rate,
        [-1.0 if uniform < 0.5 else 1.0 for uniform in Stream((network.seed, "hadamard")).uniforms(128).tolist()],
    )


def messages(num_ranks: int, size: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * num_ranks + number)
    return torch.randn(num_ranks, size, dtype=torch.float64, generator=generator)


def counts_by_link(network: ltp.LossyNetwork) -> dict[tuple, list[int]]:
    return {
        (f"{row['operation']} {row['phase']}", row["src"], row["dst"]): [
            row[name] for name in ("packets", "lost", "extra", "missing")
        ]
        for row in network.counters.rows()
    }


def run_reference(ranks: Reference, parts_RN: Tensor, phase: str, unit: int) -> list[list[float]]:
    parts = parts_RN.tolist()
    if phase == "sequence-parallel":
        total = ranks.reduce_scatter(parts, unit)
        return [total, *ranks.all_gather(total, unit)]
    return ranks.all_reduce(parts, lossy_gather=phase == "lossy gather")


@by_combination
def test_equals_the_reference(algorithm: str, repair: str, phase: str) -> None:
    """Each rank's result, and what every link sent, lost, sent beyond and lacked; over several messages."""
    something = [0, 0, 0, 0]
    for num_ranks in range(2, 9):
        for process in PROCESSES if num_ranks in (2, 5, 8) else ["bernoulli"]:
            network, twin = lossy_network(process), lossy_network(process)
            group = RankGroup(num_ranks, name="some", first_rank=FIRST_RANK)
            collective = LossyCollective(
                network, group, CommConfig.named(algorithm=algorithm, repair=repair, **PHASES[phase])
            )
            ranks = reference(twin, num_ranks, algorithm, repair)
            some = process == "bursts" or num_ranks in (4, 6, 7)
            sizes = SIZES[2:6] if some else SIZES
            for number, size in enumerate(sizes):
                unit = (1, 1, 5, 11)[number % 4] if phase == "sequence-parallel" and "stale" not in repair else 1
                parts_RN = messages(num_ranks, size, number)
                result = run(collective, parts_RN, unit)
                expected = run_reference(ranks, parts_RN, phase, unit)
                expected_RN = torch.tensor(expected, dtype=torch.float64).view(result.shape)
                assert torch.allclose(result, expected_RN, rtol=1e-11, atol=1e-11), (num_ranks, process, size)
                assert counts_by_link(network) == dict(ranks.counts), (num_ranks, process, size)
            for counts in ranks.counts.values():
                something = [total + count for total, count in zip(something, counts, strict=True)]
    assert something[1] > 200
    assert (something[2] > 0) == any(name in repair for name in (*DELIVERING, "hadamard"))  # whose blocks are filled up
    assert 0 < something[3] <= something[1]
    assert (something[3] < something[1]) == any(name in repair for name in DELIVERING)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_another_seed_is_told_from_the_reference(algorithm: str) -> None:
    """Control: the comparison could fail."""
    network, twin = lossy_network("bernoulli", seed=0), lossy_network("bernoulli", seed=1)
    collective = LossyCollective(
        network, RankGroup(3, "some", first_rank=FIRST_RANK), CommConfig.named(algorithm=algorithm)
    )
    parts_RN = messages(3, 37, 0)
    expected = run_reference(reference(twin, 3, algorithm, "zero"), parts_RN, "reliable gather", 1)
    assert (run(collective, parts_RN, 1) - torch.tensor(expected, dtype=torch.float64)).abs().max() > 0.1


def test_every_algorithm_and_repair_is_tried_here() -> None:
    assert set(ALGORITHMS) == set(ltp.network.ALGORITHMS)
    tried = {parse("repair", part)[0] for line in REPAIR_LINES for part in line.split(" + ")}
    assert tried == set(REPAIRS) - {"protect_first"}  # which needs tokens: test_tokens.py


@pytest.mark.parametrize(
    ("algorithm", "repair", "phase"), [combination for combination in COMBINATIONS if refused(*combination)]
)
def test_what_cannot_be_combined_is_refused_with_the_reason(algorithm: str, repair: str, phase: str) -> None:
    reason = refused(algorithm, repair, phase)
    with pytest.raises(ValueError, match=reason) as refusal:
        CommConfig.named(algorithm=algorithm, repair=repair, **PHASES[phase])
    assert "\n" not in str(refusal.value)


# --- ranks spread over processes


def every_result(group: RankGroup) -> dict[tuple, tuple]:
    """What the local ranks get, and what each link did, for every combination."""
    results = {}
    here = list(group.local)
    for combination in ALLOWED:
        algorithm, repair, phase = combination
        network = lossy_network("bernoulli")
        collective = LossyCollective(
            network, group, CommConfig.named(algorithm=algorithm, repair=repair, **PHASES[phase])
        )
        rows = []
        for number, size in enumerate([37, 37]):
            result = run(collective, messages(group.size, size, number)[here], unit=1)
            rows.append(result[-len(here) :])
        results[combination] = torch.cat(rows, 1), counts_by_link(network)
    return results


def on_rank_run_everything() -> dict[tuple, tuple]:
    dist.init_process_group("gloo")
    return every_result(RankGroup(4, "some", process_group=dist.group.WORLD, first_rank=FIRST_RANK))


def test_two_processes_have_the_rows_of_virtual_ranks(processes: Callable) -> None:
    """Two ranks on each, for every algorithm, repair and phase."""
    virtual = every_result(RankGroup(4, "some", first_rank=FIRST_RANK))
    answers = processes(2, on_rank_run_everything)
    for combination, (expected_RN, counts) in virtual.items():
        rows = torch.cat([answer[combination][0] for answer in answers])
        assert torch.allclose(rows, expected_RN, rtol=1e-11, atol=1e-11), combination
        assert all(answer[combination][1] == counts for answer in answers), combination
        assert any(lost for _, lost, *_ in counts.values()), combination
    differing = {phase for _, _, phase in ALLOWED if phase != "reliable gather"}
    for algorithm, repair, phase in ALLOWED:
        rows = virtual[algorithm, repair, phase][0]
        if phase in differing and repair == "zero" and algorithm != "sender":
            assert not torch.equal(rows[0], rows[3]), "control: ranks do not all have the same"
