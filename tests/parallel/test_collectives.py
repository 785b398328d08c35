"""Lossy collectives against the reference that passes on every packet by itself, and by hand."""

import itertools
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lossytp as ltp
from lossytp.network.lossy_network import CommConfig
from lossytp.network.routes import ALGORITHMS
from lossytp.parallel.collectives import LossyCollective, _zero_spans_, all_reduce
from lossytp.parallel.group import RankGroup
from tests.parallel.conftest import bernoulli
from tests.parallel.reference import Reference, reference

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
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
ALLOWED = [
    (algorithm, repair, phase)
    for algorithm, repair, phase in itertools.product(ALGORITHMS, REPAIR_LINES, PHASES)
    if not ("local" in repair and (algorithm == "sender" or phase == "sequence-parallel"))
    and (algorithm, phase) != ("sender", "lossy gather")
]
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


def lossy_network(process: str, seed: int = 0) -> ltp.LossyNetwork:
    """Links of a rate each, so that a weight of another link is seen."""
    if process == "bursts":
        return ltp.LossyNetwork(PROCESSES[process], seed=seed, wire=WIRE)
    links = permutations(range(-1, FIRST_RANK + 8), 2)
    named = {(src, dst): ltp.Bernoulli(loss_rate=0.15 + 0.02 * ((3 * src + dst) % 11)) for src, dst in links}
    return ltp.LossyNetwork(named, seed=seed, wire=WIRE)


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


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "repair", "phase"), ALLOWED)
def test_equals_the_reference(algorithm, repair, phase):
    something = [0, 0, 0, 0]
    for num_ranks in range(2, 9):
        for process in PROCESSES if num_ranks in (2, 5, 8) else ["bernoulli"]:
            network, twin = lossy_network(process), lossy_network(process)
            group = RankGroup(num_ranks, name="some", first_rank=FIRST_RANK)
            collective = collective_over(network, group, algorithm, repair, phase)
            ranks = of_some_ranks(twin, num_ranks, algorithm, repair)
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


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_another_seed_is_told_from_the_reference(algorithm):
    """Control: the comparison could fail."""
    network, twin = lossy_network("bernoulli", seed=0), lossy_network("bernoulli", seed=1)
    collective = collective_over(network, RankGroup(3, "some", first_rank=FIRST_RANK), algorithm)
    parts_RN = messages(3, 37, 0)
    expected = run_reference(of_some_ranks(twin, 3, algorithm, "zero"), parts_RN, "reliable gather", 1)
    assert (run(collective, parts_RN, 1) - torch.tensor(expected, dtype=torch.float64)).abs().max() > 0.1


def every_result(group: RankGroup) -> dict[tuple, tuple]:
    results = {}
    here = list(group.local)
    for combination in ALLOWED:
        algorithm, repair, phase = combination
        network = lossy_network("bernoulli")
        collective = collective_over(network, group, algorithm, repair, phase)
        rows = []
        for number, size in enumerate([37, 37]):
            result = run(collective, messages(group.size, size, number)[here], unit=1)
            rows.append(result[-len(here) :])
        results[combination] = torch.cat(rows, 1), counts_by_link(network)
    return results


def on_rank_run_everything() -> dict[tuple, tuple]:
    dist.init_process_group("gloo")
    return every_result(RankGroup(4, "some", process_group=dist.group.WORLD, first_rank=FIRST_RANK))


def test_two_processes_have_the_rows_of_virtual_ranks(processes):
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


def run(collective: LossyCollective, parts_RN: Tensor, unit: int) -> Tensor:
    """Return each local rank's result of an all-reduce, or of a reduce-scatter and an all-gather."""
    total = collective.sum_(parts_RN.clone(), unit=unit)
    if collective.comm.sequence_parallel:
        return torch.cat([total[None], collective.all_gather(total, unit=unit)])
    return total if collective.comm.own_streams else total.expand(len(parts_RN), -1)


def collective_over(
    network: ltp.LossyNetwork, group: RankGroup, algorithm: str = "direct", repair: str = "zero", phase: str = ""
) -> LossyCollective:
    how = PHASES.get(phase, {})
    return LossyCollective(network, group, CommConfig.named(algorithm=algorithm, repair=repair, **how))


def of_some_ranks(network: ltp.LossyNetwork, num_ranks: int, algorithm: str, repair: str) -> Reference:
    ranks = list(range(FIRST_RANK, FIRST_RANK + num_ranks))
    return reference(network, ranks, algorithm, repair, CAPACITY, group="some")


# --- one link that loses everything: rank r's elements are all 10 ** r, two to a chunk, chunk c being rank c's.
# A row for each rank, of chunks; if the ranks hold shards, their chunks first, then what each gathers of them.

DEAD = {
    ("direct", (1, 0), "zero", "reliable gather"): [[101, 111, 111]] * 3,
    ("direct", (1, 0), "zero", "lossy gather"): [[101, 0, 111], [101, 111, 111], [101, 111, 111]],
    ("direct", (1, 0), "zero", "sequence-parallel"): [[101, 111, 111], [101, 0, 111], *[[101, 111, 111]] * 2],
    ("direct", (1, 0), "local", "lossy gather"): [[102, 1, 111], [102, 111, 111], [102, 111, 111]],
    ("direct", (1, 0), "rescale_counted", "reliable gather"): [[151.5, 111, 111]] * 3,
    ("direct", (1, 0), "rescale", "reliable gather"): [[101, 111, 111]] * 3,  # whose weight would be infinite
    # round the ring 0 -> 1 -> 2 -> 0: chunk 0 starts at rank 1, chunk 1 at rank 2, chunk 2 at rank 0
    ("ring", (2, 0), "zero", "reliable gather"): [[1, 11, 111]] * 3,
    ("ring", (2, 0), "zero", "lossy gather"): [[1, 0, 0], [1, 11, 0], [1, 11, 111]],
    ("ring", (2, 0), "zero", "sequence-parallel"): [[1, 11, 111], [1, 0, 0], [1, 11, 0], [1, 11, 111]],
    ("ring", (2, 0), "local", "lossy gather"): [[2, 1, 1], [2, 12, 10], [2, 12, 111]],
    ("ring", (2, 0), "rescale_counted", "reliable gather"): [[3, 16.5, 111]] * 3,
    # 0 above 1 and 2, 1 above 3
    ("tree", (1, 0), "zero", "lossy gather"): [[101] * 4] * 4,
    ("tree", (1, 0), "zero", "sequence-parallel"): [
        *([101] * 4, [101, 0, 101, 0], [101, 101, 101, 0], [101, 0, 101, 0], [101, 0, 101, 101])
    ],
    ("tree", (0, 1), "zero", "lossy gather"): [[1111] * 4, [0] * 4, [1111] * 4, [0] * 4],
    ("tree", (0, 1), "zero", "sequence-parallel"): [
        *([1111, 0, 1111, 0], [1111, 0, 1111, 0], [0] * 4, [1111, 0, 1111, 0], [0] * 4)
    ],
    ("tree", (0, 1), "local", "lossy gather"): [[1111] * 4, [10] * 4, [1111] * 4, [1000] * 4],
    ("tree", (3, 1), "local", "reliable gather"): [[121] * 4] * 4,
    ("switch", (1, -1), "zero", "lossy gather"): [[101] * 3] * 3,
    ("switch", (1, -1), "zero", "sequence-parallel"): [[101] * 3, [101, 0, 101], [101] * 3, [101, 0, 101]],
    ("switch", (-1, 1), "zero", "lossy gather"): [[111] * 3, [0] * 3, [111] * 3],
    ("switch", (-1, 1), "zero", "sequence-parallel"): [[111, 0, 111], [111, 0, 111], [0] * 3, [111, 0, 111]],
    ("switch", (-1, 1), "local", "lossy gather"): [[111] * 3, [10] * 3, [111] * 3],
    ("switch", (1, -1), "local", "lossy gather"): [[101] * 3] * 3,  # no part of its own
    ("sender", (1, -1), "zero", "reliable gather"): [[101] * 3] * 3,
    ("sender", (1, -1), "zero", "sequence-parallel"): [[101] * 3, *[[101, 0, 101]] * 3],
    ("sender", (1, -1), "rescale_counted", "reliable gather"): [[151.5] * 3] * 3,
}


@pytest.mark.parametrize(("algorithm", "link", "repair", "phase"), DEAD)
def test_what_one_dead_link_does_is_as_worked_out_by_hand(algorithm, link, repair, phase):
    expected = torch.tensor(DEAD[algorithm, link, repair, phase], dtype=torch.float32).repeat_interleave(2, 1)
    num_ranks = len(expected) - (phase == "sequence-parallel")
    network = ltp.LossyNetwork({link: ltp.Bernoulli(loss_rate=1)})
    collective = collective_over(network, RankGroup(num_ranks), algorithm, repair, phase)
    parts_RN = (10.0 ** torch.arange(num_ranks))[:, None].repeat(1, expected.shape[1])
    assert run(collective, parts_RN, 1).tolist() == expected.tolist()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_crosses_a_dead_link_is_stale_forever_and_after_a_good_one_fresh(algorithm):
    """A link that died after the first message: what it brought then stands in for what it should bring now."""
    link = {"sender": (1, -1), "switch": (1, -1), "ring": (2, 0)}.get(algorithm, (1, 0))
    network = ltp.LossyNetwork({link: ltp.Bernoulli(loss_rate=1)})
    collective = collective_over(network, RankGroup(3), algorithm, "stale")
    parts_RN = (10.0 ** torch.arange(3))[:, None].repeat(1, 6)
    whole = LossyCollective(bernoulli(0.0), collective.group, collective.comm, collective.memories)
    assert whole.sum_(parts_RN.clone()).tolist() == [111] * 6
    old = {"direct": [212] * 2 + [222] * 4, "ring": [2 + 110] * 2 + [22 + 100] * 2 + [222] * 2}
    old = old.get(algorithm, [212] * 6)  # ranks 0 and 2 have twice as much now, rank 1 as much as then
    for _ in range(2):
        assert collective.sum_(2 * parts_RN).tolist() == old
    assert collective.sum_(torch.ones(3, 5)).tolist() != [3] * 5, "of another size: nothing to put in"
    assert collective.sum_(2 * parts_RN).tolist() != old, "nor of the first size any more"


def test_a_reliable_gather_copies_nothing_and_a_lossy_one_leaves_its_input_as_it_is():
    x = torch.ones(40)
    network = bernoulli(1.0)
    reliable = LossyCollective(network, RankGroup(2), CommConfig(sequence_parallel=True)).all_gather(x)
    assert reliable.data_ptr() == x.data_ptr()
    assert network.counters.rows() == []
    lossy = LossyCollective(
        network, RankGroup(2), CommConfig(sequence_parallel=True, reliable_gather=False)
    ).all_gather(x)
    assert lossy.tolist() == [[1] * 20 + [0] * 20, [0] * 20 + [1] * 20]
    assert x.tolist() == [1] * 40


def test_messages_are_rounded_to_the_wires_dtype_and_fill_its_packets():
    """1 + 2^-9 is no bfloat16, nor is 257: contributions and sums are rounded, to even."""
    x_RN = torch.tensor([[1 + 2**-9, 256.0], [1.0, 1.0]]).repeat_interleave(500, 1)
    for how in ({}, {"algorithm": "ring", "reliable_gather": False}):
        network = bernoulli(0.0)
        result_RN = all_reduce(x_RN, network, wire_dtype="bf16", **how)
        assert result_RN.dtype == torch.float32
        assert result_RN.tolist() == [[2.0] * 500 + [256.0] * 500] * 2
        assert {row["packets"] for row in network.counters.rows()} == {1}, "500 elements of 2 bytes"
    network = bernoulli(0.0)
    assert all_reduce(x_RN, network)[0].tolist() == [2 + 2**-9] * 500 + [257] * 500
    assert {row["packets"] for row in network.counters.rows()} == {2}, "500 elements of 4 bytes"
    network = bernoulli(0.0)
    all_reduce(x_RN.double(), network, wire_dtype="fp32")
    assert {row["packets"] for row in network.counters.rows()} == {2}


def all_lost(repair: str = "stale", size: int = 2, **how: Any) -> tuple[LossyCollective, LossyCollective]:
    """A collective that loses everything, and one that loses nothing and remembers for it."""
    lost = LossyCollective(bernoulli(1.0), RankGroup(size), CommConfig.named(repair=repair, **how))
    return lost, LossyCollective(bernoulli(0.0), lost.group, lost.comm, lost.memories)


class _NotCpu(str):
    """What `torch.zeros(device=...)` takes for the CPU, but what does not call itself so."""

    type = "other"


class _OnADevice(torch.Tensor):
    """A tensor of the CPU that says it is on another device, and so takes the way of tensors on devices."""

    device = property(lambda self: _NotCpu("cpu"))  # type: ignore[assignment]

    def numpy(self, **_: object) -> np.ndarray:
        raise AssertionError("a tensor on a device has no numpy view")


@settings(derandomize=True, deadline=None, max_examples=100)
@given(data=st.data(), num_ranks=st.integers(1, 5), num_elements=st.integers(1, 40), dtype=st.sampled_from(DTYPES))
def test_zeroing_spans_on_a_device_equals_zeroing_them_on_the_cpu(data, num_ranks, num_elements, dtype):
    edges = st.lists(st.integers(0, num_elements), min_size=2, max_size=2, unique=True)  # no packet is empty
    drawn = data.draw(st.lists(st.tuples(st.integers(0, num_ranks - 1), edges), min_size=1, max_size=12))
    columns = [row for row, _ in drawn], [min(ends) for _, ends in drawn], [max(ends) for _, ends in drawn]
    spans = [np.array(column, dtype=np.int64) for column in columns]
    naive, on_cpu = (torch.ones(num_ranks, num_elements, dtype=dtype) for _ in range(2))
    on_device = torch.ones(num_ranks, num_elements, dtype=dtype).as_subclass(_OnADevice)
    for row, ends in drawn:
        for element in range(min(ends), max(ends)):
            naive[row, element] = 0
    _zero_spans_(on_cpu, *spans)
    _zero_spans_(on_device, *spans)
    assert on_cpu.tolist() == naive.tolist()
    assert on_device.tolist() == naive.tolist()


ADJOINTS = ["zero", "rescale", "rescale_counted", "hadamard(8)", "fec(3, 2)", "retransmit(1)"]
ADJOINTS += ["protect(0.1)", "protect(0.1) + rescale", "protect(0.1) + hadamard(4)"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("repair", ADJOINTS)
def test_the_adjoint_is_that_of_the_lossy_sum(algorithm, repair):
    """The sum's product with any y is the contributions' with y taken back, also through padded blocks."""
    generator = torch.Generator().manual_seed(0)
    x_RN, y_N = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 93), (93,)))
    network = bernoulli(0.3, wire=ltp.Wire(elements=3))
    comm = CommConfig.named(algorithm=algorithm, repair=repair, exact_adjoint=True)
    collective = LossyCollective(network, RankGroup(5), comm)
    begun = collective.begin_sum_(x_RN.clone())
    back_RN = y_N.repeat(5, 1)
    collective.adjoint_(back_RN, *begun.of_parts)
    assert begun.of_parts[1].any
    assert torch.isclose(begun.wait() @ y_N, (x_RN * back_RN).sum(), rtol=1e-11)
    assert not torch.isclose(begun.wait() @ y_N, x_RN.sum(0) @ y_N, rtol=1e-3), "control"


def test_memories_of_ranks_that_are_elsewhere_are_not_kept():
    """A change of layout hands over the memory of all ranks. What is not updated must not reach the next layout."""
    collective, _ = all_lost()
    collective.sum_(torch.ones(2, 4))
    ((_, kept),) = collective.memories_state()
    moved = [(size, hop, position + 2) for (size, hop, position), _ in kept]
    collective.load_memories_state(
        [[None, [*kept, *zip(moved, torch.ones(len(moved)), strict=True)]]], kept[0][1].device
    )
    collective.sum_(torch.ones(2, 4))
    assert [place for place, _ in collective.memories_state()[0][1]] == [place for place, _ in kept]


def test_what_stood_in_from_before_has_no_gradient():
    collective, _ = all_lost(exact_adjoint=True)
    begun = collective.begin_sum_(torch.ones(2, 4))
    back_RN = torch.ones(2, 4)
    collective.adjoint_(back_RN, *begun.of_parts)
    assert back_RN.tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]


def test_memories_of_another_size_are_not_taken_for_those_of_the_same_piece():
    """Of 12 and of 9 elements over four ranks all pieces are of 3, but the third hop is another link's."""
    collective, good = all_lost(size=4)
    good.sum_(torch.full((4, 12), 5.0))
    assert collective.sum_(torch.ones(4, 9)).tolist() == [1] * 9


def test_evaluation_remembers_a_step_of_its_own():
    """Stale values of training come from training, and each block of evaluation starts with none."""
    collective, good = all_lost(algorithm="switch")

    def recalled() -> list[float]:
        return collective.sum_(torch.ones(2, 4)).tolist()

    assert recalled() == [0] * 4
    good.sum_(torch.full((2, 4), 5.0))
    assert recalled() == [10] * 4
    for step in (1, 1, 2):
        with collective.network.evaluation(step), good.network.evaluation(step):
            assert recalled() == [0] * 4
            good.sum_(torch.full((2, 4), 7.0))
            assert recalled() == [14] * 4
    assert recalled() == [10] * 4


SUM_REPAIRS = [
    *("zero", "rescale", "rescale_counted", "local", "hadamard", "retransmit(1)"),
    *("fec(10, 8, depth=2)", "fec(6, 4, code='xor')"),
]
SUMS = [
    (algorithm, repair, reliable_gather)
    for algorithm in ALGORITHMS
    for repair in SUM_REPAIRS
    for reliable_gather in (True, False)
    if algorithm != "sender" or (repair != "local" and reliable_gather)
]


def whole_numbers(num_ranks: int, num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Messages whose sums are exact in any dtype, so that results can be compared bitwise."""
    generator = torch.Generator().manual_seed(num_ranks + num_elements)
    return torch.randint(-3, 4, (num_ranks, num_elements), generator=generator).to(dtype)


@pytest.mark.parametrize("num_ranks", [1, 4, 7])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce_equals_the_reference_in_every_dtype(algorithm, num_ranks):
    network, twin = bernoulli(0.2, seed=7), bernoulli(0.2, seed=7)
    for dtype in DTYPES:
        ranks = reference(twin, list(range(num_ranks)), algorithm, "zero", 1456 // dtype.itemsize)
        for num_elements in [0, 1, num_ranks - 1, 728 * num_ranks, 4321]:
            x_RN = whole_numbers(num_ranks, num_elements, dtype)
            before = x_RN.clone()
            result_RN = all_reduce(x_RN, network, algorithm=algorithm)
            assert result_RN.dtype == dtype
            assert result_RN.tolist() == ranks.all_reduce(x_RN.tolist(), False), (dtype, num_elements)
            assert torch.equal(x_RN, before), "the caller's messages were changed"
    lost = network.counters.summary("training")["lost"]
    assert lost > 5 or num_ranks == 1, "too few losses to prove anything"


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    how=st.sampled_from(SUMS),
    num_ranks=st.integers(1, 8),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    mtu_bytes=st.integers(52, 120),
    seed=st.integers(0, 2**32),
)
def test_all_reduce_equals_the_reference_under_bursts_that_span_messages(how, num_ranks, sizes, mtu_bytes, seed):
    process = ltp.GilbertElliott.from_loss_and_burst(loss_rate=0.3, mean_burst_packets=6)
    network, twin = (ltp.LossyNetwork(process, seed=seed, wire=ltp.Wire(mtu_bytes=mtu_bytes)) for _ in range(2))
    algorithm, repair, reliable_gather = how
    ranks = reference(twin, list(range(num_ranks)), algorithm, repair, (mtu_bytes - 44) // 8)
    for num_elements in sizes:
        x_RN = whole_numbers(num_ranks, num_elements, torch.float64)
        result_RN = all_reduce(x_RN, network, algorithm=algorithm, repair=repair, reliable_gather=reliable_gather)
        expected_RN = torch.tensor(ranks.all_reduce(x_RN.tolist(), not reliable_gather), dtype=torch.float64)
        torch.testing.assert_close(result_RN, expected_RN.view(x_RN.shape), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("algorithm", "repair", "reliable_gather"), SUMS)
def test_without_losses_is_bitwise_the_plain_sum(algorithm, repair, reliable_gather):
    for dtype in DTYPES:
        x_RN = torch.randn(5, 2000, generator=torch.Generator().manual_seed(0)).to(dtype)
        network = bernoulli(0.0)
        total = all_reduce(x_RN, network, algorithm=algorithm, repair=repair, reliable_gather=reliable_gather)
        assert torch.equal(total, x_RN.sum(0).expand(5, -1))
        assert network.counters.summary("training")["packets"] > 0


def test_messages_may_lie_in_any_order_and_each_rank_holds_a_result_of_its_own():
    x_NR = whole_numbers(500, 4, torch.float64)
    result_RN = all_reduce(x_NR.t(), bernoulli(0.2))
    assert torch.equal(result_RN, all_reduce(x_NR.t().contiguous(), bernoulli(0.2)))
    expected = result_RN[1].clone()
    result_RN[0] = 7
    assert torch.equal(result_RN[1], expected)


def test_within_reliable_nothing_is_lost_scaled_or_counted():
    network, untouched = bernoulli(0.3), bernoulli(0.3)
    x_RN = whole_numbers(4, 4000)
    with network.reliable():
        assert torch.equal(all_reduce(x_RN, network, repair="rescale")[0], x_RN.sum(0))
    assert network.state_dict() == untouched.state_dict()
    assert torch.equal(all_reduce(x_RN, network), all_reduce(x_RN, untouched))


@pytest.mark.parametrize(
    ("comm", "name"),
    [
        *(({"algorithm": "rings"}, "algorithm"), ({"repair": "fec(8)"}, "repair"), ({"repair": "stale"}, "repair")),
        *(({"repair": name}, "repair") for name in ("protect_first(1)", "protect_layers(1, 1) + rescale")),
        ({"sequence_parallel": True}, "sequence_parallel"),
    ],
)
def test_what_it_cannot_do_is_refused(comm, name):
    with pytest.raises(ValueError, match=name):
        all_reduce(torch.ones(2, 4), bernoulli(0.1), **comm)


X_RN = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("x", "network", "error", "name"),
    [
        *((x, bernoulli(0.1), ValueError, "x_RN") for x in (torch.ones(4), X_RN.long())),
        *((x, bernoulli(0.1), TypeError, "x_RN") for x in (X_RN.numpy(), None)),
        *((X_RN, network, TypeError, "network") for network in (0.1, ltp.Bernoulli(loss_rate=0.1))),
    ],
)
def test_what_is_no_stacked_floating_point_tensor_or_no_network_is_refused(x, network, error, name):
    with pytest.raises(error, match=f"^{name} "):
        all_reduce(x, network)


@pytest.mark.parametrize("comm", [{"repair": "rescale"}, {"control": "noise"}])
def test_a_recorded_link_without_losses_changes_nothing_however_others_lose(comm):
    """Chunk 0 crosses 1>0, which lost nothing in the recording; 0>1 lost two of five packets."""
    links = {(0, 1): ltp.Trace(lost=[1, 3], num_packets=5), (1, 0): ltp.Trace(lost=[], num_packets=5)}
    total_RN = all_reduce(torch.ones(2, 7280), ltp.LossyNetwork(links), **comm)
    assert (total_RN[:, :3640] == 2).all()
    assert not (total_RN[:, 3640:] == 2).all()
