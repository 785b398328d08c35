"""Lossy collectives against the reference that passes on every packet by itself; one dead link worked out by hand."""

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lossytp as ltp
from lossytp.network.notation import parse
from lossytp.network.repairs import REPAIRS
from lossytp.network.streams import Stream
from lossytp.network.wiring import Wiring
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup
from tests.parallel.reference import Reference

ALGORITHMS = ["sender", "direct", "ring", "tree", "switch"]
REPAIR_LINES = [
    *("zero", "rescale", "rescale_counted", "stale", "local"),
    *("fec(n=3, k=2)", "fec(n=5, k=3, depth=2)", "fec(n=5, k=3, depth=2, code='xor')", "fec(n=4, k=2, code='xor')"),
    *("hadamard(block=4)", "hadamard(block=16)", "retransmit(budget=1)", "retransmit(budget=3)"),
]
PHASES = {
    "reliable gather": {"reliable_gather": True},
    "lossy gather": {"reliable_gather": False},
    "sequence-parallel": {"sequence_parallel": True, "reliable_gather": False},
}
PROCESSES = {
    "bernoulli": ltp.Bernoulli(loss_rate=0.25),
    "bursts": ltp.GilbertElliott.from_loss_and_burst(loss_rate=0.25, mean_burst_packets=3),
}
CAPACITY = 3
WIRE = ltp.Wire(mtu_bytes=44 + 8 * CAPACITY + 7)  # of float64
FIRST_RANK = 3
# none, fewer than ranks, one packet, no multiple of a packet or a chunk; some twice, for what is remembered
SIZES = [0, 1, CAPACITY, 37, 37, 5, 36, 64]


def refused(algorithm: str, repair: str, phase: str) -> str | None:
    """Why the library refuses the combination, as `Wiring` says it does."""
    if repair == "local" and algorithm == "sender":
        return "a loss there is everyone's"
    if repair == "local" and phase == "sequence-parallel":
        return "a rank has no part of its own of what it gathers"
    if algorithm == "sender" and phase == "lossy gather":
        return "whose sum reaches every rank"
    return None


COMBINATIONS = [(algorithm, repair, phase) for algorithm in ALGORITHMS for repair in REPAIR_LINES for phase in PHASES]
ALLOWED = [combination for combination in COMBINATIONS if not refused(*combination)]
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
    name, _, options = parse("repair", repair)
    return Reference(
        list(range(FIRST_RANK, FIRST_RANK + num_ranks)),
        algorithm,
        (name, options),
        CAPACITY,
        lambda src, dst, count: network.lost_packets(src, dst, count, group="some").tolist(),
        lambda src, dst: network.process(src, dst).loss_rate,
        [-1.0 if uniform < 0.5 else 1.0 for uniform in Stream((network.seed, "hadamard")).uniforms(128).tolist()],
    )


def messages(num_ranks: int, size: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * num_ranks + number)
    return torch.randn(num_ranks, size, dtype=torch.float64, generator=generator)


def counted(network: ltp.LossyNetwork) -> dict[tuple, list[int]]:
    return {
        (f"{row['operation']} {row['phase']}", row["src"], row["dst"]): [
            row[name] for name in ("packets", "lost", "extra", "missing")
        ]
        for row in network.counters.rows()
    }


def run(collective: LossyCollective, parts_RN: Tensor, unit: int) -> Tensor:
    """Each local rank's result: of an all-reduce, or of a reduce-scatter and the all-gather behind it."""
    total = collective.sum_(parts_RN.clone(), unit=unit)
    if collective.wiring.sequence_parallel:
        return torch.cat([total[None], collective.gather(total, unit=unit)])
    return total if collective.wiring.own_streams else total.expand(len(parts_RN), -1)


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
                network, group, Wiring.named(algorithm=algorithm, repair=repair, **PHASES[phase])
            )
            ranks = reference(twin, num_ranks, algorithm, repair)
            some = process == "bursts" or num_ranks in (4, 6, 7)
            sizes = SIZES[2:6] if some else SIZES
            for number, size in enumerate(sizes):
                unit = (1, 1, 5, 11)[number % 4] if phase == "sequence-parallel" and repair != "stale" else 1
                parts_RN = messages(num_ranks, size, number)
                result = run(collective, parts_RN, unit)
                expected = run_reference(ranks, parts_RN, phase, unit)
                expected_RN = torch.tensor(expected, dtype=torch.float64).view(result.shape)
                assert torch.allclose(result, expected_RN, rtol=1e-11, atol=1e-11), (num_ranks, process, size)
                assert counted(network) == dict(ranks.counts), (num_ranks, process, size)
            for counts in ranks.counts.values():
                something = [total + count for total, count in zip(something, counts, strict=True)]
    assert something[1] > 200
    assert (something[2] > 0) == repair.startswith(("fec", "retransmit", "hadamard"))  # whose blocks are filled up
    assert 0 < something[3] <= something[1]
    assert (something[3] < something[1]) == repair.startswith(("fec", "retransmit"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_another_seed_is_told_from_the_reference(algorithm: str) -> None:
    """Control: the comparison could fail."""
    network, twin = lossy_network("bernoulli", seed=0), lossy_network("bernoulli", seed=1)
    collective = LossyCollective(
        network, RankGroup(3, "some", first_rank=FIRST_RANK), Wiring.named(algorithm=algorithm)
    )
    parts_RN = messages(3, 37, 0)
    expected = run_reference(reference(twin, 3, algorithm, "zero"), parts_RN, "reliable gather", 1)
    assert (run(collective, parts_RN, 1) - torch.tensor(expected, dtype=torch.float64)).abs().max() > 0.1


def test_every_algorithm_and_repair_is_tried_here() -> None:
    assert set(ALGORITHMS) == set(ltp.network.ALGORITHMS)
    assert {parse("repair", line)[0] for line in REPAIR_LINES} == set(REPAIRS)


@pytest.mark.parametrize(
    ("algorithm", "repair", "phase"), [combination for combination in COMBINATIONS if refused(*combination)]
)
def test_what_cannot_be_combined_is_refused_with_the_reason(algorithm: str, repair: str, phase: str) -> None:
    reason = refused(algorithm, repair, phase)
    with pytest.raises(ValueError, match=reason) as refusal:
        Wiring.named(algorithm=algorithm, repair=repair, **PHASES[phase])
    assert "\n" not in str(refusal.value)


# --- one link that loses everything: rank r's elements are all 10 ** r, two to a chunk, chunk c being rank c's

DEAD = {
    ("direct", (1, 0), "zero"): {
        "reliable gather": [[101, 101, 111, 111, 111, 111]] * 3,
        "lossy gather": [
            [101, 101, 0, 0, 111, 111],
            [101, 101, 111, 111, 111, 111],
            [101, 101, 111, 111, 111, 111],
        ],
        "sequence-parallel": [
            [101, 101, 111, 111, 111, 111],  # the ranks' chunks, then what each gathers of them
            [101, 101, 0, 0, 111, 111],
            [101, 101, 111, 111, 111, 111],
            [101, 101, 111, 111, 111, 111],
        ],
    },
    ("direct", (1, 0), "local"): {
        "reliable gather": [[102, 102, 111, 111, 111, 111]] * 3,
        "lossy gather": [
            [102, 102, 1, 1, 111, 111],
            [102, 102, 111, 111, 111, 111],
            [102, 102, 111, 111, 111, 111],
        ],
    },
    ("direct", (1, 0), "rescale_counted"): {
        "reliable gather": [[151.5, 151.5, 111, 111, 111, 111]] * 3,
    },
    # round the ring 0 -> 1 -> 2 -> 0: chunk 0 starts at rank 1, chunk 1 at rank 2, chunk 2 at rank 0
    ("ring", (2, 0), "zero"): {
        "reliable gather": [[1, 1, 11, 11, 111, 111]] * 3,
        "lossy gather": [
            [1, 1, 0, 0, 0, 0],
            [1, 1, 11, 11, 0, 0],
            [1, 1, 11, 11, 111, 111],
        ],
        "sequence-parallel": [
            [1, 1, 11, 11, 111, 111],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 11, 11, 0, 0],
            [1, 1, 11, 11, 111, 111],
        ],
    },
    ("ring", (2, 0), "local"): {
        "reliable gather": [[2, 2, 12, 12, 111, 111]] * 3,
        "lossy gather": [
            [2, 2, 1, 1, 1, 1],
            [2, 2, 12, 12, 10, 10],
            [2, 2, 12, 12, 111, 111],
        ],
    },
    ("ring", (2, 0), "rescale_counted"): {
        "reliable gather": [[3, 3, 16.5, 16.5, 111, 111]] * 3,
    },
    # 0 above 1 and 2, 1 above 3
    ("tree", (1, 0), "zero"): {
        "reliable gather": [[101] * 8] * 4,
        "lossy gather": [[101] * 8] * 4,
        "sequence-parallel": [
            [101] * 8,
            [101, 101, 0, 0, 101, 101, 0, 0],
            [101, 101, 101, 101, 101, 101, 0, 0],
            [101, 101, 0, 0, 101, 101, 0, 0],
            [101, 101, 0, 0, 101, 101, 101, 101],
        ],
    },
    ("tree", (0, 1), "zero"): {
        "reliable gather": [[1111] * 8] * 4,
        "lossy gather": [[1111] * 8, [0] * 8, [1111] * 8, [0] * 8],
        "sequence-parallel": [
            [1111, 1111, 0, 0, 1111, 1111, 0, 0],
            [1111, 1111, 0, 0, 1111, 1111, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0],
            [1111, 1111, 0, 0, 1111, 1111, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0],
        ],
    },
    ("tree", (0, 1), "local"): {
        "reliable gather": [[1111] * 8] * 4,
        "lossy gather": [[1111] * 8, [10] * 8, [1111] * 8, [1000] * 8],
    },
    ("tree", (3, 1), "local"): {
        "reliable gather": [[121] * 8] * 4,
    },
    ("switch", (1, -1), "zero"): {
        "reliable gather": [[101] * 6] * 3,
        "lossy gather": [[101] * 6] * 3,
        "sequence-parallel": [
            [101] * 6,
            [101, 101, 0, 0, 101, 101],
            [101] * 6,
            [101, 101, 0, 0, 101, 101],
        ],
    },
    ("switch", (-1, 1), "zero"): {
        "reliable gather": [[111] * 6] * 3,
        "lossy gather": [[111] * 6, [0] * 6, [111] * 6],
        "sequence-parallel": [
            [111, 111, 0, 0, 111, 111],
            [111, 111, 0, 0, 111, 111],
            [0] * 6,
            [111, 111, 0, 0, 111, 111],
        ],
    },
    ("switch", (-1, 1), "local"): {
        "lossy gather": [[111] * 6, [10] * 6, [111] * 6],
    },
    ("switch", (1, -1), "local"): {
        "lossy gather": [[101] * 6] * 3,  # no part of its own
    },
    ("sender", (1, -1), "zero"): {
        "reliable gather": [[101] * 6] * 3,
        "sequence-parallel": [[101] * 6, *[[101, 101, 0, 0, 101, 101]] * 3],
    },
    ("sender", (1, -1), "rescale_counted"): {
        "reliable gather": [[151.5] * 6] * 3,
    },
}


@pytest.mark.parametrize(
    ("algorithm", "link", "repair", "phase"), [(*names, phase) for names, phases in DEAD.items() for phase in phases]
)
def test_what_one_dead_link_does_is_as_worked_out_by_hand(
    algorithm: str, link: tuple[int, int], repair: str, phase: str
) -> None:
    expected = DEAD[algorithm, link, repair][phase]
    num_ranks, size = len(expected) - (phase == "sequence-parallel"), len(expected[0])
    network = ltp.LossyNetwork({link: ltp.Bernoulli(loss_rate=1)})
    collective = LossyCollective(
        network, RankGroup(num_ranks), Wiring.named(algorithm=algorithm, repair=repair, **PHASES[phase])
    )
    parts_RN = (10.0 ** torch.arange(num_ranks))[:, None].repeat(1, size)
    assert run(collective, parts_RN, 1).tolist() == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_crosses_a_dead_link_is_stale_forever_and_after_a_good_one_fresh(algorithm: str) -> None:
    """A link that died after the first message: what it brought then stands in for what it should bring now."""
    link = {"sender": (1, -1), "switch": (1, -1), "ring": (2, 0)}.get(algorithm, (1, 0))
    network = ltp.LossyNetwork({link: ltp.Bernoulli(loss_rate=1)})
    collective = LossyCollective(network, RankGroup(3), Wiring.named(algorithm=algorithm, repair="stale"))
    parts_RN = (10.0 ** torch.arange(3))[:, None].repeat(1, 6)
    whole = LossyCollective(
        ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0)), collective.group, collective.wiring, collective.memories
    )
    assert whole.sum_(parts_RN.clone()).tolist() == [111] * 6
    old = {
        "sender": [212] * 6,  # ranks 0 and 2 have twice as much now, rank 1 as much as then
        "switch": [212] * 6,
        "direct": [212] * 2 + [222] * 4,
        "ring": [2 + 110] * 2 + [22 + 100] * 2 + [222] * 2,
        "tree": [212] * 6,
    }[algorithm]
    for _ in range(2):
        assert collective.sum_(2 * parts_RN).tolist() == old
    assert collective.sum_(torch.ones(3, 5)).tolist() != [3] * 5, "of another size: nothing to put in"
    assert collective.sum_(2 * parts_RN).tolist() != old, "nor of the first size any more"


# --- ranks spread over processes


def every_result(group: RankGroup) -> dict[tuple, tuple]:
    """What the local ranks get, and what each link did, for every combination."""
    results = {}
    here = list(group.local)
    for combination in ALLOWED:
        algorithm, repair, phase = combination
        network = lossy_network("bernoulli")
        collective = LossyCollective(network, group, Wiring.named(algorithm=algorithm, repair=repair, **PHASES[phase]))
        rows = []
        for number, size in enumerate([37, 37]):
            result = run(collective, messages(group.size, size, number)[here], unit=1)
            rows.append(result[-len(here) :])
        results[combination] = torch.cat(rows, 1), counted(network)
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
